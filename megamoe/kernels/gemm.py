"""Dense and grouped GEMMs: checked once, then Hopper's kernels, torch's grouped GEMM or the reference, by device.

``nt``: weights ``[e, N, K]`` as ``torch.nn.Linear`` stores them; ``nn``: ``[e, K, N]``. FP8: e4m3 with one fp32 scale
per 1x128 of activations and per 128x128 of weights, each block's sum scaled and added in fp32. Row counts stay on the
device; nothing here waits for it, except the reference.
"""

from __future__ import annotations

from typing import Any

import torch

from megamoe.errors import check_tensor, fail_value
from megamoe.kernels import gemm_ops
from megamoe.kernels.gemm_ops import get_num_sms, set_num_sms  # noqa: F401
from megamoe.kernels.layout import ALIGN
from megamoe.kernels.recent_calls import Call
from megamoe.kernels.row_groups import RowGroups
from megamoe.kernels.scales import is_mn_major
from megamoe.kernels.tiles import Tile
from megamoe.types import Fp8Tensor

OUT_DTYPES = (torch.bfloat16, torch.float32)
FP8_CODES = torch.float8_e4m3fn

# ---------------------------------------------------------------- checks


def _misaligned(tensor: torch.Tensor) -> bool:
    # Traced tensors have no address.
    return not torch.compiler.is_compiling() and tensor.data_ptr() % 16 != 0


def _check_rows_16_bytes(argument: str, tensor: torch.Tensor) -> None:
    """Rows of a TMA operand: contiguous, starting at multiples of 16 bytes."""
    if not tensor.is_contiguous() or _misaligned(tensor):
        fail_value(
            f"{argument}.stride()",
            tuple(tensor.stride()),
            "must be contiguous and start at a multiple of 16 bytes",
            "Call .contiguous() first.",
        )


def _check_sizes(n: int, k: int, element_size: int) -> None:
    if n % 8:
        fail_value("N", n, "must be a multiple of 8", "Pad the weights with zero columns of the result.")
    if k * element_size % 16:
        fail_value("K", k, f"must be a multiple of {16 // element_size}", "Pad both operands with zeros along K.")


