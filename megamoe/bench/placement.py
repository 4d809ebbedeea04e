"""Load of the ranks under skewed routing, before and after placing experts by their load; a simulation, without a GPU.

Run: python -m megamoe bench placement [--experts 256 --ranks 8 --redundant 0.1 --zipf 1.0 --drift 0.01]. Tokens choose
experts, each rank's router table chooses replicas, and rows are counted where they arrive. A placement is made from the
rows of one period and judged by those of the next.
"""

from __future__ import annotations

import csv
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from megamoe.errors import check_int, check_number, fail_value
from megamoe.layers.replicas import ExpertSlots
from megamoe.placement import ExpertPlacement, copies_to_move
from megamoe.placement_search import balance_placement

POLICIES = ("even", "greedy", "balanced")
"""No placement; the usual greedy one, made anew each time; ``balance_placement`` from the placement in use."""

LIMIT = 1.1
"""What the highest over mean rank load should stay below."""


@dataclass(frozen=True)
class Simulation:
    """What is simulated.

    Attributes:
        experts, ranks, top_k: E, R, K.
        redundant: replicas beyond one per expert, as a share of E.
        zipf: popularity of the n-th expert is n^-zipf; a token's K experts differ.
        drift: share of the experts that change popularity with another one at each step.
        steps, period: steps in all, and between two placements.
        tokens: per rank and step.
        seed: of all random numbers.
    """

    experts: int = 256
    ranks: int = 8
    top_k: int = 8
    redundant: float = 0.1
    zipf: float = 1.0
    drift: float = 0.0
    steps: int = 60
    period: int = 10
    tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("experts", "ranks", "top_k", "period", "tokens"):
            check_int(name, getattr(self, name), 1)
        check_int("seed", self.seed, 0)
        for name in ("redundant", "zipf", "drift"):
            check_number(name, getattr(self, name), 0.0)
        if self.top_k > self.experts:
            fail_value("top_k", self.top_k, f"must not exceed experts = {self.experts}", "Lower top_k.")
        check_int("steps", self.steps, self.period + 1)

    @property
    def num_redundant(self) -> int:
        """Replicas beyond one per expert."""
        return math.floor(self.experts * self.redundant)

    @property
    def num_slots(self) -> int:
        """Slots per rank."""
        return -(-(self.experts + self.num_redundant) // self.ranks)

    def place(self, policy: str, load: list[float], previous: ExpertPlacement) -> ExpertPlacement:
        """The next placement of a policy."""
        if policy == "even":
            return previous
        if policy == "greedy":
            return greedy_placement(load, self.ranks, self.num_slots, self.num_redundant)
        extra = dict(redundant=self.num_redundant, previous=previous)
        return balance_placement(load, self.ranks, self.num_slots, **extra)


def greedy_placement(load: list[float], ranks: int, num_slots: int, redundant: int) -> ExpertPlacement:
    """The usual greedy: a replica more for the expert with most load per replica, then each replica, heaviest first,
    to the rank with least load that has a free slot."""
    counts = [1] * len(load)
    for _ in range(redundant):
        counts[max(range(len(load)), key=lambda expert: load[expert] / counts[expert])] += 1
    replicas = [(load[expert] / count, expert) for expert, count in enumerate(counts) for _ in range(count)]
    experts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for share, expert in sorted(replicas, reverse=True):
        rank = min((rank for rank in range(ranks) if len(experts[rank]) < num_slots), key=lambda rank: loads[rank])
        experts[rank].append(expert)
        loads[rank] += share
    return ExpertPlacement(len(load), experts, num_slots)


class Traffic:
    """Tokens that choose K different experts by Zipf's law; ``step`` draws those of one step and lets the law drift."""

    def __init__(self, simulation: Simulation):
        self.simulation = simulation
        self.generator = torch.Generator().manual_seed(simulation.seed)
        popularity = -simulation.zipf * torch.arange(1, simulation.experts + 1).log()
        self.log_popularity = popularity[torch.randperm(simulation.experts, generator=self.generator)]

    def step(self) -> torch.Tensor:
        """int64 ``[R, T, K]``."""
        sizes = self.simulation
        shape = (sizes.ranks, sizes.tokens, sizes.experts)
        # The largest of log p + Gumbel noise are a sample without replacement.
        noise = torch.empty(shape).exponential_(generator=self.generator).log()
        chosen = (self.log_popularity - noise).topk(sizes.top_k, dim=-1).indices
        swapped = torch.rand(sizes.experts, generator=self.generator) < sizes.drift
        ids = swapped.nonzero().flatten()
        partners = torch.randint(sizes.experts, ids.shape, generator=self.generator)
        for expert, partner in zip(ids.tolist(), partners.tolist(), strict=True):
            self.log_popularity[[expert, partner]] = self.log_popularity[[partner, expert]]
        return chosen


def tables_of(placement: ExpertPlacement) -> list[ExpertSlots]:
    """The tables of all ranks."""
    tables = [ExpertSlots(placement, rank, torch.device("cpu")) for rank in range(placement.ep_size)]
    for slots in tables:
        slots.assign(placement)
    return tables


def received(tables: list[ExpertSlots], index: torch.Tensor) -> torch.Tensor:
    """int64 ``[R]``: rows that each rank receives of ``index [R, T, K]``, replicas chosen as the layer chooses them."""
    placement = tables[0].placement
    rows = torch.zeros(placement.num_physical, dtype=torch.int64)
    for slots, topk_index in zip(tables, index, strict=True):
        rows += slots.translate(topk_index).flatten().bincount(minlength=placement.num_physical)
    return rows.view(placement.ep_size, placement.num_slots).sum(dim=1)


def simulate(simulation: Simulation) -> list[dict[str, object]]:
    """One row per step and policy: ``rows`` received per rank, ``imbalance`` (highest over mean), and the copies
    ``moved`` between ranks before the step."""
    traffic = Traffic(simulation)
    tables = dict.fromkeys(POLICIES, tables_of(ExpertPlacement.even(simulation.experts, simulation.ranks)))
    load = torch.zeros(simulation.experts, dtype=torch.int64)
    records = []
    for step in range(simulation.steps):
        moved = dict.fromkeys(POLICIES, 0)
        if step and step % simulation.period == 0:
            for policy, (slots, *_) in tables.items():
                placement = simulation.place(policy, load.tolist(), slots.placement)
                moved[policy] = copies_to_move(slots.placement, placement)
                tables[policy] = tables_of(placement)
            load.zero_()
        index = traffic.step()
        load += index.flatten().bincount(minlength=simulation.experts)
        for policy, each in tables.items():
            rows = received(each, index)
            imbalance = float(rows.max() / rows.double().mean())
            record = {"step": step, "policy": policy, "imbalance": imbalance, "moved": moved[policy]}
            records.append({**record, "rows": rows.tolist()})
    return records


def summary(simulation: Simulation, records: list[dict[str, object]]) -> list[dict[str, object]]:
    """One row per policy over the steps after the first placement; ``imbalance`` is that of all their rows."""
    rows = []
    for policy in POLICIES:
        later = [r for r in records if r["policy"] == policy and r["step"] >= simulation.period]
        total = [sum(column) for column in zip(*(record["rows"] for record in later), strict=True)]
        moves = [record["moved"] for record in later if record["step"] % simulation.period == 0]
        rows.append(
            {
                "policy": policy,
                "imbalance": round(max(total) * len(total) / sum(total), 4),
                "mean step": round(statistics.fmean(record["imbalance"] for record in later), 4),
                "worst step": round(max(record["imbalance"] for record in later), 4),
                "first moves": moves[0],
                "later moves": round(statistics.fmean(moves[1:]), 1) if moves[1:] else 0.0,
                "load per rank": [round(value * len(total) / sum(total), 3) for value in total],
            }
        )
    return rows


def _print(simulation: Simulation, rows: list[dict[str, object]]) -> None:
    title = (
        f"{simulation.experts} experts on {simulation.ranks} ranks, top-{simulation.top_k}, Zipf {simulation.zipf}, "
        f"{simulation.num_redundant} replicas more in {simulation.num_slots} slots a rank, drift {simulation.drift}"
    )
    table = Table(*rows[0], title=title)
    for row in rows:
        shares = " ".join(f"{share:.2f}" for share in row["load per rank"][:16])
        more = " ..." if len(row["load per rank"]) > 16 else ""
        table.add_row(*(str(row[name]) for name in list(row)[:-1]), shares + more)
    Console(width=160).print(table)
    after = rows[-1]["mean step"]
    print(f"highest / mean rank load per step: {rows[0]['mean step']:.3f} before, {after:.3f} after", end=" ")
    print(f"(wanted: below {LIMIT}{'' if after < LIMIT else ', MISSED'})")


def _write(records: list[dict[str, object]], folder: Path) -> None:
    with open(folder / "placement.csv", "w", newline="") as file:
        writer = csv.writer(file)
        ranks = [f"rows_rank_{rank}" for rank in range(len(records[0]["rows"]))]
        writer.writerow(["step", "policy", "imbalance", "moved", *ranks])
        for record in records:
            fields = [record["step"], record["policy"], round(record["imbalance"], 5), record["moved"]]
            writer.writerow([*fields, *record["rows"]])


def _plot(
    simulation: Simulation, records: list[dict[str, object]], rows: list[dict[str, object]], folder: Path
) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        print("no plot: matplotlib is not installed (pip install 'megamoe[plot]')")
        return
    colours = dict(zip(POLICIES, ("#c44e2b", "#b0b0b0", "#3b78b5"), strict=True))
    figure, (bars, lines) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for place, row in enumerate(rows):
        width = 0.8 / len(rows)
        ranks = [rank + (place - 1) * width for rank in range(simulation.ranks)]
        label = f"{row['policy']} (max {max(row['load per rank']):.2f})"
        bars.bar(ranks, row["load per rank"], width, color=colours[row["policy"]], label=label)
    bars.set(title="Rows received per rank", xlabel="rank", ylabel="relative to the mean")
    for policy in POLICIES:
        mine = [record for record in records if record["policy"] == policy]
        steps = [record["step"] for record in mine]
        lines.plot(steps, [record["imbalance"] for record in mine], color=colours[policy], label=policy, linewidth=1.6)
    lines.axhline(LIMIT, color="black", linewidth=0.8, linestyle="--", label=f"{LIMIT}")
    for step in range(simulation.period, simulation.steps, simulation.period):
        lines.axvline(step, color="#e0e0e0", linewidth=0.8, zorder=0)
    top = 1.15 * max(record["imbalance"] for record in records)
    lines.set(title="Highest / mean rank load", xlabel="step (grey: new placement)", ylim=(0.95, top))
    for axes, columns in ((bars, 1), (lines, 4)):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, ncols=columns)
    figure.savefig(folder / "placement.png", dpi=110)
    pyplot.close(figure)


def run(simulation: Simulation, folder: Path) -> list[dict[str, object]]:
    """Simulates, prints, and writes ``placement.csv`` and ``placement.png`` into ``folder``."""
    records = simulate(simulation)
    rows = summary(simulation, records)
    _print(simulation, rows)
    folder.mkdir(parents=True, exist_ok=True)
    _write(records, folder)
    _plot(simulation, records, rows, folder)
    return rows
