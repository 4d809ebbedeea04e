"""Triton kernels between the GEMMs of the FP8 expert MLP: casts along rows and along columns in one pass.

Column-wise codes come out dense along the rows, as the K-grouped GEMM reads them: a program turns whole columns of its
128 rows, so that it writes 128 bytes in a row. The arithmetic of the casts is that of ``triton_quant``. Needs triton:
import it on GPUs only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe.kernels.formats import FP8_MAX, MIN_AMAX
from megamoe.kernels.triton_activation import activate, activate_backward, load_pre
from megamoe.kernels.triton_quant import magnitude_bits, scale_of

BLOCK = 128

COLUMNS = 32
"""Of a block that are in registers at a time. It is read twice: a few rows at a time for the scales along them, then
from the L1 cache for those along its columns.
"""

CAST_ROWS = 64
"""Of a block that is only cast; so many that enough bytes are on their way at a time."""


def activation_rows(activation: str, clamp: bool) -> int:
    """Rows at a time of an activation's backward pass: half as many where a formula needs more registers."""
    return 32 if activation == "swiglu" and not clamp else 16


NUM_WARPS = 8


@triton.jit
def _store_columns(codes_t, scales_t, value, row_block, col, col_fits, num_rows, num_cols, min_amax, LARGEST):
    """Casts columns of 128 rows of a matrix that has ``num_cols``."""
    scale = scale_of(tl.max(magnitude_bits(value), axis=0), min_amax, LARGEST, False)
    tl.store(scales_t + row_block.to(tl.int64) * num_cols + col, scale, mask=col_fits)
    code = (value * tl.div_rn(1.0, scale)[None, :]).to(tl.float8e4nv)
    row = row_block * value.shape[0] + tl.arange(0, value.shape[0])
    start = codes_t + col.to(tl.int64)[:, None] * num_rows + row[None, :]
    tl.store(start, tl.trans(code), mask=col_fits[:, None])


@triton.jit
def _store_rows(codes, scales, value, row, group, col, col_fits, num_cols, scale_group_stride, min_amax, LARGEST):
    """Casts rows of the 128 columns that have scales number ``group``."""
    scale = scale_of(tl.max(magnitude_bits(value), axis=1), min_amax, LARGEST, False)
    tl.store(scales + group.to(tl.int64) * scale_group_stride + row, scale)
    code = (value * tl.div_rn(1.0, scale)[:, None]).to(tl.float8e4nv)
    tl.store(codes + row.to(tl.int64)[:, None] * num_cols + col[None, :], code, mask=col_fits[None, :])


