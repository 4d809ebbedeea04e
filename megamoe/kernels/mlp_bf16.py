"""The expert MLP without quantisation: the operands of each GEMM in the dtype of the rows, the rest in fp32.

Hopper's kernels compute the activation inside GEMM 1, from fp32 sums; pre-activations that are kept are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megamoe.kernels import gemm_swiglu, pool_gemm, reference
from megamoe.kernels.main_grad import finish
from megamoe.kernels.mlp_activation import activate_rows, activate_rows_backward
from megamoe.kernels.mlp_options import MlpOptions
from megamoe.kernels.row_groups import RowGroups
from megamoe.types import ExpertLayout


def _first_gemm(
    rows: torch.Tensor,
    up_proj: torch.Tensor,
    up_bias: torch.Tensor | None,
    weights: torch.Tensor | None,
    layout: ExpertLayout,
    options: MlpOptions,
    with_pre: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The activation (x routing weight) in the rows' dtype, and the pre-activations, where asked for or on the way."""
    if not pool_gemm.fuses_activation(rows, up_proj, options.activation):
        pre = pool_gemm.grouped_gemm_nt(rows, up_proj.to(rows.dtype), layout, up_bias)
        return activate_rows(pre, weights, options.activation, options.clamp, rows.dtype), pre
    pre = rows.new_empty(rows.shape[0], up_proj.shape[1]) if with_pre else None
    if up_bias is not None:
        up_bias = (up_bias if up_bias.dtype == rows.dtype else up_bias.float()).contiguous()
    act = gemm_swiglu.grouped_bf16_gemm_swiglu_nt(
        rows.contiguous(),
        up_proj.to(rows.dtype).contiguous(),
        RowGroups.padded(layout),
        row_weights=None if weights is None else weights.float().contiguous(),
        activation=options.activation,
        clamp=options.clamp,
        bias=up_bias,
        pre=pre,
    )
    return act, pre


def _weight_gradient(
    a: torch.Tensor,
    b: torch.Tensor,
    layout: ExpertLayout,
    scale: float,
    dtype: torch.dtype,
    total: torch.Tensor | None,
) -> torch.Tensor | None:
    """``[e, M, N]``: ``scale`` x the sums over each expert's rows, in ``dtype`` or added to ``total``."""
    if total is not None:
        pool_gemm.add_grouped_gemm_k(total, a, b, layout, scale)
        return None
    if scale == 1:
        return pool_gemm.grouped_gemm_k(a, b, layout, dtype)
    return finish(pool_gemm.grouped_gemm_k(a, b, layout), scale, dtype, None)


def kept_forms(
    rows: torch.Tensor,
    up_proj: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    options: MlpOptions,
) -> list[tuple[Sequence[int], torch.dtype] | None]:
    """Shapes and dtypes of what ``forward`` keeps."""
    if options.recompute == "activation":
        return [None, None, None]
    wide = reference.accumulation_dtype(rows)
    # torch's grouped GEMM and the kernels round the result, the reference and a bias after the GEMM leave it wide.
    rounded = pool_gemm.fuses_activation(rows, up_proj, options.activation)
    rounded |= up_bias is None and pool_gemm.rounds_results(rows, up_proj.to(rows.dtype))
    pre = (rows.shape[0], up_proj.shape[1]), rows.dtype if rounded else wide
    return [pre, None, None]


def forward(
    rows: torch.Tensor,
    row_weights: torch.Tensor,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    layout: ExpertLayout,
    options: MlpOptions,
    trained: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
    """The result, and what the backward pass needs: pre-activations.

    They are None where the backward pass computes them again, or there will be none.
    """
    keeps = trained and options.recompute == "none"
    inner_weights = row_weights if down_bias is None else None
    act, pre = _first_gemm(rows, up_proj, up_bias, inner_weights, layout, options, keeps)
    out = pool_gemm.grouped_gemm_nt(act, down_proj.to(rows.dtype), layout, down_bias)
    if down_bias is not None:
        weights = row_weights.to(out.dtype).unsqueeze(1)
        out = torch.mul(out, weights, out=torch.empty_like(out, dtype=rows.dtype))
    return out.to(rows.dtype), pre if keeps else None, None, None


def backward(
    grad_out: torch.Tensor,
    rows: torch.Tensor,
    row_weights: torch.Tensor,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    pre: torch.Tensor | None,
    layout: ExpertLayout,
    options: MlpOptions,
    needed: Sequence[bool],
    totals: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """The gradients of the first six arguments of ``forward``, None where not ``needed``.

    Those of the last four are added to their ``totals`` where there are any, and None too. The routing weight
    multiplies a row's result, before or after GEMM 2: its gradient, and all others but those of the biases, are the
    same sums either way.
    """
    up_total, down_total, up_bias_total, down_bias_total = totals
    need_rows, need_weights, need_up, need_down, need_up_bias, need_down_bias = needed
    scale, operands = options.weight_grad_scale, rows.dtype
    grad_rows = grad_weights = grad_up = grad_down = grad_up_bias = grad_down_bias = None
    grad_out = grad_out.to(operands).contiguous()
    up, down = up_proj.to(operands), down_proj.to(operands)
    if pre is None:
        if pool_gemm.fuses_activation(rows, up_proj, options.activation):
            # As in the forward pass: the same bits. Its activation is not needed.
            _, pre = _first_gemm(rows, up, up_bias, None, layout, options, True)
        else:
            pre = pool_gemm.grouped_gemm_nt(rows, up, layout, up_bias)

    grad_act = pool_gemm.grouped_gemm_nn(grad_out, down, layout)
    grad_pre, act, dots = activate_rows_backward(
        grad_act, pre, row_weights, options.activation, options.clamp, operands, need_down
    )
    if need_weights:
        if down_bias is not None:
            dots = dots + pool_gemm.row_dots(grad_out, down_bias, layout)
        grad_weights = dots.to(row_weights.dtype)
    if need_down:
        grad_down = _weight_gradient(grad_out, act, layout, scale, down_proj.dtype, down_total)
    if need_down_bias:
        sums = pool_gemm.segment_sum(grad_out, layout, row_weights)
        grad_down_bias = finish(sums, scale, down_bias.dtype, down_bias_total)
    if need_rows:
        grad_rows = pool_gemm.grouped_gemm_nn(grad_pre, up, layout).to(operands)
    if need_up:
        grad_up = _weight_gradient(grad_pre, rows, layout, scale, up_proj.dtype, up_total)
    if need_up_bias:
        grad_up_bias = finish(pool_gemm.segment_sum(grad_pre, layout), scale, up_bias.dtype, up_bias_total)
    return [grad_rows, grad_weights, grad_up, grad_down, grad_up_bias, grad_down_bias]
