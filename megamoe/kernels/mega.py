"""Launches of a mega-kernel's call: stage, plan, compute, sum. Needs triton: import it on GPUs only.

Nothing here waits for the device or checks arguments. A call is one dispatch and one combine of the exchange: calls of
either kind may follow one another on the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton

from megamoe.kernels import triton_dispatch, triton_route
from megamoe.kernels.formats import FP8_MAX, MIN_AMAX
from megamoe.kernels.gluon import launch, mega_bf16, mega_moe
from megamoe.kernels.mega_plan import (
    ROUTE_PROGRAMS,
    MegaPlan,
    MegaSettings,
    Weight,
    next_power_of_two,
)
from megamoe.kernels.peer_rows import WARPS, Launch, PeerMemory, flag_arguments, sum_slots
from megamoe.types import Fp8Tensor

FP8_SUPPORTED = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)
"""Whether the FP8 kernel compiles as it should: the assembler of triton 3.9 serialises its products."""


@dataclass(frozen=True)
class MegaLaunch(Launch):
    """A launch of the mega-kernel: its registers are shared out among its roles."""

    @property
    def options(self) -> dict[str, Any]:
        return {**launch.OPTIONS, "num_warps": self.num_warps}


def call(
    plan: MegaPlan,
    settings: MegaSettings,
    memory: PeerMemory,
    scratch: Mapping[str, torch.Tensor],
    tokens: torch.Tensor | None,
    routing: tuple[torch.Tensor, torch.Tensor],
    up: Weight,
    down: Weight,
    out: torch.Tensor,
    *,
    num_experts: int,
    activation: str,
    clamp: float | None,
    all_sms: int,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> list[Launch]:
    """All of a call, from tokens to their outputs.

    Args:
        memory: of the exchange, laid out for ``plan.memory``.
        scratch: ``plan.views`` of a rank's own memory, in any state.
        tokens: ``[T, H]`` floating, with contiguous columns. None: ``memory.rows`` holds them already, in BF16 or as
            codes with scales in ``memory.scales``, fp32 ``[T, H / 128]``, written after a combine that followed the
            last dispatch.
        routing: ``(index [T, K] int64, weights [T, K])``, both contiguous.
        up, down: ``[e, 2 I, H]`` (gate rows, then up rows) and ``[e, H, I]``, contiguous: BF16, or codes in blocks of
            128 x 128.
        out: ``[T, H]``.
        num_experts: of all ranks.
        activation, clamp: as in ``MoEConfig``.
        biases: of both GEMMs, fp32 or BF16 ``[e, 2 I]`` and ``[e, H]``, contiguous: what sums start from. Routing
            weights then multiply the results of GEMM 2, and not its input.
        all_sms: SMs of the device, for what is done before others wait for it and after.
    """
    return [
        *route(plan, settings, memory, scratch, tokens, routing, num_experts=num_experts, all_sms=all_sms),
        compute(plan, settings, memory, scratch, up, down, activation=activation, clamp=clamp, biases=biases),
        *sum_slots(memory, routing[0], out, num_experts=num_experts, all_sms=all_sms),
    ]


def route(
    plan: MegaPlan,
    settings: MegaSettings,
    memory: PeerMemory,
    scratch: Mapping[str, torch.Tensor],
    tokens: torch.Tensor | None,
    routing: tuple[torch.Tensor, torch.Tensor],
    *,
    num_experts: int,
    all_sms: int,
) -> list[Launch]:
    """Tokens and lists into symmetric memory, and the tables of rows and tiles; see ``call``."""
    index, weights = routing
    num_tokens, top_k, local = index.shape[0], memory.top_k, plan.memory.num_local_experts
    move = tokens is not None
    padded_k, bins = next_power_of_two(top_k), max(16, next_power_of_two(local))
    pairs = memory.num_ranks * memory.max_tokens * padded_k
    common = flag_arguments(memory)
    staged = dict(
        x=tokens if move else memory.error,
        x_stride=tokens.stride(0) if move else 0,
        index=index,
        weights=weights,
        n=num_tokens,
        list_index=memory.list_index,
        list_weights=memory.list_weights,
        rows=memory.rows.view(torch.float8_e4m3fn if plan.memory.fp8 else torch.bfloat16),
        scales=memory.scales,
        num_experts=num_experts,
        max_tokens=memory.max_tokens,
        min_amax=MIN_AMAX,
        K=top_k,
        H=memory.hidden_size,
        FP8=plan.memory.fp8,
        LARGEST=FP8_MAX,
        ROWS=move,
    )
    block = max(128, min(1024, next_power_of_two(pairs)))
    counted = dict(KP=padded_k, LOCAL=local, BINS=bins, CHUNK=plan.chunk, BLOCK=block)
    launches, histograms = [], scratch["histograms"]
    if not plan.fused:
        extra = dict(LISTS=True, GROUPS=8)
        grid = max(1, min(num_tokens, 8 * all_sms))
        launches.append(Launch(triton_dispatch.stage_kernel, grid, {**common, **staged, **extra}, 4))
        arguments = dict(
            n=num_tokens,
            list_index=memory.list_index,
            max_tokens=memory.max_tokens,
            histograms=histograms,
            K=top_k,
            **counted,
        )
        grid = min(histograms.shape[0], all_sms)
        launches.append(Launch(triton_dispatch.count_kernel, grid, {**common, **arguments}, 4))
    arguments = dict(
        histograms=histograms,
        capacity=plan.num_rows,
        **{name: scratch[name] for name in ("counts", "starts", "sizes", "row_source", "row_target", "row_weights")},
        **{name: scratch[name] for name in ("pulled", "finished", "consumed", "claimed", "tiles")},
        programs=settings.sms,
        group=settings.group,
        lag=settings.lag,
        STAGE=plan.fused,
        TABLE=(triton_dispatch.COUNTED_HERE if plan.fused else triton_dispatch.COUNTED_BEFORE).value,
        SUB=min(max(padded_k, 8192 // bins), plan.chunk * padded_k),
        GROUPS=min(4 * WARPS, next_power_of_two(-(-memory.hidden_size // 128))),
        UPS=plan.up_tiles,
        DOWNS=plan.down_tiles,
        BLOCKS=8,
        TILES=max(32, 4096 // bins),
        **counted,
    )
    # In one launch all programs wait for each other.
    programs = min(plan.sms, max(ROUTE_PROGRAMS, num_tokens)) if plan.fused else 2 * all_sms
    launches.append(Launch(triton_route.route_kernel, programs, {**common, **staged, **arguments}, WARPS))
    return launches


def compute(
    plan: MegaPlan,
    settings: MegaSettings,
    memory: PeerMemory,
    scratch: Mapping[str, torch.Tensor],
    up: Weight,
    down: Weight,
    *,
    activation: str,
    clamp: float | None,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Launch:
    """The mega-kernel itself, once ``route`` has made its tables; see ``call``."""
    hidden, rows = plan.memory.hidden_size, scratch["rows"]
    operands = _fp8_operands if plan.memory.fp8 else _bf16_operands
    kernel, specific = operands(plan, settings, memory, scratch, up, down)
    # Of an FP8 kernel with biases and no clamp ptxas would serialise the products: infinity bounds nothing.
    bounded = clamp is not None or (biases is not None and plan.memory.fp8)
    # Nothing is read from where there are none.
    up_bias, down_bias = biases or (scratch["row_weights"], scratch["row_weights"])
    arguments = dict(
        **specific,
        up_bias=up_bias,
        down_bias=down_bias,
        BIAS=biases is not None,
        **{name: scratch[name] for name in ("tiles", "sizes", "row_source", "row_target", "row_weights")},
        **{name: scratch[name] for name in ("pulled", "finished", "consumed", "claimed")},
        error=memory.error,
        budget_ns=memory.budget_ns,
        deltas=memory.deltas,
        words=memory.rows.view(torch.int32),
        slots=memory.slots.view(torch.bfloat16),
        pool_words=rows.view(torch.int32),
        early=settings.early,
        pool_rows=rows.shape[0],
        clamp=(math.inf if bounded else 0.0) if clamp is None else clamp,
        H=hidden,
        INTER=plan.intermediate_size,
        STAGES=settings.stages,
        CHUNK=min(settings.chunk, triton.next_power_of_2(hidden * rows.element_size() // 4)),
        ACTIVATION=launch.ACTIVATIONS[activation].value,
        CLAMP=bounded,
        CONSUMER_REGISTERS=settings.consumer_registers,
        WORKER_REGISTERS=settings.worker_registers,
    )
    return MegaLaunch(kernel, settings.sms, arguments, launch.OPTIONS["num_warps"])


def _fp8_operands(
    plan: MegaPlan,
    settings: MegaSettings,
    memory: PeerMemory,
    scratch: Mapping[str, torch.Tensor],
    up: Fp8Tensor,
    down: Fp8Tensor,
) -> tuple[Any, dict[str, Any]]:
    return mega_moe.mega_moe_kernel, dict(
        rows_desc=launch.descriptor(scratch["rows"], (64, 128)),
        up_desc=launch.descriptor(up.codes.view(-1, plan.memory.hidden_size), (128, 128)),
        act_desc=launch.descriptor(scratch["act"], (64, 128)),
        down_desc=launch.descriptor(down.codes.view(-1, plan.intermediate_size), (128, 128)),
        row_scales_desc=launch.descriptor(scratch["row_scales"], (1, 64), launch.SCALES_LAYOUT),
        act_scales_desc=launch.descriptor(scratch["act_scales"], (1, 64), launch.SCALES_LAYOUT),
        scales=memory.scales,
        pool_scales=scratch["row_scales"],
        act_scales=scratch["act_scales"],
        up_scales=up.scales,
        down_scales=down.scales,
    )


def _bf16_operands(
    plan: MegaPlan,
    settings: MegaSettings,
    memory: PeerMemory,
    scratch: Mapping[str, torch.Tensor],
    up: torch.Tensor,
    down: torch.Tensor,
) -> tuple[Any, dict[str, Any]]:
    return mega_bf16.mega_moe_bf16_kernel, dict(
        rows_desc=launch.descriptor(scratch["rows"], (64, 64)),
        up_desc=launch.descriptor(up.view(-1, plan.memory.hidden_size), (128, 64)),
        act_desc=launch.descriptor(scratch["act"], (64, 64)),
        down_desc=launch.descriptor(down.view(-1, plan.intermediate_size), (128, 64)),
        store_desc=launch.descriptor(scratch["act"], (64, 128)),
        SKEW=settings.skew,
    )
