"""What the simulator reports about a kernel."""

from __future__ import annotations


class SimError(Exception):
    """A fault of the kernel: overflow, access out of bounds, misuse of a barrier, memory that nobody has written ..."""


class Race(SimError):
    """Two accesses, or a barrier's phase and a wait for it, that no synchronisation orders."""


class Deadlock(SimError):
    """Nothing can run. The message says for every partition what it waits for and in which line."""


class Unsupported(NotImplementedError):
    """The kernel uses something that the simulator has no model of. Says nothing about the kernel."""
