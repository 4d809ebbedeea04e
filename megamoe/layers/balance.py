"""Load balancing: auxiliary loss, z-loss, and the auxiliary-loss-free bias update."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from megamoe.comm.failures import named_collective
from megamoe.errors import check_number


def load_balancing_loss(
    probs: torch.Tensor, tokens_per_expert: torch.Tensor, token_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The Switch load-balancing loss (arXiv 2101.03961, eq. 4-6), extended to top-k.

    loss = E * sum_e f_e * P_e, f_e the fraction of (token, slot) pairs sent to expert e, P_e the mean probability of e
    over the tokens. 1 at uniform load, E when all goes to one expert. Its gradient flows through P only.

    Args:
        probs: ``[T, E]``, rows sum to 1.
        tokens_per_expert: ``[E]``, pairs per expert; of this rank, or summed over ranks, so that the mean of the losses
            of equally many tokens per rank is the loss of the whole batch.
        token_mask: bool ``[T]``; tokens that are False count nowhere.
    """
    if token_mask is not None:
        probs = probs * token_mask.unsqueeze(1)
    num_tokens = probs.shape[0] if token_mask is None else token_mask.sum()
    mean_probs = probs.sum(dim=0) / _at_least_one(num_tokens)
    fraction = tokens_per_expert.to(probs.dtype) / tokens_per_expert.sum().clamp(min=1)
    return probs.shape[1] * (fraction * mean_probs).sum()


def router_z_loss(logits: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
    """The router z-loss (arXiv 2202.08906, eq. 5): mean over tokens of logsumexp(logits)^2.

    Args:
        logits: ``[T, E]``.
        token_mask: bool ``[T]``; tokens that are False count nowhere.
    """
    squares = logits.logsumexp(dim=-1).square()
    if token_mask is None:
        return squares.sum() / _at_least_one(squares.numel())
    return (squares * token_mask).sum() / _at_least_one(token_mask.sum())


def _at_least_one(count: int | torch.Tensor) -> int | torch.Tensor:
    return count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, loss):
        ctx.save_for_backward(loss)
        return values.view_as(values)

    @staticmethod
    def backward(ctx, grad):
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


def attach_loss(values: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """``values`` unchanged; its backward pass also back-propagates ``loss``, as if it were added to the final loss."""
    return _attach_operator(values, loss) if torch.compiler.is_compiling() else _AttachLoss.apply(values, loss)


# A copy, and a result that needs the loss: compiled code keeps the order of the loss's collective and the exchange's.
@torch.library.custom_op("megamoe::attach_loss", mutates_args=())
def _attach_operator(values: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    return values.clone(memory_format=torch.contiguous_format)


@_attach_operator.register_fake
def _(values, loss):
    return values.new_empty(values.shape)


_attach_operator.register_autograd(
    lambda ctx, grad: (grad, torch.ones_like(ctx.saved_tensors[0])),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` that count their tokens (have ``tokens_per_expert``), in module order."""
    return [module for module in model.modules() if hasattr(module, "tokens_per_expert")]


def set_aux_loss_scale(model: nn.Module, scale: float) -> None:
    """Scales the attached auxiliary and z-losses of all layers as the main loss is scaled.

    Args:
        scale: 1/n when n micro-batches are accumulated and each main loss is divided by n; times a loss scaler's
            factor, if any.

    Raises:
        MegaMoEError: ``scale`` is not a finite number >= 0.
    """
    check_number("scale", scale, 0.0)
    for router in routers_of(model):
        router.aux_loss_scale = scale


@torch.no_grad()
def update_expert_biases(model: nn.Module, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Moves every layer's expert bias towards equal load and zeroes the counters; call once after ``optimizer.step()``.

    bias_e += rate * sign(mean load - load_e) (arXiv 2408.15664, algorithm 1), less the mean of that step: selection
    ignores a common offset, so the biases may as well not drift. Layers without an expert bias are only counted.

    Args:
        model: anything that holds routers. Every rank of ``group`` calls, with the same layers.
        group: ranks whose counts are added up; default: all ranks, where ``torch.distributed`` is initialised.

    Returns:
        int64 ``[L, E]``: (token, slot) pairs per MoE layer and expert since the last call, over all ranks of the group.
        E is the largest number of experts of any layer; experts that a layer does not have count 0.
    """
    routers = routers_of(model)
    if not routers:
        return torch.zeros(0, 0, dtype=torch.int64)
    num_experts = max(router.tokens_per_expert.numel() for router in routers)
    counts = torch.stack(
        [nn.functional.pad(r.tokens_per_expert, (0, num_experts - r.tokens_per_expert.numel())) for r in routers]
    )
    if dist.is_available() and dist.is_initialized():
        with named_collective("update_expert_biases", group):
            dist.all_reduce(counts, group=group)
    for router, row in zip(routers, counts, strict=True):
        router.tokens_per_expert.zero_()
        if getattr(router, "expert_bias", None) is None:
            continue
        load = row[: router.tokens_per_expert.numel()].to(router.expert_bias.dtype)
        step = router.bias_update_rate * torch.sign(load.mean() - load)
        router.expert_bias += step - step.mean()
    return counts
