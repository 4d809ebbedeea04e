"""Scales and their layouts the plain way: exponents by ``math.frexp``, words by bytes, storage by strides."""

from __future__ import annotations

import math

import torch


def align(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


def random_scales(*shape: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Normal powers of two over the whole range; neighbours differ, so that a wrong row or column shows."""
    return torch.exp2(torch.randint(-126, 128, shape, generator=generator).double()).float()


def code_of(scale: float) -> int:
    """The UE8M0 code of a power of two, from its mantissa and exponent."""
    if math.isnan(scale):
        return 255
    mantissa, exponent = math.frexp(scale)
    assert mantissa == 0.5, "the test gave a scale that is no power of two"
    return exponent - 1 + 127


def word_of(scales: list[float]) -> int:
    """The signed int32 of up to four scales, the first in the lowest byte."""
    return int.from_bytes(bytes(code_of(scale) for scale in scales).ljust(4, b"\0"), "little", signed=True)


def expected_words(scales: torch.Tensor, rows: set[int] | None = None) -> list[list[int]]:
    """Packed words of ``scales [mn, k]``; rows outside ``rows`` are 0."""
    return [
        [0] * -(-len(row) // 4)
        if rows is not None and i not in rows
        else [word_of(row[j : j + 4]) for j in range(0, len(row), 4)]
        for i, row in enumerate(scales.tolist())
    ]


def storage_of(x: torch.Tensor) -> torch.Tensor:
    """The ``[groups, k, align(mn, 4)]`` memory that MN-major ``x`` starts, alignment rows included."""
    groups = x.shape[0] if x.dim() == 3 else 1
    mn, k = x.shape[-2:]
    return x.as_strided((groups, k, align(mn, 4)), (align(mn, 4) * k, align(mn, 4), 1))


def mn_major_copy(x: torch.Tensor) -> torch.Tensor:
    """``x`` in MN-major, TMA-aligned memory that this file lays out itself."""
    *groups, mn, k = x.shape
    memory = torch.zeros(math.prod(groups) * k * align(mn, 4), dtype=x.dtype)
    strides = (align(mn, 4) * k, 1, align(mn, 4))[-x.dim() :]
    return memory.as_strided(x.shape, strides).copy_(x)


def psum_rows(ends: list[int], alignment: int) -> set[int]:
    rows, start = set(), 0
    for end in ends:
        rows |= set(range(start, end))
        start = align(end, alignment)
    return rows
