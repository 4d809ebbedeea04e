"""The exchange's protocol as a small model: which rank may touch what when, and nothing of how.

Every rank runs a list of movements, "D" (dispatch) or "C" (combine), each a list of atomic steps:

    both: tell everyone which dispatches and combines have ended here (PULLED, REDUCED)
    D: wait until all have ended the dispatch before; write my tokens; write my lists everywhere; raise READY
       everywhere; wait for everyone's READY; read everyone's lists and tokens
    C: wait until all have ended the combine before; write everyone's slots; raise SCATTERED everywhere; wait for
       everyone's SCATTERED; read my slots

What is written is the number of the movement, so that a read sees whether it is the right one. Writes take two steps,
with nothing valid in between.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

TORN = -1
"""What a place holds while it is being written."""


@dataclass(frozen=True)
class Step:
    """``kind``: write (``number`` to ``place``), wait (until it is at least that) or read (it must be that)."""

    kind: str
    place: tuple
    number: int


class Violation(AssertionError):
    """A rank read something else than it should, or no rank could go on."""


def steps_of(rank: int, ranks: int, movements: Sequence[str], left_out: frozenset[str] = frozenset()) -> list[Step]:
    """The steps of a rank. ``left_out``: names of flags whose waits are dropped, to see that they are needed."""
    out: list[Step] = []
    numbers = {"D": 0, "C": 0}
    everyone = range(ranks)

    def wait(flag: str, number: int) -> None:
        if flag not in left_out:
            out.extend(Step("wait", (flag, rank, other), number) for other in everyone)

    def write(place: tuple, number: int) -> None:
        out.extend((Step("write", place, TORN), Step("write", place, number)))

    def raise_flag(flag: str, number: int) -> None:
        out.extend(Step("write", (flag, other, rank), number) for other in everyone)

    for movement in movements:
        raise_flag("PULLED", numbers["D"])
        raise_flag("REDUCED", numbers["C"])
        numbers[movement] += 1
        number = numbers[movement]
        if movement == "D":
            wait("PULLED", number - 1)
            write(("tokens", rank), number)
            for other in everyone:
                write(("lists", other, rank), number)
            raise_flag("READY", number)
            wait("READY", number)
            for other in everyone:
                out.append(Step("read", ("lists", rank, other), number))
                out.append(Step("read", ("tokens", other), number))
        else:
            wait("REDUCED", number - 1)
            for other in everyone:
                write(("slots", other, rank), number)
            raise_flag("SCATTERED", number)
            wait("SCATTERED", number)
            for other in everyone:
                out.append(Step("read", ("slots", rank, other), number))
    return out


class _State:
    def __init__(self, programs: list[list[Step]], counters: tuple[int, ...], memory: dict[tuple, int]):
        self.programs, self.counters, self.memory = programs, counters, memory

    def ready(self) -> list[int]:
        """Ranks whose next step can be taken."""
        out = []
        for rank, (program, counter) in enumerate(zip(self.programs, self.counters, strict=True)):
            if counter < len(program):
                step = program[counter]
                if step.kind != "wait" or self.memory.get(step.place, 0) >= step.number:
                    out.append(rank)
        return out

    def done(self) -> bool:
        return all(counter == len(program) for program, counter in zip(self.programs, self.counters, strict=True))

    def after(self, rank: int) -> _State:
        step = self.programs[rank][self.counters[rank]]
        memory = self.memory
        if step.kind == "write":
            memory = {**memory, step.place: step.number}
        elif step.kind == "read" and memory.get(step.place, 0) != step.number:
            raise Violation(f"rank {rank} reads {memory.get(step.place, 0)} from {step.place}, not {step.number}")
        counters = tuple(c + (r == rank) for r, c in enumerate(self.counters))
        return _State(self.programs, counters, memory)

    def key(self) -> tuple:
        return self.counters, frozenset(self.memory.items())


def _start(ranks: int, movements: Sequence[str], left_out: frozenset[str]) -> _State:
    programs = [steps_of(rank, ranks, movements, left_out) for rank in range(ranks)]
    return _State(programs, (0,) * ranks, {})


def explore_all(ranks: int, movements: Sequence[str], left_out: frozenset[str] = frozenset()) -> int:
    """Every interleaving; returns how many states there are.

    Raises:
        Violation: in some interleaving.
    """
    start = _start(ranks, movements, left_out)
    seen, todo = {start.key()}, [start]
    while todo:
        state = todo.pop()
        ready = state.ready()
        if not ready and not state.done():
            raise Violation(f"no rank can go on at {state.counters}")
        for rank in ready:
            following = state.after(rank)
            if following.key() not in seen:
                seen.add(following.key())
                todo.append(following)
    return len(seen)


def explore_some(
    ranks: int, movements: Sequence[str], walks: int, seed: int, left_out: frozenset[str] = frozenset()
) -> None:
    """Random interleavings, in which ranks run ahead of others by bursts.

    Raises:
        Violation: in one of them.
    """
    draw = random.Random(seed)
    for _ in range(walks):
        state = _start(ranks, movements, left_out)
        while not state.done():
            ready = state.ready()
            if not ready:
                raise Violation(f"no rank can go on at {state.counters}")
            rank = draw.choice(ready)
            for _ in range(draw.choice((1, 1, 3, 30))):
                if rank in state.ready():
                    state = state.after(rank)
