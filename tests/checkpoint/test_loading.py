"""Models saved by transformers, loaded into ``MoE`` on 1, 2 and 4 ranks: outputs, what each rank reads, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megamoe import MegaMoEError, MoE, MoEConfig, RouterConfig
from megamoe.checkpoint import Checkpoint, load_moe, load_moe_layers, moe_layers, read_layer
from tests.checkpoint.tiny import EXPERTS, FAMILIES, HIDDEN, WIDTH, Saved, write_checkpoint
from tests.support.errors import fails
from tests.support.metrics import relative_error
from tests.support.processes import run_ranks

TOLERANCE = 1e-5
NAMES = ("hub", "stacked")
EXPERT_BYTES = 2 * WIDTH * HIDDEN * 4


def config_of(folder: Path) -> MoEConfig:
    return MoEConfig.from_hf(json.loads((folder / "config.json").read_text()))


def outputs_and_reads(rank: int, world_size: int, saved: Saved) -> dict[str, list]:
    """Per family, names and layer: the error of the output, and what this rank read of the routed experts."""
    group = dist.group.WORLD if world_size > 1 else None
    results = {}
    plain_read = Checkpoint.read
    for family in FAMILIES:
        expected = saved.outputs(family)
        for names in NAMES:
            folder = saved.folder(family, names)
            moe = MoE(config_of(folder), group=group).eval()
            for layer in saved.layers[family]:
                reads = []

                def read(checkpoint, name, index=None, reads=reads):
                    tensor = plain_read(checkpoint, name, index)
                    if ".experts." in name:
                        reads.append((name, index, tensor.nbytes))
                    return tensor

                Checkpoint.read = read
                try:
                    load_moe(moe, folder, layer)
                finally:
                    Checkpoint.read = plain_read
                with torch.no_grad():
                    out = moe(expected["x"])
                results[f"{family} {names} {layer}"] = [relative_error(out, expected[str(layer)]), reads]
    return results


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_outputs_equal_those_of_transformers(world_size, saved):
    ranks = (
        run_ranks(outputs_and_reads, world_size, saved) if world_size > 1 else [outputs_and_reads(0, world_size, saved)]
    )
    local = EXPERTS // world_size
    assert len(ranks[0]) == 2 * sum(map(len, saved.layers.values())) > 30
    for rank, results in enumerate(ranks):
        mine = set(range(rank * local, (rank + 1) * local))
        for case, (error, reads) in results.items():
            assert error < TOLERANCE, f"rank {rank}, {case}: {error}"
            # One expert at a time, no other rank's, each tensor of an expert once.
            experts = [int(n.split(".experts.")[1].split(".")[0]) if i is None else i for n, i, _ in reads]
            assert set(experts) == mine, case
            assert max(size for _, _, size in reads) <= EXPERT_BYTES, case
            assert len({(name, index) for name, index, _ in reads}) == len(reads), case


@pytest.mark.parametrize("family", FAMILIES)
def test_moe_layers(family, saved):
    for names in NAMES:
        assert moe_layers(saved.folder(family, names)) == saved.layers[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_read_layer(family, saved):
    folder = saved.folder(family)
    layer = saved.layers[family][-1]
    moe = MoE(config_of(folder))
    load_moe(moe, folder, layer)
    state = moe.state_dict()
    tensors = read_layer(str(folder), layer, moe.config)
    assert tensors.keys() == state.keys()
    assert all(torch.equal(tensors[name], state[name]) for name in state)
    some = read_layer(folder, layer, moe.config, experts=[5, 1])
    for name, tensor in some.items():
        assert torch.equal(tensor, state[name][[5, 1]] if name.startswith("experts.") else state[name])
    assert read_layer(folder, layer, moe.config, experts=())["experts.down_proj"].shape == (0, HIDDEN, WIDTH)


def test_dtype_of_the_parameters(saved):
    folder = saved.folder("deepseek_v3")
    layers = [MoE(config_of(folder), dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    for moe in layers:
        load_moe(moe, folder, 1)
    full, half = layers
    assert half.experts.down_proj.dtype == torch.bfloat16 and half.router.weight.dtype == torch.float32
    assert torch.equal(full.experts.down_proj.bfloat16(), half.experts.down_proj)
    assert torch.equal(full.router.expert_bias, half.router.expert_bias) and full.router.expert_bias.any()


def test_caches_of_the_weights_see_the_load(saved):
    # FP8 copies of a parameter are keyed by its version counter.
    folder = saved.folder("mixtral")
    moe = MoE(config_of(folder))
    before = {name: (p.data_ptr(), p._version) for name, p in moe.named_parameters()}
    load_moe(moe, folder, 0)
    for name, parameter in moe.named_parameters():
        assert parameter.data_ptr() == before[name][0] and parameter._version > before[name][1], name
        assert parameter.requires_grad and parameter.grad_fn is None


class Model(nn.Module):
    """Only the MoE layers of a model, under names like transformers'."""

    def __init__(self, config: MoEConfig, layers: list[int]):
        super().__init__()
        self.layers = nn.ModuleDict({str(n): nn.ModuleDict({"mlp": MoE(config)}) for n in layers})


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_load_moe_layers(family, saved):
    folder = saved.folder(family)
    model = Model(config_of(folder), saved.layers[family])
    load_moe_layers(model, folder)
    expected = saved.outputs(family)
    with torch.no_grad():
        for layer in saved.layers[family]:
            out = model.layers[str(layer)].mlp(expected["x"])
            assert relative_error(out, expected[str(layer)]) < TOLERANCE


