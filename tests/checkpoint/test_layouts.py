"""Layouts against their definition, element by element, and their inverses, bit for bit."""

from __future__ import annotations

import pytest
import torch

from megamoe.checkpoint.layouts import Layout, join_rows
from tests.checkpoint.tiny import random_fp8
from tests.support.errors import fails

WIDTH, COLS = 6, 5


def random_matrix(dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float8_e4m3fn:
        return random_fp8(2 * WIDTH, COLS)
    if dtype == torch.uint8:
        return torch.randint(0, 256, (2 * WIDTH, COLS), dtype=dtype)
    return torch.randn(2 * WIDTH, COLS).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a_bytes, b_bytes = (x.reshape(-1).view(torch.uint8) for x in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a_bytes, b_bytes)


DEFINITIONS = {
    "plain": (Layout(), lambda row, col: (row, col)),
    "interleaved": (Layout(interleaved=True), lambda row, col: (2 * (row % WIDTH) + row // WIDTH, col)),
    "transposed": (Layout(transposed=True), lambda row, col: (col, row)),
    "both": (Layout(interleaved=True, transposed=True), lambda row, col: (col, 2 * (row % WIDTH) + row // WIDTH)),
    "split": (Layout(split=True), lambda row, col: (row // WIDTH, row % WIDTH, col)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_layout(name, dtype, seed):
    layout, place = DEFINITIONS[name]
    x = random_matrix(dtype)
    stored = layout.store(x)
    assert stored.is_contiguous() and tuple(stored.shape) == layout.stored_shape(x.shape)
    for row in range(2 * WIDTH):
        for col in range(COLS):
            assert same_bits(stored[place(row, col)], x[row, col]), (row, col)
    assert same_bits(layout.load(stored), x)


@pytest.mark.parametrize("name", ["plain", "interleaved", "split"])
def test_bias(name, seed):
    layout, place = DEFINITIONS[name]
    x = torch.randn(2 * WIDTH)
    stored = layout.store(x)
    assert tuple(stored.shape) == layout.stored_shape(x.shape)
    assert all(stored[place(row, 0)[:-1]] == x[row] for row in range(2 * WIDTH))
    assert torch.equal(layout.load(stored), x)


def e2m1(code: int) -> float:
    """The value of a 4-bit code, from its fields: sign, two bits of exponent (bias 1), one of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if code >> 3 else magnitude


@pytest.mark.parametrize("interleaved", [False, True])
def test_mxfp4(interleaved):
    # Every byte once: all pairs of codes, low half first.
    layout = Layout(mxfp4=True, interleaved=interleaved)
    blocks = torch.arange(256, dtype=torch.uint8).view(8, 2, 16)
    codes = layout.load(blocks)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == (8, 64)
    assert layout.stored_shape(codes.shape) == blocks.shape
    for row in range(8):
        at = 2 * (row % 4) + row // 4 if interleaved else row
        for byte in range(32):
            value = int(blocks.view(8, 32)[at, byte])
            for half, nibble in enumerate((value & 15, value >> 4)):
                got, want = float(codes[row, 2 * byte + half]), e2m1(nibble)
                assert got == want and str(got) == str(want), (row, byte, half)
    # -0 and 0 differ in bits: nothing is lost on the way back.
    assert torch.equal(layout.store(codes), blocks)


def test_codes_that_mxfp4_does_not_have():
    codes = torch.zeros(2, 32).to(torch.float8_e4m3fn)
    codes[1, 3] = 2.5
    with fails(ValueError, "codes", 2.5, "is not a value of e2m1"):
        Layout(mxfp4=True).store(codes)


def test_join_rows_of_8_bit_floats(seed):
    a, b = random_fp8(3, 4), random_fp8(2, 4)
    joined = join_rows([a, b])
    assert same_bits(joined[:3], a) and same_bits(joined[3:], b)
    scales = torch.randint(0, 256, (2, 4), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert same_bits(join_rows([scales, scales])[2:], scales)
