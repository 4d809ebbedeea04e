"""Casts between the GEMMs of the FP8 expert MLP: what one tensor needs for both GEMMs that read it, in one pass.

``Both`` holds a matrix in 1x128 blocks with MN-major scales, for GEMMs over its columns, and in 128x1 blocks, for those
over its rows. On a GPU column-wise codes are dense along the rows, as the K-grouped GEMM reads them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megamoe.kernels import quant
from megamoe.kernels.mlp_activation import activate_backward, dense_columns, runs_triton
from megamoe.kernels.reference import FP8_BLOCK, activate
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
        sums: fp32 ``[P / 128, N]``, those of each 128 rows of the gradient of the pre-activations before its cast; None
            where not wanted.
    """

    pre: Both
    act: Fp8Tensor | None
    row_weights: torch.Tensor
    sums: torch.Tensor | None


def _empty_rows(shape: tuple[int, int], device: torch.device) -> Fp8Tensor:
    # Of whole blocks of rows: nothing is left to be padded.
    scales = torch.empty(-(-shape[1] // FP8_BLOCK), shape[0], device=device).t()
    return Fp8Tensor(torch.empty(shape, dtype=torch.float8_e4m3fn, device=device), scales, ROW)


def _empty_columns(shape: tuple[int, int], device: torch.device) -> Fp8Tensor:
    codes = torch.empty(shape[::-1], dtype=torch.float8_e4m3fn, device=device).t()
    return Fp8Tensor(codes, torch.empty(-(-shape[0] // FP8_BLOCK), shape[1], device=device), COLUMN)


def cast(x: torch.Tensor, columns: bool) -> Both:
    """``x [P, N]`` in both forms, or only its rows; P a multiple of 128."""
    if not columns:
        return Both(quant.quantize_rowwise(x, mn_major=True), None)
    if not runs_triton(x):
        return Both(quant.quantize_rowwise(x, mn_major=True), quant.quantize_columnwise(x))
    from megamoe.kernels import triton_mlp

    x = dense_columns(x)
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


def activation(pre: torch.Tensor, row_weights: torch.Tensor | None, name: str, clamp: float | None) -> Fp8Tensor:
    """The activation (x ``row_weights [P]``) of ``pre [P, N]``, cast once, in 1x128 blocks with MN-major scales.

    ``name``, ``clamp``: as ``activation`` and ``clamp`` in ``MoEConfig``; P a multiple of 128.
    """
    if not runs_triton(pre):
        act = activate(pre, name, clamp)
        act = act if row_weights is None else act * row_weights.unsqueeze(1)
        return quant.quantize_rowwise(act, mn_major=True)
    from megamoe.kernels import triton_activation

    act = _empty_rows((pre.shape[0], pre.shape[1] // (1 if name == "relu2" else 2)), pre.device)
    triton_activation.forward(dense_columns(pre), row_weights, act.codes, act.scales, name, clamp)
    return act


def activation_backward(
    grad: torch.Tensor,
    pre: torch.Tensor,
    row_weights: torch.Tensor,
    activation: str,
    clamp: float | None,
    *,
    columns: bool,
    sums: bool = False,
) -> ActivationGrads:
    """The backward pass of activation x routing weight in fp32, each result rounded once.

    Args:
        grad: ``[P, I]``, gradient of the weighted activation; P and I multiples of 128.
        pre: ``[P, 2I]``, or ``[P, I]`` for ``relu2``.
        row_weights: fp32 ``[P]``.
        activation, clamp: as in ``MoEConfig``.
        columns: whether weight gradients follow, which need the column-wise forms.
        sums: whether the gradient of a bias follows, which is summed from unrounded values.
    """
    if runs_triton(grad, pre):
        return _on_gpu(grad, pre, row_weights, activation, clamp, columns, sums)
    weights = row_weights.unsqueeze(1)
    act, grad_pre = activate_backward(pre, grad * weights, activation, clamp)
    weight_grads = (grad * act).sum(dim=1)
    act_columns = quant.quantize_columnwise(act * weights) if columns else None
    block_sums = grad_pre.unflatten(0, (pre.shape[0] // FP8_BLOCK, FP8_BLOCK)).sum(dim=1) if sums else None
    return ActivationGrads(cast(grad_pre, columns), act_columns, weight_grads, block_sums)


def _on_gpu(
    grad: torch.Tensor,
    pre: torch.Tensor,
    row_weights: torch.Tensor,
    activation: str,
    clamp: float | None,
    columns: bool,
    sums: bool,
) -> ActivationGrads:
    from megamoe.kernels import triton_mlp

    (num_rows, inter), device = grad.shape, grad.device
    rows = _empty_rows(pre.shape, device)
    pre_columns, act = (_empty_columns(x.shape, device) if columns else None for x in (pre, grad))
    parts = torch.empty(inter // FP8_BLOCK, num_rows, device=device)
    block_sums = torch.empty(num_rows // FP8_BLOCK, pre.shape[1], device=device) if sums else None
    triton_mlp.activation_backward(
        dense_columns(grad),
        dense_columns(pre),
        row_weights,
        rows.codes,
        rows.scales,
        (pre_columns.codes.t(), pre_columns.scales, act.codes.t(), act.scales) if columns else None,
        parts,
        block_sums,
        activation,
        clamp,
    )
    return ActivationGrads(Both(rows, pre_columns), act, parts.sum(dim=0), block_sums)
