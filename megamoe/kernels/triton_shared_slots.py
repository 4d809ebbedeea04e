"""Triton kernel that gives tokens slots for the shared experts of their rank, with their weights. For GPUs only."""

import torch
import triton
import triton.language as tl

from megamoe.kernels.triton_router import Launch

TOKENS = 32
"""Of a program, where no gate is computed; with one it has a single token, so that few tokens too use many SMs."""

MOST_COLUMNS = 8192
WARPS = 4


@triton.jit(do_not_specialize=["num_tokens", "first_shared", "num_experts", "num_local"])
def extend_kernel(
    index, weights, x, gate, out_index, out_weights, num_tokens, x_stride, hidden, first_shared, num_experts, num_local,
    K: tl.constexpr, S: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``out_index`` int64 and ``out_weights`` fp32 [T, K + S]; SLOTS: a power of two from K + S on."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.arange(0, SLOTS)[None, :]
    exists = token < num_tokens
    place = token.to(tl.int64)[:, None]
    routed = exists[:, None] & (slot < K)
    expert = tl.load(index + place * K + slot, mask=routed, other=-1)
    weight = tl.load(weights + place * K + slot, mask=routed, other=1.0).to(tl.float32)
    if gate is not None:
        total = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for first in range(0, hidden, COLUMNS):
            column = first + tl.arange(0, COLUMNS)[None, :]
            inside = column < hidden
            value = tl.load(x + place * x_stride + column, mask=exists[:, None] & inside, other=0.0)
            total += value.to(tl.float32) * tl.load(gate + column, mask=inside, other=0.0).to(tl.float32)
        factor = tl.div_rn(1.0, 1.0 + tl.exp(-tl.sum(total, 1)))
        weight = tl.where(slot < K, weight, factor[:, None])
    named = (expert >= 0) & (expert < num_experts)
    # Not for negative numbers, which are rounded the other way.
    physical = expert + expert // num_local * S
    physical = tl.where(named, physical, -1)
    physical = tl.where(slot < K, physical, first_shared + slot - K)
    mask = exists[:, None] & (slot < K + S)
    tl.store(out_index + place * (K + S) + slot, physical, mask=mask)
    tl.store(out_weights + place * (K + S) + slot, weight, mask=mask)


def launch(
    index: torch.Tensor,
    weights: torch.Tensor,
    x: torch.Tensor | None,
    gate: torch.Tensor | None,
    out_index: torch.Tensor,
    out_weights: torch.Tensor,
    rank: int,
    num_experts: int,
    num_local: int,
    shared: int,
) -> Launch:
    """That writes ``out_index`` and ``out_weights`` as ``shared_slots.add_shared_slots`` says, of at least one token.

    All are contiguous, but for the rows of ``x``, which there is with ``gate`` only.
    """
    num_tokens, top_k = index.shape
    tokens, hidden = (TOKENS, 0) if gate is None else (1, x.shape[1])
    arguments = dict(
        index=index,
        weights=weights,
        x=x,
        gate=gate,
        out_index=out_index,
        out_weights=out_weights,
        num_tokens=num_tokens,
        x_stride=0 if x is None else x.stride(0),
        hidden=hidden,
        first_shared=rank * (num_local + shared) + num_local,
        num_experts=num_experts,
        num_local=num_local,
        K=top_k,
        S=shared,
        SLOTS=triton.next_power_of_2(top_k + shared),
        TOKENS=tokens,
        COLUMNS=min(MOST_COLUMNS, triton.next_power_of_2(max(hidden, 32))),
    )
    return Launch(extend_kernel, (triton.cdiv(num_tokens, tokens),), arguments, dict(num_warps=WARPS))
