"""FP8 and MXFP4 layers: the stored codes and scales bit for bit, and their values against independent maths."""

from __future__ import annotations

import pytest
import torch

from megamoe import MegaMoEError, MoE, MoEConfig
from megamoe.checkpoint import load_moe, read_layer
from megamoe.types import Fp8Tensor
from tests.checkpoint.test_layouts import e2m1, same_bits
from tests.checkpoint.tiny import FP8_CONFIG, MXFP4_CONFIG, fp8_tensors, mxfp4_tensors, write_checkpoint
from tests.support.errors import fails

STEM = "model.layers.1.mlp."
FP8_MOE, MXFP4_MOE = MoEConfig.from_hf(FP8_CONFIG), MoEConfig.from_hf(MXFP4_CONFIG)
QUANTIZED = [f"{mlp}.{name}" for mlp in ("experts", "shared_experts") for name in ("gate_up_proj", "down_proj")]


def joined(tensors: dict[str, torch.Tensor], mlp: str, suffix: str, names: tuple[str, ...]) -> torch.Tensor:
    """The stored bytes of an MLP's linear layers, one below the other."""
    parts = [tensors[f"{STEM}{mlp}.{name}.weight{suffix}"] for name in names]
    return torch.cat([part.view(torch.uint8) if part.element_size() == 1 else part for part in parts])


def stored_fp8(tensors: dict[str, torch.Tensor], target: str, suffix: str) -> torch.Tensor:
    """What the file has for one of megamoe's tensors, 8-bit floats as bytes."""
    mlp, name = target.split(".")
    names = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
    if mlp == "shared_experts":
        return joined(tensors, mlp, suffix, names)
    return torch.stack([joined(tensors, f"experts.{expert}", suffix, names) for expert in range(4)])


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
@pytest.mark.parametrize("shards", [1, 4])
def test_fp8_codes_and_scales_are_kept(shards, scale_dtype, tmp_path, seed):
    tensors = fp8_tensors(FP8_CONFIG, scale_dtype=scale_dtype)
    folder = write_checkpoint(tmp_path / "c", tensors, FP8_CONFIG, shards)
    layer = read_layer(folder, 1, FP8_MOE)
    assert layer.keys() == MoE(FP8_MOE, device="meta").state_dict().keys()
    for target in QUANTIZED:
        tensor = layer[target]
        assert isinstance(tensor, Fp8Tensor) and tensor.block == (128, 128)
        assert tensor.codes.dtype == torch.float8_e4m3fn
        assert torch.equal(tensor.codes.view(torch.uint8), stored_fp8(tensors, target, ""))
        assert tensor.scales.dtype == (torch.float32 if scale_dtype == torch.float32 else torch.uint8)
        assert torch.equal(tensor.scales, stored_fp8(tensors, target, "_scale_inv"))
    assert same_bits(layer["router.weight"], tensors[f"{STEM}gate.weight"])
    assert same_bits(layer["router.expert_bias"], tensors[f"{STEM}gate.e_score_correction_bias"])


def test_fp8_of_one_rank(tmp_path, seed):
    folder = write_checkpoint(tmp_path / "c", fp8_tensors(FP8_CONFIG), FP8_CONFIG)
    everything, mine = read_layer(folder, 1, FP8_MOE), read_layer(folder, 1, FP8_MOE, experts=range(2, 4))
    for target in QUANTIZED[:2]:
        assert same_bits(mine[target].codes, everything[target].codes[2:])
        assert same_bits(mine[target].scales, everything[target].scales[2:])


def test_stacked_fp8(tmp_path, seed):
    tensors = fp8_tensors(FP8_CONFIG, stacked=True)
    layer = read_layer(write_checkpoint(tmp_path / "c", tensors, FP8_CONFIG), 1, FP8_MOE)
    for name in ("gate_up_proj", "down_proj"):
        assert same_bits(layer[f"experts.{name}"].codes, tensors[f"{STEM}experts.{name}"])
        assert same_bits(layer[f"experts.{name}"].scales, tensors[f"{STEM}experts.{name}_scale_inv"])


