"""The public casts: scales by formula, codes by the nearest of all codes, special values, every shape."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.kernels import quant
from megamoe.kernels.quant import (
    dequantize,
    quantize_blockwise,
    quantize_columnwise,
    quantize_fp4,
    quantize_mxfp8,
    quantize_rowwise,
    transpose_fp8,
)
from megamoe.types import Fp8Tensor
from tests.support.errors import fails
from tests.support.metrics import relative_error

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ROWWISE = {128: quantize_rowwise, 32: lambda x, **options: quantize_rowwise(x, 32, **options)}
FP8_CASTS = {
    (1, 128): quantize_rowwise,
    (1, 32): ROWWISE[32],
    (128, 1): quantize_columnwise,
    (32, 1): lambda x, **options: quantize_columnwise(x, group=32, **options),
    (128, 128): quantize_blockwise,
}


def e4m3_values() -> torch.Tensor:
    """The 127 finite magnitudes of e4m3 from its bit fields, ascending: index = code."""
    values = [
        (mantissa / 8) * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        for exponent in range(16)
        for mantissa in range(8)
    ]
    return torch.tensor(values[:-1], dtype=torch.float64)


def nearest_code(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Codes of magnitudes ``values`` (fp64): the nearest of ``table``, ties to the even code, saturating."""
    upper = torch.searchsorted(table, values).clamp(max=table.numel() - 1)
    lower = (upper - 1).clamp(min=0)
    to_upper, to_lower = table[upper] - values, values - table[lower]
    take_upper = (to_upper < to_lower) | ((to_upper == to_lower) & (upper % 2 == 0))
    return torch.where(take_upper, upper, lower)


def expected_cast(x, block, largest, table, power_of_two):
    """Block by block: fp32 scale, then codes of x * (1 / scale) in fp32, as signed magnitudes."""
    rows, cols = x.shape
    values = torch.zeros(rows, cols, dtype=torch.float64)
    scales = torch.zeros(-(-rows // block[0]), -(-cols // block[1]))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = x[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]].float()
            scale = max(part.abs().max(), torch.tensor(1e-10)) / largest
            if power_of_two:
                mantissa, exponent = math.frexp(float(scale))
                scale = torch.tensor(2.0 ** (exponent - 1 if mantissa == 0.5 else exponent))
            scales[i, j] = scale
            scaled = (part * (1 / scale)).double()
            codes = nearest_code(scaled.abs(), table)
            values[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]] = table[codes] * scaled.sign()
    return values, scales


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("block", FP8_CASTS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 127), (2, 128), (129, 129), (130, 300), (257, 33)], ids=str)
def test_fp8_casts(block, shape, power_of_two, seed):
    x = torch.randn(shape) * torch.logspace(-6, 6, shape[1])
    cast = FP8_CASTS[block](x, power_of_two=power_of_two)
    values, scales = expected_cast(x, block, 448.0, e4m3_values(), power_of_two)
    assert cast.block == block and cast.codes.dtype == torch.float8_e4m3fn
    assert torch.equal(cast.scales, scales)
    assert torch.equal(cast.codes.double(), values)
    assert torch.equal(
        dequantize(cast).double(),
        (
            cast.codes.float()
            * scales.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]
        ).double(),
    )


