"""``Router``: scores, selection and weights of each token's experts, in fp32 whatever the model's dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from megamoe.comm.failures import named_collective
from megamoe.config import MoEConfig, check_config
from megamoe.errors import FLOATING, check_tensor
from megamoe.kernels import reference, routing
from megamoe.layers.balance import attach_loss, load_balancing_loss, router_z_loss
from megamoe.types import Routing


@torch.library.custom_op("megamoe::select_experts", mutates_args=())
def _select_experts(
    scores: torch.Tensor, top_k: int, num_groups: int, topk_groups: int, group_score: str
) -> torch.Tensor:
    # An operator of its own, so that selective activation checkpointing can keep its result.
    return reference.select_experts(scores, top_k, num_groups, topk_groups, group_score).contiguous()


@_select_experts.register_fake
def _(scores, top_k, num_groups, topk_groups, group_score):
    return scores.new_empty(scores.shape[0], top_k, dtype=torch.int64)


def save_routing() -> tuple:
    """``context_fn`` for ``torch.utils.checkpoint.checkpoint``: recomputation reuses the forward pass's routing.

    Plain activation checkpointing routes again, with the same result as long as everything before the router is
    deterministic; with this, a near-tie cannot send the recomputed token to another expert. Costs 8 * K bytes a token.

    Example: ``checkpoint(block, x, use_reentrant=False, context_fn=megamoe.save_routing)``
    """
    return create_selective_checkpoint_contexts([torch.ops.megamoe.select_experts.default])


def _in_backward() -> bool:
    """Whether autograd is running a backward pass: a forward call inside one is a recomputation."""
    return torch._C._current_graph_task_id() != -1


@torch.library.custom_op("megamoe::router_logits", mutates_args=())
def _logits(hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    # An operator of its own in compiled code, where autocast in force outside would reach the backward pass.
    with torch.autocast(hidden_states.device.type, enabled=False):
        return reference.router_logits(hidden_states, weight, bias)


@_logits.register_fake
def _(hidden_states, weight, bias):
    dtype = reference.accumulation_dtype(hidden_states, weight)
    return hidden_states.new_empty(hidden_states.shape[0], weight.shape[0], dtype=dtype)


def _logits_grads(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    hidden_states, weight, bias = ctx.saved_tensors
    need_hidden, need_weight, need_bias = ctx.needs_input_grad
    with torch.autocast(grad.device.type, enabled=False):
        grad_hidden = (grad @ weight.to(grad.dtype)).to(hidden_states.dtype) if need_hidden else None
        grad_weight = (grad.t() @ hidden_states.to(grad.dtype)).to(weight.dtype) if need_weight else None
        grad_bias = grad.sum(dim=0).to(bias.dtype) if need_bias else None
    return grad_hidden, grad_weight, grad_bias


_logits.register_autograd(_logits_grads, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@torch.library.custom_op("megamoe::count_tokens", mutates_args=())
def _count_tokens(total: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    # An operator of its own: it asks when it runs, not when it is traced.
    return total.clone() if _in_backward() else total + counts


@_count_tokens.register_fake
def _(total, counts):
    return torch.empty_like(total)


@torch.library.custom_op("megamoe::sum_over_ranks", mutates_args=())
def _sum_over_ranks(counts: torch.Tensor, group: str) -> torch.Tensor:
    # A traced collective would not raise an ExchangeError.
    counts = counts.clone()
    _all_reduce(counts, _resolve_process_group(group))
    return counts


@_sum_over_ranks.register_fake
def _(counts, group):
    return torch.empty_like(counts)


def _all_reduce(counts: torch.Tensor, group: dist.ProcessGroup) -> None:
    with named_collective("load-balancing loss", group):
        dist.all_reduce(counts, group=group)


class Router(nn.Module):
    """Routes tokens to their ``top_k`` experts (``RouterConfig`` says how).

    In evaluation mode, where no gradients are recorded, up to 512 tokens on a GPU are routed by two kernels, and a
    token's routing has the same bits whatever tokens are beside it.

    Parameters and buffers stay in fp32 through ``.to(dtype)``, ``.bfloat16()`` and the like.

    Attributes:
        weight: ``[E, H]``.
        bias: ``[E]`` on the logits with ``linear_bias``, else None.
        expert_bias: buffer ``[E]`` on the scores for selection with ``RouterConfig.expert_bias``, else None; moved by
            ``update_expert_biases``.
        tokens_per_expert: int64 buffer ``[E]``, not saved: (token, slot) pairs routed in training since the last
            ``update_expert_biases``. Recomputation by activation checkpointing does not count.
        losses: fp32 buffer ``[2]``, not saved: what ``aux_loss`` and ``z_loss`` show.

    Args:
        config: the layer.
        balance_group: ranks over whose tokens the load-balancing loss is taken; None = this rank.
    """

    def __init__(
        self,
        config: MoEConfig,
        balance_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        check_config(config)
        router = config.router
        self.config = config
        self.balance_group = balance_group
        self.bias_update_rate = router.bias_update_rate
        self.aux_loss_scale = 1.0
        options = dict(dtype=torch.float32, device=device)
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, **options))
        self.bias = nn.Parameter(torch.empty(config.num_experts, **options)) if router.linear_bias else None
        expert_bias = torch.zeros(config.num_experts, **options) if router.expert_bias else None
        self.register_buffer("expert_bias", expert_bias)
        counts = torch.zeros(config.num_experts, dtype=torch.int64, device=device)
        self.register_buffer("tokens_per_expert", counts, persistent=False)
        self.register_buffer("losses", torch.empty(2, **options), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights N(0, init_std^2), default 1/sqrt(H); biases and counters zero, no losses."""
        std = self.config.hidden_size**-0.5 if self.config.init_std is None else self.config.init_std
        nn.init.normal_(self.weight, std=std)
        for tensor in (self.bias, self.expert_bias, self.tokens_per_expert):
            if tensor is not None:
                nn.init.zeros_(tensor)
        # No loss is negative.
        nn.init.constant_(self.losses, -1)

    @property
    def aux_loss(self) -> torch.Tensor | None:
        """The last value in training, before its coefficient; None when off. Waits for the device."""
        return self._last_loss(0)

    @property
    def z_loss(self) -> torch.Tensor | None:
        """As ``aux_loss``."""
        return self._last_loss(1)

    def _last_loss(self, which: int) -> torch.Tensor | None:
        loss = self.losses[which].clone()
        return None if loss < 0 else loss

    def forward(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None = None) -> Routing:
        """Routes ``hidden_states [T, H]``.

        Args:
            token_mask: bool ``[T]``; tokens that are False get index -1 and weight 0 and count in no statistic or loss.

        Raises:
            MegaMoEError: wrong shape, dtype or device.
        """
        config = self.config.router
        check_tensor("hidden_states", hidden_states, (None, self.config.hidden_size), FLOATING, self.weight.device)
        if token_mask is not None:
            check_tensor("token_mask", token_mask, hidden_states.shape[:1], (torch.bool,), hidden_states.device)
        if self._has_kernel(hidden_states):
            parameters = self.weight, self.bias, self.expert_bias
            return Routing(*routing.route(hidden_states, *parameters, token_mask, self.config.top_k, config))
        if token_mask is not None:
            hidden_states = hidden_states.masked_fill(~token_mask.unsqueeze(1), 0)
        with torch.autocast(hidden_states.device.type, enabled=False):
            compute_logits = _logits if torch.compiler.is_compiling() else reference.router_logits
            logits = compute_logits(hidden_states, self.weight, self.bias)
            scores = reference.expert_scores(logits, config.score)
            choice = scores.detach()
            if self.expert_bias is not None:
                choice = choice + self.expert_bias
            index = _select_experts(
                choice, self.config.top_k, config.num_groups, config.topk_groups, config.group_score
            )
            weights = reference.routing_weights(scores, index, config.renormalize, config.scaling_factor)
            if token_mask is not None:
                index = index.masked_fill(~token_mask.unsqueeze(1), -1)
                weights = weights.masked_fill(~token_mask.unsqueeze(1), 0)
            if self.training:
                counts = _histogram(index, self.config.num_experts)
                if torch.compiler.is_compiling():
                    self.tokens_per_expert.copy_(_count_tokens(self.tokens_per_expert, counts))
                elif not _in_backward():
                    self.tokens_per_expert += counts
                weights = self._attach_losses(weights, logits, scores, counts, token_mask)
        return Routing(index, weights)

    def _has_kernel(self, hidden_states: torch.Tensor) -> bool:
        if self.training or not routing.has_kernel(hidden_states, self.weight):
            return False
        recorded = (hidden_states, self.weight) if self.bias is None else (hidden_states, self.weight, self.bias)
        return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in recorded))

    def _attach_losses(self, weights, logits, scores, counts, token_mask) -> torch.Tensor:
        config = self.config.router
        if config.aux_loss_coef:
            if self.balance_group is not None:
                if torch.compiler.is_compiling():
                    counts = _sum_over_ranks(counts, self.balance_group.group_name)
                else:
                    _all_reduce(counts, self.balance_group)
            probs = scores if config.score == "softmax" else scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
            loss = load_balancing_loss(probs, counts, token_mask)
            self.losses[0] = loss.detach()
            weights = attach_loss(weights, loss * (config.aux_loss_coef * self.aux_loss_scale))
        if config.z_loss_coef:
            loss = router_z_loss(logits, token_mask)
            self.losses[1] = loss.detach()
            weights = attach_loss(weights, loss * (config.z_loss_coef * self.aux_loss_scale))
        return weights

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Router:
        def keep_precision(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            narrowed = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device, torch.float32) if narrowed else moved

        return super()._apply(keep_precision, recurse)

    def extra_repr(self) -> str:
        config = self.config
        parts = [f"hidden_size={config.hidden_size}, num_experts={config.num_experts}, top_k={config.top_k}"]
        parts.append(f"score={config.router.score}")
        if config.router.num_groups > 1:
            parts.append(f"groups={config.router.topk_groups}/{config.router.num_groups}")
        return ", ".join(parts)


def _histogram(index: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int64 ``[E]``: how often each expert occurs in ``index``; -1 counts nowhere."""
    flat = torch.where(index >= 0, index, num_experts).flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=index.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:num_experts].clone()
