"""Speed of the FP8 casts on a GPU, as a fraction of a device copy of as many bytes in the same run.

Run: python -m megamoe bench quant
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from megamoe.kernels.quant import (
    quantize_blockwise_both,
    quantize_rowwise,
    swiglu_backward_quantize_rowwise,
    swiglu_quantize_rowwise,
)

ROUNDS = 15


def time_graph(function: Callable[[], object], repeats: int) -> Callable[[], float]:
    """Captures ``repeats`` calls in a CUDA graph; the result replays it once and returns microseconds per call."""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            function()

    def replay() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000 / repeats

    replay()
    return replay


def cases() -> list[tuple[str, Callable[[], object], int, int, float | None]]:
    """(name, call, bytes read and written, calls per graph, target fraction of the copy rate)."""
    device = "cuda"
    x = torch.randn(8192, 7168, device=device, dtype=torch.bfloat16)
    few = torch.randn(128, 7168, device=device, dtype=torch.bfloat16)
    weight = torch.randn(32, 4096, 7168, device=device, dtype=torch.bfloat16)
    pre = torch.randn(65536, 4096, device=device, dtype=torch.bfloat16)
    row_weights = torch.rand(65536, device=device)
    grad = torch.randn(65536, 2048, device=device, dtype=torch.bfloat16)
    scale_bytes = 4 / 128
    return [
        ("row-wise [8192, 7168]", lambda: quantize_rowwise(x), int(x.numel() * (3 + scale_bytes)), 10, 0.80),
        (
            "row-wise [8192, 7168], MN-major scales",
            lambda: quantize_rowwise(x, mn_major=True),
            int(x.numel() * (3 + scale_bytes)),
            10,
            0.80,
        ),
        (
            "block-wise + transpose [32, 4096, 7168]",
            lambda: quantize_blockwise_both(weight),
            weight.numel() * 4,
            2,
            0.75,
        ),
        (
            "SwiGLU + row-wise [65536, 2 x 2048]",
            lambda: swiglu_quantize_rowwise(pre, row_weights),
            int(pre.numel() * (2 + 0.5 + scale_bytes / 2)),
            5,
            0.80,
        ),
        (
            "SwiGLU backward + row-wise [65536, 2048]",
            lambda: swiglu_backward_quantize_rowwise(grad, pre, row_weights),
            int(grad.numel() * 2 + pre.numel() * (3 + scale_bytes)),
            5,
            None,
        ),
        ("row-wise [128, 7168]", lambda: quantize_rowwise(few), int(few.numel() * (3 + scale_bytes)), 50, None),
    ]


def main() -> None:
    """Measures and prints the table."""
    source = torch.randn(1 << 28, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy_bytes = 2 * source.numel() * 2
    # An element-wise kernel: as a memory-copy node of a graph, copy_ reaches two thirds of its rate.
    timers = [("copy", time_graph(lambda: torch.neg(source, out=target), 3), copy_bytes, None)]
    for name, call, moved, repeats, goal in cases():
        timers.append((name, time_graph(call, repeats), moved, goal))
    # Round robin: clocks drift, and all see the same.
    samples = [[timer() for _, timer, _, _ in timers] for _ in range(ROUNDS)]
    medians = [statistics.median(column) for column in zip(*samples, strict=True)]
    copy_rate = copy_bytes / medians[0]
    table = Table(title=f"FP8 casts on {torch.cuda.get_device_name()}: copy moves {copy_rate / 1e6:.2f} TB/s")
    for heading in ("case", "us", "TB/s", "of the copy rate", "target"):
        table.add_column(heading)
    for (name, _, moved, goal), micros in zip(timers[1:], medians[1:], strict=True):
        rate = moved / micros
        wanted = "" if goal is None else f">= {goal:.2f}"
        table.add_row(name, f"{micros:.2f}", f"{rate / 1e6:.2f}", f"{rate / copy_rate:.3f}", wanted)
    Console(width=110).print(table)
