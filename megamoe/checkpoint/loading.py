"""Checkpoints into ``MoE`` modules: each rank reads its own experts, one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path

import torch
from torch import nn

from megamoe.checkpoint.dims import BLOCK, FP8_BLOCK, Dims, halves, is_routed
from megamoe.checkpoint.files import Checkpoint
from megamoe.checkpoint.layer import (
    SCALES,
    StoredLayer,
    as_fp8_scales,
    find_form,
    names_by_layer,
    read_dequantized,
)
from megamoe.checkpoint.problems import Problems
from megamoe.checkpoint.recipes import CANONICAL, Form, forms_for
from megamoe.config import MoEConfig, check_config
from megamoe.errors import check_int, fail_type, fail_value
from megamoe.layers.moe import MoE
from megamoe.layers.parallel import local_tensor
from megamoe.types import Fp8Tensor

Folder = str | Path | Checkpoint


def open_checkpoint(folder: Folder) -> Checkpoint:
    return folder if isinstance(folder, Checkpoint) else Checkpoint(folder)


def candidate_forms(checkpoint: Checkpoint) -> tuple[Form, ...]:
    """The forms that the checkpoint's layers may have."""
    if checkpoint.record is not None:
        return (CANONICAL,)
    model_type = (checkpoint.config or {}).get("model_type")
    return forms_for(model_type if isinstance(model_type, str) else None)


def find_layers(checkpoint: Checkpoint) -> dict[str, tuple[Form, list[str]]]:
    """Stem -> form and names of each MoE layer, by number."""
    forms = candidate_forms(checkpoint)
    found = {stem: (find_form(names, forms), names) for stem, names in names_by_layer(checkpoint).items()}
    moe = {stem: (form, names) for stem, (form, names) in found.items() if form is not None}
    return dict(sorted(moe.items(), key=lambda item: (layer_number(item[0]), item[0])))


def layer_number(stem: str) -> int:
    """The number of the layer with this stem."""
    return int(stem.split(".")[-2])


def moe_layers(folder: Folder) -> list[int]:
    """The numbers of the layers of a checkpoint that are MoE layers, in ascending order.

    Raises:
        MegaMoEError: the folder is not a checkpoint, or damaged.
    """
    return sorted({layer_number(stem) for stem in find_layers(open_checkpoint(folder))})


def open_layers(checkpoint: Checkpoint, wanted: Iterable[tuple[int, MoEConfig]]) -> list[StoredLayer]:
    """The layers, complete and of the configured sizes; all faults of all of them in one error."""
    found = find_layers(checkpoint)
    problems, layers = Problems(), []
    for number, config in wanted:
        stems = [stem for stem in found if layer_number(stem) == number]
        if len(stems) != 1:
            numbers = sorted({layer_number(stem) for stem in found})
            rule = (
                f"must be an MoE layer of {checkpoint.folder}; these are {numbers}" if not stems else f"means {stems}"
            )
            fail_value("layer", number, rule, "Pass the number of one of them.")
        form, names = found[stems[0]]
        layers.append(StoredLayer(checkpoint, form, stems[0], names, Dims.of(config), problems))
    problems.raise_any(checkpoint.folder)
    return layers


