"""What ranks compare before they share memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megamoe import MegaMoEError
from megamoe.comm.preflight import RankReport, complaint, describe_device, host_name, library_versions, preflight
from tests.support.processes import run_ranks

GOOD = [RankReport({"tokens": 8, "torch": "2.13"}, "here", f"gpu{rank}") for rank in range(4)]


def with_rank(rank: int, **changes) -> list[RankReport]:
    return [replace(report, **changes) if r == rank else report for r, report in enumerate(GOOD)]


def test_equal_ranks_pass():
    assert complaint(GOOD) is None
    assert complaint(GOOD[:1]) is None


@pytest.mark.parametrize("odd", range(4))
def test_the_odd_one_out_is_named(odd):
    argument, value, rule, _ = complaint(with_rank(odd, settings={"tokens": 16, "torch": "2.13"}))
    assert (argument, value) == ("settings", {"tokens": {"most ranks": "8", odd: 16}})
    assert "must be equal on all ranks" in rule


def test_every_difference_is_listed():
    _, value, _, _ = complaint(with_rank(2, settings={"tokens": 16, "torch": "2.11"}))
    assert value == {"tokens": {"most ranks": "8", 2: 16}, "torch": {"most ranks": "'2.13'", 2: "2.11"}}


def test_other_settings():
    argument, value, _, _ = complaint(with_rank(1, settings={"tokens": 8}))
    assert (argument, value) == ("group", {1: ["tokens"]})


def test_failures_come_first():
    reports = with_rank(3, failure="no library", host="there")
    assert complaint(reports)[:2] == ("group", {3: "no library"})


def test_several_machines():
    argument, value, rule, _ = complaint(with_rank(3, host="there"))
    assert (argument, value) == ("group", [[0, 1, 2], [3]])
    assert "spans several machines" in rule


def test_a_shared_device():
    assert complaint(with_rank(3, device="gpu1"))[:2] == ("device", {"gpu1": [1, 3]})


def test_devices_out_of_reach():
    argument, value, rule, _ = complaint(with_rank(2, unreachable=("gpu0", "gpu7")))
    assert (argument, value) == ("group", {2: [0]})
    assert "cannot read each other's memory" in rule
    # A device that is nobody's does not matter.
    assert complaint(with_rank(2, unreachable=("gpu7",))) is None


def test_what_a_rank_says_of_itself():
    assert describe_device(torch.device("cpu")) == ("cpu", ())
    assert host_name() and host_name() == host_name()
    assert library_versions()["torch"] == torch.__version__


def _preflight(rank: int, world_size: int, tokens: list[int], failing: int | None) -> str:
    report = RankReport({"tokens": tokens[rank]}, "here", f"gpu{rank}", failure="broken" if rank == failing else "")
    try:
        return str(len(preflight(report, torch.distributed.group.WORLD)))
    except MegaMoEError as error:
        return f"{type(error).__name__}: {error}"


def _preflights(rank: int, world_size: int) -> list[str]:
    return [
        _preflight(rank, world_size, [8, 8, 8], None),
        _preflight(rank, world_size, [8, 8, 16], None),
        _preflight(rank, world_size, [8, 8, 8], 0),
    ]


def test_all_ranks_raise_or_none():
    for good, odd, failed in run_ranks(_preflights, 3):
        assert good == "3"
        assert odd.startswith("MegaMoEValueError: settings = {'tokens': {'most ranks': '8', 2: 16}}: must be equal")
        assert failed.startswith("MegaMoEValueError: group = {0: 'broken'}: has ranks that cannot take part")
