"""TMA copies of tiles, and wgmma: operations of engines that run at any later time.

A load completes on an mbarrier with the bytes of the whole box, also where the box leaves the tensor: those elements
are zero. A store, or an addition, is two operations, the read of shared memory and the write of global memory, which
leaves out what is outside of the tensor. ``store_wait`` waits for the reads only, unless told otherwise; a partition
must have waited for the reads of its stores when it ends.
"""

from __future__ import annotations

import math
import types
from typing import Any

import numpy as np

from .barriers import ready_barrier
from .errors import SimError, Unsupported
from .global_memory import Box, Elements, Region, assign, bits_of, from_bits, places_of, select
from .shared_memory import Buffer, poison
from .state import here, running, step, wait
from .values import unwrap


class Descriptor:
    """A tensor descriptor, made on the host or on the device."""

    def __init__(self, address, dtype, shape, strides, block_shape, layout, padding="zero"):
        self.address, self.dtype, self.shape, self.strides = address, dtype, list(shape), list(strides)
        self.block_shape, self.layout = [int(b) for b in block_shape], layout
        self.size = dtype.primitive_bitwidth // 8
        self.block_type = types.SimpleNamespace(shape=self.block_shape, element_ty=dtype)
        self.nbytes_per_cta = math.prod(self.block_shape) * self.size
        if padding != "zero":
            raise Unsupported(f"gluon_sim has no model of TMA padding {padding!r}")

    @property
    def rank(self) -> int:
        return len(self.shape)

    def check(self, buffer: Buffer, coordinates: list[int], who: str) -> None:
        """Shapes, swizzle and alignment; the last ones are silent errors or 'illegal instruction' on the GPU."""
        if buffer.shape != self.block_shape or buffer.dtype != self.dtype:
            raise SimError(f"{who}: box {self.dtype}{self.block_shape}, buffer {buffer.dtype}{buffer.shape}")
        if len(coordinates) != self.rank:
            raise SimError(f"{who}: {len(coordinates)} coordinates for a tensor of rank {self.rank}")
        for field in ("swizzle_byte_width", "element_bitwidth", "transposed", "fp4_padded"):
            mine, other = getattr(unwrap(self.layout), field, None), getattr(unwrap(buffer.layout), field, None)
            if mine is not None and other is not None and mine != other:
                raise SimError(f"{who}: {field} is {other} in the buffer and {mine} in the descriptor")
        if coordinates[-1] * self.size % 16:
            raise SimError(f"{who}: the box starts at {coordinates[-1]}, not at a multiple of 16 bytes")
        if buffer.view.storage_offset() * self.size % 128:
            raise SimError(
                f"{who}: the buffer starts at byte {buffer.view.storage_offset() * self.size}, not at a multiple of 128"
            )

    def elements(self, coordinates: list[int], who: str) -> tuple[Region | None, Elements, Any]:
        """The region, its elements inside the tensor, and where in the box they are: ``...`` stands for all of it.

        The region is None if nothing is inside.
        """
        shape, strides = tuple(self.block_shape), tuple(map(int, self.strides))
        sizes = list(map(int, self.shape))
        first, inside = sum(c * s for c, s in zip(coordinates, strides, strict=True)), ...
        if all(0 <= c and c + b <= n for c, b, n in zip(coordinates, shape, sizes, strict=True)):
            low, high = first, first + sum((b - 1) * s for b, s in zip(shape, strides, strict=True))
        else:
            places = first + places_of(shape, strides)
            inside = _inside(coordinates, shape, sizes)
            places = places[inside]
            if not places.size:
                return None, places, inside
            low, high = int(places.min()), int(places.max())
        size = self.size
        region = running().memory.region(self.address + low * size, self.address + (high + 1) * size, who)
        start = (self.address - region.start) // size
        return region, Box(start + first, shape, strides) if inside is ... else start + places, inside


def _inside(coordinates: list[int], shape: tuple[int, ...], sizes: list[int]) -> np.ndarray:
    """Which of a box's elements the tensor has."""
    inside = np.ones(shape, np.bool_)
    for dim, (start, length, size) in enumerate(zip(coordinates, shape, sizes, strict=True)):
        at = start + np.arange(length)
        inside &= ((at >= 0) & (at < size)).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return inside


