"""The exchange's kernels in the forms that ``peer_rows`` asks for, for ``offline``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megamoe.config import MoEConfig
from megamoe.kernels import peer_rows
from megamoe.plan import plan_memory

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16

RANKS, SMS = 8, 132
SHAPES = {
    **{f"{tokens} tokens": (tokens, 8, 7168, 256) for tokens in (16, 32, 128, 512)},
    "decode": (64, 8, 7168, 256),
    "prefill": (8192, 8, 7168, 256),
    "odd": (2048, 6, 2880, 24),
}
"""Tokens, slots, columns and experts: few tokens, of which a dispatch moves 1, 2, 4 and 8 at a time, more and many, and
sizes that are no powers of two."""


@dataclass(frozen=True)
class Movement:
    """A launch of ``peer_rows`` on tensors without memory."""

    name: str
    launch: peer_rows.Launch

    @property
    def kernel(self) -> Any:
        return self.launch.kernel

    @property
    def constants(self) -> dict[str, Any]:
        parameters = {parameter.name for parameter in self.kernel.params if parameter.is_constexpr}
        return {name: value for name, value in self.launch.arguments.items() if name in parameters}

    def compile(self) -> Any:
        """The compiled kernel, for the active driver's target."""
        return self.kernel.warmup(**self.launch.arguments, grid=(1,), **self.launch.options)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def movements() -> list[Movement]:
    """Every kernel with and without each of its parts, each once."""
    # Parts of several movements are the same kernel.
    found: dict[tuple, Movement] = {}
    for movement in _all_movements():
        form = (movement.kernel.fn.__name__, movement.launch.num_warps, *map(str, movement.constants.items()))
        found.setdefault(form, movement)
    return list(found.values())


def _all_movements() -> Iterator[Movement]:
    for shape, (tokens, top_k, hidden, experts) in SHAPES.items():
        plan = plan_memory(MoEConfig(hidden, 128, experts, top_k, precision="fp8"), RANKS, tokens)
        views = {region.name: empty(region.nbytes, dtype=torch.uint8) for region in plan.regions}
        memory = peer_rows.peer_memory(plan, views, 0, empty(RANKS, dtype=torch.int64), 10**9)
        rows = plan.most_rows
        table = peer_rows.empty_table(memory, plan.num_local_experts, rows, torch.device("meta"))
        x, bf16_rows = empty(tokens, hidden, dtype=BF16), empty(rows, hidden, dtype=BF16)
        fp8_rows, scales = empty(rows, hidden, dtype=FP8), empty(-(-hidden // 128), rows).t()
        index, weights = empty(tokens, top_k, dtype=torch.int64), empty(tokens, top_k)
        common = dict(num_experts=experts, num_sms=None, all_sms=SMS)
        for name, arguments in {
            "dispatch fp8": (x, (index, weights), table, fp8_rows, scales, False),
            "dispatch bf16": (x, (index, weights), table, bf16_rows, None, True),
            "plan": (None, (index, weights), table, None, None, True),
            "send": (x, None, table, bf16_rows, None, True),
        }.items():
            *operands, padding = arguments
            launches = peer_rows.dispatch(memory, *operands, num_tokens=tokens, zero_padding=padding, **common)
            yield from _named(f"{name}, {shape}", launches)
        for name, operands in {
            "combine": (bf16_rows, None, index, table, x, None),
            "return weights": (None, table.row_weights, index, table, None, weights),
        }.items():
            yield from _named(f"{name}, {shape}", peer_rows.combine(memory, *operands, **common))
    yield from _named("barrier", peer_rows.barrier(memory))


def _named(name: str, launches: list[peer_rows.Launch]) -> Iterator[Movement]:
    for number, launch in enumerate(launches, 1):
        yield Movement(f"{launch.kernel.fn.__name__}, {name}, {number} of {len(launches)}", launch)
