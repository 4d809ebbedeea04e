"""megamoe's own format: the names and layouts of ``MoE``'s parameters, block scales beside their codes."""

from __future__ import annotations

from megamoe.checkpoint.recipes.base import Form, Recipe, Stored

PREFIX = "moe."
_QUANTIZED = tuple(f"{mlp}.{name}" for mlp in ("experts", "shared_experts") for name in ("gate_up_proj", "down_proj"))
_OTHERS = (
    "router.weight",
    "router.bias",
    "router.expert_bias",
    "experts.gate_up_proj_bias",
    "experts.down_proj_bias",
    "shared_experts.shared_gate",
)
CANONICAL = Form(
    "megamoe",
    PREFIX,
    {
        **{name: (Stored(f"{PREFIX}{name}", scales=f"{PREFIX}{name}_scales"),) for name in _QUANTIZED},
        **{name: (Stored(f"{PREFIX}{name}"),) for name in _OTHERS},
    },
)
MEGAMOE = Recipe(forms=(CANONICAL,))
