"""Whole calls of the mega-kernel by several ranks in one process, under the simulator, and what they must give."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megamoe.kernels import mega, reference
from megamoe.kernels.mega_plan import MegaPlan, MegaSettings, plan_mega
from megamoe.kernels.peer_rows import Launch
from megamoe.kernels.quant import quantize_rowwise
from megamoe.types import ExpertLayout, Fp8Tensor
from tests.support.exchange_sim import Sizes, Tokens, World, expected_rows, poisoned
from tests.support.gluon_sim import Simulation

SETTINGS = MegaSettings(sms=2, group=1, lag=1)
BLOCK = (128, 128)


@dataclass(frozen=True)
class MegaSizes(Sizes):
    """A small world for the mega-kernel; ``intermediate`` columns of gate and of up."""

    tokens: int = 40
    hidden: int = 256
    fp8: bool = True
    intermediate: int = 256


@functools.cache
def weights_of(rank: int, local: int, hidden: int, intermediate: int) -> tuple[Fp8Tensor, Fp8Tensor]:
    """A rank's experts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rank)
        up = torch.randn(local, 2 * intermediate, hidden) * hidden**-0.5
        down = torch.randn(local, hidden, intermediate) * intermediate**-0.5
    return reference.quantize(up, BLOCK), reference.quantize(down, BLOCK)


class MegaWorld(World):
    """All ranks' symmetric memory and their own scratch. ``fused``: calls take three launches, else five."""

    def __init__(self, sizes: MegaSizes, fused: bool = True, num_rows: int | None = None, sms: int = SETTINGS.sms):
        super().__init__(sizes)
        plan = plan_mega(self.plan, sizes.intermediate, sms, num_rows)
        self.mega_plan: MegaPlan = replace(plan, fused=fused)
        # A storage for each tensor, so that the simulator knows its elements.
        self.scratch = [
            {region.name: torch.empty(region.shape, dtype=region.dtype) for region in self.mega_plan.regions}
            for _ in range(sizes.ranks)
        ]

    @functools.cached_property
    def weights(self) -> list[tuple[Fp8Tensor, Fp8Tensor]]:
        sizes = self.sizes
        return [weights_of(rank, sizes.local, sizes.hidden, sizes.intermediate) for rank in range(sizes.ranks)]

    def launches(
        self,
        rank: int,
        mine: Tokens,
        settings: MegaSettings = SETTINGS,
        clamp: float | None = None,
        activation: str = "swiglu",
    ) -> list[Launch]:
        """A rank's call, with poisoned outputs."""
        mine.out = poisoned(mine.x.shape[0], self.sizes.hidden, dtype=torch.bfloat16)
        return mega.call(
            self.mega_plan,
            settings,
            self.memories[rank],
            self.scratch[rank],
            mine.x,
            (mine.index, mine.weights),
            *self.weights[rank],
            mine.out,
            num_experts=self.sizes.experts,
            activation=activation,
            clamp=clamp,
            all_sms=2,
        )

    def route(self, rank: int, mine: Tokens, settings: MegaSettings) -> list[Launch]:
        """The launches that make a rank's tables."""
        return mega.route(
            self.mega_plan,
            settings,
            self.memories[rank],
            self.scratch[rank],
            mine.x,
            (mine.index, mine.weights),
            num_experts=self.sizes.experts,
            all_sms=2,
        )

    def forget(self, rank: int, simulation: Simulation) -> None:
        """What lies in a rank's scratch and slots means nothing: poison, and an error to read but for the pools."""
        region = self.plan["slots"]
        simulation.memory.undefine(self.allocations[rank][region.offset : region.offset + region.nbytes], True)
        for name, tensor in self.scratch[rank].items():
            simulation.memory.register(tensor, f"r{rank}.{name}")
            simulation.memory.undefine(tensor, name not in ("rows", "row_scales", "act", "act_scales", "row_weights"))


def add_mega_call(
    world: MegaWorld, tokens: list[Tokens], *, ranks: Sequence[int] | None = None, **options: Any
) -> None:
    """Adds a call of each rank, with poisoned outputs and scratch. ``options``: of ``MegaWorld.launches``."""
    for rank in range(world.sizes.ranks) if ranks is None else ranks:
        launches = world.launches(rank, tokens[rank], **options)
        world.streams[rank].append(functools.partial(world.forget, rank))
        world.add(rank, launches)


