"""The choice of replicas: the right expert, an even split, the own rank first; tables that are overwritten in place."""

from __future__ import annotations

import copy
import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamoe import ExpertPlacement
from megamoe.layers.replicas import ExpertSlots, choose_replicas
from megamoe.types import ExpertLayout
from tests.support.placements import placements, random_placement

CPU = torch.device("cpu")


def slots_of(placement: ExpertPlacement, rank: int) -> ExpertSlots:
    slots = ExpertSlots(placement, rank, CPU)
    slots.assign(placement)
    return slots


def random_index(rng: random.Random, num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    """Skewed ids, repeated ones, and ids that are no expert."""
    ids = [*range(num_experts), 0, 0, 0, -1, num_experts, -(2**40), 2**40]
    drawn = [rng.choice(ids) for _ in range(num_tokens * top_k)]
    return torch.tensor(drawn, dtype=torch.int64).view(num_tokens, top_k)


def expert_of(placement: ExpertPlacement) -> dict[int, int]:
    return {physical: expert for expert, all_ in enumerate(placement.replicas) for physical in all_}


# ---------------------------------------------------------------- choice


@given(placements(), st.integers(0, 30), st.integers(1, 4), st.integers(0, 2**32))
def test_every_use_goes_to_a_replica_and_they_share_evenly(placement, num_tokens, top_k, seed):
    index = random_index(random.Random(seed), num_tokens, top_k, placement.num_experts)
    experts = expert_of(placement)
    for rank in range(placement.ep_size):
        physical = slots_of(placement, rank).translate(index)
        assert physical.shape == index.shape and physical.dtype == torch.int64
        uses: Counter[int] = Counter()
        for logical, chosen in zip(index.flatten().tolist(), physical.flatten().tolist(), strict=True):
            if 0 <= logical < placement.num_experts:
                assert experts[chosen] == logical
                uses[chosen] += 1
            else:
                assert chosen == -1
        for replicas in placement.replicas:
            split = [uses[replica] for replica in replicas]
            assert max(split) - min(split) <= 1, (split, "of one rank's rows")


@given(placements(), st.integers(0, 2**32))
def test_equal_tokens_on_every_rank_split_evenly_over_all(placement, seed):
    """What each rank has left over goes to different replicas: over all ranks too the split is even."""
    index = random_index(random.Random(seed), 7, 2, placement.num_experts)
    uses = Counter()
    for rank in range(placement.ep_size):
        uses.update(slots_of(placement, rank).translate(index).flatten().tolist())
    for replicas in placement.replicas:
        holders = [placement.rank_of(replica) for replica in replicas]
        if len(set(holders)) == len(holders):
            split = [uses[replica] for replica in replicas]
            # Holders and the others are spread for themselves.
            assert max(split) - min(split) <= 2, split


def test_own_replica_first_then_in_turn():
    placement = ExpertPlacement.from_lists([[0, 1], [0, 2], [3], [0, 4]])
    first = [slots_of(placement, rank).translate(torch.tensor([[0]])).item() for rank in range(4)]
    assert first == [0, 2, 0, 6]
    turns = torch.tensor([[0, 1], [0, 0], [-1, 0], [3, 0]])
    assert slots_of(placement, 1).translate(turns).tolist() == [[2, 1], [6, 0], [-1, 2], [4, 6]]
    # Ranks without a replica start at different ones.
    placement = ExpertPlacement.from_lists([[0], [1], [0], [1], [1], [1]])
    assert [slots_of(placement, rank).translate(torch.tensor([[0]])).item() for rank in (1, 3, 4, 5)] == [0, 2, 0, 2]


def test_padding_at_the_end_changes_no_choice(seed):
    """As with a batch that fills a bucket: the rows before it do not move."""
    rng = random.Random(seed)
    placement = random_placement(rng, 8, 4, replicas=6)
    index = random_index(rng, 20, 3, 8)
    padded = torch.cat([index, torch.full((12, 3), -1)])
    for rank in range(4):
        slots = slots_of(placement, rank)
        assert torch.equal(slots.translate(padded)[:20], slots.translate(index))


def test_strided_index(seed):
    rng = random.Random(seed)
    slots = slots_of(random_placement(rng, 8, 2, replicas=4), 1)
    index = random_index(rng, 20, 4, 8)
    assert torch.equal(slots.translate(index.t().contiguous().t()), slots.translate(index))
    assert torch.equal(slots.translate(index[::2, ::2]), slots.translate(index[::2, ::2].contiguous()))


def test_shapes_do_not_depend_on_data(seed):
    """Traced without data: no size, no branch and no copy to the host may depend on it, so CUDA graphs capture it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    slots = slots_of(random_placement(random.Random(seed), 8, 4, replicas=5), 0)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        tables = (mode.from_tensor(table) for table in (slots.first, slots.count, slots.replicas))
        out = choose_replicas(torch.empty(16, 2, dtype=torch.int64), *tables)
    assert out.shape == (16, 2)


# ---------------------------------------------------------------- tables


def test_a_new_layer_does_not_translate():
    slots = ExpertSlots(ExpertPlacement.even(8, 2), 1, CPU)
    index = torch.tensor([[3, -1], [99, 7]])
    assert slots.translate(index) is index and slots.is_default
    # Assigned, it does, with the same result: -1 for all that is no expert.
    slots.assign(ExpertPlacement.even(8, 2))
    assert slots.translate(index).tolist() == [[3, -1], [-1, 7]] and slots.is_default


def test_assign_writes_in_place_while_the_slots_stay(seed):
    rng = random.Random(seed)
    slots = slots_of(random_placement(rng, 8, 2, replicas=2, num_slots=6), 1)
    tables = [slots.first, slots.count, slots.replicas, slots.expert_of_slot, slots.rows_received]
    index = random_index(rng, 20, 2, 8)
    for replicas in (4, 0, 3):
        placement = random_placement(rng, 8, 2, replicas, num_slots=6)
        slots.assign(placement)
        now = [slots.first, slots.count, slots.replicas, slots.expert_of_slot, slots.rows_received]
        assert all(a is b for a, b in zip(tables, now, strict=True))
        assert slots.placement == placement and slots.held == placement.experts_by_rank[1]
        assert torch.equal(slots.translate(index), slots_of(placement, 1).translate(index))
    slots.assign(ExpertPlacement.even(8, 2))
    assert slots.replicas.numel() == 8 and slots.expert_of_slot.tolist() == [4, 5, 6, 7]


def test_rows_are_counted_by_logical_expert():
    slots = slots_of(ExpertPlacement.from_lists([[3, 1, 3], [0, 2]]), 0)
    slots.count_rows(ExpertLayout(torch.tensor([5, 7, 11]), torch.zeros(3, dtype=torch.int64), 0))
    assert slots.rows_received.tolist() == [0, 7, 0, 16]
    # They outlive a placement.
    slots.assign(ExpertPlacement.from_lists([[0, 1], [2, 3]]))
    slots.count_rows(ExpertLayout(torch.tensor([1, 2]), torch.zeros(2, dtype=torch.int64), 0))
    assert slots.rows_received.tolist() == [1, 9, 0, 16]
    slots.reset()
    assert slots.rows_received.tolist() == [0, 0, 0, 0]


def test_copies_and_devices():
    slots = slots_of(ExpertPlacement.from_lists([[3, 1], [0, 2]]), 0)
    other = copy.deepcopy(slots)
    other.assign(ExpertPlacement.even(4, 2))
    index = torch.arange(4)[:, None]
    assert slots.translate(index).flatten().tolist() == [2, 1, 3, 0]
    assert other.translate(index).flatten().tolist() == [0, 1, 2, 3]
    slots.apply(lambda tensor: tensor.to("meta"))
    assert slots.first.is_meta and slots.rows_received.is_meta
    slots.apply(lambda tensor: torch.full_like(tensor, -7, device="cpu"))
    slots.reset()
    assert slots.translate(index).flatten().tolist() == [2, 1, 3, 0] and not slots.rows_received.any()


@pytest.mark.gpu
def test_cuda_graph_sees_new_placements(seed):
    rng = random.Random(seed)
    slots = slots_of(random_placement(rng, 16, 4, replicas=4, num_slots=8), 2)
    slots.apply(lambda tensor: tensor.cuda())
    index = random_index(rng, 64, 4, 16).cuda()
    slots.translate(index)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = slots.translate(index)
    for _ in range(5):
        placement = random_placement(rng, 16, 4, rng.randrange(8), num_slots=8)
        slots.assign(placement)
        index.copy_(random_index(rng, 64, 4, 16))
        graph.replay()
        assert torch.equal(out.cpu(), slots_of(placement, 2).translate(index.cpu()))
