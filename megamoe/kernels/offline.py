"""Compiles every device kernel to a cubin without a GPU and reports registers, spills and shared memory.

Run: python -m megamoe.kernels.offline [--arch sm_90a] [--only TEXT]. Exits with 1 if a kernel does not compile, spills,
needs too much memory, or has its tensor-core products serialised by the assembler. Needs triton; nothing is loaded onto
a device.
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
from triton.runtime import driver

from megamoe.kernels import offline_gemm, offline_quant

SHARED_MEMORY_LIMIT = 227 * 1024
"""Bytes of shared memory that a block can have on Hopper."""

ARCHITECTURES = {"sm_90a": 90}

Variant = offline_quant.Variant | offline_gemm.Launch


@dataclass(frozen=True)
class AllowedSpill:
    """Forms of a kernel that may use so many bytes of stack a thread."""

    kernel: str
    applies: Callable[[dict[str, Any]], bool]
    most: int
    reason: str


ALLOWED_SPILLS = ()


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
    return (*offline_gemm.launches(), *offline_quant.variants())


def _allowed(variant: Variant) -> int:
    kernel = variant.kernel.fn.__name__
    found = (a.most for a in ALLOWED_SPILLS if a.kernel == kernel and a.applies(variant.constants))
    return max(found, default=0)


def _complaints(log: str) -> str:
    """Lines about serialised products or a division of registers that was not possible."""
    lines = (line for line in log.splitlines() if re.search(r"\bC75\d\d\b|serialized|setmaxnreg", line))
    return "; ".join(line.strip() for line in lines)


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
    log = output.getvalue()
    registers = [int(found) for found in re.findall(r"Used (\d+) registers", log)]
    stack = [int(found) for found in re.findall(r"(\d+) bytes stack frame", log)]
    if not registers or not stack:
        return Report(variant.name, 0, 0, compiled.metadata.shared, complaint=f"the assembler's log is unknown: {log}")
    return Report(
        variant.name, max(registers), sum(stack), compiled.metadata.shared, _allowed(variant), _complaints(log)
    )


def _start(arch: str, cache: str) -> None:
    """Prepares a process of its own: no driver, no kernels of other runs, and the assembler's log on stdout."""
    driver.set_active(_NoDevice(GPUTarget("cuda", ARCHITECTURES[arch], 32)))
    knobs.cache.dir = cache
    knobs.nvidia.dump_ptxas_log = True


def _report(index: int) -> Report:
    return compile_variant(variants()[index])


def compile_all(arch: str = "sm_90a", only: str = "") -> Iterator[Report]:
    """Compiles the ``variants`` whose name contains ``only``, in processes of their own."""
    chosen = [index for index, variant in enumerate(variants()) if only in variant.name]
    processes = max(min(len(os.sched_getaffinity(0)), len(chosen), 8), 1)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as cache:
        with ProcessPoolExecutor(processes, spawn, _start, (arch, cache)) as pool:
            yield from pool.map(_report, chosen)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=sorted(ARCHITECTURES), default="sm_90a")
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels whose line contains this")
    options = parser.parse_args()
    width = max(len(variant.name) for variant in variants())
    failed = count = 0
    print(f"triton {triton.__version__}, {options.arch}")
    print(f"{'kernel':{width}}  registers  spilled bytes  shared bytes")
    for report in compile_all(options.arch, options.only):
        row = f"{report.name:{width}}  {report.registers:9}  {report.stack:13}  {report.shared:12}  {report.verdict}"
        print(row.rstrip(), flush=True)
        count += 1
        failed += bool(report.verdict)
    print(f"{count} kernels, {failed} failed")
    return 1 if failed or not count else 0


if __name__ == "__main__":
    sys.exit(main())
