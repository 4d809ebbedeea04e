"""The expert MLP without quantisation: the operands of each GEMM in the dtype of the rows, the rest in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megamoe.kernels import pool_gemm, reference
from megamoe.kernels.layout import row_expert_ids
from megamoe.kernels.mlp_activation import activate_backward
from megamoe.kernels.mlp_options import MlpOptions
from megamoe.types import ExpertLayout


def _add_bias(rows: torch.Tensor, bias: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    dtype = reference.accumulation_dtype(rows)
    return rows.to(dtype) + reference.permute(bias.to(dtype), row_expert_ids(layout))


def _pre_activations(
    rows: torch.Tensor, up_proj: torch.Tensor, up_bias: torch.Tensor | None, layout: ExpertLayout
) -> torch.Tensor:
    pre = pool_gemm.grouped_gemm_nt(rows, up_proj.to(rows.dtype), layout)
    return pre if up_bias is None else _add_bias(pre, up_bias, layout)


def _unweighted(
    act: torch.Tensor, down_proj: torch.Tensor, down_bias: torch.Tensor, layout: ExpertLayout, dtype: torch.dtype
) -> torch.Tensor:
    return _add_bias(pool_gemm.grouped_gemm_nt(act.to(dtype), down_proj.to(dtype), layout), down_bias, layout)


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
    # torch's grouped GEMM and the kernels round the result, the reference and the bias leave it wide.
    rounded = up_bias is None and pool_gemm.rounds_results(rows, up_proj.to(rows.dtype))
    pre = (rows.shape[0], up_proj.shape[1]), rows.dtype if rounded else wide
    return [pre, None if down_bias is None else (rows.shape, wide), None]


def forward(
    rows: torch.Tensor,
    row_weights: torch.Tensor,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    layout: ExpertLayout,
    options: MlpOptions,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, None]:
    """The result, and what the backward pass needs: pre-activations, and with ``down_bias`` the unweighted result.

    Both are None where the backward pass computes them again.
    """
    pre = _pre_activations(rows, up_proj, up_bias, layout)
    act = reference.activate(pre, options.activation, options.clamp)
    weights = row_weights.to(act.dtype).unsqueeze(1)
    unweighted = None
    if down_bias is None:
        out = pool_gemm.grouped_gemm_nt((act * weights).to(rows.dtype), down_proj.to(rows.dtype), layout)
    else:
        unweighted = _unweighted(act, down_proj, down_bias, layout, rows.dtype)
        out = unweighted * weights
    if options.recompute == "activation":
        pre = unweighted = None
    return out.to(rows.dtype), pre, unweighted, None


def backward(
    grad_out: torch.Tensor,
    rows: torch.Tensor,
    row_weights: torch.Tensor,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    pre: torch.Tensor | None,
    unweighted: torch.Tensor | None,
    layout: ExpertLayout,
    options: MlpOptions,
    needed: Sequence[bool],
) -> list[torch.Tensor | None]:
    """The gradients of the first six arguments of ``forward``, None where not ``needed``."""
    need_rows, need_weights, need_up, need_down, need_up_bias, need_down_bias = needed
    scale, operands = options.weight_grad_scale, rows.dtype
    grad_rows = grad_weights = grad_up = grad_down = grad_up_bias = grad_down_bias = None
    dtype = reference.accumulation_dtype(rows)
    grad_out = grad_out.contiguous()
    weights = row_weights.to(dtype).unsqueeze(1)
    if pre is None:
        pre = _pre_activations(rows, up_proj, up_bias, layout)
    if down_bias is not None:
        if need_weights:
            if unweighted is None:
                act = reference.activate(pre, options.activation, options.clamp)
                unweighted = _unweighted(act, down_proj, down_bias, layout, operands)
            grad_weights = (grad_out.to(dtype) * unweighted).sum(dim=1).to(row_weights.dtype)
        grad_out = grad_out.to(dtype) * weights
        if need_down_bias:
            grad_down_bias = (reference.segment_sum(grad_out, layout) * scale).to(down_bias.dtype)

    grad_act = pool_gemm.grouped_gemm_nn(grad_out.to(operands), down_proj.to(operands), layout).to(dtype)
    if down_bias is None:
        act, grad_pre = activate_backward(pre, grad_act * weights, options.activation, options.clamp)
        if need_weights:
            grad_weights = (grad_act * act).sum(dim=1).to(row_weights.dtype)
        act = act * weights
    else:
        act, grad_pre = activate_backward(pre, grad_act, options.activation, options.clamp)
    if need_down:
        grad_down = pool_gemm.grouped_gemm_k(grad_out.to(operands), act.to(operands), layout)
        grad_down = (grad_down * scale).to(down_proj.dtype)
    if need_rows:
        grad_rows = pool_gemm.grouped_gemm_nn(grad_pre.to(operands), up_proj.to(operands), layout).to(operands)
    if need_up:
        grad_up = (pool_gemm.grouped_gemm_k(grad_pre.to(operands), rows, layout) * scale).to(up_proj.dtype)
    if need_up_bias:
        grad_up_bias = (reference.segment_sum(grad_pre, layout) * scale).to(up_bias.dtype)
    return [grad_rows, grad_weights, grad_up, grad_down, grad_up_bias, grad_down_bias]