def dequantized(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Code times the scale of its 128x128 block, in float64."""
    out = codes.double()
    for row in range(scales.shape[0]):
        for col in range(scales.shape[1]):
            out[row * 128 : (row + 1) * 128, col * 128 : (col + 1) * 128] *= float(scales[row, col])
    return out


@pytest.mark.parametrize("width", [128, 96, 200])
def test_fp8_into_a_layer(width, tmp_path, seed):
    # Where gate and up are no multiples of 128 rows, each still has blocks of its own.
    fields = {**FP8_CONFIG, "moe_intermediate_size": width}
    tensors, config = fp8_tensors(fields), MoEConfig.from_hf(fields)
    folder = write_checkpoint(tmp_path / "c", tensors, fields)
    moe = MoE(config)
    if width % 128:
        with fails(ValueError, "rows of experts.gate_up_proj", width, "must be a multiple of 128 in FP8"):
            read_layer(folder, 1, config)
    with fails(ValueError, "experts.gate_up_proj of model.layers.1", f"F8_E4M3 [4, {2 * width}, 256]", "is quantised"):
        load_moe(moe, folder, 1)
    load_moe(moe, folder, 1, dequantize=True)
    state = moe.state_dict()
    for mlp in ("shared_experts", *(f"experts.{expert}" for expert in range(4))):
        name, _, expert = mlp.partition(".")
        gate_up, down = (state[f"{name}.{proj}_proj"] for proj in ("gate_up", "down"))
        gate_up, down = (x[int(expert)] if expert else x for x in (gate_up, down))
        wanted = {
            proj: dequantized(
                tensors[f"{STEM}{mlp}.{proj}_proj.weight"], tensors[f"{STEM}{mlp}.{proj}_proj.weight_scale_inv"]
            ).float()
            for proj in ("gate", "up", "down")
        }
        assert torch.equal(gate_up, torch.cat([wanted["gate"], wanted["up"]])), mlp
        assert torch.equal(down, wanted["down"]), mlp


def test_fp8_faults(tmp_path, seed):
    tensors = fp8_tensors(FP8_CONFIG)
    del tensors[f"{STEM}experts.2.down_proj.weight_scale_inv"]
    tensors[f"{STEM}experts.1.up_proj.weight_scale_inv"] = torch.ones(2, 4)
    up = f"{STEM}experts.3.up_proj.weight_scale_inv"
    tensors[up] = torch.ones(1, 2, dtype=torch.bfloat16)
    tensors[f"{STEM}shared_experts.down_proj.weight"] = torch.ones(256, 128)
    folder = write_checkpoint(tmp_path / "c", tensors, FP8_CONFIG)
    with pytest.raises(MegaMoEError) as caught:
        load_moe(MoE(FP8_MOE), folder, 1, dequantize=True)
    lines = str(caught.value).splitlines()[1:-1]
    assert lines == [
        f"  missing: {STEM}experts.2.down_proj.weight_scale_inv [2, 1]",
        f"  wrong: {STEM}experts.1.up_proj.weight_scale_inv is [2, 4], must be [1, 2]",
        f"  wrong: {up} is BF16, must be one of F32, F8_E8M0",
        f"  wrong: {up} is BF16, other parts of experts.gate_up_proj_scales are F32",
        f"  wrong: {STEM}shared_experts.down_proj.weight is F32, must be one of F8_E4M3",
    ]


def test_scales_that_are_all_missing_are_missed(tmp_path, seed):
    tensors = {name: value for name, value in fp8_tensors(FP8_CONFIG).items() if "experts.0.down_proj" not in name}
    tensors = {name: value for name, value in tensors.items() if not name.endswith("gate_proj.weight_scale_inv")}
    folder = write_checkpoint(tmp_path / "c", tensors, FP8_CONFIG)
    with pytest.raises(MegaMoEError) as caught:
        load_moe(MoE(FP8_MOE), folder, 1, dequantize=True)
    for name in ("experts.0.down_proj.weight [256, 128]", "experts.{0-3}.gate_proj.weight_scale_inv [1, 2]"):
        assert f"missing: {STEM}{name}" in str(caught.value)


# ---------------------------------------------------------------- MXFP4


def decoded(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """float64 ``[E, rows, cols]`` of packed codes and exponents, from their definition."""
    blocks, scales = (tensors[f"model.layers.0.mlp.experts.{name}_{part}"] for part in ("blocks", "scales"))
    table = torch.tensor([e2m1(code) for code in range(16)], dtype=torch.float64)
    pairs = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], dim=-1)
    return (pairs.flatten(-2) * torch.exp2(scales.double() - 127).unsqueeze(-1)).flatten(-2)


def test_mxfp4_codes_and_scales_are_kept(tmp_path, seed):
    tensors = mxfp4_tensors(MXFP4_CONFIG)
    layer = read_layer(write_checkpoint(tmp_path / "c", tensors, MXFP4_CONFIG), 0, MXFP4_MOE)
    for name in ("gate_up_proj", "down_proj"):
        tensor = layer[f"experts.{name}"]
        scales, values = tensors[f"model.layers.0.mlp.experts.{name}_scales"], decoded(tensors, name)
        if name == "gate_up_proj":
            scales, values = (torch.cat([x[:, 0::2], x[:, 1::2]], dim=1) for x in (scales, values))
        assert tensor.block == (1, 32) and torch.equal(tensor.scales, scales)
        exponents = torch.exp2(tensor.scales.double() - 127).repeat_interleave(32, dim=-1)
        assert torch.equal(tensor.codes.double() * exponents, values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_into_a_layer(dtype, tmp_path, seed):
    tensors = mxfp4_tensors(MXFP4_CONFIG)
    folder = write_checkpoint(tmp_path / "c", tensors, MXFP4_CONFIG)
    moe = MoE(MXFP4_MOE, dtype=dtype)
    with fails(ValueError, "experts.gate_up_proj of model.layers.0", "F8_E4M3 [4, 192, 64]", "is quantised"):
        load_moe(moe, folder, 0)
    load_moe(moe, folder, 0, dequantize=True)
    gate_up = decoded(tensors, "gate_up_proj")
    # Every e2m1 value times a power of two is a BF16 number.
    assert torch.equal(moe.experts.gate_up_proj.double(), torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], dim=1))
    assert torch.equal(moe.experts.down_proj.double(), decoded(tensors, "down_proj"))
    bias = tensors["model.layers.0.mlp.experts.gate_up_proj_bias"].to(dtype)
    assert torch.equal(moe.experts.gate_up_proj_bias, torch.cat([bias[:, 0::2], bias[:, 1::2]], dim=1))


def test_mxfp4_as_transformers_decodes_it(tmp_path, seed):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    tensors = mxfp4_tensors(MXFP4_CONFIG)
    moe = MoE(MXFP4_MOE, dtype=torch.bfloat16)
    load_moe(moe, write_checkpoint(tmp_path / "c", tensors, MXFP4_CONFIG), 0, dequantize=True)
    stem = "model.layers.0.mlp.experts.down_proj"
    theirs = mxfp4.convert_moe_packed_tensors(tensors[f"{stem}_blocks"], tensors[f"{stem}_scales"])
    assert torch.equal(moe.experts.down_proj, theirs.transpose(1, 2))


def test_mxfp4_faults(tmp_path, seed):
    tensors = mxfp4_tensors(MXFP4_CONFIG)
    stem = "model.layers.0.mlp.experts."
    del tensors[f"{stem}gate_up_proj_scales"]
    tensors[f"{stem}down_proj_scales"] = torch.ones(4, 64, 3)
    tensors[f"{stem}down_proj_blocks"] = tensors[f"{stem}down_proj_blocks"][..., :8].contiguous()
    with pytest.raises(MegaMoEError) as caught:
        read_layer(write_checkpoint(tmp_path / "c", tensors, MXFP4_CONFIG), 0, MXFP4_MOE)
    assert str(caught.value).splitlines()[1:-1] == [
        f"  missing: {stem}gate_up_proj_scales [4, 192, 2]",
        f"  wrong: {stem}down_proj_blocks is [4, 64, 3, 8], must be [4, 64, 3, 16]",
        f"  wrong: {stem}down_proj_scales is F32, must be one of U8",
    ]
