"""The recipes as a whole: unambiguous names, a way from any family to megamoe's format and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megamoe import MoE, MoEConfig, RouterConfig, checkpoint
from megamoe.checkpoint.dims import Dims
from megamoe.checkpoint.layer import entries, find_form
from megamoe.checkpoint.recipes import CANONICAL, FORMS, RECIPES, expected_layers, forms_for
from megamoe.hf_configs import _RECIPES as CONFIG_RECIPES
from tests.checkpoint.tiny import FAMILIES

EVERYTHING = MoEConfig(
    hidden_size=8,
    intermediate_size=8,
    num_experts=2,
    top_k=1,
    bias=True,
    shared_intermediate_size=8,
    shared_gate=True,
    router=RouterConfig(linear_bias=True, expert_bias=True),
)


def test_form_names_are_unique():
    names = [form.name for recipe in RECIPES for form in recipe.forms]
    assert len(names) == len(set(names)) == len(FORMS)
    assert all(form.dequantized in (None, *names) for form in FORMS.values())


def test_every_family_that_configs_are_read_of_has_a_recipe():
    assert {t for recipe in RECIPES for t in recipe.model_types} == set(CONFIG_RECIPES)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_form(form):
    # One name, one tensor; all under the prefix, which is where unexpected tensors are looked for.
    stored = [s for parts in form.tensors.values() for s in parts]
    names = [s.name for s in stored] + [s.scales for s in stored if s.scales]
    assert len(names) == len(set(names))
    assert all(name.startswith(form.prefix) for name in names)
    for parts in form.tensors.values():
        assert [s.half for s in parts] in ([None], [0, 1])
    assert form.tensors.keys() <= CANONICAL.tensors.keys()
    assert {"router.weight", "experts.gate_up_proj", "experts.down_proj"} <= form.tensors.keys()


def test_canonical_form_has_the_names_of_the_module():
    layer = MoE(EVERYTHING)
    shapes = Dims.of(EVERYTHING).shapes()
    for entry in entries(CANONICAL, "", Dims.of(EVERYTHING), {}):
        assert entry.name == f"moe.{entry.target}"
        assert entry.shape == tuple(layer.state_dict()[entry.target].shape)
    assert shapes.keys() == layer.state_dict().keys() == CANONICAL.tensors.keys()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_forms_are_told_apart_by_their_names(form):
    # Of one model type, and where the type is not known; some forms of different families have the same names.
    dims = Dims(8, 8, 2, shared=8, shared_gate=True, biases=True, router_bias=True, expert_bias=True)
    shapes = {t: s for t, s in dims.shapes().items() if t in form.tensors}
    blocks = {t: (1, 32) for t in shapes if any(s.layout.mxfp4 for s in form.tensors[t])}
    dims = Dims(
        8,
        8,
        2,
        shared=8 * ("shared_experts.down_proj" in shapes),
        shared_gate="shared_experts.shared_gate" in shapes,
        biases="experts.down_proj_bias" in shapes,
        router_bias="router.bias" in shapes,
        expert_bias="router.expert_bias" in shapes,
    )
    names = [entry.name for entry in entries(form, "", dims, blocks)]
    types = [t for recipe in RECIPES if form in recipe.forms for t in recipe.model_types] or [None]
    for model_type in {*types, None}:
        found = find_form(names, forms_for(model_type))
        again = [entry.name for entry in entries(found, "", dims, blocks)]
        assert sorted(again) == sorted(names), f"{model_type}: {found.name}"
        assert found.tensors.items() >= {t: form.tensors[t] for t in shapes}.items()


def test_transformers_is_not_needed():
    # Only the extra "hf" brings it; config.json is read without it.
    for path in Path(checkpoint.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "import transformers" not in text and "from transformers" not in text, path


def test_dense_layers_have_no_form():
    names = [f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")]
    assert find_form([*names, "self_attn.q_proj.weight"], tuple(FORMS.values())) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_expected_layers(family, saved):
    config = json.loads((saved.folder(family) / "config.json").read_text())
    assert expected_layers(config) == set(saved.layers[family])
    assert 0 < len(saved.layers[family]) <= 3


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, set()),
        ({"model_type": "llama", "num_hidden_layers": 4}, set()),
        ({"model_type": "mixtral"}, set()),
        ({"model_type": "deepseek_v3", "num_hidden_layers": 5}, {3, 4}),
        ({"model_type": "glm4_moe", "num_hidden_layers": 3, "first_k_dense_replace": None}, {1, 2}),
        ({"model_type": "deepseek_v2", "num_hidden_layers": 2}, {0, 1}),
        ({"model_type": "qwen2_moe", "num_hidden_layers": 2, "mlp_only_layers": None}, {0, 1}),
    ],
)
def test_expected_layers_of_sparse_configs(config, layers):
    assert expected_layers(config) == layers
