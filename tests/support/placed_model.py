"""The small model whose experts the tests of placements move."""

from __future__ import annotations

import torch
from torch import nn

from megamoe import MoE, MoEConfig

NUM_EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 2, 16, 12


def layer(**changes) -> MoEConfig:
    fields = dict(hidden_size=HIDDEN, intermediate_size=WIDTH, num_experts=NUM_EXPERTS, top_k=TOP_K)
    return MoEConfig(**{**fields, **changes})


class Model(nn.Module):
    """Two MoE layers, the first with biases."""

    def __init__(self, group=None, **changes):
        super().__init__()
        configs = layer(bias=True, **changes), layer(shared_intermediate_size=8, **changes)
        self.layers = nn.ModuleList(MoE(config, group) for config in configs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for moe in self.layers:
            x = x + moe(x)
        return x


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All ranks' parts of a parameter, one after another."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()
