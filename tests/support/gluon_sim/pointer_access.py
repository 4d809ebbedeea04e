"""Loads, stores and atomics through pointers, with release and acquire.

A scalar store is made by thread 0 of the partition, a tensor's by all threads. A scalar atomic with release semantics
is made by thread 0 too, which covers the other threads' work up to their last barrier only. Flags between ranks need
.sys scope on both sides. A flag that plain stores clear must be ordered with the polls of it.

A repeated read of one address with nothing in between is a spin loop: it sleeps until the address is written, so that a
lost flag becomes a ``Deadlock`` that names flag and value.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from .clocks import Sync
from .errors import Race, SimError
from .global_memory import Region, bits_of, from_bits
from .scheduler import Agent
from .state import Lazy, agent, here, running, step, wait
from .tensors import Tensor, value
from .values import Bit, Int32, Int64, Pointer, fits_int32, torch_dtype, unwrap

_SCALARS = {torch.int32: Int32, torch.int64: Int64}
"""Types whose bits, as numpy gives them, are the number itself."""


def as_torch(x) -> torch.Tensor:
    x = unwrap(x)
    return x.v if isinstance(x, Tensor) else torch.as_tensor(bool(x) if isinstance(x, Bit) else x)


def _lanes(p: Pointer, mask) -> tuple[int | np.ndarray, bool | np.ndarray]:
    """Addresses, and the mask of the same shape or one for all lanes."""
    mask = True if mask is None else unwrap(mask)
    if not isinstance(mask, (Tensor, torch.Tensor)):
        return p.address, bool(mask)
    active = as_torch(mask).to(torch.bool).numpy()
    if not active.ndim:
        return p.address, bool(active)
    return tuple(np.broadcast_arrays(p.address, active)) if active.shape != np.shape(p.address) else (p.address, active)


def span_of(addresses: np.ndarray, size: int) -> tuple[int, int]:
    """First byte of elements of ``size`` bytes, and the one past the last."""
    return int(np.minimum.reduce(addresses)), int(np.maximum.reduce(addresses)) + size


def access_one(p: Pointer, write: bool, who, kind: str = "plain", tid: int | None = None) -> tuple[Region, int]:
    """Check bounds, alignment and races of an access to one address: the storage and the element."""
    address, size, memory = int(p.address), p.size, running().memory
    region = memory.region(address, address + size, who)
    element, rest = divmod(address - region.start, size)
    if rest:
        raise SimError(f"{who}: misaligned access to {memory.label(address, region)}")
    memory.track(region, element, size, agent().clock, write, who, kind, tid)
    return region, element


def access(
    p: Pointer, active: np.ndarray, write: bool, who, kind: str = "plain", tid: int | None = None
) -> list[tuple]:
    """Check bounds, alignment and races of an access to the addresses ``active``, at least one.

    Returns:
        ``[(bits of the storage, indices into them, which of the lanes)]`` for each storage touched.
    """
    size, memory = p.size, running().memory
    first, high = span_of(active, size)
    parts, rest = [], active
    while True:
        region = memory.region(first, first + size, who)
        # Lanes beyond this storage are another's, or out of bounds, which the next round finds.
        inside = high <= region.end
        lanes = np.nonzero((active >= first) & (active < region.end))[0] if parts or not inside else slice(None)
        offset = active[lanes] - region.start
        if int(np.bitwise_or.reduce(offset)) & (size - 1):
            raise SimError(f"{who}: misaligned access to {memory.label(first, region)}")
        index = offset // size
        memory.track(region, index, size, agent().clock, write, who, kind, tid)
        parts.append((region.bits(size), index, lanes))
        if inside:
            return parts
        rest = rest[rest >= region.end]
        first = int(rest.min())


def _active(address: int | np.ndarray, mask: bool | np.ndarray) -> np.ndarray:
    """The addresses of the lanes that are on."""
    if isinstance(mask, np.ndarray):
        return address[mask]
    return np.reshape(address, -1) if mask else np.empty(0, np.int64)


# ---------------------------------------------------------------- flags


def _flag(address: int) -> Sync:
    return running().memory.flags.setdefault(int(address), Sync())


def _release(me: Agent, flag: Sync, scope: str, own: int | None) -> None:
    flag.ranks.add(me.program[0])
    if scope != "sys":
        flag.narrow_ranks.add(me.program[0])
    me.clock.release_to(flag, own)


def _acquire(me: Agent, flag: Sync, scope: str, warp0: bool = False) -> None:
    if (flag.narrow_ranks if scope == "sys" else flag.ranks) - {me.program[0]}:
        raise Race(f"{here('acquire')}: the flag comes from another rank, which needs .sys scope on both sides")
    (me.of_warp0 if warp0 else me.clock).acquire(flag)


def _spin(p: Pointer, seen) -> None:
    """The second fruitless read at one place sleeps until one of the values is written."""
    me, memory = agent(), running().memory
    addresses = np.unique(p.address).tolist() if isinstance(p.address, np.ndarray) else [p.address]
    values = [int(seen)] if type(seen) in (Int32, Int64) else as_torch(seen).reshape(-1).tolist()
    poll = (me.where(), addresses, values)
    if me.last_poll == poll:
        changes = {address: memory.watched.setdefault(address, 0) for address in addresses}

        def reason() -> str:
            places = " or ".join(memory.label(address) for address in addresses)
            return f"{p.type} at {places} to change from {values[0] if len(addresses) == 1 else values}"

        wait(lambda: any(memory.watched[address] != count for address, count in changes.items()), Lazy(reason))
    me.last_poll = poll


# ---------------------------------------------------------------- accesses


def _who(what: str) -> Lazy:
    return Lazy(lambda: here(what))


def _of_bits(bits: np.ndarray, dtype: torch.dtype):
    """One element as the kernel sees it."""
    return _SCALARS[dtype](bits) if dtype in _SCALARS else value(from_bits(bits.reshape(1), dtype)[0])


def load(pointer, mask=None, other=None, volatile=False, sem=None, scope="gpu", warp0=False, **_):
    """Lanes that are masked off are NaN or 0 unless ``other`` is given. ``warp0``: only the first warp acquires."""
    plain = not unwrap(volatile) and sem is None
    me, kind, who = step(is_poll=not plain), "plain" if plain else "atomic", _who("load")
    address, mask = _lanes(pointer, mask)
    dtype, every = torch_dtype(pointer.type), mask is True
    if every and not isinstance(address, np.ndarray):
        region, element = access_one(pointer, False, who, kind)
        result = _of_bits(region.bits(pointer.size)[element], dtype)
    else:
        active = _active(address, mask)
        parts = access(pointer, active, False, who, kind) if active.size else ()
        if len(parts) == 1:
            got = parts[0][0][parts[0][1]]
        elif parts:
            got = np.empty(active.size, parts[0][0].dtype)
            for bits, index, lanes in parts:
                got[lanes] = bits[index]
        if every:
            result = value(from_bits(got.reshape(address.shape), dtype))
        else:
            if other is None:
                other = math.nan if dtype.is_floating_point and dtype.itemsize > 1 else 0
            filled = as_torch(other).to(dtype).expand(np.shape(address)).clone()
            if parts:
                bits_of(filled)[mask] = got
                every = bool(mask.all())
            result = value(filled)
    if sem == "acquire":
        for one in np.reshape(pointer.address, -1).tolist():
            _acquire(me, _flag(one), scope, warp0)
    if not plain and (every or not np.shape(address)):
        _spin(pointer, result)
    return result


def store(pointer, value, mask=None, sem=None, scope="gpu", own=None, volatile=False, **_):
    """``own``: the partition's time up to which a release covers its work (None: all of it)."""
    me = step()
    plain = sem is None and not volatile
    kind, who = "plain" if plain else "atomic", _who("store")
    scalar = not isinstance(pointer.address, np.ndarray)
    tid = me.thread0 if scalar else None
    if scalar:
        # Later than all that has been released so far.
        me.clock.before[tid] += 1
    address, mask = _lanes(pointer, mask)
    dtype, size, memory = torch_dtype(pointer.type), pointer.size, running().memory
    if mask is True and not isinstance(address, np.ndarray):
        region, element = access_one(pointer, True, who, kind, tid)
        if not plain:
            _new_flag(me, address, sem, scope, own)
        new = unwrap(value)
        if not (isinstance(new, int) and dtype in _SCALARS and fits_int32(new)):
            new = bits_of(as_torch(new).to(dtype).expand(()))[()]
        region.bits(size)[element] = new
        memory.changed(address, address + size)
    elif (active := _active(address, mask)).size:
        parts = access(pointer, active, True, who, kind, tid)
        if not plain:
            for one in np.unique(active).tolist():
                _new_flag(me, one, sem, scope, own)
        new = bits_of(as_torch(value).to(dtype).expand(np.shape(address)))
        new = new[mask] if isinstance(mask, np.ndarray) else new.reshape(-1)
        for bits, index, lanes in parts:
            bits[index] = new[lanes]
        memory.changed(*span_of(active, size))
    if not scalar:
        me.clock.tick()


