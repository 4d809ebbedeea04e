"""Repeated launches of one compiled kernel with the same arguments, tensor maps encoded once.

Triton encodes a kernel's tensor maps in every launch, which costs more than the launch. Its launcher is a function
around the driver's that replaces each descriptor by its map; run once with a recorder in the driver's place, it yields
the final arguments, which are then handed to the driver's launcher directly.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

_STREAM = 0x5354524D
"""Stands for the stream in the recorded arguments."""


def _recorded(compiled: Any, grid: int, values: tuple) -> tuple[Callable, list, int]:
    """(driver's launcher, its arguments, where the stream stands in them)."""
    runner = compiled.run
    wrapper = runner.launch
    names = wrapper.__code__.co_freevars
    cells = list(wrapper.__closure__)
    index = names.index("launcher")
    launcher = cells[index].cell_contents
    calls: list[tuple] = []
    cells[index] = types.CellType(lambda *arguments: calls.append(arguments))
    recording = copy.copy(runner)
    recording.launch = types.FunctionType(
        wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, tuple(cells)
    )
    recording(grid, 1, 1, _STREAM, compiled.function, compiled.packed_metadata, None, None, None, *values)
    (arguments,) = calls
    return launcher, list(arguments), arguments.index(_STREAM)


def repeated(compiled: Any, grid: int, values: tuple) -> Callable[[int], None]:
    """A function that launches ``compiled`` on a stream (its address), ``grid`` programs, with ``values``.

    The first launch goes the usual way, for it may be the only one; the second one records. Kernels with scratch
    memory, and versions of Triton whose launcher looks different, always take the usual way.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    may_record = not (run.global_scratch_size or run.profile_scratch_size)
    launches = 0
    short: tuple[Callable, tuple, tuple] | None = None

    def launch(stream: int) -> None:
        nonlocal launches, short
        if short is not None:
            launcher, before, after = short
            launcher(*before, stream, *after)
            return
        launches += 1
        if launches == 2 and may_record:
            try:
                launcher, arguments, position = _recorded(compiled, grid, values)
            except (AttributeError, TypeError, ValueError):
                pass
            else:
                short = launcher, tuple(arguments[:position]), tuple(arguments[position + 1 :])
                launch(stream)
                return
        run(grid, 1, 1, stream, function, metadata, None, None, None, *values)

    return launch
