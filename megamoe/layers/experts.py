"""``Experts``: the routed experts' parameters, their exchange and their MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megamoe.comm.exchange import Exchange
from megamoe.config import MoEConfig, check_config
from megamoe.errors import FLOATING, check_tensor, fail_type, fail_value
from megamoe.kernels import weight_cache
from megamoe.kernels.mlp import grouped_mlp
from megamoe.kernels.mlp_joined import joined_mlp
from megamoe.kernels.mlp_options import MlpOptions
from megamoe.kernels.shared_slots import add_shared_slots
from megamoe.layers.fused import FusedExperts
from megamoe.layers.parallel import check_same_on_all_ranks, local_tensor, resolve_group, shard_parameter
from megamoe.layers.replicas import ExpertSlots
from megamoe.layers.shared import SharedExperts, compute_dtype
from megamoe.layers.transport import Transport
from megamoe.placement import ExpertPlacement
from megamoe.types import Routing


class _LocalPart(torch.autograd.Function):
    """``DTensor.to_local``, but where no gradient comes none goes on, in any version of torch."""

    @staticmethod
    def forward(ctx, parameter):
        ctx.set_materialize_grads(False)
        ctx.where = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return None
        mesh, placements, shape, stride = ctx.where
        # Imported here: DTensor takes longer to import than the rest of megamoe.
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(grad, mesh, placements, run_check=False, shape=shape, stride=stride)


def _local_part(parameter: torch.Tensor | None) -> torch.Tensor | None:
    if parameter is None:
        return None
    is_sharded = hasattr(parameter, "placements")
    if is_sharded and getattr(parameter, "main_grad", None) is not None and not torch.compiler.is_compiling():
        return _LocalPart.apply(parameter)
    return local_tensor(parameter)


class Experts(nn.Module):
    """All routed experts of a layer, spread over the ranks of ``group``: rank r holds experts r*E/R to (r+1)*E/R - 1.

    ``rebalance`` gives them another ``ExpertPlacement`` to serve with. The parameters then are ``[R * slots, ...]`` in
    slot order: until they are back in the default placement there is no training and no ``state_dict``.

    GEMMs run in autocast's dtype where it is on, else in that of the parameters, or in FP8 (``precision="fp8"``); the
    output has the dtype of the input. FP8 keeps copies of the weights, one byte per weight or two in training, which
    follow the parameters; after writes through ``.data``, which torch does not count, call
    ``weight_cache.mark_changed``. The gradients of the parameters are the mean of the group's losses' gradients, as
    from DDP: multiply by R for their sum.

    A parameter with an attribute ``main_grad``, a float32 tensor of its shape (or of this rank's part's), gets no
    ``.grad``: ``backward`` adds the gradient, unrounded, to ``main_grad``, and sets the parameter's
    ``grad_added_to_main_grad``, where there is one, to True. Frameworks such as Megatron keep gradients there over
    micro-batches, and then reduce, clip and zero them: megamoe's own functions only see ``.grad``.

    Attributes:
        gate_up_proj: ``[E, 2I, H]``, gate rows, then up rows (``up_proj [E, I, H]`` for an activation without gate).
        down_proj: ``[E, H, I]``.
        gate_up_proj_bias (``up_proj_bias``), down_proj_bias: ``[E, 2I]`` (``[E, I]``) and ``[E, H]``, or None.
            With R > 1 all are ``DTensor`` in ``Shard(0)`` over the group: distributed checkpoints load at any R.

    Args:
        config: the layer.
        group: the expert-parallel group: a ``ProcessGroup``, a 1-D ``DeviceMesh``, or None for one rank.
            Construction is a collective over it.
        device, dtype: of the parameters; default: torch's.
        path: how rows travel between ranks: ``collective``, by torch.distributed, or ``staged``, over NVLink, for GPUs
            of one machine, 16-bit rows and a config with ``max_tokens_per_rank``. ``fused``: where no gradients are
            recorded and it can, the mega-kernel does all of a call, with the bits of ``staged``, else as ``staged``;
            all ranks must record gradients, or none. ``auto``: the fastest of these that can serve; ``explain`` says
            which. Give the memory back with ``close``.

    Raises:
        MegaMoEError: ``num_experts`` is not a multiple of R, or the ranks' configs differ.
    """

    is_expert_parallel = True

    def __init__(
        self,
        config: MoEConfig,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        path: str = "collective",
    ):
        super().__init__()
        check_config(config)
        if dtype is not None and dtype not in FLOATING:
            fail_type("dtype", dtype, "must be a floating dtype of 16 bits or more", "Pass torch.bfloat16, say.")
        self.config = config
        device = torch.device(device) if device is not None else torch.get_default_device()
        process_group, mesh = resolve_group(group, device.type)
        self.group = process_group
        dtype = torch.get_default_dtype() if dtype is None else dtype
        self._transport = Transport(config, process_group, path, device, dtype)
        if process_group is not None:
            settings = {"dtype": str(dtype), "path": path, "mega-kernel": self._transport.obstacle}
            check_same_on_all_ranks({**config.to_dict(), **settings}, process_group)
        self.exchange: Exchange = self._transport.make(config.num_experts)
        self.expert_parallel_size = config.num_experts // self.exchange.num_local_experts
        rank = 0 if process_group is None else dist.get_rank(process_group)
        self.slots = ExpertSlots(ExpertPlacement.even(config.num_experts, self.expert_parallel_size), rank, device)
        self.options = MlpOptions(
            activation=config.activation,
            clamp=config.clamp,
            precision=config.precision,
            weight_grad_scale=1 / self.expert_parallel_size,
            recompute=config.recompute,
        )
        self._up_name = "gate_up_proj" if config.gated else "up_proj"
        hidden, width = config.hidden_size, config.intermediate_size
        up_rows = self.options.halves * width
        shapes = {self._up_name: (up_rows, hidden), "down_proj": (hidden, width)}
        biases = {f"{self._up_name}_bias": (up_rows,), "down_proj_bias": (hidden,)}
        # The other bias is never padded.
        self._copied = (*shapes, f"{self._up_name}_bias") if config.bias else tuple(shapes)
        for name, shape in {**shapes, **biases}.items():
            parameter = None
            if name in shapes or config.bias:
                local = torch.empty(self.exchange.num_local_experts, *shape, device=device, dtype=dtype)
                parameter = shard_parameter(local, mesh)
            self.register_parameter(name, parameter)
        self._watch_weights()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Weights N(0, init_std^2), default 1/sqrt(fan_in), biases zero.

        An expert's values depend on torch's CPU seed and its global id alone, never on the size of the group.
        """
        seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        up_proj, down_proj = local_tensor(getattr(self, self._up_name)), local_tensor(self.down_proj)
        if not up_proj.is_meta:
            generator = torch.Generator(up_proj.device)
            for slot, expert in enumerate(self.slots.held[: up_proj.shape[0]]):
                generator.manual_seed(seed + expert)
                for weight in (up_proj[slot], down_proj[slot]):
                    std = weight.shape[1] ** -0.5 if self.config.init_std is None else self.config.init_std
                    weight.normal_(std=std, generator=generator)
        for bias in (getattr(self, f"{self._up_name}_bias"), self.down_proj_bias):
            if bias is not None:
                local_tensor(bias).zero_()
        self.slots.reset()

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        shared: SharedExperts | None = None,
    ) -> torch.Tensor:
        """The weighted sum of each token's experts; the call of ``transformers``' experts modules.

        Args:
            hidden_states: floating ``[T, H]``. T may differ between ranks and may be 0; every rank must call.
            top_k_index: int32 or int64 ``[T, K]``; ids outside ``[0, E)``, by convention -1, add nothing.
            top_k_weights: floating ``[T, K]``.
            shared: to be computed too and added, for all tokens; only where ``fuses`` says so.

        Returns:
            ``[T, H]`` in the dtype of ``hidden_states``; a token without experts gets zeros.

        Raises:
            MegaMoEError: wrong shape, dtype or device, also of a ``main_grad``, T > ``max_tokens_per_rank``, gradients
                of the parameters wanted under a placement other than the default, or ``shared`` cannot be fused.
            ExchangeError: another rank did not take part.
        """
        self.check_tokens(hidden_states)
        self._check_routing(hidden_states, top_k_index, top_k_weights)
        trained = torch.is_grad_enabled() and any(x.requires_grad for x in self.parameters(recurse=False))
        if trained:
            self._check_default_placement("forward with gradients")
        names = (self._up_name, "down_proj", f"{self._up_name}_bias", "down_proj_bias")
        owners = [getattr(self, name) for name in names]
        up_proj, down_proj, up_bias, down_bias = (_local_part(parameter) for parameter in owners)
        dtype = compute_dtype(up_proj, hidden_states.device.type)
        routing = Routing(self.slots.translate(top_k_index.long()), top_k_weights)
        asked = torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad)
        if shared is not None:
            routing = self._with_shared_slots(routing, hidden_states, shared)
        fused = self._transport.fused_for(hidden_states, dtype, trained or asked, shared is not None)
        if fused is not None:
            biases = None if up_bias is None else (up_bias, down_bias)
            return self._run_fused(fused, hidden_states, routing, up_proj, down_proj, biases, shared)
        fp8 = self.options.precision == "fp8"
        exchange = self.exchange if shared is None else self._transport.exchange_with_shared
        dispatched = exchange.dispatch(hidden_states, routing, dtype, fp8)
        if not self.training:
            self.slots.count_rows(dispatched.layout)
        operands = dispatched.rows, dispatched.row_weights, up_proj, down_proj
        layout, codes = dispatched.layout, dispatched.codes
        if shared is None:
            rows = grouped_mlp(*operands, layout, self.options, up_bias, down_bias, owners, codes)
        else:
            rows = joined_mlp(*operands, shared.weights, layout, self.options, codes)
        return exchange.combine(rows, dispatched.handle, hidden_states.dtype)

    def fuses(self, shared: SharedExperts, hidden_states: torch.Tensor, top_k_weights: torch.Tensor) -> bool:
        """Whether a call can be given ``shared``: the config wants it, and no gradients are recorded."""
        if not self._transport.shared_experts or hasattr(shared.down_proj, "placements"):
            return False
        if not torch.is_grad_enabled():
            return True
        recorded = (hidden_states, top_k_weights, *self.parameters(recurse=False), *shared.parameters())
        return not any(tensor.requires_grad for tensor in recorded)

    def _with_shared_slots(self, routing: Routing, hidden_states: torch.Tensor, shared: SharedExperts) -> Routing:
        if not self.fuses(shared, hidden_states, routing.topk_weights):
            rule = "cannot be fused: the config or the path does not allow it, or gradients are recorded"
            fail_value("shared", type(shared).__name__, rule, "Ask fuses(...) first; explain() says why.")
        gate = shared.shared_gate
        return add_shared_slots(
            routing,
            hidden_states.detach(),
            None if gate is None else gate.detach(),
            rank=self.slots.rank,
            num_experts=self.exchange.num_experts,
            num_local=self.exchange.num_local_experts,
            shared=self._transport.shared_experts,
        )

    def _run_fused(
        self,
        fused: FusedExperts,
        hidden_states: torch.Tensor,
        routing: Routing,
        up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        biases: tuple[torch.Tensor, torch.Tensor] | None,
        shared: SharedExperts | None,
    ) -> torch.Tensor:
        fused.check_routing(routing, hidden_states.shape[0])
        out, layout = fused(
            hidden_states.to(torch.bfloat16),
            routing,
            up_proj,
            down_proj,
            activation=self.options.activation,
            clamp=self.options.clamp,
            biases=biases,
            shared=None if shared is None else shared.weights,
            out_dtype=hidden_states.dtype,
        )
        if not self.training:
            self.slots.count_rows(layout)
        return out

    def close(self) -> None:
        """Gives back the memory that ranks share over NVLink, on all of them. The layer is then done."""
        self._transport.close()

    def explain(self) -> str:
        """How calls without and with gradients go, and shared experts that are to be fused, and why: a line each."""
        return self._transport.explain()

    @property
    def placement(self) -> ExpertPlacement:
        """Which rank holds which experts; ``rebalance`` changes it."""
        return self.slots.placement

    def assign(self, placement: ExpertPlacement) -> None:
        """The parameters now lie as ``placement`` says; the last step of ``rebalance``, which moves them."""
        if placement.num_physical != self.exchange.num_experts:
            self.exchange = self._transport.make(placement.num_physical)
        self.slots.assign(placement)
        self.refresh_copies()

    def refresh_copies(self) -> None:
        """Makes copies of weights and biases that have changed anew, in place: captured graphs read them. Cheap if none
        has."""
        for name in self._copied:
            # Faster than the attribute; where a weight is computed instead, it has no lasting copies.
            weight = self._parameters.get(name)
            if weight is not None:
                weight_cache.refresh(weight)

    def _watch_weights(self) -> None:
        for name in self._copied:
            self._watch(name)

    def _watch(self, name: str) -> None:
        weight_cache.watch(self, name)
        if self._transport.shared_experts:
            weight_cache.reserve(getattr(self, name), self._transport.shared_experts)

    def __setattr__(self, name: str, value: Any) -> None:
        old = self.__dict__.get("_parameters", {}).get(name)
        super().__setattr__(name, value)
        if old is not None and old is not value:
            # FSDP2 swaps parameters around each use and gathers new values into the same one, with the same version.
            weight_cache.forget(old)
            self._watch(name)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Experts:
        self.slots.apply(fn)
        result = super()._apply(fn, recurse)
        self._watch_weights()
        return result

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        self._check_default_placement("state_dict")
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        self._check_default_placement("load_state_dict")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _check_default_placement(self, action: str) -> None:
        if not self.slots.is_default:
            fail_value(
                "placement.is_default",
                False,
                f"{action} needs the default placement, in which parameters lie as checkpoints and optimizers see them",
                f"Call rebalance(model, ExpertPlacement.even({self.config.num_experts}, {self.expert_parallel_size})) "
                "first; to serve, run under torch.no_grad().",
            )

    def check_tokens(self, hidden_states: torch.Tensor) -> None:
        """``hidden_states`` may be passed to ``forward``; see there for what it raises."""
        shape, device = (None, self.config.hidden_size), local_tensor(self.down_proj).device
        check_tensor("hidden_states", hidden_states, shape, FLOATING, device)
        num_tokens = hidden_states.shape[0]
        limit = self.config.max_tokens_per_rank
        if limit is not None and num_tokens > limit:
            fail_value(
                "hidden_states.shape[0]",
                num_tokens,
                f"exceeds max_tokens_per_rank = {limit}",
                "Raise max_tokens_per_rank in the MoEConfig or split the batch.",
            )

    def _check_routing(self, hidden_states, top_k_index, top_k_weights) -> None:
        num_tokens, device = hidden_states.shape[0], hidden_states.device
        check_tensor("top_k_index", top_k_index, (num_tokens, None), (torch.int64, torch.int32), device)
        if top_k_index.shape[1] == 0:
            fail_value("top_k_index.shape", list(top_k_index.shape), "must have K >= 1", "Pass [T, K].")
        check_tensor("top_k_weights", top_k_weights, tuple(top_k_index.shape), FLOATING, device)

    def extra_repr(self) -> str:
        config = self.config
        text = f"hidden_size={config.hidden_size}, intermediate_size={config.intermediate_size}"
        text += f", num_experts={config.num_experts}, activation={config.activation}, precision={config.precision}"
        if self.expert_parallel_size > 1 or not self.slots.is_default:
            held = self.slots.held
            names = f"{held[0]}-{held[-1]}" if self.slots.is_default else ", ".join(map(str, held)) or "none"
            text += f", experts {names} of {self.expert_parallel_size} ranks"
        return text
