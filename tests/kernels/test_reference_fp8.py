"""Block-scaled e4m3 against an implementation built from the bit format, and the FP8 GEMMs against plain loops."""

from __future__ import annotations

import pytest
import torch

from megamoe.kernels.layout import layout_pairs
from megamoe.kernels.reference import (
    dequantize,
    grouped_gemm_k_fp8,
    grouped_gemm_nn_fp8,
    grouped_gemm_nt_fp8,
    quantize,
)
from megamoe.types import ExpertLayout, Fp8Tensor
from tests.support.metrics import assert_close, relative_error
from tests.support.plain_fp8 import (
    VALUES,
    block_scales,
    decode,
    encode,
    fake_quantize,
    near_midpoint,
    round_e4m3,
    spread,
    without_ties,
)

ROW, TILE, COLUMN = (1, 128), (128, 128), (128, 1)
BLOCKS = [pytest.param(ROW, id="1x128"), pytest.param(TILE, id="128x128"), pytest.param(COLUMN, id="128x1")]
SHAPES = [
    pytest.param((1, 1), id="one element"),
    pytest.param((128, 128), id="one block"),
    pytest.param((256, 384), id="whole blocks"),
    pytest.param((127, 129), id="one short, one over"),
    pytest.param((130, 72), id="short last blocks"),
    pytest.param((5, 300), id="few rows"),
]


def codes_of(x: Fp8Tensor) -> torch.Tensor:
    assert x.codes.dtype == torch.float8_e4m3fn
    return x.codes.view(torch.uint8).long()


def check_quantize(x: torch.Tensor, block: tuple[int, int]) -> Fp8Tensor:
    """Scales to fp32 rounding; codes exactly, but where fp32 rounding decides between two."""
    quantized = quantize(x, block)
    assert quantized.block == block
    assert quantized.codes.shape == x.shape
    assert quantized.scales.dtype == torch.float32
    scales = block_scales(x, block)
    assert quantized.scales.shape == scales.shape
    assert ((quantized.scales - scales) / scales).abs().max() < 2e-7
    scaled = x.double() / spread(scales, block, x.shape)
    wrong = (codes_of(quantized) != encode(scaled)) & ~near_midpoint(scaled)
    assert not wrong.any(), f"{int(wrong.sum())} wrong codes, first at {wrong.nonzero()[0].tolist()}"
    return quantized


# ---------------------------------------------------------------- the format


def test_plain_e4m3():
    """The test's own format, at values known from its definition."""
    assert VALUES[[0, 1, 7, 8, 0x38, 0x7E]].tolist() == [0, 2.0**-9, 7 * 2.0**-9, 2.0**-6, 1, 448]
    x = torch.tensor([0.0, 1.0625, 1.1875, 464.0, 465.0, 1e6, 2.0**-10, 1.01 * 2.0**-10, -448.0], dtype=torch.float64)
    assert encode(x).tolist() == [0, 0x38, 0x3A, 0x7E, 0x7E, 0x7E, 0, 1, 0xFE]
    assert torch.equal(encode(decode(torch.arange(127))), torch.arange(127))
    x = torch.cat([VALUES, (VALUES[1:] + VALUES[:-1]) / 2, torch.linspace(0, 500, 5001, dtype=torch.float64)])
    x = torch.cat([x, -x, x / 1e4])
    assert torch.equal(round_e4m3(x), decode(encode(x)))


