"""What ranks of a measurement do together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megamoe.bench import ranks


@pytest.mark.parametrize("pause", [0.0, 0.25])
def test_gpus_meet_behind_a_delay(pause, monkeypatch):
    calls = []
    monkeypatch.setattr(ranks.time, "sleep", lambda seconds: calls.append(("rest", seconds)))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append(("delay", cycles)))
    monkeypatch.setattr(dist, "all_reduce", lambda token, group: calls.append(("meet", group)))
    ranks.starter("group", torch.device("cpu"), pause)()
    assert calls == [("rest", 0.25)] * (pause > 0) + [("delay", ranks.HEAD_START), ("meet", "group")]
    calls.clear()
    ranks.starter(None, torch.device("cpu"), pause)()
    assert calls == [("rest", 0.25)] * (pause > 0)
