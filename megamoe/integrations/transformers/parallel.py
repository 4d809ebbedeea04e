"""``enable_expert_parallel``: a transformers model whose experts are spread over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megamoe.comm.collective import CollectiveExchange
from megamoe.comm.exchange import LocalExchange
from megamoe.comm.failures import named_collective
from megamoe.errors import fail_type, fail_value
from megamoe.integrations.transformers.experts import (
    DEQUANTIZE,
    NAME,
    from_transformers,
    is_experts,
    read_recipe,
    register,
)
from megamoe.integrations.transformers.joining import ExpertParallel, ShardedExperts, join, parallelism
from megamoe.layers.parallel import resolve_group, shard_parameter


def enable_expert_parallel(model: nn.Module, group: dist.ProcessGroup | DeviceMesh | None) -> None:
    """Spreads the experts of a loaded transformers model over the ranks of ``group``, in place. A collective over it.

    Rank r of R keeps experts r*E/R to (r+1)*E/R - 1 of every layer, as ``DTensor`` in ``Shard(0)``, and frees the
    others; all else stays replicated. The model runs ``experts_implementation="megamoe"`` from now on, whatever it ran.

    - Each rank calls the model with its own tokens, equally often on every rank, except inside ``join``.
    - ``generate`` joins by itself: each rank brings its own prompts, as many and as long as they are, also an empty
      batch ``[0, length]``, which it returns.
    - Gradients of experts are the mean over the group, as in ``megamoe.Experts``: ``average_gradients`` and
      ``clip_grad_norm_`` do the rest. Build the optimizer after this call.
    - ``save_pretrained`` is a collective: it gathers one tensor at a time on global rank 0, which writes.

    Args:
        model: equal on all ranks, and on its device. The shards go to the device type of ``group``, if it is a mesh.
        group: the expert-parallel group; None = one rank.

    Raises:
        MegaMoEError: the model type is not supported, R does not divide E, or the model is quantized, sharded already,
            without weights (on the meta device) or not the same on all ranks. The model is as it was.
    """
    _check_model(model)
    modules = {name: module for name, module in model.named_modules() if is_experts(module)}
    if not modules:
        fail_value(
            "model_type",
            model.config.model_type,
            "has no experts that follow transformers' experts interface",
            "Pass a mixture of experts, such as a mixtral, qwen3_moe, deepseek_v3, glm4_moe or gpt_oss model.",
        )
    for name, module in modules.items():
        for parameter_name, parameter in module.named_parameters(name, recurse=False):
            _check_parameter(parameter_name, parameter)
    process_group, mesh = resolve_group(group, next(iter(modules.values())).down_proj.device.type)
    layers = [_sharded(module, process_group) for module in modules.values()]
    if process_group is not None:
        _check_same_model(model, modules.values(), process_group)

    register()
    model.set_experts_implementation(NAME)
    model._megamoe_parallel = ExpertParallel(layers, process_group)
    if model.can_generate():
        model.generate = MethodType(_generate, model)
        model.init_continuous_batching = MethodType(_refuse_continuous_batching, model)
    if mesh is not None:
        model.save_pretrained = MethodType(_save_pretrained, model)
    for index, layer in enumerate(layers):
        if mesh is not None:
            _keep_own_experts(layer, dist.get_rank(process_group), mesh)
        layer.module.is_expert_parallel = True
        layer.module.forward = MethodType(_forward_of(model._megamoe_parallel, index), layer.module)


def _check_model(model: Any) -> None:
    if not isinstance(model, from_transformers("modeling_utils", "PreTrainedModel")):
        fail_type("model", type(model).__name__, "must be a transformers model", "Pass what from_pretrained returned.")
    if parallelism(model) is not None:
        fail_value("model", type(model).__name__, "has expert parallelism already", "Call this once per loaded model.")
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        rule = f"experts of a quantized {model.config.model_type} cannot be spread"
        fail_value("model.hf_quantizer", type(quantizer).__name__, rule, DEQUANTIZE)


def _check_parameter(name: str, parameter: torch.Tensor) -> None:
    if parameter.is_meta:
        fail_value(f"{name}.device", "meta", "must have values", "Load the weights first, without offloading.")
    if hasattr(parameter, "placements"):
        fail_value(
            f"{name}.placements",
            parameter.placements,
            "is sharded already",
            "Load the model without tp_plan and distributed_config; call enable_expert_parallel before FSDP.",
        )
    if parameter.grad is not None:
        fail_value(f"{name}.grad.shape", list(parameter.grad.shape), "would be lost", "Call model.zero_grad() first.")


def _sharded(module: nn.Module, group: dist.ProcessGroup | None) -> ShardedExperts:
    ranks = 1 if group is None else dist.get_world_size(group)
    recipe = read_recipe(module, weight_grad_scale=1 / ranks)
    num_experts = module.down_proj.shape[0]
    exchange = LocalExchange(num_experts) if group is None else CollectiveExchange(num_experts, group)
    return ShardedExperts(module, recipe, exchange)


def _check_same_model(model: nn.Module, experts: Iterable[nn.Module], group: dist.ProcessGroup) -> None:
    """Shapes and dtypes are equal on all ranks, and the bits of what stays replicated too."""
    sharded = {id(parameter) for module in experts for parameter in module.parameters(recurse=False)}
    own = {
        name: (list(tensor.shape), str(tensor.dtype), None if id(tensor) in sharded else _digest(tensor))
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    gathered: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    with named_collective("comparison of the ranks' models", group):
        dist.all_gather_object(gathered, own, group=group)
    names = dict.fromkeys(name for theirs in gathered for name in theirs)
    differing = [name for name in names if any(theirs.get(name) != gathered[0].get(name) for theirs in gathered)]
    if differing:
        fail_value(
            "model",
            differing[:3],
            f"{len(differing)} of {len(names)} tensors differ between the ranks of the group, these first",
            "Load the same checkpoint in the same dtype on every rank, or build it from the same seed.",
        )


_PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _digest(tensor: torch.Tensor) -> int | None:
    """The sum of the bit patterns, the same in any order of summation; None for a tensor without bits of its own."""
    if tensor.is_meta or hasattr(tensor, "placements") or tensor.dtype.itemsize not in _PATTERNS:
        return None
    return int(tensor.detach().contiguous().view(_PATTERNS[tensor.dtype.itemsize]).sum(dtype=torch.int64))


@torch.no_grad()
def _keep_own_experts(layer: ShardedExperts, rank: int, mesh: DeviceMesh) -> None:
    count = layer.exchange.num_local_experts
    for name in (*layer.recipe.weights, *layer.recipe.biases):
        parameter = getattr(layer.module, name)
        # A copy: a view would keep the memory of all experts.
        local = parameter.detach()[rank * count : (rank + 1) * count].clone()
        setattr(layer.module, name, shard_parameter(local, mesh).requires_grad_(parameter.requires_grad))


def _forward_of(parallel: ExpertParallel, layer: int) -> Callable[..., torch.Tensor]:
    def forward(module, hidden_states, top_k_index, top_k_weights):
        implementation = module.config._experts_implementation
        if implementation != NAME:
            fail_value(
                "experts_implementation",
                implementation,
                "cannot run experts that are spread over ranks",
                f'Call model.set_experts_implementation("{NAME}").',
            )
        return parallel.forward(layer, hidden_states, top_k_index, top_k_weights)

    return forward


def _generate(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # Which ranks still run is known on the host only, not to a compiled decoding step.
    kwargs.setdefault("disable_compile", True)
    inputs = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    with join(model):
        if isinstance(inputs, torch.Tensor) and inputs.shape[0] == 0:
            return inputs
        return type(model).generate(model, *args, **kwargs)


def _refuse_continuous_batching(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    fail_value(
        "model",
        type(model).__name__,
        "has expert parallelism, under which ranks cannot batch continuously, each on its own",
        "Call model.generate() with a batch of prompts.",
    )


def _save_pretrained(
    model: nn.Module,
    save_directory: Any,
    is_main_process: bool | None = None,
    state_dict: dict[str, torch.Tensor] | None = None,
    **kwargs: Any,
) -> None:
    """transformers' ``save_pretrained`` of the whole model; every rank calls it, global rank 0 writes."""
    writes = dist.get_rank() == 0 if is_main_process is None else is_main_process
    whole = {}
    for name, tensor in (model.state_dict() if state_dict is None else state_dict).items():
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if writes:
            whole[name] = tensor.cpu()
    if writes:
        type(model).save_pretrained(model, save_directory, is_main_process=True, state_dict=whole, **kwargs)
