"""The epoch and wait rules of the exchange: no interleaving deadlocks, loses a row or reads another call's."""

from __future__ import annotations

from itertools import product

import pytest

from tests.support import exchange_model
from tests.support.exchange_model import Violation, explore_all, explore_some, steps_of

SEQUENCES = ["".join(movements) for length in range(1, 5) for movements in product("DCM", repeat=length)]
"""Every order of up to four movements."""


@pytest.mark.parametrize("first", "DCM")
def test_every_interleaving_of_two_ranks(first):
    for movements in SEQUENCES:
        if movements.startswith(first):
            assert explore_all(2, movements) > 100


@pytest.mark.parametrize("movements", ["DCDCDC", "DDDCCC", "DDCDDC", "DDCCDC", "CCCC", "MMCCDDM", "DMDCMC"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_random_interleavings(ranks, movements, seed):
    explore_some(ranks, movements, 20, seed)


def test_every_interleaving_of_programs_that_raise_flags_together():
    assert explore_all(2, "F", programs=2) > 1000


@pytest.mark.parametrize("movements", ["DFDF", "DDFF", "FFDDF"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_random_interleavings_of_programs(ranks, movements, seed):
    for programs in (2, 3):
        explore_some(ranks, movements, 10, seed, programs=programs)


@pytest.mark.parametrize(
    ("wrong", "movements"),
    [
        ("whole shares", "F"),
        ("READY of one", "D"),
        ("SCATTERED of one", "F"),
        ("REDUCED", "FF"),
        ("PULLED", "DD"),
        ("", "C"),
    ],
)
def test_shares_of_a_flag_must_be_all_there(wrong, movements):
    """Also: where parts are announced one after another by shares, one program's next share is taken for another's."""
    with pytest.raises(Violation, match="reads"):
        explore_some(2, movements, 500, 0, frozenset({wrong}), programs=3)


def test_shares_that_are_never_whole_are_a_deadlock():
    with pytest.raises(Violation, match="no rank can go on"):
        explore_some(2, "F", 1, 0, frozenset({"no rest"}), programs=2)


@pytest.mark.parametrize(
    ("wrong", "movements"),
    [
        ("READY", "D"),
        ("SCATTERED", "C"),
        ("SCATTERED 1", "C"),
        ("SCATTERED 1", "M"),
        ("PULLED", "DD"),
        ("PULLED", "CDD"),
        ("PULLED", "DM"),
        ("REDUCED", "CC"),
        ("REDUCED", "DCC"),
        ("REDUCED", "MC"),
        ("DISPATCHES_SEEN", "CDD"),
        ("DISPATCHES_SEEN", "MDD"),
        ("COMBINES_SEEN", "DCC"),
        ("COMBINES_SEEN", "MC"),
        ("early READY", "D"),
        ("early SCATTERED", "C"),
        ("early SCATTERED", "M"),
    ],
)
def test_every_rule_is_needed(wrong, movements):
    with pytest.raises(Violation, match="reads"):
        explore_all(2, movements, frozenset({wrong}))


@pytest.mark.parametrize(
    ("movements", "told"),
    [
        ("DCDCDC", []),
        ("MMM", []),
        ("MDCM", []),
        ("DD", [("PULLED", 1)]),
        ("DDCCDC", [("PULLED", 1), ("REDUCED", 1)]),
        ("DDDCCC", [("PULLED", 1), ("PULLED", 2), ("REDUCED", 1), ("REDUCED", 2)]),
        ("MCDM", [("REDUCED", 1), ("PULLED", 2)]),
    ],
)
def test_only_two_of_a_kind_in_a_row_wait_for_the_earlier(movements, told):
    steps = steps_of(0, 2, movements)
    for kind in ("write", "wait"):
        found = [(step.place[0], step.number) for step in steps if step.kind == kind]
        assert [step for step in found if step[0] in ("PULLED", "REDUCED")] == [step for step in told for _ in range(2)]


def test_a_flag_that_nobody_raises_is_a_deadlock(monkeypatch):
    def forgetful(rank, ranks, movements, wrong=frozenset()):
        steps = steps_of(rank, ranks, movements, wrong)
        return [step for step in steps if (step.kind, step.place) != ("add", ("READY", 0, 1))]

    monkeypatch.setattr(exchange_model, "steps_of", forgetful)
    with pytest.raises(Violation, match="no rank can go on"):
        explore_all(2, "D")
