"""K-grouped GEMMs, the weight gradients of experts: each expert's rows of ``a`` and ``b``, summed over the rows.

Checked once, then computed by Hopper's kernels, on other devices by the reference. Ends of rows stay on the device;
nothing here waits for it, except the reference. Rows past an expert's end never count, whatever they hold. No atomics
whose order matters: the same bits on every run. Results carry no gradients.
"""

from __future__ import annotations

import torch

from megamoe.kernels import gemm_k_ops, gemm_ops
from megamoe.kernels.gemm_checks import (
    check_addend,
    check_k_bf16_operands,
    check_k_fp8_operands,
    check_k_groups,
    check_out_dtype,
    checked_result,
)
from megamoe.kernels.recent_calls import Call
from megamoe.kernels.row_groups import RowGroups
from megamoe.kernels.tiles import Tile
from megamoe.types import Fp8Tensor


def k_grouped_bf16_gemm_tn(
    a: torch.Tensor,
    b: torch.Tensor,
    rows: RowGroups,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    c: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """``[e, M, N]``: of expert j ``a[rows of j]^T @ b[rows of j] (+ c[j])``, summed in fp32.

    Args:
        a, b: bfloat16 ``[P, M]`` and ``[P, N]``, contiguous, M and N multiples of 8.
        rows: ``RowGroups.psum``, the rows of each expert. Any others may hold anything.
        out: result, float32 or bfloat16. Zeros for an expert without rows.
        out_dtype: float32 or bfloat16, if ``out`` is None.
        c: added; like ``out``. Pass ``out`` itself to accumulate in place: experts without rows stay as they are. A
            bfloat16 sum is rounded before it is added.
        tile: instead of the chosen one; see ``tiles.legal_k_tiles``.

    Raises:
        MegaMoEError: an argument of another shape, dtype, layout or device.
    """
    call = _call("k bf16", (a, b, rows, c), out, (out_dtype, tile))
    if call.launch():
        return call.out
    check_k_groups(rows)
    check_k_bf16_operands(a, b, rows)
    return _k_gemm(call, a, None, b, None, rows, out_dtype, c, tile)


def k_grouped_fp8_gemm_tn(
    a: Fp8Tensor,
    b: Fp8Tensor,
    rows: RowGroups,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    c: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """As ``k_grouped_bf16_gemm_tn``; each product over 128 rows is scaled by both sides and added in fp32.

    Args:
        a, b: e4m3 ``[P, M]`` and ``[P, N]``; P a multiple of 16, M and N of 8. ``a`` in 128x1 blocks, as
            ``quantize_columnwise`` makes them, ``b`` too or in 128x128 blocks, as ``quantize_blockwise`` does: coarser
            and faster. The kernel reads codes that are dense along the rows, ``codes.t()`` contiguous; others are
            transposed first.

    Raises:
        MegaMoEError: an argument of another shape, dtype, layout or device.
    """
    call = _call("k fp8", (a, b, rows, c), out, (out_dtype, tile))
    if call.launch():
        return call.out
    check_k_groups(rows)
    check_k_fp8_operands(a, b, rows)
    return _k_gemm(call, a.codes, a.scales, b.codes, b.scales, rows, out_dtype, c, tile)


def _call(name: str, tensors: tuple, out: torch.Tensor | None, options: tuple) -> Call:
    return Call(tensors, (name, gemm_ops.num_sms_limit(), *options), out)


def _k_gemm(
    call: Call,
    a: torch.Tensor,
    a_scales: torch.Tensor | None,
    b: torch.Tensor,
    b_scales: torch.Tensor | None,
    rows: RowGroups,
    out_dtype: torch.dtype,
    c: torch.Tensor | None,
    tile: Tile | None,
) -> torch.Tensor:
    dtype = out_dtype if call.out is None else call.out.dtype
    check_out_dtype(dtype)
    shape = (rows.index.numel(), a.shape[1], b.shape[1])
    out = checked_result(call.out, shape, dtype, a.device)
    check_addend(c, None, out)
    call.remember(gemm_k_ops.execute(a, a_scales, b, b_scales, rows, out, c, tile), out)
    return out
