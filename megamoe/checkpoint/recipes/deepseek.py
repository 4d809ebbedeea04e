"""DeepSeek-V2, DeepSeek-V3 (BF16 or FP8 in 128x128 blocks) and GLM4-MoE; V2 has no selection bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megamoe.checkpoint.recipes.base import PROJECTIONS, Form, Recipe, Stored, gated_mlp, stacked_experts

_REST = {
    "router.weight": (Stored("mlp.gate.weight"),),
    "router.expert_bias": (Stored("mlp.gate.e_score_correction_bias"),),
    **gated_mlp("shared_experts", "mlp.shared_experts.", PROJECTIONS),
}
# As transformers has it where config.json does not say.
_FIRST_MOE_LAYER = {"deepseek_v2": 0, "deepseek_v3": 3, "glm4_moe": 1}


def _is_moe(config: Mapping[str, Any], layer: int) -> bool:
    first = config.get("first_k_dense_replace")
    return layer >= (_FIRST_MOE_LAYER[config["model_type"]] if first is None else first)


DEEPSEEK = Recipe(
    forms=(
        Form("deepseek", "mlp.", {**_REST, **gated_mlp("experts", "mlp.experts.{expert}.", PROJECTIONS)}),
        Form("deepseek_stacked", "mlp.", {**_REST, **stacked_experts("mlp.experts.")}),
    ),
    model_types=("deepseek_v2", "deepseek_v3", "glm4_moe"),
    is_moe=_is_moe,
)
