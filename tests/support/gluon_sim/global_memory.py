"""Global memory: the storages of torch tensors, with bounds checks and races detected element by element.

Of every element the last write, read, atomic write and atomic read are kept; which of them an access must be ordered
after is ``MUST_FOLLOW``. Only the last reader is kept, so a write that is not ordered after an earlier one can be
missed. A TMA access to what a plain store, or TMA of another program, has written needs a ``fence.proxy.async`` on the
way, on either side.

Addresses, logs and bits of elements are numpy's, which is several times as fast as torch for small arrays.
"""

from __future__ import annotations

import bisect
import functools
from typing import NamedTuple

import numpy as np
import torch

from .clocks import Clock, Sync
from .errors import Race, SimError
from .shared_memory import poison

MUST_FOLLOW = {
    ("plain", "read"): ("write", "atomic write"),
    ("plain", "write"): ("write", "read", "atomic write", "atomic read"),
    ("atomic", "read"): ("write",),
    ("atomic", "write"): ("write", "read"),
}

_INTEGERS = {
    1: (np.uint8, torch.uint8),
    2: (np.int16, torch.int16),
    4: (np.int32, torch.int32),
    8: (np.int64, torch.int64),
}


def bits_of(t: torch.Tensor) -> np.ndarray:
    """The bits of the elements, as integers on the same memory."""
    return t.view(_INTEGERS[t.element_size()][1]).numpy()