def read_layer(
    folder: Folder,
    layer: int,
    config: MoEConfig,
    *,
    experts: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> dict[str, torch.Tensor | Fp8Tensor]:
    """A layer's tensors in megamoe's layout, quantised ones as they are stored: the same codes and scales, bit for bit.

    MXFP4 becomes e4m3 codes with the same values, in blocks of (1, 32) with the stored UE8M0 scales.

    Args:
        folder: of the checkpoint.
        layer: its number.
        config: what the layer must be.
        experts: which routed experts to read, in this order; default: all. A rank's own are
            ``moe.experts.slots.held``.
        device: where the tensors go; default: the CPU.

    Returns:
        The names of ``MoE``'s parameters (and ``router.expert_bias``) -> tensors in the stored dtype. ``experts.*`` are
        ``[len(experts), ...]``; a quantised one is a ``Fp8Tensor``.

    Raises:
        MegaMoEError: the checkpoint is damaged or does not match ``config``; or FP8 gate and up rows are not multiples
            of 128 rows, so that the scales of the two would not be the blocks of one tensor.
    """
    check_config(config)
    check_int("layer", layer, 0)
    experts = range(config.num_experts) if experts is None else experts
    for expert in experts:
        if expert not in range(config.num_experts):
            fail_value("experts", expert, f"must be in [0, {config.num_experts})", "Pass ids of routed experts.")
    (stored,) = open_layers(open_checkpoint(folder), [(layer, config)])
    for target, block in stored.blocks.items():
        rows = stored.dims.shapes()[target][0] // halves(target)
        if block == FP8_BLOCK and halves(target) == 2 and rows % BLOCK:
            fail_value(f"rows of {target}", rows, f"must be a multiple of {BLOCK} in FP8", "Load it dequantised.")
    plain = {}
    for target, spec in stored.specs.items():
        if is_routed(target):
            out = torch.empty(len(experts), *spec.shape[1:], dtype=spec.dtype, device=device)
            for row, expert in enumerate(experts):
                out[row].copy_(stored.read(target, expert))
        else:
            out = torch.empty(spec.shape, dtype=spec.dtype, device=device)
            out.copy_(stored.read(target, None))
        plain[target] = out
    return {
        target: Fp8Tensor(tensor, as_fp8_scales(plain[target + SCALES]), stored.blocks[target])
        if target in stored.blocks
        else tensor
        for target, tensor in plain.items()
        if target.removesuffix(SCALES) not in stored.blocks or target in stored.blocks
    }


def load_moe(moe: MoE, folder: Folder, layer: int, *, dequantize: bool = False) -> None:
    """Loads a layer of a checkpoint into ``moe``, in place, on any number of ranks.

    Each rank reads its own experts, one at a time, and the whole router and shared expert. Values are cast to the dtype
    of the parameters. Nothing is changed where an error is raised, and all ranks raise alike.

    Args:
        moe: built from the model's config, such as ``MoE(MoEConfig.from_hf(config), group=ep)``.
        folder: of the checkpoint: Hugging Face's, torchtitan's or megamoe's names, found from ``config.json`` and the
            names themselves. Or a ``Checkpoint``, so that it is opened once for many layers.
        layer: its number in the checkpoint.
        dequantize: allow FP8 and MXFP4 tensors to become unquantised parameters. Without, they are an error;
            ``read_layer`` returns them as they are.

    Raises:
        MegaMoEError: the checkpoint is damaged or does not match ``moe``; lists all missing, unexpected and mis-shaped
            tensors.
    """
    if not isinstance(moe, MoE):
        fail_type("moe", type(moe).__name__, "must be a megamoe.MoE", "Pass the layer, or load_moe_layers(model).")
    check_int("layer", layer, 0)
    _load([(moe, layer)], open_checkpoint(folder), dequantize)


def load_moe_layers(model: nn.Module, folder: Folder, *, dequantize: bool = False) -> None:
    """``load_moe`` for every ``MoE`` in ``model``; everything is checked before the first is loaded.

    The number of a layer is the one in its name: ``model.layers.3.mlp`` is layer 3.

    Raises:
        MegaMoEError: as ``load_moe``; ``model`` holds no ``MoE``, or the name of one does not hold exactly one number.
    """
    _load(numbered_layers(model), open_checkpoint(folder), dequantize)


def numbered_layers(model: nn.Module) -> list[tuple[MoE, int]]:
    """The ``MoE`` modules of ``model`` and the numbers in their names."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    if not found:
        fail_value("model", type(model).__name__, "must contain a megamoe.MoE", "Pass the model that holds the layers.")
    numbers = {name: [int(part) for part in name.split(".") if part.isdigit()] for name in found}
    for name, digits in numbers.items():
        if len(digits) != 1:
            fail_value("model", name, "must hold one number, that of the layer", "Call load_moe for each layer.")
    if len({digits[0] for digits in numbers.values()}) != len(found):
        fail_value("model", list(found), "has two MoE layers of one number", "Call load_moe for each layer.")
    return [(module, numbers[name][0]) for name, module in found.items()]


@torch.no_grad()
def _load(modules: list[tuple[MoE, int]], checkpoint: Checkpoint, dequantize: bool) -> None:
    layers = open_layers(checkpoint, [(number, moe.config) for moe, number in modules])
    plans = [_plan(moe, stored, dequantize) for (moe, _), stored in zip(modules, layers, strict=True)]
    for (moe, _), stored, plan in zip(modules, layers, plans, strict=True):
        for target, out in plan.items():
            read = read_dequantized if target in stored.blocks else StoredLayer.read
            if is_routed(target):
                for slot, expert in enumerate(moe.experts.slots.held):
                    out[slot].copy_(read(stored, target, expert))
            else:
                out.copy_(read(stored, target, None))


def _plan(moe: MoE, stored: StoredLayer, dequantize: bool) -> dict[str, torch.Tensor]:
    """Where each tensor of the layer goes on this rank."""
    plan = {}
    for target in stored.dims.shapes():
        try:
            parameter = attrgetter(target)(moe)
        except AttributeError:
            parameter = None
        if parameter is None:
            fail_value("moe", target, "is not there: its router is not megamoe's", "Load the tensors of read_layer.")
        out = local_tensor(parameter)
        shape = list(stored.specs[target].shape)
        if is_routed(target):
            shape[0] = moe.experts.placement.num_slots
        if list(out.shape) != shape:
            rule = f"must have {shape} on this rank, has {list(out.shape)}"
            fail_value(f"moe.{target}", type(parameter).__name__, rule, "Load before fully_shard.")
        if out.is_meta:
            fail_value(f"moe.{target}.device", "meta", "has no storage", "Call moe.to_empty(device=...) first.")
        if target in stored.blocks and not dequantize:
            fail_value(
                f"{target} of {stored.stem.removesuffix('.')}",
                str(stored.specs[target]),
                f"is quantised, and the parameter is {out.dtype}",
                "Pass dequantize=True, or read it as it is with megamoe.checkpoint.read_layer.",
            )
        plan[target] = out
    return plan
