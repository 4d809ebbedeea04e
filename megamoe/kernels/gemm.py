"""Dense and grouped GEMMs: checked once, then computed by Hopper's kernels, on other devices by the reference.

``nt``: weights ``[e, N, K]`` as ``torch.nn.Linear`` stores them; ``nn``: ``[e, K, N]``. FP8: e4m3 with one fp32 scale
per 1x128 of activations and per 128x128 of weights, each block's sum scaled and added in fp32. Row counts stay on the
device; nothing here waits for it, except the reference. Results carry no gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from megamoe.errors import check_tensor, fail_value
from megamoe.kernels import gemm_ops
from megamoe.kernels.gemm_checks import (
    check_addend,
    check_bf16_operands,
    check_bias,
    check_fp8,
    check_fp8_operands,
    check_groups,
    check_out_dtype,
    checked_result,
)
from megamoe.kernels.gemm_ops import get_num_sms, set_num_sms  # noqa: F401
from megamoe.kernels.recent_calls import Call
from megamoe.kernels.row_groups import RowGroups
from megamoe.kernels.tiles import Tile
from megamoe.types import Fp8Tensor

# ---------------------------------------------------------------- one path for all


def _call(name: str, tensors: tuple, out: torch.Tensor | None, options: tuple) -> Call:
    return Call(tensors, (name, gemm_ops.num_sms_limit(), *options), out)


def _gemm(
    call: Call,
    a: torch.Tensor,
    a_scales: torch.Tensor | None,
    b: torch.Tensor,
    b_scales: torch.Tensor | None,
    rows: RowGroups | None,
    out: torch.Tensor,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
    tile: Tile | None,
    transposed_b: bool = False,
) -> torch.Tensor:
    check_addend(c, bias, out)
    if a_scales is not None and rows is not None and c is not None and c is not out:
        # The kernel adds to what is there; copying c first would change rows of no expert.
        fail_value("c", "another tensor than out", "must be out", "Copy it into out and pass c=out.")
    call.remember(gemm_ops.execute(a, a_scales, b, b_scales, rows, out, None, c, bias, None, tile, transposed_b), out)
    return out


# ---------------------------------------------------------------- public: FP8


def fp8_gemm_nt(
    a: Fp8Tensor,
    b: Fp8Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """``[M, N]``: ``a @ b^T (+ c)``; ``a [M, K]`` in 1x128 blocks, ``b [N, K]`` in 128x128 blocks.

    As ``grouped_fp8_gemm_nt`` with one expert and no layout; ``bias [1, N]``.
    """
    call = _call("fp8", (a, b, c, bias), out, (out_dtype, tile))
    if call.launch():
        return call.out
    check_fp8("b", b, 2, (128, 128))
    b = Fp8Tensor(b.codes[None], b.scales[None], b.block)
    return _fp8(call, a, b, None, out_dtype, c, bias, tile)


def grouped_fp8_gemm_nt(
    a: Fp8Tensor,
    b: Fp8Tensor,
    rows: RowGroups,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Row p of expert j is ``a[p] @ b[j]^T (+ c[p]) (+ bias[j])``.

    Args:
        a: e4m3 ``[P, K]``, masked ``[e, M_max, K]``, in 1x128 blocks with MN-major scales. K a multiple of 16.
        b: e4m3 ``[e, N, K]`` in 128x128 blocks. N a multiple of 8.
        rows: each row's expert.
        out: result, ``[P, N]`` or ``[e, M_max, N]``; rows of no expert are left as they are.
        out_dtype: bfloat16 or float32, if ``out`` is None.
        c: float32 results only: added, and ``out`` itself; rows of no expert stay as they are.
        bias: bfloat16 or float32 ``[e, N]``.
        tile: instead of the chosen one; see ``tiles.legal_tiles``.

    Raises:
        MegaMoEError: an argument of another shape, dtype, layout or device.
    """
    call = _call("grouped fp8", (a, b, rows, c, bias), out, (out_dtype, tile))
    if call.launch():
        return call.out
    check_groups(rows)
    return _fp8(call, a, b, rows, out_dtype, c, bias, tile)


