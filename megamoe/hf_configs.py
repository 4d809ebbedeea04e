"""Recipes from Hugging Face model configurations to the fields of ``MoEConfig``, one function per family of models.

Field names and semantics follow ``transformers`` 5.x (``configuration_*.py`` and ``modeling_*.py`` of each model).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megamoe.errors import fail_type, fail_value

_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
_REQUIRED = object()


class _Fields:
    """Reads fields of a configuration object or dict alike, following ``attribute_map``-style synonyms."""

    def __init__(self, hf_config: Any):
        self._config = hf_config

    def get(self, *names: str, default: Any = _REQUIRED) -> Any:
        """The first of ``names`` that is there and not None."""
        for name in names:
            if isinstance(self._config, dict):
                value = self._config.get(name)
            else:
                value = getattr(self._config, name, None)
            if value is not None:
                return value
        if default is _REQUIRED:
            fail_value(
                "hf_config", self.get("model_type", default="?"), f"has no field {' / '.join(names)}", "Add the field."
            )
        return default


def read_hf_config(hf_config: Any) -> dict[str, Any]:
    """The fields of ``MoEConfig`` (``router`` as a dict) for a model's configuration; see ``MoEConfig.from_hf``."""
    fields = _Fields(hf_config)
    model_type = fields.get("model_type", default=None)
    if model_type is None:
        fail_type("hf_config", type(hf_config).__name__, "has no model_type", "Pass a transformers config or its dict.")
    recipe = _RECIPES.get(model_type) if isinstance(model_type, str) else None
    if recipe is None:
        fail_value(
            "hf_config.model_type",
            model_type,
            f"is not one of {', '.join(sorted(_RECIPES))}",
            "Write the layer as MoEConfig(...) instead.",
        )
    return recipe(fields)


def _activation(fields: _Fields) -> str:
    name = fields.get("hidden_act", default="silu")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        fail_value(
            "hf_config.hidden_act", name, f"must be one of {', '.join(_ACTIVATIONS)}", "Write MoEConfig(...) yourself."
        )
    return _ACTIVATIONS[name]


def _aux_loss_coef(fields: _Fields) -> float:
    # transformers adds its auxiliary loss only when it returns router logits.
    if not fields.get("output_router_logits", default=False):
        return 0.0
    return float(fields.get("router_aux_loss_coef", default=0.0))


def _experts(fields: _Fields, intermediate: str) -> dict[str, Any]:
    return dict(
        hidden_size=fields.get("hidden_size"),
        intermediate_size=fields.get(intermediate),
        num_experts=fields.get("num_experts", "num_local_experts", "n_routed_experts"),
        top_k=fields.get("num_experts_per_tok"),
        activation=_activation(fields),
        init_std=fields.get("initializer_range", default=None),
    )


def _mixtral(fields: _Fields) -> dict[str, Any]:
    router = dict(renormalize=True, aux_loss_coef=_aux_loss_coef(fields))
    return dict(**_experts(fields, "intermediate_size"), router=router)


def _softmax_router(fields: _Fields) -> dict[str, Any]:
    renormalize = bool(fields.get("norm_topk_prob", default=False))
    return dict(renormalize=renormalize, aux_loss_coef=_aux_loss_coef(fields))


def _olmoe(fields: _Fields) -> dict[str, Any]:
    return dict(**_experts(fields, "intermediate_size"), router=_softmax_router(fields))


def _qwen3_moe(fields: _Fields) -> dict[str, Any]:
    return dict(**_experts(fields, "moe_intermediate_size"), router=_softmax_router(fields))


def _qwen2_moe(fields: _Fields) -> dict[str, Any]:
    return dict(
        **_experts(fields, "moe_intermediate_size"),
        router=_softmax_router(fields),
        shared_intermediate_size=fields.get("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _shared_width(fields: _Fields) -> int:
    return fields.get("moe_intermediate_size") * fields.get("n_shared_experts", default=0)


def _deepseek_v2(fields: _Fields) -> dict[str, Any]:
    method = fields.get("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        fail_value(
            "hf_config.topk_method", method, "must be greedy or group_limited_greedy", "Write MoEConfig(...) yourself."
        )
    if fields.get("norm_topk_prob", default=False):
        # The original code then skips the scaling, transformers ignores the field, and no checkpoint sets it.
        fail_value(
            "hf_config.norm_topk_prob",
            True,
            "has no agreed meaning for deepseek_v2",
            "Write MoEConfig(router=RouterConfig(renormalize=...)) yourself.",
        )
    limited = method == "group_limited_greedy"
    router = dict(
        renormalize=False,
        scaling_factor=float(fields.get("routed_scaling_factor", default=1.0)),
        num_groups=fields.get("n_group") if limited else 1,
        topk_groups=fields.get("topk_group") if limited else 1,
        group_score="max",
    )
    return dict(
        **_experts(fields, "moe_intermediate_size"), router=router, shared_intermediate_size=_shared_width(fields)
    )


def _deepseek_v3(fields: _Fields) -> dict[str, Any]:
    router = dict(
        score="sigmoid",
        renormalize=bool(fields.get("norm_topk_prob", default=True)),
        scaling_factor=float(fields.get("routed_scaling_factor", default=1.0)),
        num_groups=fields.get("n_group", default=1),
        topk_groups=fields.get("topk_group", default=1),
        group_score="sum_top2",
        expert_bias=True,
    )
    return dict(
        **_experts(fields, "moe_intermediate_size"), router=router, shared_intermediate_size=_shared_width(fields)
    )


def _gpt_oss(fields: _Fields) -> dict[str, Any]:
    alpha = fields.get("swiglu_alpha", default=1.702)
    if alpha != 1.702:
        fail_value("hf_config.swiglu_alpha", alpha, "must be 1.702", "Other gains are not part of swiglu_oai.")
    experts = _experts(fields, "intermediate_size")
    experts["activation"] = "swiglu_oai"
    # gpt-oss takes the softmax over the selected logits: the same as softmax over all, selected and renormalised.
    router = dict(renormalize=True, linear_bias=True, aux_loss_coef=_aux_loss_coef(fields))
    return dict(**experts, router=router, bias=True, activation_clamp=float(fields.get("swiglu_limit", default=7.0)))


_RECIPES: dict[str, Callable[[_Fields], dict[str, Any]]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _deepseek_v3,
    "gpt_oss": _gpt_oss,
}
