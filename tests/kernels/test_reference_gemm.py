"""The grouped GEMMs against fp64 loops over rows and experts."""

from __future__ import annotations

import pytest
import torch

from megamoe.kernels.layout import layout_pairs
from megamoe.kernels.reference import grouped_gemm_k, grouped_gemm_nn, grouped_gemm_nt, segment_sum
from megamoe.types import ExpertLayout
from tests.support.metrics import assert_close

COUNTS = [
    pytest.param([3, 1, 2], id="few rows"),
    pytest.param([0, 5, 0, 0, 7, 0], id="empty first, middle and last"),
    pytest.param([0, 0, 0], id="no rows at all"),
    pytest.param([0, 260, 0, 0, 0], id="all to one expert"),
    pytest.param([127, 128, 129, 255, 256, 257], id="around tile borders"),
    pytest.param([200], id="one local expert"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
# Operands are exact in fp64 and sums are fp32 (fp64): the dtype of bf16 operands costs nothing.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float64: 1e-14}


def layout_of(counts: list[int]) -> ExpertLayout:
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return layout_pairs(ids, len(counts))[0]


def pool(layout: ExpertLayout, width: int, padding: float = float("nan")) -> torch.Tensor:
    """Random rows; the padding is poison unless told otherwise: rows beyond a group's count must not be read."""
    rows = torch.full((layout.num_rows, width), padding)
    for start, end in layout.spans():
        rows[start:end] = torch.randn(end - start, width)
    return rows


def poison_allocator(*shape: int) -> None:
    """Leaves NaN in the memory that the next allocation of this size is likely to get."""
    blocks = [torch.full(shape, float("nan")) for _ in range(8)]
    del blocks


def nn_by_loop(a: torch.Tensor, b: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    out = torch.zeros(a.shape[0], b.shape[2], dtype=torch.float64)
    for expert, (start, end) in enumerate(layout.spans()):
        for row in range(start, end):
            out[row] = (a[row].double().unsqueeze(1) * b[expert].double()).sum(dim=0)
    return out


def k_by_loop(a: torch.Tensor, b: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    out = torch.zeros(layout.counts.numel(), a.shape[1], b.shape[1], dtype=torch.float64)
    for expert, (start, end) in enumerate(layout.spans()):
        for row in range(start, end):
            out[expert] += a[row].double().unsqueeze(1) * b[row].double()
    return out


def check_rows(out: torch.Tensor, expected: torch.Tensor, layout: ExpertLayout, tolerance: float) -> None:
    """Per expert: an error in a small group must not vanish among the rows of a large one."""
    padding = torch.ones(layout.num_rows, dtype=torch.bool)
    for expert, (start, end) in enumerate(layout.spans()):
        assert_close(out[start:end], expected[start:end], tolerance, f"expert {expert}")
        padding[start:end] = False
    assert torch.equal(out[padding], torch.zeros_like(out[padding]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", COUNTS)
def test_nt_and_nn(seed, counts, dtype):
    layout = layout_of(counts)
    a, b = pool(layout, 40).to(dtype), (torch.randn(len(counts), 40, 24) / 40**0.5).to(dtype)
    expected = nn_by_loop(a, b, layout)
    for out in (grouped_gemm_nn(a, b, layout), grouped_gemm_nt(a, b.transpose(1, 2).contiguous(), layout)):
        assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        check_rows(out, expected, layout, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", COUNTS)
def test_k_and_segment_sum(seed, counts, dtype):
    layout = layout_of(counts)
    a, b = pool(layout, 24).to(dtype), pool(layout, 40).to(dtype)
    poison_allocator(len(counts), 24, 40)
    out = grouped_gemm_k(a, b, layout)
    sums = segment_sum(a, layout)
    assert out.dtype == sums.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = k_by_loop(a, b, layout)
    for expert, (start, end) in enumerate(layout.spans()):
        if start == end:
            # Exactly zero, not what was in the memory.
            assert torch.equal(out[expert], torch.zeros_like(out[expert]))
            assert torch.equal(sums[expert], torch.zeros_like(sums[expert]))
        else:
            assert_close(out[expert], expected[expert], TOLERANCE[dtype], f"expert {expert}")
            assert_close(sums[expert], a[start:end].double().sum(dim=0), TOLERANCE[dtype], f"sum of expert {expert}")


def test_views(seed):
    """Transposed weights and rows that are a slice of a wider buffer need no copy by the caller."""
    layout = layout_of([5, 0, 130])
    a, b = pool(layout, 64), torch.randn(3, 16, 64)
    slices = a[:, 1:33], b[..., 1:33]
    copies = [part.contiguous() for part in slices]
    assert_close(grouped_gemm_nt(*slices, layout), grouped_gemm_nt(*copies, layout), 1e-6, "NT")
    column_major, every_other = a.t().contiguous().t(), a[:, ::2]
    copies = a, every_other.contiguous()
    assert_close(grouped_gemm_k(column_major, every_other, layout), grouped_gemm_k(*copies, layout), 1e-6, "K")


def test_mixed_dtypes_promote(seed):
    """fp32 rows with fp64 weights and the reverse accumulate in fp64."""
    layout = layout_of([5, 3])
    a, b = pool(layout, 16), torch.randn(2, 16, 8, dtype=torch.float64)
    for left, right in ((a, b), (a.double(), b.float())):
        out = grouped_gemm_nn(left, right, layout)
        assert out.dtype == torch.float64
        check_rows(out, nn_by_loop(left, right, layout), layout, 1e-14)


def test_nan_row_spoils_only_itself(seed):
    layout = layout_of([5, 130])
    a, b = pool(layout, 16), torch.randn(2, 16, 8)
    clean = grouped_gemm_nn(a, b, layout)
    a[140, 3] = float("nan")
    out = grouped_gemm_nn(a, b, layout)
    assert out.isnan().any(dim=1).nonzero().flatten().tolist() == [140]
    others = torch.arange(layout.num_rows) != 140
    # To rounding only: a GEMM may sum in another order where NaN is about.
    assert_close(out[others], clean[others], 1e-6)
