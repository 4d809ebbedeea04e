"""Hopper's casts between the GEMMs of the FP8 MLP, executed on the CPU: the bits of the public casts."""

from __future__ import annotations

import math
import random

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from megamoe.kernels import mlp_quant, quant  # noqa: E402
from megamoe.types import Fp8Tensor  # noqa: E402
from tests.kernels.test_mlp_quant import FORMS, case  # noqa: E402
from tests.support.cast_sim import simulated_casts  # noqa: E402

POLICIES = ("rr", "random", "eager", "lazy", "starve", "pct")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def schedule(seed: int) -> dict[str, object]:
    """A policy, a seed and a number of multiprocessors."""
    rng = random.Random(seed)
    return dict(policy=rng.choice(POLICIES), seed=rng.randrange(1000), sms=rng.randint(1, 5))


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """But for the payload and the sign of NaN."""
    actual, expected = actual.float(), expected.float()
    both_nan = actual.isnan() & expected.isnan()
    return bool(((actual.view(torch.int32) == expected.view(torch.int32)) | both_nan).all())


def assert_same_bits(actual: Fp8Tensor, expected: Fp8Tensor, what: str) -> None:
    assert actual.block == expected.block, what
    assert actual.scales.shape == expected.scales.shape and same_bits(actual.scales, expected.scales), f"{what}: scales"
    assert same_bits(actual.codes, expected.codes), f"{what}: codes"


def check_casts(x: torch.Tensor, **options) -> None:
    """``x`` in both forms, and its rows' values in blocks."""
    both = mlp_quant.cast(x, columns=True)
    blocks = mlp_quant.columns_of_rows(both.rows)
    with simulated_casts(**options):
        got = mlp_quant.cast(x, columns=True)
        got_blocks = mlp_quant.columns_of_rows(both.rows)
    assert_same_bits(got.rows, both.rows, "rows")
    assert_same_bits(got.columns, both.columns, "columns")
    assert_same_bits(got_blocks, blocks, "blocks")
    for codes in (got.columns.codes, got_blocks.codes):
        assert codes.t().is_contiguous()


