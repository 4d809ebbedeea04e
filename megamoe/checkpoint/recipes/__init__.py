"""Recipes: which stored tensors make up megamoe's, one module per family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megamoe.checkpoint.recipes.base import EXPERT, Form, Recipe, Stored
from megamoe.checkpoint.recipes.canonical import CANONICAL, MEGAMOE
from megamoe.checkpoint.recipes.deepseek import DEEPSEEK
from megamoe.checkpoint.recipes.gpt_oss import GPT_OSS
from megamoe.checkpoint.recipes.mixtral import MIXTRAL
from megamoe.checkpoint.recipes.qwen import QWEN
from megamoe.checkpoint.recipes.torchtitan import TORCHTITAN

RECIPES = (MIXTRAL, QWEN, DEEPSEEK, GPT_OSS, TORCHTITAN, MEGAMOE)
FORMS = {form.name: form for recipe in RECIPES for form in recipe.forms}


def forms_for(model_type: str | None) -> tuple[Form, ...]:
    """The forms that a model of this type may have; all forms where the type is not known."""
    fitting = [r for r in RECIPES if model_type is None or not r.model_types or model_type in r.model_types]
    return tuple(form for recipe in fitting for form in recipe.forms)


def expected_layers(config: Mapping[str, Any]) -> set[int]:
    """The numbers of the MoE layers that ``config.json`` promises; none where it does not say."""
    recipes = [recipe for recipe in RECIPES if config.get("model_type") in recipe.model_types]
    layers = config.get("num_hidden_layers")
    if not recipes or not isinstance(layers, int):
        return set()
    return {layer for layer in range(layers) if recipes[0].is_moe(config, layer)}


__all__ = ["CANONICAL", "EXPERT", "FORMS", "RECIPES", "Form", "Recipe", "Stored", "expected_layers", "forms_for"]
