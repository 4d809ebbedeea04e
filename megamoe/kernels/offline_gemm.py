"""The launches of the Hopper GEMMs that ``offline`` compiles, asked from the launcher itself.

All forms of each role, but not all combinations: roles have code and registers of their own, so the loader's forms go
with the plain epilogue, and the epilogues with one loader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megamoe.kernels.gluon import launch
from megamoe.kernels.tiles import SHARED_MEMORY, Problem, Tile, legal_tiles, stage_bytes

FP8, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
EXPERTS, N, K, SMS = 2, 512, 512, 132

ROWS = (8, 200, 2048)
"""Rows per group whose tiles differ in ``group_m``; more rows change nothing but this number."""


@dataclass(frozen=True)
class Launch:
    """A kernel and its arguments, tensors without memory; ``constants`` are the compile-time ones."""

    name: str
    kernel: Any
    arguments: dict[str, Any]

    def compile(self) -> Any:
        """The compiled kernel, for the active driver's target."""
        return self.kernel.warmup(*self.arguments.values(), grid=(1,), **launch.OPTIONS)

    @property
    def constants(self) -> dict[str, Any]:
        parameters = {parameter.name for parameter in self.kernel.params if parameter.is_constexpr}
        return {name: value for name, value in self.arguments.items() if name in parameters}

    @property
    def key(self) -> tuple:
        """What code is generated from: equal for launches that share a binary."""
        constants = self.constants
        types = [constants.get(name, _type_of(value)) for name, value in self.arguments.items()]
        return (self.kernel.fn.__name__, *types)


def _type_of(argument: Any) -> Any:
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, tuple(argument.block_shape), repr(argument.layout)
    return argument.dtype if isinstance(argument, torch.Tensor) else type(argument)


