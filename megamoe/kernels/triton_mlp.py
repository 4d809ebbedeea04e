"""Triton kernels between the GEMMs of the FP8 expert MLP: casts along rows and along columns in one pass.

Column-wise codes come out dense along the rows, as the K-grouped GEMM reads them. The arithmetic is that of
``triton_quant``. Needs triton: import it on GPUs only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe.kernels.formats import FP8_MAX, MIN_AMAX
from megamoe.kernels.triton_quant import magnitude_bits, scale_of

BLOCK = 128

CHUNK = 16
"""Rows that are in registers at a time: a column's scale needs all 128, which come again from the L1 cache."""

NUM_WARPS = 8


@triton.jit
def _store_columns(codes_t, scale, value, row, row_fits, col, col_fits, num_rows):
    """Codes of ``value [rows, columns]`` with one scale per column, transposed."""
    code = (value * tl.div_rn(1.0, scale)[None, :]).to(tl.float8e4nv)
    start = codes_t + col.to(tl.int64)[:, None] * num_rows + row[None, :]
    tl.store(start, tl.trans(code), mask=col_fits[:, None] & row_fits[None, :])


@triton.jit
def _load_tile(x, x_scales, row, row_fits, col_block, col, mask, x_stride, scale_group_stride, SCALED: tl.constexpr):
    value = tl.load(x + row.to(tl.int64)[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        scale = tl.load(x_scales + col_block.to(tl.int64) * scale_group_stride + row, mask=row_fits, other=0.0)
        value *= scale[:, None]
    return value


@triton.jit(do_not_specialize=["num_rows"])
def _columns_kernel(
    x,
    x_scales,
    codes,
    scales,
    codes_t,
    scales_t,
    num_rows,
    num_cols,
    x_stride,
    scale_group_stride,
    min_amax,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Column-wise codes of ``x``: of FP8 rows (SCALED), or of a matrix whose row-wise codes are made in passing."""
    row_block, col_block = tl.program_id(1), tl.program_id(0)
    col = col_block * BLOCK + tl.arange(0, BLOCK)
    col_fits = col < num_cols
    amax = tl.zeros([BLOCK], dtype=tl.int32)
    for part in range(BLOCK // CHUNK):
        row = row_block * BLOCK + part * CHUNK + tl.arange(0, CHUNK)
        row_fits = row < num_rows
        mask = row_fits[:, None] & col_fits[None, :]
        value = _load_tile(x, x_scales, row, row_fits, col_block, col, mask, x_stride, scale_group_stride, SCALED)
        bits = magnitude_bits(value)
        amax = tl.maximum(amax, tl.max(bits, axis=0))
        if not SCALED:
            scale = scale_of(tl.max(bits, axis=1), min_amax, LARGEST, False)
            code = (value * tl.div_rn(1.0, scale)[:, None]).to(tl.float8e4nv)
            tl.store(codes + row.to(tl.int64)[:, None] * num_cols + col[None, :], code, mask=mask)
            tl.store(scales + col_block.to(tl.int64) * scale_group_stride + row, scale, mask=row_fits)
    scale_t = scale_of(amax, min_amax, LARGEST, False)
    tl.store(scales_t + row_block.to(tl.int64) * num_cols + col, scale_t, mask=col_fits)
    for part in range(BLOCK // CHUNK):
        row = row_block * BLOCK + part * CHUNK + tl.arange(0, CHUNK)
        row_fits = row < num_rows
        mask = row_fits[:, None] & col_fits[None, :]
        value = _load_tile(x, x_scales, row, row_fits, col_block, col, mask, x_stride, scale_group_stride, SCALED)
        _store_columns(codes_t, scale_t, value, row, row_fits, col, col_fits, num_rows)


@triton.jit
def _swiglu_gradients(
    grad, pre, row_weights, row, row_fits, col, mask, num_cols, grad_stride, pre_stride, clamp, CLAMP
):
    """Of some rows and columns: the weighted activation, the gradients of gate and up, and that of the weights."""
    weight = tl.load(row_weights + row, mask=row_fits, other=0.0).to(tl.float32)[:, None]
    row64 = row.to(tl.int64)[:, None]
    start = pre + row64 * pre_stride + col[None, :]
    gate = tl.load(start, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(start + num_cols, mask=mask, other=0.0).to(tl.float32)
    upstream = tl.load(grad + row64 * grad_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    gate_clamped, up_clamped = gate, up
    if CLAMP:
        # Comparisons, not minimum and maximum: NaN must pass.
        gate_clamped = tl.where(gate > clamp, clamp, gate)
        up_clamped = tl.where(up > clamp, clamp, tl.where(up < -clamp, -clamp, up))
    sigmoid = 1.0 / (1.0 + tl.exp(-gate_clamped))
    silu = gate_clamped * sigmoid
    weight_grad = tl.sum(upstream * silu * up_clamped, axis=1)
    upstream *= weight
    gate_grad = upstream * up_clamped * sigmoid * (1.0 + gate_clamped * (1.0 - sigmoid))
    up_grad = upstream * silu
    if CLAMP:
        gate_grad = tl.where(gate > clamp, 0.0, gate_grad)
        up_grad = tl.where((up > clamp) | (up < -clamp), 0.0, up_grad)
    return silu * up_clamped * weight, gate_grad, up_grad, weight_grad


@triton.jit(do_not_specialize=["num_rows"])
def _swiglu_backward_kernel(
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
    num_rows,
    num_cols,
    grad_stride,
    pre_stride,
    scale_group_stride,
    min_amax,
    clamp,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LARGEST: tl.constexpr,
    CLAMP: tl.constexpr,
):
    row_block, col_block = tl.program_id(1), tl.program_id(0)
    col = col_block * BLOCK + tl.arange(0, BLOCK)
    col_fits = col < num_cols
    gate_amax = tl.zeros([BLOCK], dtype=tl.int32)
    up_amax = tl.zeros([BLOCK], dtype=tl.int32)
    act_amax = tl.zeros([BLOCK], dtype=tl.int32)
    for part in range(BLOCK // CHUNK):
        row = row_block * BLOCK + part * CHUNK + tl.arange(0, CHUNK)
        row_fits = row < num_rows
        mask = row_fits[:, None] & col_fits[None, :]
        act, gate_grad, up_grad, weight_grad = _swiglu_gradients(
            grad, pre, row_weights, row, row_fits, col, mask, num_cols, grad_stride, pre_stride, clamp, CLAMP
        )
        tl.store(weight_grads + col_block.to(tl.int64) * num_rows + row, weight_grad, mask=row_fits)
        act_amax = tl.maximum(act_amax, tl.max(magnitude_bits(act), axis=0))
        gate_amax = tl.maximum(gate_amax, tl.max(magnitude_bits(gate_grad), axis=0))
        up_amax = tl.maximum(up_amax, tl.max(magnitude_bits(up_grad), axis=0))
        for half in tl.static_range(2):
            value = gate_grad if half == 0 else up_grad
            scale = scale_of(tl.max(magnitude_bits(value), axis=1), min_amax, LARGEST, False)
            code = (value * tl.div_rn(1.0, scale)[:, None]).to(tl.float8e4nv)
            column = half * num_cols + col
            tl.store(codes + row.to(tl.int64)[:, None] * 2 * num_cols + column[None, :], code, mask=mask)
            group = half * (num_cols // BLOCK) + col_block
            tl.store(scales + group.to(tl.int64) * scale_group_stride + row, scale, mask=row_fits)
    row_block64 = row_block.to(tl.int64)
    gate_scale = scale_of(gate_amax, min_amax, LARGEST, False)
    up_scale = scale_of(up_amax, min_amax, LARGEST, False)
    act_scale = scale_of(act_amax, min_amax, LARGEST, False)
    tl.store(scales_t + row_block64 * 2 * num_cols + col, gate_scale, mask=col_fits)
    tl.store(scales_t + row_block64 * 2 * num_cols + num_cols + col, up_scale, mask=col_fits)
    tl.store(act_scales_t + row_block64 * num_cols + col, act_scale, mask=col_fits)
    for part in range(BLOCK // CHUNK):
        row = row_block * BLOCK + part * CHUNK + tl.arange(0, CHUNK)
        row_fits = row < num_rows
        mask = row_fits[:, None] & col_fits[None, :]
        act, gate_grad, up_grad, weight_grad = _swiglu_gradients(
            grad, pre, row_weights, row, row_fits, col, mask, num_cols, grad_stride, pre_stride, clamp, CLAMP
        )
        _store_columns(act_t, act_scale, act, row, row_fits, col, col_fits, num_rows)
        _store_columns(codes_t, gate_scale, gate_grad, row, row_fits, col, col_fits, num_rows)
        _store_columns(codes_t, up_scale, up_grad, row, row_fits, num_cols + col, col_fits, num_rows)


def _grid(num_rows: int, num_cols: int) -> tuple[int, int]:
    return triton.cdiv(num_cols, BLOCK), triton.cdiv(num_rows, BLOCK)


def both_ways(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, codes_t: torch.Tensor, scales_t: torch.Tensor
) -> None:
    """Casts ``x [M, N]`` (stride 1 along N) row-wise into ``codes [M, N]`` and MN-major ``scales [M, ceil(N / 128)]``,
    and column-wise into ``codes_t [N, M]`` and ``scales_t [ceil(M / 128), N]``.
    """
    _columns(x, x, codes, scales, codes_t, scales_t, x.stride(0), scales.stride(1), False)


def columns_of_rows(x: torch.Tensor, x_scales: torch.Tensor, codes_t: torch.Tensor, scales_t: torch.Tensor) -> None:
    """Casts e4m3 ``x [M, N]`` with MN-major scales per row and 128 columns column-wise; outputs as in ``both_ways``."""
    _columns(x, x_scales, codes_t, scales_t, codes_t, scales_t, x.stride(0), x_scales.stride(1), True)


def _columns(x, x_scales, codes, scales, codes_t, scales_t, x_stride, scale_group_stride, scaled) -> None:
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
            num_rows,
            num_cols,
            x_stride,
            scale_group_stride,
            MIN_AMAX,
            SCALED=scaled,
            BLOCK=BLOCK,
            CHUNK=CHUNK,
            LARGEST=FP8_MAX,
            num_warps=NUM_WARPS,
        )


def swiglu_backward(
    grad: torch.Tensor,
    pre: torch.Tensor,
    row_weights: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    codes_t: torch.Tensor,
    scales_t: torch.Tensor,
    act_t: torch.Tensor,
    act_scales_t: torch.Tensor,
    weight_grads: torch.Tensor,
    clamp: float | None,
) -> None:
    """The gradients of ``pre [P, 2I]`` for ``grad [P, I]`` both ways, the weighted activation column-wise.

    I is a multiple of 128. Outputs as in ``both_ways`` with N = 2I, of the activation with N = I; ``weight_grads
    [I / 128, P]`` gets each 128 columns' part of the gradient of ``row_weights [P]``.
    """
    num_rows, num_cols = grad.shape
    grid = _grid(num_rows, num_cols)
    if not all(grid):
        return
    with torch.cuda.device(grad.device):
        _swiglu_backward_kernel[grid](
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
            num_rows,
            num_cols,
            grad.stride(0),
            pre.stride(0),
            scales.stride(1),
            MIN_AMAX,
            0.0 if clamp is None else clamp,
            BLOCK=BLOCK,
            CHUNK=CHUNK,
            LARGEST=FP8_MAX,
            CLAMP=clamp is not None,
            num_warps=NUM_WARPS,
        )
