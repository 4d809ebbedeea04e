"""Whole calls of the mega-kernel by several ranks in one process, under the simulator, and what they must give."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megamoe.kernels import mega, reference
from megamoe.kernels.mega_plan import MegaPlan, MegaSettings, least_pool_blocks, plan_mega
from megamoe.kernels.peer_rows import Launch
from megamoe.kernels.quant import quantize_rowwise
from megamoe.types import ExpertLayout, Fp8Tensor
from tests.support.exchange_sim import Sizes, Tokens, World, expected_rows, make_tokens, poisoned
from tests.support.gluon_sim import Simulation
from tests.support.mega_order import order_of_tiles, unfinished

SETTINGS = MegaSettings(sms=2, group=1, lag=1)
BLOCK = (128, 128)


@dataclass(frozen=True)
class MegaSizes(Sizes):
    """A small world for the mega-kernel; ``intermediate`` columns of gate and of up."""

    tokens: int = 40
    hidden: int = 256
    fp8: bool = True
    intermediate: int = 256


Weights = tuple[Fp8Tensor, Fp8Tensor] | tuple[torch.Tensor, torch.Tensor]


@functools.cache
def weights_of(rank: int, local: int, hidden: int, intermediate: int, fp8: bool = True) -> Weights:
    """A rank's experts, in FP8 or BF16."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rank)
        up = torch.randn(local, 2 * intermediate, hidden) * hidden**-0.5
        down = torch.randn(local, hidden, intermediate) * intermediate**-0.5
    return (reference.quantize(up, BLOCK), reference.quantize(down, BLOCK)) if fp8 else (up.bfloat16(), down.bfloat16())


