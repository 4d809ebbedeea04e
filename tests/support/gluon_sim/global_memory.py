"""Global memory: the storages of torch tensors, with bounds checks and races detected element by element.

Of every element the last write, read, atomic write and atomic read are kept; which of them an access must be ordered
after is ``MUST_FOLLOW``. Only the last reader is kept, so a write that is not ordered after an earlier one can be
missed. A TMA access to what a plain store, or TMA of another program, has written needs a ``fence.proxy.async`` on the
way, on either side.
"""

from __future__ import annotations

import bisect

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
        self.log: dict[str, torch.Tensor] = {}
        self.undefined = None
        self._views = {}

    def as_type(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole storage as a vector of ``dtype``."""
        if dtype not in self._views:
            whole = len(self.bytes) // dtype.itemsize * dtype.itemsize
            self._views[dtype] = self.bytes[:whole].view(dtype)
        return self._views[dtype]

    def new(self, dtype: torch.dtype) -> torch.Tensor:
        """Zeros, one for each element."""
        return torch.zeros((self.end - self.start + self.grain - 1) // self.grain, dtype=dtype)


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

    def region(self, low: int, high: int, who: str) -> Region:
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
                region.undefined = region.new(torch.bool)
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
        index: torch.Tensor,
        size: int,
        clock: Clock,
        write: bool,
        who: str,
        kind: str = "plain",
        tid: int | None = None,
        engine_of=None,
    ) -> None:
        """Check an access against the earlier ones and remember it.

        Args:
            index: elements in units of ``size`` bytes.
            kind: "plain" or "atomic".
            tid: clock id that accesses, if not the clock's own.
            engine_of: the program, for an access by the async proxy.
        """
        if not self.race_check:
            return
        index = index.reshape(-1)
        if size > region.grain:
            ratio = size // region.grain
            index = (index[:, None] * ratio + torch.arange(ratio)).reshape(-1)
        elif size < region.grain:
            index = index * size // region.grain
        tid, verb = tid or clock.tid, "write" if write else "read"

        def label(hit: torch.Tensor) -> str:
            return "global " + self.label(region.start + int(index[hit.int().argmax()]) * region.grain, region)

        for earlier in MUST_FOLLOW[kind, verb]:
            if earlier not in region.log:
                continue
            log = region.log[earlier][index]
            different = log.numel() > 1 and log.min() != log.max()
            for packed in (torch.unique(log) if different else log[:1]).tolist():
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
                region.undefined[index] = False
            elif region.undefined[index].any():
                raise SimError(f"{who} reads {label(region.undefined[index])}, which nothing has written in this call")
        name = f"atomic {verb}" if kind == "atomic" else verb
        if name not in region.log:
            region.log[name] = region.new(torch.int64)
        region.log[name][index] = tid << 32 | clock.before[tid]
