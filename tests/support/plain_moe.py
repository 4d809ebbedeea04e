"""Straightforward experts against which the kernels are tested: loops over tokens and slots, written from the formulas.

Nothing here comes from ``megamoe``. All is differentiable by autograd; meant for fp64.
"""

from __future__ import annotations

import math

import torch

from tests.support.generators import ExpertWeights

ACTIVATIONS = ("swiglu", "swiglu_oai", "geglu", "geglu_tanh", "relu2")


def plain_activation(pre: torch.Tensor, activation: str, clamp: float | None = None) -> torch.Tensor:
    """``[..., I]`` of pre-activations ``[..., 2I]``: the gate's half first, then up's."""
    if activation == "relu2":
        return torch.where(pre > 0, pre * pre, torch.zeros_like(pre))
    width = pre.shape[-1] // 2
    gate, up = pre[..., :width], pre[..., width:]
    if clamp is not None:
        gate = torch.where(gate > clamp, clamp, gate)
        up = torch.where(up > clamp, clamp, torch.where(up < -clamp, -clamp, up))
    if activation == "swiglu":
        return gate * torch.sigmoid(gate) * up
    if activation == "swiglu_oai":
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    if activation == "geglu":
        return 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))) * up
    assert activation == "geglu_tanh", activation
    return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


def plain_moe(
    hidden_states: torch.Tensor,
    topk_index: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    activation: str = "swiglu",
    clamp: float | None = None,
) -> torch.Tensor:
    """``[T, H]``: each token's sum over its slots of weight * expert(token); ids outside ``[0, E)`` add nothing."""
    out = []
    for token, experts in enumerate(topk_index.tolist()):
        total = 0 * hidden_states[token]
        for slot, expert in enumerate(experts):
            if not 0 <= expert < weights.up_proj.shape[0]:
                continue
            pre = weights.up_proj[expert] @ hidden_states[token]
            if weights.up_bias is not None:
                pre = pre + weights.up_bias[expert]
            row = weights.down_proj[expert] @ plain_activation(pre, activation, clamp)
            if weights.down_bias is not None:
                row = row + weights.down_bias[expert]
            total = total + topk_weights[token, slot] * row
        out.append(total)
    return torch.stack(out) if out else hidden_states * 0
