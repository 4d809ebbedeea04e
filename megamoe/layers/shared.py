"""``SharedExperts``: the dense MLP that every token passes, next to the routed experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megamoe.config import MoEConfig, check_config
from megamoe.errors import FLOATING, check_int, check_tensor
from megamoe.kernels import weight_cache
from megamoe.kernels.mlp_joined import SharedWeights
from megamoe.kernels.reference import activate


def compute_dtype(parameter: torch.Tensor, device_type: str) -> torch.dtype:
    """The dtype of a layer's GEMMs: autocast's where it is on, else that of the parameters."""
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return parameter.dtype


class SharedExperts(nn.Module):
    """``x -> down(activation(gate_up(x)))``, times sigmoid(x . shared_gate) where the config says so.

    Replicated on every rank. Several shared experts of one width are one expert of their total width. Not quantised
    here; a ``MoE`` can compute it with the routed experts instead: see ``fuse_shared_experts`` in ``MoEConfig``.

    Attributes:
        gate_up_proj: ``[2S, H]`` (gate rows, then up rows), S = ``shared_intermediate_size``; ``up_proj [S, H]`` for an
            activation without gate.
        down_proj: ``[H, S]``.
        shared_gate: ``[1, H]``, or None.
    """

    def __init__(self, config: MoEConfig, device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        check_config(config)
        check_int("config.shared_intermediate_size", config.shared_intermediate_size, 1)
        self.config = config
        hidden, width = config.hidden_size, config.shared_intermediate_size
        options = dict(device=device, dtype=dtype)
        name, rows = ("gate_up_proj", 2 * width) if config.gated else ("up_proj", width)
        self.register_parameter(name, nn.Parameter(torch.empty(rows, hidden, **options)))
        self.down_proj = nn.Parameter(torch.empty(hidden, width, **options))
        gate = nn.Parameter(torch.empty(1, hidden, **options)) if config.shared_gate else None
        self.register_parameter("shared_gate", gate)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights N(0, init_std^2), default 1/sqrt(fan_in)."""
        for parameter in self.parameters():
            std = parameter.shape[1] ** -0.5 if self.config.init_std is None else self.config.init_std
            nn.init.normal_(parameter, std=std)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` of floating ``hidden_states [T, H]``, in its dtype.

        Raises:
            MegaMoEError: wrong shape, dtype or device.
        """
        shape = (None, self.config.hidden_size)
        check_tensor("hidden_states", hidden_states, shape, FLOATING, self.down_proj.device)
        up_proj = self.gate_up_proj if self.config.gated else self.up_proj
        dtype = compute_dtype(up_proj, hidden_states.device.type)
        x = hidden_states.to(dtype)
        act = activate(F.linear(x, up_proj.to(dtype)), self.config.activation, self.config.clamp).to(dtype)
        out = F.linear(act, self.down_proj.to(dtype))
        if self.shared_gate is not None:
            out = out * F.linear(x, self.shared_gate.to(dtype)).sigmoid()
        return out.to(hidden_states.dtype)

    @property
    def weights(self) -> SharedWeights:
        """Of an expert with a gate."""
        return SharedWeights(self.gate_up_proj, self.down_proj)

    def refresh_copies(self) -> None:
        """As ``Experts.refresh_copies``."""
        for weight in self.weights:
            weight_cache.refresh(weight)

    def __setattr__(self, name: str, value: Any) -> None:
        old = self.__dict__.get("_parameters", {}).get(name)
        super().__setattr__(name, value)
        if old is not None and old is not value:
            # As in ``Experts``.
            weight_cache.forget(old)

    def extra_repr(self) -> str:
        config = self.config
        return f"hidden_size={config.hidden_size}, intermediate_size={config.shared_intermediate_size}"
