"""The launches of the router that ``offline`` compiles: those of published layers, and of most experts."""

from __future__ import annotations

import torch

from megamoe.config import RouterConfig
from megamoe.kernels import triton_router
from megamoe.kernels.offline_exchange import Movement, empty

HIDDEN, TOKENS = 7168, 8

DEEPSEEK_V3 = RouterConfig("sigmoid", num_groups=8, topk_groups=4, group_score="sum_top2", expert_bias=True)

CASES = {
    "8 experts, no mask": (8, 2, torch.bfloat16, RouterConfig(), False),
    "64 experts": (64, 8, torch.bfloat16, RouterConfig(), True),
    "128 experts": (128, 8, torch.float16, RouterConfig(linear_bias=True, renormalize=False), True),
    "160 experts in groups": (160, 6, torch.float32, RouterConfig(num_groups=8, topk_groups=3), True),
    "256 experts in groups": (256, 8, torch.bfloat16, DEEPSEEK_V3, True),
    "384 experts": (384, 6, torch.bfloat16, RouterConfig("sqrtsoftplus", expert_bias=True), True),
    "1024 experts": (1024, 32, torch.bfloat16, RouterConfig("sigmoid"), True),
}
"""Experts, top-k, dtype of the tokens, router, and whether there is a mask."""


def movements() -> list[Movement]:
    """The launches of each case, each once."""
    found: dict[tuple, Movement] = {}
    for name, (experts, top_k, dtype, router, masked) in CASES.items():
        launches = triton_router.launches(
            empty(TOKENS, HIDDEN, dtype=dtype),
            empty(experts, HIDDEN),
            empty(experts) if router.linear_bias else None,
            empty(experts) if router.expert_bias else None,
            empty(TOKENS, dtype=torch.bool) if masked else None,
            empty(TOKENS, top_k, dtype=torch.int64),
            empty(TOKENS, top_k),
            router,
        )
        for launch in launches:
            kernel = launch.kernel.fn.__name__.strip("_")
            movement = Movement(f"{kernel}, {name}", launch)
            # The GEMM is the same for many numbers of experts.
            form = kernel, dtype, *map(str, movement.constants.items())
            found.setdefault(form, movement)
    return list(found.values())
