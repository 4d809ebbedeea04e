"""Layers of ``MoEConfig.from_hf`` against transformers' own MoE blocks: outputs and all gradients in fp32."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from megamoe import Experts, MoE, MoEConfig
from tests.support.metrics import assert_close

TOLERANCE = 1e-5
BATCH, LENGTH, HIDDEN = 3, 11, 24

# How a parameter of megamoe lies in the block: the block's tensors -> megamoe's, linear, so that it maps gradients too.
Mapping = dict[str, tuple[tuple[str, ...], Callable[..., torch.Tensor]]]


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def concatenate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.cat([gate, up])


def deinterleave(x: torch.Tensor) -> torch.Tensor:
    """gpt-oss: gate in the even, up in the odd columns."""
    return torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)


def transpose(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2)


ROUTED: Mapping = {
    "router.weight": (("gate.weight",), same),
    "experts.gate_up_proj": (("experts.gate_up_proj",), same),
    "experts.down_proj": (("experts.down_proj",), same),
}


def shared(name: str) -> Mapping:
    return {
        "shared_experts.gate_up_proj": ((f"{name}.gate_proj.weight", f"{name}.up_proj.weight"), concatenate),
        "shared_experts.down_proj": ((f"{name}.down_proj.weight",), same),
    }


GPT_OSS: Mapping = {
    "router.weight": (("router.weight",), same),
    "router.bias": (("router.bias",), same),
    "experts.gate_up_proj": (("experts.gate_up_proj",), lambda x: transpose(deinterleave(x))),
    "experts.gate_up_proj_bias": (("experts.gate_up_proj_bias",), deinterleave),
    "experts.down_proj": (("experts.down_proj",), transpose),
    "experts.down_proj_bias": (("experts.down_proj_bias",), same),
}


@dataclass
class Case:
    """A block of transformers and how its weights map to megamoe's.

    Attributes:
        fields: of the tiny configuration, besides the sizes all share.
        buffers: like ``mapping``, for tensors without a gradient.
        scale: of the weights; larger ones reach gpt-oss's clamp.
    """

    model: str
    config: str
    block: str
    mapping: Mapping
    fields: dict[str, Any]
    buffers: Mapping = field(default_factory=dict)
    scale: float = 1.0


V2 = dict(
    n_routed_experts=12,
    num_experts_per_tok=4,
    moe_intermediate_size=20,
    n_shared_experts=2,
    routed_scaling_factor=2.5,
    num_attention_heads=2,
)
V2_MAPPING = {**ROUTED, **shared("shared_experts")}
SCORE_BIAS: Mapping = {"router.expert_bias": (("gate.e_score_correction_bias",), same)}
V3 = {**V2, "n_group": 4, "topk_group": 2, "norm_topk_prob": True}
MIXTRAL = dict(intermediate_size=20, num_local_experts=5, num_experts_per_tok=2)
QWEN = dict(moe_intermediate_size=20, num_experts=6, num_experts_per_tok=3)

CASES = {
    "mixtral": Case("mixtral", "MixtralConfig", "MixtralSparseMoeBlock", ROUTED, MIXTRAL),
    "mixtral_gelu": Case(
        "mixtral", "MixtralConfig", "MixtralSparseMoeBlock", ROUTED, {**MIXTRAL, "hidden_act": "gelu"}
    ),
    "mixtral_gelu_tanh": Case(
        "mixtral", "MixtralConfig", "MixtralSparseMoeBlock", ROUTED, {**MIXTRAL, "hidden_act": "gelu_pytorch_tanh"}
    ),
    "qwen2_moe": Case(
        "qwen2_moe",
        "Qwen2MoeConfig",
        "Qwen2MoeSparseMoeBlock",
        {
            **ROUTED,
            **shared("shared_expert"),
            "shared_experts.shared_gate": (("shared_expert_gate.weight",), same),
        },
        {**QWEN, "shared_expert_intermediate_size": 28},
    ),
    "qwen3_moe": Case("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock", ROUTED, QWEN),
    "qwen3_moe_norm_topk": Case(
        "qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock", ROUTED, {**QWEN, "norm_topk_prob": True}
    ),
    "olmoe": Case(
        "olmoe",
        "OlmoeConfig",
        "OlmoeSparseMoeBlock",
        ROUTED,
        dict(intermediate_size=20, num_experts=7, num_experts_per_tok=3),
    ),
    "deepseek_v2_greedy": Case("deepseek_v2", "DeepseekV2Config", "DeepseekV2Moe", V2_MAPPING, V2),
    "deepseek_v2_groups": Case(
        "deepseek_v2",
        "DeepseekV2Config",
        "DeepseekV2Moe",
        V2_MAPPING,
        {**V2, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3": Case("deepseek_v3", "DeepseekV3Config", "DeepseekV3MoE", V2_MAPPING, V3, SCORE_BIAS),
    "deepseek_v3_no_norm": Case(
        "deepseek_v3",
        "DeepseekV3Config",
        "DeepseekV3MoE",
        V2_MAPPING,
        {**V3, "norm_topk_prob": False},
        SCORE_BIAS,
    ),
    "glm4_moe": Case(
        "glm4_moe",
        "Glm4MoeConfig",
        "Glm4MoeMoE",
        V2_MAPPING,
        {**V2, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "n_shared_experts": 1},
        SCORE_BIAS,
    ),
    "gpt_oss": Case(
        "gpt_oss",
        "GptOssConfig",
        "GptOssMLP",
        GPT_OSS,
        dict(intermediate_size=20, num_local_experts=6, num_experts_per_tok=3),
        scale=4.0,
    ),
}


def build(case: Case) -> tuple[nn.Module, MoE]:
    """The block with random weights, and megamoe's layer with the same."""
    transformers = pytest.importorskip("transformers")
    hf_config = getattr(transformers, case.config)(hidden_size=HIDDEN, **case.fields)
    # The plain loop over experts, whatever kernels are installed.
    hf_config._experts_implementation = "eager"
    modeling = importlib.import_module(f"transformers.models.{case.model}.modeling_{case.model}")
    block = getattr(modeling, case.block)(hf_config)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            # [..., fan_out, fan_in], but gpt-oss's experts are [..., fan_in, fan_out]; biases N(0, 1).
            dim = -2 if case.model == "gpt_oss" and parameter.dim() == 3 else -1
            std = 1.0 if "bias" in name else parameter.shape[dim] ** -0.5
            parameter.normal_(std=case.scale * std)
        for buffer in block.buffers():
            # Large enough against sigmoid scores to change the selection.
            buffer.normal_(std=0.5)

    layer = MoE(MoEConfig.from_hf(hf_config))
    tensors = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    state = {
        name: convert(*(tensors[source].detach() for source in sources)).clone()
        for name, (sources, convert) in {**case.mapping, **case.buffers}.items()
    }
    layer.load_state_dict(state)
    return block, layer


