"""The expert MLP over expert-sorted rows: GEMM 1, activation x routing weight, GEMM 2, with its backward pass.

BF16 path: the operands of each GEMM in the dtype of ``rows``. FP8 path: rows and gradients in 1x128 blocks, weights in
128x128, and for the weight gradients both operands in 128x1 blocks along the rows; everything between GEMMs in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megamoe.kernels import pool_gemm, reference
from megamoe.kernels.layout import align_up, row_expert_ids
from megamoe.kernels.reference import FP8_BLOCK, dequantize, quantize
from megamoe.types import ExpertLayout


@dataclass(frozen=True)
class MlpOptions:
    """Everything about ``grouped_mlp`` that is not a tensor.

    Attributes:
        activation, clamp, precision: as in ``MoEConfig``.
        weight_grad_scale: multiplies the gradients of weights and biases (1/R makes a sum over R ranks their mean).
    """

    activation: str
    clamp: float | None = None
    precision: str = "bf16"
    weight_grad_scale: float = 1.0

    @property
    def halves(self) -> int:
        """Column blocks of GEMM 1's weight: gate and up, or only one."""
        return 1 if self.activation == "relu2" else 2


def grouped_mlp(
    rows: torch.Tensor,
    row_weights: torch.Tensor,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    layout: ExpertLayout,
    options: MlpOptions,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows' expert outputs, each already multiplied by its routing weight; differentiable once.

    Without ``down_bias`` the weight multiplies the activation before GEMM 2, with it (row + bias) after GEMM 2.

    Args:
        rows: ``[P, H]``, padding rows zero. Its dtype is the operands' dtype of the BF16 path.
        row_weights: ``[P]``, padding zero.
        up_proj: ``[e, 2I, H]`` (gate rows, then up rows), or ``[e, I, H]`` for ``relu2``; any floating dtype. Gradients
            come in this dtype, from fp32 sums.
        down_proj: ``[e, H, I]``.
        up_bias, down_bias: ``[e, 2I]`` and ``[e, H]``, added in fp32.

    Returns:
        ``[P, H]`` in the dtype of ``rows``; padding rows are undefined.
    """
    return _GroupedMlp.apply(rows, row_weights, up_proj, down_proj, up_bias, down_bias, layout, options)


def _pad_halves(weight: torch.Tensor, halves: int, dim: int) -> torch.Tensor:
    """Zero-pads each of the ``halves`` of ``dim`` to a multiple of 128: no FP8 block may span gate and up."""
    size = weight.shape[dim] // halves
    if size % FP8_BLOCK == 0:
        return weight
    split = weight.unflatten(dim, (halves, size))
    pad = [0, 0] * (split.dim() - 1 - (dim + 1)) + [0, align_up(size, FP8_BLOCK) - size]
    return F.pad(split, pad).flatten(dim, dim + 1)


def _unpad_halves(weight: torch.Tensor, halves: int, dim: int, size: int) -> torch.Tensor:
    """The inverse of ``_pad_halves``; ``size`` is that of ``dim`` before padding."""
    if weight.shape[dim] == size:
        return weight
    return weight.unflatten(dim, (halves, -1)).narrow(dim + 1, 0, size // halves).flatten(dim, dim + 1)


class _Bf16Gemms:
    """The five GEMMs of forward and backward, operands in one dtype."""

    def __init__(self, dtype: torch.dtype, up_proj: torch.Tensor, down_proj: torch.Tensor, options: MlpOptions):
        self.dtype = dtype
        self.up_proj = up_proj.to(dtype)
        self.down_proj = down_proj.to(dtype)

    def up(self, rows: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
        return pool_gemm.grouped_gemm_nt(rows, self.up_proj, layout)

    def down(self, act: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
        return pool_gemm.grouped_gemm_nt(act.to(self.dtype), self.down_proj, layout)

    def grad_act(self, grad_out: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
        return pool_gemm.grouped_gemm_nn(grad_out.to(self.dtype), self.down_proj, layout)

    def grad_rows(self, grad_pre: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
        return pool_gemm.grouped_gemm_nn(grad_pre.to(self.dtype), self.up_proj, layout)

    def grad_up_proj(self, grad_pre: torch.Tensor, rows: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
        return pool_gemm.grouped_gemm_k(grad_pre.to(self.dtype), rows, layout)

    def grad_down_proj(self, grad_out: torch.Tensor, act: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
        return pool_gemm.grouped_gemm_k(grad_out.to(self.dtype), act.to(self.dtype), layout)


class _Fp8Gemms:
    """The same with block-scaled e4m3 operands."""

    ROW, COLUMN, WEIGHT = (1, FP8_BLOCK), (FP8_BLOCK, 1), (FP8_BLOCK, FP8_BLOCK)

    def __init__(self, dtype: torch.dtype, up_proj: torch.Tensor, down_proj: torch.Tensor, options: MlpOptions):
        self.halves = options.halves
        self.up_rows, self.down_columns = up_proj.shape[1], down_proj.shape[2]
        self.up_proj = quantize(_pad_halves(up_proj, self.halves, 1), self.WEIGHT)
        self.down_proj = quantize(_pad_halves(down_proj, 1, 2), self.WEIGHT)

    def up(self, rows: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
        pre = reference.grouped_gemm_nt_fp8(quantize(rows, self.ROW), self.up_proj, layout)
        return _unpad_halves(pre, self.halves, 1, self.up_rows)

    def down(self, act: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
        act = quantize(_pad_halves(act, 1, 1), self.ROW)
        return reference.grouped_gemm_nt_fp8(act, self.down_proj, layout)

    def grad_act(self, grad_out: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
        grad = reference.grouped_gemm_nn_fp8(quantize(grad_out, self.ROW), self.down_proj, layout)
        return grad[:, : self.down_columns]

    def grad_rows(self, grad_pre: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
        grad_pre = quantize(_pad_halves(grad_pre, self.halves, 1), self.ROW)
        return reference.grouped_gemm_nn_fp8(grad_pre, self.up_proj, layout)

    def grad_up_proj(self, grad_pre: torch.Tensor, rows: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
        # Only the FP8 rows travel and are kept: their column-wise codes are cast from those.
        rows = dequantize(quantize(rows, self.ROW))
        return reference.grouped_gemm_k_fp8(quantize(grad_pre, self.COLUMN), quantize(rows, self.COLUMN), layout)

    def grad_down_proj(self, grad_out: torch.Tensor, act: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
        return reference.grouped_gemm_k_fp8(quantize(grad_out, self.COLUMN), quantize(act, self.COLUMN), layout)


def _gemms(rows: torch.Tensor, up_proj: torch.Tensor, down_proj: torch.Tensor, options: MlpOptions) -> Any:
    kind = _Fp8Gemms if options.precision == "fp8" else _Bf16Gemms
    return kind(rows.dtype, up_proj, down_proj, options)


def _add_bias(rows: torch.Tensor, bias: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    dtype = reference.accumulation_dtype(rows)
    return rows.to(dtype) + reference.permute(bias.to(dtype), row_expert_ids(layout))


class _GroupedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, row_weights, up_proj, down_proj, up_bias, down_bias, layout, options):
        # The dtypes are chosen here: autocast must not choose again for the fp32 steps.
        with torch.autocast(rows.device.type, enabled=False):
            gemms = _gemms(rows, up_proj, down_proj, options)
            pre = gemms.up(rows, layout)
            if up_bias is not None:
                pre = _add_bias(pre, up_bias, layout)
            act = reference.activate(pre, options.activation, options.clamp)
            weights = row_weights.to(act.dtype).unsqueeze(1)
            if down_bias is None:
                out = gemms.down(act * weights, layout)
                unweighted = None
            else:
                unweighted = _add_bias(gemms.down(act, layout), down_bias, layout)
                out = unweighted * weights
        # The layout too: activation checkpointing replaces all saved tensors together, and nothing else.
        operands = rows, row_weights, up_proj, down_proj, up_bias, down_bias
        ctx.save_for_backward(*operands, pre, unweighted, layout.counts, layout.starts)
        ctx.options = options
        return out.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        rows, row_weights, up_proj, down_proj, up_bias, down_bias, pre, unweighted, counts, starts = ctx.saved_tensors
        layout, options = ExpertLayout(counts, starts, rows.shape[0]), ctx.options
        need_rows, need_weights, need_up, need_down, need_up_bias, need_down_bias = ctx.needs_input_grad[:6]
        scale = options.weight_grad_scale
        grad_rows = grad_weights = grad_up = grad_down = grad_up_bias = grad_down_bias = None
        with torch.autocast(rows.device.type, enabled=False):
            gemms = _gemms(rows, up_proj, down_proj, options)
            dtype = reference.accumulation_dtype(rows)
            grad_out = grad_out.contiguous()
            weights = row_weights.to(dtype).unsqueeze(1)
            if down_bias is not None:
                if need_weights:
                    grad_weights = (grad_out.to(dtype) * unweighted).sum(dim=1).to(row_weights.dtype)
                grad_out = grad_out.to(dtype) * weights
                if need_down_bias:
                    grad_down_bias = (reference.segment_sum(grad_out, layout) * scale).to(down_bias.dtype)

            grad_act = gemms.grad_act(grad_out, layout).to(dtype)
            if down_bias is None:
                act, grad_pre = reference.activate_backward(pre, grad_act * weights, options.activation, options.clamp)
                if need_weights:
                    grad_weights = (grad_act * act).sum(dim=1).to(row_weights.dtype)
                act = act * weights
            else:
                act, grad_pre = reference.activate_backward(pre, grad_act, options.activation, options.clamp)
            if need_down:
                grad_down = (gemms.grad_down_proj(grad_out, act, layout) * scale).to(down_proj.dtype)
            if need_rows:
                grad_rows = gemms.grad_rows(grad_pre, layout).to(rows.dtype)
            if need_up:
                grad_up = (gemms.grad_up_proj(grad_pre, rows, layout) * scale).to(up_proj.dtype)
            if need_up_bias:
                grad_up_bias = (reference.segment_sum(grad_pre, layout) * scale).to(up_bias.dtype)
        return grad_rows, grad_weights, grad_up, grad_down, grad_up_bias, grad_down_bias, None, None
