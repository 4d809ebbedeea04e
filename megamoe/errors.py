"""The exception hierarchy and the checks used at the public edge.

Every message has four parts: which argument, its value, the rule it broke, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch


class MegaMoEError(Exception):
    """Base class of every error that megamoe raises on purpose."""


class MegaMoEValueError(MegaMoEError, ValueError):
    """An argument has the right type but a value that cannot work."""


class MegaMoETypeError(MegaMoEError, TypeError):
    """An argument has the wrong type or dtype."""


class ExchangeError(MegaMoEError, RuntimeError):
    """A collective of the token exchange failed or ran into its timeout."""


FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""The dtypes of hidden states."""


def fail_value(argument: str, value: Any, rule: str, remedy: str) -> NoReturn:
    raise MegaMoEValueError(f"{argument} = {value!r}: {rule}. {remedy}")


def fail_type(argument: str, value: Any, rule: str, remedy: str) -> NoReturn:
    raise MegaMoETypeError(f"{argument} = {value!r}: {rule}. {remedy}")


def check_int(argument: str, value: Any, minimum: int) -> None:
    """``value`` is an ``int`` (not a bool) of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int):
        fail_type(argument, value, "must be an integer", f"Pass an int >= {minimum}.")
    if value < minimum:
        fail_value(argument, value, f"must be at least {minimum}", f"Pass an int >= {minimum}.")


def check_number(argument: str, value: Any, minimum: float, *, exclusive: bool = False) -> None:
    """``value`` is a finite number >= ``minimum`` (> with ``exclusive``)."""
    bound = f"{'>' if exclusive else '>='} {minimum}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        fail_type(argument, value, "must be a number", f"Pass a finite float {bound}.")
    in_range = value > minimum if exclusive else value >= minimum
    if not in_range or value == float("inf"):
        fail_value(argument, value, f"must be finite and {bound}", f"Pass a finite float {bound}.")


def check_choice(argument: str, value: Any, choices: Sequence[str]) -> None:
    """``value`` is one of ``choices``."""
    if value not in choices:
        fail_value(argument, value, f"must be one of {', '.join(map(repr, choices))}", "Pass one of these.")


def check_tensor(
    argument: str,
    tensor: Any,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype] | None = None,
    device: torch.device | None = None,
) -> None:
    """``tensor`` has ``shape`` (``None`` = any size), one of ``dtypes`` and lies on ``device``."""
    if not isinstance(tensor, torch.Tensor):
        fail_type(argument, type(tensor).__name__, "must be a torch.Tensor", "Convert it with torch.as_tensor.")
    if tensor.dim() != len(shape) or any(
        want is not None and have != want for have, want in zip(tensor.shape, shape, strict=False)
    ):
        wanted = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
        fail_value(f"{argument}.shape", list(tensor.shape), f"must be {wanted}", "Reshape or slice it first.")
    if dtypes is not None and tensor.dtype not in dtypes:
        names = ", ".join(str(dtype) for dtype in dtypes)
        fail_type(f"{argument}.dtype", tensor.dtype, f"must be one of {names}", "Cast it with .to(dtype).")
    if device is not None and tensor.device != device:
        fail_value(f"{argument}.device", str(tensor.device), f"must be {device}", f"Move it with .to({str(device)!r}).")
