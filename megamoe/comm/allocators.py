"""Where symmetric memory comes from: torch's symmetric memory, NVSHMEM's heap, or plain memory for one rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megamoe.errors import fail_value

ALLOCATORS = ("torch", "nvshmem")


@dataclass(frozen=True)
class Allocation:
    """Memory that every rank of a group has, and reaches at every other.

    Attributes:
        memory: uint8 ``[nbytes]``, this rank's.
        addresses: of each rank's memory, as this rank reaches it.
        release: gives the memory back; a collective with NVSHMEM, so never called by a destructor.
    """

    memory: torch.Tensor
    addresses: list[int]
    release: Callable[[], None]


def missing_allocator(allocator: str, group: dist.ProcessGroup | None) -> str:
    """Why ``allocator`` cannot serve ``group`` on this rank, or nothing. No collective."""
    if group is None or allocator == "torch":
        return ""
    try:
        import nvshmem.core as nvshmem
    except ImportError as error:
        return (
            f"the NVSHMEM allocator needs nvshmem4py and the NVSHMEM library, which cannot be imported ({error}): "
            "pip install 'megamoe[nvshmem]', or use allocator=\"torch\""
        )
    if _initialised(nvshmem):
        mine, world = nvshmem.my_pe(), nvshmem.n_pes()
        if (mine, world) != (dist.get_rank(group), dist.get_world_size(group)):
            return (
                f"NVSHMEM is initialised as rank {mine} of {world}, which is not this group: initialise it over the "
                "expert-parallel group, or leave it to megamoe"
            )
    return ""


def allocate(allocator: str, nbytes: int, device: torch.device, group: dist.ProcessGroup | None) -> Allocation:
    """Zeroed symmetric memory: a collective. Plain memory if ``group`` is None."""
    if group is None:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return Allocation(memory, [memory.data_ptr()], lambda: None)
    kind = {"torch": _torch, "nvshmem": _nvshmem}.get(allocator)
    if kind is None:
        fail_value("allocator", allocator, f"must be one of {', '.join(ALLOCATORS)}", "Pass one of these.")
    with torch.cuda.device(device):
        allocation = kind(nbytes, device, group)
        allocation.memory.zero_()
        # Nobody may raise a flag in memory that is yet to be zeroed.
        torch.cuda.synchronize(device)
        dist.barrier(group)
    return allocation


def _torch(nbytes: int, device: torch.device, group: dist.ProcessGroup) -> Allocation:
    from torch.distributed import _symmetric_memory as symmetric

    memory = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(memory, group)
    return Allocation(memory, list(handle.buffer_ptrs), lambda: None)


def _initialised(nvshmem) -> bool:
    # 0: not, 1: it only knows its peers.
    return int(nvshmem.init_status()) > 1


def _nvshmem(nbytes: int, device: torch.device, group: dist.ProcessGroup) -> Allocation:
    import nvshmem.core as nvshmem
    from cuda.core import Device

    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if not _initialised(nvshmem):
        # Nothing here is multicast.
        os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
        own = Device(device.index)
        own.set_current()
        shared = [nvshmem.get_unique_id(empty=rank != 0)]
        dist.broadcast_object_list(shared, src=dist.get_global_rank(group, 0), group=group)
        nvshmem.init(device=own, uid=shared[0], rank=rank, nranks=world_size, initializer_method="uid")
    memory = nvshmem.interop.torch.bytetensor((nbytes,), dtype=torch.uint8)
    # Views of the peers' memory; NVSHMEM keeps them by reference.
    peers = [
        memory if peer == rank else nvshmem.interop.torch.get_peer_tensor(memory, peer) for peer in range(world_size)
    ]
    addresses = [peer.data_ptr() for peer in peers]
    return Allocation(memory, addresses, lambda: nvshmem.interop.torch.free_tensor(memory))
