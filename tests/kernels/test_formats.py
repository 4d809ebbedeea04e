"""Number formats against their bit patterns: every code, every tie, every exponent."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from megamoe.kernels.formats import (
    FP4_VALUES,
    decode_e2m1,
    decode_ue8m0,
    encode_e2m1,
    encode_ue8m0,
    pack_fp4,
    round_up_to_power_of_two,
    unpack_fp4,
)


def bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def from_bits(pattern: int) -> float:
    return struct.unpack("<f", struct.pack("<I", pattern))[0]


def test_ue8m0_codes_are_exponents():
    values = decode_ue8m0(torch.arange(256, dtype=torch.int32).to(torch.uint8))
    assert values[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert values[255].isnan()
    assert values[0] == 2.0**-127 > 0, "a subnormal number, not zero"
    assert encode_ue8m0(values).tolist() == list(range(256))


@pytest.mark.parametrize("exponent", range(-126, 128))
def test_powers_of_two_stay_and_all_else_rounds_up(exponent):
    power = 2.0**exponent
    just_above = from_bits(bits(power) + 1)
    just_below = from_bits(bits(power) - 1)
    rounded = round_up_to_power_of_two(torch.tensor([power, just_above, just_below])).tolist()
    # Above 2^127 there is no power of two left.
    assert rounded == [power, min(2.0 * power, 2.0**127), power]


def test_special_values_of_powers_of_two():
    largest = from_bits(0x7F7FFFFF)
    given = torch.tensor([0.0, from_bits(1), 2.0**-127, largest, math.inf, math.nan, -math.nan])
    rounded = round_up_to_power_of_two(given)
    assert rounded[:4].tolist() == [2.0**-126, 2.0**-126, 2.0**-126, 2.0**127]
    assert rounded[4:].isnan().all()
    assert encode_ue8m0(rounded).tolist() == [1, 1, 1, 254, 255, 255, 255]


def nearest_e2m1(value: float, ties_to_even: bool) -> int:
    """By distance to each of the eight magnitudes."""
    magnitude = abs(value)
    distances = [abs(magnitude - candidate) for candidate in FP4_VALUES]
    best = [code for code, distance in enumerate(distances) if distance == min(distances)]
    code = next(code for code in best if code % 2 == 0) if ties_to_even and len(best) == 2 else best[0]
    return code | (8 if math.copysign(1.0, value) < 0 else 0)


@pytest.mark.parametrize("ties_to_even", [True, False])
def test_e2m1_rounds_to_nearest(ties_to_even):
    # All ties, both neighbours of each, and a fine grid past the largest value.
    ties = [(a + b) / 2 for a, b in zip(FP4_VALUES, FP4_VALUES[1:], strict=False)]
    around = [from_bits(bits(tie) + step) for tie in ties for step in (-1, 0, 1)]
    magnitudes = [*around, *FP4_VALUES, *(step / 64 for step in range(600)), 1e-45, 1e3]
    values = [*magnitudes, *(-magnitude for magnitude in magnitudes)]
    expected = [nearest_e2m1(value, ties_to_even) for value in values]
    assert encode_e2m1(torch.tensor(values), ties_to_even).tolist() == expected


def test_e2m1_special_values():
    assert encode_e2m1(torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan])).tolist() == [0, 8, 7, 15, 7]


def test_e2m1_decodes_every_code():
    codes = torch.arange(16, dtype=torch.uint8)
    values = decode_e2m1(codes)
    assert values.tolist() == [*FP4_VALUES, *(-value for value in FP4_VALUES)]
    assert torch.signbit(values[8]), "-0.0 keeps its sign"
    assert torch.equal(encode_e2m1(values), codes)


def test_packing_puts_the_even_column_low():
    assert pack_fp4(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]
    every_byte = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(16, 16)
    assert torch.equal(pack_fp4(unpack_fp4(every_byte)), every_byte)
    assert torch.equal(unpack_fp4(every_byte.view(torch.int8)), unpack_fp4(every_byte))
