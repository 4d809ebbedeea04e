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

import torch

from .clocks import Sync
from .errors import Race, SimError, Unsupported
from .scheduler import Agent
from .state import Lazy, agent, here, running, step, wait
from .tensors import Tensor
from .values import TORCH_DTYPES, Bit, Pointer, unwrap, value


def as_torch(x) -> torch.Tensor:
    x = unwrap(x)
    return x.v if isinstance(x, Tensor) else torch.as_tensor(bool(x) if isinstance(x, Bit) else x)


def _lanes(p: Pointer, mask) -> tuple[torch.Tensor, torch.Tensor]:
    """Addresses and mask of one shape."""
    address = p.address if isinstance(p.address, torch.Tensor) else torch.tensor(p.address)
    active = torch.as_tensor(True) if mask is None else as_torch(mask).to(torch.bool)
    return torch.broadcast_tensors(address, active)


def access(p: Pointer, mask, write: bool, who: str, kind: str = "plain", tid: int | None = None):
    """Check bounds, alignment and races.

    Returns:
        ``[(vector, indices into it, which of the active lanes)]`` for each storage touched, the mask, bytes spanned.
    """
    address, mask = _lanes(p, mask)
    active = address[mask] if address.dim() else address.reshape(1)[: int(mask)]
    if active.numel() == 0:
        return (), mask, (0, 0)
    low, high = int(active.min()), int(active.max()) + p.size
    parts, rest, memory = [], active, running().memory
    while rest.numel():
        first = int(rest.min())
        region = memory.region(first, first + p.size, who)
        # Lanes beyond this storage are another's, or out of bounds, which the next round finds.
        inside = high <= region.end
        lanes = torch.nonzero((active >= first) & (active < region.end))[:, 0] if parts or not inside else slice(None)
        rest = rest[:0] if inside else rest[rest >= region.end]
        offset = active[lanes] - region.start
        if (offset % p.size).any():
            raise SimError(f"{who}: misaligned access to {memory.label(first, region)}")
        index = offset // p.size
        memory.track(region, index, p.size, agent().clock, write, who, kind, tid)
        parts.append((region.as_type(TORCH_DTYPES[p.type]), index, lanes))
    return parts, mask, (low, high)


# ---------------------------------------------------------------- flags


def _flag(address: int) -> Sync:
    return running().memory.flags.setdefault(int(address), Sync())


def _release(me: Agent, flag: Sync, scope: str, own: int | None) -> None:
    flag.ranks.add(me.program[0])
    if scope != "sys":
        flag.narrow_ranks.add(me.program[0])
    me.clock.release_to(flag, own)


def _acquire(me: Agent, flag: Sync, scope: str) -> None:
    if (flag.narrow_ranks if scope == "sys" else flag.ranks) - {me.program[0]}:
        raise Race(f"{here('acquire')}: the flag comes from another rank, which needs .sys scope on both sides")
    me.clock.acquire(flag)


def _spin(p: Pointer, seen) -> None:
    """The second fruitless read at one place sleeps until one of the values is written."""
    me, memory = agent(), running().memory
    addresses = torch.as_tensor(p.address).reshape(-1).unique().tolist()
    values = as_torch(seen).reshape(-1).tolist()
    poll = (me.where(), addresses, values)
    if me.last_poll == poll:
        changes = {address: memory.watched.setdefault(address, 0) for address in addresses}

        def reason() -> str:
            places = " or ".join(memory.label(address) for address in addresses)
            return f"{p.type} at {places} to change from {values[0] if len(addresses) == 1 else values}"

        wait(lambda: any(memory.watched[address] != count for address, count in changes.items()), Lazy(reason))
    me.last_poll = poll


# ---------------------------------------------------------------- accesses