def from_bits(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The elements with these bits, on the same memory."""
    return torch.from_numpy(bits).view(dtype)


class Box(NamedTuple):
    """Elements of a storage by their first, and the lengths and strides of the dimensions."""

    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, vector: np.ndarray) -> np.ndarray:
        """These elements of ``vector``, on the same memory."""
        size = vector.itemsize
        return np.ndarray(self.shape, vector.dtype, vector, self.first * size, [size * s for s in self.strides])

    def places(self) -> np.ndarray:
        """The elements' places in the storage."""
        return self.first + places_of(self.shape, self.strides)


@functools.cache
def places_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Places of a box's elements relative to the first."""
    places = np.zeros((), np.int64)
    for length, stride in zip(shape, strides, strict=True):
        places = np.add.outer(places, np.arange(length) * stride)
    return places


Elements = int | np.ndarray | Box
"""Which elements of a storage: one, those at the places of an array, or those of a box."""


def select(vector: np.ndarray, elements: Elements) -> np.ndarray:
    """``elements`` of ``vector``; a box's are on the same memory."""
    return elements.of(vector) if isinstance(elements, Box) else vector[elements]


def assign(vector: np.ndarray, elements: Elements, new) -> None:
    """Change ``elements`` of ``vector`` to ``new``."""
    if isinstance(elements, Box):
        elements.of(vector)[...] = new
    else:
        vector[elements] = new


class Region:
    """The storage of a tensor.

    Attributes:
        grain: bytes of an element, the unit of race detection.
        log: kind of access -> clock id << 32 | time of the last one, per element.
        undefined: elements that nobody has written since ``Memory.undefine``, or None.
    """

    def __init__(self, t: torch.Tensor, name: str, grain: int | None = None):
        storage = t.untyped_storage()
        self.start, self.end, self.name = storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name
        self.bytes = torch.tensor([], dtype=torch.uint8).set_(storage)
        self.grain = grain or t.element_size()
        self.log: dict[str, np.ndarray] = {}
        self.undefined = None
        self._bits = {}

    def bits(self, size: int) -> np.ndarray:
        """The whole storage as a vector of integers of ``size`` bytes."""
        if size not in self._bits:
            whole = len(self.bytes) // size * size
            self._bits[size] = self.bytes[:whole].numpy().view(_INTEGERS[size][0])
        return self._bits[size]

    def new(self, dtype: type) -> np.ndarray:
        """Zeros, one for each element."""
        return np.zeros((self.end - self.start + self.grain - 1) // self.grain, dtype)

    def span(self, elements: np.ndarray | Box, size: int) -> tuple[int, int]:
        """First address of ``elements`` of ``size`` bytes, and the one past the last."""
        if isinstance(elements, Box):
            first = elements.first
            last = first + sum((n - 1) * s for n, s in zip(elements.shape, elements.strides, strict=True))
        else:
            first, last = int(elements.min()), int(elements.max())
        return self.start + first * size, self.start + (last + 1) * size

    def in_grains(self, elements: Elements, size: int) -> Elements:
        """Elements of ``size`` bytes in units of the grain."""
        if size == self.grain:
            return elements
        if isinstance(elements, Box):
            elements = elements.places()
        if size < self.grain:
            return elements * size // self.grain
        ratio = size // self.grain
        return (np.reshape(elements, (-1, 1)) * ratio + np.arange(ratio)).reshape(-1)


class Memory:
    """All registered storages.

    Attributes:
        labels: names of parts of a storage for the reports, (start address, end address, name, element size).
        flags: address -> clock of the last release at it.
        watched: address that a spin loop sleeps on -> number of changes.
    """

    def __init__(self, scheduler, race_check: bool = True):
        self.scheduler, self.race_check = scheduler, race_check
        self.labels: list[tuple[int, int, str, int]] = []
        self.flags: dict[int, Sync] = {}
        self.watched: dict[int, int] = {}
        self._regions, self._starts = [], []

    def register(self, t: torch.Tensor, name: str, grain: int | None = None) -> None:
        """Let kernels access the storage of ``t``. The first name of a storage stays."""
        start = t.untyped_storage().data_ptr()
        i = bisect.bisect_right(self._starts, start) - 1
        if t.numel() == 0 or (i >= 0 and self._starts[i] == start):
            return
        self._starts.insert(i + 1, start)
        self._regions.insert(i + 1, Region(t, name, grain))

    def region(self, low: int, high: int, who) -> Region:
        """The storage that holds bytes ``low`` to ``high``."""
        i = bisect.bisect_right(self._starts, low) - 1
        if i < 0 or high > self._regions[i].end:
            near = ""
            if i >= 0:
                near = f"; nearest tensor: {self._regions[i].name} ends {high - self._regions[i].end} bytes before"
            raise SimError(f"illegal global memory access [{low:#x}, {high:#x}) by {who}{near}")
        return self._regions[i]

    def changed(self, low: int, high: int) -> None:
        """Wake the spin loops on bytes ``low`` to ``high``."""
        for address in self.watched:
            if low <= address < high:
                self.watched[address] += 1

    def undefine(self, t: torch.Tensor, strict: bool) -> None:
        """The contents of ``t`` mean nothing from here on: poison. ``strict``: reading before a write is an error."""
        poison(t)
        if strict and t.numel():
            size = t.numel() * t.element_size()
            region = self.region(t.data_ptr(), t.data_ptr() + size, "undefine")
            if region.undefined is None:
                region.undefined = region.new(np.bool_)
            first = (t.data_ptr() - region.start) // region.grain
            region.undefined[first : first + size // region.grain] = True

    def label(self, address: int, region: Region | None = None) -> str:
        """Name and element."""
        for low, high, name, size in self.labels:
            if low <= address < high:
                return f"{name}[{(address - low) // size}]"
        region = region or self.region(address, address + 1, "label")
        return f"{region.name}[{(address - region.start) // region.grain}]"

    def track(
        self,
        region: Region,
        elements: Elements,
        size: int,
        clock: Clock,
        write: bool,
        who,
        kind: str = "plain",
        tid: int | None = None,
        engine_of=None,
    ) -> None:
        """Check an access against the earlier ones and remember it.

        Args:
            elements: in units of ``size`` bytes.
            who: is made a text where there is something to report.
            kind: "plain" or "atomic".
            tid: clock id that accesses, if not the clock's own.
            engine_of: the program, for an access by the async proxy.
        """
        if not self.race_check:
            return
        elements = region.in_grains(elements, size)
        tid, verb = tid or clock.tid, "write" if write else "read"

        def label(hit: np.ndarray) -> str:
            places = elements.places() if isinstance(elements, Box) else elements
            place = int(np.reshape(places, -1)[np.reshape(hit, -1).argmax()])
            return "global " + self.label(region.start + place * region.grain, region)

        for earlier in MUST_FOLLOW[kind, verb]:
            if earlier not in region.log:
                continue
            log = select(region.log[earlier], elements)
            for packed in _different(log):
                other, time = packed >> 32, packed & 0xFFFFFFFF
                if not packed or other == tid:
                    continue
                if not clock.knows(other, time):
                    what = f"atomic {verb}" if kind == "atomic" else verb
                    raise Race(
                        f"{what} of {label(log == packed)} by {who} is not ordered after an earlier {earlier} by "
                        f"{self.scheduler.name_of(other, time)}"
                    )
                by_another_proxy = self.scheduler.engines.get(other) != engine_of
                unseen = clock.async_global.get(other, 0) < time
                if engine_of and by_another_proxy and unseen and earlier in ("write", "atomic write"):
                    raise Race(
                        f"{who} accesses {label(log == packed)} through the async proxy without a fence.proxy.async "
                        f"after the {earlier} by {self.scheduler.name_of(other, time)}"
                    )
        if region.undefined is not None:
            if write and kind == "plain":
                assign(region.undefined, elements, False)
            elif (undefined := select(region.undefined, elements)).any():
                raise SimError(f"{who} reads {label(undefined)}, which nothing has written in this call")
        name = f"atomic {verb}" if kind == "atomic" else verb
        if name not in region.log:
            region.log[name] = region.new(np.int64)
        assign(region.log[name], elements, tid << 32 | clock.before[tid])


def _different(log: np.ndarray | np.int64) -> list[int]:
    """The values of ``log`` in ascending order, each once."""
    if log.ndim == 0:
        return [int(log)]
    if log.size <= 64:
        return sorted(set(log.reshape(-1).tolist()))
    first = log.item(0)
    return [first] if np.logical_and.reduce(log == first, axis=None) else np.unique(log).tolist()
