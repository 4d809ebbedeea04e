"""How tests check error messages: every part of "argument = value: rule. Remedy" is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megamoe import MegaMoEError


@contextmanager
def fails(kind: type[Exception], argument: str, value: Any, rule: str) -> Iterator[None]:
    """The block raises a ``MegaMoEError`` that is also a ``kind`` and whose message has all four parts.

    Args:
        kind: ``ValueError`` or ``TypeError``, which a caller without megamoe's types would catch.
        value: as its ``repr`` appears in the message.
        rule: a part of the rule's text.
    """
    with pytest.raises(kind) as caught:
        yield
    assert isinstance(caught.value, MegaMoEError), f"bare {type(caught.value).__name__}: {caught.value}"
    message, start = str(caught.value), f"{argument} = {value!r}: "
    assert message.startswith(start), f"{message!r} does not start with {start!r}"
    stated_rule, _, remedy = message.removeprefix(start).partition(". ")
    assert rule in stated_rule, f"{message!r} does not state {rule!r}"
    assert remedy.strip(), f"{message!r} has no remedy"
