"""Qwen2-MoE, Qwen3-MoE and OLMoE: one set of names; of these only Qwen2-MoE has a shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megamoe.checkpoint.recipes.base import PROJECTIONS, Form, Recipe, Stored, gated_mlp, stacked_experts

_REST = {
    "router.weight": (Stored("mlp.gate.weight"),),
    **gated_mlp("shared_experts", "mlp.shared_expert.", PROJECTIONS),
    "shared_experts.shared_gate": (Stored("mlp.shared_expert_gate.weight"),),
}


def _is_moe(config: Mapping[str, Any], layer: int) -> bool:
    step = config.get("decoder_sparse_step") or 1
    return layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % step == 0


QWEN = Recipe(
    forms=(
        Form("qwen", "mlp.", {**_REST, **gated_mlp("experts", "mlp.experts.{expert}.", PROJECTIONS)}),
        Form("qwen_stacked", "mlp.", {**_REST, **stacked_experts("mlp.experts.")}),
    ),
    model_types=("qwen2_moe", "qwen3_moe", "olmoe"),
    is_moe=_is_moe,
)
