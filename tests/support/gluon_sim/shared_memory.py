"""Shared memory: allocations that detect races by the exact bytes of a view, and the descriptors that kernels handle.

Memory is poison when allocated and again when a TMA load into it is issued. Reading what nobody has written is an
error. A generic access must be ordered after the conflicting ones before it; an access by the async proxy (TMA, wgmma)
to what a generic store has written needs ``fence_async_shared`` on the way, too.
"""

from __future__ import annotations

import math

import torch

from .clocks import Clock
from .errors import Race, SimError
from .state import agent, here, running, step
from .tensors import Tensor, value
from .values import GL_DTYPES, TORCH_DTYPES, unwrap

View = tuple[int, int, tuple[tuple[int, int], ...]]
"""What tells a view from another of its allocation: element size, offset, (stride, length) of every dimension."""


def poison(t: torch.Tensor) -> None:
    """NaN for floats, a recognisable pattern for integers."""
    if t.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        t.view(torch.uint8).fill_(0x7F)
    elif t.dtype.is_floating_point:
        t.fill_(math.nan)
    elif t.dtype != torch.bool:
        t.fill_(-0x55 if t.dtype.is_signed else 0xAB)


# Programs are alike: the same few views come back in all of them.
_bytes_of: dict[View, torch.Tensor] = {}
_relation: dict[tuple[View, View], tuple[bool, bool]] = {}


def bytes_of(view: View) -> torch.Tensor:
    """Sorted byte offsets."""
    if view not in _bytes_of:
        size, offset, dims = view
        ids = torch.tensor([offset])
        for stride, length in dims:
            ids = (ids[:, None] + torch.arange(length) * stride).reshape(-1)
        ids = ids.sort().values
        _bytes_of[view] = (ids[:, None] * size + torch.arange(size)).reshape(-1)
    return _bytes_of[view]


def relation(a: View, b: View) -> tuple[bool, bool]:
    """(whether the views share a byte, whether ``a`` covers all of ``b``)."""
    if (a, b) not in _relation:
        x, y = bytes_of(a), bytes_of(b)
        shared = 0
        if x[0] <= y[-1] and y[0] <= x[-1]:
            shared = int(torch.isin(x, y, assume_unique=True).sum())
        _relation[a, b] = shared > 0, shared == len(y)
        _relation[b, a] = shared > 0, shared == len(x)
    return _relation[a, b]


class Accesses:
    """The last write of a view, (clock id, time, by the async proxy, who), and the reads since then."""

    __slots__ = ("write", "reads")

    def __init__(self):
        self.write, self.reads = None, {}


class Allocation:
    """One shared-memory allocation of one program."""

    def __init__(self, name: str, data: torch.Tensor, program):
        self.name, self.data, self.program = name, data, program
        self.barriers = {}
        self._accesses: dict[View, Accesses] = {}
        self._overlapping: dict[View, list[View]] = {}

    def _views_at(self, view: View) -> list[View]:
        if view not in self._accesses:
            self._overlapping[view] = [view]
            for other in self._accesses:
                if relation(other, view)[0]:
                    self._overlapping[view].append(other)
                    self._overlapping[other].append(view)
            self._accesses[view] = Accesses()
        return self._overlapping[view]

    def access(self, data: torch.Tensor, clock: Clock, write: bool, async_proxy: bool, who: str) -> None:
        """Check an access to the view ``data`` against the earlier ones and remember it."""
        dims = tuple(sorted(zip(data.stride(), data.shape, strict=True)))
        view = (data.element_size(), data.storage_offset(), dims)
        others = self._views_at(view)

        def label() -> str:
            return f"{self.name}[bytes {int(bytes_of(view)[0])}..{int(bytes_of(view)[-1])}]"

        written = False
        for other in others:
            earlier = self._accesses[other]
            if earlier.write:
                written = True
                tid, time, was_async, by = earlier.write
                if not clock.knows(tid, time):
                    verb = "write" if write else "read"
                    raise Race(f"{verb} of {label()} by {who} is not ordered after the write by {by}")
                if async_proxy and not was_async and clock.async_shared.get(tid, 0) < time:
                    raise Race(
                        f"{who} accesses {label()} through the async proxy without fence_async_shared() after "
                        f"the write by {by}"
                    )
            if write:
                for tid, (time, by) in earlier.reads.items():
                    if not clock.knows(tid, time):
                        raise Race(f"write of {label()} by {who} is not ordered after the read by {by}")
        if not write and not written:
            raise SimError(f"{who} reads {label()}, which nothing has written")
        if write:
            for other in others:
                if relation(view, other)[1]:
                    self._accesses[other].reads.clear()
            self._accesses[view].write = (clock.tid, clock.now, async_proxy, who)
        else:
            self._accesses[view].reads[clock.tid] = (clock.now, who)


