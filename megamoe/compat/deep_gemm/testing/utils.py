"""Decorators of test functions, and the architecture they ask for."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch


def get_arch_major() -> int:
    """Major compute capability of the current GPU; 9 without one."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 9


def test_filter(condition: Callable[[], bool]) -> Callable:
    """The function runs where ``condition()`` holds, else prints that it was left out. It returns ``None``."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args, **kwargs) -> None:
            if condition():
                function(*args, **kwargs)
            else:
                print(f"{function.__name__}:\n > left out by {condition}\n")

        return call

    return decorate


# Its name is not that of a test.
test_filter.__test__ = False


def ignore_env(name: str, condition: Callable[[], bool]) -> Callable:
    """The function runs without the environment variable ``name`` where ``condition()`` holds. It returns ``None``."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args, **kwargs) -> None:
            hidden = os.environ.pop(name, None) if condition() else None
            try:
                function(*args, **kwargs)
            finally:
                if hidden is not None:
                    os.environ[name] = hidden

        return call

    return decorate
