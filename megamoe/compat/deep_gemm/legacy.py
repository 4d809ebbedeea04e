"""DeepGEMM's Triton kernels for older GPUs: none is here."""

from __future__ import annotations

from collections.abc import Callable

from megamoe.compat.deep_gemm.missing import LEGACY, missing


def __getattr__(name: str) -> Callable:
    return missing(name, LEGACY, __name__)
