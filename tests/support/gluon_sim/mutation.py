"""Planted bugs: a kernel's source is edited, and the simulator or the result must show it.

One suite for each kernel family: a list of ``Bug``s and a parametrised test that calls ``assert_caught``.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from .errors import SimError

SCHEDULES = (("random", 0), ("lazy", 1), ("pct", 2))
"""(policy, seed) that find nearly every bug, since happens-before does not depend on luck."""

Case = Callable[[types.ModuleType, str, int], None]
"""``case(module, policy, seed)`` runs a kernel of the module and asserts that the result is right."""


@dataclass(frozen=True)
class Bug:
    """An edit of a module's source.

    Attributes:
        case: what shows the bug; it passes with the module as it is.
        old, new: text that occurs ``occurrences`` times, and what replaces it everywhere.
        also: further (old, new) that belong to the bug, each found once.
    """

    name: str
    case: Case
    old: str
    new: str
    occurrences: int = 1
    also: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Finding:
    """How one schedule showed a bug."""

    policy: str
    seed: int
    report: SimError | AssertionError

    def __str__(self) -> str:
        return f"{type(self.report).__name__} ({self.policy}, seed {self.seed}): {self.report}"


def _lines_of(path: Path, source: str, tree: ast.Module) -> Callable[[types.FunctionType], tuple[list[str], int]]:
    """``inspect.getsourcelines``, which jit calls for each function, without the tokenizer for those of one file."""
    others = inspect.getsourcelines
    lines = source.splitlines(keepends=True)
    parts = [*tree.body, *(part for node in tree.body if isinstance(node, ast.ClassDef) for part in node.body)]
    ends = {
        min(part.lineno for part in (node, *node.decorator_list)): node.end_lineno
        for node in parts
        if isinstance(node, ast.FunctionDef)
    }

    def lines_of(function: types.FunctionType) -> tuple[list[str], int]:
        first = function.__code__.co_firstlineno
        if function.__code__.co_filename != str(path) or first not in ends:
            return others(function)
        return lines[first - 1 : ends[first]], first

    return lines_of


def _execute(module: types.ModuleType, source: str) -> types.ModuleType:
    """A module of the same name, made from ``source``. It is on disk while it runs: jit reads the source."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, Path(module.__file__).name)
        path.write_text(source, encoding="utf-8")
        copy = importlib.util.module_from_spec(importlib.util.spec_from_file_location(module.__name__, path))
        tree = ast.parse(source)
        original = sys.modules.get(module.__name__)
        sys.modules[module.__name__] = copy  # dataclasses look themselves up
        try:
            with mock.patch.object(inspect, "getsourcelines", _lines_of(path, source, tree)):
                exec(compile(tree, str(path), "exec"), vars(copy))
        finally:
            if original is not None:
                sys.modules[module.__name__] = original
            else:
                del sys.modules[module.__name__]
    return copy


def _edit(sources: dict, old: str, new: str, occurrences: int, name: str) -> None:
    counts = {module: source.count(old) for module, source in sources.items()}
    if sorted(counts.values(), reverse=True)[0] != occurrences or sum(counts.values()) != occurrences:
        where = {module.__name__: count for module, count in counts.items()}
        raise ValueError(f"bug {name!r}: expected {occurrences} times in one module, found {where}:\n{old}")
    for module, count in counts.items():
        if count:
            sources[module] = sources[module].replace(old, new)


def plant(module: types.ModuleType, bug: Bug, helpers: Sequence[types.ModuleType] = ()) -> types.ModuleType:
    """A copy of ``module`` with the bug.

    Args:
        helpers: modules that ``module`` imports names from and that may have the bug instead, in import order.

    Raises:
        ValueError: the old text does not occur, or more often than the bug says.
    """
    sources = {m: inspect.getsource(m) for m in (*helpers, module)}
    unchanged = dict(sources)
    _edit(sources, bug.old, bug.new, bug.occurrences, bug.name)
    for old, new in bug.also:
        _edit(sources, old, new, 1, bug.name)
    originals = {m.__name__: sys.modules.get(m.__name__) for m in helpers}
    changed = False
    try:
        for helper in helpers:
            # Once a helper differs, those after it have to import it anew.
            changed = changed or sources[helper] != unchanged[helper]
            if changed:
                copy = _execute(helper, sources[helper])
                sys.modules[helper.__name__] = copy
                _set_in_package(helper.__name__, copy)
        return _execute(module, sources[module])
    finally:
        for name, original in originals.items():
            if original is not None:
                sys.modules[name] = original
                _set_in_package(name, original)


def _set_in_package(name: str, module: types.ModuleType) -> None:
    """What ``from package import module`` finds."""
    package, _, last = name.rpartition(".")
    if package in sys.modules:
        setattr(sys.modules[package], last, module)


def assert_caught(
    module: types.ModuleType,
    bug: Bug,
    schedules: Sequence[tuple[str, int]] = SCHEDULES,
    helpers: Sequence[types.ModuleType] = (),
    needed: int = 1,
) -> list[Finding]:
    """Run the bug's case under the schedules until ``needed`` of them have shown it.

    A report of the simulator or a failed assertion of the case counts. Anything else, such as a name without a model,
    is raised.

    Returns:
        The findings.

    Raises:
        AssertionError: too few schedules show the bug.
    """
    mutant, findings = plant(module, bug, helpers), []
    for policy, seed in schedules:
        try:
            bug.case(mutant, policy, seed)
        except (SimError, AssertionError) as report:
            findings.append(Finding(policy, seed, report))
            if len(findings) == needed:
                return findings
    raise AssertionError(f"{bug.name}: shown by {len(findings)} of {len(schedules)} schedules, not by {needed}")
