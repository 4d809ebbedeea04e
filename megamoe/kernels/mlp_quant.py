"""Casts between the GEMMs of the FP8 expert MLP: what one tensor needs for both GEMMs that read it, in one pass.

``Both`` holds a gradient in 1x128 blocks with MN-major scales, for GEMMs over its columns, and in 128x1 blocks, for
those over its rows; the other operand of these is in 128x128 blocks. On a GPU column-wise codes are dense along the
rows, as the K-grouped GEMM reads them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megamoe.kernels import quant
from megamoe.kernels.gemm_ops import get_num_sms, runs_kernels
from megamoe.kernels.mlp_activation import activate_backward, dense_columns, runs_triton
from megamoe.kernels.reference import FP8_BLOCK, activate
from megamoe.types import Fp8Tensor

ROW, COLUMN, TILE = (1, FP8_BLOCK), (FP8_BLOCK, 1), (FP8_BLOCK, FP8_BLOCK)


class Both(NamedTuple):
    """One matrix ``[P, N]`` as operand of two GEMMs; ``columns`` is None where no second one will be."""

    rows: Fp8Tensor
    columns: Fp8Tensor | None


class ActivationGrads(NamedTuple):
    """What the backward pass needs between GEMM 2 and GEMM 1.

    Attributes:
        pre: the gradient of the pre-activations ``[P, N]``.
        act: the weighted activation ``[P, I]`` in 128x128 blocks; None where not wanted.
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


def _empty_columns(shape: tuple[int, int], block: tuple[int, int], device: torch.device) -> Fp8Tensor:
    codes = torch.empty(shape[::-1], dtype=torch.float8_e4m3fn, device=device).t()
    scales = torch.empty(-(-shape[0] // block[0]), -(-shape[1] // block[1]), device=device)
    return Fp8Tensor(codes, scales, block)


def _on_hopper(*tensors: torch.Tensor) -> bool:
    return runs_kernels(tensors[0]) and all(x.dtype != torch.float64 for x in tensors)


def cast(x: torch.Tensor, columns: bool) -> Both:
    """``x [P, N]`` in both forms, or only its rows; P a multiple of 128, N of 16."""
    if not columns:
        return Both(quant.quantize_rowwise(x, mn_major=True), None)
    if not _on_hopper(x):
        return Both(quant.quantize_rowwise(x, mn_major=True), quant.quantize_columnwise(x))
    from megamoe.kernels.gluon import cast_launch

    both = Both(_empty_rows(x.shape, x.device), _empty_columns(x.shape, COLUMN, x.device))
    cast_launch.both_ways(x, both.rows, both.columns, get_num_sms(x.device))
    return both


def columns_of_rows(x: Fp8Tensor) -> Fp8Tensor:
    """The values of ``x [P, N]`` in 128x128 blocks; P a multiple of 128, N of 16.

    ``x`` is in 1x128 blocks with MN-major scales.
    """
    if not _on_hopper(x.codes):
        return quant.quantize_blockwise(quant.dequantize(x))
    from megamoe.kernels.gluon import cast_launch

    columns = _empty_columns(x.codes.shape, TILE, x.codes.device)
    cast_launch.columns_of_rows(x, columns, get_num_sms(x.codes.device))
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
    if _on_hopper(grad, pre):
        return _activation_backward(grad, pre, row_weights, activation, clamp, columns, sums)
    weights = row_weights.unsqueeze(1)
    act, grad_pre = activate_backward(pre, grad * weights, activation, clamp)
    weight_grads = (grad * act).sum(dim=1)
    act_columns = quant.quantize_blockwise(act * weights) if columns else None
    block_sums = grad_pre.unflatten(0, (pre.shape[0] // FP8_BLOCK, FP8_BLOCK)).sum(dim=1) if sums else None
    return ActivationGrads(cast(grad_pre, columns), act_columns, weight_grads, block_sums)


def _activation_backward(
    grad: torch.Tensor,
    pre: torch.Tensor,
    row_weights: torch.Tensor,
    activation: str,
    clamp: float | None,
    columns: bool,
    sums: bool,
) -> ActivationGrads:
    from megamoe.kernels.gluon import cast_launch

    if grad.dtype != pre.dtype:
        grad, pre = grad.float(), pre.float()
    (num_rows, inter), device = grad.shape, grad.device
    rows = _empty_rows(pre.shape, device)
    pre_columns = _empty_columns(pre.shape, COLUMN, device) if columns else None
    act = _empty_columns(grad.shape, TILE, device) if columns else None
    parts = torch.empty(inter // FP8_BLOCK, num_rows, device=device)
    block_sums = torch.empty(num_rows // FP8_BLOCK, pre.shape[1], device=device) if sums else None
    outputs = rows, pre_columns, act, parts, block_sums
    cast_launch.activation_backward(grad, pre, row_weights, *outputs, activation, clamp, get_num_sms(device))
    return ActivationGrads(Both(rows, pre_columns), act, parts.sum(dim=0), block_sums)
