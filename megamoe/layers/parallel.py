"""Expert parallelism of parameters and gradients: sharding, averaging, norms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megamoe.comm.failures import named_collective
from megamoe.errors import check_number, fail_type, fail_value

EXPERT_DIM = "expert"


def resolve_group(
    group: dist.ProcessGroup | DeviceMesh | None, device_type: str, argument: str = "group"
) -> tuple[dist.ProcessGroup | None, DeviceMesh | None]:
    """The process group and 1-D mesh of an expert-parallel group; (None, None) for one rank.

    Args:
        group: a process group, a 1-D ``DeviceMesh`` (such as ``mesh["expert"]``), or None.
        device_type: of the parameters that will be sharded.
        argument: its name in error messages.

    Raises:
        MegaMoEError: another type, or a mesh of several dimensions.
    """
    if group is None:
        return None, None
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            fail_value(
                f"{argument}.mesh_dim_names",
                group.mesh_dim_names,
                f"must be one dimension, has {group.ndim}",
                'Pass a dimension of the mesh, such as mesh["expert"].',
            )
        return (None, None) if group.size() == 1 else (group.get_group(), group)
    if not isinstance(group, dist.ProcessGroup):
        fail_type(
            argument,
            type(group).__name__,
            "must be a ProcessGroup, a 1-D DeviceMesh or None",
            "Create it with torch.distributed.new_group or init_device_mesh.",
        )
    if dist.get_world_size(group) == 1:
        return None, None
    return group, DeviceMesh.from_group(group, device_type, mesh_dim_names=(EXPERT_DIM,))


def check_same_on_all_ranks(values: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Every rank of ``group`` passes equal ``values``: a collective, so that all ranks raise, or none.

    Raises:
        MegaMoEError: names each differing entry with the values of the ranks.
    """
    gathered: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    with named_collective("comparison of the ranks' configs", group):
        dist.all_gather_object(gathered, values, group=group)
    by_name = {name: [theirs[name] for theirs in gathered] for name in values}
    differing = {name: column for name, column in by_name.items() if any(value != column[0] for value in column)}
    if differing:
        fail_value(
            "config",
            differing,
            "must be equal on all ranks of the expert-parallel group (values in rank order)",
            "Pass every rank the same config and dtype.",
        )


def shard_parameter(local: torch.Tensor, mesh: DeviceMesh | None) -> nn.Parameter:
    """The parameter of which ``local`` is this rank's part: a DTensor in ``Shard(0)``, plain for one rank."""
    if mesh is None:
        return nn.Parameter(local)
    # Imported here: DTensor takes longer to import than the rest of megamoe.
    from torch.distributed.tensor import DTensor, Shard

    return nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, differentiably; a plain tensor as it is."""
    # By an attribute: torch.compile finds no method of a DTensor.
    return tensor.to_local() if hasattr(tensor, "placements") else tensor


def expert_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of all ``Experts`` of ``model``: those that expert parallelism shards."""
    for module in model.modules():
        if getattr(module, "is_expert_parallel", False):
            yield from module.parameters(recurse=False)


def _average(parameters: list[nn.Parameter], mesh: DeviceMesh, dims: Iterable[str]) -> None:
    """Averages the gradients over the dimensions ``dims`` of ``mesh``, one collective per dtype and dimension."""
    groups = [mesh.get_group(dim) for dim in dims if mesh[dim].size() > 1]
    if not groups:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        # A rank without a gradient must still take part, and gets the others' average.
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = local_tensor(parameter.grad)
        by_dtype.setdefault(grad.dtype, []).append(grad)
    for grads in by_dtype.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        for group in groups:
            with named_collective("average_gradients", group):
                dist.all_reduce(flat, group=group)
            flat /= dist.get_world_size(group)
        for grad, averaged in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(averaged.view_as(grad))


@torch.no_grad()
def average_gradients(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Data-parallel averaging of all gradients. Call after the last backward pass of a step, on every rank.

    Dense parameters are averaged over all ranks of the mesh, expert parameters over its other dimensions only: their
    gradients already are the mean over the expert dimension (see ``Experts``). Missing gradients count as 0.
    Not with DDP or FSDP2, which average what they wrap themselves.

    Args:
        mesh: has a dimension "expert", the one passed to the layers as ``group``, and any others, over which the model
            is replicated. None = one process, nothing to do.

    Raises:
        MegaMoEError: the mesh has no dimension "expert", or a dense parameter is sharded.
    """
    if mesh is None:
        return
    names = mesh.mesh_dim_names or ()
    if EXPERT_DIM not in names:
        fail_value(
            "mesh.mesh_dim_names",
            names,
            f"must contain {EXPERT_DIM!r}",
            'Create it with init_device_mesh(device, sizes, mesh_dim_names=("data", "expert")).',
        )
    expert_ids = {id(p) for p in expert_parameters(model)}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for name, parameter in trained:
        if len(_sharded_over(parameter)) > (id(parameter) in expert_ids):
            fail_value(
                "model",
                name,
                "is a sharded parameter",
                "FSDP2 averages gradients itself: do not call average_gradients.",
            )
    _average([p for _, p in trained if id(p) not in expert_ids], mesh, names)
    _average([p for _, p in trained if id(p) in expert_ids], mesh, [name for name in names if name != EXPERT_DIM])


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clips all gradients to a global 2-norm of ``max_norm``; call after averaging, on every rank.

    Which ranks a parameter is spread over follows from its ``DTensor``: expert parallelism and FSDP2 need no more.

    Args:
        max_norm: > 0; infinity only measures.

    Returns:
        The norm before clipping over all parts of all parameters, each counted once: a fp32 scalar (fp64 where a
        gradient is fp64), the same on every rank.

    Raises:
        MegaMoEError: ``max_norm`` is not > 0.
    """
    if max_norm != float("inf"):
        check_number("max_norm", max_norm, 0.0, exclusive=True)
    # Parameters that are spread over the same ranks share one collective; a missing gradient does not change which.
    by_ranks: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            grads = by_ranks.setdefault(_sharded_over(parameter), [])
            if parameter.grad is not None:
                grads.append(local_tensor(parameter.grad))
    device = local_tensor(next(model.parameters())).device
    total = torch.zeros((), device=device)
    for groups, grads in by_ranks.items():
        squares = torch.zeros((), device=device)
        for grad in grads:
            dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
            squares = squares + torch.linalg.vector_norm(grad, dtype=dtype).square()
        for group in groups:
            with named_collective("clip_grad_norm_", group):
                dist.all_reduce(squares, group=group)
        total = total + squares
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grads in by_ranks.values():
        for grad in grads:
            grad.mul_(scale.to(grad.dtype))
    return norm


def _sharded_over(parameter: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups of the mesh dimensions over which a DTensor is spread; empty for a plain tensor."""
    if not hasattr(parameter, "placements"):
        return ()
    mesh = parameter.device_mesh
    return tuple(mesh.get_group(dim) for dim, place in enumerate(parameter.placements) if not place.is_replicate())
