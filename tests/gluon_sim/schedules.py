"""Small kernels run under every policy: all schedules must be fine, or all must give the report."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.gluon_sim import POLICIES

SCHEDULES = [(policy, seed) for policy in POLICIES for seed in range(2)]


def always(run: Callable[[str, int], object]) -> None:
    """``run(policy, seed)`` succeeds under all schedules."""
    for policy, seed in SCHEDULES:
        run(policy, seed)


def always_reports(kinds: type[Exception] | tuple, text: str, run: Callable[[str, int], object]) -> None:
    """``run(policy, seed)`` raises one of ``kinds``, no subclass, with a message like ``text``, under all schedules."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    for policy, seed in SCHEDULES:
        with pytest.raises(kinds, match=text) as raised:
            run(policy, seed)
        assert raised.type in kinds, f"{raised.type} under {policy}, seed {seed}"
