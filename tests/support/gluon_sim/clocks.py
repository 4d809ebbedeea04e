"""Vector clocks: what happens before what, and which part of it the async proxy (TMA, wgmma) sees."""

from __future__ import annotations


def join(mine: dict[int, int], other: dict[int, int]) -> None:
    """Make ``mine`` the element-wise maximum of both."""
    if mine is other:
        return
    for tid, time in other.items():
        if mine.get(tid, 0) < time:
            mine[tid] = time


class Sync:
    """The clock that a barrier or a flag carries.

    Attributes:
        before: clock id -> its latest time that happens before us.
        async_shared: the part of ``before`` that the async proxy sees in shared memory.
        async_global: the part that it sees in global memory.
        ranks: who released it.
        narrow_ranks: who released it with a scope less than .sys.
    """

    def __init__(self):
        self.before, self.async_shared, self.async_global = {}, {}, {}
        self.ranks, self.narrow_ranks = set(), set()

    def acquire(self, other: Sync | Clock) -> None:
        """All that happens before ``other`` happens before us."""
        join(self.before, other.before)
        join(self.async_shared, other.async_shared)
        join(self.async_global, other.async_global)


class Clock:
    """The clock of something that acts: a partition, an operation of an engine, the host. Fields as in ``Sync``."""

    __slots__ = ("tid", "before", "async_shared", "async_global")

    def __init__(self, tid: int, base: Clock | None = None):
        self.tid = tid
        self.before = dict(base.before) if base else {}
        self.async_shared = dict(base.async_shared) if base else {}
        self.async_global = dict(base.async_global) if base else {}
        self.before[tid] = self.before.get(tid, 0) + 1

    acquire = Sync.acquire

    @property
    def now(self) -> int:
        return self.before[self.tid]

    def tick(self) -> None:
        """What follows is not covered by what has been published so far."""
        self.before[self.tid] += 1

    def knows(self, tid: int, time: int) -> bool:
        """Whether time ``time`` of clock ``tid`` happens before us."""
        return self.before.get(tid, 0) >= time

    def release_to(self, other: Sync, own: int | None = None) -> None:
        """Publish what we know. ``own``: how much of our own work is covered; a thread may not cover its siblings'."""
        mine = self.now
        self.before[self.tid] = mine if own is None else own
        other.acquire(self)
        self.before[self.tid] = mine + 1

    def fence_proxy(self, global_memory: bool) -> None:
        """fence.proxy.async: the async proxy sees what happens before us, in global memory only if asked."""
        self.async_shared.update(self.before)
        if global_memory:
            self.async_global.update(self.before)
