"""DeepGEMM's utilities: names and signatures, and bits from this file's own rounding, clamps and byte arithmetic."""

from __future__ import annotations

import bisect
import inspect
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megamoe.compat.deep_gemm as deep_gemm
from tests.support.errors import fails

FP8 = torch.float8_e4m3fn
FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp32(value: float) -> float:
    """The nearest fp32."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


MIN_AMAX = fp32(1e-4)


def _e4m3_table() -> list[float]:
    """Finite magnitudes in the order of their codes 0 to 126."""
    values = torch.arange(256).to(torch.uint8).view(FP8).float().tolist()
    assert values[127] != values[127], "code 127 is NaN"
    return values[:127]


E4M3 = _e4m3_table()


def e4m3_code(x: float) -> int:
    """The code nearest to ``x``, ties to the even code, saturating; the sign of zero stays."""
    magnitude = abs(x)
    upper = min(bisect.bisect_left(E4M3, magnitude), 126)
    lower = max(upper - 1, 0)
    below, above = magnitude - E4M3[lower], E4M3[upper] - magnitude
    code = lower if below < above or (below == above and lower % 2 == 0) else upper
    return code | (0x80 if math.copysign(1.0, x) < 0 else 0)


def e2m1_code(x: float) -> int:
    """The code nearest to ``x``, ties towards zero; a result of zero has no sign."""
    distances = [abs(abs(x) - value) for value in FP4_MAGNITUDES]
    code = distances.index(min(distances))
    return code | (8 if x < 0 and code else 0)


def power_of_two_above(x: float) -> float:
    mantissa, exponent = math.frexp(x)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def scale_of(block: list[float], largest: float, use_ue8m0: bool) -> float:
    scale = fp32(max(max(abs(value) for value in block), MIN_AMAX) / largest)
    return power_of_two_above(scale) if use_ue8m0 else scale


def scaled(x: float, scale: float) -> float:
    """As the casts do: times the rounded reciprocal, in fp32."""
    return fp32(x * fp32(1.0 / scale))


def expected_cast(x: torch.Tensor, block: tuple[int, int], largest: float, use_ue8m0: bool, encode):
    """``(codes, scales)`` as lists, block by block."""
    rows, cols = x.shape
    values = x.float().tolist()
    codes = [[0] * cols for _ in range(rows)]
    scales = []
    for top in range(0, rows, block[0]):
        scales.append([])
        for left in range(0, cols, block[1]):
            inside = [
                (i, j) for i in range(top, min(top + block[0], rows)) for j in range(left, min(left + block[1], cols))
            ]
            scale = scale_of([values[i][j] for i, j in inside], largest, use_ue8m0)
            scales[-1].append(scale)
            for i, j in inside:
                codes[i][j] = encode(scaled(values[i][j], scale))
    return codes, scales


def word_of(scales: list[float]) -> int:
    codes = bytes(math.frexp(scale)[1] - 1 + 127 for scale in scales)
    return int.from_bytes(codes.ljust(4, b"\0"), "little", signed=True)


def words_of(scales: list[list[float]]) -> list[list[int]]:
    return [[word_of(row[j : j + 4]) for j in range(0, len(row), 4)] for row in scales]


def rows_of_every_size(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows whose amax lies below, at and above the clamp, some exact powers of two times 448, zeros, -0.0."""
    x = torch.randn(rows, cols) * torch.logspace(-7, 3, rows).unsqueeze(1)
    x[0] = 0.0
    x[1] = -0.0
    x[2, 0] = 448.0 * 4
    x[3] = 5e-5
    x[4, :] = 1e-30
    return x.to(dtype)


def random_scales(*shape: int) -> torch.Tensor:
    return torch.exp2(torch.randint(-20, 20, shape).double()).float()


# ---------------------------------------------------------------- names and signatures


