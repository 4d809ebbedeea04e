"""``MoE``: router, routed experts and shared expert as one feed-forward layer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megamoe.config import MoEConfig, check_config
from megamoe.errors import check_tensor, fail_type, fail_value
from megamoe.layers.experts import Experts
from megamoe.layers.parallel import resolve_group
from megamoe.layers.router import Router
from megamoe.layers.shared import SharedExperts
from megamoe.types import Routing


class MoE(nn.Module):
    """A mixture-of-experts feed-forward layer: ``forward(hidden_states [..., H]) -> [..., H]``.

    With a ``group`` the experts are spread over its ranks, and every rank must call the layer equally often (with any
    number of tokens, also none). Auxiliary losses are attached to the graph inside: add nothing to the loss.

    Args:
        config: the layer.
        group: the expert-parallel group: a ``ProcessGroup``, a 1-D ``DeviceMesh`` such as ``mesh["expert"]``, or None
            for one rank. Construction is a collective over it.
        balance_group: ranks over whose tokens the load-balancing loss is taken; default: ``group``. Pass all
            data-parallel ranks to make the loss independent of how ranks divide into data and expert dimensions.
        router: any module that maps ``(hidden_states [T, H], token_mask bool [T] or None)`` to a ``Routing``;
            default: a ``Router`` as the config says.
        device, dtype: of the parameters; default: torch's. The router stays in fp32.
        path: how rows travel between ranks: ``collective``, ``staged``, ``fused`` or ``auto``; see ``Experts``.

    Raises:
        MegaMoEError: an argument breaks a rule, or the ranks' configs differ.
    """

    def __init__(
        self,
        config: MoEConfig,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        balance_group: dist.ProcessGroup | DeviceMesh | None = None,
        router: nn.Module | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        path: str = "collective",
    ):
        super().__init__()
        check_config(config)
        self.config = config
        if router is None:
            device_type = (torch.device(device) if device is not None else torch.get_default_device()).type
            counted, _ = resolve_group(group, device_type)
            if balance_group is not None:
                counted, _ = resolve_group(balance_group, device_type, "balance_group")
            router = Router(config, counted, device)
        elif not isinstance(router, nn.Module):
            fail_type("router", type(router).__name__, "must be an nn.Module", "Derive it from torch.nn.Module.")
        self.router = router
        self.experts = Experts(config, group, device, dtype, path)
        self.shared_experts = SharedExperts(config, device, dtype) if config.shared_intermediate_size else None

    def reset_parameters(self) -> None:
        """Draws all parameters anew; seed every rank equally."""
        for module in self.children():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def close(self) -> None:
        """Gives back the memory that ranks share over NVLink, on all of them. The layer is then done."""
        self.experts.close()

    def explain(self) -> str:
        """Which path calls of the experts take without and with gradients, and how a shared expert goes that is to be
        fused, and why: a line each."""
        return self.experts.explain()

    def forward(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Applies the layer.

        Args:
            hidden_states: floating ``[..., H]``; the leading dimensions are tokens.
            token_mask: bool ``[...]``; tokens that are False (padding) are routed nowhere and count in no statistic:
                only the shared expert adds to them.

        Returns:
            ``[..., H]`` in the dtype of ``hidden_states``.

        Raises:
            MegaMoEError: wrong shape, dtype or device, or more tokens than ``max_tokens_per_rank``.
            ExchangeError: another rank did not take part.
        """
        if not isinstance(hidden_states, torch.Tensor):
            fail_type("hidden_states", type(hidden_states).__name__, "must be a tensor [..., H]", "Pass hidden states.")
        hidden_size = self.config.hidden_size
        if hidden_states.shape[-1:] != (hidden_size,):
            fail_value(
                "hidden_states.shape",
                list(hidden_states.shape),
                f"must end in hidden_size = {hidden_size}",
                "Check the config against the model's width.",
            )
        tokens = hidden_states.reshape(-1, hidden_size)
        # Before the router counts them.
        self.experts.check_tokens(tokens)
        if token_mask is not None:
            check_tensor("token_mask", token_mask, tuple(hidden_states.shape[:-1]), (torch.bool,), hidden_states.device)
            token_mask = token_mask.reshape(-1)
        routing = self.router(tokens, token_mask)
        if not isinstance(routing, Routing):
            fail_type("router's result", type(routing).__name__, "must be a Routing", "Return megamoe.Routing(...).")
        shared = self.shared_experts
        if shared is not None and self.experts.fuses(shared, tokens, routing.topk_weights):
            return self.experts(tokens, routing.topk_index, routing.topk_weights, shared).view(hidden_states.shape)
        out = self.experts(tokens, routing.topk_index, routing.topk_weights)
        if shared is not None:
            out = out + shared(tokens)
        return out.view(hidden_states.shape)