def test_every_code_and_midpoint():
    """With amax 448 the scale is 1: the input is what is rounded. Ties go to the even code."""
    midpoints = (VALUES[1:] + VALUES[:-1]) / 2
    x = torch.cat([VALUES, midpoints, midpoints * (1 + 2e-7), midpoints * (1 - 2e-7)])
    x = torch.cat([x, -x]).float()
    # 448 in each row.
    x = torch.cat([x, torch.zeros(-x.numel() % 127)]).view(-1, 127)
    x = torch.cat([x, torch.full((x.shape[0], 1), 448.0)], dim=1)
    quantized = quantize(x, ROW)
    assert (quantized.scales == 1).all()
    assert torch.equal(codes_of(quantized), encode(x.double()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", BLOCKS)
def test_quantize(seed, block, shape):
    # Rows and columns of different size: a scale of the wrong block would show.
    x = torch.randn(shape) * 4.0 ** torch.randn(shape[0], 1) * 4.0 ** torch.randn(shape[1])
    quantized = check_quantize(x, block)
    clear = without_ties(x, block)
    assert_close(dequantize(quantize(clear, block)), fake_quantize(clear, block), 1e-6)
    # Half a step of 3 mantissa bits, relative to x, or of a subnormal, relative to the scale.
    error = (dequantize(quantized).double() - x.double()).abs()
    step = 2.0**-4 * x.double().abs() + 2.0**-10 * spread(block_scales(x, block), block, x.shape)
    assert (error <= step * (1 + 1e-5)).all()
    assert dequantize(quantized).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_quantize_of_other_dtypes(seed, dtype):
    x = torch.randn(130, 200).to(dtype)
    check_quantize(x, ROW)
    assert torch.equal(codes_of(quantize(x, TILE)), codes_of(quantize(x.float(), TILE)))


@pytest.mark.parametrize("block", BLOCKS)
def test_leading_dimensions(seed, block):
    """A stack of expert weights is quantised expert by expert."""
    x = torch.randn(3, 130, 200) * torch.tensor([1.0, 100.0, 0.01]).view(3, 1, 1)
    stacked = quantize(x, block)
    for expert in range(3):
        alone = quantize(x[expert], block)
        assert torch.equal(codes_of(stacked)[expert], codes_of(alone))
        assert torch.equal(stacked.scales[expert], alone.scales)
        assert torch.equal(dequantize(stacked)[expert], dequantize(alone))


def test_quantize_of_views(seed):
    x = torch.randn(300, 260)
    for view in (x.t(), x[::2], x[:, 3:200]):
        assert torch.equal(codes_of(quantize(view, TILE)), codes_of(quantize(view.contiguous(), TILE)))


@pytest.mark.parametrize("shape", [(0, 256), (0, 72), (256, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_quantize_of_nothing(block, shape):
    quantized = quantize(torch.zeros(shape), block)
    assert quantized.codes.shape == shape
    assert quantized.scales.shape == tuple(-(-size // b) for size, b in zip(shape, block, strict=True))
    assert dequantize(quantized).shape == shape


# ---------------------------------------------------------------- special values


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("value", [0.0, 1e-40, 1e-30, -1e-12], ids=str)
def test_tiny_blocks_have_the_smallest_scale(block, value):
    """amax below 1e-10 counts as 1e-10: no division by zero, no scale that underflows."""
    quantized = quantize(torch.full((128, 128), value), block)
    assert_close(quantized.scales, torch.full_like(quantized.scales, 1e-10 / 448), 1e-6)
    expected = encode(torch.tensor(value, dtype=torch.float64) * 448e10)
    assert (codes_of(quantized) == expected).all()
    assert dequantize(quantized).isfinite().all()


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("exponent", [-30, -3, 0, 1, 20, 100])
def test_amax_of_448_times_a_power_of_two(seed, block, exponent):
    """The scale is that power, and e4m3 values come back exactly."""
    codes = torch.randint(0, 127, (128, 128))
    codes[0], codes[:, 0] = 0x7E, 0x7E
    x = (decode(codes + 128 * torch.randint(0, 2, codes.shape)) * 2.0**exponent).float()
    quantized = quantize(x, block)
    assert (quantized.scales == 2.0**exponent).all()
    assert torch.equal(dequantize(quantized), x)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_nan_and_inf_spoil_only_their_own_block(seed, block, value):
    x = torch.randn(300, 300)
    clean = quantize(x, block)
    spoilt = torch.zeros(300, 300, dtype=torch.bool)
    for row, column in ((0, 0), (130, 299), (299, 140)):
        x[row, column] = value
        top, left = row // block[0] * block[0], column // block[1] * block[1]
        spoilt[top : top + block[0], left : left + block[1]] = True
    quantized = quantize(x, block)
    values = dequantize(quantized)
    assert (~values[x.isnan() | x.isinf()].isfinite()).all()
    assert torch.equal(codes_of(quantized)[~spoilt], codes_of(clean)[~spoilt])
    assert torch.equal(values[~spoilt], dequantize(clean)[~spoilt])
    # No element of a spoilt block may pass for a number: a GEMM must not hide the NaN.
    assert not values[spoilt].isfinite().any()


def test_signed_zero():
    x = torch.tensor([[-0.0, 0.0, 1.0, -1e-9]])
    assert codes_of(quantize(x, ROW)).tolist() == [[0x80, 0, 0x7E, 0x80]]
    values = dequantize(quantize(x, ROW))
    assert torch.signbit(values).tolist() == [[True, False, False, True]]


def test_largest_floats(seed):
    """amax close to fp32's maximum: the reciprocal of the scale must not underflow."""
    check_quantize(torch.randn(4, 256).clamp(-3, 3) * 1e38, ROW)


# ---------------------------------------------------------------- grouped GEMMs

COUNTS = [
    pytest.param([3, 1, 2], id="few rows"),
    pytest.param([0, 5, 0, 0, 7, 0], id="empty first, middle and last"),
    pytest.param([0, 0, 0], id="no rows at all"),
    pytest.param([0, 260, 0], id="all to one expert"),
    pytest.param([127, 128, 129, 257], id="around tile borders"),
    pytest.param([200], id="one local expert"),
]


def layout_of(counts: list[int]) -> ExpertLayout:
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return layout_pairs(ids, len(counts))[0]


def pool(layout: ExpertLayout, width: int, padding: float = 0.0) -> torch.Tensor:
    """Rows N(0, 1) times a size per 128 columns and per 128 rows, so that every scale differs from its neighbours'."""
    rows = torch.full((layout.num_rows, width), padding)
    for start, end in layout.spans():
        sizes = 2.0 ** torch.randint(-3, 4, (-(-width // 128),)).repeat_interleave(128)[:width]
        rows[start:end] = torch.randn(end - start, width) * sizes
        for tile in range(start, end, 128):
            rows[tile : min(end, tile + 128)] *= 2.0 ** float(torch.randint(-3, 4, ()))
    return rows


def block_sums(a: Fp8Tensor, a_rows: slice, b_expert: tuple) -> torch.Tensor:
    """fp64 sum over 128-wide blocks of K of (codes @ codes) * both scales; ``b_expert`` is (codes, scales)."""
    codes_a, scales_a = decode(codes_of(a))[a_rows], a.scales[a_rows].double()
    codes_b, scales_b = b_expert
    out = torch.zeros(codes_a.shape[0], codes_b.shape[1], dtype=torch.float64)
    for block, k in enumerate(range(0, codes_a.shape[1], 128)):
        partial = codes_a[:, k : k + 128] @ codes_b[k : k + 128]
        for n in range(0, codes_b.shape[1], 128):
            scaled = partial[:, n : n + 128] * scales_a[:, block : block + 1] * scales_b[block, n // 128]
            out[:, n : n + 128] += scaled
    return out


def check_rows(out: torch.Tensor, expected: list[torch.Tensor], layout: ExpertLayout, tolerance: float) -> None:
    assert out.dtype == torch.float32
    padding = torch.ones(layout.num_rows, dtype=torch.bool)
    for expert, (start, end) in enumerate(layout.spans()):
        assert_close(out[start:end], expected[expert], tolerance, f"expert {expert}")
        padding[start:end] = False
    assert torch.equal(out[padding], torch.zeros_like(out[padding]))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("k", "n"), [(256, 384), (72, 130)], ids=["whole blocks", "short blocks"])
def test_nt_and_nn(seed, counts, k, n):
    """Padding rows are NaN: a row's result depends on that row alone."""
    layout = layout_of(counts)
    rows, weight = pool(layout, k, padding=float("nan")), torch.randn(len(counts), k, n)
    weight *= 2.0 ** torch.randint(-3, 4, (len(counts), k, 1)) * 2.0 ** torch.randint(-3, 4, (1, 1, n))
    a, b = quantize(rows, ROW), quantize(weight, TILE)
    b_t = quantize(weight.transpose(1, 2), TILE)
    experts = list(zip(decode(codes_of(b)), b.scales.double(), strict=True))
    expected = [
        block_sums(a, slice(start, end), expert) for (start, end), expert in zip(layout.spans(), experts, strict=True)
    ]
    check_rows(grouped_gemm_nn_fp8(a, b, layout), expected, layout, 1e-6)
    check_rows(grouped_gemm_nt_fp8(a, b_t, layout), expected, layout, 1e-6)


@pytest.mark.parametrize("counts", COUNTS)
def test_k(seed, counts):
    layout = layout_of(counts)
    a, b = without_ties(pool(layout, 130), COLUMN), without_ties(pool(layout, 72), COLUMN)
    poison = [torch.full((len(counts), 130, 72), float("nan")) for _ in range(8)]
    del poison
    out = grouped_gemm_k_fp8(quantize(a, COLUMN), quantize(b, COLUMN), layout)
    assert out.dtype == torch.float32
    for expert, (start, end) in enumerate(layout.spans()):
        # Quantised here, expert by expert: blocks of 128 rows from the expert's first row on.
        left, right = fake_quantize(a[start:end], COLUMN), fake_quantize(b[start:end], COLUMN)
        if start == end:
            assert torch.equal(out[expert], torch.zeros(130, 72))
        else:
            assert_close(out[expert], left.t() @ right, 1e-6, f"expert {expert}")


def test_error_against_fp32_is_that_of_e4m3(seed):
    """3 mantissa bits on both sides of unit-scale data cost 3.7 %; a lost scale or stripe costs far more."""
    layout = layout_of([60, 0, 200])
    rows = torch.zeros(layout.num_rows, 512)
    for start, end in layout.spans():
        rows[start:end] = torch.randn(end - start, 512)
    weight = torch.randn(3, 512, 256) / 512**0.5
    out = grouped_gemm_nn_fp8(quantize(rows, ROW), quantize(weight, TILE), layout)
    gradient = grouped_gemm_k_fp8(quantize(rows, COLUMN), quantize(rows[:, :64], COLUMN), layout)
    for expert, (start, end) in enumerate(layout.spans()):
        if end > start:
            assert 0.03 < relative_error(out[start:end], rows[start:end] @ weight[expert]) < 0.045
            # Off the diagonal block, whose squares all have one sign.
            exact = rows[start:end, 64:].t() @ rows[start:end, :64]
            assert 0.03 < relative_error(gradient[expert, 64:], exact) < 0.045


def test_nan_row_spoils_only_itself(seed):
    layout = layout_of([5, 130])
    rows, weight = pool(layout, 256), quantize(torch.randn(2, 256, 128), TILE)
    clean = grouped_gemm_nn_fp8(quantize(rows, ROW), weight, layout)
    rows[140, 200] = float("nan")
    out = grouped_gemm_nn_fp8(quantize(rows, ROW), weight, layout)
    assert out.isnan().any(dim=1).nonzero().flatten().tolist() == [140]
    others = torch.arange(layout.num_rows) != 140
    assert_close(out[others], clean[others], 1e-6)
