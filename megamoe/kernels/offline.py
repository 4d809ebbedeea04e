"""Compiles every device kernel to a cubin without a GPU and reports registers, spills and shared memory.

Run: python -m megamoe.kernels.offline [--arch sm_90a]. Exits with 1 if a variant spills or needs too much memory.
Needs triton; nothing is loaded onto a device.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from megamoe.kernels import triton_quant

SHARED_MEMORY_LIMIT = 227 * 1024
"""Bytes of shared memory that a block can have on Hopper."""

ARCHITECTURES = {"sm_90a": 90}


@dataclass(frozen=True)
class Variant:
    """One kernel with the types of its arguments and the values of its compile-time parameters.

    Attributes:
        aligned: parameters that are multiples of 16, besides the pointers.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    aligned: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What the assembler said of a variant; bytes per thread or per block."""

    name: str
    registers: int
    stack: int
    shared: int

    @property
    def fits(self) -> bool:
        return self.stack == 0 and self.shared <= SHARED_MEMORY_LIMIT


class _NoDevice:
    """Stands for the active driver: code generation asks it for its target only."""

    def __init__(self, target: GPUTarget):
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


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
            for transpose in (False, True):
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


def compile_variant(variant: Variant, target: GPUTarget) -> Report:
    """Compiles one variant and reads its resource usage from the cubin."""
    parameters = [parameter.name for parameter in variant.kernel.params]
    signature = {name: variant.types.get(name, "constexpr") for name in parameters}
    constants = {(parameters.index(name),): value for name, value in variant.constants.items()}
    divisible = [
        index for index, name in enumerate(parameters) if signature[name].startswith("*") or name in variant.aligned
    ]
    source = ASTSource(variant.kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in divisible})
    compiled = triton.compile(source, target=target, options=dict(num_warps=variant.num_warps))
    dump = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([dump, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack, local = (
        int(re.search(rf"{field}:(\d+)", usage.stdout).group(1)) for field in ("REG", "STACK", "LOCAL")
    )
    return Report(variant.name, registers, stack + local, compiled.metadata.shared)


def compile_all(arch: str = "sm_90a") -> list[Report]:
    """Compiles all ``variants``; the active driver of this process is a stand-in from then on."""
    target = GPUTarget("cuda", ARCHITECTURES[arch], 32)
    driver.set_active(_NoDevice(target))
    return [compile_variant(variant, target) for variant in variants()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=sorted(ARCHITECTURES), default="sm_90a")
    reports = compile_all(parser.parse_args().arch)
    width = max(len(report.name) for report in reports)
    print(f"{'kernel':{width}}  registers  spilled bytes  shared bytes")
    for report in reports:
        verdict = "" if report.fits else "  DOES NOT FIT"
        print(f"{report.name:{width}}  {report.registers:9}  {report.stack:13}  {report.shared:12}{verdict}")
    return 0 if all(report.fits for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
