"""The router in inference: on a GPU two launches of ``triton_router`` for few tokens, elsewhere torch's operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megamoe.config import RouterConfig
from megamoe.kernels.recent_calls import PLAIN_TENSORS

MOST_EXPERTS = 1024
"""For how many there is a kernel: a token's scores lie in the registers of one program."""

MOST_TOKENS = 512
"""Above, the logits are torch's GEMM, which is the faster one."""

TOKEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def has_kernel(hidden_states: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``route`` serves ``hidden_states [T, H]`` and the router's ``weight [E, H]``: by type, device and size.

    Gradients are not asked for: there are none. Up to ``MOST_TOKENS`` a token's routing has the same bits in any batch.
    """
    return (
        hidden_states.is_cuda
        and hidden_states.dtype in TOKEN_DTYPES
        and weight.dtype == torch.float32
        and type(hidden_states) in PLAIN_TENSORS
        and type(weight) in PLAIN_TENSORS
        and hidden_states.shape[0] <= MOST_TOKENS
        and weight.shape[0] <= MOST_EXPERTS
    )


def route(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    expert_bias: torch.Tensor | None,
    token_mask: torch.Tensor | None,
    top_k: int,
    router: RouterConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts, int64 ``[T, K]``, and weights, fp32 ``[T, K]``, where there ``has_kernel``; -1 and 0 for masked tokens.

    Scores are those of ``reference`` but for rounding. Of equal scores it selects as ``reference.select_experts`` does.

    Args:
        hidden_states: ``[T, H]``; masked tokens may hold anything.
        weight: ``[E, H]``; bias, expert_bias: fp32 ``[E]`` or None, on the logits and, for the selection, the scores.
        token_mask: bool ``[T]``, False for masked tokens, or None.
    """
    tensors = hidden_states, weight, bias, expert_bias, token_mask
    if torch.compiler.is_compiling():
        groups = router.num_groups, router.topk_groups, router.group_score
        return _operator(*tensors, top_k, router.score, router.renormalize, router.scaling_factor, *groups)
    return _route(tensors, top_k, router)


def _route(
    tensors: Sequence[torch.Tensor | None], top_k: int, router: RouterConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    from megamoe.kernels import triton_router

    dense = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors[:2]]
    vectors = [None if x is None else x.contiguous() for x in tensors[2:]]
    return triton_router.route(*dense, *vectors, top_k, router)


# Eager calls skip it: the dispatcher costs more than the kernels.
@torch.library.custom_op("megamoe::route", mutates_args=())
def _operator(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    expert_bias: torch.Tensor | None,
    token_mask: torch.Tensor | None,
    top_k: int,
    score: str,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int,
    topk_groups: int,
    group_score: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``route``."""
    router = RouterConfig(score, renormalize, scaling_factor, num_groups, topk_groups, group_score)
    return _route((hidden_states, weight, bias, expert_bias, token_mask), top_k, router)


@_operator.register_fake
def _(
    hidden_states,
    weight,
    bias,
    expert_bias,
    token_mask,
    top_k,
    score,
    renormalize,
    scaling_factor,
    num_groups,
    topk_groups,
    group_score,
):
    shape = hidden_states.shape[0], top_k
    return weight.new_empty(shape, dtype=torch.int64), weight.new_empty(shape)
