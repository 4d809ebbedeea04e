"""``import deep_gemm`` as this package, here and in child processes."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

PACKAGE = "megamoe.compat.deep_gemm"
MODULES = (
    "",
    ".legacy",
    ".mega",
    ".testing",
    ".testing.bench",
    ".testing.numeric",
    ".testing.utils",
    ".utils",
    ".utils.dist",
    ".utils.layout",
    ".utils.math",
)


def install() -> None:
    """Registers the package and its modules under DeepGEMM's names."""
    for name in MODULES:
        sys.modules[f"deep_gemm{name}"] = importlib.import_module(PACKAGE + name)


def install_for_children() -> None:
    """Puts a module ``deep_gemm`` that calls ``install``, and this checkout, first on the path of child processes."""
    compat = Path(__file__).resolve().parents[1]
    folders = [str(compat / "_alias"), str(compat.parents[1])]
    # Spawned processes take this process's path, other interpreters the environment's.
    sys.path[:0] = folders
    if os.environ.get("PYTHONPATH"):
        folders.append(os.environ["PYTHONPATH"])
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
