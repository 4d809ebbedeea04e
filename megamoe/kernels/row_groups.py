"""Which rows of a grouped GEMM belong to which expert, in the three forms of inference and training frameworks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megamoe.errors import check_choice, check_int, check_tensor, fail_value
from megamoe.kernels.layout import ALIGN
from megamoe.kernels.local_rows import group_ends
from megamoe.types import ExpertLayout

KINDS = ("contiguous", "psum", "masked")


@dataclass(frozen=True)
class RowGroups:
    """Assignment of rows to experts; make it with ``contiguous``, ``psum`` or ``masked``.

    All three are read on the device only, and bounded there: an id outside ``[0, e)`` counts as padding, an end past
    the matrix or a count above ``M_max`` is cut. Rows outside the matrix are never touched.

    Attributes:
        kind: "contiguous", "psum" or "masked".
        index: int32, contiguous.
        expected: usual rows per expert; a hint for the choice of tiles, results do not depend on it.
    """

    kind: str
    index: torch.Tensor
    expected: int | None = None

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        check_tensor("index", self.index, (None,), (torch.int32,))
        if not self.index.is_contiguous():
            fail_value("index.stride()", tuple(self.index.stride()), "must be contiguous", "Call .contiguous() first.")
        if self.expected is not None:
            check_int("expected", self.expected, 0)

    @classmethod
    def contiguous(cls, expert_ids: torch.Tensor, expected: int | None = None) -> RowGroups:
        """``expert_ids`` int32 ``[P]``: each row's expert, the same in each aligned block of 128 rows but for padding.

        Padding rows (-1) end a block and are computed with its expert. Blocks that start with -1 are left out.
        """
        return cls("contiguous", expert_ids, expected)

    @classmethod
    def psum(cls, ends: torch.Tensor, expected: int | None = None) -> RowGroups:
        """``ends`` int32 ``[e]``: one past each expert's last row; group j starts at ``ends[j - 1]`` rounded up to 128.

        Rows between groups are neither read nor written.
        """
        return cls("psum", ends, expected)

    @classmethod
    def masked(cls, counts: torch.Tensor, expected: int | None = None) -> RowGroups:
        """``counts`` int32 ``[e]``: rows in use of each expert's ``M_max``; the others are neither read nor written."""
        return cls("masked", counts, expected)

    @classmethod
    def padded(cls, layout: ExpertLayout, expected: int | None = None) -> RowGroups:
        """The groups of a pool, each with its padding rows: every row up to the last group's end is computed."""
        return cls("psum", group_ends(layout, padded=True), expected)

    def spans(self, num_rows: int) -> list[tuple[int, int]]:
        """(start, end) of each expert's rows on the host, cut to ``num_rows`` (of each expert if masked).

        Not for "contiguous". Waits for the device that holds the index.
        """
        spans = []
        end = 0
        for group, value in enumerate(self.index.tolist()):
            if self.kind == "masked":
                start, end = group * num_rows, group * num_rows + max(min(value, num_rows), 0)
            else:
                start = min(-(-end // ALIGN) * ALIGN, num_rows)
                end = max(min(value, num_rows), start)
            spans.append((start, end))
        return spans