def load(pointer, mask=None, other=None, volatile=False, sem=None, scope="gpu", **_):
    """Lanes that are masked off are NaN or 0 unless ``other`` is given."""
    plain = not unwrap(volatile) and sem is None
    me = step(is_poll=not plain)
    parts, active, _ = access(pointer, mask, False, here("load"), "plain" if plain else "atomic")
    dtype = TORCH_DTYPES[pointer.type]
    if other is None:
        other = math.nan if dtype.is_floating_point and dtype.itemsize > 1 else 0
    result = as_torch(other).to(dtype).expand(active.shape).clone()
    if parts:
        got = torch.empty(sum(len(index) for _, index, _ in parts), dtype=dtype)
        for vector, index, lanes in parts:
            got[lanes] = vector[index]
        if active.dim():
            result[active] = got
        else:
            result = got[0]
    if sem == "acquire":
        for address in torch.as_tensor(pointer.address).reshape(-1).tolist():
            _acquire(me, _flag(address), scope)
    result = value(result)
    if not plain and (not active.dim() or bool(active.all())):
        _spin(pointer, result)
    return result


def store(pointer, value, mask=None, sem=None, scope="gpu", own=None, volatile=False, **_):
    """``own``: the partition's time up to which a release covers its work (None: all of it)."""
    me = step()
    plain = sem is None and not volatile
    scalar = not pointer.shape
    tid = me.thread0 if scalar else None
    if scalar:
        # Later than all that has been released so far.
        me.clock.before[tid] += 1
    parts, active, span = access(pointer, mask, True, here("store"), "plain" if plain else "atomic", tid)
    if parts:
        if not plain:
            addresses = _lanes(pointer, None)[0].expand(active.shape)
            for address in addresses[active].reshape(-1).unique().tolist() if active.dim() else [span[0]]:
                # A relaxed store heads no release sequence.
                running().memory.flags[address] = flag = Sync()
                if sem == "release":
                    _release(me, flag, scope, own)
        new = as_torch(value).to(parts[0][0].dtype).expand(active.shape)
        new = new[active] if active.dim() else new.reshape(1)
        for vector, index, lanes in parts:
            vector[index] = new[lanes]
        running().memory.changed(*span)
    if not scalar:
        me.clock.tick()


def _atomic(update: Callable, operands: int = 1) -> Callable:
    """Model of an atomic: ``update(old, *operands)`` is the new value."""

    def model(pointer, *args, mask=None, sem=None, scope=None, by_thread0=True):
        me = step(is_poll=True)
        values, rest = args[:operands], args[operands:]
        mask = rest[0] if rest else mask
        sem, scope = unwrap(sem) or "acq_rel", unwrap(scope) or "gpu"
        parts, active, span = access(pointer, mask, True, here("atomic"), "atomic")
        result = torch.zeros(active.shape, dtype=TORCH_DTYPES[pointer.type])
        if len(parts) > 1:
            raise Unsupported("gluon_sim has no model of one atomic on several tensors")
        for vector, index, _ in parts:
            operands_of_lanes = [as_torch(x).to(vector.dtype).expand(active.shape) for x in values]
            operands_of_lanes = [x[active] if active.dim() else x.reshape(1) for x in operands_of_lanes]
            old = vector[index]
            if len(index) > 1 and len(index.unique()) < len(index):
                # Lanes at one element take turns.
                for lane, i in enumerate(index.tolist()):
                    old[lane] = vector[i]
                    vector[i] = update(vector[i], *(x[lane] for x in operands_of_lanes))
                running().memory.changed(*span)
            else:
                new = update(old, *operands_of_lanes)
                if not torch.equal(old, new):
                    vector[index] = new
                    running().memory.changed(*span)
            if active.dim():
                result[active] = old
            else:
                result = old[0]
            own = me.barrier_time if by_thread0 and not active.dim() else None
            if sem == "relaxed":
                continue
            for address in _lanes(pointer, None)[0].expand(active.shape)[active].reshape(-1).tolist():
                if sem in ("release", "acq_rel"):
                    _release(me, _flag(address), scope, own)
                if sem in ("acquire", "acq_rel"):
                    _acquire(me, _flag(address), scope)
        result = value(result)
        if not active.dim():
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
