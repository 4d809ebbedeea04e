"""Triton kernels of the FP8 casts, with the bits of ``megamoe.kernels.formats``. Needs triton: import it on GPUs only.

Every kernel reduces |x| as the bits of its fp32 value: integer order is the order of magnitudes, and NaN comes out on
top. Divisions are rounded to nearest, so that scales and codes do not depend on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCKWISE_CHUNK = 32
"""Rows that the block-wise cast turns at a time: of 16 to 128 the fastest on an H200."""


@triton.jit
def _scale_of(amax_bits, min_amax, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """fp32 scale of a block from the bits of its amax."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    # Written so that NaN stays NaN.
    scale = tl.div_rn(tl.where(amax < min_amax, min_amax, amax), LARGEST)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        power = (tl.minimum(tl.maximum(exponent, 1), 254) << 23).to(tl.float32, bitcast=True)
        scale = tl.where(bits < 0x7F800000, power, float("nan"))
    return scale


@triton.jit
def _magnitude_bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _rowwise_kernel(
    x,
    codes,
    scales,
    num_rows,
    num_cols,
    x_stride,
    codes_stride,
    scale_row_stride,
    scale_group_stride,
    min_amax,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    col = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    # 64-bit offsets: a tensor may have more than 2^31 elements.
    row64 = row.to(tl.int64)
    mask = (row < num_rows)[:, None, None] & (col < num_cols)[None, :, :]
    value = tl.load(x + row64[:, None, None] * x_stride + col[None, :, :], mask=mask, other=0.0).to(tl.float32)
    scale = _scale_of(tl.max(_magnitude_bits(value), axis=2), min_amax, LARGEST, POWER_OF_TWO)
    code = (value * tl.div_rn(1.0, scale)[:, :, None]).to(tl.float8e4nv)
    tl.store(codes + row64[:, None, None] * codes_stride + col[None, :, :], code, mask=mask)
    scale_mask = (row < num_rows)[:, None] & (group * GROUP < num_cols)[None, :]
    offset = row64[:, None] * scale_row_stride + group.to(tl.int64)[None, :] * scale_group_stride
    tl.store(scales + offset, scale, mask=scale_mask)


@triton.jit(do_not_specialize=["num_rows"])
def _blockwise_kernel(
    x,
    codes,
    scales,
    codes_t,
    scales_t,
    num_rows,
    num_cols,
    x_matrix_stride,
    x_stride,
    min_amax,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    TRANSPOSE: tl.constexpr,
):
    row_block, col_block, matrix = tl.program_id(1), tl.program_id(0), tl.program_id(2).to(tl.int64)
    row = row_block * BLOCK + tl.arange(0, BLOCK)
    col = col_block * BLOCK + tl.arange(0, BLOCK)
    col_fits = col < num_cols
    start = x + matrix * x_matrix_stride
    mask = (row < num_rows)[:, None] & col_fits[None, :]
    value = tl.load(start + row.to(tl.int64)[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = _scale_of(tl.max(_magnitude_bits(value)), min_amax, LARGEST, POWER_OF_TWO)
    inverse = tl.div_rn(1.0, scale)
    row_blocks, col_blocks = tl.cdiv(num_rows, BLOCK), tl.cdiv(num_cols, BLOCK)
    first_scale = matrix * row_blocks * col_blocks
    tl.store(scales + first_scale + row_block * col_blocks + col_block, scale)
    if TRANSPOSE:
        tl.store(scales_t + first_scale + col_block * row_blocks + row_block, scale)
    # The rows again, a few at a time, from the L1 cache: in registers they and their transpose would take all of them.
    for part in tl.static_range(BLOCK // CHUNK):
        chunk = row_block * BLOCK + part * CHUNK + tl.arange(0, CHUNK)
        chunk64, fits = chunk.to(tl.int64), chunk < num_rows
        mask = fits[:, None] & col_fits[None, :]
        value = tl.load(start + chunk64[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        code = (value * inverse).to(tl.float8e4nv)
        tl.store(codes + matrix * num_rows * num_cols + chunk64[:, None] * num_cols + col[None, :], code, mask=mask)
        if TRANSPOSE:
            first = codes_t + matrix * num_rows * num_cols + col.to(tl.int64)[:, None] * num_rows
            tl.store(first + chunk[None, :], tl.trans(code), mask=col_fits[:, None] & fits[None, :])


@triton.jit
def _swiglu_rowwise_kernel(
    pre,
    row_weights,
    codes,
    scales,
    num_rows,
    num_cols,
    pre_stride,
    scale_row_stride,
    scale_group_stride,
    min_amax,
    clamp,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    LARGEST: tl.constexpr,
    CLAMP: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    col = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    row64 = row.to(tl.int64)
    mask = (row < num_rows)[:, None, None] & (col < num_cols)[None, :, :]
    start = pre + row64[:, None, None] * pre_stride + col[None, :, :]
    gate = tl.load(start, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(start + num_cols, mask=mask, other=0.0).to(tl.float32)
    if CLAMP:
        # Comparisons, not minimum and maximum: NaN must pass.
        gate = tl.where(gate > clamp, clamp, gate)
        up = tl.where(up > clamp, clamp, tl.where(up < -clamp, -clamp, up))
    weight = tl.load(row_weights + row, mask=row < num_rows, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up * weight[:, None, None]
    scale = _scale_of(tl.max(_magnitude_bits(value), axis=2), min_amax, LARGEST, False)
    code = (value * tl.div_rn(1.0, scale)[:, :, None]).to(tl.float8e4nv)
    tl.store(codes + row64[:, None, None] * num_cols + col[None, :, :], code, mask=mask)
    scale_mask = (row < num_rows)[:, None] & (group * GROUP < num_cols)[None, :]
    offset = row64[:, None] * scale_row_stride + group.to(tl.int64)[None, :] * scale_group_stride
    tl.store(scales + offset, scale, mask=scale_mask)


def _row_tile(num_rows: int, group: int) -> tuple[int, int]:
    """(rows, groups) of a program: 2048 elements, less for few rows so that all multiprocessors have work."""
    groups = 512 // group
    return (4 if num_rows > 512 else 1), groups


def rowwise(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    group: int,
    largest: float,
    power_of_two: bool,
    min_amax: float,
) -> None:
    """Casts ``x [M, N]`` (stride 1 along N) into ``codes [M, N]`` and ``scales [M, ceil(N / group)]`` (any strides)."""
    num_rows, num_cols = x.shape
    rows, groups = _row_tile(num_rows, group)
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_cols, groups * group))
    if not all(grid):
        return
    with torch.cuda.device(x.device):
        _rowwise_kernel[grid](
            x,
            codes,
            scales,
            num_rows,
            num_cols,
            x.stride(0),
            codes.stride(0),
            scales.stride(0),
            scales.stride(1),
            min_amax,
            GROUP=group,
            ROWS=rows,
            GROUPS=groups,
            LARGEST=largest,
            POWER_OF_TWO=power_of_two,
            num_warps=4,
        )


def blockwise(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    transposed: tuple[torch.Tensor, torch.Tensor] | None,
    block: int,
    largest: float,
    power_of_two: bool,
    min_amax: float,
) -> None:
    """Casts ``x [e, M, N]`` (stride 1 along N) in square blocks; ``transposed``: codes ``[e, N, M]``, their scales."""
    matrices, num_rows, num_cols = x.shape
    grid = (triton.cdiv(num_cols, block), triton.cdiv(num_rows, block), matrices)
    if not all(grid):
        return
    codes_t, scales_t = transposed if transposed is not None else (codes, scales)
    with torch.cuda.device(x.device):
        _blockwise_kernel[grid](
            x,
            codes,
            scales,
            codes_t,
            scales_t,
            num_rows,
            num_cols,
            x.stride(0),
            x.stride(1),
            min_amax,
            BLOCK=block,
            CHUNK=BLOCKWISE_CHUNK,
            LARGEST=largest,
            POWER_OF_TWO=power_of_two,
            TRANSPOSE=transposed is not None,
            num_warps=8,
        )


def swiglu_rowwise(
    pre: torch.Tensor,
    row_weights: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    group: int,
    largest: float,
    min_amax: float,
    clamp: float | None,
) -> None:
    """Casts silu(gate) * up * weight of ``pre [P, 2I]`` (rows contiguous) into ``codes [P, I]`` and ``scales``."""
    num_rows, num_cols = codes.shape
    rows, groups = _row_tile(num_rows, group)
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_cols, groups * group))
    if not all(grid):
        return
    with torch.cuda.device(pre.device):
        _swiglu_rowwise_kernel[grid](
            pre,
            row_weights,
            codes,
            scales,
            num_rows,
            num_cols,
            pre.stride(0),
            scales.stride(0),
            scales.stride(1),
            min_amax,
            0.0 if clamp is None else clamp,
            GROUP=group,
            ROWS=rows,
            GROUPS=groups,
            LARGEST=largest,
            CLAMP=clamp is not None,
            num_warps=4,
        )
