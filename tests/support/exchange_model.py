"""The exchange's protocol as a small model: which rank may touch what when, and nothing of how.

Every rank runs a list of movements, "D" (dispatch), "C" (combine) or "M" (a mega-kernel's call), each a list of atomic
steps:

    D: write my tokens; write my lists everywhere; raise READY everywhere; wait for everyone's READY; read everyone's
       lists and tokens
    C: write everyone's slots of the first part; raise SCATTERED everywhere; the same for the second part; for each part
       that I have tokens of: wait for everyone's SCATTERED, read my slots. The last rank has none of the second part.
    M: as D, but what is read last are the tokens; then as C, with one part for both

Before it writes, a rank must know that all have ended the movement of that kind before. A flag of the other kind that
everyone has raised since has shown it (``SEEN``); else it tells everyone that it has ended its own (PULLED, REDUCED)
and waits for everyone's. M's writes to slots follow READY.

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


@dataclass(frozen=True)
class Step:
    """``kind``: write (``number`` to ``place``), wait (until it is at least that) or read (it must be that)."""

    kind: str
    place: tuple
    number: int


class Violation(AssertionError):
    """A rank read something else than it should, or no rank could go on."""


def steps_of(rank: int, ranks: int, movements: Sequence[str], wrong: frozenset[str] = frozenset()) -> list[Step]:
    """The steps of a rank.

    ``wrong``, to see that a rule is needed: names of flags whose waits are dropped ("SCATTERED 1": for the second
    part), "DISPATCHES_SEEN" or "COMBINES_SEEN" (one more is taken for seen than is), "early READY", "early SCATTERED"
    (raised before the last write).
    """
    out: list[Step] = []
    # Movements that have ended here, and that all are known to have ended.
    ended, seen = {"D": 0, "C": 0}, {"D": 0, "C": 0}
    everyone = range(ranks)

    def wait(flag: str, number: int, part: str = "") -> None:
        if flag + part not in wrong:
            out.extend(Step("wait", (flag, rank, other), number) for other in everyone)

    def write(place: tuple, number: int) -> None:
        out.extend((Step("write", place, TORN), Step("write", place, number)))

    def raise_flag(flag: str, number: int) -> None:
        raised = [Step("write", (flag, other, rank), number) for other in everyone]
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
        out.extend(Step("read", ("lists", rank, other), number) for other in everyone)
        out.extend(Step("read", ("tokens", other), number) for other in everyone)

    def scatter(parts: Sequence[int]) -> int:
        number = ended["C"] + 1
        for part in parts:
            for other in everyone:
                if part == 0 or other < ranks - 1:
                    write(("slots", part, other, rank), number)
        raise_flag("SCATTERED", ended["C"] * PARTS + max(parts) + 1)
        return number

    def take(part: int, number: int, announced: int) -> None:
        if part == 0 or rank < ranks - 1:
            wait("SCATTERED", (number - 1) * PARTS + announced + 1, f" {announced}" if announced else "")
            out.extend(Step("read", ("slots", part, rank, other), number) for other in everyone)

    for movement in movements:
        if movement == "D":
            send()
            ended["D"] += 1
        elif movement == "C":
            wait_until_ended("C", "REDUCED")
            for part in range(PARTS):
                number = scatter([part])
            for part in range(PARTS):
                take(part, number, part)
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


def _start(ranks: int, movements: Sequence[str], wrong: frozenset[str]) -> _State:
    programs = [steps_of(rank, ranks, movements, wrong) for rank in range(ranks)]
    return _State(programs, (0,) * ranks, {})


def explore_all(ranks: int, movements: Sequence[str], wrong: frozenset[str] = frozenset()) -> int:
    """Every interleaving; returns how many states there are.

    Raises:
        Violation: in some interleaving.
    """
    start = _start(ranks, movements, wrong)
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
    ranks: int, movements: Sequence[str], walks: int, seed: int, wrong: frozenset[str] = frozenset()
) -> None:
    """Random interleavings, in which ranks run ahead of others by bursts.

    Raises:
        Violation: in one of them.
    """
    draw = random.Random(seed)
    for _ in range(walks):
        state = _start(ranks, movements, wrong)
        while not state.done():
            ready = state.ready()
            if not ready:
                raise Violation(f"no rank can go on at {state.counters}")
            rank = draw.choice(ready)
            for _ in range(draw.choice((1, 1, 3, 30))):
                if rank in state.ready():
                    state = state.after(rank)
