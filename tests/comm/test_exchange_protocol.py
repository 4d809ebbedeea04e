"""The epoch and wait rules of the exchange: no interleaving deadlocks, loses a row or reads another call's."""

from __future__ import annotations

import pytest

from tests.support.exchange_model import Violation, explore_all, explore_some

SEQUENCES = ["D", "C", "DC", "DD", "CC", "DDC", "DCC"]


@pytest.mark.parametrize("movements", SEQUENCES)
def test_every_interleaving_of_two_ranks(movements):
    assert explore_all(2, movements) > 100


@pytest.mark.parametrize("movements", ["DCDCDC", "DDDCCC", "DDCDDC", "CCCC"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_random_interleavings(ranks, movements, seed):
    explore_some(ranks, movements, 20, seed)


@pytest.mark.parametrize(
    ("left_out", "movements"), [("READY", "D"), ("SCATTERED", "C"), ("PULLED", "DD"), ("REDUCED", "CC")]
)
def test_every_wait_is_needed(left_out, movements):
    with pytest.raises(Violation, match="reads"):
        explore_all(2, movements, frozenset({left_out}))


def test_a_flag_that_nobody_raises_is_a_deadlock(monkeypatch):
    from tests.support import exchange_model

    steps_of = exchange_model.steps_of

    def forgetful(rank, ranks, movements, left_out=frozenset()):
        steps = steps_of(rank, ranks, movements, left_out)
        return [step for step in steps if (step.kind, step.place) != ("write", ("READY", 0, 1))]

    monkeypatch.setattr(exchange_model, "steps_of", forgetful)
    with pytest.raises(Violation, match="no rank can go on"):
        explore_all(2, "D")
