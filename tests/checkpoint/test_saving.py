"""``MoE`` layers written back into checkpoints, from one rank and from several."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megamoe import MoE, MoEConfig
from megamoe.checkpoint import Checkpoint, CheckpointError, convert, load_moe_layers, save_moe_layers, writing
from tests.checkpoint.test_conversion import assert_same_checkpoint, contents
from tests.checkpoint.test_layouts import same_bits
from tests.checkpoint.test_loading import Model, config_of
from tests.checkpoint.tiny import EXPERTS, FP8_CONFIG, Saved, fp8_tensors, write_checkpoint
from tests.support.errors import fails
from tests.support.processes import run_ranks

FAMILIES = ("mixtral", "deepseek_v3", "gpt_oss")


def loaded(saved: Saved, family: str, names: str = "hub", group=None, dtype=None) -> Model:
    folder = saved.folder(family, names)
    model = Model(config_of(folder), saved.layers[family])
    for layer in saved.layers[family]:
        model.layers[str(layer)]["mlp"] = MoE(config_of(folder), group=group, dtype=dtype)
    load_moe_layers(model, folder)
    return model


@torch.no_grad()
def scale_experts(model: nn.Module, factor: float) -> None:
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter *= factor


@pytest.mark.parametrize("names", ["hub", "stacked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_loaded_is_written(family, names, saved, tmp_path):
    source = saved.folder(family, names)
    model = loaded(saved, family, names)
    save_moe_layers(model, tmp_path / "same", source)
    assert_same_checkpoint(tmp_path / "same", source)
    scale_experts(model, -2.0)
    save_moe_layers(model, tmp_path / "scaled", source, tensors={"model.norm.weight": torch.ones(24)})
    before, after = contents(source), contents(tmp_path / "scaled")
    for name, value in after.items():
        wanted = -2.0 * before[name] if ".experts." in name else before[name]
        assert torch.equal(value, torch.ones(24) if name == "model.norm.weight" else wanted), name


def test_megamoe_format_and_narrower_parameters(saved, tmp_path):
    # The dtypes are those of ``like``.
    convert(saved.folder("deepseek_v3"), tmp_path / "like", "megamoe")
    model = loaded(saved, "deepseek_v3", dtype=torch.bfloat16)
    save_moe_layers(model, tmp_path / "x", tmp_path / "like")
    before, after = contents(tmp_path / "like"), contents(tmp_path / "x")
    assert before.keys() == after.keys()
    for name, value in after.items():
        narrowed = ".moe.experts." in name or ".moe.shared_experts." in name
        assert same_bits(value, before[name].bfloat16().float() if narrowed else before[name]), name
    convert(tmp_path / "x", tmp_path / "hf", "hf")
    assert Checkpoint(tmp_path / "hf").weight_map == Checkpoint(saved.folder("deepseek_v3")).weight_map


def save_from_ranks(rank: int, world_size: int, saved: Saved, root: Path) -> tuple[bool, int]:
    """Every rank loads its experts, scales them and saves; then the same with two copies of two ranks each.

    Returns:
        Whether the last result is complete on return, and how many broadcasts this rank took part in for it.
    """
    for family in FAMILIES:
        model = loaded(saved, family, group=dist.group.WORLD)
        scale_experts(model, -2.0)
        save_moe_layers(model, root / family, saved.folder(family))
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
    model = loaded(saved, "mixtral", "stacked", group=pairs[rank // 2])
    plain, broadcasts = dist.broadcast, []

    def broadcast(*args, **kwargs) -> None:
        broadcasts.append(args)
        plain(*args, **kwargs)

    dist.broadcast = broadcast
    save_moe_layers(model, root / "pairs", saved.folder("mixtral", "stacked"))
    return (root / "pairs" / "config.json").is_file(), len(broadcasts)


def test_ranks(saved, tmp_path):
    complete, broadcasts = zip(*run_ranks(save_from_ranks, 4, saved, tmp_path), strict=True)
    # Three layers of two stacked tensors, expert by expert; the copies on the other two ranks are not asked.
    assert all(complete) and broadcasts == (3 * 2 * EXPERTS, 3 * 2 * EXPERTS, 0, 0)
    for family in FAMILIES:
        before, after = contents(saved.folder(family)), contents(tmp_path / family)
        assert before.keys() == after.keys()
        for name, value in after.items():
            assert torch.equal(value, -2.0 * before[name] if ".experts." in name else before[name]), name
    assert_same_checkpoint(tmp_path / "pairs", saved.folder("mixtral", "stacked"))


def test_refusals(saved, tmp_path, seed):
    source = saved.folder("mixtral")
    model = loaded(saved, "mixtral")
    with fails(ValueError, "folder", str(tmp_path), "must not exist"):
        save_moe_layers(model, tmp_path, source)
    with fails(ValueError, "tensors", "model.norm", "is not a tensor of like"):
        save_moe_layers(model, tmp_path / "x", source, tensors={"model.norm": torch.ones(24)})
    with fails(ValueError, "tensors['model.norm.weight'].shape", [3], "must be [24]"):
        save_moe_layers(model, tmp_path / "x", source, tensors={"model.norm.weight": torch.ones(3)})
    fp8 = write_checkpoint(tmp_path / "fp8", fp8_tensors(FP8_CONFIG), FP8_CONFIG)
    with fails(ValueError, "like", str(fp8), "has layer 1 quantised"):
        save_moe_layers(Model(MoEConfig.from_hf(FP8_CONFIG), [1]), tmp_path / "x", fp8)
    assert {path.name for path in tmp_path.iterdir()} == {"fp8"}


def test_full_disk_leaves_nothing(saved, tmp_path, monkeypatch):
    model = loaded(saved, "mixtral")
    plain, calls = writing.write, []

    def write(file, data) -> None:
        calls.append(data)
        if len(calls) == 30:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(file, data)

    monkeypatch.setattr(writing, "write", write)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_moe_layers(model, tmp_path / "x", saved.folder("mixtral"))
    assert not list(tmp_path.iterdir())
    save_moe_layers(model, tmp_path / "x", saved.folder("mixtral"))
    assert Checkpoint(tmp_path / "x").weight_map == Checkpoint(saved.folder("mixtral")).weight_map
