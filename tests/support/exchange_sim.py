"""Ranks of one NVLink domain in one process: symmetric memory on the CPU, and movements of rows under the simulator."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megamoe.config import MoEConfig
from megamoe.kernels import flag_words, peer_rows
from megamoe.kernels.layout import layout_pairs
from megamoe.kernels.peer_rows import Launch, PeerMemory, RowTable, peer_memory
from megamoe.kernels.quant import quantize_rowwise
from megamoe.kernels.reference import FP8_BLOCK
from megamoe.plan import MemoryPlan, plan_memory
from tests.support.gluon_sim import Simulation, run_streams

FP8 = torch.float8_e4m3fn
SMS = 2
BUDGET_NS = 10**9


@dataclass(frozen=True)
class Sizes:
    """A small world: ranks, tokens at most, slots, experts, columns."""

    ranks: int = 2
    tokens: int = 20
    top_k: int = 2
    experts: int = 4
    hidden: int = 160
    fp8: bool = False

    @property
    def config(self) -> MoEConfig:
        return MoEConfig(self.hidden, 128, self.experts, self.top_k, precision="fp8" if self.fp8 else "bf16")

    @property
    def local(self) -> int:
        return self.experts // self.ranks


class World:
    """The symmetric allocations of all ranks, and their launches to be run together.

    ``movements``: what all ranks have been given so far: D dispatch, C combine, M a mega-kernel's call.
    """

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        self.plan: MemoryPlan = plan_memory(sizes.config, sizes.ranks, sizes.tokens)
        # As large as needed: the smallest allocation on a GPU would only cost time here.
        used = self.plan.regions[-1].offset + self.plan.regions[-1].nbytes
        self.allocations = [torch.zeros(used, dtype=torch.uint8) for _ in range(sizes.ranks)]
        self.memories = [self._memory(rank) for rank in range(sizes.ranks)]
        self.streams: list[list] = [[] for _ in range(sizes.ranks)]
        self.movements = ""
        for rank in range(sizes.ranks):
            self.forget_slots(rank)

    def _memory(self, rank: int) -> PeerMemory:
        base = self.allocations[rank].data_ptr()
        deltas = torch.tensor([(other.data_ptr() - base) // 16 for other in self.allocations])
        views = {
            region.name: self.allocations[rank][region.offset : region.offset + region.nbytes]
            for region in self.plan.regions
        }
        return peer_memory(self.plan, views, rank, deltas, budget_ns=BUDGET_NS)

    def add(self, rank: int, launches: Sequence[Launch]) -> None:
        for launch in launches:
            self.streams[rank].append((launch.kernel, launch.grid, (), {**launch.arguments, **launch.options}))

    def forget_slots(self, rank: int, _: Simulation | None = None) -> None:
        """Nobody reads a rank's slots until they are written anew: NaN."""
        memory = self.memories[rank]
        memory.slots.view(torch.bfloat16).fill_(float("nan"))
        memory.slot_weights.fill_(float("nan"))

    def run(self, policy: str = "random", seed: int = 0, **options) -> Simulation:
        """Runs what was added; the memory stays for the next run."""
        streams, self.streams = self.streams, [[] for _ in self.streams]

        extra = {f"symmetric{rank}": allocation for rank, allocation in enumerate(self.allocations)}
        return run_streams(streams, policy=policy, seed=seed, extra=extra, **options)

    def run_until_given_up(self, seed: int, **options) -> Simulation:
        """Runs what was added on a device whose clock goes on: a wait that nothing ends is given up.

        Under a fair schedule, since a spinning program never sleeps then; and what is read afterwards may race.
        """

        def start_clock(simulation: Simulation) -> None:
            simulation.ns_per_look = BUDGET_NS // 2500

        return self.run("random", seed, setup=start_clock, race_check=False, max_steps=25_000, **options)

    @property
    def errors(self) -> list[list[int]]:
        return [memory.error.tolist() for memory in self.memories]


@dataclass
class Tokens:
    """One rank's inputs of a call, and where its results go."""

    x: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    table: RowTable | None = None
    rows: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    out: torch.Tensor | None = None
    out_weights: torch.Tensor | None = None


