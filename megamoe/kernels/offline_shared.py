"""The launch that adds slots for shared experts, in the forms of published layers, for ``offline``."""

from __future__ import annotations

import torch

from megamoe.kernels import triton_shared_slots
from megamoe.kernels.offline_exchange import Movement, empty

TOKENS = 8

CASES = {
    "8 slots and 1": (7168, 256, 8, 1, None),
    "6 slots and 2": (5120, 160, 6, 2, None),
    "4 slots and 4, bf16 gate": (2048, 60, 4, 4, torch.bfloat16),
    "8 slots and 8, fp32 gate": (16384, 64, 8, 8, torch.float32),
}
"""H, experts, slots of routed and of shared experts, and the dtype of tokens and gate."""


def movements() -> list[Movement]:
    """A launch of each case."""
    found = []
    for name, (hidden, experts, top_k, shared, dtype) in CASES.items():
        routing = empty(TOKENS, top_k, dtype=torch.int64), empty(TOKENS, top_k)
        gated = (None, None) if dtype is None else (empty(TOKENS, hidden, dtype=dtype), empty(1, hidden, dtype=dtype))
        slots = TOKENS, top_k + shared
        out = empty(*slots, dtype=torch.int64), empty(*slots)
        launch = triton_shared_slots.launch(*routing, *gated, *out, 1, experts, experts // 2, shared)
        found.append(Movement(f"shared slots, {name}", launch))
    return found
