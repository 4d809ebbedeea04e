"""Triton kernels of what a bias's gradients need: sums over each expert's rows, and products of rows with its bias.

Needs triton: import it on GPUs only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, BLOCK = 32, 64
DOT_ROWS, DOT_BLOCK = 4, 256
NUM_WARPS = 4

SPLITS = 8
"""Parts of an expert's rows, added up last: one expert may have nearly all rows."""


@triton.jit
def _segment_sums_kernel(
    x,
    weights,
    starts,
    counts,
    sums,
    num_experts,
    num_cols,
    x_stride,
    WEIGHTED: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Column sums of one of SPLITS equal parts of an expert's rows."""
    expert, split = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + expert).to(tl.int64)
    count = tl.load(counts + expert).to(tl.int32)
    part = tl.cdiv(count, SPLITS * ROWS) * ROWS
    first = split * part
    last = tl.minimum(first + part, count)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    col_fits = col < num_cols
    total = tl.zeros([ROWS, BLOCK], dtype=sums.dtype.element_ty)
    begin = first
    while begin < last:
        row = begin + tl.arange(0, ROWS)
        mask = (row < last)[:, None] & col_fits[None, :]
        value = tl.load(x + (start + row)[:, None] * x_stride + col[None, :], mask=mask, other=0.0)
        value = value.to(sums.dtype.element_ty)
        if WEIGHTED:
            value *= tl.load(weights + start + row, mask=row < last, other=0.0).to(sums.dtype.element_ty)[:, None]
        total += value
        begin += ROWS
    out = sums + (split * num_experts + expert).to(tl.int64) * num_cols + col
    tl.store(out, tl.sum(total, axis=0), mask=col_fits)


@triton.jit
def _row_dots_kernel(
    x,
    vectors,
    ids,
    dots,
    num_rows,
    num_cols,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Rows of no expert have id -1.
    expert = tl.load(ids + row, mask=row < num_rows, other=-1).to(tl.int64)[:, None]
    total = tl.zeros([ROWS, BLOCK], dtype=dots.dtype.element_ty)
    first = 0
    while first < num_cols:
        col = (first + tl.arange(0, BLOCK))[None, :]
        mask = (expert >= 0) & (col < num_cols)
        value = tl.load(x + row.to(tl.int64)[:, None] * x_stride + col, mask=mask, other=0.0)
        vector = tl.load(vectors + expert * num_cols + col, mask=mask, other=0.0)
        total += value.to(dots.dtype.element_ty) * vector.to(dots.dtype.element_ty)
        first += BLOCK
    tl.store(dots + row, tl.sum(total, axis=1), mask=row < num_rows)


def segment_sums(
    x: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    out_dtype: torch.dtype,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[e, N]``: sums of the ``counts[j]`` rows of ``x [P, N]`` (stride 1 along N) from ``starts[j]`` on.

    Each row is multiplied by its one of ``weights [P]``, where there are any. In one order, whatever the other experts
    have: the same bits on every run. Nothing waits for the device.
    """
    experts, columns = counts.numel(), x.shape[1]
    sums = torch.empty(SPLITS, experts, columns, dtype=out_dtype, device=x.device)
    grid = triton.cdiv(columns, BLOCK), experts, SPLITS
    if all(grid):
        with torch.cuda.device(x.device):
            _segment_sums_kernel[grid](
                x,
                x if weights is None else weights.contiguous(),
                starts,
                counts,
                sums,
                experts,
                columns,
                x.stride(0),
                WEIGHTED=weights is not None,
                SPLITS=SPLITS,
                ROWS=ROWS,
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )
    return sums.sum(dim=0)


def row_dots(x: torch.Tensor, vectors: torch.Tensor, ids: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """``[P]``: row p of ``x [P, N]`` (stride 1 along N) times ``vectors[ids[p]]`` of a contiguous ``[e, N]``.

    0 where the id is -1.
    """
    num_rows, columns = x.shape
    dots = torch.empty(num_rows, dtype=out_dtype, device=x.device)
    if num_rows:
        with torch.cuda.device(x.device):
            _row_dots_kernel[(triton.cdiv(num_rows, DOT_ROWS),)](
                x,
                vectors,
                ids,
                dots,
                num_rows,
                columns,
                x.stride(0),
                ROWS=DOT_ROWS,
                BLOCK=DOT_BLOCK,
                num_warps=NUM_WARPS,
            )
    return dots
