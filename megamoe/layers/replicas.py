"""``ExpertSlots``: from the router's expert ids to the slots that hold the experts, and what each rank received."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megamoe.placement import ExpertPlacement
from megamoe.types import ExpertLayout


def choose_replicas(
    topk_index: torch.Tensor, first: torch.Tensor, count: torch.Tensor, replicas: torch.Tensor
) -> torch.Tensor:
    """Physical ids of ``topk_index [T, K]``: in token order, the uses of an expert take its replicas in turn.

    So each replica of an expert gets the same number of this rank's rows, or one more. A function of its arguments with
    static shapes and without a host synchronisation: CUDA graphs capture it.

    Args:
        topk_index: int64 ``[T, K]``, logical ids; those outside ``[0, E)`` become -1.
        first, count: int64 ``[E]``: replicas of expert e are ``replicas[first[e] : first[e] + count[e]]``.
        replicas: int64 ``[R * slots]``, physical ids, the first to be used first.
    """
    num_experts = first.numel()
    index = topk_index.flatten()
    valid = (index >= 0) & (index < num_experts)
    expert = index.clamp(0, num_experts - 1)
    place = first[expert]
    if replicas.numel() > num_experts:
        # Stable, so that uses of one expert stay in token order; ids without an expert go last.
        ordered, order = torch.sort(torch.where(valid, index, num_experts), stable=True)
        turn = torch.arange(index.numel(), device=index.device) - torch.searchsorted(ordered, ordered)
        turn = torch.empty_like(index).scatter_(0, order, turn)
        place = place + turn % count[expert]
    return torch.where(valid, replicas[place], -1).view(topk_index.shape)


class ExpertSlots:
    """The placement that a layer is under, as tables on its device, and its counters.

    A captured CUDA graph sees later placements with as many slots: the tables are overwritten, not replaced. A rank's
    own replica of an expert comes first in its table, the others in turn, from a place that differs between ranks: what
    an even split leaves over stays on the rank where it can, else it goes to different replicas from different ranks.

    Attributes:
        placement: the placement in force; is_default: whether it is that of a new layer.
        rows_received: int64 ``[E]``: rows that this rank's replicas of each logical expert received in evaluation mode.

    Args:
        placement: the first one, that of a new layer: its physical ids are the logical ones.
        rank: of this process in the expert-parallel group.
    """

    # Not a module with buffers: these differ between ranks, and DDP overwrites buffers with those of rank 0.
    _TENSORS = ("first", "count", "replicas", "expert_of_slot", "rows_received")

    def __init__(self, placement: ExpertPlacement, rank: int, device: torch.device):
        self.placement = placement
        self.rank = rank
        self.is_default = placement.is_default
        self.translates = False
        for name, values in self._tables().items():
            setattr(self, name, torch.tensor(values, dtype=torch.int64, device=device))
        self.rows_received = torch.zeros(placement.num_experts, dtype=torch.int64, device=device)

    def assign(self, placement: ExpertPlacement) -> None:
        """Translates ids by ``placement`` from now on."""
        self.placement = placement
        self.is_default = placement.is_default
        # For good, also back under the first placement: a captured graph keeps what it does.
        self.translates = True
        self._write_tables()

    def reset(self) -> None:
        """Writes the tables again, after ``to_empty``, say, and zeroes the counters."""
        self._write_tables()
        self.rows_received.zero_()

    def _write_tables(self) -> None:
        for name, values in self._tables().items():
            table, values = getattr(self, name), torch.tensor(values, dtype=torch.int64)
            if table.shape == values.shape:
                table.copy_(values)
            else:
                setattr(self, name, values.to(table.device))

    @property
    def held(self) -> tuple[int, ...]:
        """This rank's experts, by slot."""
        return self.placement.experts_by_rank[self.rank]

    def translate(self, topk_index: torch.Tensor) -> torch.Tensor:
        """int64 ``[T, K]`` physical ids of int64 ``[T, K]`` logical ones; -1 for ids outside ``[0, E)``."""
        if not self.translates:
            return topk_index
        return choose_replicas(topk_index, self.first, self.count, self.replicas)

    def count_rows(self, layout: ExpertLayout) -> None:
        """Adds the rows of this rank's slots to ``rows_received``, without those of shared experts after them."""
        counts = layout.counts[: self.expert_of_slot.numel()]
        self.rows_received.index_add_(0, self.expert_of_slot, counts)

    def _tables(self) -> dict[str, list[int]]:
        placement, rank = self.placement, self.rank
        replicas, first = [], []
        for physical in placement.replicas:
            holders = [placement.rank_of(i) for i in physical]
            # Ranks without a replica of their own are numbered among themselves.
            start = holders.index(rank) if rank in holders else len(set(range(rank)).difference(holders))
            start %= len(physical)
            first.append(len(replicas))
            replicas += physical[start:] + physical[:start]
        unused = placement.num_physical - len(replicas)
        return {
            "first": first,
            "count": [len(physical) for physical in placement.replicas],
            "replicas": replicas + [0] * unused,
            # Unused slots receive no rows: any expert will do.
            "expert_of_slot": [*self.held, *[0] * (placement.num_slots - len(self.held))],
        }

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces the tensors by those that ``fn`` makes of them, as ``nn.Module.to`` does."""
        for name in self._TENSORS:
            setattr(self, name, fn(getattr(self, name)))