def _fp8(call, a, b, rows, out_dtype, c, bias, tile) -> torch.Tensor:
    out = call.out
    check_fp8_operands(a, b, rows)
    dtype = out_dtype if out is None else out.dtype
    check_out_dtype(dtype)
    if c is not None and dtype != torch.float32:
        fail_value("out_dtype", dtype, "must be torch.float32 with c", "Pass out_dtype=torch.float32.")
    n = b.codes.shape[1]
    out = checked_result(out, (*a.codes.shape[:-1], n), dtype, a.codes.device)
    check_bias(bias, b.codes, n)
    return _gemm(call, a.codes, a.scales, b.codes, b.scales, rows, out, c, bias, tile)


# ---------------------------------------------------------------- public: BF16


def _bf16(call, a, b, rows, out_dtype, c, bias, tile, transposed_b) -> torch.Tensor:
    out = call.out
    check_bf16_operands(a, b, rows, transposed_b)
    n = b.shape[2] if transposed_b else b.shape[1]
    dtype = out_dtype if out is None else out.dtype
    check_out_dtype(dtype)
    out = checked_result(out, (*a.shape[:-1], n), dtype, a.device)
    check_bias(bias, b, n)
    return _gemm(call, a, None, b, None, rows, out, c, bias, tile, transposed_b)


def _one_expert(b: Any) -> torch.Tensor:
    check_tensor("b", b, (None, None))
    return b[None]


def bf16_gemm_nt(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """``[M, N]``: ``a @ b^T (+ c)``; bfloat16 ``a [M, K]``, ``b [N, K]``; see ``grouped_bf16_gemm_nt``."""
    call = _call("bf16 nt", (a, b, c, bias), out, (out_dtype, tile))
    if call.launch():
        return call.out
    return _bf16(call, a, _one_expert(b), None, out_dtype, c, bias, tile, False)


def bf16_gemm_nn(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """``[M, N]``: ``a @ b (+ c)``; bfloat16 ``a [M, K]``, ``b [K, N]``; see ``grouped_bf16_gemm_nt``."""
    call = _call("bf16 nn", (a, b, c, bias), out, (out_dtype, tile))
    if call.launch():
        return call.out
    return _bf16(call, a, _one_expert(b), None, out_dtype, c, bias, tile, True)


def grouped_bf16_gemm_nt(
    a: torch.Tensor,
    b: torch.Tensor,
    rows: RowGroups,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Row p of expert j is ``a[p] @ b[j]^T (+ c[p]) (+ bias[j])``, summed in fp32.

    Args:
        a: bfloat16 ``[P, K]``, masked ``[e, M_max, K]``. K a multiple of 8.
        b: bfloat16 ``[e, N, K]``. N a multiple of 8.
        c: added; like ``out`` in shape and dtype, and it may be ``out``.
        rows, out, out_dtype, bias, tile: as in ``grouped_fp8_gemm_nt``.

    Raises:
        MegaMoEError: an argument of another shape, dtype, layout or device.
    """
    call = _call("grouped bf16 nt", (a, b, rows, c, bias), out, (out_dtype, tile))
    if call.launch():
        return call.out
    check_groups(rows)
    return _bf16(call, a, b, rows, out_dtype, c, bias, tile, False)


def grouped_bf16_gemm_nn(
    a: torch.Tensor,
    b: torch.Tensor,
    rows: RowGroups,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Row p of expert j is ``a[p] @ b[j] (+ c[p]) (+ bias[j])``; ``b [e, K, N]``. Else as ``grouped_bf16_gemm_nt``."""
    call = _call("grouped bf16 nn", (a, b, rows, c, bias), out, (out_dtype, tile))
    if call.launch():
        return call.out
    check_groups(rows)
    return _bf16(call, a, b, rows, out_dtype, c, bias, tile, True)
