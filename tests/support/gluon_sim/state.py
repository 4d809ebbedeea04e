"""The simulation that is running, as the models of the language see it."""

from __future__ import annotations

from collections.abc import Callable

from .scheduler import Agent

_running = None


def set_running(simulation) -> None:
    """Make ``simulation`` (or None) the one that the models work on."""
    global _running
    _running = simulation


def running():
    """The running simulation."""
    return _running


def agent() -> Agent:
    """The partition that executes."""
    return _running.scheduler.current


def step(is_poll: bool = False) -> Agent:
    """A scheduling point before a visible operation; a read that ``is_poll`` may be one round of a spin loop."""
    me = agent()
    _running.scheduler.point()
    if not is_poll:
        me.last_poll = None
    return me


def wait(condition: Callable[[], bool], reason) -> None:
    """Sleep until ``condition()``."""
    _running.scheduler.wait(condition, reason)


def here(what: str) -> str:
    """Who does ``what`` in which line, for messages."""
    me = agent()
    return f"{me.name} [{what} at {me.where()}]"


class Lazy:
    """Text that is made when it is printed."""

    def __init__(self, text: Callable[[], str]):
        self._text = text

    def __str__(self) -> str:
        return self._text()

    def __format__(self, spec: str) -> str:
        return format(self._text(), spec)
