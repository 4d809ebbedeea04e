"""Medians of CUDA-graph replays, interleaved: a GPU at its power limit slows down whatever comes later."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megamoe.errors import fail_value

TARGET_US = 2500.0
"""Wanted length of one replay: long against the events' resolution, short enough for many rounds."""

MAX_CALLS = 40


def check_gpu() -> None:
    """There is a GPU to measure."""
    if not torch.cuda.is_available():
        fail_value("torch.cuda.is_available()", False, "must be True", "Run this on a machine with an NVIDIA GPU.")


def eager_microseconds(call: Callable[[], object], rounds: int) -> float:
    """Median microseconds on this rank of calls that no graph can hold; all ranks make them together."""
    samples = []
    for _ in range(rounds + 2):
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1000)
    return statistics.median(samples[2:])


class Timed:
    """Some calls captured in one graph.

    Args:
        calls: the same computation on different data, so that no cache holds it; captured in turn.
        repeats: calls in the graph; default: as many as make it long enough. Calls in which ranks wait for each other
            must be equally many on all of them.
    """

    def __init__(self, calls: Sequence[Callable[[], object]], repeats: int | None = None):
        for call in calls:
            call()
        torch.cuda.synchronize()
        if repeats is None:
            repeats = max(len(calls), min(MAX_CALLS, round(TARGET_US / max(self._eager(calls[0]), 1.0))))
        self.repeats = repeats
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for index in range(self.repeats):
                calls[index % len(calls)]()
        self.replay()

    @staticmethod
    def _eager(call: Callable[[], object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000

    def replay(self) -> float:
        """Microseconds per call of one replay."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000 / self.repeats


def interleaved(
    candidates: dict[str, Sequence[Callable[[], object]]],
    rounds: int = 9,
    repeats: int | None = None,
    ready: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Median microseconds per call of each candidate; in each round all run, in random order, the same on all ranks.

    What ran before decides on clock and temperature: a fixed order favours whoever follows a cool kernel.

    Args:
        ready: called before each replay, such as ``ranks.starter(...)``.
    """
    timed = {name: Timed(calls, repeats) for name, calls in candidates.items()}
    samples: dict[str, list[float]] = {name: [] for name in timed}
    names = list(timed)
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(names, len(names)):
            if ready is not None:
                ready()
            samples[name].append(timed[name].replay())
    return {name: statistics.median(values) for name, values in samples.items()}


def host_microseconds(call: Callable[[], object], calls: int = 100, rounds: int = 10) -> float:
    """Least time that the host spends in one call, over rounds of so many that the GPU's queue does not fill."""
    call()
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - start)
    torch.cuda.synchronize()
    return best / calls * 1e6
