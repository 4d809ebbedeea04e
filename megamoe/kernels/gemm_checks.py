"""What the GEMMs accept: checked once, at the public functions. All raise ``MegaMoEError``s that name the argument."""

from __future__ import annotations

from typing import Any

import torch

from megamoe.errors import check_tensor, fail_type, fail_value
from megamoe.kernels.layout import ALIGN
from megamoe.kernels.row_groups import RowGroups
from megamoe.kernels.scales import is_mn_major
from megamoe.types import Fp8Tensor

OUT_DTYPES = (torch.bfloat16, torch.float32)
FP8_CODES = torch.float8_e4m3fn


def _check_aligned(argument: str, tensor: torch.Tensor) -> None:
    # Traced tensors have no address.
    if not torch.compiler.is_compiling() and tensor.data_ptr() % 16:
        fail_value(
            f"{argument}.data_ptr() % 16", tensor.data_ptr() % 16, "must be 0 for TMA", "Copy it to a new tensor."
        )


def _check_rows_16_bytes(argument: str, tensor: torch.Tensor) -> None:
    """Rows of a TMA operand: contiguous, starting at multiples of 16 bytes."""
    check_contiguous(argument, tensor)
    _check_aligned(argument, tensor)


def _check_sizes(n: int, k: int, element_size: int) -> None:
    if n % 8:
        fail_value("N", n, "must be a multiple of 8", "Pad the weights with zero columns of the result.")
    if k * element_size % 16:
        fail_value("K", k, f"must be a multiple of {16 // element_size}", "Pad both operands with zeros along K.")


def check_fp8(argument: str, x: Any, dims: int, *blocks: tuple[int, int]) -> None:
    """``x`` is an e4m3 ``Fp8Tensor`` of ``dims`` dimensions in one of ``blocks``, with the fp32 scales they need."""
    if not isinstance(x, Fp8Tensor):
        fail_type(argument, type(x).__name__, "must be an Fp8Tensor", "Cast it with megamoe.kernels.quant.")
    check_tensor(f"{argument}.codes", x.codes, (None,) * dims, (FP8_CODES,))
    if x.block not in blocks:
        rule = " or ".join(map(str, blocks))
        fail_value(f"{argument}.block", x.block, f"must be {rule}", "Cast it with blocks of this size.")
    *groups, rows, columns = x.codes.shape
    shape = (*groups, -(-rows // x.block[0]), -(-columns // x.block[1]))
    check_tensor(f"{argument}.scales", x.scales, shape, (torch.float32,), x.codes.device)


def check_mn_major(argument: str, scales: torch.Tensor) -> None:
    """``scales`` are MN-major and aligned as TMA reads them."""
    if not is_mn_major(scales):
        fail_value(
            f"{argument}.scales.stride()",
            tuple(scales.stride()),
            "must be MN-major: stride 1 along the rows, a multiple of 16 bytes along K",
            "Cast with quantize_rowwise(mn_major=True), or convert with megamoe.kernels.scales.to_mn_major.",
        )
    _check_aligned(f"{argument}.scales", scales)


def check_contiguous(argument: str, tensor: torch.Tensor) -> None:
    """``tensor`` is contiguous."""
    if not tensor.is_contiguous():
        fail_value(f"{argument}.stride()", tuple(tensor.stride()), "must be contiguous", "Call .contiguous() first.")


def check_groups(rows: Any) -> None:
    """``rows`` is a ``RowGroups``."""
    if not isinstance(rows, RowGroups):
        fail_type("rows", type(rows).__name__, "must be a RowGroups", "Make it with RowGroups.psum, for example.")


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


def checked_result(
    out: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, argument: str = "out"
) -> torch.Tensor:
    """``out`` after its checks, or a new tensor of this shape and dtype where it is None."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    check_tensor(argument, out, shape, (dtype,), device)
    _check_rows_16_bytes(argument, out)
    return out


def check_bias(bias: torch.Tensor | None, b: torch.Tensor, n: int) -> None:
    """``bias`` is None or a contiguous fp32 or bf16 ``[e, n]`` on the device of the weights ``b``."""
    if bias is not None:
        check_tensor("bias", bias, (b.shape[0], n), (torch.float32, torch.bfloat16), b.device)
        check_contiguous("bias", bias)


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


def check_k_groups(rows: Any) -> None:
    """``rows`` tells where each expert's rows end."""
    check_groups(rows)
    if rows.kind != "psum":
        fail_value("rows.kind", rows.kind, "must be 'psum' to sum over the rows", "Make it with RowGroups.psum.")


def _check_columns(argument: str, tensor: torch.Tensor) -> None:
    if tensor.shape[1] % 8:
        fail_value(
            f"{argument}.shape[1]",
            tensor.shape[1],
            "must be a multiple of 8",
            "Pad it with zero columns: they give zeros.",
        )


def check_k_bf16_operands(a: torch.Tensor, b: torch.Tensor, rows: RowGroups) -> None:
    """``a [P, M]`` and ``b [P, N]`` of a BF16 product summed over the rows."""
    check_tensor("a", a, (None, None), (torch.bfloat16,))
    check_tensor("b", b, (a.shape[0], None), (torch.bfloat16,), a.device)
    check_tensor("rows.index", rows.index, (None,), (torch.int32,), a.device)
    for argument, tensor in (("a", a), ("b", b)):
        _check_columns(argument, tensor)
        _check_rows_16_bytes(argument, tensor)


def check_k_fp8_operands(a: Fp8Tensor, b: Fp8Tensor, rows: RowGroups) -> None:
    """``a [P, M]`` and ``b [P, N]`` of an FP8 product summed over the rows, codes dense along either dimension."""
    check_fp8("a", a, 2, (ALIGN, 1))
    check_fp8("b", b, 2, (ALIGN, 1), (ALIGN, ALIGN))
    num_rows = a.codes.shape[0]
    check_tensor("b.codes", b.codes, (num_rows, None), None, a.codes.device)
    check_tensor("rows.index", rows.index, (None,), (torch.int32,), a.codes.device)
    if num_rows % 16:
        fail_value(
            "a.codes.shape[0]", num_rows, "must be a multiple of 16", "Pad both operands with rows of no expert."
        )
    for argument, x in (("a", a), ("b", b)):
        _check_columns(f"{argument}.codes", x.codes)
        if not (x.codes.is_contiguous() or x.codes.t().is_contiguous()):
            strides = tuple(x.codes.stride())
            fail_value(f"{argument}.codes.stride()", strides, "must be dense along rows or columns", "Copy them.")
        _check_aligned(f"{argument}.codes", x.codes)
        check_contiguous(f"{argument}.scales", x.scales)
        if x.block == (ALIGN, 1):
            _check_aligned(f"{argument}.scales", x.scales)


def check_out_dtype(out_dtype: torch.dtype) -> None:
    """Results are bf16 or fp32."""
    if out_dtype not in OUT_DTYPES:
        fail_value("out_dtype", out_dtype, "must be torch.bfloat16 or torch.float32", "Pass one of these.")


def check_addend(c: torch.Tensor | None, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """``c`` is None or like ``out``, and then there is no bias."""
    if c is None:
        return
    check_tensor("c", c, tuple(out.shape), (out.dtype,), out.device)
    check_contiguous("c", c)
    if bias is not None:
        fail_value("bias", "a tensor", "must be None together with c", "Add it to c.")
