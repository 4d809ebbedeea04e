"""Casts between the GEMMs of the FP8 expert MLP: what one tensor needs for both GEMMs that read it, in one pass.

``Both`` holds a matrix in 1x128 blocks with MN-major scales, for GEMMs over its columns, and in 128x1 blocks, for those
over its rows. On a GPU column-wise codes are dense along the rows, as the K-grouped GEMM reads them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megamoe.kernels import quant
from megamoe.kernels.mlp_activation import activate_backward
from megamoe.kernels.reference import FP8_BLOCK, accumulation_dtype
from megamoe.kernels.scales import empty_mn_major
from megamoe.types import Fp8Tensor

ROW, COLUMN = (1, FP8_BLOCK), (FP8_BLOCK, 1)


class Both(NamedTuple):
    """One matrix ``[P, N]`` as operand of two GEMMs; ``columns`` is None where no second one will be."""

    rows: Fp8Tensor
    columns: Fp8Tensor | None


class ActivationGrads(NamedTuple):
    """What the backward pass needs between GEMM 2 and GEMM 1.

    Attributes:
        pre: the gradient of the pre-activations ``[P, N]``.
        act: the weighted activation ``[P, I]`` column-wise; None where not wanted.
        row_weights: fp32 ``[P]``.
        exact: the gradient of the pre-activations before its cast; None where not wanted.
    """

    pre: Both
    act: Fp8Tensor | None
    row_weights: torch.Tensor
    exact: torch.Tensor | None


def _runs_triton(*tensors: torch.Tensor) -> bool:
    return all(x.is_cuda and x.dtype != torch.float64 for x in tensors)


def _empty_rows(shape: tuple[int, int], device: torch.device) -> Fp8Tensor:
    scales = empty_mn_major(torch.Size((shape[0], -(-shape[1] // FP8_BLOCK))), torch.float32, device)
    return Fp8Tensor(torch.empty(shape, dtype=torch.float8_e4m3fn, device=device), scales, ROW)


def _empty_columns(shape: tuple[int, int], device: torch.device) -> Fp8Tensor:
    codes = torch.empty(shape[::-1], dtype=torch.float8_e4m3fn, device=device).t()
    return Fp8Tensor(codes, torch.empty(-(-shape[0] // FP8_BLOCK), shape[1], device=device), COLUMN)


def cast(x: torch.Tensor, columns: bool) -> Both:
    """``x [P, N]`` in both forms, or only its rows."""
    if not columns:
        return Both(quant.quantize_rowwise(x, mn_major=True), None)
    if not _runs_triton(x):
        return Both(quant.quantize_rowwise(x, mn_major=True), quant.quantize_columnwise(x))
    from megamoe.kernels import triton_mlp

    x = x if x.stride(-1) == 1 else x.contiguous()
    both = Both(_empty_rows(x.shape, x.device), _empty_columns(x.shape, x.device))
    triton_mlp.both_ways(x, both.rows.codes, both.rows.scales, both.columns.codes.t(), both.columns.scales)
    return both


def columns_of_rows(x: Fp8Tensor) -> Fp8Tensor:
    """Column-wise codes of the values of ``x [P, N]``, which is in 1x128 blocks with MN-major scales."""
    if not x.codes.is_cuda:
        return quant.quantize_columnwise(quant.dequantize(x))
    from megamoe.kernels import triton_mlp

    columns = _empty_columns(x.codes.shape, x.codes.device)
    triton_mlp.columns_of_rows(x.codes, x.scales, columns.codes.t(), columns.scales)
    return columns


def activation_backward(
    grad: torch.Tensor,
    pre: torch.Tensor,
    row_weights: torch.Tensor,
    activation: str,
    clamp: float | None,
    *,
    columns: bool,
    exact: bool = False,
) -> ActivationGrads:
    """The backward pass of activation x routing weight in fp32, each result rounded once.

    Args:
        grad: ``[P, I]``, gradient of the weighted activation; I a multiple of 128.
        pre: ``[P, 2I]``, or ``[P, I]`` for ``relu2``.
        row_weights: fp32 ``[P]``.
        activation, clamp: as in ``MoEConfig``.
        columns: whether weight gradients follow, which need the column-wise forms.
        exact: whether the gradient of a bias follows, which is summed from unrounded values.
    """
    if activation == "swiglu" and not exact and _runs_triton(grad, pre):
        if columns:
            return _swiglu_backward(grad, pre, row_weights, clamp)
        rows, weight_grads = quant.swiglu_backward_quantize_rowwise(grad, pre, row_weights, clamp, mn_major=True)
        return ActivationGrads(Both(rows, None), None, weight_grads, None)
    dtype, weights = accumulation_dtype(grad), row_weights.unsqueeze(1)
    grad = grad.to(dtype)
    act, grad_pre = activate_backward(pre, grad * weights, activation, clamp)
    weight_grads = (grad * act).sum(dim=1)
    act_columns = quant.quantize_columnwise(act * weights) if columns else None
    return ActivationGrads(cast(grad_pre, columns), act_columns, weight_grads, grad_pre if exact else None)


def _swiglu_backward(
    grad: torch.Tensor, pre: torch.Tensor, row_weights: torch.Tensor, clamp: float | None
) -> ActivationGrads:
    from megamoe.kernels import triton_mlp

    both = Both(_empty_rows(pre.shape, pre.device), _empty_columns(pre.shape, pre.device))
    act = _empty_columns(grad.shape, grad.device)
    parts = torch.empty(grad.shape[1] // FP8_BLOCK, grad.shape[0], device=grad.device)
    triton_mlp.swiglu_backward(
        grad,
        pre,
        row_weights,
        both.rows.codes,
        both.rows.scales,
        both.columns.codes.t(),
        both.columns.scales,
        act.codes.t(),
        act.scales,
        parts,
        clamp,
    )
    return ActivationGrads(both, act, parts.sum(dim=0), None)
