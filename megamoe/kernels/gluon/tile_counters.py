"""Counters from which the programs of a GEMM's launch take their tiles (``schedule``): one for each place of results.

A launch finds its counter at zero and leaves it so. Launches that may run at the same time, in whatever streams and
graphs, need counters of their own; but they never write the same memory. So the place of the results decides: results
of ``SPAN`` bytes or more that begin in the same span of the address space overlap.
"""

from __future__ import annotations

import threading

import torch

SPAN = 2 << 20
"""Bytes. Fewer hold hardly more tiles than a GPU computes at once."""

MOST = 1 << 16
"""Counters of a device, about as many as its memory has spans."""


class Counters:
    """Those of one device. They stay where they are, for graphs know their addresses.

    Args:
        words: int32, zeros.
    """

    def __init__(self, words: torch.Tensor):
        self._words = words
        self._of_span: dict[int, torch.Tensor] = {}

    def of(self, out: torch.Tensor) -> torch.Tensor | None:
        """The counter of launches that write ``out``, or None if all have been given away."""
        span, index = out.data_ptr() // SPAN, len(self._of_span)
        if span not in self._of_span and index < self._words.numel():
            self._of_span[span] = self._words[index : index + 1]
        return self._of_span.get(span)


_devices: dict[int, Counters] = {}
_lock = threading.Lock()


def counter_of(out: torch.Tensor) -> torch.Tensor | None:
    """int32 ``[1]`` for launches that write ``out``, which is contiguous.

    Returns:
        None where there is none: for small results, results without device memory, a device's first GEMM if a graph
        captures it, and when ``MOST`` counters have been given away. Programs then take tiles at fixed distances.
    """
    if not out.is_cuda or out.nbytes < SPAN:
        return None
    index = out.device.index
    with _lock:
        if index not in _devices:
            if torch.cuda.is_current_stream_capturing():
                return None
            _devices[index] = Counters(torch.zeros(MOST, dtype=torch.int32, device=out.device))
            # Other streams may use them first.
            torch.cuda.synchronize(out.device)
        return _devices[index].of(out)