def _empty(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class _Form:
    """A call of ``gemm`` or ``gemm_swiglu`` but for its sizes; the defaults are the plainest one."""

    dtype: torch.dtype = FP8
    kind: str = "psum"
    out: torch.dtype = BF16
    bias: torch.dtype | None = None
    add: bool = False
    activation: str | None = None
    clamp: float | None = None
    weighted: bool = False
    pre: bool = False
    transposed_b: bool = False

    def operands(self, rows: int) -> launch.Operands:
        all_rows = rows * EXPERTS if self.kind == "masked" else rows
        matrices = EXPERTS if self.kind == "masked" else 1
        columns = N if self.activation is None else N // 2
        scaled = self.dtype == FP8
        b = _empty(EXPERTS, K, N, dtype=self.dtype) if self.transposed_b else _empty(EXPERTS, N, K, dtype=self.dtype)
        return launch.Operands(
            a=_empty(all_rows, K, dtype=self.dtype),
            a_scales=_empty(matrices * K // 128, -(-rows // 4) * 4) if scaled else None,
            b=b,
            b_scales=_empty(EXPERTS, N // 128, K // 128) if scaled else None,
            out=_empty(all_rows, columns, dtype=self.out),
            out_scales=_empty(matrices * columns // 128, -(-rows // 4) * 4) if self.out == FP8 else None,
            index=b if self.kind == "dense" else _empty(EXPERTS, dtype=torch.int32),
            c=_empty(all_rows, columns, dtype=self.out) if self.add else None,
            bias=None if self.bias is None else _empty(EXPERTS, N, dtype=self.bias),
            row_weights=_empty(all_rows) if self.weighted else None,
            num_rows=rows,
            pre=_empty(all_rows, N, dtype=BF16) if self.pre else None,
        )

    def tiles(self, rows: int) -> list[Tile]:
        problem = Problem(rows, EXPERTS, N, K, self.kind, SMS, self.activation is not None, self.out.itemsize)
        return legal_tiles(problem, "fp8" if self.dtype == FP8 else "bf16")

    def launch(self, rows: int, tile: Tile) -> Launch:
        kernel, arguments = launch.arguments_of(
            self.kind,
            self.operands(rows),
            tile,
            activation=self.activation,
            clamp=self.clamp,
            transposed_b=self.transposed_b,
        )
        words = [
            _short(self.dtype),
            "nn" if self.transposed_b else "nt",
            f"{tile.block_m}x{tile.block_n}",
            "halved" if tile.halved else None,
            "swapped" if tile.swap else None,
            f"{tile.k_blocks} K blocks" if not tile.is_wide else None,
            f"{tile.stages} stages",
            f"{tile.together} together",
            f"bands of {tile.group_m}",
            self.kind,
            self.activation,
            "clamp" if self.clamp is not None else None,
            "weighted" if self.weighted else None,
            "with pre-activations" if self.pre else None,
            None if self.bias is None else f"bias {_short(self.bias)}",
            "+ C" if self.add else None,
            f"to {_short(self.out)}",
        ]
        return Launch(" ".join(word for word in words if word), kernel, arguments)


def _short(dtype: torch.dtype) -> str:
    return {FP8: "fp8", BF16: "bf16", FP32: "fp32"}[dtype]


def _plain(dtype: torch.dtype, **options: Any) -> Iterator[_Form]:
    """Without an activation: how sums start and what is stored. FP8 products are added to float32 only."""
    for out, bias, add in (
        (BF16, None, False),
        (BF16, FP32, False),
        (BF16, BF16, False),
        (BF16, None, True),
        (FP32, None, False),
        (FP32, FP32, False),
        (FP32, None, True),
    ):
        if not (dtype == FP8 and add and out == BF16):
            yield _Form(dtype, out=out, bias=bias, add=add, **options)


def _activated(dtype: torch.dtype) -> Iterator[_Form]:
    for activation in launch.ACTIVATIONS:
        if activation is None:
            continue
        common = dict(dtype=dtype, activation=activation, weighted=True)
        for clamp in (None, 10.0):
            # With FP8 operands the epilogue runs beside tensor-core products: registers are scarce.
            if dtype == FP8:
                yield _Form(clamp=clamp, out=FP8, **common)
                yield _Form(clamp=clamp, out=FP8, bias=FP32, **common)
            if dtype == BF16 or clamp or activation == "geglu":
                yield _Form(clamp=clamp, **common)
    for activation in launch.ACTIVATIONS:
        if activation is not None:
            for bias, clamp in ((None, None), (None, 10.0), (FP32, 10.0)):
                yield _Form(dtype, out=dtype, activation=activation, weighted=True, pre=True, bias=bias, clamp=clamp)
    common.update(activation="swiglu", out=dtype)
    yield from (_Form(bias=bias, clamp=10.0, **common) for bias in (BF16, FP32))
    yield _Form(kind="masked", **common)
    yield _Form(**{**common, "weighted": False})


def _wide_launches(dtype: torch.dtype, transposed_b: bool) -> Iterator[Launch]:
    plainest = _Form(dtype, transposed_b=transposed_b)
    # The first tile of each width.
    widths = {tile.block_n: tile for tile in reversed(plainest.tiles(ROWS[0])) if tile.is_wide}
    first = widths[256]
    for kind in launch.KINDS:
        yield replace(plainest, kind=kind).launch(ROWS[0], first)
    masked = replace(plainest, kind="masked")
    yield from (masked.launch(ROWS[0], tile) for tile in masked.tiles(ROWS[0]) if replace(tile, together=1) == first)
    for rows in ROWS[:1] if transposed_b else ROWS:
        for tile in plainest.tiles(rows):
            if tile.block_n == first.block_n and tile.is_wide or tile in widths.values():
                yield plainest.launch(rows, tile)
    for form in _plain(dtype, transposed_b=transposed_b):
        yield from (form.launch(ROWS[0], tile) for tile in widths.values() if tile == first or form.bias != BF16)
    if not transposed_b:
        yield from (form.launch(ROWS[0], first) for form in _activated(dtype))
    if dtype == FP8:
        # Loaders of their own; the epilogues are the same.
        halved = replace(first, halved=True)
        form = _Form(dtype, activation="swiglu", weighted=True, out=FP8)
        yield from (replace(form, kind=kind).launch(ROWS[0], halved) for kind in ("contiguous", "psum", "masked"))
        yield from (replace(form, **option).launch(ROWS[0], halved) for option in (dict(pre=True), dict(out=BF16)))


def _skinny_launches() -> Iterator[Launch]:
    def tiles(form: _Form, rows: int) -> list[Tile]:
        return [tile for tile in form.tiles(rows) if not tile.is_wide]

    yield from (_Form().launch(ROWS[0], tile) for tile in tiles(_Form(), ROWS[0]))
    # A bias is added in float32, which may need more shared memory than the result that the stages leave room for.
    biased = _Form(bias=FP32)
    for tile in tiles(biased, ROWS[0]):
        ring = tile.stages * stage_bytes(tile.block_m, tile.block_n, tile.k_blocks)
        if tile.together == 1 and tile.swap and ring + 2 * 64 * tile.block_m * 4 > SHARED_MEMORY - 4096:
            yield biased.launch(ROWS[0], tile)
    # Stores, layouts and bands with the tiles that need the most registers.
    for swap in (False, True):

        def largest(form: _Form, rows: int = ROWS[0], swap: bool = swap) -> Launch:
            fitting = (tile for tile in tiles(form, rows) if tile.swap == swap)
            return form.launch(rows, max(fitting, key=lambda tile: (tile.block_m * tile.block_n, tile.k_blocks)))

        yield from (largest(form) for form in _plain(FP8))
        yield from (largest(_Form(kind=kind)) for kind in launch.KINDS)
        yield from (largest(_Form(), rows) for rows in ROWS)


def launches() -> Iterator[Launch]:
    """Launches of all GEMM kernels, each binary once."""
    seen = set()
    for found in _all_launches():
        if found.key not in seen:
            seen.add(found.key)
            yield found


def _all_launches() -> Iterator[Launch]:
    for dtype, transposed_b in ((FP8, False), (BF16, False), (BF16, True)):
        yield from _wide_launches(dtype, transposed_b)
    yield from _skinny_launches()
