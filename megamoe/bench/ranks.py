"""The processes of a measurement: torchrun's, or this one alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

HEAD_START = 1_000_000
"""Cycles, some 0.5 ms, for which GPUs wait before they meet: the host has then queued what follows."""


def world_size() -> int:
    """Processes that torchrun has started, or 1."""
    return int(os.environ.get("WORLD_SIZE", 1))


@contextmanager
def started() -> Iterator[dist.ProcessGroup]:
    """The group of torchrun's processes, one GPU each; without torchrun, of this process alone."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def size_of(group: dist.ProcessGroup | None) -> int:
    """Ranks; None is one."""
    return 1 if group is None else dist.get_world_size(group)


def rank_of(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def largest(values: Mapping[str, float], group: dist.ProcessGroup | None, device: torch.device) -> dict[str, float]:
    """The largest of all ranks' values of each name, NaN as infinity. A collective: the same names on all ranks."""
    numbers = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    numbers = numbers.nan_to_num(nan=float("inf"), posinf=float("inf"))
    if group is not None:
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group)
    return dict(zip(values, numbers.tolist(), strict=True))


def starter(group: dist.ProcessGroup | None, device: torch.device, pause: float = 0.0) -> Callable[[], None]:
    """What to call before work of all ranks is queued, so that their GPUs begin it together.

    Processes come some 20 to 50 microseconds apart; here their GPUs wait for each other, behind a delay in which the
    host queues the work.

    Args:
        pause: seconds of rest before: a GPU that has rested runs at its full clock for a while, one that works without
            pause at its power limit.
    """
    token = torch.zeros(1, device=device)

    def start() -> None:
        if pause:
            time.sleep(pause)
        if group is not None:
            torch.cuda._sleep(HEAD_START)
            dist.all_reduce(token, group=group)

    return start
