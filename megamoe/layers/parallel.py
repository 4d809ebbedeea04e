"""Expert parallelism of parameters and gradients: sharding, averaging, norms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megamoe.errors import check_number, fail_type, fail_value

EXPERT_DIM = "expert"


def resolve_group(
    group: dist.ProcessGroup | DeviceMesh | None, device_type: str
) -> tuple[dist.ProcessGroup | None, DeviceMesh | None]:
    """The process group and 1-D mesh of an expert-parallel group; (None, None) for one rank.

    Args:
        group: a process group, a 1-D ``DeviceMesh`` (such as ``mesh["expert"]``), or None.
        device_type: of the parameters that will be sharded.

    Raises:
        MegaMoEError: another type, or a mesh of several dimensions.
    """
    if group is None:
        return None, None
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            fail_value(
                "group.mesh_dim_names",
                group.mesh_dim_names,
                f"must be one dimension, has {group.ndim}",
                'Pass a dimension of the mesh, such as mesh["expert"].',
            )
        return (None, None) if group.size() == 1 else (group.get_group(), group)
    if not isinstance(group, dist.ProcessGroup):
        fail_type(
            "group",
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
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def expert_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of all ``Experts`` of ``model``: those that expert parallelism shards."""
    for module in model.modules():
        if getattr(module, "is_expert_parallel", False):
            yield from module.parameters(recurse=False)


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trainable (dense, expert) parameters of ``model``."""
    expert_ids = {id(p) for p in expert_parameters(model)}
    parameters = [p for p in model.parameters() if p.requires_grad]
    dense = [p for p in parameters if id(p) not in expert_ids]
    return dense, [p for p in parameters if id(p) in expert_ids]


def _check_mesh(mesh: DeviceMesh) -> tuple[str, ...]:
    names = mesh.mesh_dim_names or ()
    if EXPERT_DIM not in names:
        fail_value(
            "mesh.mesh_dim_names",
            names,
            f"must contain {EXPERT_DIM!r}",
            'Create it with init_device_mesh(device, sizes, mesh_dim_names=("data", "expert")).',
        )
    return names


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
            dist.all_reduce(flat, group=group)
            flat /= dist.get_world_size(group)
        for grad, averaged in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(averaged.view_as(grad))


@torch.no_grad()
def average_gradients(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Data-parallel averaging of all gradients. Call after the last backward pass of a step, on every rank.

    Dense parameters are averaged over all ranks of the mesh, expert parameters over its other dimensions only: their
    gradients already are the mean over the expert dimension (see ``Experts``). Missing gradients count as 0.

    Args:
        mesh: has a dimension "expert", the one passed to the layers as ``group``, and any others, over which the model
            is replicated. None = one process, nothing to do.

    Raises:
        MegaMoEError: the mesh has no dimension "expert".
    """
    if mesh is None:
        return
    names = _check_mesh(mesh)
    dense, experts = _split(model)
    _average(dense, mesh, names)
    _average(experts, mesh, [name for name in names if name != EXPERT_DIM])


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, mesh: DeviceMesh | None) -> torch.Tensor:
    """Clips all gradients to a global 2-norm of ``max_norm``; call after ``average_gradients``, on every rank.

    Args:
        max_norm: > 0; infinity only measures.
        mesh: as for ``average_gradients``.

    Returns:
        The norm before clipping, over dense and all ranks' expert parameters, each counted once: a fp32 scalar (fp64
        where a gradient is fp64), the same on every rank.

    Raises:
        MegaMoEError: ``max_norm`` is not > 0, or the mesh has no dimension "expert".
    """
    if max_norm != float("inf"):
        check_number("max_norm", max_norm, 0.0, exclusive=True)
    dense, experts = _split(model)
    squares = _sum_of_squares(dense), _sum_of_squares(experts)
    if mesh is not None:
        _check_mesh(mesh)
        if mesh[EXPERT_DIM].size() > 1:
            device = next(model.parameters()).device
            total = squares[1].to(device)
            dist.all_reduce(total, group=mesh.get_group(EXPERT_DIM))
            squares = squares[0], total
    norm = (squares[0].to(squares[1].device) + squares[1]).sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in dense + experts:
        if parameter.grad is not None:
            grad = local_tensor(parameter.grad)
            grad.mul_(scale.to(grad.dtype))
    return norm


def _sum_of_squares(parameters: list[nn.Parameter]) -> torch.Tensor:
    grads = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    norms = [torch.linalg.vector_norm(grad, dtype=dtype).to(grads[0].device) for grad in grads]
    return torch.stack(norms).square().sum()
