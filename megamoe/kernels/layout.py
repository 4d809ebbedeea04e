"""Row layouts of grouped tensors. This module is the only home of the alignment number."""

from __future__ import annotations

import torch

from megamoe.types import ExpertLayout

ALIGN = 128
"""Rows to which each expert's group is padded: the tile height of the grouped GEMMs and a block of 128x1 scales."""


def align_up(rows: int, multiple: int = ALIGN) -> int:
    """``rows`` rounded up to a multiple."""
    return -(-rows // multiple) * multiple


def max_pool_rows(num_pairs: int, num_experts: int) -> int:
    """The most pool rows that ``num_pairs`` (token, expert) pairs can need, whatever the routing."""
    # Worst: one row in the last block of each expert that has any.
    partial_blocks = min(num_experts, num_pairs)
    return (partial_blocks + (num_pairs - partial_blocks) // ALIGN) * ALIGN


def layout_pairs(expert_ids: torch.Tensor, num_experts: int) -> tuple[ExpertLayout, torch.Tensor]:
    """Sorts (token, expert) pairs by expert, stably, each expert's group padded to ALIGN rows.

    Example: ids [1, 0, 1], two experts -> counts [1, 2], starts [0, 128], pair_to_row [128, 0, 129].

    Args:
        expert_ids: integer ``[N]``; ids outside ``[0, num_experts)`` get no row.
        num_experts: number of groups.

    Returns:
        The layout and ``pair_to_row``, int64 ``[N]``: the pool row of each pair, -1 where it has none. On a CPU the
        pool has just the rows it needs; on other devices it has ``max_pool_rows``: nothing waits for the device.
    """
    valid = (expert_ids >= 0) & (expert_ids < num_experts)
    # Pairs without an expert go to one more group, at the end.
    groups = torch.where(valid, expert_ids, num_experts).long()
    all_counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=groups.device)
    all_counts.scatter_add_(0, groups, torch.ones_like(groups))
    counts = all_counts[:num_experts]
    aligned_ends = ((counts + ALIGN - 1) // ALIGN * ALIGN).cumsum(0)
    starts = torch.cat([aligned_ends.new_zeros(1), aligned_ends[:-1]])
    if groups.device.type == "cpu":
        num_rows = int(aligned_ends[-1])
    else:
        num_rows = max_pool_rows(groups.numel(), num_experts)

    order = torch.argsort(groups, stable=True)
    packed_starts = all_counts.cumsum(0) - all_counts
    rank_in_group = torch.empty_like(groups)
    rank_in_group[order] = torch.arange(groups.numel(), device=groups.device) - packed_starts[groups[order]]
    pair_to_row = torch.where(valid, starts[groups.clamp(max=num_experts - 1)] + rank_in_group, -1)
    return ExpertLayout(counts, starts, num_rows), pair_to_row


def invert_rows(pair_to_row: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The pair of each pool row: int64 ``[num_rows]``, -1 for padding; the inverse of ``pair_to_row``."""
    # Pairs without a row write to one more row, which is cut off: no data-dependent shapes.
    row_to_pair = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=pair_to_row.device)
    pairs = torch.arange(pair_to_row.numel(), device=pair_to_row.device)
    row_to_pair[torch.where(pair_to_row >= 0, pair_to_row, num_rows)] = pairs
    return row_to_pair[:num_rows]


def row_expert_ids(layout: ExpertLayout) -> torch.Tensor:
    """int64 ``[P]``: the expert of each pool row, -1 for padding (the "contiguous" form)."""
    rows = torch.arange(layout.num_rows, device=layout.counts.device)
    # An empty expert starts where its successor does: the last expert that starts at or before a row owns it.
    owner = torch.searchsorted(layout.starts, rows, right=True) - 1
    return torch.where(rows < layout.ends[owner], owner, -1)
