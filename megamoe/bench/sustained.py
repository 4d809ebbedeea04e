"""BF16 GEMMs of a layer back to back, ours and torch's: rates, clocks and watts of a GPU that has become hot.

Run: python -m megamoe bench sustained. At its power limit a GPU lowers its clocks until the work fits: what counts then
are operations per joule, and contenders whose rates differ in short runs meet. Clocks and watts are nvidia-smi's, which
is only asked; without it these columns are left out.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from megamoe.bench.tables import columns_of, show, write_csv
from megamoe.bench.timing import check_gpu
from megamoe.kernels import gemm, gemm_k
from megamoe.kernels.row_groups import RowGroups

SIZES = (32, 2048, 7168, 2048)
"""Experts, rows of each, hidden and intermediate size."""

SECONDS = 0.6
"""Of each GEMM."""

SETTLING = 0.15
"""Seconds at the start whose clocks do not count."""

PERIOD_MS = 25

CALLS = 8
"""Launched before the host looks at the clock again; two such batches are under way at a time."""

Case = tuple[str, str, Callable[[], object], float]
"""(GEMM, whose, a call, its operations)."""


@dataclass
class Sensors:
    """Clocks and watts of the current GPU while the context is open.

    Attributes:
        samples: (seconds, MHz, W).
    """

    samples: list[tuple[float, float, float]] = field(default_factory=list)
    _process: subprocess.Popen | None = None

    def __enter__(self) -> Sensors:
        program = shutil.which("nvidia-smi")
        if program is not None:
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            query = [program, "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
            query += ["-lms", str(PERIOD_MS), "-i", f"GPU-{uuid}"]
            self._process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _read(self, lines) -> None:
        for line in lines:
            try:
                clock, power = map(float, line.split(","))
            except ValueError:
                # A sensor that the GPU lacks.
                continue
            self.samples.append((time.perf_counter(), clock, power))

    def between(self, start: float, end: float) -> tuple[float, float] | None:
        """Median MHz and W; None where there are none."""
        found = [sample[1:] for sample in list(self.samples) if start <= sample[0] <= end]
        if not found:
            return None
        clocks, watts = zip(*found, strict=True)
        return statistics.median(clocks), statistics.median(watts)


def cases(sizes: Sequence[int] = SIZES, device: str = "cuda") -> list[Case]:
    """The GEMMs of a training step: forward, gradients of rows and of weights."""
    experts, rows_each, hidden, inter = sizes
    num_rows = experts * rows_each

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    x, pre, act, grad = (random(num_rows, columns) for columns in (hidden, 2 * inter, inter, hidden))
    up, down = random(experts, 2 * inter, hidden), random(experts, hidden, inter)
    ends = torch.arange(1, experts + 1, dtype=torch.int32, device=device) * rows_each
    rows = RowGroups.psum(ends)

    def nt(a: torch.Tensor, b: torch.Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
        ours = lambda: gemm.grouped_bf16_gemm_nt(a, b, rows)  # noqa: E731
        return ours, lambda: F.grouped_mm(a, b.transpose(1, 2), offs=ends)

    def nn(a: torch.Tensor, b: torch.Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
        return lambda: gemm.grouped_bf16_gemm_nn(a, b, rows), lambda: F.grouped_mm(a, b, offs=ends)

    def tn(a: torch.Tensor, b: torch.Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
        ours = lambda: gemm_k.k_grouped_bf16_gemm_tn(a, b, rows, out_dtype=torch.bfloat16)  # noqa: E731
        return ours, lambda: F.grouped_mm(a.t(), b, offs=ends)

    found: list[Case] = []
    for name, pair, columns in (
        ("GEMM 1", nt(x, up), 2),
        ("GEMM 2", nt(act, down), 1),
        ("GEMM 2, rows' gradient", nn(grad, down), 1),
        ("GEMM 1, rows' gradient", nn(pre, up), 2),
        ("GEMM 1, weights' gradient", tn(pre, x), 2),
        ("GEMM 2, weights' gradient", tn(grad, act), 1),
    ):
        operations = 2.0 * num_rows * hidden * inter * columns
        found += [(name, whose, call, operations) for whose, call in zip(("megamoe", "torch"), pair, strict=True)]
    return found


def sustained(call: Callable[[], object], seconds: float) -> tuple[float, float, float]:
    """Microseconds of a call in a row of calls without a gap, and when the row began and ended."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin, calls, before = time.perf_counter(), 0, None
    start.record()
    while time.perf_counter() - begin < seconds:
        for _ in range(CALLS):
            call()
        calls += CALLS
        batch = torch.cuda.Event()
        batch.record()
        if before is not None:
            before.synchronize()
        before = batch
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / calls, begin, time.perf_counter()


def row_of(case: Case, microseconds: float, seen: tuple[float, float] | None) -> dict[str, object]:
    """A row of the table; ``seen``: MHz and W."""
    name, whose, _, operations = case
    tflops = operations / microseconds / 1e6
    row: dict[str, object] = {"gemm": name, "whose": whose, "us": round(microseconds, 1), "tflops": round(tflops, 1)}
    if seen is not None:
        clock, watts = seen
        row |= {"mhz": round(clock), "watts": round(watts), "tflops_per_ghz": round(tflops / clock * 1000, 1)}
    return row


@torch.no_grad()
def run(folder: Path, seconds: float = SECONDS) -> list[dict[str, object]]:
    """Measures, prints, and writes ``sustained.csv`` into ``folder``.

    Raises:
        MegaMoEError: there is no GPU.
    """
    check_gpu()
    rows = []
    with Sensors() as sensors:
        for case in cases():
            microseconds, begin, end = sustained(case[2], seconds)
            rows.append(row_of(case, microseconds, sensors.between(begin + SETTLING, end)))
    show(rows, columns_of(rows))
    write_csv(rows, folder / "sustained.csv")
    return rows