SIGNATURES = {
    "ceil_div": "x, y",
    "align": "x, y",
    "get_tma_aligned_size": "x, element_size",
    "get_mn_major_tma_aligned_tensor": "sf",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor": "sf, psum_layout=None",
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor": "sf, grouped_layout, ks_cpu, gran_k, k_alignment, "
    "use_psum_layout=False",
    "transform_sf_into_required_layout": "sf, mn, k, recipe, num_groups=None, is_sfa=None, disable_ue8m0_cast=False, "
    "psum_layout=None",
    "get_mk_alignment_for_contiguous_layout": "",
    "get_m_alignment_for_contiguous_layout": "",
    "get_k_alignment_for_contiguous_layout": "",
    "set_mk_alignment_for_contiguous_layout": "new_value",
    "get_theoretical_mk_alignment_for_contiguous_layout": "expected_m=None",
    "ceil_to_ue8m0": "x",
    "pack_ue8m0_to_int": "x",
    "unpack_ue8m0_from_int": "packed_sf",
    "per_token_cast_to_fp8": "x, use_ue8m0, gran_k=128, use_packed_ue8m0=False",
    "per_channel_cast_to_fp8": "x, use_ue8m0, gran_k=128",
    "per_block_cast_to_fp8": "x, use_ue8m0, gran_k=128",
    "per_token_cast_to_fp4": "x, use_ue8m0, gran_k=128, use_packed_ue8m0=False",
    "cast_back_from_fp4": "packed, sf, gran_k=128, use_packed_ue8m0=False",
    "transpose_packed_fp4": "a",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    parameters = inspect.signature(getattr(deep_gemm, name)).parameters.values()
    plain = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert ", ".join(plain) == SIGNATURES[name]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def test_weight_transform_is_called_as_there():
    parameters = list(inspect.signature(deep_gemm.transform_weights_for_mega_moe).parameters.values())
    assert [p.name for p in parameters[:3]] == ["l1_weights", "l2_weights", "activation"]
    assert parameters[2].default == "swiglu"
    assert all(p.default is not p.empty for p in parameters[3:])


# ---------------------------------------------------------------- alignment


def test_alignment_of_grouped_layouts_is_128():
    assert deep_gemm.get_mk_alignment_for_contiguous_layout() == 128
    assert deep_gemm.get_m_alignment_for_contiguous_layout() == 128
    assert deep_gemm.get_k_alignment_for_contiguous_layout() == 128
    for expected_m in (None, 0, 1, 64, 4096):
        assert deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout(expected_m) == 128
    deep_gemm.set_mk_alignment_for_contiguous_layout(128)
    for other in (0, 64, 127, 256):
        with fails(ValueError, "new_value", other, "must be 128"):
            deep_gemm.set_mk_alignment_for_contiguous_layout(other)
    assert deep_gemm.get_mk_alignment_for_contiguous_layout() == 128


@pytest.mark.parametrize(("x", "y", "up"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (257, 128, 3)])
def test_integer_helpers(x, y, up):
    assert deep_gemm.ceil_div(x, y) == up
    assert deep_gemm.align(x, y) == up * y


def test_tma_aligned_size():
    assert [deep_gemm.get_tma_aligned_size(x, 4) for x in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert [deep_gemm.get_tma_aligned_size(x, 1) for x in (1, 16, 17)] == [16, 16, 32]


# ---------------------------------------------------------------- UE8M0


def test_ceil_to_ue8m0_rounds_magnitudes_up():
    x = [1.0, 1.0 + 2**-23, 2.0 - 2**-23, 3.0, 0.75, -5.0, -4.0, 2.0**-126, 1e-40, 0.0, 2.0**127, 3e38]
    expected = [1.0, 2.0, 2.0, 4.0, 1.0, 8.0, 4.0, 2.0**-126, 2.0**-126, 2.0**-126, 2.0**127, 2.0**127]
    assert deep_gemm.ceil_to_ue8m0(torch.tensor(x)).tolist() == expected
    assert deep_gemm.ceil_to_ue8m0(torch.tensor(x).bfloat16()).dtype == torch.float32


def test_words_hold_four_exponents_first_lowest(seed):
    scales = random_scales(3, 5, 8)
    packed = deep_gemm.pack_ue8m0_to_int(scales)
    assert packed.dtype == torch.int32
    assert packed.tolist() == [words_of(matrix) for matrix in scales.tolist()]
    assert torch.equal(deep_gemm.unpack_ue8m0_from_int(packed), scales)


def test_words_refuse_other_shapes_and_dtypes():
    with fails(TypeError, "x", "torch.float32 [2, 6]", "must be fp32 with a last dimension of 4 n"):
        deep_gemm.pack_ue8m0_to_int(torch.ones(2, 6))
    with fails(TypeError, "x", "torch.bfloat16 [2, 4]", "must be fp32 with a last dimension of 4 n"):
        deep_gemm.pack_ue8m0_to_int(torch.ones(2, 4).bfloat16())


@pytest.mark.parametrize("bad", [3.0, -2.0, 1.0 + 2**-23])
def test_words_refuse_what_is_no_power_of_two(bad):
    x = torch.ones(2, 4)
    x[1, 2] = bad
    with pytest.raises(ValueError, match="power of two"):
        deep_gemm.pack_ue8m0_to_int(x)


# ---------------------------------------------------------------- casts to FP8


UE8M0 = pytest.mark.parametrize("use_ue8m0", [False, True], ids=["fp32", "ue8m0"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32-input"])


def assert_cast(result, expected) -> None:
    codes, scales = result
    assert codes.dtype == FP8
    assert codes.is_contiguous()
    assert codes.view(torch.uint8).tolist() == expected[0]
    assert scales.dtype == torch.float32
    assert scales.tolist() == expected[1]


@UE8M0
@DTYPES
@pytest.mark.parametrize(("gran_k", "cols"), [(128, 256), (128, 257), (32, 96), (32, 40), (128, 1)])
def test_per_token_cast_to_fp8(use_ue8m0, dtype, gran_k, cols, seed):
    x = rows_of_every_size(24, cols, dtype)
    expected = expected_cast(x, (1, gran_k), 448.0, use_ue8m0, e4m3_code)
    assert_cast(deep_gemm.per_token_cast_to_fp8(x, use_ue8m0, gran_k), expected)


@pytest.mark.parametrize(("gran_k", "cols"), [(128, 512), (32, 250)])
def test_per_token_cast_to_fp8_packs_its_scales(gran_k, cols, seed):
    x = rows_of_every_size(12, cols, torch.float32)
    codes, scales = deep_gemm.per_token_cast_to_fp8(x, True, gran_k, True)
    expected_codes, expected_scales = expected_cast(x, (1, gran_k), 448.0, True, e4m3_code)
    assert codes.view(torch.uint8).tolist() == expected_codes
    assert scales.dtype == torch.int32
    assert scales.tolist() == words_of(expected_scales)


def test_packed_fp32_scales_are_refused(seed):
    """Without UE8M0 there are no exponents to pack."""
    x = torch.randn(4, 512)
    with pytest.raises(ValueError, match="power of two|needs use_ue8m0"):
        deep_gemm.per_token_cast_to_fp8(x, False, 128, True)
    with fails(ValueError, "use_packed_ue8m0", True, "needs use_ue8m0"):
        deep_gemm.per_token_cast_to_fp4(x, False, 128, True)


@UE8M0
@DTYPES
@pytest.mark.parametrize("gran_k", [32, 128])
def test_per_channel_cast_to_fp8(use_ue8m0, dtype, gran_k, seed):
    x = rows_of_every_size(9, 2 * gran_k, dtype).t()
    expected = expected_cast(x, (gran_k, 1), 448.0, use_ue8m0, e4m3_code)
    assert_cast(deep_gemm.per_channel_cast_to_fp8(x, use_ue8m0, gran_k), expected)


@UE8M0
@DTYPES
@pytest.mark.parametrize("shape", [(128, 128), (129, 257), (5, 130)])
def test_per_block_cast_to_fp8(use_ue8m0, dtype, shape, seed):
    x = torch.randn(shape)
    x[:, 128:] *= 1e-6  # below the clamp
    x = x.to(dtype)
    expected = expected_cast(x, (128, 128), 448.0, use_ue8m0, e4m3_code)
    assert_cast(deep_gemm.per_block_cast_to_fp8(x, use_ue8m0), expected)


def test_every_tie_of_e4m3_goes_to_the_even_code():
    """One scale of 1, and each midpoint of two codes with both neighbours."""
    ties = [(low + high) / 2 for low, high in zip(E4M3, E4M3[1:], strict=False)]
    near = [fp32(value) for tie in ties for value in (tie, tie * (1 + 2**-22), tie * (1 - 2**-22), -tie)]
    x = torch.tensor([448.0, *near])
    x = torch.nn.functional.pad(x, (0, -len(x) % 31)).unflatten(0, (-1, 31))
    x = torch.nn.functional.pad(x, (1, 0), value=448.0)  # each row of 32 has amax 448
    codes, scales = deep_gemm.per_token_cast_to_fp8(x, True, 32)
    assert set(scales.flatten().tolist()) == {1.0}
    assert codes.view(torch.uint8).tolist() == [[e4m3_code(value) for value in row] for row in x.tolist()]


@UE8M0
def test_small_rows_share_the_clamped_scale(use_ue8m0):
    x = torch.tensor([[0.0], [1e-30], [9.9e-5], [1e-4], [1.01e-4]])
    scales = deep_gemm.per_token_cast_to_fp8(x, use_ue8m0)[1].flatten().tolist()
    clamped = fp32(MIN_AMAX / 448.0)
    clamped = power_of_two_above(clamped) if use_ue8m0 else clamped
    assert scales[:4] == [clamped] * 4
    assert use_ue8m0 or scales[4] > clamped


def test_fp8_casts_refuse_wrong_arguments():
    with fails(ValueError, "x.shape", [100, 8], "must have a multiple of gran_k = 128 rows"):
        deep_gemm.per_channel_cast_to_fp8(torch.ones(100, 8), True)
    with fails(ValueError, "gran_k", 64, "must be 128"):
        deep_gemm.per_block_cast_to_fp8(torch.ones(128, 128), True, 64)
    with fails(ValueError, "group", 64, "must be 128 or 32"):
        deep_gemm.per_token_cast_to_fp8(torch.ones(4, 128), True, 64)
    with fails(TypeError, "x.dtype", torch.int32, "must be a floating dtype"):
        deep_gemm.per_token_cast_to_fp8(torch.ones(4, 128, dtype=torch.int32), True)


# ---------------------------------------------------------------- FP4


def packed_bytes(codes: list[list[int]]) -> list[list[int]]:
    return [[row[j] | row[j + 1] << 4 for j in range(0, len(row), 2)] for row in codes]


@UE8M0
@DTYPES
@pytest.mark.parametrize(("gran_k", "cols"), [(128, 256), (128, 258), (32, 96), (32, 40), (32, 2)])
def test_per_token_cast_to_fp4_and_back(use_ue8m0, dtype, gran_k, cols, seed):
    x = rows_of_every_size(24, cols, dtype)
    packed, scales = deep_gemm.per_token_cast_to_fp4(x, use_ue8m0, gran_k)
    codes, expected_scales = expected_cast(x, (1, gran_k), 6.0, use_ue8m0, e2m1_code)
    assert packed.dtype == torch.int8
    assert packed.view(torch.uint8).tolist() == packed_bytes(codes)
    assert scales.tolist() == expected_scales
    back = deep_gemm.cast_back_from_fp4(packed, scales, gran_k)
    assert back.dtype == torch.float32
    assert back.tolist() == [
        [
            fp32((-1 if code & 8 else 1) * FP4_MAGNITUDES[code & 7] * expected_scales[i][j // gran_k])
            for j, code in enumerate(row)
        ]
        for i, row in enumerate(codes)
    ]


def test_fp4_ties_go_towards_zero_and_zero_has_no_sign():
    magnitudes = [0.0, 0.2, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 6.0]
    codes = [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 7]
    x = torch.tensor([[*magnitudes, *(-value for value in magnitudes)]])
    packed, scales = deep_gemm.per_token_cast_to_fp4(x, True, 32)
    assert scales.tolist() == [[1.0]]
    expected = [*codes, *(code | 8 if code else 0 for code in codes)]
    assert packed.view(torch.uint8).tolist() == packed_bytes([expected])


@pytest.mark.parametrize("cols", [32, 64, 128, 160], ids=["1-scale", "2-scales", "4-scales", "5-scales"])
def test_packed_fp4_scales_are_filled_with_one(cols, seed):
    x = rows_of_every_size(8, cols, torch.float32)
    packed, words = deep_gemm.per_token_cast_to_fp4(x, True, 32, True)
    plain, scales = deep_gemm.per_token_cast_to_fp4(x, True, 32)
    filled = [[*row, *[1.0] * (-len(row) % 4)] for row in scales.tolist()]
    assert torch.equal(packed, plain)
    assert words.tolist() == words_of(filled)
    assert torch.equal(
        deep_gemm.cast_back_from_fp4(packed, words, 32, True), deep_gemm.cast_back_from_fp4(plain, scales, 32)
    )


def test_negative_zero_codes_decode_to_plain_zero():
    """The cast writes none, another writer may: DeepGEMM drops the sign."""
    back = deep_gemm.cast_back_from_fp4(torch.tensor([[-120]], dtype=torch.int8), torch.ones(1, 1))  # 0x88
    assert [math.copysign(1.0, value) for value in back.flatten().tolist()] == [1.0, 1.0]


@pytest.mark.parametrize("shape", [(2, 2), (4, 6), (130, 64)])
def test_transpose_packed_fp4(shape, seed):
    rows, cols = shape
    codes = torch.randint(16, shape).tolist()
    packed = torch.tensor(packed_bytes(codes), dtype=torch.uint8).view(torch.int8)
    result = deep_gemm.transpose_packed_fp4(packed)
    assert result.dtype == torch.int8
    assert result.shape == (cols, rows // 2)
    transposed = [[codes[i][j] for i in range(rows)] for j in range(cols)]
    assert result.contiguous().view(torch.uint8).tolist() == packed_bytes(transposed)


def test_fp4_results_are_contiguous(seed):
    """DeepGEMM's are, and its callers take views of them."""
    packed, scales = deep_gemm.per_token_cast_to_fp4(torch.randn(6, 40), True, 32)
    assert packed.is_contiguous()
    assert deep_gemm.transpose_packed_fp4(packed).is_contiguous()
    assert deep_gemm.cast_back_from_fp4(packed, scales, 32).is_contiguous()


@settings(max_examples=1500)
@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 2**31))
def test_transposing_packed_fp4_twice_is_identity(half_rows, half_cols, seed):
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(-128, 128, (2 * half_rows, half_cols), generator=generator, dtype=torch.int8)
    once = deep_gemm.transpose_packed_fp4(packed)
    assert once.shape == (2 * half_cols, half_rows)
    assert torch.equal(deep_gemm.transpose_packed_fp4(once), packed)


@settings(max_examples=1500)
@given(st.integers(1, 3), st.integers(1, 35), st.sampled_from([32, 128]), st.booleans(), st.integers(0, 2**31))
def test_casts_of_any_shape(rows, half_cols, gran_k, use_ue8m0, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2 * half_cols, generator=generator) * 10.0 ** (seed % 11 - 7)
    codes, scales = deep_gemm.per_token_cast_to_fp8(x, use_ue8m0, gran_k)
    expected = expected_cast(x, (1, gran_k), 448.0, use_ue8m0, e4m3_code)
    assert (codes.view(torch.uint8).tolist(), scales.tolist()) == expected
    packed, scales = deep_gemm.per_token_cast_to_fp4(x, use_ue8m0, gran_k)
    codes, expected_scales = expected_cast(x, (1, gran_k), 6.0, use_ue8m0, e2m1_code)
    assert packed.view(torch.uint8).tolist() == packed_bytes(codes)
    assert scales.tolist() == expected_scales


def test_fp4_refuses_wrong_arguments():
    for shape in ((4, 7), (1, 4, 8)):
        with fails(ValueError, "x.shape", list(shape), "must be [m, n] with n even"):
            deep_gemm.per_token_cast_to_fp4(torch.ones(shape), True)
    with fails(TypeError, "a", "torch.int8 [3, 4]", "must be int8 [m, n / 2] with m even"):
        deep_gemm.transpose_packed_fp4(torch.ones(3, 4, dtype=torch.int8))
    with fails(TypeError, "a", "torch.uint8 [4, 4]", "must be int8 [m, n / 2] with m even"):
        deep_gemm.transpose_packed_fp4(torch.ones(4, 4, dtype=torch.uint8))


def test_custom_dimensions_share_scales(seed):
    x = torch.randn(3, 4, 50)
    codes, sf = deep_gemm.per_custom_dims_cast_to_fp8(x, (0, 2), False)
    assert sf.shape == (3, 50) and codes.shape == x.shape
    assert torch.equal(sf, x.abs().amax(dim=1) / 448)
    assert torch.equal(codes.float(), (x * (1 / sf).unsqueeze(1)).to(torch.float8_e4m3fn).float())
