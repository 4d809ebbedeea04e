"""Mixtral."""

from __future__ import annotations

from megamoe.checkpoint.recipes.base import Form, Recipe, Stored, gated_mlp, stacked_experts


def _form(name: str, prefix: str, experts: dict[str, tuple[Stored, ...]]) -> Form:
    return Form(name, prefix, {"router.weight": (Stored(f"{prefix}gate.weight"),), **experts})


_BLOCK, _MLP = "block_sparse_moe.", "mlp."
MIXTRAL = Recipe(
    forms=(
        _form("mixtral", _BLOCK, gated_mlp("experts", f"{_BLOCK}experts.{{expert}}.", ("w1", "w3", "w2"))),
        _form("mixtral_stacked", _MLP, stacked_experts(f"{_MLP}experts.")),
    ),
    model_types=("mixtral",),
)
