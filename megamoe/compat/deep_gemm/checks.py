"""Runs functions of a test script and counts their comparisons: every call of ``deep_gemm.testing.calc_diff``."""

from __future__ import annotations

import math
import os
import runpy
from dataclasses import dataclass
from typing import Any

from megamoe.compat.deep_gemm import testing


@dataclass
class Count:
    """Comparisons of one function.

    Attributes:
        made: calls of ``calc_diff``.
        largest: the largest difference, NaN if there was one.
        failure: what ended the function early, or None.
    """

    made: int = 0
    largest: float = 0.0
    failure: BaseException | None = None

    @property
    def passed(self) -> int:
        """Comparisons whose assertion held: all but the one after which the function raised."""
        return self.made - (self.made > 0 and isinstance(self.failure, AssertionError))

    def __str__(self) -> str:
        ending = "" if self.failure is None else f"; ended by {type(self.failure).__name__}: {self.failure}"
        return f"{self.passed} of {self.made} comparisons passed, largest difference {self.largest:.3e}{ending}"


def run(script: str, functions: list[str]) -> dict[str, Count]:
    """Calls the functions of the script one by one, its timing switched off (``DG_USE_NVIDIA_TOOLS``)."""
    os.environ["DG_USE_NVIDIA_TOOLS"] = "1"
    counts: dict[str, Count] = {}
    current = Count()
    compare = testing.calc_diff

    def counted(x: Any, y: Any) -> Any:
        difference = compare(x, y)
        current.made += 1
        # A NaN stays.
        if not (math.isnan(current.largest) or difference <= current.largest):
            current.largest = float(difference)
        return difference

    testing.calc_diff = counted
    try:
        names = runpy.run_path(script, run_name="checked")
        for function in functions:
            current = counts[function] = Count()
            try:
                names[function]()
            except Exception as error:  # the next function is to run all the same
                current.failure = error
    finally:
        testing.calc_diff = compare
    return counts
