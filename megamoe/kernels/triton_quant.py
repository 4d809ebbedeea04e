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
def scale_of(amax_bits, min_amax, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
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
def magnitude_bits(x):
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
    scale = scale_of(tl.max(magnitude_bits(value), axis=2), min_amax, LARGEST, POWER_OF_TWO)
    code = (value * tl.div_rn(1.0, scale)[:, :, None]).to(tl.float8e4nv)
    tl.store(codes + row64[:, None, None] * codes_stride + col[None, :, :], code, mask=mask)
    scale_mask = (row < num_rows)[:, None] & (group * GROUP < num_cols)[None, :]
    offset = row64[:, None] * scale_row_stride + group.to(tl.int64)[None, :] * scale_group_stride
    tl.store(scales + offset, scale, mask=scale_mask)


@triton.jit(do_not_specialize=["num_rows"])
def _columnwise_kernel(
    x,
    codes,
    scales,
    num_rows,
    num_cols,
    x_matrix_stride,
    x_stride,
    min_amax,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    group, matrix = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = group * GROUP + tl.arange(0, GROUP)
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row64, fits = row.to(tl.int64), col < num_cols
    mask = (row < num_rows)[:, None] & fits[None, :]
    start = x + matrix * x_matrix_stride
    value = tl.load(start + row64[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(magnitude_bits(value), axis=0), min_amax, LARGEST, POWER_OF_TWO)
    code = (value * tl.div_rn(1.0, scale)[None, :]).to(tl.float8e4nv)
    tl.store(codes + matrix * num_rows * num_cols + row64[:, None] * num_cols + col[None, :], code, mask=mask)
    scale_row = matrix * tl.cdiv(num_rows, GROUP) + group
    tl.store(scales + scale_row * num_cols + col, scale, mask=fits)


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
    scale = scale_of(tl.max(magnitude_bits(value)), min_amax, LARGEST, POWER_OF_TWO)
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
    scale = scale_of(tl.max(magnitude_bits(value), axis=2), min_amax, LARGEST, False)
    code = (value * tl.div_rn(1.0, scale)[:, :, None]).to(tl.float8e4nv)
    tl.store(codes + row64[:, None, None] * num_cols + col[None, :, :], code, mask=mask)
    scale_mask = (row < num_rows)[:, None] & (group * GROUP < num_cols)[None, :]
    offset = row64[:, None] * scale_row_stride + group.to(tl.int64)[None, :] * scale_group_stride
    tl.store(scales + offset, scale, mask=scale_mask)


@triton.jit
def _swiglu_backward_kernel(
    grad,
    pre,
    row_weights,
    codes,
    scales,
    grad_weights,
    num_rows,
    num_cols,
    grad_stride,
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
    row64, row_fits = row.to(tl.int64), row < num_rows
    weight = tl.load(row_weights + row, mask=row_fits, other=0.0).to(tl.float32)[:, None, None]
    weight_grad = tl.zeros([ROWS], dtype=tl.float32)
    for first in range(0, tl.cdiv(num_cols, GROUP), GROUPS):
        group = first + tl.arange(0, GROUPS)
        col = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        mask = row_fits[:, None, None] & (col < num_cols)[None, :, :]
        start = pre + row64[:, None, None] * pre_stride + col[None, :, :]
        gate = tl.load(start, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(start + num_cols, mask=mask, other=0.0).to(tl.float32)
        upstream = tl.load(grad + row64[:, None, None] * grad_stride + col[None, :, :], mask=mask, other=0.0)
        upstream = upstream.to(tl.float32)
        gate_clamped, up_clamped = gate, up
        if CLAMP:
            gate_clamped = tl.where(gate > clamp, clamp, gate)
            up_clamped = tl.where(up > clamp, clamp, tl.where(up < -clamp, -clamp, up))
        sigmoid = 1.0 / (1.0 + tl.exp(-gate_clamped))
        silu = gate_clamped * sigmoid
        weight_grad += tl.sum(tl.sum(upstream * silu * up_clamped, axis=2), axis=1)
        upstream *= weight
        gate_grad = upstream * up_clamped * sigmoid * (1.0 + gate_clamped * (1.0 - sigmoid))
        up_grad = upstream * silu
        if CLAMP:
            gate_grad = tl.where(gate > clamp, 0.0, gate_grad)
            up_grad = tl.where((up > clamp) | (up < -clamp), 0.0, up_grad)
        scale_mask = row_fits[:, None] & (group * GROUP < num_cols)[None, :]
        for half in tl.static_range(2):
            value = gate_grad if half == 0 else up_grad
            scale = scale_of(tl.max(magnitude_bits(value), axis=2), min_amax, LARGEST, False)
            code = (value * tl.div_rn(1.0, scale)[:, :, None]).to(tl.float8e4nv)
            column = half * num_cols + col
            tl.store(codes + row64[:, None, None] * 2 * num_cols + column[None, :, :], code, mask=mask)
            index = (half * (num_cols // GROUP) + group).to(tl.int64)
            offset = row64[:, None] * scale_row_stride + index[None, :] * scale_group_stride
            tl.store(scales + offset, scale, mask=scale_mask)
    tl.store(grad_weights + row, weight_grad, mask=row_fits)


@triton.jit(do_not_specialize=["num_words"])
def _pack_fp32_into_ue8m0_kernel(
    scales, packed, first_rows, row_counts, num_words, mn, WORDS: tl.constexpr, COLUMNS: tl.constexpr
):
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    word_fits, col_fits = word < num_words, col < mn
    first = tl.load(first_rows + word, mask=word_fits, other=0)
    count = tl.load(row_counts + word, mask=word_fits, other=0)
    result = tl.zeros([WORDS, COLUMNS], dtype=tl.int32)
    for code in tl.static_range(4):
        mask = (code < count)[:, None] & col_fits[None, :]
        bits = tl.load(scales + (first + code)[:, None] * mn + col[None, :], mask=mask, other=0)
        result |= ((bits >> 23) & 0xFF) << (8 * code)
    mask = word_fits[:, None] & col_fits[None, :]
    tl.store(packed + word.to(tl.int64)[:, None] * mn + col[None, :], result, mask=mask)


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
    # Bytes that move between the threads of a tile that was loaded as fp32 get mixed up: triton 3.6.
    turned = transposed is not None and x.element_size() < 4
    codes_t, scales_t = transposed if turned else (codes, scales)
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
            TRANSPOSE=turned,
            num_warps=8,
        )
    if transposed is not None and not turned:
        transposed[0].view(torch.uint8).copy_(codes.view(torch.uint8).transpose(-2, -1))
        transposed[1].copy_(scales.transpose(-2, -1))


def columnwise(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    group: int,
    largest: float,
    power_of_two: bool,
    min_amax: float,
) -> None:
    """Casts ``x [e, M, N]`` (stride 1 along N) into ``codes [e, M, N]`` and ``scales [e, ceil(M / group), N]``."""
    matrices, num_rows, num_cols = x.shape
    columns = 64
    grid = (triton.cdiv(num_cols, columns), triton.cdiv(num_rows, group), matrices)
    if not all(grid):
        return
    with torch.cuda.device(x.device):
        _columnwise_kernel[grid](
            x,
            codes,
            scales,
            num_rows,
            num_cols,
            x.stride(0),
            x.stride(1),
            min_amax,
            GROUP=group,
            COLUMNS=columns,
            LARGEST=largest,
            POWER_OF_TWO=power_of_two,
            num_warps=4,
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


def swiglu_backward(
    grad: torch.Tensor,
    pre: torch.Tensor,
    row_weights: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    grad_weights: torch.Tensor,
    group: int,
    largest: float,
    min_amax: float,
    clamp: float | None,
) -> None:
    """Casts the gradient of ``pre [P, 2I]`` for ``grad [P, I]`` and writes the weights'; I a multiple of ``group``."""
    num_rows, num_cols = grad.shape
    rows, groups = _row_tile(num_rows, group)
    if not num_rows:
        return
    with torch.cuda.device(pre.device):
        _swiglu_backward_kernel[(triton.cdiv(num_rows, rows),)](
            grad,
            pre,
            row_weights,
            codes,
            scales,
            grad_weights,
            num_rows,
            num_cols,
            grad.stride(0),
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


def pack_ue8m0_rows(
    scales: torch.Tensor, packed: torch.Tensor, first_rows: torch.Tensor, row_counts: torch.Tensor
) -> None:
    """Row w of int32 ``packed [W, mn]``: exponents of ``row_counts[w]`` rows of ``scales`` from ``first_rows[w]``."""
    num_words, mn = packed.shape
    if not packed.numel():
        return
    words, columns = 4, 512
    with torch.cuda.device(scales.device):
        _pack_fp32_into_ue8m0_kernel[(triton.cdiv(num_words, words), triton.cdiv(mn, columns))](
            scales.view(torch.int32),
            packed,
            first_rows,
            row_counts,
            num_words,
            mn,
            WORDS=words,
            COLUMNS=columns,
            num_warps=4,
        )
