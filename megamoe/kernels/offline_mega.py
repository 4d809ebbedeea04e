"""The kernels of mega-kernel calls in the forms that ``mega`` asks for, for ``offline``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from megamoe.config import MoEConfig
from megamoe.kernels import mega, peer_rows
from megamoe.kernels.mega_plan import Weight, choose_settings, plan_mega
from megamoe.kernels.offline_exchange import SMS, Movement, empty
from megamoe.plan import plan_memory
from megamoe.types import Fp8Tensor

FP8, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32

SHAPES = {
    (7168, 2048, 64, 8, 2): (64, 8192),
    (4096, 2048, 64, 6, 2): (2048,),
    (4096, 1536, 128, 8, 8): (2048,),
    (2048, 1408, 64, 6, 2): (64,),
    (2048, 768, 128, 8, 8): (64,),
    (2944, 2944, 32, 4, 2): (2048,),
    (6144, 14336, 8, 2, 2): (2048,),
    (16384, 18432, 512, 16, 2): (2048,),
    (128, 128, 8, 2, 2): (64,),
}
"""(H, I, experts, slots, ranks): tokens of each rank."""


def _calls() -> Iterator[Movement]:
    for (hidden, intermediate, experts, top_k, ranks), all_tokens in SHAPES.items():
        sizes = hidden, intermediate, experts, top_k, ranks
        for tokens in all_tokens:
            yield from _call(f"{hidden} x {intermediate}, {tokens} tokens", *sizes, tokens)
            yield from _call(f"{hidden} x {intermediate}, bf16, {tokens} tokens", *sizes, tokens, precision="bf16")
    shape = (7168, 2048, 64, 8, 2)
    for tokens in (64, 8192):
        yield from _call(f"7168 x 2048, {tokens} tokens in FP8", *shape, tokens, staged=True)
    yield from _call("7168 x 2048, clamp", *shape, 64, clamp=10.0)
    for precision in ("fp8", "bf16"):
        yield from _call(f"7168 x 2048, {precision}, biases", *shape, 64, precision=precision, bias=FP32)
        options = dict(precision=precision, activation="swiglu_oai", clamp=7.0, bias=BF16)
        yield from _call(f"2944 x 2944, {precision}, biases", 2944, 2944, 32, 4, 2, 2048, **options)
    yield from _call("7168 x 2048, geglu, biases", *shape, 64, activation="geglu", bias=FP32)
    yield from _call("7168 x 2048, long chunks", *shape, 64, chunk=1024)
    for activation in ("swiglu_oai", "geglu_tanh", "geglu"):
        yield from _call(f"7168 x 2048, {activation}", *shape, 64, activation=activation)
    for skew in (1, 3):
        yield from _call(f"7168 x 2048, bf16, skew {skew}", *shape, 64, precision="bf16", skew=skew)
    yield from _call("7168 x 2048, bf16, long chunks", *shape, 64, precision="bf16", chunk=1024)
    for tokens in (64, 8192):
        yield from _call(f"7168 x 2048, {tokens} tokens in BF16", *shape, tokens, precision="bf16", staged=True)
    for activation, clamp in (("swiglu", 10.0), ("swiglu_oai", 7.0), ("geglu_tanh", None), ("geglu", None)):
        yield from _call(
            f"7168 x 2048, bf16, {activation}, clamp {clamp}", *shape, 64,
            precision="bf16", activation=activation, clamp=clamp,
        )  # fmt: skip


def _call(
    name: str,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    ranks: int,
    tokens: int,
    *,
    activation: str = "swiglu",
    clamp: float | None = None,
    staged: bool = False,
    bias: torch.dtype | None = None,
    precision: str = "fp8",
    **settings: Any,
) -> Iterator[Movement]:
    fp8 = precision == "fp8"
    memory_plan = plan_memory(MoEConfig(hidden, intermediate, experts, top_k, precision=precision), ranks, tokens)
    views = {region.name: empty(region.nbytes, dtype=torch.uint8) for region in memory_plan.regions}
    memory = peer_rows.peer_memory(memory_plan, views, 0, empty(ranks, dtype=torch.int64), 10**10)
    plan = plan_mega(memory_plan, intermediate, SMS)
    local = memory_plan.num_local_experts
    sizes = dict(tokens=tokens, ranks=ranks, top_k=top_k, num_experts=experts, intermediate_size=intermediate)
    chosen = choose_settings(**sizes, sms=SMS, fp8=fp8)
    launches = mega.call(
        plan,
        replace(chosen, **settings),
        memory,
        plan.views(empty(plan.total, dtype=torch.uint8)),
        None if staged else empty(tokens, hidden, dtype=BF16),
        (empty(tokens, top_k, dtype=torch.int64), empty(tokens, top_k)),
        _weights(fp8, local, 2 * intermediate, hidden),
        _weights(fp8, local, hidden, intermediate),
        empty(tokens, hidden, dtype=BF16),
        num_experts=experts,
        activation=activation,
        clamp=clamp,
        all_sms=SMS,
        biases=bias and (empty(local, 2 * intermediate, dtype=bias), empty(local, hidden, dtype=bias)),
    )
    for launch in launches:
        yield Movement(f"{launch.kernel.fn.__name__}, mega {name}", launch)


def _weights(fp8: bool, experts: int, rows: int, columns: int) -> Weight:
    if not fp8:
        return empty(experts, rows, columns, dtype=BF16)
    codes = empty(experts, rows, columns, dtype=FP8)
    return Fp8Tensor(codes, empty(experts, rows // 128, columns // 128), (128, 128))


def movements() -> list[Movement]:
    """Every kernel once; those of the exchange itself are ``offline_exchange``'s."""
    found: dict[tuple, Movement] = {}
    for movement in _calls():
        name = movement.kernel.fn.__name__
        if name == "mega_moe_kernel" and not mega.FP8_SUPPORTED:
            continue
        if name not in ("stage_kernel", "count_kernel"):
            found.setdefault((name, *map(str, movement.constants.items())), movement)
    return list(found.values())