def _new_flag(me: Agent, address: int, sem: str | None, scope: str, own: int | None) -> None:
    """A store to a flag. A relaxed one heads no release sequence."""
    running().memory.flags[address] = flag = Sync()
    if sem == "release":
        _release(me, flag, scope, own)


def _atomic(update: Callable, operands: int = 1) -> Callable:
    """Model of an atomic: ``update(old, *operands)`` is the new value."""

    def model(pointer, *args, mask=None, sem=None, scope=None, by_thread0=True):
        me = step(is_poll=True)
        values, rest = args[:operands], args[operands:]
        address, mask = _lanes(pointer, rest[0] if rest else mask)
        sem, scope = unwrap(sem) or "acq_rel", unwrap(scope) or "gpu"
        dtype, shape, memory = torch_dtype(pointer.type), np.shape(address), running().memory
        result = torch.zeros(shape, dtype=dtype)
        active = _active(address, mask)
        parts = access(pointer, active, True, _who("atomic"), "atomic") if active.size else ()
        operands_of_lanes = [as_torch(x).to(dtype).expand(shape).reshape(-1) for x in values] if parts else ()
        if isinstance(mask, np.ndarray):
            on = torch.from_numpy(mask.copy())
            operands_of_lanes = [x[on.reshape(-1)] for x in operands_of_lanes]
        got = torch.zeros(active.size, dtype=dtype)
        for bits, index, lanes in parts:
            mine = [x[lanes] for x in operands_of_lanes]
            vector, old = from_bits(bits, dtype), from_bits(bits[index], dtype)
            if len(index) > 1 and len(np.unique(index)) < len(index):
                # Lanes at one element take turns.
                for lane, i in enumerate(index.tolist()):
                    old[lane] = vector[i]
                    vector[i] = update(vector[i], *(x[lane] for x in mine))
                memory.changed(*span_of(active, pointer.size))
            else:
                new = update(old, *mine)
                if not torch.equal(old, new):
                    bits[index] = bits_of(new)
                    memory.changed(*span_of(active, pointer.size))
            got[lanes] = old
        if parts:
            if isinstance(mask, np.ndarray):
                result[on] = got
            else:
                result = got.reshape(shape)
            # Threads without a lane are covered up to the last barrier only.
            few = active.size < 32 * me.warps
            own = me.barrier_time if by_thread0 and few else None
            for one in active.tolist():
                if sem in ("release", "acq_rel"):
                    _release(me, _flag(one), scope, own)
                if sem in ("acquire", "acq_rel"):
                    _acquire(me, _flag(one), scope)
        result = value(result)
        if not shape:
            _spin(pointer, result)
        return result

    return model


ATOMICS = dict(
    atomic_add=_atomic(lambda old, x: old + x),
    atomic_max=_atomic(torch.maximum),
    atomic_min=_atomic(torch.minimum),
    atomic_or=_atomic(torch.bitwise_or),
    atomic_and=_atomic(torch.bitwise_and),
    atomic_xor=_atomic(torch.bitwise_xor),
    atomic_xchg=_atomic(lambda old, x: x),
    atomic_cas=_atomic(lambda old, compare, x: torch.where(old == compare, x, old), operands=2),
)