# ---------------------------------------------------------------- torchtitan

CONFIG = MoEConfig(
    hidden_size=HIDDEN,
    intermediate_size=WIDTH,
    num_experts=EXPERTS,
    top_k=2,
    shared_intermediate_size=12,
    router=RouterConfig(score="sigmoid", expert_bias=True),
)
GPT_OSS = MoEConfig(
    hidden_size=HIDDEN,
    intermediate_size=WIDTH,
    num_experts=EXPERTS,
    top_k=2,
    bias=True,
    activation="swiglu_oai",
    router=RouterConfig(linear_bias=True),
)


def turns(x: torch.Tensor) -> torch.Tensor:
    """[gate | up] on axis 1 -> gate and up in turn."""
    return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def titan_swiglu(state: dict, prefix: str, up: str, down: str) -> dict:
    gate_up = state["experts.gate_up_proj"]
    return {
        f"{prefix}w1{up}": gate_up[:, :WIDTH],
        f"{prefix}w3{up}": gate_up[:, WIDTH:],
        f"{prefix}w2{down}": state["experts.down_proj"],
    }


def titan_linears(state: dict) -> dict:
    tensors = {
        "routed_experts.w13.weight": state["experts.gate_up_proj"].unflatten(1, (2, WIDTH)),
        "routed_experts.w2.weight": state["experts.down_proj"],
    }
    if "experts.down_proj_bias" in state:
        tensors["routed_experts.w13.bias"] = state["experts.gate_up_proj_bias"].unflatten(1, (2, WIDTH))
        tensors["routed_experts.w2.bias"] = state["experts.down_proj_bias"]
    return tensors


def titan_gpt_oss(state: dict, prefix: str, suffixes: tuple[str, ...]) -> dict:
    names = [
        f"{prefix}{n}{s}"
        for n, s in zip(("mlp1_weight", "mlp1_bias", "mlp2_weight", "mlp2_bias"), suffixes, strict=True)
    ]
    values = turns(state["experts.gate_up_proj"]), turns(state["experts.gate_up_proj_bias"])
    values += state["experts.down_proj"], state["experts.down_proj_bias"]
    return dict(zip(names, values, strict=True))


SHAPES = ("_EGD", "_EG", "_EDF", "_ED")
TITAN = {
    "plain": (CONFIG, "expert_bias", lambda s: titan_swiglu(s, "experts.", "", "")),
    "shapes": (CONFIG, "expert_bias_E", lambda s: titan_swiglu(s, "experts.", "_EFD", "_EDF")),
    "inner": (CONFIG, "expert_bias_E", lambda s: titan_swiglu(s, "routed_experts.inner_experts.", "_EFD", "_EDF")),
    "linears": (CONFIG, "expert_bias_E", titan_linears),
    "linears_bias": (GPT_OSS, "expert_bias_E", titan_linears),
    "gpt_oss_plain": (GPT_OSS, "expert_bias", lambda s: titan_gpt_oss(s, "experts.", ("",) * 4)),
    "gpt_oss_shapes": (GPT_OSS, "expert_bias_E", lambda s: titan_gpt_oss(s, "experts.", SHAPES)),
    "gpt_oss_inner": (GPT_OSS, "", lambda s: titan_gpt_oss(s, "routed_experts.inner_experts.", SHAPES)),
}


