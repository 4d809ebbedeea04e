"""``rebalance`` moves experts between ranks; ``expert_load`` says how many rows each of them received."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megamoe.comm.failures import named_collective
from megamoe.errors import MegaMoEError, check_int, fail_type, fail_value
from megamoe.layers.experts import Experts
from megamoe.layers.parallel import local_tensor, shard_parameter
from megamoe.placement import ExpertPlacement

Placements = ExpertPlacement | dict[str, Any] | Sequence[ExpertPlacement | dict[str, Any]]


def expert_layers(model: nn.Module) -> list[Experts]:
    """The ``Experts`` of ``model`` in module order: the layers that a list of placements and ``expert_load`` count."""
    return [module for module in model.modules() if isinstance(module, Experts)]


def expert_load(model: nn.Module, *, reset: bool = True) -> torch.Tensor:
    """The rows that each expert received in evaluation mode: what ``balance_placement`` takes.

    A collective over the expert-parallel group. In training mode the router counts instead (``update_expert_biases``).

    Args:
        reset: count from zero again afterwards.

    Returns:
        int64 ``[layers, E]`` on the CPU, summed over the replicas and ranks, the same on every rank. E is the largest
        number of experts of any layer; experts that a layer does not have count 0.

    Raises:
        ExchangeError: another rank did not take part.
    """
    layers = expert_layers(model)
    if not layers:
        return torch.zeros(0, 0, dtype=torch.int64)
    num_experts = max(layer.config.num_experts for layer in layers)
    counters = [layer.slots.rows_received for layer in layers]
    load = torch.stack([nn.functional.pad(rows, (0, num_experts - rows.numel())) for rows in counters])
    group = _group_of(layers)
    if group is not None:
        with named_collective("expert_load", group):
            dist.all_reduce(load, group=group)
    if reset:
        for rows in counters:
            rows.zero_()
    return load.cpu()


def rebalance(
    model: nn.Module,
    placement: Placements,
    *,
    layers: Iterable[int] | None = None,
    max_bytes: int = 64 << 20,
) -> int:
    """Moves the experts' parameters to where ``placement`` wants them; for serving, between two steps.

    A collective over the expert-parallel group. Only slots that get another expert are written, in the same memory as
    long as ``num_slots`` stays: captured CUDA graphs then replay with the new placement. (Capture them after a first
    call of this function, be it with the placement in force: before it, layers do not translate ids. With another
    ``num_slots`` parameters are new objects, and graphs and optimizers must be made anew.) To keep pauses short, move
    one layer per step: ``rebalance(model, placements, layers=[i])``.

    Outputs do not change: a row meets the same weights, and its results are summed in the same order. Their bits differ
    only where a GEMM rounds a row in another way if its expert has fewer rows (replicas share them) or the layer more
    slots. On a CPU that takes an expert of very few rows; without replicas the bits are the same.

    Under a placement other than ``ExpertPlacement.even(E, R)``, ``state_dict``, ``load_state_dict`` and gradients of
    the parameters are refused: checkpoints always hold experts in the router's order, and no optimizer state would
    follow the weights. Rebalance to the default placement, which restores the parameters bit for bit, then save.

    Args:
        model: holds ``MoE`` or ``Experts`` layers, all over one group and not sharded any further.
        placement: for all layers, or a sequence with one for each layer of the model; a dict is read by ``from_dict``.
        layers: indices of the layers to move; default: all.
        max_bytes: at most so much memory for messages at a time, or one row of each expert that moves, if that is more;
            where ``num_slots`` changes, also one new parameter.

    Returns:
        How many copies of an expert travelled between ranks, over all ranks and layers.

    Raises:
        MegaMoEError: on every rank, before anything has moved: not a placement on some rank, or one that does not fit
            the layers, or ranks that do not agree.
        ExchangeError: another rank did not take part. If that happens after the comparison, parameters are lost.
    """
    found = expert_layers(model)
    if not found:
        fail_value("model", type(model).__name__, "must have Experts layers", "Pass a model with MoE layers.")
    group = _group_of(found)
    error, wanted = None, {}
    try:
        check_int("max_bytes", max_bytes, 1)
        wanted = _wanted(found, placement, layers)
    except MegaMoEError as refused:
        error = refused
    if group is not None:
        # In order: the moves of one layer must not meet those of another.
        request = {
            "layers": list(wanted),
            "placement": [target.to_dict() for target in wanted.values()],
            "placement in force": [layer.placement.to_dict() for layer in found],
            "parameters": [[(name, str(tensor.dtype)) for name, tensor in _expert_tensors(layer)] for layer in found],
            "max_bytes": max_bytes,
        }
        _agree(request, error, group)
    elif error is not None:
        raise error
    moved = 0
    # Parameters made in inference mode could never be written again.
    with torch.inference_mode(False), torch.no_grad():
        for index, target in wanted.items():
            moved += _move(found[index], target, max_bytes)
    return moved


# ---------------------------------------------------------------- checks


def _group_of(layers: list[Experts]) -> dist.ProcessGroup | None:
    group = layers[0].group
    if any(layer.group is not group for layer in layers):
        sizes = [layer.expert_parallel_size for layer in layers]
        rule = "layers must share one expert-parallel group"
        fail_value("model (ranks per layer)", sizes, rule, "Pass the parts of the model with different groups apart.")
    return group


def _wanted(found: list[Experts], placement: Any, layers: Iterable[int] | None) -> dict[int, ExpertPlacement]:
    """The placement of each layer to move."""
    each = isinstance(placement, Sequence) and not isinstance(placement, str)
    if each and len(placement) != len(found):
        rule = f"must be the {len(found)} Experts layers of the model"
        fail_value("len(placement)", len(placement), rule, "Pass one placement, or one per layer.")
    if layers is not None and not isinstance(layers, Iterable):
        fail_type("layers", layers, "must be a sequence of layer indices", "Pass [i] to move one layer.")
    wanted = {}
    for index in range(len(found)) if layers is None else layers:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(found):
            fail_value("layers", index, f"must be in [0, {len(found)})", "Pass indices of the model's Experts layers.")
        wanted[index] = _fitting(found[index], placement[index] if each else placement)
    return wanted


def _fitting(layer: Experts, placement: Any) -> ExpertPlacement:
    if isinstance(placement, dict):
        placement = ExpertPlacement.from_dict(placement)
    if not isinstance(placement, ExpertPlacement):
        rule = "must be an ExpertPlacement, its dict, or one of these per layer"
        fail_type("placement", type(placement).__name__, rule, "Pass what balance_placement returned.")
    for name, have, wanted in (
        ("num_experts", placement.num_experts, layer.config.num_experts),
        ("ep_size", placement.ep_size, layer.expert_parallel_size),
    ):
        if have != wanted:
            fail_value(f"placement.{name}", have, f"must be the layer's {wanted}", "Make a placement for this model.")
    for name, tensor in _expert_tensors(layer):
        if tensor.is_meta:
            fail_value(name, "meta", "has no data to move", "Load the weights before rebalancing.")
        if len(getattr(tensor, "placements", ())) > 1 or local_tensor(tensor).shape[:1] != (layer.placement.num_slots,):
            rule = f"must have this rank's {layer.placement.num_slots} slots in dimension 0"
            fail_value(f"{name}.shape", list(local_tensor(tensor).shape), rule, "Serve without FSDP around Experts.")
    return placement


def _agree(request: dict[str, Any], error: MegaMoEError | None, group: dist.ProcessGroup) -> None:
    """All ranks raise if one of them has an error, or if their requests differ."""
    mine = (None if error is None else str(error), request)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    with named_collective("comparison of the ranks' placements", group):
        dist.all_gather_object(gathered, mine, group=group)
    if error is not None:
        raise error
    refused = {rank: message for rank, (message, _) in enumerate(gathered) if message is not None}
    if refused:
        rule = "is refused on other ranks (their messages, by rank)"
        fail_value("placement", refused, rule, "Pass every rank of the group the same placement.")
    for name, first in gathered[0][1].items():
        differing = [rank for rank, (_, theirs) in enumerate(gathered) if theirs[name] != first]
        if differing:
            rule = "must be equal on all ranks of the expert-parallel group (ranks that differ from rank 0)"
            fail_value(name, differing, rule, "Compute it on one rank and broadcast it, or from the same load.")


# ---------------------------------------------------------------- moves


@dataclass(frozen=True)
class _Move:
    """A slot that gets another expert."""

    source: int
    source_slot: int
    rank: int
    slot: int


def _plan_moves(old: ExpertPlacement, new: ExpertPlacement) -> list[_Move]:
    """By rank and slot; each expert comes from a replica on the same rank, else from the rank that has sent least."""
    sent = [0] * old.ep_size
    moves = []
    for rank, experts in enumerate(new.experts_by_rank):
        had = old.experts_by_rank[rank]
        for slot, expert in enumerate(experts):
            if had[slot : slot + 1] == (expert,):
                continue
            if expert in had:
                moves.append(_Move(rank, had.index(expert), rank, slot))
                continue
            physical = min(old.replicas[expert], key=lambda i: (sent[old.rank_of(i)], i))
            source = old.rank_of(physical)
            sent[source] += 1
            moves.append(_Move(source, physical % old.num_slots, rank, slot))
    return moves


def _expert_tensors(layer: Experts) -> Iterator[tuple[str, torch.Tensor]]:
    """All that a layer holds per expert."""
    yield from layer.named_parameters(recurse=False)
    yield from layer.named_buffers(recurse=False)


def _move(layer: Experts, new: ExpertPlacement, max_bytes: int) -> int:
    old = layer.placement
    moves = _plan_moves(old, new)
    for name, tensor in list(_expert_tensors(layer)):
        tensor.grad = None
        local = local_tensor(tensor)
        target = local
        if new.num_slots != old.num_slots:
            target = local.new_zeros(new.num_slots, *local.shape[1:])
            kept = min(len(local), len(target))
            target[:kept].copy_(local[:kept])
        _move_rows(local, target, moves, layer, max_bytes)
        if target is not local:
            mesh = getattr(tensor, "device_mesh", None)
            if isinstance(tensor, nn.Parameter):
                target = shard_parameter(target, mesh).requires_grad_(tensor.requires_grad)
            setattr(layer, name, target)
    layer.assign(new)
    return sum(move.source != move.rank for move in moves)


def _move_rows(source: torch.Tensor, target: torch.Tensor, moves: list[_Move], layer: Experts, max_bytes: int) -> None:
    """Writes the moved experts of ``source [slots, ...]`` on all ranks to their slots in ``target``, a slice of their
    rows at a time: each slice is read everywhere before it is written anywhere, so that cycles of moves need no care.
    """
    if source.dim() == 1:
        source, target = source[:, None], target[:, None]
    ranks = range(layer.expert_parallel_size)
    sends, receives = ([sum(getattr(m, end) == rank for m in moves) for rank in ranks] for end in ("source", "rank"))
    row_bytes = source[0, :1].numel() * source.element_size()
    at_once = max(1, max_bytes // max(1, row_bytes * max(map(sum, zip(sends, receives, strict=True)))))
    outgoing = [move for move in moves if move.source == layer.slots.rank]
    incoming = sorted((move for move in moves if move.rank == layer.slots.rank), key=lambda move: move.source)
    for start in range(0, source.shape[1], at_once) if moves else ():
        rows = slice(start, start + at_once)
        shape = source[0, rows].shape
        message = source.new_empty(len(outgoing), *shape)
        for part, move in zip(message, outgoing, strict=True):
            part.copy_(source[move.source_slot, rows])
        received = source.new_empty(len(incoming), *shape)
        _exchange(received, message, incoming, outgoing, layer)
        for part, move in zip(received, incoming, strict=True):
            target[move.slot, rows].copy_(part)


def _exchange(
    received: torch.Tensor, message: torch.Tensor, incoming: list[_Move], outgoing: list[_Move], layer: Experts
) -> None:
    """Each part of ``message`` to its rank; ``outgoing`` is ordered by receiver, ``incoming`` by sender."""
    if layer.group is None:
        received.copy_(message)
        return
    part = received[:1].numel() * received.element_size() or message[:1].numel() * message.element_size()
    ranks = range(layer.expert_parallel_size)
    receives = [part * sum(move.source == rank for move in incoming) for rank in ranks]
    sends = [part * sum(move.rank == rank for move in outgoing) for rank in ranks]
    # As bytes: collectives do not know every dtype.
    received, message = received.view(-1).view(torch.uint8), message.view(-1).view(torch.uint8)
    with named_collective("rebalance", layer.group):
        dist.all_to_all_single(received, message, receives, sends, group=layer.group)
