"""Sums and products for gradients of biases: the Triton kernels in the interpreter, and on a GPU, without a wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megamoe.kernels import pool_gemm, reference
from megamoe.types import ExpertLayout
from tests.kernels.test_pool_gemm import COUNTS, layout_of, to
from tests.support.metrics import assert_close

ROOT = Path(__file__).parents[2]


def poisoned(layout: ExpertLayout, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows; NaN in all that are no expert's."""
    rows = torch.full((layout.num_rows, columns), float("nan"), dtype=dtype)
    for start, end in layout.spans():
        rows[start:end] = torch.randn(end - start, columns, dtype=dtype)
    return rows


def check(layout: ExpertLayout, rows: torch.Tensor, out: torch.Tensor, weights: torch.Tensor | None = None) -> None:
    wide = rows.double() if weights is None else rows.double() * weights.double().unsqueeze(1)
    assert out.dtype == reference.accumulation_dtype(rows) and out.shape == (layout.counts.numel(), rows.shape[1])
    for expert, (start, end) in enumerate(layout.spans()):
        if start == end:
            assert torch.equal(out[expert].cpu(), torch.zeros(rows.shape[1], dtype=out.dtype)), expert
        else:
            assert_close(out[expert].cpu(), wide[start:end].sum(dim=0), 1e-5, f"expert {expert}")


def weights_of(layout: ExpertLayout) -> torch.Tensor:
    """Positive, so that no sum is small by chance; NaN where no row is any expert's."""
    return poisoned(layout, 1, torch.float32)[:, 0].abs() + 0.1


def check_dots(layout: ExpertLayout, rows: torch.Tensor, vectors: torch.Tensor, out: torch.Tensor) -> None:
    assert out.dtype == reference.accumulation_dtype(rows) and out.shape == rows.shape[:1]
    for expert, (start, end) in enumerate(layout.spans()):
        mine, (values, vector) = out[start:end].cpu(), (x.double() for x in (rows[start:end], vectors[expert]))
        # A sum may be small by chance.
        limit = 1e-6 * (values.abs() @ vector.abs())
        assert ((mine - values @ vector).abs() <= limit).all(), f"expert {expert}"


IN_INTERPRETER = """
import contextlib, sys
import torch

torch.cuda.device = lambda device: contextlib.nullcontext()

from megamoe.kernels import reference, triton_segments
from megamoe.kernels.layout import row_expert_ids
from tests.kernels.test_pool_gemm import COUNTS, layout_of
from tests.kernels.test_segment_sums import check, check_dots, poisoned, weights_of

torch.manual_seed(int(sys.argv[1]))
counts = [param.values[0] for param in COUNTS] + [[1] * 130]
for number, each in enumerate(counts):
    layout = layout_of(each, spare=128)
    dtype = (torch.float32, torch.bfloat16, torch.float64)[number % 3]
    # Many experts have many rows, which are slow here: one block of columns, and fewer programs.
    many = len(each) > 128
    triton_segments.SPLITS, triton_segments.DOT_ROWS = (2, 64) if many else (8, 4)
    rows = poisoned(layout, 200, dtype)[:, :8 if many else 72 + number]
    assert rows.stride(0) == 200
    wide = reference.accumulation_dtype(rows)
    check(layout, rows, triton_segments.segment_sums(rows, layout.starts, layout.counts, wide))
    weights = weights_of(layout)
    out = triton_segments.segment_sums(rows, layout.starts, layout.counts, wide, weights)
    check(layout, rows, out, weights)
    rows = poisoned(layout, 400, dtype)[:, 20:28 if many else 300 + number]
    vectors = torch.randn(len(each), rows.shape[1], dtype=(dtype, wide)[number % 2])
    out = triton_segments.row_dots(rows, vectors, row_expert_ids(layout), wide)
    check_dots(layout, rows, vectors, out)
print("done")
"""


def test_kernel_in_the_interpreter(seed):
    """A process of its own, as triton decides at its import."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", IN_INTERPRETER, str(seed)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "done", done.stderr[-3000:]


@pytest.mark.parametrize("counts", COUNTS)
def test_cpu(counts, seed):
    layout = layout_of(counts, spare=128)
    rows = poisoned(layout, 24, torch.float32)
    check(layout, rows, pool_gemm.segment_sum(rows, layout))
    weights, vectors = weights_of(layout), torch.randn(layout.counts.numel(), 24)
    check(layout, rows, pool_gemm.segment_sum(rows, layout, weights), weights)
    check_dots(layout, rows, vectors, pool_gemm.row_dots(rows, vectors, layout))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("counts", [*COUNTS, pytest.param([1] * 300, id="many experts")])
def test_gpu(counts, dtype, seed):
    """Right, without a wait for the device, and with the same bits again and beside other experts' rows."""
    layout = layout_of(counts, spare=128)
    rows, there = poisoned(layout, 264, dtype), to(layout, "cuda")
    on_gpu = rows.cuda()
    pool_gemm.segment_sum(on_gpu, there)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, again = (pool_gemm.segment_sum(on_gpu, there) for _ in range(2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(layout, rows, out)
    assert torch.equal(out, again)
    # Column slices, whose rows do not follow each other in memory.
    assert torch.equal(pool_gemm.segment_sum(on_gpu[:, 64:200], there), out[:, 64:200])
    weights, vectors = weights_of(layout), torch.randn(layout.counts.numel(), 264)
    check(layout, rows, pool_gemm.segment_sum(on_gpu, there, weights.cuda()), weights)
    for each in (vectors, vectors.to(dtype)):
        check_dots(layout, rows, each, pool_gemm.row_dots(on_gpu, each.cuda(), there))


@pytest.mark.gpu
def test_gpu_without_rows():
    empty = to(ExpertLayout(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 0), "cuda")
    out = pool_gemm.segment_sum(torch.zeros(0, 40, device="cuda"), empty)
    assert torch.equal(out, torch.zeros(3, 40, device="cuda"))
