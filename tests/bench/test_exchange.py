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

    def __init__(self, local: LocalExchange, fault: str):
        self._local, self._fault = local, fault
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


@pytest.mark.parametrize(
    ("fault", "text"), [("", ""), ("layout", "layouts differ"), ("row", "rows .* differ"), ("sum", "the sums differ")]
)
def test_wrong_results_are_not_timed(fault, text, seed):
    problem = object.__new__(exchange._Problem)
    problem.case = ExchangeCase(6, 32, 4, 2)
    problem.collective = LocalExchange(4)
    problem.x = torch.randn(6, 32).bfloat16()
    problem.routing = Routing(torch.tensor([[0, 1], [1, 2], [3, 0], [0, 2], [1, 0], [2, 3]]), torch.rand(6, 2))
    if not fault:
        problem.check(_Peer(problem.collective, fault))
        return
    with pytest.raises(RuntimeError, match=text):
        problem.check(_Peer(problem.collective, fault))
