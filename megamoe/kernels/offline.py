"""Compiles every device kernel to a cubin without a GPU and reports registers, spills and shared memory.

Run: python -m megamoe.kernels.offline [--arch sm_90a] [--only REGEX] [--brief] [--failures]. Exits with 1 if a
kernel does not compile, spills, needs too much memory, or has its tensor-core products serialised by the assembler.
Needs triton; nothing is loaded onto a device.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime import driver

from megamoe.kernels import (
    offline_exchange,
    offline_gemm,
    offline_gemm_k,
    offline_local,
    offline_mega,
    offline_mlp,
    offline_quant,
    offline_router,
    offline_shared,
)
from megamoe.kernels.gluon import pieces

SHARED_MEMORY_LIMIT = 227 * 1024
"""Bytes of shared memory that a block can have on Hopper."""

ARCHITECTURES = {"sm_90a": 90}

Variant = offline_quant.Variant | offline_gemm.Launch | offline_exchange.Movement


@dataclass(frozen=True)
class AllowedSpill:
    """Forms of a kernel, by their compile-time values, that may use so many bytes of stack a thread.

    Each was looked at in the machine code: a GEMM's loop over K has no access to the stack.
    """

    kernel: str
    applies: Callable[[dict[str, Any]], bool]
    most: int
    reason: str


ALLOWED_SPILLS = (
    AllowedSpill(
        "dispatch_kernel",
        lambda c: c["KEEP"],
        96,
        "a tile's rows, beside the table of who gets which before they are moved",
    ),
    AllowedSpill(
        "fp8_gemm_kernel",
        lambda c: c["BIAS"] and c["ACTIVATION"] != pieces.NONE.value,
        128,
        "between tiles the last one's gate and up are live with the next one's bias (triton 3.6)",
    ),
    AllowedSpill(
        "fp8_gemm_kernel",
        lambda c: c["CLAMP"],
        64,
        "between tiles the clamped gate and up are live with the next product (triton 3.9)",
    ),
    AllowedSpill(
        "fp8_gemm_kernel",
        lambda c: c["PRE"] or c["BLOCK_M"] < 128,
        8,
        "between tiles gate and up are live with what they are stored by (triton 3.7)",
    ),
    AllowedSpill(
        "fp8_gemm_kernel",
        lambda c: c["BIAS"] and c["WIDTH"] < 128,
        80,
        "between tiles the narrow wave's partial sums are live with the next tile's bias (triton 3.9)",
    ),
    AllowedSpill(
        "fp8_gemm_kernel",
        lambda c: c["ACTIVATION"] == pieces.GEGLU.value,
        16,
        "erf needs more registers than other activations (triton 3.7)",
    ),
    AllowedSpill(
        "fp8_gemm_kernel",
        lambda c: c["CLAMP"] and c["ACTIVATION"] == pieces.GEGLU.value,
        216,
        "between tiles erf and the clamp are live with gate and up (triton 3.7; 136 bytes with 3.6)",
    ),
    AllowedSpill(
        "fp8_skinny_gemm_kernel",
        lambda c: (c["BLOCK_M"], c["BLOCK_N"], c["KS"]) == (128, 128, 2),
        16,
        "two partial sums of 128 x 128 and their total take nearly all registers (triton 3.9)",
    ),
    AllowedSpill(
        "fp8_skinny_gemm_kernel",
        lambda c: (c["BLOCK_M"], c["BLOCK_N"], c["KS"]) == (128, 128, 2) and c["BIAS"],
        64,
        "the same between tiles, where the total starts from the bias",
    ),
    AllowedSpill(
        "k_grouped_fp8_gemm_kernel",
        lambda c: not c["BLOCKS"],
        8,
        "the loader's place among all tiles, once a tile",
    ),
    AllowedSpill(
        "mega_moe_kernel",
        lambda c: c["H"] >= 2048,
        48,
        "what is the same for all tiles is read again between them",
    ),
    AllowedSpill(
        "mega_moe_kernel",
        lambda c: c["CHUNK"] > 512,
        56,
        "a warp that pulls has few registers for a longer piece of a row",
    ),
    AllowedSpill(
        "mega_moe_bf16_kernel",
        lambda c: c["H"] >= 2048,
        56,
        "what is the same for all tiles is read again between them (16 bytes with triton 3.6)",
    ),
    AllowedSpill(
        "mega_moe_bf16_kernel",
        lambda c: c["CHUNK"] > 512,
        72,
        "a warp that pulls has few registers for a longer piece of a row",
    ),
    AllowedSpill(
        "route_kernel",
        lambda c: c["BINS"] > 128,
        16,
        "tables of 256 experts at a time (triton 3.9)",
    ),
    AllowedSpill(
        "route_kernel",
        lambda c: not c["STAGE"],
        8,
        "numbers of the kinds of tiles are kept while rows are assigned (triton 3.9)",
    ),
    AllowedSpill(
        "activation_backward_kernel",
        lambda c: c["ACTIVATION"] == "geglu" and c["CLAMP"],
        720,
        "erf's intermediate results are live with gate and up within and without the clamp",
    ),
    AllowedSpill(
        "activation_backward_kernel",
        lambda c: c["ACTIVATION"] == "geglu_tanh" and c["CLAMP"],
        16,
        "gate and up are live within and without the clamp (triton 3.7)",
    ),
    AllowedSpill(
        "activation_backward_kernel",
        lambda c: c["STAGES"] == 1,
        80,
        "fp32 inputs take twice the registers of BF16 ones (triton 3.9)",
    ),
)


@dataclass(frozen=True)
class Report:
    """What the assembler said of a variant; bytes per thread or per block.

    Attributes:
        allowed: bytes of stack that are accepted.
        complaint: an error, or a warning that costs much speed.
    """

    name: str
    registers: int
    stack: int
    shared: int
    allowed: int = 0
    complaint: str = ""

    @property
    def verdict(self) -> str:
        """Why it fails, or nothing."""
        if self.complaint:
            return self.complaint
        if self.shared > SHARED_MEMORY_LIMIT:
            return "DOES NOT FIT"
        return "SPILLS" if self.stack > self.allowed else ""


class _NoDevice:
    """Stands for the active driver, which is asked for its target, a device's number and a stream only."""

    def __init__(self, target: GPUTarget):
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@functools.cache
def variants() -> tuple[Variant, ...]:
    """Every kernel in the forms that launchers ask for."""
    # The longest come first, so that the processes end together.
    return (
        *offline_gemm.launches(),
        *offline_gemm_k.launches(),
        *offline_mega.movements(),
        *offline_exchange.movements(),
        *offline_mlp.variants(),
        *offline_local.variants(),
        *offline_router.movements(),
        *offline_shared.movements(),
        *offline_quant.variants(),
    )


