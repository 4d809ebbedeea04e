"""Row layouts against a loop over the pairs, for every kind of routing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.kernels.layout import ALIGN, align_up, invert_rows, layout_pairs, max_pool_rows, row_expert_ids
from megamoe.types import ExpertLayout
from tests.support.generators import ROUTING_KINDS, random_routing


def layout_by_loop(ids: list[int], num_experts: int) -> tuple[list[int], list[int], list[int], int]:
    """Counts, starts, row of each pair, rows of the pool."""
    counts = [sum(1 for i in ids if i == expert) for expert in range(num_experts)]
    starts, row = [], 0
    for count in counts:
        starts.append(row)
        row += (count + 127) // 128 * 128
    used = [0] * num_experts
    rows = []
    for i in ids:
        if 0 <= i < num_experts:
            rows.append(starts[i] + used[i])
            used[i] += 1
        else:
            rows.append(-1)
    return counts, starts, rows, row


def check_layout(ids: torch.Tensor, num_experts: int) -> None:
    counts, starts, rows, num_rows = layout_by_loop(ids.tolist(), num_experts)
    layout, pair_to_row = layout_pairs(ids, num_experts)
    assert layout.counts.tolist() == counts
    assert layout.starts.tolist() == starts
    assert all(start % ALIGN == 0 for start in layout.starts.tolist())
    assert pair_to_row.tolist() == rows
    assert layout.num_rows == num_rows
    assert layout.spans() == [(s, s + c) for s, c in zip(starts, counts, strict=True)]
    assert {t.dtype for t in (layout.counts, layout.starts, pair_to_row)} == {torch.int64}
    assert num_rows <= max_pool_rows(ids.numel(), num_experts)

    # Pools of other devices are longer than needed: the inverse and the ids must hold there too.
    for pool in (num_rows, num_rows + 2 * ALIGN):
        row_to_pair = invert_rows(pair_to_row, pool).tolist()
        expected_pairs, expected_ids = [-1] * pool, [-1] * pool
        for pair, row in enumerate(rows):
            if row >= 0:
                expected_pairs[row], expected_ids[row] = pair, int(ids[pair])
        assert row_to_pair == expected_pairs
        assert row_expert_ids(ExpertLayout(layout.counts, layout.starts, pool)).tolist() == expected_ids


def test_align():
    assert ALIGN == 128
    assert [align_up(n) for n in (0, 1, 127, 128, 129, 256, 257)] == [0, 128, 128, 128, 256, 256, 384]
    assert [align_up(n, 16) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]


def test_docstring_example():
    layout, pair_to_row = layout_pairs(torch.tensor([1, 0, 1]), 2)
    assert layout.counts.tolist() == [1, 2]
    assert layout.starts.tolist() == [0, 128]
    assert layout.ends.tolist() == [1, 130]
    assert pair_to_row.tolist() == [128, 0, 129]


@given(st.integers(1, 7).flatmap(lambda e: st.tuples(st.just(e), st.lists(st.integers(-2, e + 1), max_size=12))))
def test_small_layouts(case):
    num_experts, ids = case
    check_layout(torch.tensor(ids, dtype=torch.int64), num_experts)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(ROUTING_KINDS),
    num_tokens=st.one_of(st.integers(0, 300), st.sampled_from([127, 128, 129, 255, 256, 257])),
    num_experts=st.sampled_from([1, 2, 5, 6, 8, 512]),
    top_k=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_layouts_of_routings(kind, num_tokens, num_experts, top_k, seed):
    torch.manual_seed(seed)
    routing = random_routing(kind, num_tokens, num_experts, min(top_k, num_experts))
    check_layout(routing.topk_index.flatten(), num_experts)


@settings(max_examples=60)
@given(counts=st.lists(st.sampled_from([0, 1, 127, 128, 129, 255, 256, 257]), min_size=1, max_size=6), data=st.data())
def test_groups_at_tile_borders(counts, data):
    """Off-by-one errors of padding show only where a group just fills or just exceeds a tile."""
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    check_layout(ids[torch.randperm(ids.numel())], len(counts))


@pytest.mark.parametrize(
    "empty",
    [
        pytest.param([0], id="first"),
        pytest.param([2], id="middle"),
        pytest.param([4], id="last"),
        pytest.param([0, 1, 3, 4], id="all but one"),
        pytest.param([0, 1, 2, 3, 4], id="all"),
    ],
)
def test_empty_experts(empty):
    ids = torch.arange(5).repeat(30)
    ids = ids[~torch.isin(ids, torch.tensor(empty))]
    check_layout(ids, 5)


@pytest.mark.parametrize(
    ("ids", "num_experts"),
    [
        pytest.param(torch.tensor([3, -1, 0, 3], dtype=torch.int32), 4, id="int32"),
        pytest.param(torch.tensor([[3, 0], [-1, 1], [2, 2], [3, 3]])[:, 0], 4, id="strided: one slot of a top-k list"),
        pytest.param(torch.tensor([2]).expand(200), 4, id="zero stride"),
        pytest.param(torch.tensor([2**40, -(2**40), 1, 2**31 - 1, -(2**31)]), 4, id="ids far outside"),
        pytest.param(torch.tensor([255, 256, 511, 512, 300, 511]), 512, id="ids above 255"),
    ],
)
def test_kinds_of_index_tensors(ids, num_experts):
    check_layout(ids, num_experts)


def test_input_is_not_changed():
    ids = torch.tensor([1, -1, 9, 0])
    layout_pairs(ids, 2)
    assert ids.tolist() == [1, -1, 9, 0]


def most_rows(num_pairs: int, num_experts: int) -> list[list[int]]:
    """``[e][n]``: the most pool rows of n pairs over at most e experts, by trying every size of the last expert."""
    best = [[0] + [-1] * num_pairs]
    for _ in range(num_experts):
        previous = best[-1]
        row = []
        for n in range(num_pairs + 1):
            options = (previous[n - c] + (c + 127) // 128 * 128 for c in range(n + 1) if previous[n - c] >= 0)
            row.append(max(options))
        best.append(row)
    return best


MOST_ROWS = most_rows(num_pairs=270, num_experts=4)


def test_max_pool_rows_bounds_every_routing():
    for num_experts in range(1, 5):
        for num_pairs, most in enumerate(MOST_ROWS[num_experts]):
            bound = max_pool_rows(num_pairs, num_experts)
            assert bound >= most, (num_pairs, num_experts)
            assert bound % ALIGN == 0


def test_max_pool_rows_is_reached_by_some_routing():
    """One pair alone per expert and the rest in one group is the worst case; a larger bound only wastes memory."""
    loose = {
        (num_pairs, num_experts): (max_pool_rows(num_pairs, num_experts), most)
        for num_experts in range(1, 5)
        for num_pairs, most in enumerate(MOST_ROWS[num_experts])
        if max_pool_rows(num_pairs, num_experts) != most
    }
    assert not loose, f"{len(loose)} too large, as (pairs, experts): (rows, rows needed): {list(loose.items())[:3]}"


@pytest.mark.parametrize("num_pairs", [0, 1, 5, 128, 1000])
def test_pool_size_off_the_cpu_waits_for_nothing(num_pairs):
    """A meta tensor holds no data: reading a value to size the pool would raise."""
    ids = torch.empty(num_pairs, dtype=torch.int64, device="meta")
    layout, pair_to_row = layout_pairs(ids, 6)
    assert layout.num_rows == max_pool_rows(num_pairs, 6)
    assert pair_to_row.shape == (num_pairs,)
    assert invert_rows(pair_to_row, layout.num_rows).shape == (layout.num_rows,)
    assert row_expert_ids(layout).shape == (layout.num_rows,)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROUTING_KINDS)
def test_layout_on_a_gpu_is_that_of_the_cpu(seed, kind):
    ids = random_routing(kind, 300, 6, 2).topk_index.flatten()
    layout, pair_to_row = layout_pairs(ids, 6)
    layout_gpu, pair_to_row_gpu = layout_pairs(ids.cuda(), 6)
    assert torch.equal(pair_to_row_gpu.cpu(), pair_to_row)
    assert torch.equal(layout_gpu.counts.cpu(), layout.counts)
    assert torch.equal(layout_gpu.starts.cpu(), layout.starts)
    assert layout_gpu.num_rows == max_pool_rows(600, 6)
    assert torch.equal(row_expert_ids(layout_gpu).cpu()[: layout.num_rows], row_expert_ids(layout))
    assert (row_expert_ids(layout_gpu)[layout.num_rows :] == -1).all()