@pytest.mark.parametrize("shape", [(0, 128), (128, 128), (128, 16), (256, 144), (384, 272), (640, 384)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_casts(dtype, shape, seed):
    x = torch.randn(shape) * 2.0 ** torch.randint(-4, 5, (shape[0], 1)) * 2.0 ** torch.randint(-4, 5, (1, shape[1]))
    check_casts(x.to(dtype), **schedule(seed))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_special_values(dtype, seed):
    """What is not finite spoils its own row, column or block only; blocks of zeros have the least scale."""
    x = torch.randn(384, 400)
    x[3], x[:, 7], x[128:256, 128:256] = 0.0, -0.0, 0.0
    x[5], x[6] = 1e-40, torch.finfo(dtype).max
    x[290, 5], x[300, 140], x[310, 300], x[311, 301] = math.nan, math.inf, -math.inf, math.nan
    x[20] = 448 * 2.0 ** torch.arange(-200, 200).clamp(-20, 20)
    check_casts(x.to(dtype), **schedule(seed))


def test_views(seed):
    """Rows that no tensor map can describe are copied first."""
    wide, flat = torch.randn(128, 424).bfloat16(), torch.randn(128 * 144 + 1).bfloat16()
    turned, one_row = torch.randn(144, 128).bfloat16().t(), torch.randn(1, 144).bfloat16().expand(128, 144)
    for view in (wide[:, 8:280], wide[:, 3:147], flat[1:].view(128, 144), turned, one_row):
        check_casts(view, **schedule(seed))


def assert_near(actual: Fp8Tensor, expected: Fp8Tensor, what: str) -> None:
    """But for the last bits of exp and erf, which move few values to the neighbouring code."""
    assert actual.block == expected.block, what
    torch.testing.assert_close(actual.scales, expected.scales, rtol=2e-6, atol=0, msg=f"{what}: scales")
    got, wanted = actual.codes.float(), expected.codes.float()
    assert ((got - wanted).abs() <= 0.13 * wanted.abs() + 2**-9).all(), f"{what}: codes"
    share = float((got != wanted).float().mean())
    assert share < 2e-3, f"{what}: {share:.4f} of the codes differ"


def check_activation(options: tuple, columns: bool, sums: bool, **schedule_options) -> mlp_quant.ActivationGrads:
    wanted = mlp_quant.activation_backward(*options, columns=columns, sums=sums)
    with simulated_casts(**schedule_options):
        got = mlp_quant.activation_backward(*options, columns=columns, sums=sums)
    assert_near(got.pre.rows, wanted.pre.rows, "gradient, rows")
    torch.testing.assert_close(got.row_weights, wanted.row_weights, rtol=1e-4, atol=1e-4)
    assert (got.pre.columns is not None) == (got.act is not None) == columns and (got.sums is not None) == sums
    if columns:
        assert_near(got.pre.columns, wanted.pre.columns, "gradient, columns")
        assert_near(got.act, wanted.act, "activation")
    if sums:
        torch.testing.assert_close(got.sums, wanted.sums, rtol=1e-4, atol=1e-4)
    return got


@pytest.mark.parametrize(("columns", "sums"), [(True, True), (True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize(("activation", "clamp"), FORMS)
def test_activation_backward(activation, clamp, columns, sums, seed):
    dtype = (BF16, FP32)[(seed + columns) % 2]
    pre, grad, weights = case(activation, 256, 256 if sums else 128, dtype)
    check_activation((grad, pre, weights, activation, clamp), columns, sums, **schedule(seed))


def test_no_rows():
    pre, grad, weights = (x[:0] for x in case("swiglu", 128, 128))
    with simulated_casts():
        got = mlp_quant.activation_backward(grad, pre, weights, "swiglu", None, columns=True, sums=True)
    assert got.pre.columns.scales.shape == (0, 256) and got.act.scales.shape == (0, 1) and got.sums.shape == (0, 256)


def test_gradients_of_another_dtype_than_pre_activations(seed):
    pre, grad, weights = case("swiglu", 128, 128, BF16)
    check_activation((grad.float(), pre, weights, "swiglu", 0.5), True, True, **schedule(seed))


def test_poison_in_activations(seed):
    """Rows that are not finite change nothing in other rows' codes, nor in other blocks."""
    pre, grad, weights = case("swiglu", 384, 256, BF16)
    options = weights, "swiglu", None
    with simulated_casts():
        clean = mlp_quant.activation_backward(grad, pre, *options, columns=True)
        pre[130, 5], pre[140, 300], grad[150, 200] = math.nan, math.inf, math.nan
        got = mlp_quant.activation_backward(grad, pre, *options, columns=True)
    kept = [row for row in range(384) if row not in (130, 140, 150)]
    assert same_bits(got.pre.rows.codes[kept], clean.pre.rows.codes[kept])
    assert same_bits(got.pre.columns.scales[[0, 2]], clean.pre.columns.scales[[0, 2]])
    assert got.pre.columns.scales[1].isfinite().logical_not().nonzero().flatten().tolist() == [5, 44, 200, 261, 456]
    assert got.act.scales.isnan().nonzero().tolist() == [[1, 0]]
    assert same_bits(got.act.codes[256:], clean.act.codes[256:])


def test_bits_do_not_depend_on_the_schedule(seed):
    pre, grad, weights = case("geglu_tanh", 384, 256, BF16)
    results = []
    for policy, sms in (("lazy", 1), ("random", 4), ("starve", 6)):
        with simulated_casts(policy, seed % 1000, sms):
            got = mlp_quant.activation_backward(grad, pre, weights, "geglu_tanh", None, columns=True, sums=True)
        results.append((got.pre.rows, got.pre.columns, got.act, got.row_weights, got.sums))
    for other in results[1:]:
        for first, again in zip(results[0], other, strict=True):
            if isinstance(first, Fp8Tensor):
                assert_same_bits(again, first, "again")
            else:
                assert torch.equal(again, first)


def test_rows_in_public_form(seed):
    """Blocks of rows that another function has cast."""
    rows = quant.quantize_rowwise(torch.randn(256, 272), mn_major=True)
    with simulated_casts(**schedule(seed)):
        got = mlp_quant.columns_of_rows(rows)
    assert_same_bits(got, quant.quantize_blockwise(quant.dequantize(rows)), "blocks")