class Buffer:
    """A shared-memory descriptor: a view of an allocation."""

    def __init__(self, allocation: Allocation, view: torch.Tensor, layout=None):
        self.allocation, self.view, self.layout = allocation, view, layout

    @property
    def shape(self) -> list[int]:
        return list(self.view.shape)

    @property
    def dtype(self):
        return GL_DTYPES[self.view.dtype]

    @property
    def type(self):
        return self

    element_ty = dtype

    @property
    def rank(self) -> int:
        return self.view.dim()

    def _part(self, view: torch.Tensor, layout=None) -> Buffer:
        return Buffer(self.allocation, view, layout or self.layout)

    def index(self, index) -> Buffer:
        index = int(unwrap(index))
        if not 0 <= index < self.view.shape[0]:
            last = self.view.shape[0] - 1
            raise SimError(f"{here('index')}: index {index} of {self.allocation.name} is out of range 0..{last}")
        return self._part(self.view[index])

    def slice(self, start, length, dim=0) -> Buffer:
        start, length, dim = int(unwrap(start)), int(unwrap(length)), int(unwrap(dim))
        if not 0 <= start < start + length <= self.view.shape[dim]:
            size = self.view.shape[dim]
            raise SimError(
                f"{here('slice')}: slice {start}..{start + length} of {self.allocation.name} leaves 0..{size}"
            )
        return self._part(self.view.narrow(dim, start, length))

    def permute(self, order) -> Buffer:
        return self._part(self.view.permute([int(unwrap(o)) for o in order]))

    def reshape(self, shape) -> Buffer:
        return self._part(self.view.view([int(unwrap(s)) for s in shape]))

    def reinterpret(self, dtype, shape, layout) -> Buffer:
        shape, dtype = [int(unwrap(s)) for s in shape], TORCH_DTYPES[unwrap(dtype)]
        if not self.view.is_contiguous():
            raise SimError(f"{here('reinterpret')}: the buffer is not contiguous")
        start, size = self.view.storage_offset() * self.view.element_size(), math.prod(shape) * dtype.itemsize
        if size > self.view.numel() * self.view.element_size():
            raise SimError(f"{here('reinterpret')}: {shape} of {dtype} is larger than the buffer")
        raw = self.allocation.data.view(-1).view(torch.uint8)[start : start + size]
        return self._part(raw.view(dtype).view(shape), layout)

    _reinterpret = reinterpret  # its name before triton 3.9

    def _keep_alive(self):
        pass

    def load(self, layout=None):
        me = step()
        self.allocation.access(self.view, me.clock, False, False, here("load"))
        return value(self.view.clone())

    def store(self, x: Tensor) -> None:
        me = step()
        if list(x.shape) != self.shape or x.dtype != self.dtype:
            raise SimError(f"{here('store')}: {x.dtype}{x.shape} into a buffer of {self.dtype}{self.shape}")
        self.allocation.access(self.view, me.clock, True, False, here("store"))
        self.view.copy_(x.v)
        me.clock.tick()


def allocate_shared_memory(dtype, shape, layout=None, initial=None) -> Buffer:
    shape = [int(unwrap(s)) for s in unwrap(shape)]
    data = torch.zeros(shape, dtype=TORCH_DTYPES[unwrap(dtype)])
    poison(data)
    me, simulation = agent(), running()
    number = simulation.allocation_counts.get(me.program, 0)
    simulation.allocation_counts[me.program] = number + 1
    allocation = Allocation(f"{me.name.split('/')[0]} smem{number}{shape}", data, me.program)
    simulation.allocations.append(allocation)
    buffer = Buffer(allocation, data, unwrap(layout))
    if initial is not None:
        buffer.store(initial)
    return buffer
