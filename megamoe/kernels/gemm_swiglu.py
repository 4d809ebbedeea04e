"""The first GEMM of an expert with its activation: gate and up are never written to memory."""

from __future__ import annotations

import torch

from megamoe.errors import check_choice, check_number, check_tensor, fail_value
from megamoe.kernels import gemm_checks, gemm_ops
from megamoe.kernels.recent_calls import Call
from megamoe.kernels.row_groups import RowGroups
from megamoe.kernels.scales import empty_mn_major
from megamoe.kernels.tiles import Tile
from megamoe.types import Fp8Tensor

ACTIVATIONS = ("swiglu", "swiglu_oai", "geglu", "geglu_tanh")


def _check_options(
    rows: RowGroups | None,
    b: torch.Tensor,
    row_weights: torch.Tensor | None,
    num_rows: int,
    activation: str,
    clamp: float | None,
    bias: torch.Tensor | None,
    pre: torch.Tensor | None,
    multiple: int,
) -> None:
    gemm_checks.check_groups(rows)
    check_choice("activation", activation, ACTIVATIONS)
    if clamp is not None:
        check_number("clamp", clamp, 0, exclusive=True)
    if b.shape[1] % (2 * multiple):
        fail_value(
            "b.shape[1]", b.shape[1], f"must be two times a multiple of {multiple}", "Pad gate and up with zero rows."
        )
    if row_weights is not None:
        check_tensor("row_weights", row_weights, (num_rows,), (torch.float32,), b.device)
        gemm_checks.check_contiguous("row_weights", row_weights)
    gemm_checks.check_bias(bias, b, b.shape[1])
    if pre is not None:
        if rows.kind == "masked":
            fail_value("rows.kind", rows.kind, "must not be 'masked' with pre", "Take RowGroups.psum or contiguous.")
        gemm_checks.checked_result(pre, (num_rows, b.shape[1]), torch.bfloat16, b.device, "pre")


def grouped_fp8_gemm_swiglu_nt(
    a: Fp8Tensor,
    b: Fp8Tensor,
    rows: RowGroups,
    *,
    row_weights: torch.Tensor | None = None,
    activation: str = "swiglu",
    clamp: float | None = None,
    bias: torch.Tensor | None = None,
    quantize: bool = True,
    out: Fp8Tensor | torch.Tensor | None = None,
    pre: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> Fp8Tensor | torch.Tensor:
    """``activation(gate) * up * row_weights``, gate and up being the halves of ``a @ b[expert]^T (+ bias)``.

    Everything after the GEMM is fp32 and rounded once: to bfloat16, or to e4m3 with ``scale = max(amax, 1e-10) / 448``
    per row and 128 columns.

    Args:
        a, rows: as in ``gemm.grouped_fp8_gemm_nt``.
        b: e4m3 ``[e, 2 I, K]``, I gate rows, then I up rows; I a multiple of 128.
        row_weights: float32 ``[P]`` (masked: ``[e * M_max]``), routing weights.
        activation: "swiglu", "swiglu_oai", "geglu" or "geglu_tanh", with ``clamp`` as in ``MoEConfig``.
        bias: bfloat16 or float32 ``[e, 2 I]``.
        quantize: whether the result is FP8.
        out: where the result goes; FP8 scales must be MN-major.
        pre: bfloat16 ``[P, 2 I]``, gets gate and up as ``gemm.grouped_fp8_gemm_nt`` would give them, for a backward
            pass. In blocks of 128 rows with rows of no expert these become undefined. Not for masked rows.
        tile: instead of the chosen one.

    Returns:
        ``[P, I]`` (masked: ``[e, M_max, I]``): an ``Fp8Tensor`` with MN-major scales, or bfloat16.

    Raises:
        MegaMoEError: an argument of another shape, dtype, layout or device.
    """
    options = ("swiglu fp8", gemm_ops.num_sms_limit(), activation, clamp, quantize, tile)
    call = Call((a, b, rows, row_weights, bias, pre), options, out)
    if call.launch():
        return call.out
    out = call.out
    gemm_checks.check_groups(rows)
    gemm_checks.check_fp8_operands(a, b, rows)
    inter = b.codes.shape[1] // 2
    num_rows = a.codes.shape[:-1].numel()
    _check_options(rows, b.codes, row_weights, num_rows, activation, clamp, bias, pre, 128)
    shape = (*a.codes.shape[:-1], inter)
    if not quantize:
        result = gemm_checks.checked_result(out, shape, torch.bfloat16, a.codes.device)
        scales = None
    elif out is None:
        result = torch.empty(shape, dtype=torch.float8_e4m3fn, device=a.codes.device)
        scales = empty_mn_major(torch.Size((*shape[:-1], inter // 128)), torch.float32, a.codes.device)
    else:
        gemm_checks.check_fp8("out", out, len(shape), (1, 128))
        result = gemm_checks.checked_result(out.codes, shape, torch.float8_e4m3fn, a.codes.device)
        gemm_checks.check_mn_major("out", out.scales)
        scales = out.scales
    final = result if scales is None else Fp8Tensor(result, scales, (1, 128))
    if result.numel():
        run = gemm_ops.execute(
            a.codes,
            a.scales,
            b.codes,
            b.scales,
            rows,
            result,
            scales,
            None,
            bias,
            row_weights,
            tile,
            activation=activation,
            clamp=clamp,
            pre=pre,
        )
        call.remember(run, final)
    return final


def grouped_bf16_gemm_swiglu_nt(
    a: torch.Tensor,
    b: torch.Tensor,
    rows: RowGroups,
    *,
    row_weights: torch.Tensor | None = None,
    activation: str = "swiglu",
    clamp: float | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pre: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """As ``grouped_fp8_gemm_swiglu_nt`` in bfloat16: ``a [P, K]``, ``b [e, 2 I, K]``, result; I a multiple of 8."""
    options = ("swiglu bf16", gemm_ops.num_sms_limit(), activation, clamp, tile)
    call = Call((a, b, rows, row_weights, bias, pre), options, out)
    if call.launch():
        return call.out
    out = call.out
    gemm_checks.check_groups(rows)
    gemm_checks.check_bf16_operands(a, b, rows, False)
    inter = b.shape[1] // 2
    _check_options(rows, b, row_weights, a.shape[:-1].numel(), activation, clamp, bias, pre, 8)
    result = gemm_checks.checked_result(out, (*a.shape[:-1], inter), torch.bfloat16, a.device)
    if result.numel():
        run = gemm_ops.execute(
            a,
            None,
            b,
            None,
            rows,
            result,
            None,
            None,
            bias,
            row_weights,
            tile,
            activation=activation,
            clamp=clamp,
            pre=pre,
        )
        call.remember(run, result)
    return result
