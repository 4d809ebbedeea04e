"""The GEMMs of ``gemm`` in plain torch, fp32, on any device: what the kernels are compared with."""

from __future__ import annotations

import torch

from megamoe.kernels import reference
from megamoe.kernels.layout import ALIGN, align_up
from megamoe.kernels.row_groups import RowGroups
from megamoe.types import ExpertLayout, Fp8Tensor


def _spans(rows: RowGroups | None, a: torch.Tensor, experts: int) -> list[tuple[int, int, int]]:
    """(expert, start, end) of every run of rows with one expert."""
    num_rows = a.shape[-2]
    if rows is None:
        return [(0, 0, num_rows)]
    if rows.kind != "contiguous":
        return [(expert, *span) for expert, span in enumerate(rows.spans(num_rows))]
    ids = rows.index[::ALIGN].tolist()
    return [
        (expert, block * ALIGN, min((block + 1) * ALIGN, num_rows))
        for block, expert in enumerate(ids)
        if 0 <= expert < experts
    ]


def product(
    a: torch.Tensor, a_scales: torch.Tensor | None, b: torch.Tensor, b_scales: torch.Tensor | None, transposed_b: bool
) -> torch.Tensor:
    """fp32 ``a @ b^T`` of one expert (``a @ b`` with ``transposed_b``)."""
    if a_scales is None:
        b = b.float() if transposed_b else b.float().t()
        return a.float() @ b
    return reference.gemm_nt_fp8(Fp8Tensor(a, a_scales, (1, 128)), Fp8Tensor(b, b_scales, (128, 128)))


@torch.no_grad()
def gemm(
    a: torch.Tensor,
    a_scales: torch.Tensor | None,
    b: torch.Tensor,
    b_scales: torch.Tensor | None,
    rows: RowGroups | None,
    out: torch.Tensor,
    out_scales: torch.Tensor | None,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    transposed_b: bool,
    activation: str | None,
    clamp: float | None,
    pre: torch.Tensor | None = None,
) -> None:
    """Computes into ``out`` (and ``out_scales``, ``pre``); arguments as in ``gemm_ops.execute``."""
    flat_a, flat_out = a.flatten(0, -2), out.view(-1, out.shape[-1])
    flat_scales = None if a_scales is None else a_scales.flatten(0, -2)
    flat_c = None if c is None else c.view(-1, c.shape[-1])
    for expert, start, end in _spans(rows, a, b.shape[0]):
        if end <= start:
            continue
        span = slice(start, end)
        scales = None if flat_scales is None else flat_scales[span]
        weight_scales = None if b_scales is None else b_scales[expert]
        result = product(flat_a[span], scales, b[expert], weight_scales, transposed_b)
        if bias is not None:
            result += bias[expert].float()
        if flat_c is not None:
            result += flat_c[span].float()
        if pre is not None:
            pre[span] = result.to(pre.dtype)
        if activation is not None:
            result = reference.activate(result, activation, clamp)
        if row_weights is not None:
            result *= row_weights[span, None]
        if out_scales is None:
            flat_out[span] = result.to(out.dtype)
        else:
            quantized = reference.quantize(result, (1, 128))
            flat_out[span] = quantized.codes
            if out_scales.dim() == 3:
                first = start - expert * out.shape[1]
                out_scales[expert, first : first + end - start] = quantized.scales
            else:
                out_scales[span] = quantized.scales


# ---------------------------------------------------------------- K-grouped


def k_layout(rows: RowGroups, num_rows: int) -> ExpertLayout:
    """The rows that each expert sums over, cut to the matrix.

    As ``RowGroups.spans`` where ends ascend; else a start depends on nothing but the end before.
    """
    ends = rows.index.long().clamp(0, num_rows)
    starts = torch.cat([ends.new_zeros(min(ends.numel(), 1)), align_up(ends[:-1])])
    return ExpertLayout((ends - starts).clamp(min=0), starts, num_rows)


@torch.no_grad()
def k_gemm(
    a: torch.Tensor,
    a_scales: torch.Tensor | None,
    b: torch.Tensor,
    b_scales: torch.Tensor | None,
    rows: RowGroups,
    out: torch.Tensor,
    add: bool,
) -> None:
    """Computes into ``out``, or adds to it; arguments as in ``gemm_k_ops.execute``. Waits for the device."""
    layout = k_layout(rows, a.shape[0])
    if a_scales is None:
        result = reference.grouped_gemm_k(a, b, layout)
    else:
        columns = 1 if b_scales.shape[1] == b.shape[1] else ALIGN
        operands = Fp8Tensor(a, a_scales, (ALIGN, 1)), Fp8Tensor(b, b_scales, (ALIGN, columns))
        result = reference.grouped_gemm_k_fp8(*operands, layout)
    if not add:
        out.copy_(result)
        return
    for expert in layout.counts.nonzero().flatten().tolist():
        out[expert] += result[expert]
