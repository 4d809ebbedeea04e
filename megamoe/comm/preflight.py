"""What the ranks of a group compare before they share memory: one error on all of them, or none."""

from __future__ import annotations

import socket
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megamoe.comm.failures import named_collective
from megamoe.errors import fail_value

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class RankReport:
    """What a rank says of itself.

    Attributes:
        settings: by name; must be equal on all ranks.
        host: the machine.
        device: the GPU's unique id, or the device's name.
        unreachable: devices of this host that ours cannot read.
        failure: why this rank cannot go on, or nothing.
    """

    settings: dict[str, Any]
    host: str
    device: str
    unreachable: tuple[str, ...] = ()
    failure: str = ""


def library_versions() -> dict[str, str]:
    """Versions that must agree: the ranks' kernels and their memory layout come from them."""
    try:
        import triton

        found = triton.__version__
    except ImportError:
        found = "none"
    return {"torch": torch.__version__, "triton": found, "megamoe": sys.modules["megamoe"].__version__}


def host_name() -> str:
    """The machine, told apart from others of the same name and from other containers' names of the same machine."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return boot or socket.gethostname()


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def describe_device(device: torch.device) -> tuple[str, tuple[str, ...]]:
    """(unique id, ids of the other devices that this process sees and this one cannot read)."""
    if device.type != "cuda":
        return str(device), ()
    index = torch.cuda.current_device() if device.index is None else device.index
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    far = tuple(_uuid(other) for other in others if not torch.cuda.can_device_access_peer(index, other))
    return _uuid(index), far


def complaint(reports: list[RankReport]) -> tuple[str, Any, str, str] | None:
    """(argument, value, rule, remedy) of what keeps the ranks from sharing memory, or None: the same on all ranks."""
    failed = {rank: report.failure for rank, report in enumerate(reports) if report.failure}
    if failed:
        return "group", failed, "has ranks that cannot take part (by rank)", "Mend the cause on these ranks."
    names = list(reports[0].settings)
    for rank, report in enumerate(reports):
        if list(report.settings) != names:
            return "group", {rank: list(report.settings)}, "compares other settings than rank 0", "Use one megamoe."
    odd = {}
    for name in names:
        values = [report.settings[name] for report in reports]
        usual = Counter(map(repr, values)).most_common(1)[0][0]
        differing = {rank: value for rank, value in enumerate(values) if repr(value) != usual}
        if differing:
            odd[name] = {"most ranks": usual, **differing}
    if odd:
        return (
            "settings",
            odd,
            "must be equal on all ranks of the expert-parallel group (rank: value where it differs)",
            "Pass every rank the same config, tokens and allocator, and install the same versions everywhere.",
        )
    hosts = {report.host for report in reports}
    if len(hosts) > 1:
        by_host = {host: [rank for rank, report in enumerate(reports) if report.host == host] for host in hosts}
        return (
            "group",
            sorted(by_host.values()),
            "spans several machines (ranks of each): peer memory reaches one NVLink domain",
            'Use a group of one machine\'s ranks, or path="collective".',
        )
    places: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        places.setdefault(report.device, []).append(rank)
    shared = {device: ranks for device, ranks in places.items() if len(ranks) > 1}
    if shared:
        return "device", shared, "must not be shared by ranks", "Call torch.cuda.set_device(local_rank) first."
    far = {
        rank: [places[device][0] for device in report.unreachable if device in places]
        for rank, report in enumerate(reports)
    }
    far = {rank: others for rank, others in far.items() if others}
    if far:
        return (
            "group",
            far,
            "has GPUs that cannot read each other's memory (rank: ranks out of its reach)",
            'Check `nvidia-smi topo -p2p r`, or use path="collective".',
        )
    return None


def preflight(report: RankReport, group: dist.ProcessGroup | None) -> list[RankReport]:
    """All ranks' reports, if they can share memory: a collective.

    Raises:
        MegaMoEError: on all ranks, naming the odd ones out.
    """
    reports = [report]
    if group is not None:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        with named_collective("comparison of the ranks before they share memory", group):
            dist.all_gather_object(gathered, report, group=group)
        reports = gathered
    found = complaint(reports)
    if found is not None:
        fail_value(*found)
    return reports