def make_tokens(sizes: Sizes, counts: Sequence[int], routing: str = "random") -> list[Tokens]:
    """Random tokens of each rank. ``routing``: random, one (all to the last expert), none, holes, twice (one expert in
    all of a token's slots), each (all experts in turn)."""
    out, first = [], 0
    order = torch.randperm(sizes.experts)
    for count in counts:
        scores = torch.rand(count, sizes.experts)
        index = scores.topk(sizes.top_k, dim=1).indices
        if routing == "one":
            index = torch.full_like(index, -1)
            index[:, 0] = sizes.experts - 1
        elif routing == "none":
            index = torch.full_like(index, -1)
        elif routing == "twice":
            index = index[:, :1].expand(-1, sizes.top_k).contiguous()
        elif routing == "each":
            index = order[(first + torch.arange(index.numel())) % sizes.experts].view(index.shape)
            first += index.numel()
        elif routing == "holes":
            holes = torch.rand(index.shape)
            index = torch.where(holes < 0.3, -1, torch.where(holes > 0.9, sizes.experts + 5, index))
        x = torch.randn(count, sizes.hidden).bfloat16()
        out.append(Tokens(x, index, torch.rand(count, sizes.top_k)))
    return out


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of NaN, or of the largest codes and numbers of a type that has none."""
    if dtype == FP8:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(FP8)
    return torch.full(shape, float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max, dtype=dtype)


def add_dispatch(
    world: World,
    tokens: list[Tokens],
    *,
    move: bool = True,
    reuse: bool = False,
    zero_padding: bool = True,
    capacity: int | None = None,
    ranks: Sequence[int] | None = None,
    sms: int = SMS,
) -> None:
    """Adds a dispatch of each rank's tokens, with poisoned results."""
    sizes, dtype = world.sizes, FP8 if world.sizes.fp8 else torch.bfloat16
    world.movements += "D" if ranks is None else ""
    for rank in range(sizes.ranks) if ranks is None else ranks:
        mine, memory = tokens[rank], world.memories[rank]
        rows = capacity or world.plan.most_rows
        if not reuse:
            mine.table = peer_rows.empty_table(memory, sizes.local, rows, torch.device("cpu"))
            for tensor in (mine.table.counts, mine.table.starts, mine.table.sizes, mine.table.pair_to_row):
                tensor.copy_(poisoned(*tensor.shape, dtype=tensor.dtype))
            mine.table.row_weights.fill_(float("nan"))
        mine.rows = poisoned(rows, sizes.hidden, dtype=dtype) if move else None
        groups = -(-sizes.hidden // FP8_BLOCK)
        mine.scales = poisoned(groups, rows, dtype=torch.float32).t() if move and sizes.fp8 else None
        launches = peer_rows.dispatch(
            memory,
            mine.x if move else None,
            None if reuse else (mine.index, mine.weights),
            mine.table,
            mine.rows,
            mine.scales,
            num_experts=sizes.experts,
            num_tokens=mine.x.shape[0],
            zero_padding=zero_padding,
            num_sms=sms,
            all_sms=sms,
        )
        world.add(rank, launches)


def make_tables(world: World, tokens: list[Tokens]) -> None:
    """What a dispatch of each rank's tokens leaves, but for the rows, without running it; before all else."""
    assert set(world.movements) <= {"D"} and not any(world.streams)
    world.movements += "D"
    sizes, epochs = world.sizes, len(world.movements)
    for rank, (mine, memory) in enumerate(zip(tokens, world.memories, strict=True)):
        table = peer_rows.empty_table(memory, sizes.local, world.plan.most_rows, torch.device("cpu"))
        expected = expected_rows(sizes, tokens, rank)
        table.counts.copy_(expected.counts)
        table.starts.copy_(expected.starts)
        table.sizes.copy_(torch.tensor([len(expected.source)] + [other.x.shape[0] for other in tokens]))
        table.pair_to_row.fill_(torch.iinfo(torch.int32).max)
        table.row_weights.fill_(float("nan"))
        for source, other in enumerate(tokens):
            named = (other.index >= 0) & (other.index < sizes.experts)
            pairs = table.pair_to_row[source, : other.x.shape[0]]
            pairs.copy_(torch.where(named, flag_words.ELSEWHERE, flag_words.NOWHERE))
            row = (expected.source == source).nonzero().flatten()
            pairs.view(-1)[expected.pair[row]] = row.int()
            table.row_weights[row] = other.weights.flatten()[expected.pair[row]]
        mine.table = table
        memory.state[flag_words.DISPATCHES] = epochs << flag_words.EPOCH_BITS
        flags = memory.flags.view(-1, flag_words.MAX_RANKS, flag_words.LINE_WORDS)[:, : sizes.ranks, 0]
        flags[flag_words.READY] = epochs << flag_words.EPOCH_BITS
        flags[flag_words.PULLED] = (epochs - 1) << flag_words.EPOCH_BITS


def add_combine(
    world: World,
    tokens: list[Tokens],
    rows: list[torch.Tensor] | None,
    row_weights: list[torch.Tensor] | None = None,
    *,
    ranks: Sequence[int] | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    sms: int = SMS,
) -> None:
    """Adds a combine of each rank's ``rows``, or one number of each, with poisoned results."""
    sizes = world.sizes
    world.movements += "C" if ranks is None else ""
    for rank in range(sizes.ranks) if ranks is None else ranks:
        mine = tokens[rank]
        count = mine.x.shape[0]
        mine.out = None if rows is None else poisoned(count, sizes.hidden, dtype=out_dtype)
        mine.out_weights = None if row_weights is None else poisoned(count, sizes.top_k, dtype=torch.float32)
        launches = peer_rows.combine(
            world.memories[rank],
            None if rows is None else rows[rank],
            None if row_weights is None else row_weights[rank],
            mine.index,
            mine.table,
            mine.out,
            mine.out_weights,
            num_experts=sizes.experts,
            num_sms=sms,
            all_sms=sms,
        )
        world.add(rank, launches)
        world.streams[rank].append(functools.partial(world.forget_slots, rank))


@dataclass
class Done:
    """A dispatch of all ranks' tokens, and the rows of a combine by its table."""

    tokens: list[Tokens]
    rows: list[torch.Tensor] | None = None


def add_movements(
    world: World,
    movements: str,
    counts: Sequence[Sequence[int]],
    routings: Sequence[str],
    sms: int = SMS,
    zero_padding: bool = True,
) -> list[Done]:
    """Adds movements: D dispatch, P a table without rows, R rows by the table before, C combine, T as ``make_tables``.

    A combine takes the first dispatch that has had none, or else the last one again. Each dispatch has other tokens:
    the next of ``counts`` and ``routings``, in turns.
    """
    done: list[Done] = []
    dispatches, combined = [], 0
    for movement in movements:
        if movement in "DPT":
            turn = len(dispatches)
            tokens = make_tokens(world.sizes, counts[turn % len(counts)], routings[turn % len(routings)])
            dispatches.append(tokens)
            if movement == "T":
                make_tables(world, tokens)
                continue
            add_dispatch(world, tokens, move=movement == "D", zero_padding=zero_padding, sms=sms)
            done.append(Done(tokens))
        elif movement == "R":
            add_dispatch(world, dispatches[-1], reuse=True, zero_padding=zero_padding, sms=sms)
        else:
            tokens = [replace(mine) for mine in dispatches[min(combined, len(dispatches) - 1)]]
            combined += 1
            # Results of the experts do not depend on the rows here, so that all runs in one simulation.
            rows = expert_results(world, tokens)
            add_combine(world, tokens, rows, [mine.table.row_weights for mine in tokens], sms=sms)
            done.append(Done(tokens, rows))
    return done


def check_movements(world: World, done: list[Done], zero_padding: bool = True) -> None:
    """Every result bit for bit, and no wait that was not needed."""
    assert not any(any(error) for error in world.errors)
    for each in done:
        if each.rows is None:
            check_dispatch(world, each.tokens, zero_padding=zero_padding)
        else:
            check_combine(world, each.tokens, each.rows)
            check_returned_weights(world, each.tokens)
    check_told(world)


def check_told(world: World) -> None:
    """Ranks have told that they have ended a movement where two of a kind follow one another, and only there."""
    dispatches = combines = dispatches_seen = combines_seen = pulled = reduced = 0
    for movement in world.movements:
        if movement in "DM":
            if dispatches_seen < dispatches:
                pulled = dispatches
            combines_seen = combines
            dispatches += 1
        if movement == "C" and combines_seen < combines:
            reduced = combines
        if movement in "CM":
            dispatches_seen = dispatches
            combines += 1
    ranks = world.sizes.ranks
    for memory in world.memories:
        flags = memory.flags.view(-1, flag_words.MAX_RANKS, flag_words.LINE_WORDS)[:, :ranks, 0]
        flags = flags >> flag_words.EPOCH_BITS
        assert flags[flag_words.PULLED].tolist() == [pulled] * ranks
        assert flags[flag_words.REDUCED].tolist() == [reduced] * ranks
        assert memory.state[flag_words.DISPATCHES_SEEN] == dispatches_seen
        assert memory.state[flag_words.COMBINES_SEEN] == combines_seen
        # Tickets and counters are as good as new.
        assert not memory.state[flag_words.SUMMED_TICKET :].any()


@dataclass(frozen=True)
class ExpectedRows:
    """What a rank must receive: pool rows by (expert, source rank, token, slot).

    Attributes:
        counts, starts: of each local expert.
        source, pair: int64 ``[P]``, source rank and t * K + k of each row, -1 = padding.
    """

    counts: torch.Tensor
    starts: torch.Tensor
    source: torch.Tensor
    pair: torch.Tensor


def expected_rows(sizes: Sizes, tokens: list[Tokens], rank: int) -> ExpectedRows:
    """The layout of a rank's rows, from the routing of all ranks at once."""
    index = torch.cat([mine.index for mine in tokens]).flatten()
    source = torch.cat([torch.full((mine.index.numel(),), r) for r, mine in enumerate(tokens)])
    pair = torch.cat([torch.arange(mine.index.numel()) for mine in tokens])
    local = index - rank * sizes.local
    layout, pair_to_row = layout_pairs(torch.where((local >= 0) & (local < sizes.local), local, -1), sizes.local)
    here = pair_to_row >= 0
    sources, pairs = (torch.full((layout.num_rows,), -1) for _ in range(2))
    sources[pair_to_row[here]], pairs[pair_to_row[here]] = source[here], pair[here]
    return ExpectedRows(layout.counts, layout.starts, sources, pairs)


def check_dispatch(world: World, tokens: list[Tokens], *, zero_padding: bool = True) -> None:
    """The rows, weights and layout of every rank, bit for bit."""
    sizes = world.sizes
    staged = [quantize_rowwise(mine.x) if sizes.fp8 else mine.x for mine in tokens]
    for rank, mine in enumerate(tokens):
        expected = expected_rows(sizes, tokens, rank)
        used = int(mine.table.sizes[0])
        assert torch.equal(mine.table.counts, expected.counts)
        assert torch.equal(mine.table.starts, expected.starts)
        assert mine.table.sizes.tolist() == [
            int((expected.counts + 127).div(128, rounding_mode="floor").sum()) * 128
        ] + [other.x.shape[0] for other in tokens]
        source, pair = expected.source[:used], expected.pair[:used]
        here = source >= 0
        for r, other in enumerate(tokens):
            mask = source == r
            token, slot = pair[mask] // sizes.top_k, pair[mask] % sizes.top_k
            assert torch.equal(mine.table.row_weights[:used][mask], other.weights[token, slot])
            if mine.rows is None:
                continue
            if sizes.fp8:
                codes = mine.rows[:used].view(torch.uint8)[mask]
                assert torch.equal(codes, staged[r].codes.view(torch.uint8)[token])
                assert torch.equal(mine.scales[:used][mask], staged[r].scales[token])
            else:
                assert torch.equal(mine.rows[:used][mask], staged[r][token])
        if zero_padding:
            assert not mine.table.row_weights[:used][~here].any()
            if mine.rows is not None:
                assert not mine.rows.view(torch.uint8)[:used][~here].any()
            if mine.scales is not None:
                assert not mine.scales[:used][~here].any()


def expert_results(world: World, tokens: list[Tokens]) -> list[torch.Tensor]:
    """Random rows for a combine; NaN where no row is."""
    out = []
    for rank, mine in enumerate(tokens):
        source = expected_rows(world.sizes, tokens, rank).source
        rows = torch.randn(mine.table.row_weights.numel(), world.sizes.hidden).bfloat16()
        rows[: len(source)][source[: len(rows)] < 0] = float("nan")
        out.append(rows)
    return out


def check_combine(world: World, tokens: list[Tokens], rows: list[torch.Tensor]) -> None:
    """Sums in fp32 over slots in ascending order, rounded once: bit for bit."""
    sizes = world.sizes
    totals = [torch.zeros(mine.x.shape[0], sizes.top_k, sizes.hidden) for mine in tokens]
    for rank in range(sizes.ranks):
        expected = expected_rows(sizes, tokens, rank)
        for row in (expected.source >= 0).nonzero().flatten().tolist():
            pair = int(expected.pair[row])
            totals[int(expected.source[row])][pair // sizes.top_k, pair % sizes.top_k] = rows[rank][row].float()
    for mine, slots in zip(tokens, totals, strict=True):
        total = torch.zeros(mine.x.shape[0], sizes.hidden)
        for slot in range(sizes.top_k):
            total += slots[:, slot]
        assert torch.equal(mine.out, total.to(mine.out.dtype))


def check_returned_weights(world: World, tokens: list[Tokens]) -> None:
    """Each slot has what its row sent: here the routing weight itself; 0 where nothing was sent."""
    for mine in tokens:
        sent = (mine.index >= 0) & (mine.index < world.sizes.experts)
        assert torch.equal(mine.out_weights, torch.where(sent, mine.weights, 0.0))
