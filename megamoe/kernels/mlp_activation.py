"""The derivatives of the activations as formulas: inside an operator autograd is off."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megamoe.config import SWIGLU_OAI_ALPHA
from megamoe.kernels.reference import accumulation_dtype


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
