"""Speed of the FP8 casts on a GPU, as a fraction of a device copy of as many bytes in the same run.

Run: python -m megamoe bench quant [--only training]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from megamoe.errors import fail_value
from megamoe.kernels import mlp_quant
from megamoe.kernels.quant import (
    quantize_blockwise_both,
    quantize_rowwise,
    swiglu_backward_quantize_rowwise,
    swiglu_quantize_rowwise,
)

ROUNDS = 15

Case = tuple[str, Callable[[], object], int, int, float | None]
"""(name, call, bytes read and written, calls per graph, target fraction of the copy rate)."""

TRAINING = ((65536, 7168, 2048), (131072, 4096, 2048))
"""Rows of a GPU's experts, hidden and intermediate size, in the backward pass of the FP8 MLP."""


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


def training_cases(num_rows: int, hidden: int, inter: int) -> list[Case]:
    """The casts between the GEMMs of the backward pass."""
    grad_out = torch.randn(num_rows, hidden, device="cuda", dtype=torch.bfloat16)
    rows = quantize_rowwise(grad_out, mn_major=True)
    grad = torch.randn(num_rows, inter, device="cuda", dtype=torch.bfloat16)
    pre = torch.randn(num_rows, 2 * inter, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(num_rows, device="cuda")
    scale_bytes = 4 / 128
    return [
        (
            f"training, both ways [{num_rows}, {hidden}]",
            lambda: mlp_quant.cast(grad_out, columns=True),
            int(grad_out.numel() * (4 + 2 * scale_bytes)),
            2,
            None,
        ),
        (
            f"training, columns of rows [{num_rows}, {hidden}]",
            lambda: mlp_quant.columns_of_rows(rows),
            int(grad_out.numel() * (2 + scale_bytes)),
            4,
            None,
        ),
        (
            f"training, activation backward [{num_rows}, 2 x {inter}]",
            lambda: mlp_quant.activation_backward(grad, pre, weights, "swiglu", None, columns=True),
            int(grad.numel() * (11 + 5 * scale_bytes)),
            2,
            None,
        ),
    ]


def cases() -> list[Case]:
    """Casts of rows and weights."""
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


def main(only: str = "") -> None:
    """Measures the cases whose name contains ``only`` and prints the table.

    Raises:
        MegaMoEError: there are none.
    """
    chosen = [case for case in cases() if only in case[0]]
    chosen += [case for sizes in TRAINING for case in training_cases(*sizes) if only in case[0]]
    if not chosen:
        fail_value("only", only, "must be part of a case's name", "Leave it out to see the names.")
    source = torch.randn(1 << 28, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy_bytes = 2 * source.numel() * 2
    # An element-wise kernel: as a memory-copy node of a graph, copy_ reaches two thirds of its rate.
    timers = [("copy", time_graph(lambda: torch.neg(source, out=target), 3), copy_bytes, None)]
    for name, call, moved, repeats, goal in chosen:
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
