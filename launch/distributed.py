"""Processes, devices and the (data, expert) mesh: one path for plain `python`, torchrun on CPUs and on GPUs."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from launch.config import LaunchError


@dataclass(frozen=True)
class World:
    """This process among all of them. `mesh` has dimensions ("data", "expert"); None when there is one process."""

    rank: int
    size: int
    expert_parallel: int
    device: torch.device
    mesh: DeviceMesh | None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def expert_group(self) -> DeviceMesh | None:
        return None if self.mesh is None else self.mesh["expert"]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """All processes."""
        return None if self.mesh is None else dist.group.WORLD

    def mean(self, value: Tensor) -> Tensor:
        """Mean of a tensor over all ranks, the same on every rank."""
        return self.sum(value) / self.size

    def sum(self, value: Tensor) -> Tensor:
        """Sum of a tensor over all ranks, the same on every rank."""
        value = value.clone()
        if self.mesh is not None:
            dist.all_reduce(value)
        return value

    def barrier(self) -> None:
        if self.mesh is not None:
            # An all-reduce instead of dist.barrier: it needs no device to be named on any backend.
            dist.all_reduce(torch.zeros(1, device=self.device))


@contextmanager
def open_world(
    num_experts: int, expert_parallel: int | None, device_type: str, timeout_seconds: float
) -> Iterator[World]:
    """Join the other processes, yield the World, leave again.

    Where the program has initialised torch.distributed already, its process group is used and left as it is.

    expert_parallel: ranks that share one copy of the experts; None picks the largest number that divides both the
    number of processes and `num_experts`. device_type: "auto", "cpu" or "cuda". A collective that waits longer than
    `timeout_seconds` for a missing rank raises. Raises LaunchError if the numbers do not fit each other or the machine.
    """
    if not timeout_seconds > 0:
        raise LaunchError(f"timeout_seconds={timeout_seconds} must be greater than 0")
    joined = dist.is_initialized()
    size = dist.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", "1"))
    rank = dist.get_rank() if joined else int(os.environ.get("RANK", "0"))
    expert_parallel = choose_expert_parallel(size, num_experts, expert_parallel)
    device = _choose_device(device_type, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cpu" and not joined:
        _share_cpu_cores()
    if size == 1:
        yield World(rank, size, expert_parallel, device, None)
        return
    if not joined:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    try:
        shape = (size // expert_parallel, expert_parallel)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "expert"))
        yield World(rank, size, expert_parallel, device, mesh)
    finally:
        if not joined:
            dist.destroy_process_group()
            if device.type == "cpu":
                # A gloo thread may still have to release a tensor of the last collective, for which it needs the
                # interpreter: one that finds it shutting down aborts the process.
                time.sleep(0.2)


def choose_expert_parallel(world_size: int, num_experts: int, expert_parallel: int | None) -> int:
    """Validate the expert-parallel size, or pick one when it is None."""
    if expert_parallel is None:
        return math.gcd(world_size, num_experts)
    if expert_parallel < 1 or world_size % expert_parallel or num_experts % expert_parallel:
        raise LaunchError(
            f"ep={expert_parallel} must divide both the number of processes ({world_size}) and num_experts "
            f"({num_experts}): try --ep {math.gcd(world_size, num_experts)}"
        )
    return expert_parallel


def _choose_device(device_type: str, local_rank: int) -> torch.device:
    if device_type not in ("auto", "cpu", "cuda"):
        raise LaunchError(f"device={device_type!r} must be 'auto', 'cpu' or 'cuda'")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise LaunchError("device='cuda' needs a GPU that torch can use, and there is none: use --device cpu")
    if device_type == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"process {local_rank} of this machine has no GPU of its own among {torch.cuda.device_count()}: "
            f"start at most that many with --nproc-per-node"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _share_cpu_cores() -> None:
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    # Plain python keeps torch's own choice, which follows OMP_NUM_THREADS; torchrun would set that to 1.
    if processes:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // processes))
