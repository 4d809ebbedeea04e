"""The activations x routing weights between the GEMMs, forward and backward: one kernel each on GPUs, else torch.

Derivatives are formulas: inside an operator autograd is off.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megamoe.config import SWIGLU_OAI_ALPHA
from megamoe.kernels.reference import accumulation_dtype, activate


def runs_triton(*tensors: torch.Tensor) -> bool:
    """Whether kernels compute with ``tensors``."""
    return all(x.is_cuda and x.dtype != torch.float64 for x in tensors)


def dense_columns(x: torch.Tensor) -> torch.Tensor:
    """``x [P, N]`` with stride 1 along the columns."""
    return x if x.stride(-1) == 1 else x.contiguous()


def activate_rows(
    pre: torch.Tensor, row_weights: torch.Tensor | None, activation: str, clamp: float | None, dtype: torch.dtype
) -> torch.Tensor:
    """``[P, I]`` in ``dtype``: the activation (x ``row_weights [P]``) of ``pre [P, 2I]``, rounded once."""
    if runs_triton(pre):
        from megamoe.kernels import triton_activation

        out = pre.new_empty(pre.shape[0], pre.shape[1] // (1 if activation == "relu2" else 2), dtype=dtype)
        weights = None if row_weights is None else row_weights.contiguous()
        triton_activation.forward(dense_columns(pre), weights, out, None, activation, clamp)
        return out
    act = activate(pre, activation, clamp)
    return (act if row_weights is None else act * row_weights.to(act.dtype).unsqueeze(1)).to(dtype)


def activate_rows_backward(
    grad: torch.Tensor,
    pre: torch.Tensor,
    row_weights: torch.Tensor,
    activation: str,
    clamp: float | None,
    dtype: torch.dtype,
    with_act: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The backward pass of ``activate_rows`` for ``grad [P, I]``, each result rounded once.

    Returns:
        The gradient of ``pre`` in ``dtype``; with ``with_act`` the weighted activation ``[P, I]`` again, in ``dtype``;
        the gradient of ``row_weights [P]``, fp32 (fp64 where an operand is).
    """
    if runs_triton(grad, pre, row_weights):
        from megamoe.kernels import triton_activation

        grad_pre = torch.empty_like(pre, dtype=dtype, memory_format=torch.contiguous_format)
        act = grad.new_empty(grad.shape, dtype=dtype) if with_act else None
        grad_weights = grad.new_empty(grad.shape[0], dtype=torch.float32)
        operands = dense_columns(grad), dense_columns(pre), row_weights.contiguous()
        triton_activation.backward(*operands, grad_pre, act, grad_weights, activation, clamp)
        return grad_pre, act, grad_weights
    wide = accumulation_dtype(grad, pre, row_weights)
    grad, weights = grad.to(wide), row_weights.to(wide).unsqueeze(1)
    act, grad_pre = activate_backward(pre, grad * weights, activation, clamp)
    grad_weights = (grad * act).sum(dim=1)
    return grad_pre.to(dtype), (act * weights).to(dtype) if with_act else None, grad_weights


def activate_backward(
    pre: torch.Tensor, grad: torch.Tensor, activation: str, clamp: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference.activate_backward``, the same bits, without autograd."""
    aten = torch.ops.aten
    dtype = accumulation_dtype(pre)
    pre, grad = pre.to(dtype), grad.to(dtype)
    if activation == "relu2":
        relu = F.relu(pre)
        return relu.square(), aten.threshold_backward(grad * (2 * relu), relu, 0)
    gate, up = free_gate, free_up = pre.chunk(2, dim=-1)
    if clamp is not None:
        gate, up = free_gate.clamp(max=clamp), free_up.clamp(-clamp, clamp)
    if activation == "swiglu_oai":
        up = up + 1
        sigmoid = torch.sigmoid(SWIGLU_OAI_ALPHA * gate)
        gated = gate * sigmoid
        grad_gated = grad * up
        grad_gate = grad_gated * sigmoid + aten.sigmoid_backward(grad_gated * gate, sigmoid) * SWIGLU_OAI_ALPHA
    elif activation == "swiglu":
        gated = F.silu(gate)
        grad_gate = aten.silu_backward(grad * up, gate)
    else:
        approximate = "tanh" if activation == "geglu_tanh" else "none"
        gated = F.gelu(gate, approximate=approximate)
        grad_gate = aten.gelu_backward(grad * up, gate, approximate=approximate)
    grad_up = grad * gated
    if clamp is not None:
        # NaN is not within the limits.
        grad_gate = torch.where(free_gate <= clamp, grad_gate, 0)
        grad_up = torch.where(free_up.abs() <= clamp, grad_up, 0)
    return gated * up, torch.cat([grad_gate, grad_up], dim=-1)
