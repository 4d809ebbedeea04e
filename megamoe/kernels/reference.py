"""The numerics contract in plain torch: the oracle of every kernel, and the CPU back-end.

Every function takes tensors and returns tensors, on any device. The grouped functions loop over experts on the host.
Accumulation is fp32 (fp64 where an operand is fp64). Symbols as in ``megamoe.types``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megamoe.config import SWIGLU_OAI_ALPHA
from megamoe.kernels.formats import FP8_MAX, multiply_blocks, quantize_blocks
from megamoe.types import ExpertLayout, Fp8Tensor

FP8_BLOCK = 128


def accumulation_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """fp32, or fp64 where any of ``tensors`` is fp64."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


# ---------------------------------------------------------------- routing


def router_logits(hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """fp32 ``[T, E]``: ``hidden_states [T, H] @ weight [E, H]^T + bias [E]``, computed in fp32."""
    dtype = accumulation_dtype(hidden_states, weight)
    return F.linear(hidden_states.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def expert_scores(logits: torch.Tensor, score: str) -> torch.Tensor:
    """Expert scores ``[T, E]`` of ``logits [T, E]``; ``score`` as in ``RouterConfig``."""
    if score == "softmax":
        return logits.softmax(dim=-1)
    if score == "sigmoid":
        return logits.sigmoid()
    # Where softplus underflows, the square root's infinite slope would make the gradient NaN.
    return F.softplus(logits).clamp(min=torch.finfo(logits.dtype).tiny).sqrt()


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` largest of the last dimension, in descending order; ties go to the lowest index.

    NaN counts as largest, so that a NaN row still yields distinct indices.
    """
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :count]


def select_experts(
    scores: torch.Tensor, top_k: int, num_groups: int = 1, topk_groups: int = 1, group_score: str = "max"
) -> torch.Tensor:
    """int64 ``[T, K]``: the ``top_k`` best experts of each token's ``topk_groups`` best groups, best first.

    Args:
        scores: ``[T, E]``, with the selection bias added. Experts e*E/G .. (e+1)*E/G - 1 form group e.
        group_score: ``max`` or ``sum_top2`` of the group's scores.
    """
    if num_groups > 1:
        grouped = scores.unflatten(-1, (num_groups, -1))
        best = grouped.topk(2 if group_score == "sum_top2" else 1, dim=-1).values.sum(dim=-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, _best(best, topk_groups), True)
        # Kept groups first, whatever their scores: biased ones can be negative, and -inf switches an expert off.
        order = _best(scores, scores.shape[-1])
        expert_kept = kept.repeat_interleave(grouped.shape[-1], dim=-1).gather(-1, order)
        return order.gather(-1, _best(expert_kept.to(torch.uint8), top_k))
    return _best(scores, top_k)


def routing_weights(
    scores: torch.Tensor, topk_index: torch.Tensor, renormalize: bool, scaling_factor: float
) -> torch.Tensor:
    """``[T, K]``: the (unbiased) scores of the selected experts, renormalised and scaled."""
    weights = scores.gather(-1, topk_index)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scaling_factor


# ---------------------------------------------------------------- permute and combine


def permute(values: torch.Tensor, row_to_source: torch.Tensor) -> torch.Tensor:
    """``[P, ...]``: row p is ``values[row_to_source[p]]``, or zero where that is -1."""
    out = values.new_zeros(row_to_source.numel(), *values.shape[1:])
    if values.shape[0] and out.shape[0]:
        padding = (row_to_source < 0).view(-1, *[1] * (values.dim() - 1))
        torch.index_select(values, 0, row_to_source.clamp(min=0), out=out)
        out.masked_fill_(padding, 0)
    return out


def combine_slots(rows: torch.Tensor, slot_to_row: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Sums each token's rows in fp32, in ascending slot order, and rounds once.

    Args:
        rows: ``[P, H]``.
        slot_to_row: int64 ``[T, K]``; -1 = nothing in this slot. A token without any row gets zeros.
    """
    total = rows.new_zeros(slot_to_row.shape[0], rows.shape[1], dtype=accumulation_dtype(rows))
    if rows.shape[0]:
        for slot in range(slot_to_row.shape[1]):
            total += permute(rows, slot_to_row[:, slot])
    return total.to(out_dtype)


# ---------------------------------------------------------------- FP8


def quantize(x: torch.Tensor, block: tuple[int, int]) -> Fp8Tensor:
    """e4m3 codes of ``x [..., M, N]`` with one fp32 scale per block: scale = max(amax, 1e-10) / 448.

    Codes are rounded to nearest even and saturate; a NaN or Inf spoils its own block only. A short last block counts
    as padded with zeros.
    """
    values, scales = quantize_blocks(x, block, FP8_MAX, power_of_two=False)
    return Fp8Tensor(values.contiguous().to(torch.float8_e4m3fn), scales, block)


def dequantize(x: Fp8Tensor) -> torch.Tensor:
    """fp32 ``[..., M, N]``: code times the scale of its block."""
    return multiply_blocks(x.codes, x.scales, x.block)


# ---------------------------------------------------------------- grouped GEMM


def grouped_gemm_nt(a: torch.Tensor, b: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """fp32 ``[P, N]``: row p of expert j is ``a[p] @ b[j]^T``; ``a [P, K]``, ``b [e, N, K]``. Padding rows are zero."""
    return grouped_gemm_nn(a, b.transpose(1, 2), layout)


def grouped_gemm_nn(a: torch.Tensor, b: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """fp32 ``[P, N]``: row p of expert j is ``a[p] @ b[j]``; ``a [P, K]``, ``b [e, K, N]``. Padding rows are zero."""
    dtype = accumulation_dtype(a, b)
    out = a.new_zeros(a.shape[0], b.shape[2], dtype=dtype)
    for expert, (start, end) in enumerate(layout.spans()):
        if end > start:
            torch.mm(a[start:end].to(dtype), b[expert].to(dtype), out=out[start:end])
    return out


def grouped_gemm_k(a: torch.Tensor, b: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """fp32 ``[e, M, N]``: ``a[rows of j]^T @ b[rows of j]``; ``a [P, M]``, ``b [P, N]``. Zero where j has no rows."""
    dtype = accumulation_dtype(a, b)
    out = a.new_zeros(layout.counts.numel(), a.shape[1], b.shape[1], dtype=dtype)
    for expert, (start, end) in enumerate(layout.spans()):
        if end > start:
            torch.mm(a[start:end].to(dtype).t(), b[start:end].to(dtype), out=out[expert])
    return out


def _gemm_fp8_block_sums(a: Fp8Tensor, b: Fp8Tensor) -> torch.Tensor:
    """``dequantize(a) [M, K] @ dequantize(b) [K, N]`` with two-level accumulation.

    Per 128-wide block of K the codes' product is summed on its own, multiplied by both scales and added to an fp32
    accumulator. ``a`` has blocks (1, 128) or (128, 1)^T, ``b`` (128, 128) or (128, 1): one scale per row of ``a``, per
    column (or 128 columns) of ``b`` and block of K.
    """
    out = torch.zeros(a.codes.shape[0], b.codes.shape[1], device=a.codes.device)
    scale_b = b.scales.repeat_interleave(b.block[1], dim=1)[:, : b.codes.shape[1]]
    for block, start in enumerate(range(0, a.codes.shape[1], FP8_BLOCK)):
        k = slice(start, start + FP8_BLOCK)
        partial = a.codes[:, k].float() @ b.codes[k].float()
        out += partial * a.scales[:, block, None] * scale_b[block]
    return out


def _slice_rows(x: Fp8Tensor, start: int, end: int) -> Fp8Tensor:
    """Rows ``start:end``; ``start`` is a multiple of the block's rows."""
    rows = x.block[0]
    return Fp8Tensor(x.codes[start:end], x.scales[start // rows : -(-end // rows)], x.block)


def _transpose(x: Fp8Tensor) -> Fp8Tensor:
    return Fp8Tensor(x.codes.transpose(-1, -2), x.scales.transpose(-1, -2), (x.block[1], x.block[0]))


def _expert(x: Fp8Tensor, expert: int) -> Fp8Tensor:
    return Fp8Tensor(x.codes[expert], x.scales[expert], x.block)


def gemm_nt_fp8(a: Fp8Tensor, b: Fp8Tensor) -> torch.Tensor:
    """fp32 ``a @ b^T``, ``a [M, K]`` in 1x128 blocks, ``b [N, K]`` in 128x128 blocks, with two-level accumulation."""
    return _gemm_fp8_block_sums(a, _transpose(b))


def grouped_gemm_nt_fp8(a: Fp8Tensor, b: Fp8Tensor, layout: ExpertLayout) -> torch.Tensor:
    """``grouped_gemm_nt`` of ``a [P, K]`` in 1x128 blocks and ``b [e, N, K]`` in 128x128 blocks."""
    return grouped_gemm_nn_fp8(a, _transpose(b), layout)


def grouped_gemm_nn_fp8(a: Fp8Tensor, b: Fp8Tensor, layout: ExpertLayout) -> torch.Tensor:
    """``grouped_gemm_nn`` of ``a [P, K]`` in 1x128 blocks and ``b [e, K, N]`` in 128x128 blocks."""
    out = torch.zeros(a.codes.shape[0], b.codes.shape[2], device=a.codes.device)
    for expert, (start, end) in enumerate(layout.spans()):
        if end > start:
            out[start:end] = _gemm_fp8_block_sums(_slice_rows(a, start, end), _expert(b, expert))
    return out


def grouped_gemm_k_fp8(a: Fp8Tensor, b: Fp8Tensor, layout: ExpertLayout) -> torch.Tensor:
    """``grouped_gemm_k`` of ``a [P, M]`` in 128x1 blocks along the rows and ``b [P, N]`` in 128x1 or 128x128 blocks.

    Every expert starts at a multiple of 128 rows, so no block spans two experts; padding rows must be zero.
    """
    out = torch.zeros(layout.counts.numel(), a.codes.shape[1], b.codes.shape[1], device=a.codes.device)
    for expert, (start, end) in enumerate(layout.spans()):
        if end > start:
            rows = _slice_rows(a, start, end), _slice_rows(b, start, end)
            out[expert] = _gemm_fp8_block_sums(_transpose(rows[0]), rows[1])
    return out


def segment_sum(rows: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """fp32 ``[e, N]``: the sum of each expert's rows of ``rows [P, N]``."""
    out = rows.new_zeros(layout.counts.numel(), rows.shape[1], dtype=accumulation_dtype(rows))
    for expert, (start, end) in enumerate(layout.spans()):
        out[expert] = rows[start:end].to(out.dtype).sum(dim=0)
    return out


# ---------------------------------------------------------------- activations


def activate(pre: torch.Tensor, activation: str, clamp: float | None) -> torch.Tensor:
    """fp32 ``[P, I]`` of pre-activations ``[P, 2I]`` (gate columns, then up columns), or ``[P, I]`` for ``relu2``.

    ``activation`` and ``clamp`` as in ``MoEConfig``; differentiable.
    """
    pre = pre.to(accumulation_dtype(pre))
    if activation == "relu2":
        return F.relu(pre).square()
    gate, up = pre.chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    if activation == "swiglu":
        return F.silu(gate) * up
    if activation == "swiglu_oai":
        return gate * torch.sigmoid(SWIGLU_OAI_ALPHA * gate) * (up + 1)
    return F.gelu(gate, approximate="tanh" if activation == "geglu_tanh" else "none") * up


def activate_backward(
    pre: torch.Tensor, grad: torch.Tensor, activation: str, clamp: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The activation again and, for its gradient ``grad [P, I]``, the gradient of ``pre``; both fp32."""
    with torch.enable_grad():
        leaf = pre.detach().to(accumulation_dtype(pre)).requires_grad_()
        value = activate(leaf, activation, clamp)
        (grad_pre,) = torch.autograd.grad(value, leaf, grad.to(value.dtype))
    return value.detach(), grad_pre
