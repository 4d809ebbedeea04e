"""``ExpertPlacement``: which rank holds which experts, uneven or with replicas; pure data, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megamoe.errors import check_int, fail_type, fail_value

_KEYS = ("num_experts", "num_slots", "experts_by_rank")


@dataclass(frozen=True)
class ExpertPlacement:
    """A map from E logical experts (the router's ids) to physical slots on R ranks.

    Every rank has ``num_slots`` slots, numbered through: slot s of rank r is physical expert ``r * num_slots + s``. An
    expert may have several slots (replicas), on different ranks or on one; a rank may leave its last slots unused, and
    so hold fewer experts than others.

    Attributes:
        num_experts: E.
        experts_by_rank: for each rank the logical expert of its slots, in slot order, unused slots left out.
        num_slots: slots per rank; 0 (default) = as many as the fullest rank uses. A fixed number keeps all shapes, and
            with them captured CUDA graphs, through later placements.

    Raises:
        MegaMoEError: not a placement: an id outside ``[0, E)``, an expert without a slot, a rank with too many.
    """

    num_experts: int
    experts_by_rank: tuple[tuple[int, ...], ...]
    num_slots: int = 0

    def __post_init__(self) -> None:
        check_int("num_experts", self.num_experts, 1)
        check_int("num_slots", self.num_slots, 0)
        remedy = "Pass one list of expert ids per rank."
        if not _is_list(self.experts_by_rank):
            fail_type("experts_by_rank", self.experts_by_rank, "must be a sequence of sequences", remedy)
        if not self.experts_by_rank:
            fail_value("experts_by_rank", self.experts_by_rank, "must have a list for at least one rank", remedy)
        for rank, experts in enumerate(self.experts_by_rank):
            if not _is_list(experts):
                fail_type(f"experts_by_rank[{rank}]", experts, "must be a sequence of expert ids", remedy)
            for slot, expert in enumerate(experts):
                name = f"experts_by_rank[{rank}][{slot}]"
                if isinstance(expert, bool) or not isinstance(expert, int):
                    fail_type(name, expert, "must be an integer", remedy)
                if not 0 <= expert < self.num_experts:
                    fail_value(name, expert, f"must be in [0, {self.num_experts})", "Ids are the router's, from 0.")
        object.__setattr__(self, "experts_by_rank", tuple(map(tuple, self.experts_by_rank)))
        missing = sorted(set(range(self.num_experts)).difference(*self.experts_by_rank))
        if missing:
            fail_value("experts without a slot", missing, "must be none", "Give every expert a slot on some rank.")
        used = [len(experts) for experts in self.experts_by_rank]
        if self.num_slots == 0:
            object.__setattr__(self, "num_slots", max(used))
        if max(used) > self.num_slots:
            fail_value(
                "num_slots",
                self.num_slots,
                f"must be at least the {max(used)} experts of rank {used.index(max(used))}",
                "Raise num_slots or move experts to other ranks.",
            )

    @classmethod
    def even(cls, num_experts: int, ep_size: int, num_slots: int = 0) -> ExpertPlacement:
        """Consecutive experts, equally many per rank: the placement of a new layer. Where R does not divide E, the
        first ranks hold one more.

        Raises:
            MegaMoEError: a number is out of range.
        """
        check_int("num_experts", num_experts, 1)
        check_int("ep_size", ep_size, 1)
        share, more = divmod(num_experts, ep_size)
        starts = [rank * share + min(rank, more) for rank in range(ep_size + 1)]
        lists = (tuple(range(start, end)) for start, end in zip(starts, starts[1:], strict=False))
        return cls(num_experts, tuple(lists), num_slots)

    @classmethod
    def from_lists(cls, experts_by_rank: Sequence[Sequence[int]], num_slots: int = 0) -> ExpertPlacement:
        """The placement with these experts on each rank; E is the highest id + 1.

        Raises:
            MegaMoEError: not a placement.
        """
        ids = [i for experts in experts_by_rank for i in experts] if _is_list_of_lists(experts_by_rank) else []
        highest = max((i for i in ids if isinstance(i, int)), default=0)
        return cls(max(highest, 0) + 1, experts_by_rank, num_slots)

    @property
    def ep_size(self) -> int:
        """R, the number of ranks."""
        return len(self.experts_by_rank)

    @property
    def num_physical(self) -> int:
        """R * num_slots: the number of physical experts, unused slots included."""
        return self.ep_size * self.num_slots

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """For each expert its physical ids, ascending; at least one."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank, experts in enumerate(self.experts_by_rank):
            for slot, expert in enumerate(experts):
                found[expert].append(rank * self.num_slots + slot)
        return tuple(map(tuple, found))

    def rank_of(self, physical: int) -> int:
        """The rank of a physical expert."""
        return physical // self.num_slots

    @cached_property
    def is_default(self) -> bool:
        """Whether this is how a new layer lies: ``even``, with R dividing E and no slot to spare."""
        return self.num_physical == self.num_experts and self == ExpertPlacement.even(self.num_experts, self.ep_size)

    def rank_loads(self, load: Sequence[float]) -> list[float]:
        """The load of each rank where ``load [E]`` is split evenly over the replicas of each expert.

        Raises:
            MegaMoEError: ``load`` has another length.
        """
        if len(load) != self.num_experts:
            fail_value("len(load)", len(load), f"must be num_experts = {self.num_experts}", "Pass the load per expert.")
        share = [float(value) / len(replicas) for value, replicas in zip(load, self.replicas, strict=True)]
        return [sum(share[expert] for expert in experts) for experts in self.experts_by_rank]

    def imbalance(self, load: Sequence[float]) -> float:
        """Maximum over mean of ``rank_loads(load)``: 1 is balanced, R all on one rank; 1 without any load."""
        loads = self.rank_loads(load)
        return max(loads) * self.ep_size / sum(loads) if any(loads) else 1.0

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; ``from_dict`` reads it back."""
        lists = [list(experts) for experts in self.experts_by_rank]
        return {"num_experts": self.num_experts, "num_slots": self.num_slots, "experts_by_rank": lists}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ExpertPlacement:
        """The inverse of ``to_dict``.

        Raises:
            MegaMoEError: a missing or unknown key, or not a placement.
        """
        if not isinstance(values, dict):
            fail_type("ExpertPlacement", values, "must be a dict", "Pass what to_dict() returned.")
        if set(values) != set(_KEYS):
            rule = f"must be {', '.join(_KEYS)}"
            fail_value("ExpertPlacement keys", sorted(map(str, values)), rule, "Pass what to_dict() returned.")
        return cls(**values)


def copies_to_move(old: ExpertPlacement, new: ExpertPlacement) -> int:
    """How many slots of ``new`` hold an expert that ``old`` does not have on the same rank: copies between ranks."""
    pairs: Iterable = zip(old.experts_by_rank, new.experts_by_rank, strict=True)
    return sum(expert not in had for had, experts in pairs for expert in experts)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_list_of_lists(value: Any) -> bool:
    return _is_list(value) and all(map(_is_list, value))
