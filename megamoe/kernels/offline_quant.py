"""The casts' and activations' kernels with every set of types and compile-time parameters, for ``offline``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.compiler import ASTSource
from triton.runtime import driver

from megamoe.kernels import triton_quant


@dataclass(frozen=True)
class Variant:
    """One kernel with the types of its arguments and the values of its compile-time parameters.

    Attributes:
        aligned: parameters that are multiples of 16, besides the pointers.
        max_registers: of a thread, where the launcher limits them.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    aligned: tuple[str, ...] = ()
    max_registers: int | None = None

    def compile(self) -> Any:
        """The compiled kernel, for the active driver's target."""
        parameters = [parameter.name for parameter in self.kernel.params]
        signature = {name: self.types.get(name, "constexpr") for name in parameters}
        constants = {(parameters.index(name),): value for name, value in self.constants.items()}
        divisible = [
            index for index, name in enumerate(parameters) if signature[name].startswith("*") or name in self.aligned
        ]
        source = ASTSource(self.kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in divisible})
        target = driver.active.get_current_target()
        return triton.compile(source, target=target, options=dict(num_warps=self.num_warps, maxnreg=self.max_registers))


def variants() -> Iterator[Variant]:
    """Every kernel in every form that a launcher can ask for, with 16-byte aligned rows."""
    cast = dict(codes="*fp8e4nv", scales="*fp32", num_rows="i32", num_cols="i32", min_amax="fp32")
    strides = dict(scale_row_stride="i32", scale_group_stride="i32")
    for dtype in ("bf16", "fp16", "fp32"):
        for power_of_two in (False, True):
            options = dict(LARGEST=448.0, POWER_OF_TWO=power_of_two)
            ending = f"{dtype}{', power of two' if power_of_two else ''}"
            for group in (128, 32):
                for rows in (1, 4):
                    yield Variant(
                        f"rowwise 1x{group}, {rows} rows, {ending}",
                        triton_quant._rowwise_kernel,
                        dict(x=f"*{dtype}", x_stride="i32", codes_stride="i32", **cast, **strides),
                        dict(GROUP=group, ROWS=rows, GROUPS=512 // group, **options),
                        4,
                        ("num_cols", "x_stride", "codes_stride"),
                    )
            for group in (128, 32):
                yield Variant(
                    f"columnwise {group}x1, {ending}",
                    triton_quant._columnwise_kernel,
                    dict(x=f"*{dtype}", x_matrix_stride="i64", x_stride="i32", **cast),
                    dict(GROUP=group, COLUMNS=64, **options),
                    4,
                    ("num_cols", "x_stride", "x_matrix_stride"),
                )
            for transpose in (False,) if dtype == "fp32" else (False, True):
                yield Variant(
                    f"blockwise{' + transpose' if transpose else ''}, {ending}",
                    triton_quant._blockwise_kernel,
                    dict(
                        x=f"*{dtype}",
                        codes_t="*fp8e4nv",
                        scales_t="*fp32",
                        x_matrix_stride="i64",
                        x_stride="i32",
                        **cast,
                    ),
                    dict(BLOCK=128, CHUNK=triton_quant.BLOCKWISE_CHUNK, TRANSPOSE=transpose, **options),
                    8,
                    ("num_cols", "x_stride", "x_matrix_stride"),
                )
        for clamp in (False, True):
            for rows in (1, 4):
                yield Variant(
                    f"swiglu rowwise, {rows} rows, {dtype}{', clamp' if clamp else ''}",
                    triton_quant._swiglu_rowwise_kernel,
                    dict(pre=f"*{dtype}", row_weights="*fp32", pre_stride="i32", clamp="fp32", **cast, **strides),
                    dict(GROUP=128, ROWS=rows, GROUPS=4, LARGEST=448.0, CLAMP=clamp),
                    4,
                    ("num_cols", "pre_stride"),
                )
                yield Variant(
                    f"swiglu backward, {rows} rows, {dtype}{', clamp' if clamp else ''}",
                    triton_quant._swiglu_backward_kernel,
                    dict(
                        grad=f"*{dtype}",
                        pre=f"*{dtype}",
                        row_weights="*fp32",
                        grad_weights="*fp32",
                        grad_stride="i32",
                        pre_stride="i32",
                        clamp="fp32",
                        **cast,
                        **strides,
                    ),
                    dict(GROUP=128, ROWS=rows, GROUPS=4, LARGEST=448.0, CLAMP=clamp),
                    4,
                    ("num_cols", "grad_stride", "pre_stride"),
                )
    yield Variant(
        "pack UE8M0",
        triton_quant._pack_fp32_into_ue8m0_kernel,
        dict(scales="*i32", packed="*i32", first_rows="*i64", row_counts="*i64", num_words="i32", mn="i32"),
        dict(WORDS=4, COLUMNS=512),
        4,
        ("mn",),
    )
