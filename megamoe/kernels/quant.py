"""Casts to FP8, MXFP8 and FP4 with block scales, and back (public).

Codes are rounded to nearest even and saturate. A scale is max(amax, 1e-10) / 448 (FP8) or / 6 (FP4) of its block;
powers of two are rounded up, and exact powers of two stay. A short last block counts as padded with zeros. A block with
NaN or Inf decodes to NaN throughout, and no other block does.
"""

from __future__ import annotations

from typing import Any

import torch

from megamoe.errors import FLOATING, check_tensor, fail_type, fail_value
from megamoe.kernels.formats import (
    FP4_MAX,
    FP8_MAX,
    MIN_AMAX,
    decode_e2m1,
    decode_ue8m0,
    encode_e2m1,
    encode_ue8m0,
    multiply_blocks,
    pack_fp4,
    quantize_blocks,
    unpack_fp4,
)
from megamoe.kernels.reference import activate, activate_backward
from megamoe.kernels.scales import empty_mn_major
from megamoe.types import Fp4Tensor, Fp8Tensor

BLOCK = 128
MX_GROUP = 32


def _check_matrix(argument: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor):
        fail_type(argument, type(x).__name__, "must be a torch.Tensor", "Convert it with torch.as_tensor.")
    if x.dtype not in FLOATING:
        fail_type(f"{argument}.dtype", x.dtype, "must be a floating dtype of 16 bits or more", "Cast it first.")
    if x.dim() < 2:
        fail_value(f"{argument}.shape", list(x.shape), "must be [..., M, N]", "Add a dimension.")


