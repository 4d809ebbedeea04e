"""Shared experts as routed ones: each token gets slots for those of its own rank.

Every rank then has e + S experts, its e routed ones first. On a GPU the longer routing is one launch of
``triton_shared_slots``, elsewhere torch's operators.
"""

from __future__ import annotations

import torch

from megamoe.kernels.mlp_activation import dense_columns, runs_triton
from megamoe.types import Routing


def add_shared_slots(
    routing: Routing,
    hidden_states: torch.Tensor,
    gate: torch.Tensor | None,
    *,
    rank: int,
    num_experts: int,
    num_local: int,
    shared: int,
) -> Routing:
    """``routing`` of T tokens with ``shared`` more slots: int64 and fp32 ``[T, K + S]``.

    Routed id i becomes ``i // e * (e + S) + i % e``, -1 outside ``[0, E)``; slot K + s is expert ``rank * (e + S) + e +
    s``, for tokens without experts too, with weight 1 or sigmoid(x . gate), in fp32.

    Args:
        routing: ids int64 ``[T, K]``, weights floating.
        hidden_states: floating ``[T, H]``; looked at with a gate only.
        gate: floating ``[1, H]``, or None.
        rank: this one.
        num_experts, num_local: E and e, before.
        shared: S.
    """
    operands = routing.topk_index, routing.topk_weights, None if gate is None else hidden_states, gate
    sizes = rank, num_experts, num_local, shared
    compute = _operator if torch.compiler.is_compiling() else _compute
    return Routing(*compute(*operands, *sizes))


def _compute(
    index: torch.Tensor,
    weights: torch.Tensor,
    hidden_states: torch.Tensor | None,
    gate: torch.Tensor | None,
    rank: int,
    num_experts: int,
    num_local: int,
    shared: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, top_k = index.shape
    out_index = index.new_empty(tokens, top_k + shared)
    out_weights = torch.empty(out_index.shape, device=index.device)
    if runs_triton(*(x for x in (weights, hidden_states, gate) if x is not None)):
        from megamoe.kernels import triton_shared_slots

        if gate is not None:
            hidden_states, gate = dense_columns(hidden_states), gate.contiguous()
        if tokens:
            operands = index.contiguous(), weights.contiguous(), hidden_states, gate, out_index, out_weights
            with torch.cuda.device(index.device):
                triton_shared_slots.launch(*operands, rank, num_experts, num_local, shared).run()
        return out_index, out_weights
    routed = index // num_local * (num_local + shared) + index % num_local
    out_index[:, :top_k] = torch.where((index >= 0) & (index < num_experts), routed, -1)
    out_index[:, top_k:] = rank * (num_local + shared) + num_local + torch.arange(shared, device=index.device)
    out_weights[:, :top_k] = weights
    out_weights[:, top_k:] = 1 if gate is None else (hidden_states.float() @ gate.float().t()).sigmoid()
    return out_index, out_weights


# Eager calls skip it: the dispatcher costs more than the kernel.
@torch.library.custom_op("megamoe::add_shared_slots", mutates_args=())
def _operator(
    index: torch.Tensor,
    weights: torch.Tensor,
    hidden_states: torch.Tensor | None,
    gate: torch.Tensor | None,
    rank: int,
    num_experts: int,
    num_local: int,
    shared: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``add_shared_slots``. Not differentiable."""
    return _compute(index, weights, hidden_states, gate, rank, num_experts, num_local, shared)


@_operator.register_fake
def _(index, weights, hidden_states, gate, rank, num_experts, num_local, shared):
    out = index.new_empty(index.shape[0], index.shape[1] + shared)
    return out, torch.empty_like(out, dtype=torch.float32)
