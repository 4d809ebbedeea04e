"""The exchange's protocol as a small model: which rank may touch what when, and nothing of how.

Every rank runs a list of movements, "D" (dispatch), "C" (combine) or "M" (a mega-kernel's call), each a list of atomic
steps:

    D: write my tokens; write my lists everywhere; raise READY everywhere; wait for everyone's READY; read everyone's
       lists and tokens
    C: write everyone's slots of the first part; raise SCATTERED everywhere; the same for the second part; for each part
       that I have tokens of: wait for everyone's SCATTERED, read my slots. The last rank has none of the second part.
    F: as C, with one part for both
    M: as D, but what is read last are the tokens; then as F

Before it writes, a rank must know that all have ended the movement of that kind before. A flag of the other kind that
everyone has raised since has shown it (``SEEN``); else it tells everyone that it has ended its own (PULLED, REDUCED)
and waits for everyone's. M's writes to slots follow READY.

A rank may have several programs, which write a share each, and read everything. Each adds a share of UNIT to READY, and
to the SCATTERED of F: only all shares of a launch make a whole one, which is what is waited for. A launch begins when
the last one has ended. Where there are several parts a program may be ahead of another by one: shares would not tell.

What is written is the number of the movement, so that a read sees whether it is the right one. Writes take two steps,
with nothing valid in between.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

TORN = -1
"""What a place holds while it is being written."""

PARTS = 2

UNIT = 16
"""Of flags that programs raise together; more than there are programs."""


@dataclass(frozen=True)
class Step:
    """``kind``: write (``number`` to ``place``), add (it), wait (until it is as large) or read (it must be that)."""

    kind: str
    place: tuple
    number: int


class Violation(AssertionError):
    """A rank read something else than it should, or no rank could go on."""


def steps_of(
    rank: int,
    ranks: int,
    movements: Sequence[str],
    wrong: frozenset[str] = frozenset(),
    program: int = 0,
    programs: int = 1,
) -> list[Step]:
    """The steps of a program of a rank. Only D and F are right for several programs.

    ``wrong``, to see that a rule is needed: names of flags whose waits are dropped ("SCATTERED 1": for the second
    part), "DISPATCHES_SEEN" or "COMBINES_SEEN" (one more is taken for seen than is), "early READY", "early SCATTERED"
    (raised before the last write), "whole shares" (each program adds all), "no rest" (each adds the least), "READY of
    one" and "SCATTERED of one" (the first program raises it for all).
    """
    out: list[Step] = []
    # Movements that have ended here, and that all are known to have ended.
    ended, seen = {"D": 0, "C": 0}, {"D": 0, "C": 0}
    everyone, all_programs = range(ranks), range(programs)

    def wait(flag: str, number: int, part: str = "") -> None:
        if flag + part not in wrong:
            unit = UNIT if flag in ("READY", "SCATTERED") else 1
            out.extend(Step("wait", (flag, rank, other), number * unit) for other in everyone)

    def write(place: tuple, number: int) -> None:
        out.extend((Step("write", (*place, program), TORN), Step("write", (*place, program), number)))

    def read(place: tuple, number: int) -> None:
        out.extend(Step("read", (*place, p), number) for p in all_programs)

    def raise_flag(flag: str, number: int, epochs: int = 1) -> None:
        if flag in ("READY", "SCATTERED"):
            share = UNIT * epochs - (programs - 1) if program == 0 else 1
            if "whole shares" in wrong:
                share = UNIT * epochs
            elif "no rest" in wrong:
                share = 1
            elif f"{flag} of one" in wrong:
                share = UNIT * epochs if program == 0 else 0
            raised = [Step("add", (flag, other, rank), share) for other in everyone]
        elif program == 0:
            raised = [Step("write", (flag, other, rank), number) for other in everyone]
        else:
            return
        if f"early {flag}" in wrong:
            out[-1:-1] = raised
        else:
            out.extend(raised)

    def wait_until_ended(kind: str, flag: str) -> None:
        if seen[kind] < ended[kind]:
            raise_flag(flag, ended[kind])
            wait(flag, ended[kind])

    def send() -> None:
        wait_until_ended("D", "PULLED")
        number = ended["D"] + 1
        write(("tokens", rank), number)
        for other in everyone:
            write(("lists", other, rank), number)
        raise_flag("READY", number)
        wait("READY", number)
        seen["C"] = ended["C"] + ("COMBINES_SEEN" in wrong)
        for other in everyone:
            read(("lists", rank, other), number)
        for other in everyone:
            read(("tokens", other), number)

    def scatter(parts: Sequence[int]) -> int:
        number = ended["C"] + 1
        for part in parts:
            for other in everyone:
                if part == 0 or other < ranks - 1:
                    write(("slots", part, other, rank), number)
        raise_flag("SCATTERED", ended["C"] * PARTS + max(parts) + 1, len(parts))
        return number

    def take(part: int, number: int, announced: int) -> None:
        if part == 0 or rank < ranks - 1:
            wait("SCATTERED", (number - 1) * PARTS + announced + 1, f" {announced}" if announced else "")
            for other in everyone:
                read(("slots", part, rank, other), number)

    for launch, movement in enumerate(movements):
        if programs > 1:
            out.append(Step("wait", ("ended", rank), launch * programs))
        if movement == "D":
            send()
            ended["D"] += 1
        elif movement in "CF":
            wait_until_ended("C", "REDUCED")
            announced = [[part] for part in range(PARTS)] if movement == "C" else [list(range(PARTS))]
            for parts in announced:
                number = scatter(parts)
            for parts in announced:
                for part in parts:
                    take(part, number, max(parts))
            seen["D"] = ended["D"] + ("DISPATCHES_SEEN" in wrong)
            ended["C"] += 1
        else:
            send()
            number = scatter(range(PARTS))
            for part in range(PARTS):
                take(part, number, PARTS - 1)
            seen["D"] = ended["D"] + 1 + ("DISPATCHES_SEEN" in wrong)
            ended["D"] += 1
            ended["C"] += 1
        if programs > 1:
            out.append(Step("add", ("ended", rank), 1))
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
        elif step.kind == "add":
            memory = {**memory, step.place: memory.get(step.place, 0) + step.number}
        elif step.kind == "read" and memory.get(step.place, 0) != step.number:
            raise Violation(f"rank {rank} reads {memory.get(step.place, 0)} from {step.place}, not {step.number}")
        counters = tuple(c + (r == rank) for r, c in enumerate(self.counters))
        return _State(self.programs, counters, memory)

    def key(self) -> tuple:
        return self.counters, frozenset(self.memory.items())


def _start(ranks: int, movements: Sequence[str], wrong: frozenset[str], programs: int) -> _State:
    # Without defaults, for one program of each rank.
    several = [(program, programs) for program in range(programs)] if programs > 1 else [()]
    steps = [steps_of(rank, ranks, movements, wrong, *program) for rank in range(ranks) for program in several]
    return _State(steps, (0,) * len(steps), {})


def explore_all(ranks: int, movements: Sequence[str], wrong: frozenset[str] = frozenset(), programs: int = 1) -> int:
    """Every interleaving of all ranks' programs; returns how many states there are.

    Raises:
        Violation: in some interleaving.
    """
    start = _start(ranks, movements, wrong, programs)
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
    ranks: int,
    movements: Sequence[str],
    walks: int,
    seed: int,
    wrong: frozenset[str] = frozenset(),
    programs: int = 1,
) -> None:
    """Random interleavings, in which ranks run ahead of others by bursts.

    Raises:
        Violation: in one of them.
    """
    draw = random.Random(seed)
    for _ in range(walks):
        state = _start(ranks, movements, wrong, programs)
        while not state.done():
            ready = state.ready()
            if not ready:
                raise Violation(f"no rank can go on at {state.counters}")
            rank = draw.choice(ready)
            for _ in range(draw.choice((1, 1, 3, 30))):
                if rank in state.ready():
                    state = state.after(rank)