def _allowed(variant: Variant) -> int:
    kernel = variant.kernel.fn.__name__
    found = (a.most for a in ALLOWED_SPILLS if a.kernel == kernel and a.applies(variant.constants))
    return max(found, default=0)


def read_log(log: str) -> tuple[int, int, str] | None:
    """(registers, bytes of stack, complaints) of the assembler's verbose log; None if it is no such log.

    Complaints are about tensor-core products that are serialised, or registers that cannot be shared out as asked.
    """
    registers = [int(found) for found in re.findall(r"Used (\d+) registers", log)]
    stack = [int(found) for found in re.findall(r"(\d+) bytes stack frame", log)]
    complaints = [line.strip() for line in log.splitlines() if re.search(r"\bC75\d\d\b|serialized|setmaxnreg", line)]
    return (max(registers), sum(stack), "; ".join(complaints)) if registers and stack else None


def compile_variant(variant: Variant) -> Report:
    """Compiles one variant and reads the assembler's log; for processes that ``_start`` has prepared."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            compiled = variant.compile()
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        return Report(variant.name, 0, 0, 0, complaint=" ".join(f"{type(error).__name__}: {error}".split()))
    found = read_log(output.getvalue())
    if found is None:
        return Report(variant.name, 0, 0, compiled.metadata.shared, complaint="no log of the assembler")
    registers, stack, complaint = found
    return Report(variant.name, registers, stack, compiled.metadata.shared, _allowed(variant), complaint)


def _start(arch: str, cache: str) -> None:
    """Prepares a process of its own: no driver, no kernels of other runs, and the assembler's log on stdout."""
    driver.set_active(_NoDevice(GPUTarget("cuda", ARCHITECTURES[arch], 32)))
    knobs.cache.dir = cache
    knobs.nvidia.dump_ptxas_log = True


def _report(index: int) -> Report:
    return compile_variant(variants()[index])


def chosen_variants(only: str = "", brief: bool = False) -> list[int]:
    """Places of the ``variants`` whose name matches ``only`` anywhere; ``brief``: an eighth of each Gluon kernel's
    forms, whose registers are laid out by us, and one of each Triton kernel's."""
    forms: dict[str, list[int]] = {}
    for index, variant in enumerate(variants()):
        if re.search(only, variant.name):
            forms.setdefault(variant.kernel.fn.__name__, []).append(index)
    if brief:
        steps = {
            name: 8 if isinstance(variants()[found[0]].kernel, GluonJITFunction) else len(found)
            for name, found in forms.items()
        }
        forms = {name: found[:: steps[name]] for name, found in forms.items()}
    return sorted(index for found in forms.values() for index in found)


def compile_all(arch: str = "sm_90a", only: str = "", brief: bool = False) -> Iterator[Report]:
    """Compiles ``chosen_variants``, in processes of their own."""
    chosen = chosen_variants(only, brief)
    processes = max(min(len(os.sched_getaffinity(0)), len(chosen), 8), 1)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as cache:
        with ProcessPoolExecutor(processes, spawn, _start, (arch, cache)) as pool:
            yield from pool.map(_report, chosen)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=sorted(ARCHITECTURES), default="sm_90a")
    parser.add_argument("--only", default="", metavar="REGEX", help="kernels whose name matches")
    parser.add_argument(
        "--brief", action="store_true", help="an eighth of each Gluon kernel's forms, one of each Triton kernel's"
    )
    parser.add_argument("--failures", action="store_true", help="print only kernels that fail")
    options = parser.parse_args()
    width = max(len(variant.name) for variant in variants())
    failed = count = 0
    print(f"triton {triton.__version__}, {options.arch}")
    print(f"{'kernel':{width}}  registers  spilled bytes  shared bytes")
    for report in compile_all(options.arch, options.only, options.brief):
        row = f"{report.name:{width}}  {report.registers:9}  {report.stack:13}  {report.shared:12}  {report.verdict}"
        if report.verdict or not options.failures:
            print(row.rstrip(), flush=True)
        count += 1
        failed += bool(report.verdict)
    print(f"{count} kernels, {failed} failed")
    return 1 if failed or not count else 0


if __name__ == "__main__":
    sys.exit(main())