def expected_outputs(
    world: MegaWorld, tokens: list[Tokens], clamp: float | None = None, activation: str = "swiglu"
) -> list[torch.Tensor]:
    """fp32 outputs of every rank's tokens by the reference, with the same casts."""
    sizes = world.sizes
    staged = [quantize_rowwise(mine.x) for mine in tokens]
    totals = [torch.zeros(mine.x.shape[0], sizes.top_k, sizes.hidden) for mine in tokens]
    for rank in range(sizes.ranks):
        up, down = world.weights[rank]
        expected = expected_rows(sizes, tokens, rank)
        codes = torch.zeros(len(expected.source), sizes.hidden, dtype=torch.uint8)
        scales, weights = torch.zeros(len(codes), sizes.hidden // 128), torch.zeros(len(codes))
        for r, other in enumerate(tokens):
            rows, pair = expected.source == r, expected.pair[expected.source == r]
            token = pair // sizes.top_k
            codes[rows] = staged[r].codes.view(torch.uint8)[token]
            scales[rows] = staged[r].scales[token]
            weights[rows] = other.weights.flatten()[pair]
        layout = ExpertLayout(expected.counts, expected.starts, len(codes))
        rows = Fp8Tensor(codes.view(torch.float8_e4m3fn), scales, (1, 128))
        pre = reference.grouped_gemm_nt_fp8(rows, up, layout)
        act = reference.activate(pre, activation, clamp) * weights[:, None]
        results = reference.grouped_gemm_nt_fp8(quantize_rowwise(act), down, layout).bfloat16().float()
        for r in range(sizes.ranks):
            rows, pair = expected.source == r, expected.pair[expected.source == r]
            totals[r].view(-1, sizes.hidden)[pair] = results[rows]
    return [total.sum(1) for total in totals]


def check_outputs(
    world: MegaWorld, tokens: list[Tokens], clamp: float | None = None, activation: str = "swiglu"
) -> None:
    """Every token's output is right by its own norm; tokens without experts have zeros."""
    for rank, (mine, wanted) in enumerate(zip(tokens, expected_outputs(world, tokens, clamp, activation), strict=True)):
        error = torch.linalg.vector_norm(mine.out.float() - wanted, dim=1)
        norm = torch.linalg.vector_norm(wanted, dim=1)
        # A code of an activation that rounds the other way changes a token by less than 1/16.
        wrong = ~(error <= 0.0625 * norm)
        assert not wrong.any(), f"rank {rank}: tokens {wrong.nonzero().flatten().tolist()}: {error} of {norm}"


def check_tables(world: MegaWorld, tokens: list[Tokens], rank: int, settings: MegaSettings) -> None:
    """The rows and the order of tiles that a rank has planned."""
    sizes, scratch, plan = world.sizes, world.scratch[rank], world.mega_plan
    expected = expected_rows(sizes, tokens, rank)
    used = int(scratch["sizes"][0])
    assert scratch["counts"].tolist() == expected.counts.tolist()
    assert used == int((-(-expected.counts // 128) * 128).sum())
    source, pair = expected.source[:used], expected.pair[:used]
    here = source >= 0
    token, slot = pair // sizes.top_k, pair % sizes.top_k
    assert torch.equal(scratch["row_source"][:used].long(), torch.where(here, source << 26 | token, -1))
    deltas = world.memories[rank].deltas[source.clamp(min=0)]
    target = deltas + (slot * sizes.tokens + token) * (sizes.hidden * 2 // 16)
    assert torch.equal(scratch["row_target"][:used], torch.where(here, target, -(1 << 62)))
    for r, other in enumerate(tokens):
        assert torch.equal(scratch["row_weights"][:used][source == r], other.weights.flatten()[pair[source == r]])
    blocks = used // 128
    assert not scratch["pulled"][:blocks].any() and not scratch["finished"][:blocks].any()

    heights = here.view(-1, 128).sum(1).tolist()
    owner = torch.repeat_interleave(torch.arange(sizes.local), -(-expected.counts // 128)).tolist()
    ups, downs, programs = plan.up_tiles, plan.down_tiles, settings.sms
    order: list[list[tuple]] = []
    for program in range(programs):
        mine = (blocks * ups + programs - 1 - program) // programs + (blocks * downs + program) // programs
        words = scratch["tiles"][program::programs][:mine].tolist()
        order.append([(w >> 24, b, w >> 8 & 255, w & 255, w >> 16 & 255) for w, b in words])
    everything = [
        (s, b, n, owner[b], heights[b]) for s in (0, 1) for b in range(blocks) for n in range((ups, downs)[s])
    ]
    assert sorted(tile for mine in order for tile in mine) == everything
    for second in (0, 1):
        share = [sum(tile[0] == second for tile in mine) for mine in order]
        assert max(share) - min(share) <= 1
    # Every program goes on until a tile of GEMM 2 misses one of GEMM 1.
    left, moved = [ups] * blocks, True
    while moved:
        moved = False
        for mine in order:
            while mine and (mine[0][0] == 0 or not left[mine[0][1]]):
                left[mine[0][1]] -= mine.pop(0)[0] == 0
                moved = True
    assert not any(order)
