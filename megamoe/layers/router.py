"""``Router``: scores, selection and weights of each token's experts, in fp32 whatever the model's dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from megamoe.comm.failures import named_collective
from megamoe.config import MoEConfig, check_config
from megamoe.errors import FLOATING, check_tensor
from megamoe.kernels import reference
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


class Router(nn.Module):
    """Routes tokens to their ``top_k`` experts (``RouterConfig`` says how).

    Parameters and buffers stay in fp32 through ``.to(dtype)``, ``.bfloat16()`` and the like.

    Attributes:
        weight: ``[E, H]``.
        bias: ``[E]`` on the logits with ``linear_bias``, else None.
        expert_bias: buffer ``[E]`` on the scores for selection with ``RouterConfig.expert_bias``, else None; moved by
            ``update_expert_biases``.
        tokens_per_expert: int64 buffer ``[E]``, not saved: (token, slot) pairs routed in training since the last
            ``update_expert_biases``. Recomputation by activation checkpointing does not count.
        aux_loss, z_loss: last values in training, detached, before their coefficients; None when off.

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
        self.aux_loss: torch.Tensor | None = None
        self.z_loss: torch.Tensor | None = None
        options = dict(dtype=torch.float32, device=device)
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, **options))
        self.bias = nn.Parameter(torch.empty(config.num_experts, **options)) if router.linear_bias else None
        expert_bias = torch.zeros(config.num_experts, **options) if router.expert_bias else None
        self.register_buffer("expert_bias", expert_bias)
        counts = torch.zeros(config.num_experts, dtype=torch.int64, device=device)
        self.register_buffer("tokens_per_expert", counts, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights N(0, init_std^2), default 1/sqrt(H); biases and counters zero."""
        std = self.config.hidden_size**-0.5 if self.config.init_std is None else self.config.init_std
        nn.init.normal_(self.weight, std=std)
        for tensor in (self.bias, self.expert_bias, self.tokens_per_expert):
            if tensor is not None:
                nn.init.zeros_(tensor)

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
            hidden_states = hidden_states.masked_fill(~token_mask.unsqueeze(1), 0)
        with torch.autocast(hidden_states.device.type, enabled=False):
            logits = reference.router_logits(hidden_states, self.weight, self.bias)
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
                if not _in_backward():
                    self.tokens_per_expert += counts
                weights = self._attach_losses(weights, logits, scores, counts, token_mask)
        return Routing(index, weights)

    def _attach_losses(self, weights, logits, scores, counts, token_mask) -> torch.Tensor:
        config = self.config.router
        if config.aux_loss_coef:
            if self.balance_group is not None:
                with named_collective("load-balancing loss", self.balance_group):
                    dist.all_reduce(counts, group=self.balance_group)
            probs = scores if config.score == "softmax" else scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
            loss = load_balancing_loss(probs, counts, token_mask)
            self.aux_loss = loss.detach()
            weights = attach_loss(weights, loss * (config.aux_loss_coef * self.aux_loss_scale))
        if config.z_loss_coef:
            loss = router_z_loss(logits, token_mask)
            self.z_loss = loss.detach()
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
