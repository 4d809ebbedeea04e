"""``experts_implementation="megamoe"``: the experts modules of transformers on megamoe's exchange and expert MLP.

Weights are used as they are stored, with two exceptions, both gpt-oss's: its ``gate_up_proj``, in which gate and up
columns alternate, is put in order for each call; and its ``down_proj``, stored transposed, is read as a view, of which
Hopper's kernels make a copy for each call.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megamoe.comm.exchange import Exchange, LocalExchange
from megamoe.config import SWIGLU_OAI_ALPHA
from megamoe.errors import fail_value
from megamoe.kernels.mlp import MlpOptions, grouped_mlp
from megamoe.kernels.reference import accumulation_dtype
from megamoe.layers.parallel import local_tensor
from megamoe.layers.shared import compute_dtype
from megamoe.types import Routing

NAME = "megamoe"
DEQUANTIZE = "Load it with quantization_config=FineGrainedFP8Config(dequantize=True), or Mxfp4Config for gpt-oss."
OTHER_EXPERTS = 'Choose other experts, such as experts_implementation="grouped_mm".'

# By the class of ``act_fn``: with a gate, and without one.
_GATED = {"SiLU": "swiglu", "SiLUActivation": "swiglu", "GELUActivation": "geglu", "GELUTanh": "geglu_tanh"}
_UNGATED = {"ReLUSquaredActivation": "relu2"}
# By the module that defines ``_apply_gate``: act_fn(gate) * up of two halves, and gpt-oss's own.
_PLAIN_GATE = "transformers.integrations.moe"
_GPT_OSS_GATE = "transformers.models.gpt_oss.modeling_gpt_oss"


def from_transformers(module: str, name: str) -> Any:
    """``transformers.<module>.<name>``, imported on demand: that takes seconds.

    Raises:
        MegaMoEError: transformers is missing or too old.
    """
    try:
        return getattr(importlib.import_module(f"transformers.{module}"), name)
    except (ImportError, AttributeError) as error:
        fail_value(
            "transformers",
            str(error),
            "a release that has experts_implementation must be installed",
            "Install megamoe[hf], or transformers 5.24 or newer.",
        )


def register() -> None:
    """Makes ``experts_implementation="megamoe"`` known to transformers; calling it again changes nothing.

    Raises:
        MegaMoEError: transformers is missing or too old.
    """
    from_transformers("integrations.moe", "ALL_EXPERTS_FUNCTIONS").register(NAME, experts_forward)
    # Quantized experts have an interface of their own, which would fail without saying why.
    quantized = from_transformers("integrations.finegrained_fp8", "ALL_FP8_EXPERTS_FUNCTIONS")
    quantized.register(NAME, _refuse_quantized)


def _refuse_quantized(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    fail_value("experts_implementation", NAME, f"cannot run quantized experts of {model_type(module)}", DEQUANTIZE)


@dataclass(frozen=True)
class Recipe:
    """What an experts module computes, and how its weights lie.

    Attributes:
        options: of the MLP.
        weights: names of the up and the down weight.
        biases: names of their biases; empty without.
        transposed: weights are ``[E, fan_in, fan_out]``.
        interleaved: gate and up alternate in the up weight.
    """

    options: MlpOptions
    weights: tuple[str, str]
    biases: tuple[str, ...]
    transposed: bool
    interleaved: bool


def is_experts(module: nn.Module) -> bool:
    """Whether ``module`` follows the experts interface of transformers."""
    return all(hasattr(module, flag) for flag in ("has_gate", "has_bias", "is_transposed"))


def model_type(module: nn.Module) -> str:
    """As in the model's configuration."""
    return getattr(getattr(module, "config", None), "model_type", type(module).__name__)


