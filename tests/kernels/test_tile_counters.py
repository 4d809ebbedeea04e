"""Launches that may run at the same time have counters of their own, and each launch finds its counter again."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from megamoe.kernels.gluon import tile_counters  # noqa: E402
from megamoe.kernels.gluon.tile_counters import SPAN, Counters, counter_of  # noqa: E402


class Place:
    """Stands for results at an address."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, address: int, nbytes: int = SPAN):
        self._address, self.nbytes = address, nbytes

    def data_ptr(self) -> int:
        return self._address


def test_results_that_do_not_overlap_have_different_counters():
    counters = Counters(torch.zeros(64, dtype=torch.int32))
    for first in (0, 16, SPAN - 16, 5 * SPAN + 512):
        for size in (SPAN, SPAN + 16, 3 * SPAN):
            here, behind = counters.of(Place(first, size)), counters.of(Place(first + size))
            assert here.data_ptr() != behind.data_ptr(), (first, size)
            assert here.data_ptr() == counters.of(Place(first, size)).data_ptr()


def test_no_counter_is_given_twice_when_there_are_no_more():
    counters = Counters(torch.zeros(3, dtype=torch.int32))
    given = [counters.of(Place(n * SPAN)) for n in range(5)]
    assert len({counter.data_ptr() for counter in given[:3]}) == 3 and given[3:] == [None, None]
    assert counters.of(Place(SPAN)) is given[1]


def test_small_results_and_those_without_device_memory_have_none():
    assert counter_of(torch.empty(SPAN, dtype=torch.uint8)) is None
    assert counter_of(torch.empty(SPAN, dtype=torch.uint8, device="meta")) is None
    assert counter_of(Place(0, SPAN - 1)) is None


@pytest.mark.parametrize("capturing", [False, True])
def test_none_is_made_while_a_graph_is_captured(capturing, monkeypatch):
    """Zeros would be written in each replay, and not before the first one."""
    made = []

    monkeypatch.setattr(tile_counters, "_devices", {})
    monkeypatch.setattr(tile_counters.torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(tile_counters.torch.cuda, "synchronize", lambda device: made.append(device))
    zeros_of_torch = torch.zeros
    monkeypatch.setattr(
        tile_counters.torch,
        "zeros",
        lambda *size, device=None, **kw: made.append(device) or zeros_of_torch(*size, **kw),
    )
    counter = counter_of(Place(0))
    if capturing:
        assert counter is None and not made
    else:
        assert made == [Place.device, Place.device] and counter.shape == (1,) and not counter.any()
        assert counter_of(Place(0)) is counter and len(made) == 2
