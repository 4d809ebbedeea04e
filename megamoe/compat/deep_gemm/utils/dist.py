"""What distributed test scripts start with: a process group, gathers of unequal parts, ordered prints."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from megamoe.errors import check_int, fail_value

_local_rank: int | None = None


def init_dist(local_rank: int, num_local_ranks: int) -> tuple[int, int, dist.ProcessGroup]:
    """Joins the default process group: NCCL and ``cuda:local_rank`` with GPUs, Gloo without.

    Args:
        local_rank: this process on its machine.
        num_local_ranks: processes per machine. ``WORLD_SIZE`` and ``RANK`` count machines, not processes;
            ``MASTER_ADDR`` and ``MASTER_PORT`` are where they meet (defaults: 1, 0, 127.0.0.1, 8361).

    Returns:
        Rank, number of ranks, and a new group of them all. With GPUs, ``cuda`` is the default device from then on.
    """
    global _local_rank
    check_int("num_local_ranks", num_local_ranks, 1)
    check_int("local_rank", local_rank, 0)
    if local_rank >= num_local_ranks:
        fail_value("local_rank", local_rank, f"must be below num_local_ranks = {num_local_ranks}", "Count from 0.")
    machines, machine = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    on_gpu = torch.cuda.is_available()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"tcp://{address}:{int(os.environ.get('MASTER_PORT', 8361))}",
        world_size=machines * num_local_ranks,
        rank=machine * num_local_ranks + local_rank,
        device_id=torch.device("cuda", local_rank) if on_gpu else None,
    )
    if on_gpu:
        torch.cuda.set_device(local_rank)
        torch.set_default_device("cuda")
    _local_rank = local_rank
    return dist.get_rank(), dist.get_world_size(), dist.new_group(list(range(dist.get_world_size())))


def uneven_all_gather(tensor: torch.Tensor, dim: int = 0, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The ranks' tensors, concatenated along ``dim``, in which alone they may differ in size."""
    own = torch.tensor([tensor.shape[dim]], device=tensor.device)
    sizes = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, own, group=group)
    sizes = [int(size) for size in sizes]
    # Equal sizes for the collective: the rows past a rank's own are cut off again.
    rows = tensor.transpose(0, dim).contiguous()
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).transpose(0, dim).contiguous()


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Prints on every rank, or on the first of each machine; then all ranks wait for each other."""
    if _local_rank is None:
        fail_value("s", s, "needs a process group of init_dist", "Call init_dist first.")
    if not once_in_node or _local_rank == 0:
        print(s, flush=True)
    dist.barrier()
