"""torchtitan's names, which changed over its releases; gate is ``w1``, up ``w3``, down ``w2``, experts stacked."""

from __future__ import annotations

from megamoe.checkpoint.layouts import Layout
from megamoe.checkpoint.recipes.base import Form, Recipe, Stored, gated_mlp

_REST = {
    "router.weight": (Stored("moe.router.gate.weight"),),
    "router.bias": (Stored("moe.router.gate.bias"),),
    **gated_mlp("shared_experts", "moe.shared_experts.", ("w1", "w3", "w2")),
}


def _swiglu(prefix: str, up: str, down: str) -> dict[str, tuple[Stored, ...]]:
    """Gate and up apart; ``up`` and ``down``: what the names of the shapes add."""
    return {
        "experts.gate_up_proj": (Stored(f"{prefix}w1{up}", 0), Stored(f"{prefix}w3{up}", 1)),
        "experts.down_proj": (Stored(f"{prefix}w2{down}"),),
    }


def _gpt_oss(prefix: str, suffixes: tuple[str, str, str, str]) -> dict[str, tuple[Stored, ...]]:
    up, up_bias, down, down_bias = suffixes
    turns = Layout(interleaved=True)
    return {
        "experts.gate_up_proj": (Stored(f"{prefix}mlp1_weight{up}", layout=turns),),
        "experts.gate_up_proj_bias": (Stored(f"{prefix}mlp1_bias{up_bias}", layout=turns),),
        "experts.down_proj": (Stored(f"{prefix}mlp2_weight{down}"),),
        "experts.down_proj_bias": (Stored(f"{prefix}mlp2_bias{down_bias}"),),
    }


def _form(name: str, bias: str, experts: dict[str, tuple[Stored, ...]]) -> Form:
    return Form(f"torchtitan_{name}", "moe.", {**_REST, "router.expert_bias": (Stored(f"moe.{bias}"),), **experts})


_LINEARS = {
    "experts.gate_up_proj": (Stored("moe.routed_experts.w13.weight", layout=Layout(split=True)),),
    "experts.gate_up_proj_bias": (Stored("moe.routed_experts.w13.bias", layout=Layout(split=True)),),
    "experts.down_proj": (Stored("moe.routed_experts.w2.weight"),),
    "experts.down_proj_bias": (Stored("moe.routed_experts.w2.bias"),),
}
_INNER = "moe.routed_experts.inner_experts."
_SHAPES = ("_EGD", "_EG", "_EDF", "_ED")
TORCHTITAN = Recipe(
    forms=(
        _form("plain", "expert_bias", _swiglu("moe.experts.", "", "")),
        _form("shapes", "expert_bias_E", _swiglu("moe.experts.", "_EFD", "_EDF")),
        _form("inner", "expert_bias_E", _swiglu(_INNER, "_EFD", "_EDF")),
        _form("linears", "expert_bias_E", _LINEARS),
        _form("gpt_oss_plain", "expert_bias", _gpt_oss("moe.experts.", ("", "", "", ""))),
        _form("gpt_oss_shapes", "expert_bias_E", _gpt_oss("moe.experts.", _SHAPES)),
        _form("gpt_oss_inner", "expert_bias_E", _gpt_oss(_INNER, _SHAPES)),
    )
)