def read_recipe(module: nn.Module, weight_grad_scale: float = 1.0) -> Recipe:
    """The recipe of an experts module, from its flags.

    Raises:
        MegaMoEError: it computes what megamoe does not.
    """
    model, clamp, interleaved = model_type(module), None, False
    if not hasattr(module, "has_post_expert_norm"):
        fail_value(
            "module",
            type(module).__name__,
            "must be an experts module of transformers 5.24 or newer",
            "Install megamoe[hf], or a newer transformers.",
        )
    if module.has_post_expert_norm:
        fail_value("model_type", model, "its experts end in a norm, which megamoe does not have", OTHER_EXPERTS)
    act_fn = type(getattr(module, "act_fn", None)).__name__
    gate = type(module)._apply_gate.__module__
    if not module.has_gate:
        activation = _UNGATED.get(act_fn)
    elif gate == _PLAIN_GATE:
        activation = _GATED.get(act_fn)
    elif gate == _GPT_OSS_GATE:
        if module.alpha != SWIGLU_OAI_ALPHA:
            fail_value("swiglu_alpha", module.alpha, f"must be {SWIGLU_OAI_ALPHA} for {model}", OTHER_EXPERTS)
        activation, clamp, interleaved = "swiglu_oai", module.limit, True
    else:
        fail_value("model_type", model, f"its experts have a gate of their own, of {gate}", OTHER_EXPERTS)
    if activation is None:
        known = ", ".join(_GATED if module.has_gate else _UNGATED)
        fail_value("act_fn", act_fn, f"the activation of {model} must be one of {known}", OTHER_EXPERTS)
    weights = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    return Recipe(
        options=MlpOptions(activation, clamp, weight_grad_scale=weight_grad_scale),
        weights=weights,
        biases=tuple(f"{name}_bias" for name in weights) if module.has_bias else (),
        transposed=module.is_transposed,
        interleaved=interleaved,
    )


def _in_order(up: torch.Tensor) -> torch.Tensor:
    """Gate rows, then up rows, of ``[E, 2I, ...]`` in which they alternate."""
    return up.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def run_experts(
    module: nn.Module,
    recipe: Recipe,
    exchange: Exchange,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """``[T, H]``: the experts of ``module`` by its ``recipe``, wherever ``exchange`` has them."""
    up, down = (local_tensor(getattr(module, name)) for name in recipe.weights)
    up_bias = down_bias = None
    if recipe.biases:
        up_bias, down_bias = (local_tensor(getattr(module, name)) for name in recipe.biases)
    if recipe.transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    if recipe.interleaved:
        up = _in_order(up)
        up_bias = None if up_bias is None else _in_order(up_bias)
    # Routing weights travel in a dtype that a rank without tokens knows too.
    routing = Routing(top_k_index.long(), top_k_weights.to(accumulation_dtype(up)))
    dispatched = exchange.dispatch(hidden_states, routing, compute_dtype(up, up.device.type))
    rows = grouped_mlp(
        dispatched.rows,
        dispatched.row_weights,
        up,
        down,
        dispatched.layout,
        recipe.options,
        up_bias,
        down_bias,
    )
    return exchange.combine(rows, dispatched.handle, hidden_states.dtype)


# One per number of experts, for all modules: torch.compile finds an exchange that is there, but cannot make one.
_local_exchanges: dict[int, LocalExchange] = {}


def _local_exchange(num_experts: int) -> LocalExchange:
    if num_experts not in _local_exchanges:
        _local_exchanges[num_experts] = LocalExchange(num_experts)
    return _local_exchanges[num_experts]


def experts_forward(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The forward pass of an experts module of transformers whose experts are all here; differentiable.

    Args:
        module: follows the experts interface of transformers.
        hidden_states: floating ``[T, H]``.
        top_k_index: integer ``[T, K]``; ids that the module does not hold add nothing.
        top_k_weights: floating ``[T, K]``.

    Returns:
        ``[T, H]`` in the dtype of ``hidden_states``.

    Raises:
        MegaMoEError: a model whose experts megamoe does not compute; it names the model type.
    """
    recipe = read_recipe(module)
    exchange = _local_exchange(getattr(module, recipe.weights[0]).shape[0])
    return run_experts(module, recipe, exchange, hidden_states, top_k_index, top_k_weights)
