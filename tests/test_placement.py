"""``ExpertPlacement``: what it refuses, its numbering, its loads, and its way through JSON."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
from hypothesis import given

from megamoe import ExpertPlacement
from megamoe.placement import copies_to_move
from tests.support.errors import fails
from tests.support.placements import placements

# ---------------------------------------------------------------- numbering


def test_numbering():
    placement = ExpertPlacement.from_lists([[2, 0], [1], [0, 2, 3]])
    assert (placement.num_experts, placement.ep_size, placement.num_slots, placement.num_physical) == (4, 3, 3, 9)
    assert placement.experts_by_rank == ((2, 0), (1,), (0, 2, 3))
    assert placement.replicas == ((1, 6), (3,), (0, 7), (8,))
    assert [placement.rank_of(physical) for physical in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert not placement.is_default


@given(placements())
def test_physical_ids_name_the_slots(placement):
    for expert, physical in enumerate(placement.replicas):
        assert physical and list(physical) == sorted(set(physical))
        for number in physical:
            rank, slot = divmod(number, placement.num_slots)
            assert rank == placement.rank_of(number)
            assert placement.experts_by_rank[rank][slot] == expert
    assert sum(map(len, placement.replicas)) == sum(map(len, placement.experts_by_rank))
    assert max(map(len, placement.experts_by_rank)) <= placement.num_slots


@pytest.mark.parametrize(
    ("experts", "ranks", "lists"),
    [
        (4, 2, ((0, 1), (2, 3))),
        (5, 2, ((0, 1, 2), (3, 4))),
        (3, 1, ((0, 1, 2),)),
        (7, 3, ((0, 1, 2), (3, 4), (5, 6))),
        (2, 3, ((0,), (1,), ())),
    ],
)
def test_even(experts, ranks, lists):
    placement = ExpertPlacement.even(experts, ranks)
    assert placement.experts_by_rank == lists
    assert placement.num_slots == len(lists[0])
    assert placement.is_default == (experts % ranks == 0)
    assert ExpertPlacement.even(experts, ranks, 4).num_slots == 4
    assert not ExpertPlacement.even(experts, ranks, 4).is_default


def test_default_is_one_placement_only():
    assert ExpertPlacement.from_lists([[0, 1], [2, 3]]).is_default
    for lists in ([[1, 0], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2], [3]], [[0, 1, 2], [2, 3]]):
        assert not ExpertPlacement.from_lists(lists).is_default


# ---------------------------------------------------------------- value semantics


@given(placements())
def test_round_trip(placement):
    values = placement.to_dict()
    again = ExpertPlacement.from_dict(json.loads(json.dumps(values)))
    assert again == placement and hash(again) == hash(placement)
    assert again.to_dict() == values
    assert pickle.loads(pickle.dumps(placement)) == placement


def test_frozen_and_independent_of_its_arguments():
    lists = [[0, 1], [2]]
    placement = ExpertPlacement(3, lists)
    lists[0].append(7)
    assert placement.experts_by_rank == ((0, 1), (2,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        placement.num_slots = 5
    assert placement == ExpertPlacement.from_lists([(0, 1), (2,)])
    assert placement != ExpertPlacement.from_lists([(0, 1), (2,)], 3)


# ---------------------------------------------------------------- loads


def test_loads():
    placement = ExpertPlacement.from_lists([[0, 1], [0, 2], []])
    assert placement.rank_loads([6.0, 1.0, 2.0]) == [4.0, 5.0, 0.0]
    assert placement.imbalance([6.0, 1.0, 2.0]) == pytest.approx(5 / 3)
    assert placement.imbalance([0, 0, 0]) == 1.0
    # Two replicas on one rank get two shares.
    assert ExpertPlacement.from_lists([[0, 0], [0, 1]]).rank_loads([3.0, 1.0]) == [2.0, 2.0]
    with fails(ValueError, "len(load)", 2, "must be num_experts = 3"):
        placement.rank_loads([1.0, 2.0])


def test_copies_to_move():
    old = ExpertPlacement.from_lists([[0, 1], [2, 3]])
    assert copies_to_move(old, old) == 0
    # A new order on a rank is no copy between ranks.
    assert copies_to_move(old, ExpertPlacement.from_lists([[1, 0], [3, 2]])) == 0
    assert copies_to_move(old, ExpertPlacement.from_lists([[2, 1], [0, 3]])) == 2
    assert copies_to_move(old, ExpertPlacement.from_lists([[0, 1, 3], [2, 3, 0]])) == 2


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("arguments", "kind", "name", "value", "rule"),
    [
        ((0, [[0]]), ValueError, "num_experts", 0, "must be at least 1"),
        ((2.0, [[0, 1]]), TypeError, "num_experts", 2.0, "must be an integer"),
        ((2, [[0, 1]], -1), ValueError, "num_slots", -1, "must be at least 0"),
        ((2, [[0, 1], [1]], 1), ValueError, "num_slots", 1, "must be at least the 2 experts of rank 0"),
        ((2, "01"), TypeError, "experts_by_rank", "01", "must be a sequence of sequences"),
        ((2, 7), TypeError, "experts_by_rank", 7, "must be a sequence of sequences"),
        ((2, []), ValueError, "experts_by_rank", [], "at least one rank"),
        ((2, [0, 1]), TypeError, "experts_by_rank[0]", 0, "must be a sequence of expert ids"),
        ((2, [[0], [1, 2]]), ValueError, "experts_by_rank[1][1]", 2, "must be in [0, 2)"),
        ((2, [[0, -1], [1]]), ValueError, "experts_by_rank[0][1]", -1, "must be in [0, 2)"),
        ((2, [[0], [1.0]]), TypeError, "experts_by_rank[1][0]", 1.0, "must be an integer"),
        ((2, [[0], [True]]), TypeError, "experts_by_rank[1][0]", True, "must be an integer"),
        ((4, [[0], [2]]), ValueError, "experts without a slot", [1, 3], "must be none"),
        ((1, [[], []]), ValueError, "experts without a slot", [0], "must be none"),
    ],
)
def test_not_a_placement(arguments, kind, name, value, rule):
    with fails(kind, name, value, rule):
        ExpertPlacement(*arguments)


def test_lists_that_are_none():
    with fails(TypeError, "experts_by_rank", 3, "must be a sequence of sequences"):
        ExpertPlacement.from_lists(3)
    with fails(TypeError, "experts_by_rank[1]", 3, "must be a sequence"):
        ExpertPlacement.from_lists([[0], 3])
    with fails(ValueError, "experts without a slot", [0], "must be none"):
        ExpertPlacement.from_lists([[1]])
    with fails(TypeError, "experts_by_rank[0][0]", "a", "must be an integer"):
        ExpertPlacement.from_lists([["a"]])


def test_even_refuses():
    with fails(ValueError, "ep_size", 0, "must be at least 1"):
        ExpertPlacement.even(4, 0)
    with fails(ValueError, "num_experts", 0, "must be at least 1"):
        ExpertPlacement.even(0, 4)
    with fails(ValueError, "num_slots", 1, "must be at least the 2 experts"):
        ExpertPlacement.even(4, 2, 1)


def test_dicts_that_are_none():
    values = ExpertPlacement.even(4, 2).to_dict()
    with fails(TypeError, "ExpertPlacement", [1], "must be a dict"):
        ExpertPlacement.from_dict([1])
    missing = {key: value for key, value in values.items() if key != "num_slots"}
    for wrong in ({**values, "more": 1}, missing, {}):
        with fails(ValueError, "ExpertPlacement keys", sorted(wrong), "must be num_experts, num_slots"):
            ExpertPlacement.from_dict(wrong)
    with fails(ValueError, "experts_by_rank[1][0]", 9, "must be in [0, 4)"):
        ExpertPlacement.from_dict({**values, "experts_by_rank": [[0, 1], [9, 3]]})