def titan_checkpoint(folder: Path, name: str) -> tuple[MoE, Path]:
    """A layer with random values, and the same as torchtitan names it, with a dense tensor beside it."""
    config, bias, experts = TITAN[name]
    moe = MoE(config)
    with torch.no_grad():
        for tensor in moe.state_dict().values():
            tensor.normal_()
    state = moe.state_dict()
    tensors = {"router.gate.weight": state["router.weight"], **experts(state)}
    if config.router.linear_bias:
        tensors["router.gate.bias"] = state["router.bias"]
    if config.router.expert_bias:
        tensors[bias] = state["router.expert_bias"]
    if config.shared_intermediate_size:
        gate, up = state["shared_experts.gate_up_proj"].chunk(2)
        tensors["shared_experts.w1.weight"], tensors["shared_experts.w3.weight"] = gate, up
        tensors["shared_experts.w2.weight"] = state["shared_experts.down_proj"]
    tensors = {f"layers.1.moe.{key}": value for key, value in tensors.items()}
    tensors["layers.0.feed_forward.w1.weight"] = torch.randn(4, HIDDEN)
    return moe, write_checkpoint(folder, tensors)


@pytest.mark.parametrize("name", TITAN)
def test_torchtitan(name, tmp_path, seed):
    expected, folder = titan_checkpoint(tmp_path / "c", name)
    assert moe_layers(folder) == [1]
    moe = MoE(expected.config)
    load_moe(moe, folder, 1)
    for key, value in expected.state_dict().items():
        assert torch.equal(moe.state_dict()[key], value), key


# ---------------------------------------------------------------- errors


def mixtral_tensors(saved: Saved) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(saved.folder("mixtral"))
    return {name: checkpoint.read(name) for name in checkpoint.weight_map}


def test_all_faults_are_listed_at_once(saved, tmp_path):
    tensors = mixtral_tensors(saved)
    block = "model.layers.1.block_sparse_moe."
    for expert in (2, 3, 4, 7):
        del tensors[f"{block}experts.{expert}.w3.weight"]
    for expert in (0, 6):
        tensors[f"{block}experts.{expert}.w2.weight"] = torch.zeros(WIDTH, HIDDEN)
    tensors[f"{block}experts.1.w1.weight"] = torch.zeros(WIDTH, HIDDEN, dtype=torch.int8)
    tensors[f"{block}experts.5.w1.weight"] = torch.zeros(WIDTH, HIDDEN, dtype=torch.bfloat16)
    tensors[f"{block}experts.8.w1.weight"] = torch.zeros(1)
    tensors[f"{block}bonus"] = torch.zeros(2, 3, dtype=torch.float16)
    del tensors[f"{block}gate.weight"]
    folder = write_checkpoint(tmp_path / "c", tensors)
    moe = MoE(config_of(saved.folder("mixtral")))
    before = {name: value.clone() for name, value in moe.state_dict().items()}
    with fails(ValueError, "checkpoint", str(folder), "its tensors do not match the layer"):
        load_moe(moe, folder, 1)
    with pytest.raises(MegaMoEError) as caught:
        load_moe(moe, folder, 1)
    floats = "must be one of BF16, F16, F32, F64"
    assert set(str(caught.value).splitlines()[1:-1]) == {
        f"  missing: {block}experts.{{2-4,7}}.w3.weight [{WIDTH}, {HIDDEN}]",
        f"  missing: {block}gate.weight [{EXPERTS}, {HIDDEN}]",
        f"  unexpected: {block}bonus F16 [2, 3]",
        f"  unexpected: {block}experts.8.w1.weight F32 [1]",
        f"  wrong: {block}experts.{{0,6}}.w2.weight is [{WIDTH}, {HIDDEN}], must be [{HIDDEN}, {WIDTH}]",
        f"  wrong: {block}experts.1.w1.weight is I8, {floats}",
        f"  wrong: {block}experts.1.w1.weight is I8, other parts of experts.gate_up_proj are F32",
        f"  wrong: {block}experts.5.w1.weight is BF16, other parts of experts.gate_up_proj are F32",
    }
    assert all(torch.equal(value, before[name]) for name, value in moe.state_dict().items())
    # The other layers are as they were.
    load_moe(moe, folder, 0)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("hidden_size", 32, ["gate.weight is [8, 24], must be [8, 32]"]),
        ("intermediate_size", 16, ["experts.{0-7}.w1.weight is [20, 24], must be [16, 24]"]),
        (
            "num_experts",
            6,
            ["unexpected: model.layers.0.block_sparse_moe.experts.{6-7}.w2", "is [8, 24], must be [6, 24]"],
        ),
        ("num_experts", 9, ["missing: model.layers.0.block_sparse_moe.experts.8.w2.weight [24, 20]"]),
    ],
)
def test_config_that_does_not_match(field, value, words, saved):
    folder = saved.folder("mixtral")
    config = config_of(folder).to_dict()
    config[field] = value
    with pytest.raises(MegaMoEError) as caught:
        load_moe(MoE(MoEConfig.from_dict(config)), folder, 0)
    assert all(word in str(caught.value) for word in words), caught.value


