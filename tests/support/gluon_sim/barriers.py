"""mbarriers, named barriers and the barrier of a partition's threads.

An mbarrier counts arrivals and outstanding bytes; its phase ends when both are zero, and a wait names a phase by its
parity, as in PTX. Arrivals release what the partition did before (Triton puts a barrier of the partition's threads in
front of the one thread that arrives), waits acquire it; ``expect`` is an arrival that adds bytes. Errors: more arrivals
than the count, use before init, bytes outstanding when the kernel ends, and under any schedule

- an ambiguous wait: it may start two phases early and would pass at once,
- an overrun: a phase may end before somebody has waited for the one before, who then blocks on the wrong parity.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from .clocks import Sync
from .errors import Race, SimError
from .shared_memory import Buffer, allocate_shared_memory
from .state import Lazy, agent, here, running, step, wait
from .values import unwrap


class MBarrier:
    """State of one mbarrier.

    Attributes:
        arriving: clock of the open phase; completed: of the phases that are over.
        ends: for each phase that is over, what happened before its end.
        waits: phase -> {clock id of a waiter: (its time, where)}.
    """

    def __init__(self, name: str):
        self.name, self.count, self.pending, self.bytes, self.phase = name, None, None, 0, 0
        self.arriving, self.completed = Sync(), Sync()
        self.ends: list[dict[int, int]] = []
        self.waits: dict[int, dict] = {}

    def arrive(self, arrivals: int) -> None:
        self.pending -= arrivals
        if self.pending < 0:
            raise SimError(f"{here('arrive')}: more arrivals than {self.name} expects ({self.count})")
        self.update()

    def update(self) -> None:
        """End the phase if nothing is outstanding."""
        if self.pending == 0 and self.bytes < 0:
            raise SimError(f"{self.name}: phase {self.phase} gets {-self.bytes} bytes more than expected")
        if self.pending or self.bytes:
            return
        self.phase += 1
        self.pending = self.count
        self.completed.acquire(self.arriving)
        self.ends.append(dict(self.completed.before))
        for tid, (time, who) in self.waits.pop(self.phase - 2, {}).items():
            if self.completed.before.get(tid, 0) < time:
                raise Race(
                    f"overrun: phase {self.phase - 1} of {self.name} may end before {who} has waited for phase "
                    f"{self.phase - 2}, which would then block"
                )

    def __str__(self) -> str:
        if not self.count:
            return f"{self.name}(not initialised)"
        arrived = self.count - self.pending
        return f"{self.name}(phase {self.phase} open: {arrived}/{self.count} arrivals, {self.bytes} bytes outstanding)"


def barrier_of(buffer: Buffer) -> MBarrier:
    """The barrier behind a view of an mbarrier allocation."""
    offset, barriers = buffer.view.storage_offset(), buffer.allocation.barriers
    if buffer.view.numel() != 1:
        raise SimError(f"{here('mbarrier')}: {buffer.allocation.name}: expected one barrier, got {buffer.shape}")
    if offset not in barriers:
        barriers[offset] = MBarrier(f"{buffer.allocation.name}[{offset}]")
    return barriers[offset]


def ready_barrier(buffer: Buffer, what: str) -> MBarrier:
    barrier = barrier_of(buffer)
    if barrier.count is None:
        raise SimError(f"{here(what)}: {barrier.name} is used before mbarrier.init")
    return barrier


class MBarrierModule:
    """Stands for the module ``mbarrier``."""

    MBarrierLayout = hopper.mbarrier.MBarrierLayout

    @staticmethod
    def allocate_mbarrier(batch=None, two_ctas=False):
        return allocate_shared_memory(gl.int64, [1] if batch is None else [unwrap(batch), 1])

    @staticmethod
    def init(mbarrier, count):
        barrier = barrier_of(mbarrier)
        barrier.count = barrier.pending = int(unwrap(count))
        if barrier.count < 1:
            raise SimError(f"{here('init')}: {barrier.name} has count {barrier.count}")

    @staticmethod
    def invalidate(mbarrier):
        barrier_of(mbarrier).count = None

    @staticmethod
    def expect(mbarrier, bytes, pred=True):
        me = step()
        if unwrap(pred):
            barrier = ready_barrier(mbarrier, "expect")
            barrier.bytes += int(unwrap(bytes))
            me.clock.release_to(barrier.arriving)
            barrier.arrive(1)

    @staticmethod
    def arrive(mbarrier, *, count=1, pred=True):
        me = step()
        if unwrap(pred):
            barrier = ready_barrier(mbarrier, "arrive")
            me.clock.release_to(barrier.arriving)
            barrier.arrive(int(unwrap(count)))

    @staticmethod
    def wait(mbarrier, phase, pred=True, deps=()):
        me = step()
        if not unwrap(pred):
            return
        barrier, parity = ready_barrier(mbarrier, "wait"), int(unwrap(phase))
        if parity not in (0, 1):
            raise SimError(f"{here('wait')}: parity {parity} of {barrier.name}")
        wait(lambda: (barrier.phase & 1) != parity, Lazy(lambda: f"parity {parity} of {barrier}"))
        # A parity names every other phase: the wait is safe only if we know, before it, that the last but one is over.
        over = barrier.phase - 1
        if over >= 1 and not all(me.clock.knows(*end) for end in barrier.ends[over - 1].items()):
            raise Race(
                f"{here('wait')}: ambiguous parity: {barrier.name} may still be in phase {over - 1} when this wait "
                f"for phase {over} starts, and would let it pass at once"
            )
        barrier.waits.setdefault(over, {})[me.clock.tid] = (me.clock.now, here("wait"))
        me.clock.acquire(barrier.completed)


class NamedBarrier:
    """State of bar.sync / bar.arrive with one id: arrivals are counted in threads."""

    def __init__(self, name: str):
        self.name, self.threads, self.arrived, self.phase, self.clock = name, 0, {}, 0, Sync()

    def __str__(self) -> str:
        return f"{self.name} (phase {self.phase}: {sum(self.arrived.values())}/{self.threads} threads)"


def named_barrier(sync: bool, ident: int, threads: int) -> None:
    """What the arrivals of a phase did before happens before what its bar.sync threads do after. No proxy fence."""
    me = step()
    name = f"named barrier {ident} of {me.name.split('/')[0]}"
    barrier = running().named_barriers.setdefault((me.program, ident), NamedBarrier(name))
    if barrier.arrived and barrier.threads != threads:
        raise SimError(f"{here('bar')}: {barrier} is used with {threads} threads")
    if me.name in barrier.arrived:
        raise SimError(f"{here('bar')}: arrives twice in one phase of {barrier}")
    barrier.threads, barrier.arrived[me.name], mine = threads, 32 * me.warps, barrier.phase
    me.clock.release_to(barrier.clock)
    if sum(barrier.arrived.values()) > threads:
        raise SimError(f"{here('bar')}: more than {threads} threads at {barrier}")
    if sum(barrier.arrived.values()) == threads:
        barrier.arrived, barrier.phase = {}, barrier.phase + 1
    if sync:
        wait(lambda: barrier.phase > mine, Lazy(lambda: str(barrier)))
        me.clock.acquire(barrier.clock)
        me.barrier_time = me.clock.now
        me.clock.tick()


def thread_barrier() -> None:
    """Barrier of the partition's threads: thread 0 may release what the others did, and they have what it acquired."""
    me = step()
    if me.of_warp0.before:
        me.clock.acquire(me.of_warp0)
        me.of_warp0 = Sync()
    me.barrier_time = me.clock.now
    me.clock.tick()


def fence_async_shared(cluster=False) -> None:
    """fence.proxy.async.shared::cta"""
    agent().clock.fence_proxy(global_memory=False)


def fence_async_all() -> None:
    """fence.proxy.async: shared and global memory."""
    agent().clock.fence_proxy(global_memory=True)
