"""Triton kernel of the sums over each expert's rows: the gradients of biases. Needs triton: import it on GPUs only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, BLOCK = 32, 64
NUM_WARPS = 4

SPLITS = 8
"""Parts of an expert's rows, added up last: one expert may have nearly all rows."""


@triton.jit
def _segment_sums_kernel(
    x,
    starts,
    counts,
    sums,
    num_experts,
    num_cols,
    x_stride,
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
        total += value.to(sums.dtype.element_ty)
        begin += ROWS
    out = sums + (split * num_experts + expert).to(tl.int64) * num_cols + col
    tl.store(out, tl.sum(total, axis=0), mask=col_fits)


def segment_sums(x: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """``[e, N]``: sums of the ``counts[j]`` rows of ``x [P, N]`` (stride 1 along N) from ``starts[j]`` on.

    In one order, whatever the other experts have: the same bits on every run. Nothing waits for the device.
    """
    experts, columns = counts.numel(), x.shape[1]
    sums = torch.empty(SPLITS, experts, columns, dtype=out_dtype, device=x.device)
    grid = triton.cdiv(columns, BLOCK), experts, SPLITS
    if all(grid):
        with torch.cuda.device(x.device):
            _segment_sums_kernel[grid](
                x,
                starts,
                counts,
                sums,
                experts,
                columns,
                x.stride(0),
                SPLITS=SPLITS,
                ROWS=ROWS,
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )
    return sums.sum(dim=0)