@pytest.mark.parametrize("shape", [(1, 2), (3, 30), (2, 32), (5, 34), (4, 256)], ids=str)
def test_mxfp8_and_fp4(shape, seed):
    x = torch.randn(shape) * torch.logspace(-3, 3, shape[1])
    for cast, largest, table in (
        (quantize_mxfp8(x), 448.0, e4m3_values()),
        (quantize_fp4(x), 6.0, torch.tensor(FP4).double()),
    ):
        values, scales = expected_cast(x, (1, 32), largest, table, power_of_two=True)
        assert cast.scales.dtype == torch.uint8
        assert torch.equal(cast.scales.int(), (torch.log2(scales) + 127).int())
        wanted = values * scales.double().repeat_interleave(32, 1)[:, : shape[1]]
        assert torch.equal(dequantize(cast).double(), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_input_dtypes(dtype, seed):
    x = torch.randn(40, 256).to(dtype)
    for cast in (*FP8_CASTS.values(), quantize_mxfp8, quantize_fp4):
        assert torch.equal(dequantize(cast(x)), dequantize(cast(x.float())))
    assert relative_error(dequantize(quantize_rowwise(x)), x) < 0.03
    assert 0.09 < relative_error(dequantize(quantize_fp4(x)), x) < 0.13


@pytest.mark.parametrize("block", FP8_CASTS, ids=str)
def test_special_values(block):
    cast = FP8_CASTS[block]
    zero = cast(torch.zeros(128, 128))
    assert not zero.codes.float().any() and (zero.scales == torch.tensor(1e-10) / 448).all()
    assert torch.signbit(cast(torch.full((128, 128), -0.0)).codes.float()).all()
    tiny = cast(torch.full((128, 128), 1e-40))
    assert dequantize(tiny).isfinite().all() and tiny.scales.gt(0).all()
    largest = torch.finfo(torch.float32).max
    assert relative_error(dequantize(cast(torch.full((128, 128), largest))), torch.full((128, 128), largest)) < 1e-6
    for exponent in range(-20, 21):
        exact = cast(torch.full((128, 128), 448 * 2.0**exponent), power_of_two=True)
        assert (exact.scales == 2.0**exponent).all() and (exact.codes.float() == 448).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "cast", [*FP8_CASTS.values(), quantize_mxfp8, quantize_fp4], ids=[*map(str, FP8_CASTS), "mx", "fp4"]
)
def test_a_bad_value_spoils_its_block_only(cast, bad, seed):
    x = torch.randn(256, 256)
    clean = dequantize(cast(x))
    x[130, 140] = bad
    spoiled = dequantize(cast(x))
    block = cast(x).block if isinstance(cast(x), Fp8Tensor) else (1, 32)
    rows = slice(130 // block[0] * block[0], (130 // block[0] + 1) * block[0])
    cols = slice(140 // block[1] * block[1], (140 // block[1] + 1) * block[1])
    assert spoiled[rows, cols].isnan().all()
    spoiled[rows, cols] = clean[rows, cols]
    assert torch.equal(spoiled, clean)


def test_transposed_weight_has_the_same_codes(seed):
    weight = torch.randn(3, 200, 300)
    cast, direct = transpose_fp8(quantize_blockwise(weight)), quantize_blockwise(weight.transpose(1, 2))
    assert torch.equal(cast.codes.float(), direct.codes.float()) and torch.equal(cast.scales, direct.scales)
    assert cast.codes.is_contiguous() and cast.scales.is_contiguous() and cast.block == (128, 128)
    column = transpose_fp8(quantize_columnwise(weight))
    assert column.block == (1, 128)
    assert torch.equal(dequantize(column), dequantize(quantize_columnwise(weight)).transpose(1, 2))


def test_views_and_leading_dimensions(seed):
    big = torch.randn(2, 3, 40, 512)
    view = big[..., ::2, 128:300]
    for cast in (*FP8_CASTS.values(), quantize_mxfp8, quantize_fp4):
        result, plain = dequantize(cast(view)), dequantize(cast(view.contiguous()))
        assert torch.equal(result, plain)
        assert torch.equal(result[1, 2], dequantize(cast(view[1, 2])))


@pytest.mark.parametrize("shape", [(0, 128), (5, 0), (0, 0), (0, 3, 64)], ids=str)
def test_empty(shape):
    for cast in (*FP8_CASTS.values(), quantize_mxfp8, quantize_fp4):
        assert dequantize(cast(torch.zeros(shape))).shape == shape


SHAPES = st.tuples(st.integers(1, 300), st.integers(1, 300))


@settings(max_examples=2000)
@given(shape=SHAPES, block=st.sampled_from(list(FP8_CASTS)), power_of_two=st.booleans(), seed=st.integers(0, 2**31 - 1))
def test_fp8_round_trip(shape, block, power_of_two, seed):
    """Dequantised values are representable: with power-of-two scales casting them again changes nothing."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    once = FP8_CASTS[block](x, power_of_two=power_of_two)
    assert once.codes.shape == shape
    assert once.scales.shape == tuple(-(-size // side) for size, side in zip(shape, block, strict=True))
    values = dequantize(once)
    assert (values - x).abs().max() <= x.abs().max() / 16
    again = FP8_CASTS[block](values, power_of_two=power_of_two)
    if power_of_two:
        assert torch.equal(dequantize(again), values)
    else:
        # The scale of the new amax may differ in its last bit.
        assert relative_error(dequantize(again), values) < 1e-6


@settings(max_examples=1000)
@given(shape=SHAPES, seed=st.integers(0, 2**31 - 1))
def test_mx_round_trip(shape, seed):
    x = torch.randn(shape[0], 2 * shape[1], generator=torch.Generator().manual_seed(seed))
    for cast in (quantize_mxfp8, quantize_fp4):
        values = dequantize(cast(x))
        assert torch.equal(dequantize(cast(values)), values)


@pytest.mark.parametrize(
    "cast", [quantize_rowwise, quantize_columnwise, quantize_blockwise, quantize_mxfp8, quantize_fp4]
)
def test_bad_input(cast):
    with fails(TypeError, "x.dtype", torch.int32, "must be a floating dtype"):
        cast(torch.zeros(2, 128, dtype=torch.int32))
    with fails(ValueError, "x.shape", [128], "must be [..., M, N]"):
        cast(torch.zeros(128))
    with fails(TypeError, "x", "list", "must be a torch.Tensor"):
        cast([[1.0]])


def test_bad_options():
    with fails(ValueError, "group", 64, "must be 128 or 32"):
        quantize_rowwise(torch.zeros(2, 128), 64)
    with fails(ValueError, "group", 1, "must be 128 or 32"):
        quantize_columnwise(torch.zeros(2, 128), group=1)
    with fails(ValueError, "x.shape", [2, 33], "must have an even last dimension"):
        quantize_fp4(torch.zeros(2, 33))
    with fails(TypeError, "x", "Tensor", "must be a Fp8Tensor or Fp4Tensor"):
        dequantize(torch.zeros(2, 2))


@pytest.mark.parametrize("shape", [(0, 128), (5, 0), (0, 0), (0, 3, 64), (2, 0, 64)], ids=str)
def test_kernels_get_matrices_without_elements(shape):
    """Views that a launcher takes sizes from: no dimension of them is guessed."""
    x = torch.empty(shape)
    assert quant._matrices(x).shape == (shape[0] if len(shape) == 3 else 1, *shape[-2:])
    assert quant._rows_in_columns_order(x).shape == (x.shape[:-1].numel(), shape[-1])
