"""TMA copies of tiles, and wgmma: operations of engines that run at any later time.

A load completes on an mbarrier with the bytes of the whole box, also where the box leaves the tensor: those elements
are zero. A store, or an addition, is two operations, the read of shared memory and the write of global memory, which
leaves out what is outside of the tensor. ``store_wait`` waits for the reads only, unless told otherwise; a partition
must have waited for the reads of its stores when it ends.
"""

from __future__ import annotations

import math
import types

import torch

from .barriers import ready_barrier
from .errors import SimError, Unsupported
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

    def elements(self, coordinates: list[int], who: str):
        """(region, its element indices inside the tensor, mask of the box); the region is None if nothing is inside."""
        index, inside = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool)
        for dim, (start, length, stride) in enumerate(zip(coordinates, self.block_shape, self.strides, strict=True)):
            at = (start + torch.arange(length)).reshape([-1 if d == dim else 1 for d in range(self.rank)])
            index, inside = index + at * int(stride), inside & (at >= 0) & (at < int(self.shape[dim]))
        inside = inside.expand(index.shape)
        index = index[inside]
        if not index.numel():
            return None, index, inside
        low, high = self.address + int(index.min()) * self.size, self.address + (int(index.max()) + 1) * self.size
        region = running().memory.region(low, high, who)
        return region, index + (self.address - region.start) // self.size, inside


class PendingStore:
    """A TMA store that has not been waited for."""

    def __init__(self, read, read_clock, write, write_clock):
        self.stages = (read, read_clock), (write, write_clock)
        self.read_waited_for = False


def _bits(t: torch.Tensor) -> torch.Tensor:
    """Bytes as such: torch cannot index 8-bit floats."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


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
        box.append(_bits(src.view.clone()))

    def write():
        region, index, inside = tensor_desc.elements(coordinates, who)
        if region is None:
            return
        memory, size = running().memory, tensor_desc.size
        kind = "atomic" if add else "plain"
        memory.track(region, index, size, write_clock, True, who, kind, engine_of=me.program)
        elements = region.as_type(box[0].dtype)
        elements[index] = elements[index] + box[0][inside] if add else box[0][inside]
        memory.changed(region.start + int(index.min()) * size, region.start + (int(index.max()) + 1) * size)

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
            region, index, inside = tensor_desc.elements(coordinates, who)
            box = _bits(torch.zeros(result.view.shape, dtype=result.view.dtype))
            if region is not None:
                running().memory.track(region, index, tensor_desc.size, lane, False, who, engine_of=me.program)
                box[inside] = region.as_type(box.dtype)[index]
            result.view.copy_(box.view(result.view.dtype))
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