def test_config_with_tensors_that_the_family_does_not_have(saved):
    config = {**config_of(saved.folder("mixtral")).to_dict(), "shared_intermediate_size": 8}
    with fails(ValueError, "form", "mixtral", "has no place for shared_experts"):
        load_moe(MoE(MoEConfig.from_dict(config)), saved.folder("mixtral"), 0)


def test_no_such_layer(saved):
    folder = saved.folder("deepseek_v3")
    moe = MoE(config_of(folder))
    for layer in (0, 7):
        with fails(ValueError, "layer", layer, f"must be an MoE layer of {folder}; these are [1, 2]"):
            load_moe(moe, folder, layer)
    with fails(TypeError, "layer", "1", "must be an integer"):
        load_moe(moe, folder, "1")


def test_two_layers_of_one_number(saved, tmp_path):
    tensors = mixtral_tensors(saved)
    tensors.update(
        {name.replace("model.", "draft.", 1): value.clone() for name, value in tensors.items() if ".layers.1." in name}
    )
    folder = write_checkpoint(tmp_path / "c", tensors)
    moe = MoE(config_of(saved.folder("mixtral")))
    load_moe(moe, folder, 0)
    with fails(ValueError, "layer", 1, "means ['draft.layers.1.', 'model.layers.1.']"):
        load_moe(moe, folder, 1)


def test_what_cannot_be_loaded_into(saved):
    folder = saved.folder("mixtral")
    config = config_of(folder)
    with fails(TypeError, "moe", "Linear", "must be a megamoe.MoE"):
        load_moe(nn.Linear(2, 2), folder, 0)
    with fails(ValueError, "moe.router.weight.device", "meta", "has no storage"):
        load_moe(MoE(config, device="meta"), folder, 0)
    with fails(ValueError, "moe", "router.weight", "its router is not megamoe's"):
        load_moe(MoE(config, router=nn.Identity()), folder, 0)
    without_weight = nn.Module()
    without_weight.weight = None
    with fails(ValueError, "moe", "router.weight", "its router is not megamoe's"):
        load_moe(MoE(config, router=without_weight), folder, 0)
    relu = MoEConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_experts=EXPERTS, top_k=1, activation="relu2")
    with fails(ValueError, "config.activation", "relu2", "has no gate"):
        load_moe(MoE(relu), folder, 0)
    moe = MoE(config)
    moe.experts.down_proj = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, WIDTH // 2))
    with fails(ValueError, "moe.experts.down_proj", "Parameter", "must have [8, 24, 20] on this rank, has [8, 24, 10]"):
        load_moe(moe, folder, 0)


def test_models_without_numbered_layers(saved):
    folder = saved.folder("mixtral")
    config = config_of(folder)
    with fails(ValueError, "model", "Linear", "must contain a megamoe.MoE"):
        load_moe_layers(nn.Linear(2, 2), folder)
    with fails(ValueError, "model", "", "must hold one number"):
        load_moe_layers(MoE(config), folder)
    with fails(ValueError, "model", "0.0", "must hold one number"):
        load_moe_layers(nn.Sequential(nn.Sequential(MoE(config))), folder)
    with fails(ValueError, "model", ["a.0", "b.0"], "two MoE layers of one number"):
        load_moe_layers(nn.ModuleDict(dict(a=nn.ModuleList([MoE(config)]), b=nn.ModuleList([MoE(config)]))), folder)


def test_bad_experts(saved):
    folder = saved.folder("mixtral")
    for experts in ([0, 8], [-1]):
        with fails(ValueError, "experts", experts[-1], "must be in [0, 8)"):
            read_layer(folder, 0, config_of(folder), experts=experts)
