"""``balance_placement``: a placement that spreads a measured load evenly over ranks, deterministic, in plain Python."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megamoe.errors import check_int, check_number, fail_type, fail_value
from megamoe.placement import ExpertPlacement

_GAIN = 1e-9
"""The least relative gain that a step of the refinement must bring: rounding is none."""


def balance_placement(
    load: torch.Tensor | Sequence[Any],
    ep_size: int,
    num_slots: int,
    *,
    redundant: int | None = None,
    num_groups: int = 1,
    ranks_per_node: int | None = None,
    previous: ExpertPlacement | Sequence[ExpertPlacement] | None = None,
    tolerance: float = 0.02,
) -> ExpertPlacement | list[ExpertPlacement]:
    """Places experts so that the most loaded rank has as little load as a greedy search finds.

    The expert with the highest load per replica is replicated until the slots are used up; the replicas go, heaviest
    first, to the least loaded rank with a free slot; then moves and swaps that lower the highest rank load are made for
    as long as there are any. Ties go to the lowest id: every rank computes the same. No rank gets two replicas of one
    expert: slots are left unused instead.

    Args:
        load: ``[E]`` or, for a placement per layer, ``[layers, E]``: rows per expert, as from ``expert_load``.
        ep_size: R, ranks.
        num_slots: slots per rank; R * num_slots >= E.
        redundant: at most so many replicas beyond one per expert; default: as many as the slots hold.
        num_groups: the router's groups of consecutive experts (``RouterConfig.num_groups``). With several nodes a group
            and its replicas stay on one node, so that group-limited routing limits the traffic between nodes.
        ranks_per_node: consecutive ranks that form a node; default: all. Load is spread over nodes first, replicas of
            one expert to different nodes, then over the ranks of each node.
        previous: the placement in use (one, or one per layer), to move few experts: the search then starts from it and
            ends early, and experts that stay on a rank keep their slots.
        tolerance: with ``previous``: a highest rank load relatively so much above that of a search from scratch is good
            enough; 0 accepts no loss of balance.

    Returns:
        An ``ExpertPlacement``, or a list of one per layer.

    Raises:
        MegaMoEError: a load that is not a finite number >= 0, or sizes that contradict each other.
    """
    layers, single = _read_load(load)
    sizes = _check_sizes(len(layers[0]), ep_size, num_slots, redundant, num_groups, ranks_per_node)
    check_number("tolerance", tolerance, 0.0)
    before: list[ExpertPlacement | None] = [None] * len(layers)
    if previous is not None:
        before = [previous] * len(layers) if isinstance(previous, ExpertPlacement) else list(previous)
        if len(before) != len(layers):
            rule = f"must be the {len(layers)} layers of load"
            fail_value("len(previous)", len(before), rule, "Pass one placement, or one per layer.")
        for placement in before:
            _check_previous(placement, sizes)
    found = [_balance(row, sizes, old, tolerance) for row, old in zip(layers, before, strict=True)]
    return found[0] if single else found


@dataclass(frozen=True)
class _Sizes:
    num_experts: int
    ep_size: int
    num_slots: int
    redundant: int
    num_groups: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        return self.ep_size // self.ranks_per_node

    @property
    def domains(self) -> int:
        """Sets of consecutive ranks to which experts are bound: the nodes where there are groups, else one."""
        return self.nodes if self.num_groups > 1 else 1

    @property
    def domain_ranks(self) -> int:
        return self.ep_size // self.domains


def _read_load(load: Any) -> tuple[list[list[float]], bool]:
    remedy = "Pass [E] or [layers, E] counts."
    try:
        tensor = torch.as_tensor(load, dtype=torch.float64).cpu()
    except (TypeError, ValueError, RuntimeError):
        fail_type("load", type(load).__name__, "must be a tensor or nested sequence of numbers", remedy)
    if tensor.dim() not in (1, 2) or tensor.numel() == 0:
        fail_value("load.shape", list(tensor.shape), "must be [E] or [layers, E], not empty", remedy)
    bad = tensor[~(tensor.isfinite() & (tensor >= 0))]
    if bad.numel():
        fail_value("load", float(bad[0]), "must be finite and >= 0", remedy)
    return (tensor[None] if tensor.dim() == 1 else tensor).tolist(), tensor.dim() == 1


def _check_sizes(
    num_experts: int, ep_size: int, num_slots: int, redundant: int | None, num_groups: int, ranks_per_node: int | None
) -> _Sizes:
    check_int("ep_size", ep_size, 1)
    check_int("num_slots", num_slots, 1)
    check_int("num_groups", num_groups, 1)
    spare = ep_size * num_slots - num_experts
    if spare < 0:
        rule = f"{ep_size} ranks have {ep_size * num_slots} slots for {num_experts} experts"
        fail_value("num_slots", num_slots, rule, f"Pass at least {-(-num_experts // ep_size)}.")
    if redundant is not None:
        check_int("redundant", redundant, 0)
    if ranks_per_node is not None:
        check_int("ranks_per_node", ranks_per_node, 1)
        if ep_size % ranks_per_node:
            rule = f"must divide ep_size = {ep_size}"
            fail_value("ranks_per_node", ranks_per_node, rule, "Pass the number of ranks of each node.")
    if num_experts % num_groups:
        rule = f"must divide the {num_experts} experts"
        fail_value("num_groups", num_groups, rule, "Pass the router's num_groups.")
    extra = spare if redundant is None else min(redundant, spare)
    sizes = _Sizes(num_experts, ep_size, num_slots, extra, num_groups, ranks_per_node or ep_size)
    if num_groups > 1 and num_groups % sizes.nodes:
        rule = f"must be a multiple of the {sizes.nodes} nodes"
        fail_value("num_groups", num_groups, rule, "Pass num_groups=1 to spread experts without regard to groups.")
    return sizes


def _check_previous(placement: Any, sizes: _Sizes) -> None:
    if not isinstance(placement, ExpertPlacement):
        rule = "must be an ExpertPlacement"
        fail_type("previous", type(placement).__name__, rule, "Pass the placement in use, or None.")
    have, wanted = (placement.num_experts, placement.ep_size), (sizes.num_experts, sizes.ep_size)
    if have != wanted:
        fail_value("previous (experts, ranks)", have, f"must be {wanted}", "Pass the placement in use, or None.")


# ---------------------------------------------------------------- bins


class _Bins:
    """Experts in bins of limited size; their loads.

    Args:
        shares: load of a replica of each expert.
        limits: how often a bin may hold each expert; default: once.
    """

    def __init__(self, shares: dict[int, float], count: int, size: int, limits: dict[int, int] | None = None):
        self.shares = shares
        self.size = size
        self.limits = limits or {}
        self.bins: list[list[int]] = [[] for _ in range(count)]
        self.loads = [0.0] * count

    def admits(self, index: int, expert: int) -> bool:
        return self.bins[index].count(expert) < self.limits.get(expert, 1)

    def has_room(self, index: int) -> bool:
        return len(self.bins[index]) < self.size

    def add(self, index: int, expert: int) -> None:
        self.bins[index].append(expert)
        self._sum(index)

    def remove(self, index: int, expert: int) -> None:
        self.bins[index].remove(expert)
        self._sum(index)

    def _sum(self, index: int) -> None:
        # Exactly rounded, so that equal contents have equal loads whatever the order.
        self.loads[index] = math.fsum(self.shares[expert] for expert in self.bins[index])

    def fill(self, experts: list[int]) -> None:
        """Adds all, heaviest first, each to the least loaded bin that may take it."""
        for expert in sorted(experts, key=lambda expert: (-self.shares[expert], expert)):
            able = [i for i in range(len(self.bins)) if self.has_room(i) and self.admits(i, expert)]
            if able:
                self.add(min(able, key=lambda i: (self.loads[i], i)), expert)
            else:
                self._make_room(expert)

    def _make_room(self, expert: int) -> None:
        """Every bin with room is at its limit of ``expert``: a full bin that is not takes it, and gives one away."""
        room = min((i for i in range(len(self.bins)) if self.has_room(i)), key=lambda i: (self.loads[i], i))
        # There is a choice: a full bin has more experts than one with room, so one that the latter may still take.
        choices = []
        for index in range(len(self.bins)):
            for other in sorted(set(self.bins[index])) if self.admits(index, expert) else ():
                if self.admits(room, other):
                    after = self.loads[index] - self.shares[other] + self.shares[expert]
                    choices.append((max(self.loads[room] + self.shares[other], after), index, other))
        _, index, other = min(choices)
        self.remove(index, other)
        self.add(room, other)
        self.add(index, expert)

    def refine(self, goal: float = 0.0) -> None:
        """Moves and swaps with the fullest bin for as long as they lower its load and it is above ``goal``."""
        for _ in range(4 * sum(map(len, self.bins))):
            top = max(range(len(self.bins)), key=lambda i: (self.loads[i], -i))
            step = self._best_step(top) if self.loads[top] > goal else None
            if step is None:
                return
            other, given, taken = step
            self.remove(top, given)
            if taken is not None:
                self.remove(other, taken)
                self.add(top, taken)
            self.add(other, given)

    def _best_step(self, top: int) -> tuple[int, int, int | None] | None:
        """(other bin, expert given to it, expert taken from it or None), or None where no step helps."""
        best, bound = None, self.loads[top] * (1 - _GAIN)
        for other in range(len(self.bins)):
            gap = self.loads[top] - self.loads[other]
            if gap <= 0:
                continue
            theirs = sorted({(self.shares[expert], expert) for expert in self.bins[other]})
            for given in sorted(set(self.bins[top])):
                if not self.admits(other, given):
                    continue
                # Best is to move half the gap: the neighbours of that on both sides that are allowed.
                middle = bisect_left(theirs, (self.shares[given] - gap / 2, -1))
                options: list[int | None] = [None] if self.has_room(other) else []
                for side in (theirs[:middle][::-1], theirs[middle:]):
                    options += [expert for _, expert in side if self.admits(top, expert)][:1]
                for taken in options:
                    moved = self.shares[given] - (0.0 if taken is None else self.shares[taken])
                    after = max(self.loads[top] - moved, self.loads[other] + moved)
                    if after < bound:
                        best, bound = (other, given, taken), after
        return best


# ---------------------------------------------------------------- search


def _balance(load: list[float], sizes: _Sizes, old: ExpertPlacement | None, tolerance: float) -> ExpertPlacement:
    # Experts without load count as a trace of it: they too should be spread.
    trace = (math.fsum(load) or 1.0) * 1e-12
    load = [max(value, trace) for value in load]
    found = _from_scratch(load, sizes)
    if old is None:
        ranks = [sorted(experts) for rank_bins in found for experts in rank_bins.bins]
    else:
        goal = [max(bins.loads) * (1 + tolerance) for bins in found]
        near = _from_previous(load, sizes, old, max(goal))
        if near is None or max(max(bins.loads) for bins in near) > max(goal):
            ranks = _match_ranks([experts for bins in found for experts in bins.bins], old, sizes.ranks_per_node)
        else:
            ranks = [experts for bins in near for experts in bins.bins]
        ranks = [_keep_slots(experts, had) for experts, had in zip(ranks, old.experts_by_rank, strict=True)]
    return ExpertPlacement(sizes.num_experts, ranks, sizes.num_slots)


def _domains_of_groups(load: list[float], sizes: _Sizes) -> list[int]:
    """The domain of each expert; equally many groups in each."""
    size = sizes.num_experts // sizes.num_groups
    sums = {group: math.fsum(load[group * size : (group + 1) * size]) for group in range(sizes.num_groups)}
    bins = _Bins(sums, sizes.domains, -(-sizes.num_groups // sizes.domains))
    bins.fill(list(sums))
    bins.refine()
    domain = {group: index for index, groups in enumerate(bins.bins) for group in groups}
    return [domain[expert // size] for expert in range(sizes.num_experts)]


def _count_replicas(load: list[float], sizes: _Sizes, domain_of: list[int]) -> list[int]:
    """Replicas per expert: one more for whoever has the highest load per replica, while its domain has slots."""
    spare = [sizes.domain_ranks * sizes.num_slots - domain_of.count(domain) for domain in range(sizes.domains)]
    counts = [1] * sizes.num_experts
    heap = [(-value, expert) for expert, value in enumerate(load)]
    heapq.heapify(heap)
    left = sizes.redundant
    while left and heap:
        _, expert = heapq.heappop(heap)
        domain = domain_of[expert]
        # A second replica on one rank would take load from nobody.
        if counts[expert] < sizes.domain_ranks and spare[domain]:
            counts[expert] += 1
            spare[domain] -= 1
            left -= 1
            heapq.heappush(heap, (-load[expert] / counts[expert], expert))
    return counts


def _from_scratch(load: list[float], sizes: _Sizes) -> list[_Bins]:
    """For each node its ranks and their experts."""
    domain_of = _domains_of_groups(load, sizes)
    counts = _count_replicas(load, sizes, domain_of)
    shares = {expert: load[expert] / counts[expert] for expert in range(sizes.num_experts)}
    replicas = [expert for expert in range(sizes.num_experts) for _ in range(counts[expert])]
    if sizes.domains == sizes.nodes:
        nodes = [[expert for expert in replicas if domain_of[expert] == node] for node in range(sizes.nodes)]
    else:
        limits = {expert: -(-counts[expert] // sizes.nodes) for expert in shares}
        over_nodes = _Bins(shares, sizes.nodes, sizes.ranks_per_node * sizes.num_slots, limits)
        over_nodes.fill(replicas)
        over_nodes.refine()
        nodes = over_nodes.bins
    found = [_Bins(shares, sizes.ranks_per_node, sizes.num_slots) for _ in nodes]
    for bins, experts in zip(found, nodes, strict=True):
        bins.fill(experts)
        bins.refine()
    return found


def _from_previous(load: list[float], sizes: _Sizes, old: ExpertPlacement, goal: float) -> list[_Bins] | None:
    """For each domain its ranks and their experts: those of ``old``, but with as many replicas as the load asks for,
    refined down to ``goal``. None where ``old`` breaks a rule of the search."""
    ranks = sizes.domain_ranks
    homes = [{old.rank_of(physical) // ranks for physical in replicas} for replicas in old.replicas]
    size = sizes.num_experts // sizes.num_groups
    if any(len(home | homes[expert // size * size]) > 1 for expert, home in enumerate(homes)) and sizes.domains > 1:
        return None
    if any(len(experts) > sizes.num_slots or len(set(experts)) < len(experts) for experts in old.experts_by_rank):
        return None
    domain_of = [min(home) for home in homes]
    counts = _count_replicas(load, sizes, domain_of)
    shares = {expert: load[expert] / counts[expert] for expert in range(sizes.num_experts)}
    found = []
    for domain in range(sizes.domains):
        bins = _Bins(shares, ranks, sizes.num_slots)
        for rank in range(ranks):
            for expert in old.experts_by_rank[domain * ranks + rank]:
                bins.add(rank, expert)
        missing: list[int] = []
        for expert in (expert for expert in range(sizes.num_experts) if domain_of[expert] == domain):
            holders = [rank for rank in range(ranks) if expert in bins.bins[rank]]
            missing += [expert] * (counts[expert] - len(holders))
            while len(holders) > counts[expert]:
                fullest = max(holders, key=lambda rank: (bins.loads[rank], -rank))
                holders.remove(fullest)
                bins.remove(fullest, expert)
        bins.fill(missing)
        bins.refine(goal)
        found.append(bins)
    return found


def _match(new: list[set[int]], old: list[set[int]]) -> list[int]:
    """For each of ``old`` the index of one of ``new``, each once: greedily those with most in common."""
    pairs = [(-len(theirs & ours), i, j) for i, theirs in enumerate(old) for j, ours in enumerate(new)]
    partner: dict[int, int] = {}
    for _, i, j in sorted(pairs):
        if i not in partner and j not in partner.values():
            partner[i] = j
    return [partner[i] for i in range(len(old))]


def _match_ranks(ranks: list[list[int]], old: ExpertPlacement, per_node: int) -> list[list[int]]:
    """``ranks`` in an order in which as many experts as possible stay: nodes change places, and ranks within each."""
    starts = range(0, len(ranks), per_node)
    new_nodes = [ranks[start : start + per_node] for start in starts]
    old_nodes = [old.experts_by_rank[start : start + per_node] for start in starts]
    order = _match([set().union(*node) for node in new_nodes], [set().union(*node) for node in old_nodes])
    matched = []
    for had, index in zip(old_nodes, order, strict=True):
        node = new_nodes[index]
        matched += [node[j] for j in _match(list(map(set, node)), list(map(set, had)))]
    return matched


def _keep_slots(experts: list[int], had: Sequence[int]) -> list[int]:
    """``experts`` in slot order: those that the rank ``had`` in the slots they had, as far as they are still there."""
    slots: list[int | None] = [None] * len(experts)
    for slot, expert in enumerate(had[: len(experts)]):
        if expert in experts and expert not in slots:
            slots[slot] = expert
    rest = iter(sorted(set(experts).difference(slots)))
    return [next(rest) if expert is None else expert for expert in slots]