def _runs_triton(x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64


def _cast_fp8(x: torch.Tensor, block: tuple[int, int], power_of_two: bool, min_amax: float) -> Fp8Tensor:
    values, scales = quantize_blocks(x, block, FP8_MAX, power_of_two, min_amax)
    return Fp8Tensor(values.contiguous().to(torch.float8_e4m3fn), scales, block)


def _rows_in_columns_order(x: torch.Tensor) -> torch.Tensor:
    """``x [..., M, N]`` as ``[M', N]`` with contiguous columns, without a copy where its strides allow."""
    rows = x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _matrices(x: torch.Tensor) -> torch.Tensor:
    """``x [..., M, N]`` as ``[e, M, N]`` with contiguous columns, without a copy where its strides allow."""
    matrices = x.unsqueeze(0) if x.dim() == 2 else x.flatten(0, -3)
    return matrices if matrices.stride(-1) == 1 else matrices.contiguous()


def _check_group(group: int) -> None:
    if group not in (BLOCK, MX_GROUP):
        fail_value("group", group, f"must be {BLOCK} or {MX_GROUP}", "These are the groups that GEMMs take.")


def _rowwise_result(x_shape: torch.Size, group: int, mn_major: bool, out: Fp8Tensor | None, device) -> Fp8Tensor:
    """Where a row-wise cast goes: ``out``, checked, or new tensors."""
    scale_shape = (*x_shape[:-1], -(-x_shape[-1] // group))
    if out is not None:
        check_tensor("out.codes", out.codes, x_shape, (torch.float8_e4m3fn,), device)
        check_tensor("out.scales", out.scales, scale_shape, (torch.float32,), device)
        if out.block != (1, group) or out.codes.stride(-1) != 1:
            strides = out.codes.stride()
            fail_value("out", (out.block, strides), f"must have block {(1, group)} and columns of stride 1", "Fix it.")
        return out
    codes = torch.empty(x_shape, dtype=torch.float8_e4m3fn, device=device)
    if mn_major:
        return Fp8Tensor(codes, empty_mn_major(torch.Size(scale_shape), torch.float32, device), (1, group))
    return Fp8Tensor(codes, torch.empty(scale_shape, device=device), (1, group))


def quantize_rowwise(
    x: torch.Tensor,
    group: int = BLOCK,
    *,
    power_of_two: bool = False,
    min_amax: float = MIN_AMAX,
    mn_major: bool = False,
    out: Fp8Tensor | None = None,
) -> Fp8Tensor:
    """e4m3 with one fp32 scale per row and ``group`` columns: activations. One pass on a GPU.

    Args:
        x: floating ``[..., M, N]``; ``[M, N]`` with ``mn_major`` or ``out``.
        group: 128 or 32.
        power_of_two: round scales up to powers of two.
        min_amax: lower bound of the amax that scales are made from.
        mn_major: lay the scales out MN-major and TMA-aligned, as GEMMs read them.
        out: write here, into views of any row stride (a communication buffer, say), and return it.

    Returns:
        codes ``[..., M, N]``, scales ``[..., M, ceil(N / group)]``, block (1, group).

    Raises:
        MegaMoEError: not a floating matrix, another group, or ``out`` does not fit.
    """
    _check_matrix("x", x)
    _check_group(group)
    if (mn_major or out is not None) and x.dim() != 2:
        fail_value("x.shape", list(x.shape), "must be [M, N] with mn_major or out", "Cast each matrix on its own.")
    result = _rowwise_result(x.shape, group, mn_major, out, x.device)
    if _runs_triton(x):
        from megamoe.kernels import triton_quant

        flat = result.codes.view(-1, x.shape[-1]), result.scales
        if x.dim() != 2:
            flat = flat[0], result.scales.view(-1, result.scales.shape[-1])
        triton_quant.rowwise(_rows_in_columns_order(x), *flat, group, FP8_MAX, power_of_two, min_amax)
        return result
    cast = _cast_fp8(x, (1, group), power_of_two, min_amax)
    result.codes.copy_(cast.codes)
    result.scales.copy_(cast.scales)
    return result


def swiglu_quantize_rowwise(
    pre: torch.Tensor, row_weights: torch.Tensor, clamp: float | None = None, *, mn_major: bool = False
) -> Fp8Tensor:
    """silu(gate) * up * weight in fp32, cast row-wise in 1x128 blocks: the operand of GEMM 2. One pass on a GPU.

    Args:
        pre: floating ``[P, 2I]``, gate columns, then up columns.
        row_weights: floating ``[P]``, the routing weight of each row.
        clamp: gate to at most this, up to [-clamp, clamp].
        mn_major: as for ``quantize_rowwise``.

    Returns:
        codes ``[P, I]``, scales ``[P, ceil(I / 128)]``, block (1, 128).

    Raises:
        MegaMoEError: wrong shape, dtype or device.
    """
    _check_matrix("pre", pre)
    if pre.dim() != 2 or pre.shape[1] % 2:
        fail_value("pre.shape", list(pre.shape), "must be [P, 2I]", "Pass gate and up columns side by side.")
    check_tensor("row_weights", row_weights, pre.shape[:1], FLOATING, pre.device)
    shape = torch.Size((pre.shape[0], pre.shape[1] // 2))
    result = _rowwise_result(shape, BLOCK, mn_major, None, pre.device)
    if _runs_triton(pre):
        from megamoe.kernels import triton_quant

        rows, weights = _rows_in_columns_order(pre), row_weights.contiguous()
        triton_quant.swiglu_rowwise(rows, weights, result.codes, result.scales, BLOCK, FP8_MAX, MIN_AMAX, clamp)
        return result
    act = activate(pre.float(), "swiglu", clamp) * row_weights.float().unsqueeze(1)
    cast = _cast_fp8(act, (1, BLOCK), False, MIN_AMAX)
    result.codes.copy_(cast.codes)
    result.scales.copy_(cast.scales)
    return result


def swiglu_backward_quantize_rowwise(
    grad: torch.Tensor,
    pre: torch.Tensor,
    row_weights: torch.Tensor,
    clamp: float | None = None,
    *,
    mn_major: bool = False,
) -> tuple[Fp8Tensor, torch.Tensor]:
    """The backward pass of silu(gate) * up * weight in fp32, its result cast row-wise: the operand of dgrad. One pass.

    Args:
        grad: floating ``[P, I]``, gradient of the weighted activation; I a multiple of 128: no block spans both halves.
        pre, row_weights, clamp, mn_major: as for ``swiglu_quantize_rowwise``.

    Returns:
        The gradient of ``pre``, codes ``[P, 2I]`` and scales ``[P, 2I / 128]``, and that of the weights, fp32 ``[P]``.

    Raises:
        MegaMoEError: wrong shape, dtype or device.
    """
    _check_matrix("grad", grad)
    width = grad.shape[-1]
    if grad.dim() != 2 or width % BLOCK:
        fail_value("grad.shape", list(grad.shape), f"must be [P, I] with I a multiple of {BLOCK}", "Pad I with zeros.")
    check_tensor("pre", pre, (grad.shape[0], 2 * width), FLOATING, grad.device)
    check_tensor("row_weights", row_weights, grad.shape[:1], FLOATING, grad.device)
    result = _rowwise_result(pre.shape, BLOCK, mn_major, None, pre.device)
    if _runs_triton(pre) and _runs_triton(grad):
        from megamoe.kernels import triton_quant

        operands = _rows_in_columns_order(grad), _rows_in_columns_order(pre), row_weights.contiguous()
        grad_weights = torch.empty(grad.shape[0], device=grad.device)
        outputs = result.codes, result.scales, grad_weights
        triton_quant.swiglu_backward(*operands, *outputs, BLOCK, FP8_MAX, MIN_AMAX, clamp)
        return result, grad_weights
    weights = row_weights.float().unsqueeze(1)
    act, grad_pre = activate_backward(pre.float(), grad.float() * weights, "swiglu", clamp)
    cast = _cast_fp8(grad_pre, (1, BLOCK), False, MIN_AMAX)
    result.codes.copy_(cast.codes)
    result.scales.copy_(cast.scales)
    return result, (grad.float() * act).sum(dim=1)


def quantize_columnwise(
    x: torch.Tensor, *, power_of_two: bool = False, min_amax: float = MIN_AMAX, group: int = BLOCK
) -> Fp8Tensor:
    """e4m3 with one fp32 scale per column and ``group`` rows: operands of weight gradients, which sum over rows.

    Returns:
        codes ``[..., M, N]``, scales ``[..., ceil(M / group), N]``, block (group, 1).

    Raises:
        MegaMoEError: not a floating matrix, or another group than 128 or 32.
    """
    _check_matrix("x", x)
    _check_group(group)
    if not _runs_triton(x):
        return _cast_fp8(x, (group, 1), power_of_two, min_amax)
    from megamoe.kernels import triton_quant

    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(*x.shape[:-2], -(-x.shape[-2] // group), x.shape[-1], device=x.device)
    triton_quant.columnwise(_matrices(x), codes, scales, group, FP8_MAX, power_of_two, min_amax)
    return Fp8Tensor(codes, scales, (group, 1))


def quantize_blockwise(x: torch.Tensor, *, power_of_two: bool = False, min_amax: float = MIN_AMAX) -> Fp8Tensor:
    """e4m3 with one fp32 scale per 128x128 block: weights. One pass on a GPU.

    Returns:
        codes ``[..., M, N]``, scales ``[..., ceil(M / 128), ceil(N / 128)]``, block (128, 128).

    Raises:
        MegaMoEError: not a floating matrix.
    """
    return _blockwise(x, power_of_two, min_amax, with_transpose=False)[0]


def quantize_blockwise_both(
    x: torch.Tensor, *, power_of_two: bool = False, min_amax: float = MIN_AMAX
) -> tuple[Fp8Tensor, Fp8Tensor]:
    """``quantize_blockwise(x)`` and its transpose (same codes, transposed blocks), for dgrad; one pass on a GPU.

    Raises:
        MegaMoEError: not a floating matrix.
    """
    cast, transposed = _blockwise(x, power_of_two, min_amax, with_transpose=True)
    return cast, transposed


def _blockwise(x: torch.Tensor, power_of_two: bool, min_amax: float, with_transpose: bool) -> tuple[Fp8Tensor, ...]:
    _check_matrix("x", x)
    if not _runs_triton(x):
        cast = _cast_fp8(x, (BLOCK, BLOCK), power_of_two, min_amax)
        return (cast, transpose_fp8(cast)) if with_transpose else (cast,)
    from megamoe.kernels import triton_quant

    shapes = [x.shape, x.mT.shape] if with_transpose else [x.shape]
    results = tuple(
        Fp8Tensor(
            torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device),
            torch.empty(*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK), device=x.device),
            (BLOCK, BLOCK),
        )
        for shape in shapes
    )
    codes, scales = results[0].codes, results[0].scales
    transposed = (results[1].codes, results[1].scales) if with_transpose else None
    triton_quant.blockwise(_matrices(x), codes, scales, transposed, BLOCK, FP8_MAX, power_of_two, min_amax)
    return results


def transpose_fp8(x: Fp8Tensor) -> Fp8Tensor:
    """The transposed matrix: same codes, transposed blocks, contiguous."""
    codes = x.codes.transpose(-1, -2).contiguous()
    return Fp8Tensor(codes, x.scales.transpose(-1, -2).contiguous(), (x.block[1], x.block[0]))


def quantize_mxfp8(x: torch.Tensor) -> Fp8Tensor:
    """MXFP8: e4m3 with one UE8M0 scale (uint8) per row and 32 columns.

    Raises:
        MegaMoEError: not a floating matrix.
    """
    cast = quantize_rowwise(x, MX_GROUP, power_of_two=True)
    return Fp8Tensor(cast.codes, encode_ue8m0(cast.scales), cast.block)


def quantize_fp4(x: torch.Tensor) -> Fp4Tensor:
    """e2m1, two codes per byte, with one UE8M0 scale per row and 32 columns.

    Args:
        x: floating ``[..., M, N]``, N even.

    Raises:
        MegaMoEError: not a floating matrix, or N is odd.
    """
    _check_matrix("x", x)
    if x.shape[-1] % 2:
        fail_value("x.shape", list(x.shape), "must have an even last dimension", "Pad it: two codes share a byte.")
    values, scales = quantize_blocks(x, (1, MX_GROUP), FP4_MAX, power_of_two=True)
    return Fp4Tensor(pack_fp4(encode_e2m1(values)), encode_ue8m0(scales))


def dequantize(x: Fp8Tensor | Fp4Tensor) -> torch.Tensor:
    """fp32 ``[..., M, N]``: code times the scale of its block; exact."""
    if isinstance(x, Fp4Tensor):
        return multiply_blocks(decode_e2m1(unpack_fp4(x.packed)), decode_ue8m0(x.scales), (1, MX_GROUP))
    if not isinstance(x, Fp8Tensor):
        fail_type("x", type(x).__name__, "must be a Fp8Tensor or Fp4Tensor", "Pass the result of a quantize function.")
    scales = decode_ue8m0(x.scales) if x.scales.dtype == torch.uint8 else x.scales
    return multiply_blocks(x.codes, scales, x.block)
