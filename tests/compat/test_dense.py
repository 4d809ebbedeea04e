"""GEMMs of two matrices under DeepGEMM's names, against fp64 products of operands that are exact there."""

from __future__ import annotations

import pytest
import torch

import megamoe.compat.deep_gemm as deep_gemm
from tests.support.errors import fails
from tests.support.metrics import assert_close
from tests.support.scaled import other_major, random_bf16, random_scaled

BF16, FP32 = torch.bfloat16, torch.float32
ROW, SQUARE = (1, 128), (128, 128)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# One row, few rows, tiles cut short in M, N, and in K within a block of scales.
SHAPES = [(1, 192, 512), (5, 128, 128), (129, 320, 576), (300, 64, 192)]
# Rounding to bf16 (0.17 % rms); fp32 results have the tensor cores' sums of e4m3 products.
TOLERANCE = {BF16: 3e-3, FP32: 1e-3}


def output(m: int, n: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``d [m, n]``, NaN, and the memory that it is a part of: two more rows on either side, of sevens."""
    memory = torch.full((m + 4, n), 7.0, dtype=dtype, device=device)
    memory[2:-2] = float("nan")
    return memory[2:-2], memory


def check_neighbours(memory: torch.Tensor) -> None:
    assert (memory[:2] == 7).all() and (memory[-2:] == 7).all(), "wrote outside d"


def addend(kind: str, d: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """``c`` of the call and its fp64 values."""
    values = torch.randn(d.shape).mul(32).to(d.dtype)
    if kind == "none":
        return None, torch.zeros(d.shape, dtype=torch.float64)
    if kind == "in place":
        return d.copy_(values), values.double()
    return values.to(d.device), values.double()


ADDENDS = ["none", "in place", "apart"]

# ---------------------------------------------------------------- FP8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "dtype"), [("none", BF16), *((kind, FP32) for kind in ADDENDS)])
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_gemm_nt(shape, kind, dtype, device, seed):
    m, n, k = shape
    a, a_values = random_scaled((m, k), ROW, device)
    b, b_values = random_scaled((n, k), SQUARE, device)
    d, memory = output(m, n, dtype, device)
    c, c_values = addend(kind, d)
    before = None if c is None else c.clone()
    assert deep_gemm.fp8_gemm_nt(a, b, d, c=c) is None
    assert_close(d.cpu(), a_values @ b_values.T + c_values, TOLERANCE[dtype])
    check_neighbours(memory)
    if kind == "apart":
        assert torch.equal(c, before), "c changed"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param({"recipe": (1, 1, 128)}, id="three numbers"),
        pytest.param({"recipe_a": (1, 128), "recipe_b": (1, 128)}, id="by sides"),
    ],
)
@pytest.mark.parametrize(("kind", "dtype"), [("in place", FP32), ("none", BF16)])
def test_scales_by_rows_on_both_sides(kind, dtype, recipe, device, seed):
    a, a_values = random_scaled((129, 576), ROW, device)
    b, b_values = random_scaled((192, 576), ROW, device)
    d, memory = output(129, 192, dtype, device)
    c, c_values = addend(kind, d)
    deep_gemm.fp8_gemm_nt(a, b, d, c=c, disable_ue8m0_cast=True, **recipe)
    # Each product of two values that were rounded to bf16.
    assert_close(d.cpu() - c_values, a_values @ b_values.T, 4e-3)
    check_neighbours(memory)


def scale_forms(sf: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, cols = sf.shape[-2:]
    wide = torch.full((*sf.shape[:-1], cols + 3), float("nan"), device=sf.device)
    wide[..., :cols] = sf
    return {
        "row-major": sf,
        "MN-major": other_major(sf),
        "MN-major, aligned": deep_gemm.get_mn_major_tma_aligned_tensor(sf),
        "part of wider rows": wide[..., :cols],
    }


@pytest.mark.parametrize("device", DEVICES)
def test_scales_in_any_layout(device, seed):
    (a, a_sf), _ = random_scaled((70, 384), ROW, device)
    (b, b_sf), _ = random_scaled((192, 384), SQUARE, device)
    expected = torch.empty(70, 192, dtype=BF16, device=device)
    deep_gemm.fp8_gemm_nt((a, a_sf), (b, b_sf), expected)
    for name, form in scale_forms(a_sf).items():
        for b_form in (b_sf, other_major(b_sf)):
            d = torch.empty_like(expected)
            deep_gemm.fp8_gemm_nt((a, form), [b, b_form], d, None, (1, 128, 128))
            assert torch.equal(d, expected), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["fp8_gemm", "fp8_fp4_gemm"])
def test_fp8_gemm_of_transposed_arguments(family, device, seed):
    a, a_values = random_scaled((40, 256), ROW, device)
    b, b_values = random_scaled((192, 256), SQUARE, device)
    a_t, b_t = tuple(x.T for x in a), tuple(x.T for x in b)
    for suffix, left, right in (("nt", a, b), ("nn", a, b_t), ("tn", a_t, b_t), ("tt", a_t, b)):
        d = torch.full((40, 192), float("nan"), dtype=BF16, device=device)
        getattr(deep_gemm, f"{family}_{suffix}")(left, right, d)
        assert_close(d.cpu(), a_values @ b_values.T, TOLERANCE[BF16], suffix)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_part_of_wider_ones(device, seed):
    (a, a_sf), a_values = random_scaled((40, 256), ROW, device)
    (b, b_sf), b_values = random_scaled((192, 256), SQUARE, device)
    a16, b16 = (torch.randn(rows, 320, device=device).bfloat16()[:, :256] for rows in (40, 192))
    wide = [torch.zeros(rows, 320, dtype=a.dtype, device=device) for rows in (40, 192)]
    wide[0][:, :256], wide[1][:, :256] = a, b
    memory = torch.full((40, 200), 7.0, device=device)
    d = memory[:, :192]
    deep_gemm.fp8_gemm_nt((wide[0][:, :256], a_sf), (wide[1][:, :256], b_sf), d)
    assert_close(d.cpu(), a_values @ b_values.T, TOLERANCE[FP32])
    before = d.double()
    deep_gemm.bf16_gemm_nt(a16, b16, d, d)
    assert_close(d.cpu(), (before + a16.double() @ b16.double().T).cpu(), 1e-5)
    assert (memory[:, 192:] == 7).all(), "wrote outside d"


def test_fp8_operands_that_are_not_k_major_are_refused():
    (a, a_sf), _ = random_scaled((8, 128), ROW)
    (b, b_sf), _ = random_scaled((64, 128), SQUARE)
    d = torch.empty(8, 64, dtype=BF16)
    with fails(ValueError, "a[0].stride()", (1, 8), "must be K-major"):
        deep_gemm.fp8_gemm_nt((other_major(a), a_sf), (b, b_sf), d)
    with fails(ValueError, "b[0].stride()", (1, 64), "must be K-major"):
        deep_gemm.fp8_gemm_nn((a, a_sf), (b.T.contiguous(), b_sf.T), d)


# ---------------------------------------------------------------- BF16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("kind", ADDENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("suffix", ["nt", "nn", "tn", "tt"])
def test_bf16_gemm(suffix, shape, kind, dtype, device, seed):
    m, n, k = shape
    a, a_values = random_bf16((m, k), device)
    b, b_values = random_bf16((n, k), device)
    call = getattr(deep_gemm, f"bf16_gemm_{suffix}")
    for left, right in ((a, b), (other_major(a), b), (a, other_major(b)), (other_major(a), other_major(b))):
        d, memory = output(m, n, dtype, device)
        c, c_values = addend(kind, d)
        assert call(left.T if suffix[0] == "t" else left, right.T if suffix[1] == "n" else right, d, c=c) is None
        assert_close(d.cpu(), a_values @ b_values.T + c_values, 3e-3 if dtype == BF16 else 1e-5)
        check_neighbours(memory)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("kind", ADDENDS)
@pytest.mark.parametrize("suffix", ["nt", "nn", "tn", "tt"])
def test_cublaslt_gemm(suffix, kind, dtype, device, seed):
    a, a_values = random_bf16((48, 320), device)
    b, b_values = random_bf16((64, 320), device)
    d, memory = output(48, 64, dtype, device)
    c, c_values = addend(kind, d)
    call = getattr(deep_gemm, f"cublaslt_gemm_{suffix}")
    call(a.T if suffix[0] == "t" else a, b.T if suffix[1] == "n" else b, d, c=c)
    assert_close(d.cpu(), a_values @ b_values.T + c_values, 3e-3 if dtype == BF16 else 1e-5)
    check_neighbours(memory)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("kind", ADDENDS)
def test_cublaslt_gemm_of_codes(kind, dtype, device, seed):
    a, b = (torch.randn(48, 320).to(torch.float8_e4m3fn) for _ in range(2))
    d, memory = output(48, 48, dtype, device)
    c, c_values = addend(kind, d)
    deep_gemm.cublaslt_gemm_nt(a.to(device), b.to(device), d, c)
    assert_close(d.cpu() - c_values, a.double() @ b.double().T, 2e-2 if c is not None and dtype == BF16 else 3e-3)
    check_neighbours(memory)


# ---------------------------------------------------------------- edges and errors


@pytest.mark.parametrize("with_c", [False, True])
def test_a_sum_over_nothing(with_c, seed):
    c = torch.randn(3, 64) if with_c else None
    expected = torch.zeros(3, 64) if c is None else c
    a8, b8 = random_scaled((3, 0), ROW)[0], random_scaled((64, 0), SQUARE)[0]
    a16, b16 = random_bf16((3, 0))[0], random_bf16((64, 0))[0]
    for call, a, b in (
        (deep_gemm.fp8_gemm_nt, a8, b8),
        (deep_gemm.bf16_gemm_nt, a16, b16),
        (deep_gemm.cublaslt_gemm_nt, a16, b16),
    ):
        d = torch.full((3, 64), float("nan"))
        call(a, b, d, c)
        assert torch.equal(d, expected)


def test_no_rows(seed):
    b8 = random_scaled((64, 128), SQUARE)[0]
    deep_gemm.fp8_gemm_nt(random_scaled((0, 128), ROW)[0], b8, torch.empty(0, 64, dtype=BF16))
    deep_gemm.bf16_gemm_nt(random_bf16((0, 128))[0], random_bf16((64, 128))[0], torch.empty(0, 64, dtype=BF16))


def fp8_call(**changes):
    """A valid call, but for ``changes``."""
    arguments = {
        "a": random_scaled((8, 256), ROW)[0],
        "b": random_scaled((64, 256), SQUARE)[0],
        "d": torch.empty(8, 64, dtype=BF16),
    }
    deep_gemm.fp8_gemm_nt(**{**arguments, **changes})


def codes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float8_e4m3fn)


FP8_ERRORS = {
    "a without scales": ({"a": codes(8, 256)}, TypeError, "a", "Tensor", "must be a pair (codes, scales)"),
    "b of three": ({"b": (codes(64, 256),) * 3}, TypeError, "b", "tuple", "must be a pair (codes, scales)"),
    "a in bf16": (
        {"a": (torch.zeros(8, 256, dtype=BF16), torch.ones(8, 2))},
        TypeError,
        "a[0].dtype",
        BF16,
        "must be one of torch.float8_e4m3fn",
    ),
    "K of b": ({"b": (codes(64, 128), torch.ones(1, 1))}, ValueError, "b.shape", [64, 128], "must have K = 256 as a"),
    "shape of d": ({"d": torch.empty(8, 65, dtype=BF16)}, ValueError, "d.shape", [8, 65], "must be [8, 64]"),
    "dtype of d": ({"d": torch.empty(8, 64).half()}, TypeError, "d.dtype", torch.float16, "must be one of"),
    "d column-major": (
        {"d": other_major(torch.empty(8, 64))},
        ValueError,
        "d.stride()",
        (1, 8),
        "must be 1 along N",
    ),
    "c with d in bf16": (
        {"c": torch.empty(8, 64, dtype=BF16)},
        TypeError,
        "d.dtype",
        BF16,
        "must be torch.float32 together with c",
    ),
    "c of another dtype": ({"c": torch.empty(8, 64)}, TypeError, "c.dtype", FP32, "must be one of torch.bfloat16"),
    "scales of a": (
        {"a": (codes(8, 256), torch.ones(8, 3))},
        ValueError,
        "a[1].shape",
        [8, 3],
        "must be [8, 2]",
    ),
    "scales of b by rows without a recipe": (
        {"b": (codes(64, 256), torch.ones(64, 2))},
        ValueError,
        "b[1].shape",
        [64, 2],
        "must be [1, 2]",
    ),
    "packed scales": (
        {"a": (codes(8, 256), torch.ones(8, 2, dtype=torch.int32))},
        TypeError,
        "a[1].dtype",
        torch.int32,
        "must be one of torch.float32",
    ),
    "recipe of a": ({"recipe": (128, 128, 128)}, ValueError, "recipe of a", (128, 128), "must be (1, 128)"),
    "recipe of b": (
        {"recipe_a": (1, 128), "recipe_b": (1, 32)},
        ValueError,
        "recipe of b",
        (1, 32),
        "must be (128, 128) or (1, 128)",
    ),
    "recipe of one side": ({"recipe_a": (1, 128)}, ValueError, "recipe_a", (1, 128), "needs the recipe of the other"),
    "two recipes": (
        {"recipe": (1, 128, 128), "recipe_a": (1, 128), "recipe_b": (128, 128)},
        ValueError,
        "recipe",
        (1, 128, 128),
        "excludes recipe_a and recipe_b",
    ),
    "recipe of two numbers": ({"recipe": (1, 128)}, ValueError, "recipe", (1, 128), "must be 3 numbers"),
}


@pytest.mark.parametrize("case", FP8_ERRORS)
def test_fp8_errors(case):
    changes, kind, argument, value, rule = FP8_ERRORS[case]
    with fails(kind, argument, value, rule):
        fp8_call(**changes)


def test_fp8_call_of_the_error_tests_is_valid():
    fp8_call()


def test_bf16_errors(seed):
    a, b, d = random_bf16((8, 96))[0], random_bf16((64, 96))[0], torch.empty(8, 64, dtype=BF16)
    with fails(TypeError, "a.dtype", FP32, "must be one of torch.bfloat16"):
        deep_gemm.bf16_gemm_nt(a.float(), b, d)
    with fails(ValueError, "b.shape", [64, 95], "must have K = 96 as a"):
        deep_gemm.bf16_gemm_nt(a, b[:, :95].contiguous(), d)
    with fails(ValueError, "b.shape", [64, 96, 1], "must be [any, any]"):
        deep_gemm.bf16_gemm_nn(a, b.unsqueeze(2), d)
    with fails(ValueError, "a.stride()", (192, 2), "must be 1 along rows or columns"):
        deep_gemm.bf16_gemm_nt(torch.zeros(8, 192, dtype=BF16)[:, ::2], b, d)
    memory = torch.empty(8, 64, dtype=BF16)
    with fails(ValueError, "c.stride()", (0, 1), "must be d's (64, 1) in the same memory"):
        deep_gemm.bf16_gemm_nt(a, b, memory, memory[:1].expand(8, 64))