@triton.jit(do_not_specialize=["row_blocks"])
def _columns_kernel(
    x,
    x_scales,
    codes,
    scales,
    codes_t,
    scales_t,
    row_blocks,
    num_cols,
    x_stride,
    scale_group_stride,
    min_amax,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Column-wise codes of ``x``: of FP8 rows (SCALED), or of a matrix whose row-wise codes are made in passing."""
    row_block, col_block = tl.program_id(1), tl.program_id(0)
    num_rows = row_blocks * BLOCK
    if not SCALED:
        col = col_block * BLOCK + tl.arange(0, BLOCK)
        fits = col < num_cols
        for part in range(BLOCK // ROWS):
            row = row_block * BLOCK + part * ROWS + tl.arange(0, ROWS)
            start = x + row.to(tl.int64)[:, None] * x_stride + col[None, :]
            value = tl.load(start, mask=fits[None, :], other=0.0).to(tl.float32)
            _store_rows(
                codes, scales, value, row, col_block, col, fits, num_cols, scale_group_stride, min_amax, LARGEST
            )
    row = row_block * BLOCK + tl.arange(0, BLOCK)
    for part in range(BLOCK // COLUMNS):
        some = col_block * BLOCK + part * COLUMNS + tl.arange(0, COLUMNS)
        some_fit = some < num_cols
        start = x + row.to(tl.int64)[:, None] * x_stride + some[None, :]
        value = tl.load(start, mask=some_fit[None, :], other=0.0).to(tl.float32)
        if SCALED:
            value *= tl.load(x_scales + col_block.to(tl.int64) * scale_group_stride + row)[:, None]
        _store_columns(codes_t, scales_t, value, row_block, some, some_fit, num_rows, num_cols, min_amax, LARGEST)


@triton.jit(do_not_specialize=["row_blocks"])
def _activation_backward_kernel(
    grad,
    pre,
    row_weights,
    codes,
    scales,
    codes_t,
    scales_t,
    act_t,
    act_scales_t,
    weight_grads,
    sums,
    row_blocks,
    num_cols,
    grad_stride,
    pre_stride,
    scale_group_stride,
    min_amax,
    clamp,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    WITH_COLUMNS: tl.constexpr,
    WITH_SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row_block, col_block = tl.program_id(1), tl.program_id(0)
    halves: tl.constexpr = 1 if ACTIVATION == "relu2" else 2
    num_rows, width = row_blocks * BLOCK, halves * num_cols
    first_col = col_block * BLOCK
    col = first_col + tl.arange(0, BLOCK)
    fits = tl.full([BLOCK], True, tl.int1)
    for part in range(BLOCK // ROWS):
        row = row_block * BLOCK + part * ROWS + tl.arange(0, ROWS)
        row64 = row.to(tl.int64)[:, None]
        gate, up = load_pre(pre, row64, col[None, :], None, num_cols, pre_stride, ACTIVATION)
        upstream = tl.load(grad + row64 * grad_stride + col[None, :]).to(tl.float32)
        act = activate(gate, up, clamp, ACTIVATION, CLAMP)
        tl.store(weight_grads + col_block.to(tl.int64) * num_rows + row, tl.sum(upstream * act, axis=1))
        upstream *= tl.load(row_weights + row).to(tl.float32)[:, None]
        gate_grad, up_grad = activate_backward(gate, up, upstream, clamp, ACTIVATION, CLAMP)
        _store_rows(codes, scales, gate_grad, row, col_block, col, fits, width, scale_group_stride, min_amax, LARGEST)
        if halves == 2:
            group, column = num_cols // BLOCK + col_block, num_cols + col
            _store_rows(codes, scales, up_grad, row, group, column, fits, width, scale_group_stride, min_amax, LARGEST)
    if WITH_COLUMNS or WITH_SUMS:
        row = row_block * BLOCK + tl.arange(0, BLOCK)
        row64 = row.to(tl.int64)[:, None]
        weight = tl.load(row_weights + row).to(tl.float32)[:, None]
        all_fit = tl.full([COLUMNS], True, tl.int1)
        for part in range(BLOCK // COLUMNS):
            some = first_col + part * COLUMNS + tl.arange(0, COLUMNS)
            gate, up = load_pre(pre, row64, some[None, :], None, num_cols, pre_stride, ACTIVATION)
            upstream = tl.load(grad + row64 * grad_stride + some[None, :]).to(tl.float32) * weight
            gate_grad, up_grad = activate_backward(gate, up, upstream, clamp, ACTIVATION, CLAMP)
            if WITH_COLUMNS:
                act = activate(gate, up, clamp, ACTIVATION, CLAMP) * weight
                _store_columns(
                    act_t, act_scales_t, act, row_block, some, all_fit, num_rows, num_cols, min_amax, LARGEST
                )
                _store_columns(
                    codes_t, scales_t, gate_grad, row_block, some, all_fit, num_rows, width, min_amax, LARGEST
                )
                if halves == 2:
                    _store_columns(
                        codes_t,
                        scales_t,
                        up_grad,
                        row_block,
                        num_cols + some,
                        all_fit,
                        num_rows,
                        width,
                        min_amax,
                        LARGEST,
                    )
            if WITH_SUMS:
                start = sums + row_block.to(tl.int64) * width + some
                tl.store(start, tl.sum(gate_grad, axis=0))
                if halves == 2:
                    tl.store(start + num_cols, tl.sum(up_grad, axis=0))


def _grid(num_rows: int, num_cols: int) -> tuple[int, int]:
    return triton.cdiv(num_cols, BLOCK), num_rows // BLOCK


def both_ways(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, codes_t: torch.Tensor, scales_t: torch.Tensor
) -> None:
    """Casts ``x [M, N]`` (stride 1 along N) row-wise into ``codes [M, N]`` and MN-major ``scales [M, ceil(N / 128)]``,
    and column-wise into ``codes_t [N, M]`` and ``scales_t [M / 128, N]``. M is a multiple of 128.
    """
    _columns(x, x, codes, scales, codes_t, scales_t, scales.stride(1), False)


def columns_of_rows(x: torch.Tensor, x_scales: torch.Tensor, codes_t: torch.Tensor, scales_t: torch.Tensor) -> None:
    """Casts e4m3 ``x [M, N]`` with MN-major scales per row and 128 columns column-wise; outputs as in ``both_ways``."""
    _columns(x, x_scales, codes_t, scales_t, codes_t, scales_t, x_scales.stride(1), True)


def _columns(x, x_scales, codes, scales, codes_t, scales_t, scale_group_stride, scaled) -> None:
    num_rows, num_cols = x.shape
    grid = _grid(num_rows, num_cols)
    if not all(grid):
        return
    with torch.cuda.device(x.device):
        _columns_kernel[grid](
            x,
            x_scales,
            codes,
            scales,
            codes_t,
            scales_t,
            grid[1],
            num_cols,
            x.stride(0),
            scale_group_stride,
            MIN_AMAX,
            SCALED=scaled,
            BLOCK=BLOCK,
            ROWS=CAST_ROWS,
            COLUMNS=BLOCK if scaled else COLUMNS,
            LARGEST=FP8_MAX,
            num_warps=NUM_WARPS,
        )


def activation_backward(
    grad: torch.Tensor,
    pre: torch.Tensor,
    row_weights: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    columns: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None,
    weight_grads: torch.Tensor,
    sums: torch.Tensor | None,
    activation: str,
    clamp: float | None,
) -> None:
    """The gradients of ``pre [P, 2I]`` for ``grad [P, I]``, both with stride 1 along the columns.

    P and I are multiples of 128. ``codes`` and ``scales`` as in ``both_ways`` with N = 2I, or I for ``relu2``.
    ``columns``: where wanted, ``codes_t`` and ``scales_t`` as there, and the same two of the weighted activation with
    N = I. ``weight_grads [I / 128, P]`` gets each 128 columns' part of the gradient of ``row_weights [P]``, ``sums
    [P / 128, N]`` those of each 128 rows of the unrounded gradients.
    """
    num_rows, num_cols = grad.shape
    grid = _grid(num_rows, num_cols)
    if not all(grid):
        return
    codes_t, scales_t, act_t, act_scales_t = columns or (codes, scales, codes, scales)
    with torch.cuda.device(grad.device):
        _activation_backward_kernel[grid](
            grad,
            pre,
            row_weights,
            codes,
            scales,
            codes_t,
            scales_t,
            act_t,
            act_scales_t,
            weight_grads,
            weight_grads if sums is None else sums,
            grid[1],
            num_cols,
            grad.stride(0),
            pre.stride(0),
            scales.stride(1),
            MIN_AMAX,
            0.0 if clamp is None else float(clamp),
            ACTIVATION=activation,
            CLAMP=clamp is not None,
            WITH_COLUMNS=columns is not None,
            WITH_SUMS=sums is not None,
            BLOCK=BLOCK,
            ROWS=activation_rows(activation, clamp is not None),
            COLUMNS=COLUMNS,
            LARGEST=FP8_MAX,
            num_warps=NUM_WARPS,
        )
