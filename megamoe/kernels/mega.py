"""Launches of a mega-kernel's call: stage, plan, compute, sum. Needs triton: import it on GPUs only.

Nothing here waits for the device or checks arguments. A call is one dispatch and one combine of the exchange: calls of
either kind may follow one another on the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton

from megamoe.kernels import triton_dispatch, triton_route
from megamoe.kernels.formats import FP8_MAX, MIN_AMAX
from megamoe.kernels.gluon import launch, mega_moe
from megamoe.kernels.mega_plan import ROUTE_PROGRAMS, MegaPlan, MegaSettings, next_power_of_two
from megamoe.kernels.peer_rows import WARPS, Launch, PeerMemory, flag_arguments, sum_slots
from megamoe.types import Fp8Tensor

SUPPORTED = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)
"""Whether the kernel compiles as it should: the assembler of triton 3.9 serialises its products."""


@dataclass(frozen=True)
class MegaLaunch(Launch):
    """A launch of the mega-kernel: its registers are shared out among its roles."""

    @property
    def options(self) -> dict[str, Any]:
        return dict(num_warps=self.num_warps, maxnreg=launch.OPTIONS["maxnreg"], enable_fp_fusion=True)


def call(
    plan: MegaPlan,
    settings: MegaSettings,
    memory: PeerMemory,
    scratch: Mapping[str, torch.Tensor],
    tokens: torch.Tensor,
    routing: tuple[torch.Tensor, torch.Tensor],
    up: Fp8Tensor,
    down: Fp8Tensor,
    out: torch.Tensor,
    *,
    num_experts: int,
    activation: str,
    clamp: float | None,
    all_sms: int,
) -> list[Launch]:
    """All of a call, from tokens to their outputs.

    Args:
        memory: of the exchange, laid out for ``plan.memory``.
        scratch: ``plan.views`` of a rank's own memory, in any state.
        tokens: ``[T, H]`` floating, with contiguous columns.
        routing: ``(index [T, K] int64, weights [T, K])``, both contiguous.
        up, down: codes ``[e, 2 I, H]`` (gate rows, then up rows) and ``[e, H, I]`` in blocks of 128 x 128, contiguous.
        out: ``[T, H]``.
        num_experts: of all ranks.
        activation, clamp: as in ``MoEConfig``.
        all_sms: SMs of the device, for what is done before others wait for it and after.
    """
    return [
        *route(plan, settings, memory, scratch, tokens, routing, num_experts=num_experts, all_sms=all_sms),
        compute(plan, settings, memory, scratch, up, down, activation=activation, clamp=clamp),
        *sum_slots(memory, routing[0], out, num_experts=num_experts, all_sms=all_sms),
    ]


def route(
    plan: MegaPlan,
    settings: MegaSettings,
    memory: PeerMemory,
    scratch: Mapping[str, torch.Tensor],
    tokens: torch.Tensor,
    routing: tuple[torch.Tensor, torch.Tensor],
    *,
    num_experts: int,
    all_sms: int,
) -> list[Launch]:
    """Tokens in FP8 and lists into symmetric memory, and the tables of rows and tiles; see ``call``."""
    index, weights = routing
    num_tokens, top_k, local = tokens.shape[0], memory.top_k, plan.memory.num_local_experts
    padded_k, bins = next_power_of_two(top_k), max(16, next_power_of_two(local))
    pairs = memory.num_ranks * memory.max_tokens * padded_k
    common = flag_arguments(memory)
    staged = dict(
        x=tokens,
        x_stride=tokens.stride(0),
        index=index,
        weights=weights,
        n=num_tokens,
        list_index=memory.list_index,
        list_weights=memory.list_weights,
        rows=memory.rows.view(torch.float8_e4m3fn),
        scales=memory.scales,
        num_experts=num_experts,
        max_tokens=memory.max_tokens,
        min_amax=MIN_AMAX,
        K=top_k,
        H=memory.hidden_size,
        LARGEST=FP8_MAX,
    )
    block = max(128, min(1024, next_power_of_two(pairs)))
    counted = dict(KP=padded_k, LOCAL=local, BINS=bins, CHUNK=plan.chunk, BLOCK=block)
    launches, histograms = [], scratch["histograms"]
    if not plan.fused:
        extra = dict(FP8=True, ROWS=True, LISTS=True, GROUPS=8)
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
        **{name: scratch[name] for name in ("pulled", "finished", "tiles")},
        programs=settings.sms,
        group=settings.group,
        lag=settings.lag,
        STAGE=plan.fused,
        TABLE=(triton_dispatch.COUNTED_HERE if plan.fused else triton_dispatch.COUNTED_BEFORE).value,
        SUB=min(max(padded_k, 8192 // bins), plan.chunk * padded_k),
        GROUPS=WARPS,
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
    up: Fp8Tensor,
    down: Fp8Tensor,
    *,
    activation: str,
    clamp: float | None,
) -> Launch:
    """The mega-kernel itself, once ``route`` has made its tables; see ``call``."""
    hidden, intermediate = plan.memory.hidden_size, plan.intermediate_size
    rows, act = scratch["rows"], scratch["act"]
    arguments = dict(
        rows_desc=launch.descriptor(rows, (64, 128)),
        up_desc=launch.descriptor(up.codes.view(-1, hidden), (128, 128)),
        act_desc=launch.descriptor(act, (64, 128)),
        down_desc=launch.descriptor(down.codes.view(-1, intermediate), (128, 128)),
        row_scales_desc=launch.descriptor(scratch["row_scales"], (1, 64), launch.SCALES_LAYOUT),
        act_scales_desc=launch.descriptor(scratch["act_scales"], (1, 64), launch.SCALES_LAYOUT),
        **{name: scratch[name] for name in ("tiles", "sizes", "row_source", "row_target", "row_weights")},
        pulled=scratch["pulled"],
        finished=scratch["finished"],
        error=memory.error,
        budget_ns=memory.budget_ns,
        deltas=memory.deltas,
        words=memory.rows.view(torch.int32),
        scales=memory.scales,
        slots=memory.slots.view(torch.bfloat16),
        pool_words=rows.view(torch.int32),
        pool_scales=scratch["row_scales"],
        act_scales=scratch["act_scales"],
        up_scales=up.scales,
        down_scales=down.scales,
        num_rows=plan.num_rows,
        clamp=0.0 if clamp is None else clamp,
        H=hidden,
        INTER=intermediate,
        STAGES=settings.stages,
        SKEW=settings.skew,
        TURNS=settings.turns,
        CHUNK=min(settings.chunk, triton.next_power_of_2(hidden // 4)),
        ACTIVATION=launch.ACTIVATIONS[activation].value,
        CLAMP=clamp is not None,
        CONSUMER_REGISTERS=settings.consumer_registers,
        WORKER_REGISTERS=settings.worker_registers,
    )
    return MegaLaunch(mega_moe.mega_moe_kernel, settings.sms, arguments, launch.OPTIONS["num_warps"])
