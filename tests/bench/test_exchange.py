"""The exchange's benchmark without GPUs: its payload, its checks of results, and how it refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megamoe.bench import exchange
from megamoe.bench.exchange import ExchangeCase, payload_rows
from megamoe.comm.exchange import LocalExchange
from megamoe.types import Routing
from tests.support.errors import fails


def test_payload_is_what_other_ranks_experts_need():
    index = torch.tensor([[0, 5], [4, 7], [1, 2], [-1, 3], [9, 6]])
    assert payload_rows(index, 8, 0, 2) == 4
    assert payload_rows(index, 8, 1, 2) == 4
    assert payload_rows(index, 8, 0, 1) == 0


def test_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with fails(ValueError, "torch.cuda.is_available()", False, "must be True"):
        exchange.run(None, 1, "torch", [32])


def test_needs_several_processes(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with fails(ValueError, "RANK", None, "must be set"):
        exchange._group()


class _Peer:
    """Has the results of one rank, but for a planted fault."""

    def __init__(self, local: LocalExchange, capacity: int, fault: str):
        self._local, self.capacity, self._fault = local, capacity, fault
        self.buffer = SimpleNamespace(check=lambda: None)

    def dispatch_once(self, x, routing, dtype):
        if self._fault == "layout":
            routing = Routing(routing.topk_index.roll(1, 1) - 1, routing.topk_weights)
        handle = self._local.plan(routing)
        rows = self._local.send_rows(x, handle)
        if self._fault == "row":
            start, end = [span for span in handle.layout.spans() if span[1] > span[0]][-1]
            rows[end - 1, 3] += 1
        return rows, handle

    def return_rows(self, rows, handle, dtype):
        out = self._local.return_rows(rows, handle, dtype)
        return out + 1 if self._fault == "sum" else out

    def barrier(self):
        pass


class _LocalProblem(exchange._Problem):
    """Of one rank, on the CPU."""

    def __init__(self, case: ExchangeCase, group=None, allocator: str = "torch", fault: str = ""):
        self.case, self.device, self.payload = case, torch.device("cpu"), 1
        self.collective = LocalExchange(case.experts)
        self.x = torch.randn(case.tokens, case.hidden).bfloat16()
        self.routing = Routing(
            torch.tensor([[0, 1], [1, 2], [3, 0], [0, 2], [1, 0], [2, 3]])[: case.tokens], torch.rand(case.tokens, 2)
        )
        self.buffer = SimpleNamespace(check=lambda: None, close=lambda: None)
        self.fault = fault

    def peer(self, num_sms):
        return _Peer(self.collective, self.collective.plan(self.routing).layout.num_rows, self.fault)


@pytest.mark.parametrize(
    ("fault", "text"), [("", ""), ("layout", "layouts differ"), ("row", "rows .* differ"), ("sum", "the sums differ")]
)
def test_wrong_results_are_not_timed(fault, text, seed):
    problem = _LocalProblem(ExchangeCase(6, 32, 4, 2), fault=fault)
    if not fault:
        problem.check(problem.peer(None))
        return
    with pytest.raises(RuntimeError, match=text):
        problem.check(problem.peer(None))


def _without_a_gpu(monkeypatch, interleaved, eager_microseconds):
    monkeypatch.setattr(exchange, "_Problem", _LocalProblem)
    monkeypatch.setattr(exchange, "interleaved", interleaved)
    monkeypatch.setattr(exchange, "starter", lambda group, device: (group, device))
    monkeypatch.setattr(exchange, "eager_microseconds", eager_microseconds)
    monkeypatch.setattr(exchange, "_slowest", lambda times: times)


def test_dispatches_of_both_begin_with_the_routing(monkeypatch, seed):
    plan, planned = LocalExchange.plan, []
    monkeypatch.setattr(LocalExchange, "plan", lambda self, routing: planned.append(1) or plan(self, routing))

    def eager_microseconds(call, rounds):
        planned.clear()
        call()
        return 4.0 if planned else 1.0

    _without_a_gpu(monkeypatch, lambda candidates, *_: dict.fromkeys(candidates, 2.0), eager_microseconds)
    rows = {row["what"]: row for row in exchange.measure_rates(ExchangeCase(2, 32, 4, 2), "group", [32], "torch", 3)}
    for dtype in ("fp8", "bf16"):
        assert rows[f"dispatch {dtype}, NCCL"]["us"] == 4.0 and rows[f"dispatch {dtype}, 32 SMs"]["x_nccl"] == 2.0
        assert rows[f"dispatch {dtype}, NCCL's rows alone"]["us"] == 1.0
    assert rows["combine bf16, NCCL"]["us"] == 1.0


@pytest.mark.parametrize(
    ("measure", "names"),
    [
        (
            lambda case: exchange.measure_rates(case, "group", [32], "torch", 3),
            ["dispatch fp8, 32 SMs", "dispatch bf16, 32 SMs", "combine bf16, 32 SMs"],
        ),
        (
            lambda case: exchange.measure_latencies(case, "group", "torch", 3),
            ["dispatch fp8 + combine bf16", "barrier"],
        ),
    ],
    ids=["rates", "latencies"],
)
def test_gpus_begin_each_replay_together(measure, names, monkeypatch, seed):
    timed = []

    def interleaved(candidates, rounds, repeats, ready):
        timed.append((list(candidates), rounds, repeats, ready))
        for (call,) in candidates.values():
            call()
        return dict.fromkeys(candidates, 2.0)

    _without_a_gpu(monkeypatch, interleaved, lambda call, rounds: 1.0)
    rows = measure(ExchangeCase(2, 32, 4, 2))
    assert timed == [(names, 3, exchange.REPEATS, ("group", torch.device("cpu")))]
    assert [row["us"] for row in rows if row["what"] in names] == [2.0] * len(names)