class PendingStore:
    """A TMA store that has not been waited for."""

    def __init__(self, read, read_clock, write, write_clock):
        self.stages = (read, read_clock), (write, write_clock)
        self.read_waited_for = False


def _store(tensor_desc: Descriptor, coord, src: Buffer, add: bool) -> None:
    """Starts a store, or the addition of each element to global memory, rounded to its type."""
    me = step()
    coordinates = [int(unwrap(c)) for c in coord]
    who = here(f"TMA {'add' if add else 'store'} {coordinates}")
    tensor_desc.check(src, coordinates, who)
    if min(coordinates) < 0:
        # Seen on H200 for additions. Past the end nothing is written.
        raise SimError(f"{who}: an illegal instruction where a coordinate is negative")
    read_clock, write_clock, box = me.lane(), me.lane(), []

    def read():
        src.allocation.access(src.view, read_clock, False, True, who)
        box.append(src.view.clone())

    def write():
        region, elements, inside = tensor_desc.elements(coordinates, who)
        if region is None:
            return
        memory, size = running().memory, tensor_desc.size
        kind = "atomic" if add else "plain"
        memory.track(region, elements, size, write_clock, True, who, kind, engine_of=me.program)
        bits = region.bits(size)
        new = bits_of(box[0])[inside]
        if add:
            old = from_bits(np.array(select(bits, elements)), src.view.dtype)
            new = bits_of(old + from_bits(new, src.view.dtype))
        assign(bits, elements, new)
        memory.changed(*region.span(elements, size))

    reading = running().scheduler.event(who + " read", read)
    writing = running().scheduler.event(who + " write", write, [reading])
    me.stores.append(PendingStore(reading, read_clock, writing, write_clock))


class TmaModule:
    """Stands for the module ``tma``."""

    tensor_descriptor = Descriptor

    @staticmethod
    def make_tensor_descriptor(base, shape, strides, block_shape, layout, padding_option="zero"):
        shape, strides, block = ([int(unwrap(n)) for n in numbers] for numbers in (shape, strides, block_shape))
        return Descriptor(base.address, base.type, shape, strides, block, unwrap(layout), padding_option)

    @staticmethod
    def async_load(tensor_desc, coord, barrier, result, pred=True):
        me = step()
        if not unwrap(pred):
            return
        coordinates = [int(unwrap(c)) for c in coord]
        mbarrier, who = ready_barrier(barrier, "TMA load"), here(f"TMA load {coordinates}")
        tensor_desc.check(result, coordinates, who)
        lane = me.lane()
        poison(result.view)

        def fire():
            result.allocation.access(result.view, lane, True, True, who)
            region, elements, inside = tensor_desc.elements(coordinates, who)
            box = bits_of(result.view)
            if inside is not ...:
                box[...] = 0
            if region is not None:
                running().memory.track(region, elements, tensor_desc.size, lane, False, who, engine_of=me.program)
                box[inside] = select(region.bits(tensor_desc.size), elements)
            lane.release_to(mbarrier.arriving)
            mbarrier.bytes -= tensor_desc.nbytes_per_cta
            mbarrier.update()

        running().scheduler.event(who, fire)

    @staticmethod
    def async_store(tensor_desc, coord, src):
        _store(tensor_desc, coord, src, add=False)

    @staticmethod
    def async_atomic_add(tensor_desc, coord, src):
        _store(tensor_desc, coord, src, add=True)

    # Their names before triton 3.8.
    async_copy_global_to_shared, async_copy_shared_to_global = async_load, async_store

    @staticmethod
    def store_wait(pendings=0, read_only=True):
        """``read_only``: the shared memory may be used again, but the global writes may still be under way."""
        me, kept, stages = step(), int(unwrap(pendings)), 1 if unwrap(read_only) else 2
        old = me.stores[: len(me.stores) - kept] if kept else list(me.stores)
        operations = [operation for store in old for operation in store.stages[:stages]]
        wait(lambda: all(event.done for event, _ in operations), f"TMA store_wait({kept})")
        for store in old:
            store.read_waited_for = True
        for _, clock in operations:
            me.clock.acquire(clock)
        if stages == 2:
            me.stores = me.stores[len(old) :]
