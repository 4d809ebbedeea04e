"""Counters from which the programs of a GEMM's launch take their tiles (``schedule``): one for each place of results.

A launch finds its counter at zero and leaves it so. Launches that may run at the same time, in whatever streams and
graphs, need counters of their own; but they never write the same memory. So the place of the results decides: results
of ``SPAN`` bytes or more that begin in the same span of the address space overlap.
"""

from __future__ import annotations

import threading

import torch

SPAN = 2 << 20
"""Bytes. Fewer hold no more tiles than a GPU computes at once."""

MOST = 1 << 16
"""Counters of a device: for twice its memory."""


class _Counters:
    """Those of one device. They stay where they are, since graphs know their addresses."""

    def __init__(self, device: torch.device):
        self._words = torch.zeros(MOST, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        self._of_span: dict[int, torch.Tensor] = {}

    def of(self, address: int) -> torch.Tensor | None:
        span = address // SPAN
        if span not in self._of_span and len(self._of_span) < MOST:
            index = len(self._of_span)
            self._of_span[span] = self._words[index : index + 1]
        return self._of_span.get(span)


_devices: dict[int, _Counters] = {}
_lock = threading.Lock()


def counter_of(out: torch.Tensor) -> torch.Tensor | None:
    """int32 ``[1]`` for launches that write ``out``, which is contiguous.

    Returns:
        None where there is none: for small results, results without device memory, a device's first GEMM if a graph
        captures it, and when ``MOST`` counters have been given out. Programs then take tiles at fixed distances.
    """
    if not out.is_cuda or out.nbytes < SPAN:
        return None
    with _lock:
        index = out.device.index
        if index not in _devices:
            if torch.cuda.is_current_stream_capturing():
                return None
            _devices[index] = _Counters(out.device)
        return _devices[index].of(out.data_ptr())
