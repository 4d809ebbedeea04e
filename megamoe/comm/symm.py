"""``SymmetricBuffer``: the memory that the ranks of a group share for their exchange."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megamoe.comm import allocators
from megamoe.comm.allocators import ALLOCATORS, Allocation
from megamoe.comm.preflight import RankReport, describe_device, host_name, library_versions, preflight
from megamoe.errors import ExchangeError, check_choice, check_number, fail_type, fail_value
from megamoe.kernels import flag_words
from megamoe.plan import MemoryPlan

if TYPE_CHECKING:
    from megamoe.kernels.peer_rows import PeerMemory

DEFAULT_TIMEOUT = 60.0
"""Seconds. The first call of a kernel compiles it, which may take some on one rank more than on another."""

CHECK_EVERY = 16
"""Runs between two copies of the error words to the host."""

_WAITS = {
    flag_words.READY: "to bring its tokens to dispatch {} of this buffer; it has come to dispatch {}",
    flag_words.PULLED: "to come to its next call after dispatch {} of this buffer; it has left dispatch {} behind",
    flag_words.SCATTERED: "to bring its experts' results to combine {} of this buffer; it has come to combine {}",
    flag_words.REDUCED: "to come to its next call after combine {} of this buffer; it has left combine {} behind",
    flag_words.BARRIER: "to come to barrier {} of this buffer; it has come to barrier {}",
}

_PARTS = {
    flag_words.PULLED_ROWS: "rows to be read",
    flag_words.FINISHED_TILES: "half tiles of GEMM 1",
    flag_words.CONSUMED_TILES: "tiles of GEMM 2",
}
"""What programs of a mega-kernel wait for from each other."""


class SymmetricBuffer:
    """One allocation on every rank of a group, reachable from all of them over NVLink.

    Made once, before any graph capture; all layers whose calls follow one another on a stream share it. Construction is
    a collective. It compares settings and reach first: if the ranks cannot share memory all of them raise, none hangs.

    Args:
        plan: sizes, from ``plan_memory``.
        group: the expert-parallel group, or None for one rank.
        device: this rank's; default: the current GPU.
        allocator: ``torch`` (``torch.distributed._symmetric_memory``) or ``nvshmem`` (NVSHMEM's symmetric heap).
        timeout: seconds that a kernel waits for another rank, before it gives up and ``check`` raises.

    Attributes:
        plan, group, rank, timeout: as given.
        nbytes: bytes allocated: the plan's total.
        attached: what calls on this buffer keep from one to the next, by name; forgotten when it closes.

    Raises:
        MegaMoEError: on all ranks: settings differ, a rank cannot reach another or lacks the allocator, or the group
            spans machines; on this one: an argument breaks a rule, or a graph is being captured.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | None = None,
        allocator: str = "torch",
        timeout: float = DEFAULT_TIMEOUT,
    ):
        if not isinstance(plan, MemoryPlan):
            fail_type("plan", type(plan).__name__, "must be a MemoryPlan", "Pass plan_memory(config, ep_size, tokens).")
        check_choice("allocator", allocator, ALLOCATORS)
        check_number("timeout", timeout, 0.0, exclusive=True)
        self._allocation: Allocation | None = None
        self.device = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            fail_value(
                "SymmetricBuffer",
                "a CUDA graph is being captured",
                "must exist before: its allocation is a collective that no graph can hold",
                "Build the layer, or call buffer_for(...), before the capture.",
            )
        self.plan, self.group, self.timeout = plan, group, timeout
        self.rank = 0 if group is None else dist.get_rank(group)
        world_size = 1 if group is None else dist.get_world_size(group)
        failure = allocators.missing_allocator(allocator, group)
        if world_size != plan.ep_size:
            failure = f"the plan is for {plan.ep_size} ranks, the group has {world_size}"
        device_id, unreachable = describe_device(self.device)
        settings = {
            **plan_settings(plan),
            "allocator": allocator,
            "timeout": timeout,
            **library_versions(),
        }
        preflight(RankReport(settings, host_name(), device_id, unreachable, failure), group)
        self._allocation = allocators.allocate(allocator, plan.total, self.device, group)
        base = self._allocation.addresses[self.rank]
        deltas = [(address - base) // 16 for address in self._allocation.addresses]
        self._deltas = torch.tensor(deltas, dtype=torch.int64, device=self.device)
        self.attached: dict[str, Any] = {}
        self._stream: torch.cuda.Stream | None = None
        self._runs = 0
        self._error_copy: tuple[torch.Tensor, torch.cuda.Event] | None = None

    @property
    def nbytes(self) -> int:
        return self._memory().numel()

    @property
    def closed(self) -> bool:
        return self._allocation is None

    def _memory(self) -> torch.Tensor:
        if self._allocation is None:
            fail_value("SymmetricBuffer", "closed", "must be open", "Build a new one: its memory has been given back.")
        return self._allocation.memory

    def region(self, name: str, nbytes: int | None = None) -> torch.Tensor:
        """uint8 view of a region of the plan, or of its first ``nbytes``."""
        region = self.plan[name]
        return self._memory()[region.offset : region.offset + (region.nbytes if nbytes is None else nbytes)]

    def lend(self, plan: MemoryPlan) -> PeerMemory:
        """The memory laid out for ``plan``, which must not need more than this buffer's in any region.

        Regions keep their places, so that calls of either plan leave the other's flags and waits as they are.

        Raises:
            MegaMoEError: the buffer is closed or too small.
        """
        from megamoe.kernels.peer_rows import peer_memory

        if not self.plan.covers(plan):
            fail_value(
                "plan",
                {region.name: region.nbytes for region in plan.regions},
                f"must not need more in any region than the buffer's {[r.nbytes for r in self.plan.regions]} bytes",
                "Plan the buffer for the larger layer, or build another.",
            )
        views = {region.name: self.region(region.name, region.nbytes) for region in plan.regions}
        return peer_memory(plan, views, self.rank, self._deltas, int(self.timeout * 1e9))

    def run(self, launches: Sequence[Callable[[], None]]) -> None:
        """Launches kernels that use the buffer, after those of the stream that used it before.

        Also looks, now and then and without waiting for the device, whether an earlier kernel has given up.

        Raises:
            MegaMoEError: the buffer is closed.
            ExchangeError: an earlier call has failed: see ``check``.
        """
        self._memory()
        with torch.cuda.device(self.device):
            capturing = torch.cuda.is_current_stream_capturing()
            if not capturing:
                # Replays of a graph are ordered by whoever replays it.
                stream = torch.cuda.current_stream()
                if self._stream is not None and self._stream != stream:
                    stream.wait_stream(self._stream)
                self._stream = stream
                self._look_at_errors()
            for launch in launches:
                launch()

    def _look_at_errors(self) -> None:
        if self._error_copy is not None and self._error_copy[1].query():
            words, _ = self._error_copy
            self._error_copy = None
            if words[0]:
                self.check()
        self._runs += 1
        if self._error_copy is None and self._runs % CHECK_EVERY == 0:
            error = self.region("error").view(torch.int64)
            words = torch.empty(error.shape, dtype=torch.int64, pin_memory=True)
            words.copy_(error, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._error_copy = words, event

    def check(self) -> None:
        """Raises if a kernel gave up waiting for another rank. Waits for the device.

        Raises:
            ExchangeError: who is missing, in which step. All further waits on this rank end at once until ``reset``.
        """
        phase, *detail = self.region("error").view(torch.int64).tolist()
        if phase:
            raise ExchangeError(self._explain(phase, *detail))

    def _explain(self, phase: int, first: int, second: int, third: int) -> str:
        if phase == flag_words.CAPACITY:
            return (
                f"dispatch on rank {self.rank}: {first} rows were routed to its experts, the pool has {second}. The "
                "rows beyond were lost. Raise capacity, or let dispatch read the exact size back."
            )
        if phase in _PARTS:
            return (
                f"the mega-kernel on rank {self.rank} waited {self.timeout} s for {second} {_PARTS[phase]} of block "
                f"{first}; {third} were there. Its programs wait for each other and must all run at once: another "
                "kernel held SMs. Launch it on fewer SMs, or nothing beside it. Results since then are void."
            )
        awaited = _WAITS[phase - 1].format(second, third)
        return (
            f"rank {self.rank} waited {self.timeout} s for rank {first} {awaited}. Every rank must make the same "
            "calls, also without tokens; a rank that raised or died makes the others fail here. Results since then "
            "are void."
        )

    def reset(self) -> None:
        """Forgets an error and all calls, on all ranks: a collective. No kernel may be using the buffer."""
        memory = self._memory()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.group is not None:
            dist.barrier(self.group)
        end = self.plan["error"].offset + self.plan["error"].nbytes
        memory[:end].zero_()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.group is not None:
            dist.barrier(self.group)

    def close(self) -> None:
        """Gives the memory back; later use raises. Call it on all ranks, once no kernel uses the buffer."""
        allocation, self._allocation = self._allocation, None
        if allocation is not None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.attached.clear()
            allocation.release()

    def __enter__(self) -> SymmetricBuffer:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


# ---------------------------------------------------------------- sharing


def plan_settings(plan: MemoryPlan) -> dict[str, Any]:
    """What ranks compare of their plans."""
    return dataclasses.asdict(dataclasses.replace(plan, regions=()))


@dataclasses.dataclass
class _Shared:
    buffer: SymmetricBuffer
    users: int


_shared: dict[tuple, list[_Shared]] = {}


def acquire_buffer(
    plan: MemoryPlan,
    group: dist.ProcessGroup | None,
    *,
    device: torch.device | None = None,
    allocator: str = "torch",
    timeout: float = DEFAULT_TIMEOUT,
) -> SymmetricBuffer:
    """A buffer of ``group`` that covers ``plan``: one that is there, or a new one. A collective: all ranks ask alike.

    Give it back with ``release_buffer``; the last user's release closes it.

    Raises:
        MegaMoEError: as ``SymmetricBuffer`` does.
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (None if group is None else group.group_name, str(device), allocator, timeout)
    entries = _shared.setdefault(key, [])
    found = next((i for i, shared in enumerate(entries) if shared.buffer.plan.covers(plan)), None)
    # All ranks find the same one, or all make one: else some would wait for the others in a construction.
    settings = {**plan_settings(plan), "buffer that is shared": found}
    preflight(RankReport(settings, host_name(), *describe_device(device)), group)
    if found is None:
        buffer = SymmetricBuffer(plan, group, device=device, allocator=allocator, timeout=timeout)
        entries.append(_Shared(buffer, 0))
        found = len(entries) - 1
    entries[found].users += 1
    return entries[found].buffer


def release_buffer(buffer: SymmetricBuffer) -> None:
    """Gives back what ``acquire_buffer`` returned."""
    for key, entries in list(_shared.items()):
        for shared in entries:
            if shared.buffer is buffer:
                shared.users -= 1
                if not shared.users:
                    entries.remove(shared)
                    buffer.close()
                if not entries:
                    del _shared[key]
                return
    fail_value("buffer", buffer, "must come from acquire_buffer, once for each release", "Release it only once.")
