"""Casts to FP8, MXFP8 and FP4 with block scales, and back (public).

Codes are rounded to nearest even and saturate. A scale is max(amax, 1e-10) / 448 (FP8) or / 6 (FP4) of its block;
powers of two are rounded up, and exact powers of two stay. A short last block counts as padded with zeros. A block with
NaN or Inf decodes to NaN throughout, and no other block does.
"""

from __future__ import annotations

from typing import Any

import torch

from megamoe.errors import FLOATING, fail_type, fail_value
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


def _cast_fp8(x: torch.Tensor, block: tuple[int, int], power_of_two: bool, min_amax: float) -> Fp8Tensor:
    _check_matrix("x", x)
    values, scales = quantize_blocks(x, block, FP8_MAX, power_of_two, min_amax)
    return Fp8Tensor(values.contiguous().to(torch.float8_e4m3fn), scales, block)


def quantize_rowwise(
    x: torch.Tensor, group: int = BLOCK, *, power_of_two: bool = False, min_amax: float = MIN_AMAX
) -> Fp8Tensor:
    """e4m3 with one fp32 scale per row and ``group`` columns: activations.

    Args:
        x: floating ``[..., M, N]``.
        group: 128 or 32.
        power_of_two: round scales up to powers of two.
        min_amax: lower bound of the amax that scales are made from.

    Returns:
        codes ``[..., M, N]``, scales ``[..., M, ceil(N / group)]``, block (1, group).

    Raises:
        MegaMoEError: not a floating matrix, or another group.
    """
    if group not in (BLOCK, MX_GROUP):
        fail_value("group", group, f"must be {BLOCK} or {MX_GROUP}", "These are the groups that GEMMs take.")
    return _cast_fp8(x, (1, group), power_of_two, min_amax)


def quantize_columnwise(
    x: torch.Tensor, *, power_of_two: bool = False, min_amax: float = MIN_AMAX, group: int = BLOCK
) -> Fp8Tensor:
    """e4m3 with one fp32 scale per column and ``group`` rows: operands of weight gradients, which sum over rows.

    Returns:
        codes ``[..., M, N]``, scales ``[..., ceil(M / group), N]``, block (group, 1).

    Raises:
        MegaMoEError: not a floating matrix, or another group than 128 or 32.
    """
    if group not in (BLOCK, MX_GROUP):
        fail_value("group", group, f"must be {BLOCK} or {MX_GROUP}", "These are the groups that GEMMs take.")
    return _cast_fp8(x, (group, 1), power_of_two, min_amax)


def quantize_blockwise(x: torch.Tensor, *, power_of_two: bool = False, min_amax: float = MIN_AMAX) -> Fp8Tensor:
    """e4m3 with one fp32 scale per 128x128 block: weights.

    Returns:
        codes ``[..., M, N]``, scales ``[..., ceil(M / 128), ceil(N / 128)]``, block (128, 128). ``transpose_fp8`` gives
        the transposed weight with the same codes, which a cast of the transposed weight would give too.

    Raises:
        MegaMoEError: not a floating matrix.
    """
    return _cast_fp8(x, (BLOCK, BLOCK), power_of_two, min_amax)


def transpose_fp8(x: Fp8Tensor) -> Fp8Tensor:
    """The transposed matrix: same codes, transposed blocks, contiguous."""
    codes = x.codes.transpose(-1, -2).contiguous()
    return Fp8Tensor(codes, x.scales.transpose(-1, -2).contiguous(), (x.block[1], x.block[0]))


def quantize_mxfp8(x: torch.Tensor) -> Fp8Tensor:
    """MXFP8: e4m3 with one UE8M0 scale (uint8) per row and 32 columns.

    Raises:
        MegaMoEError: not a floating matrix.
    """
    cast = _cast_fp8(x, (1, MX_GROUP), True, MIN_AMAX)
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