def check_fp8(argument: str, x: Any, dims: int, block: tuple[int, int]) -> None:
    if not isinstance(x, Fp8Tensor):
        fail_value(argument, type(x).__name__, "must be an Fp8Tensor", "Cast it with megamoe.kernels.quant.")
    check_tensor(f"{argument}.codes", x.codes, (None,) * dims, (FP8_CODES,))
    if x.block != block:
        fail_value(f"{argument}.block", x.block, f"must be {block}", "Cast it with blocks of this size.")
    *groups, rows, columns = x.codes.shape
    shape = (*groups, -(-rows // block[0]), -(-columns // block[1]))
    check_tensor(f"{argument}.scales", x.scales, shape, (torch.float32,), x.codes.device)


def check_mn_major(argument: str, scales: torch.Tensor) -> None:
    if not is_mn_major(scales) or _misaligned(scales):
        fail_value(
            f"{argument}.scales.stride()",
            tuple(scales.stride()),
            "must be MN-major: stride 1 along the rows, a multiple of 16 bytes along K",
            "Cast with quantize_rowwise(mn_major=True), or convert with megamoe.kernels.scales.to_mn_major.",
        )


def check_contiguous(argument: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        fail_value(f"{argument}.stride()", tuple(tensor.stride()), "must be contiguous", "Call .contiguous() first.")


def check_groups(rows: Any) -> None:
    if not isinstance(rows, RowGroups):
        fail_value("rows", type(rows).__name__, "must be a RowGroups", "Make it with RowGroups.psum, for example.")


def _check_rows(rows: RowGroups | None, a: torch.Tensor, b: torch.Tensor) -> None:
    """``a [P, K]`` or, if masked, ``[e, M_max, K]``; ``rows`` fits both operands."""
    experts = b.shape[0]
    if rows is None:
        return
    size = a.shape[0] if rows.kind == "contiguous" else experts
    check_tensor("rows.index", rows.index, (size,), (torch.int32,), a.device)
    if rows.kind == "masked" and a.shape[0] != experts:
        fail_value("a.shape", list(a.shape), f"must have {experts} experts as b has", "Slice a or b.")
    if rows.kind == "contiguous" and a.shape[0] % ALIGN:
        fail_value("a.shape[0]", a.shape[0], f"must be a multiple of {ALIGN}", "Pad the last group with rows of id -1.")


def result(out: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    check_tensor("out", out, shape, (dtype,), device)
    _check_rows_16_bytes("out", out)
    return out


def check_bias(bias: torch.Tensor | None, b: torch.Tensor, n: int) -> None:
    if bias is not None:
        check_tensor("bias", bias, (b.shape[0], n), (torch.float32, torch.bfloat16), b.device)
        check_contiguous("bias", bias)


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
    if c is not None:
        check_tensor("c", c, tuple(out.shape), (out.dtype,), out.device)
        check_contiguous("c", c)
        if bias is not None:
            fail_value("bias", "a tensor", "must be None together with c", "Add it to c.")
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
        c: float32, added; like ``out``, which it may be; else rows of no expert may become ``c``'s. With bfloat16
            results: not taken.
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


def _is_masked(rows: RowGroups | None) -> bool:
    return rows is not None and rows.kind == "masked"


def check_fp8_operands(a: Fp8Tensor, b: Fp8Tensor, rows: RowGroups | None) -> None:
    """Both operands of an FP8 product and how they fit each other and ``rows``."""
    check_fp8("a", a, 3 if _is_masked(rows) else 2, (1, 128))
    check_fp8("b", b, 3, (128, 128))
    _, n, k = b.codes.shape
    check_tensor("a.codes", a.codes, (*a.codes.shape[:-1], k), None, b.codes.device)
    _check_sizes(n, k, 1)
    _check_rows(rows, a.codes, b.codes)
    _check_rows_16_bytes("a.codes", a.codes)
    _check_rows_16_bytes("b.codes", b.codes)
    check_mn_major("a", a.scales)
    check_contiguous("b.scales", b.scales)


def _fp8(call, a, b, rows, out_dtype, c, bias, tile) -> torch.Tensor:
    out = call.out
    check_fp8_operands(a, b, rows)
    dtype = out_dtype if out is None else out.dtype
    if dtype not in OUT_DTYPES:
        fail_value("out_dtype", dtype, "must be torch.bfloat16 or torch.float32", "Pass one of these.")
    if c is not None and dtype != torch.float32:
        fail_value("out_dtype", dtype, "must be torch.float32 with c", "Pass out_dtype=torch.float32.")
    n = b.codes.shape[1]
    out = result(out, (*a.codes.shape[:-1], n), dtype, a.codes.device)
    check_bias(bias, b.codes, n)
    return _gemm(call, a.codes, a.scales, b.codes, b.scales, rows, out, c, bias, tile)


# ---------------------------------------------------------------- public: BF16


def check_bf16_operands(a: torch.Tensor, b: torch.Tensor, rows: RowGroups | None, transposed_b: bool) -> None:
    """Both operands of a BF16 product and how they fit each other and ``rows``."""
    check_tensor("a", a, (None,) * (3 if _is_masked(rows) else 2), (torch.bfloat16,))
    check_tensor("b", b, (None,) * 3, (torch.bfloat16,), a.device)
    n, k = (b.shape[2], b.shape[1]) if transposed_b else (b.shape[1], b.shape[2])
    check_tensor("a", a, (*a.shape[:-1], k))
    _check_sizes(n, k, 2)
    _check_rows(rows, a, b)
    _check_rows_16_bytes("a", a)
    _check_rows_16_bytes("b", b)


def _bf16(call, a, b, rows, out_dtype, c, bias, tile, transposed_b) -> torch.Tensor:
    out = call.out
    check_bf16_operands(a, b, rows, transposed_b)
    n = b.shape[2] if transposed_b else b.shape[1]
    dtype = out_dtype if out is None else out.dtype
    if dtype not in OUT_DTYPES:
        fail_value("out_dtype", dtype, "must be torch.bfloat16 or torch.float32", "Pass one of these.")
    out = result(out, (*a.shape[:-1], n), dtype, a.device)
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
