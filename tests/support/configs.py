"""Small layer configurations shared by tests."""

from __future__ import annotations

from megamoe import MoEConfig, RouterConfig


def router_layer(hidden_size: int, num_experts: int, top_k: int, **router) -> MoEConfig:
    """A layer of which only the router matters; ``router``: fields of ``RouterConfig``."""
    return MoEConfig(
        hidden_size=hidden_size,
        intermediate_size=8,
        num_experts=num_experts,
        top_k=top_k,
        router=RouterConfig(**router),
    )
