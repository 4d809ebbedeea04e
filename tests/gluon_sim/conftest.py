"""The simulator needs triton for its dtypes and layouts and greenlet for its partitions."""

from __future__ import annotations

import importlib.util

# Collected where both are installed only: the modules define kernels at import.
if not all(importlib.util.find_spec(name) for name in ("triton", "greenlet")):
    collect_ignore_glob = ["test_*.py"]
