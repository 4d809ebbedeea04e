"""A straightforward e4m3 format and block quantisation, built from the bit format; nothing here comes from ``megamoe``.

e4m3 (the "fn" kind): sign, 4 exponent bits with bias 7, 3 mantissa bits; exponent 0 is subnormal; no infinities; the
code with all exponent and mantissa bits set is NaN, so that the largest value is 0x7e = 448.
"""

from __future__ import annotations

import torch

NAN_CODE = 0x7F


def _magnitude(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    return mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


VALUES = torch.tensor([_magnitude(code) for code in range(NAN_CODE)], dtype=torch.float64)
"""The 127 finite magnitudes, in ascending order: entry c is code c."""
MIDPOINTS = (VALUES[1:] + VALUES[:-1]) / 2


def encode(x: torch.Tensor) -> torch.Tensor:
    """int64 codes of fp64 ``x``: nearest, ties to the even mantissa, saturating at +-448; NaN gives a NaN code."""
    magnitude = x.abs()
    code = torch.bucketize(magnitude, MIDPOINTS)
    tie = (code < MIDPOINTS.numel()) & (magnitude == MIDPOINTS[code.clamp(max=MIDPOINTS.numel() - 1)])
    code = torch.where(tie & (code % 2 == 1), code + 1, code)
    code = torch.where(x.isnan(), NAN_CODE, code)
    return torch.where(torch.signbit(x), code + 128, code)


def decode(code: torch.Tensor) -> torch.Tensor:
    """fp64 values of integer codes."""
    magnitude = torch.cat([VALUES, VALUES.new_tensor([float("nan")])])[code.long() % 128]
    return torch.where(code.long() >= 128, -magnitude, magnitude)


def block_scales(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Scale max(amax, 1e-10) / 448, in fp32 values, of each block of a finite matrix ``x``; the last may be short."""
    scales = [[part.abs().max() for part in rows.split(block[1], dim=1)] for rows in x.double().split(block[0], dim=0)]
    return (torch.tensor(scales, dtype=torch.float64).clamp(min=1e-10) / 448).float().double()


def spread(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """``scales`` of blocks as one scale per element of a matrix of ``shape``."""
    return scales.repeat_interleave(block[0], dim=0).repeat_interleave(block[1], dim=1)[: shape[0], : shape[1]]


def code_distance(x: torch.Tensor) -> torch.Tensor:
    """Distance of the values next to ``x``: 2^-9 for subnormals, 2^(e - 3) for 2^e <= abs(x) < 2^(e + 1)."""
    _, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), (exponent - 1).clamp(min=-6) - 3)


def round_e4m3(x: torch.Tensor) -> torch.Tensor:
    """``decode(encode(x))`` of ``x``, but fast."""
    step = code_distance(x)
    return ((x / step).round() * step).clamp(-448, 448)


def near_midpoint(x: torch.Tensor, tolerance: float = 1e-6) -> torch.Tensor:
    """Where an fp32 rounding error in ``x`` may lead to the neighbouring code."""
    steps = x.abs() / code_distance(x)
    return (steps.frac() - 0.5).abs() < tolerance * steps


def _in_strips(x: torch.Tensor, block: tuple[int, int]):
    """Strips of whole blocks that fit into a cache, with one scale per element."""
    for rows in x.split(max(block[0], 128)):
        yield rows, spread(block_scales(rows, block), block, rows.shape)


def fake_quantize(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """fp64: the finite matrix ``x`` after a trip through block-scaled e4m3."""
    if x.numel() == 0:
        return x.double()
    return torch.cat([round_e4m3(rows.double() / scales) * scales for rows, scales in _in_strips(x, block)])


def without_ties(x: torch.Tensor, *blocks: tuple[int, int]) -> torch.Tensor:
    """``x``, its elements that fp32 rounding could send to either of two codes moved by 1.6 %: to compare pipelines."""
    for _ in range(20):
        before = x
        for block in blocks if x.numel() else ():
            strips = [
                torch.where(near_midpoint(rows.float() / scales.float(), 1e-5), rows * (1 + 2**-6), rows)
                for rows, scales in _in_strips(x, block)
            ]
            x = torch.cat(strips)
        if torch.equal(x, before):
            return x
    raise AssertionError("an element is close to a tie after 20 moves")