class MegaWorld(World):
    """All ranks' symmetric memory and their own scratch.

    ``fused``: calls take three launches, else five. ``pool_blocks``: of the pool; default: as many as there can be.
    """

    def __init__(
        self,
        sizes: MegaSizes,
        fused: bool = True,
        num_rows: int | None = None,
        sms: int = SETTINGS.sms,
        pool_blocks: int | None = None,
    ):
        super().__init__(sizes)
        plan = plan_mega(self.plan, sizes.intermediate, sms, num_rows)
        if pool_blocks is not None:
            pool_bytes = plan.pool_bytes // plan.pool_blocks * pool_blocks
            plan = plan_mega(self.plan, sizes.intermediate, sms, num_rows, pool_bytes)
            assert plan.pool_blocks == pool_blocks
        self.mega_plan: MegaPlan = replace(plan, fused=fused)
        # A storage for each tensor, so that the simulator knows its elements.
        self.scratch = [
            {region.name: torch.empty(region.shape, dtype=region.dtype) for region in self.mega_plan.regions}
            for _ in range(sizes.ranks)
        ]

    @functools.cached_property
    def weights(self) -> list[Weights]:
        sizes = self.sizes
        layer = sizes.local, sizes.hidden, sizes.intermediate, sizes.fp8
        return [weights_of(rank, *layer) for rank in range(sizes.ranks)]

    def launches(
        self,
        rank: int,
        mine: Tokens,
        settings: MegaSettings = SETTINGS,
        clamp: float | None = None,
        activation: str = "swiglu",
        biases: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> list[Launch]:
        """A rank's call, with poisoned outputs. ``biases``: of each rank."""
        mine.out = poisoned(mine.index.shape[0], self.sizes.hidden, dtype=torch.bfloat16)
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
            biases=None if biases is None else biases[rank],
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
    world.movements += "M" if ranks is None else ""
    for rank in range(world.sizes.ranks) if ranks is None else ranks:
        launches = world.launches(rank, tokens[rank], **options)
        world.streams[rank].append(functools.partial(world.forget, rank))
        world.add(rank, launches)


def _gemm(rows: Fp8Tensor | torch.Tensor, weight: Fp8Tensor | torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    gemm = reference.grouped_gemm_nt_fp8 if isinstance(rows, Fp8Tensor) else reference.grouped_gemm_nt
    return gemm(rows, weight, layout)


def expected_outputs(
    sizes: MegaSizes,
    experts: Sequence[Weights],
    tokens: list[Tokens],
    clamp: float | None = None,
    activation: str = "swiglu",
) -> list[torch.Tensor]:
    """fp32 outputs of every rank's tokens by the reference, with the same casts. ``experts``: of each rank."""
    totals = [torch.zeros(mine.x.shape[0], sizes.top_k, sizes.hidden) for mine in tokens]
    for rank in range(sizes.ranks):
        up, down = experts[rank]
        expected = expected_rows(sizes, tokens, rank)
        x, weights = torch.zeros(len(expected.source), sizes.hidden), torch.zeros(len(expected.source))
        for r, other in enumerate(tokens):
            rows, pair = expected.source == r, expected.pair[expected.source == r]
            x[rows] = other.x.float()[pair // sizes.top_k]
            weights[rows] = other.weights.flatten()[pair]
        layout = ExpertLayout(expected.counts, expected.starts, len(x))
        cast = quantize_rowwise if sizes.fp8 else torch.Tensor.bfloat16
        act = reference.activate(_gemm(cast(x), up, layout), activation, clamp) * weights[:, None]
        results = _gemm(cast(act), down, layout).bfloat16().float()
        for r in range(sizes.ranks):
            rows, pair = expected.source == r, expected.pair[expected.source == r]
            totals[r].view(-1, sizes.hidden)[pair] = results[rows]
    return [total.sum(1) for total in totals]


def check_close(rank: int, out: torch.Tensor, wanted: torch.Tensor, fp8: bool = True) -> None:
    """Every token's output is right by its own norm; tokens without experts have zeros."""
    error = torch.linalg.vector_norm(out.float() - wanted, dim=1)
    norm = torch.linalg.vector_norm(wanted, dim=1)
    # A code of an activation that rounds the other way changes a token by less than 1/16, in BF16 1/128.
    wrong = ~(error <= (0.0625 if fp8 else 0.0078) * norm)
    assert not wrong.any(), f"rank {rank}: tokens {wrong.nonzero().flatten().tolist()}: {error} of {norm}"


def check_outputs(
    world: MegaWorld, tokens: list[Tokens], clamp: float | None = None, activation: str = "swiglu"
) -> None:
    """``check_close`` for all ranks."""
    wanted = expected_outputs(world.sizes, world.weights, tokens, clamp, activation)
    for rank, (mine, outputs) in enumerate(zip(tokens, wanted, strict=True)):
        check_close(rank, mine.out, outputs, world.sizes.fp8)


def run_calls(
    sizes: MegaSizes,
    policy: str,
    seed: int,
    calls: Sequence[tuple[list[int], str]],
    fused: bool = True,
    pool_blocks: int | None = None,
    **options: Any,
) -> list[list[Tokens]]:
    """Calls one after another, (tokens of each rank, routing): nothing of one may reach another."""
    sms = options.get("settings", SETTINGS).sms
    world, done = MegaWorld(sizes, fused, sms=sms, pool_blocks=pool_blocks), []
    for counts, routing in calls:
        tokens = make_tokens(sizes, counts, routing)
        add_mega_call(world, tokens, **options)
        done.append(tokens)
    world.run(policy, seed)
    assert not any(any(error) for error in world.errors)
    for tokens in done:
        check_outputs(world, tokens, options.get("clamp"), options.get("activation", "swiglu"))
    return done


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
    assert not any(scratch[name][:blocks].any() for name in ("pulled", "finished", "consumed"))

    heights = here.view(-1, 128).sum(1).tolist()
    owner = torch.repeat_interleave(torch.arange(sizes.local), -(-expected.counts // 128)).tolist()
    ups, downs, programs = plan.up_tiles, plan.down_tiles, settings.sms
    assert int(scratch["claimed"]) == programs
    words = scratch["tiles"][: blocks * (ups + downs)].tolist()
    order = [(w >> 24, b, w >> 8 & 255, w & 255, w >> 16 & 255) for w, b in words]
    everything = [
        (s, b, n, owner[b], heights[b]) for s in (0, 1) for b in range(blocks) for n in range((ups, downs)[s])
    ]
    assert sorted(order) == everything
    # An order that programs come to the end of with the smallest pool.
    short = [tile[:2] for tile in order]
    blocks_of = [owner.count(e) for e in range(sizes.local)]
    assert short == order_of_tiles(blocks_of, ups, downs, settings.group, settings.lag)
    assert not unfinished(short, programs, ups, downs, least_pool_blocks(settings))
