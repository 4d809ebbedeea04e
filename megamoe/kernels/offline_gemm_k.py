"""The launches of Hopper's K-grouped GEMMs that ``offline`` compiles, asked from the launcher itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megamoe.kernels.gluon import launch
from megamoe.kernels.offline_gemm import BF16, EXPERTS, FP8, FP32, Launch
from megamoe.kernels.tiles import K_FORMS, Tile, legal_k_tiles

M, N, ROWS = 256, 384, 512


def _empty(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _operand(columns: int, fp8: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An operand and its scales."""
    if not fp8:
        return _empty(ROWS, columns, dtype=BF16), None
    return _empty(columns, ROWS, dtype=FP8).t(), _empty(ROWS // 128, columns)


def _launch(form: str, tile: Tile, out: torch.dtype, add: bool) -> Launch:
    ends = _empty(EXPERTS, dtype=torch.int32)
    result = _empty(EXPERTS, M, N, dtype=out)
    fp8 = form != "bf16"
    b, b_scales = _operand(N, fp8)
    if form == "fp8-blocks":
        b_scales = _empty(ROWS // 128, N // 128)
    operands = launch.KOperands(*_operand(M, fp8), b, b_scales, result, add, ends)
    kernel, arguments = launch.k_arguments_of(operands, tile)
    words: list[Any] = [
        "fp8" if fp8 else "bf16",
        f"tn {tile.block_m}x{tile.block_n}",
        "B in blocks" if form == "fp8-blocks" else None,
        f"{tile.stages} stages",
        f"skew {tile.skew}",
        f"bands of {tile.group_m}",
        "+ C" if add else None,
        "to fp32" if out == FP32 else "to bf16",
    ]
    return Launch(" ".join(word for word in words if word), kernel, arguments)


def launches() -> Iterator[Launch]:
    """Every result with the preferred tile, every tile with one result; the width of bands changes a number only."""
    for form in K_FORMS:
        first, *others = legal_k_tiles(form)
        yield from (_launch(form, first, out, add) for out in (FP32, BF16) for add in (False, True))
        yield from (_launch(form, tile, FP32, True) for tile in others if tile.group_m == first.group_m)