@pytest.mark.parametrize("name", CASES)
def test_block(name, seed):
    case = CASES[name]
    block, layer = build(case)
    x = torch.randn(BATCH, LENGTH, HIDDEN)
    grad = torch.randn_like(x)
    expected_x, actual_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = block(expected_x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    actual = layer(actual_x)
    assert_close(actual, expected, TOLERANCE, "output")
    expected.backward(grad)
    actual.backward(grad)
    assert_close(actual_x.grad, expected_x.grad, TOLERANCE, "input gradient")

    parameters = dict(block.named_parameters())
    assert {n for sources, _ in case.mapping.values() for n in sources} == parameters.keys(), (
        "a parameter is not mapped"
    )
    assert dict(layer.named_parameters()).keys() == case.mapping.keys()
    for ours, (sources, convert) in case.mapping.items():
        expected_grad = convert(*(parameters[source].grad for source in sources))
        assert_close(layer.get_parameter(ours).grad, expected_grad, TOLERANCE, f"gradient of {ours}")


def test_gpt_oss_case_reaches_the_clamp(seed):
    # Without values beyond it, the parity above could not see a missing clamp.
    block, layer = build(CASES["gpt_oss"])
    tokens = torch.randn(BATCH * LENGTH, HIDDEN)
    gate_up = torch.einsum("th,eih->tei", tokens, layer.experts.gate_up_proj) + layer.experts.gate_up_proj_bias
    gate, up = gate_up.chunk(2, dim=-1)
    for name, values in (("gate > 7", gate > 7), ("up > 7", up > 7), ("up < -7", up < -7)):
        assert values.float().mean() > 0.01, name


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_score_bias_changes_the_selection(name, seed):
    # Else the parity above could not see a bias that is ignored.
    _, layer = build(CASES[name])
    x = torch.randn(200, HIDDEN)
    biased = layer.router(x).topk_index
    layer.router.expert_bias.zero_()
    assert (biased.sort().values != layer.router(x).topk_index.sort().values).any(dim=1).float().mean() > 0.1


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_experts_called_as_transformers_calls_them(name, seed):
    """``Experts`` in place of the block's own experts module, arguments positional as in the block's forward."""
    case = CASES[name]
    block, layer = build(case)
    x = torch.randn(BATCH, LENGTH, HIDDEN)
    expected = block(x)
    # transformers reads and may set attributes of the module it calls.
    block.experts = layer.experts
    actual = block(x)
    assert isinstance(block.experts, Experts)
    first = (lambda out: out[0]) if name == "gpt_oss" else (lambda out: out)
    assert_close(first(actual), first(expected), TOLERANCE)


def test_experts_accept_the_argument_names_of_transformers(seed):
    block, layer = build(CASES["qwen3_moe"])
    tokens = torch.randn(BATCH * LENGTH, HIDDEN)
    _, weights, index = block.gate(tokens)
    expected = block.experts(hidden_states=tokens, top_k_index=index, top_k_weights=weights)
    actual = layer.experts(hidden_states=tokens, top_k_index=index, top_k_weights=weights)
    assert_close(actual, expected, TOLERANCE)


def test_sentinel_of_transformers_expert_parallelism(seed):
    # transformers marks pairs of other ranks with id num_experts and a weight of 0.
    block, layer = build(CASES["mixtral"])
    tokens = torch.randn(40, HIDDEN)
    weights = torch.rand(40, 2)
    index = torch.randint(0, 6, (40, 2))
    assert (index == 5).any()
    weights = weights.masked_fill(index == 5, 0.0)
    assert_close(layer.experts(tokens, index, weights), block.experts(tokens, index, weights), TOLERANCE)
