"""Interleaved timing with made-up clocks."""

from __future__ import annotations

import pytest

from megamoe.bench import timing


class Replays(list):
    """Names; ``repeats``: what each candidate was made with."""


@pytest.fixture
def replays(monkeypatch):
    """Names of the candidates in the order of their replays; each takes longer from replay to replay."""
    order, repeats_seen = Replays(), []
    order.repeats = repeats_seen

    class Timed:
        def __init__(self, calls, repeats):
            self.name, self.count = calls[0], 0
            repeats_seen.append(repeats)

        def replay(self):
            order.append(self.name)
            self.count += 1
            return 10.0 * self.count if self.name == "a" else float(self.count)

    monkeypatch.setattr(timing, "Timed", Timed)
    return order


def test_medians_and_turns(replays):
    times = timing.interleaved({"a": ["a"], "b": ["b"], "c": ["c"]}, rounds=21)
    assert times == {"a": 110.0, "b": 11.0, "c": 11.0}
    rounds = ["".join(replays[i : i + 3]) for i in range(0, 63, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds), "a round has everybody once"
    # Nobody always follows the same one.
    assert len(set(rounds)) > 2
    assert {one[0] for one in rounds} == {"a", "b", "c"}


def test_order_is_the_same_in_every_run(replays):
    for _ in range(2):
        timing.interleaved({"a": ["a"], "b": ["b"], "c": ["c"]}, rounds=4)
    assert replays[:12] == replays[12:]


def test_one_candidate(replays):
    assert timing.interleaved({"a": ["a"]}, rounds=1) == {"a": 10.0}


def test_repeats_can_be_fixed(replays):
    timing.interleaved({"a": ["a"], "b": ["b"]}, rounds=1, repeats=7)
    assert replays.repeats == [7, 7]


def test_ready_comes_before_each_replay(replays):
    timing.interleaved({"a": ["a"], "b": ["b"]}, rounds=2, ready=lambda: replays.append("ready"))
    assert replays[::2] == ["ready"] * 4 and "ready" not in replays[1::2]
