"""Grouped GEMMs under DeepGEMM's names, against fp64 products group by group."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import megamoe.compat.deep_gemm as deep_gemm
from tests.support.errors import fails
from tests.support.metrics import assert_close
from tests.support.scaled import other_major, random_bf16, random_scaled

BF16, INT32 = torch.bfloat16, torch.int32
NAN = float("nan")
UNTOUCHED = 1234.0
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
COUNTS = [
    pytest.param([3, 1, 2], id="few rows"),
    pytest.param([0, 130, 0, 5, 0], id="empty first, middle and last"),
    pytest.param([127, 128, 129], id="around tile borders"),
    pytest.param([70], id="one group"),
]
N, K = 192, 320
TOLERANCE = 3e-3


def spans_of(counts: list[int]) -> list[tuple[int, int]]:
    """First and last row plus one of each group, starts at multiples of 128."""
    spans, start = [], 0
    for count in counts:
        spans.append((start, start + count))
        start += -(-count // 128) * 128
    return spans


def num_rows_of(counts: list[int]) -> int:
    return sum(-(-count // 128) * 128 for count in counts)


def layout_of(counts: list[int], psum: bool, device: str) -> torch.Tensor:
    spans = spans_of(counts)
    if psum:
        return torch.tensor([end for _, end in spans], dtype=INT32, device=device)
    ids = torch.full((num_rows_of(counts),), -1, dtype=INT32)
    for group, (start, end) in enumerate(spans):
        ids[start:end] = group
    return ids.to(device)


def fill_padding(counts: list[int], rows: torch.Tensor, value: float) -> None:
    for start, end in spans_of(counts):
        rows[end : start + -(-(end - start) // 128) * 128] = value


def operands(fp8: bool, counts: list[int], device: str):
    """``a``, its scales if any, and fp64 values; ``b`` alike."""
    groups, rows = len(counts), num_rows_of(counts)
    if fp8:
        return random_scaled((rows, K), (1, 128), device), random_scaled((groups, N, K), (128, 128), device)
    return random_bf16((rows, K), device), random_bf16((groups, N, K), device)


def contiguous_call(fp8: bool, suffix: str) -> Callable:
    name = "fp8" if fp8 else "bf16"
    return getattr(deep_gemm, f"m_grouped_{name}_gemm_{suffix}_contiguous")


def transposed(b):
    return tuple(x.mT for x in b) if isinstance(b, tuple) else b.mT


def check_contiguous(fp8: bool, suffix: str, counts: list[int], psum: bool, device: str) -> None:
    (a, a_values), (b, b_values) = operands(fp8, counts, device)
    # Padding is zero where rows have an expert, and in the psum form whatever the memory held.
    fill_padding(counts, a[1] if fp8 else a, NAN if psum else 0.0)
    if not fp8 and suffix == "nn":
        b = other_major(b)
    d = torch.full((num_rows_of(counts), N), UNTOUCHED, dtype=BF16, device=device)
    layout = layout_of(counts, psum, device)
    hints = {"use_psum_layout": psum}
    if suffix == "nt" and psum:
        hints["expected_m_for_psum_layout"] = 60
    arguments = (a, transposed(b) if suffix == "nn" else b, d, layout)
    assert contiguous_call(fp8, suffix)(*arguments, **hints) is None
    for group, (start, end) in enumerate(spans_of(counts)):
        expected = a_values[start:end] @ b_values[group].T
        assert_close(d[start:end].cpu(), expected, TOLERANCE, f"group {group}")
    if not psum:
        assert (d[layout < 0] == 0).all(), "padding rows of zeros have a result"
    else:
        gaps = torch.ones(d.shape[0], dtype=torch.bool)
        for start, end in spans_of(counts):
            gaps[start:end] = False
        assert (d[gaps.to(device)] == UNTOUCHED).all(), "rows between groups were written"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("psum", [False, True])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("suffix", ["nt", "nn"])
def test_fp8_contiguous(suffix, counts, psum, device, seed):
    check_contiguous(True, suffix, counts, psum, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("psum", [False, True])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("suffix", ["nt", "nn"])
def test_bf16_contiguous(suffix, counts, psum, device, seed):
    check_contiguous(False, suffix, counts, psum, device)


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_weights_of_either_major(device, seed):
    (a, _), (b, _) = operands(False, [100, 30], device)
    layout = layout_of([100, 30], False, device)
    results = []
    for weight in (b, other_major(b)):
        d = torch.empty(num_rows_of([100, 30]), N, dtype=BF16, device=device)
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, weight, d, layout)
        results.append(d)
    assert_close(results[0].cpu(), results[1].cpu().double(), TOLERANCE)


def check_masked(fp8: bool, counts: list[int], device: str) -> None:
    groups, max_m = len(counts), 160
    if fp8:
        a, a_values = random_scaled((groups, max_m, K), (1, 128), device)
        b, b_values = random_scaled((groups, N, K), (128, 128), device)
    else:
        a, a_values = random_bf16((groups, max_m, K), device)
        b, b_values = random_bf16((groups, N, K), device)
    for group, count in enumerate(counts):
        (a[1] if fp8 else a)[group, count:] = NAN
    d = torch.full((groups, max_m, N), UNTOUCHED, dtype=BF16, device=device)
    masked_m = torch.tensor(counts, dtype=INT32, device=device)
    call = deep_gemm.m_grouped_fp8_gemm_nt_masked if fp8 else deep_gemm.m_grouped_bf16_gemm_nt_masked
    assert call(a, b, d, masked_m, 30) is None
    for group, count in enumerate(counts):
        expected = a_values[group, :count] @ b_values[group].T
        assert_close(d[group, :count].cpu(), expected, TOLERANCE, f"group {group}")
        assert (d[group, count:] == UNTOUCHED).all(), f"group {group}: rows past masked_m were written"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counts", COUNTS)
def test_fp8_masked(counts, device, seed):
    check_masked(True, counts, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counts", COUNTS)
def test_bf16_masked(counts, device, seed):
    check_masked(False, counts, device)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_part_of_wider_ones(device, seed):
    (a, a_values), (b, b_values) = operands(False, [130], device)
    wide = torch.randn(256, K + 64, device=device).bfloat16()
    wide[:, :K] = a
    memory = torch.full((256, N + 8), 7.0, dtype=BF16, device=device)
    d = memory[:, :N]
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(wide[:, :K], b, d, layout_of([130], True, device), use_psum_layout=True)
    assert_close(d[:130].cpu(), a_values[:130] @ b_values[0].T, TOLERANCE)
    memory[:130, :N] = 7
    assert (memory == 7).all(), "wrote outside the group's rows of d"


def test_no_rows(seed):
    (b, _), layout = random_bf16((2, N, K)), torch.empty(0, dtype=INT32)
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(torch.empty(0, K, dtype=BF16), b, torch.empty(0, N, dtype=BF16), layout)
    a, b = random_scaled((0, K), (1, 128))[0], random_scaled((2, N, K), (128, 128))[0]
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, torch.empty(0, N, dtype=BF16), layout)


# ---------------------------------------------------------------- errors


def fp8_call(**changes) -> None:
    """A valid call of 256 rows and 2 groups, but for ``changes``."""
    arguments = {
        "a": random_scaled((256, K), (1, 128))[0],
        "b": random_scaled((2, N, K), (128, 128))[0],
        "d": torch.empty(256, N, dtype=BF16),
        "grouped_layout": torch.zeros(256, dtype=INT32),
    }
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(**{**arguments, **changes})


CONTIGUOUS_ERRORS = {
    "layout of another length": (
        {"grouped_layout": torch.zeros(2, dtype=INT32)},
        ValueError,
        "grouped_layout.shape",
        [2],
        "must be [256]",
    ),
    "psum layout of another length": (
        {"grouped_layout": torch.zeros(256, dtype=INT32), "use_psum_layout": True},
        ValueError,
        "grouped_layout.shape",
        [256],
        "must be [2]",
    ),
    "layout of int64": (
        {"grouped_layout": torch.zeros(256, dtype=torch.int64)},
        TypeError,
        "grouped_layout.dtype",
        torch.int64,
        "must be one of torch.int32",
    ),
    "strided layout": (
        {"grouped_layout": torch.zeros(512, dtype=INT32)[::2]},
        ValueError,
        "grouped_layout.stride()",
        (2,),
        "must be dense",
    ),
    "hint without psum": (
        {"expected_m_for_psum_layout": 4},
        ValueError,
        "expected_m_for_psum_layout",
        4,
        "needs use_psum_layout",
    ),
    "scales of b by rows": (
        {"recipe": (1, 1, 128)},
        ValueError,
        "recipe of b",
        (1, 128),
        "must be (128, 128) in grouped GEMMs",
    ),
    "shape of d": ({"d": torch.empty(255, N, dtype=BF16)}, ValueError, "d.shape", [255, N], f"must be [256, {N}]"),
}


@pytest.mark.parametrize("case", CONTIGUOUS_ERRORS)
def test_contiguous_errors(case):
    changes, kind, argument, value, rule = CONTIGUOUS_ERRORS[case]
    with fails(kind, argument, value, rule):
        fp8_call(**changes)


def test_call_of_the_error_tests_is_valid():
    fp8_call()


def test_operand_errors(seed):
    layout, d = torch.zeros(256, dtype=INT32), torch.empty(256, N, dtype=BF16)
    (a, _), (b, _) = random_bf16((256, K)), random_bf16((2, N, K))
    with fails(ValueError, "a.stride()", (1, 256), "must be K-major"):
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(other_major(a), b, d, layout)
    with fails(ValueError, "b.shape", [N, K], "must be [any, any, any]"):
        deep_gemm.m_grouped_bf16_gemm_nn_contiguous(a, b[0], d, layout)
    with fails(ValueError, "b.stride()", (2 * N * K, K, 1), "must be dense from group to group"):
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, torch.zeros(4, N, K, dtype=BF16)[::2], d, layout)
    (a8, _), (b8, _) = random_scaled((256, K), (1, 128)), random_scaled((2, N, K), (128, 128))
    with fails(ValueError, "b[0].stride()", (N * K, 1, N), "must be K-major"):
        deep_gemm.m_grouped_fp8_gemm_nn_contiguous(a8, (b8[0].mT.contiguous(), b8[1].mT), d, layout)


def test_masked_errors(seed):
    (a, _), (b, _) = random_bf16((2, 8, K)), random_bf16((2, N, K))
    d, masked_m = torch.empty(2, 8, N, dtype=BF16), torch.tensor([3, 4], dtype=INT32)
    call = deep_gemm.m_grouped_bf16_gemm_nt_masked
    call(a, b, d, masked_m, 4)
    with fails(ValueError, "expected_m", 0, "must be at least 1"):
        call(a, b, d, masked_m, 0)
    with fails(ValueError, "masked_m.shape", [3], "must be [2]"):
        call(a, b, d, torch.zeros(3, dtype=INT32), 4)
    with fails(ValueError, "b.shape", [3, N, K], "must have 2 groups as a"):
        call(a, torch.zeros(3, N, K, dtype=BF16), d, masked_m, 4)
    with fails(ValueError, "b.stride()", (N * K, 1, N), "must be K-major"):
        call(a, other_major(b), d, masked_m, 4)
