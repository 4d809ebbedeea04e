"""Row groups: what each form means on the host, what is bounded, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamoe.kernels.layout import ALIGN, layout_pairs
from megamoe.kernels.row_groups import KINDS, RowGroups
from tests.support.errors import fails

COUNTS = st.lists(st.integers(0, 300), min_size=1, max_size=6)
WILD = st.integers(-(2**31), 2**31 - 1)


def int32(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def aligned(x: int) -> int:
    return (x + ALIGN - 1) // ALIGN * ALIGN


@pytest.mark.parametrize("kind", KINDS)
def test_constructors(kind):
    index = int32([3, 200])
    rows = getattr(RowGroups, kind)(index, 17)
    assert (rows.kind, rows.expected) == (kind, 17)
    assert rows.index is index
    assert getattr(RowGroups, kind)(index).expected is None


@given(counts=COUNTS)
def test_psum_spans_are_the_groups_of_a_pool(counts):
    pairs = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64))
    layout = layout_pairs(pairs, len(counts))[0]
    spans = RowGroups.psum(layout.ends.to(torch.int32)).spans(layout.num_rows)
    assert [span for span, count in zip(spans, counts, strict=True) if count] == [
        span for span in layout.spans() if span[1] > span[0]
    ]
    assert [end - start for start, end in spans] == counts


@given(counts=COUNTS)
def test_padded_spans_take_in_every_row(counts):
    pairs = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64))
    layout = layout_pairs(pairs, len(counts))[0]
    rows = RowGroups.padded(layout, 5)
    assert rows.kind == "psum" and rows.index.dtype == torch.int32 and rows.expected == 5
    spans = rows.spans(layout.num_rows)
    assert [end - start for start, end in spans] == [aligned(count) for count in counts]
    assert [start for start, _ in spans] == layout.starts.tolist()


@given(values=st.lists(WILD, max_size=6), num_rows=st.integers(0, 1000))
def test_wild_ends_stay_in_the_matrix(values, num_rows):
    position = 0
    for start, end in RowGroups.psum(int32(values)).spans(num_rows):
        # In order and apart: no row belongs to two experts.
        assert position <= start <= end <= num_rows
        assert start % ALIGN == 0 or start == num_rows
        position = end


@given(values=st.lists(WILD, max_size=6), num_rows=st.integers(0, 1000))
def test_wild_counts_stay_in_their_expert(values, num_rows):
    spans = RowGroups.masked(int32(values)).spans(num_rows)
    for group, (value, (start, end)) in enumerate(zip(values, spans, strict=True)):
        assert start == group * num_rows
        assert end - start == min(max(value, 0), num_rows)


def test_refused():
    with fails(ValueError, "kind", "sorted", "must be one of 'contiguous', 'psum', 'masked'"):
        RowGroups("sorted", int32([1]))
    for make in (RowGroups.contiguous, RowGroups.psum, RowGroups.masked):
        with fails(TypeError, "index", "list", "must be a torch.Tensor"):
            make([1, 2])
        with fails(TypeError, "index.dtype", torch.int64, "torch.int32"):
            make(torch.tensor([1, 2]))
        with fails(ValueError, "index.shape", [1, 2], "must be [any]"):
            make(int32([1, 2])[None])
        with fails(ValueError, "index.stride()", (2,), "must be contiguous"):
            make(int32([1, 2, 3, 4])[::2])
        with fails(ValueError, "expected", -1, "must be at least 0"):
            make(int32([1]), -1)
        with fails(TypeError, "expected", 1.5, "must be an integer"):
            make(int32([1]), 1.5)
        with fails(TypeError, "expected", True, "must be an integer"):
            make(int32([1]), True)
