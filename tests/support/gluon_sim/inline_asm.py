"""Inline PTX. A text made of the instructions in ``INSTRUCTIONS`` runs in order; any other needs a model by ``asm``.

Asm on scalars is executed by every thread of the partition, unless a guard picks lane 0 of each warp or thread 0: an
unguarded ``red`` adds once per thread. A release covers the thread's own earlier work: all of the partition's if every
thread executes it, its warp's if lane 0 does after ``bar.warp.sync``, else what came before the last thread barrier.
What only the first warp acquires, the others have after the next one.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from . import float_asm
from .barriers import fence_async_all, fence_async_shared, named_barrier
from .errors import SimError, Unsupported
from .pointer_access import ATOMICS, as_torch, load, store
from .state import agent, here, running
from .tensors import Tensor
from .tma import TmaModule
from .values import Int32, Int64, unwrap

INSTRUCTIONS = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"mov\.\w+ (\$\d+|\w+), (%laneid|%tid\.x|\d+)", "mov"),
        (r"setp\.eq\.\w+ (\w+), (\w+), 0", "setp"),
        (r"setp\.lt\.\w+ (\w+), (\w+), 32", "setp_warp"),
        (r"fence\.proxy\.async", "fence_all"),
        (r"fence\.proxy\.async\.shared::cta", "fence_shared"),
        (r"bar\.warp\.sync .*", "warp_sync"),
        # A partition is one agent: its lanes have one value anyway.
        (r"shfl\.sync\.idx\.b32 (\$\d+), \1, 0, 31, 0xffffffff", "nothing"),
        (r"(?:bar|barrier\.cta)\.(sync|arrive) (\d+), (\d+)", "bar"),
        (r"cp\.async\.bulk\.commit_group", "nothing"),
        (r"nanosleep\.u32 \d+", "nothing"),
        # Streams run one launch after another here, so a kernel's start waits for nothing.
        (r"griddepcontrol\.(wait|launch_dependents)", "nothing"),
        (r"cp\.async\.bulk\.wait_group(\.read)? (\d+)", "bulk_wait"),
        (r"ld\.(acquire|relaxed|volatile)(?:\.(sys|gpu|cta))?\.global\.\w+ (\$\d+), \[(\$\d+)\]", "ld"),
        (r"st\.(release|relaxed|volatile)(?:\.(sys|gpu|cta))?\.global\.\w+ \[(\$\d+)\], (\$\d+)", "st"),
        (r"red\.(release|relaxed)\.(sys|gpu|cta)\.global\.(add|max|or)\.\w+ \[(\$\d+)\], (\$\d+)", "red"),
    )
)

_models: list[tuple[re.Pattern, Callable]] = []
_parsed: dict[str, list | None] = {}
_arithmetic: dict[str, list | None] = {}


def asm(pattern: str) -> Callable:
    """Decorator: Python model of the asm whose text ``pattern`` is found in.

    The model gets the pattern's groups and the operands and returns the result, or a tuple of results.
    """

    def register(model: Callable) -> Callable:
        _models.insert(0, (re.compile(pattern, re.DOTALL), model))
        return model

    return register


def parse(text: str) -> list[tuple[str | None, str, tuple]] | None:
    """[(guard, instruction, its operands)], or None if an instruction is not known."""
    out = []
    for instruction in re.sub(r"[{}]", ";", text).replace("\n", " ").split(";"):
        instruction = re.sub(r"\s+", " ", instruction).strip()
        if not instruction or instruction.startswith(".reg"):
            continue
        guard, instruction = re.fullmatch(r"(?:@(!?\w+) )?(.*)", instruction).groups()
        found = next(((n, m.groups()) for rx, n in INSTRUCTIONS if (m := rx.fullmatch(instruction))), None)
        if found is None:
            return None
        out.append((guard, *found))
    return out


def _run(program, text: str, num_outputs: int, args) -> Int32:
    me, result = agent(), Int32(0)
    variables: dict[str, str] = {}  # register or predicate -> "lane", "thread", "lane is 0", "thread is 0", "warp is 0"
    warp_synced = False

    def operand(name: str):
        return args[int(name[1:]) - num_outputs]

    for guard, instruction, found in program:
        who = variables.get(guard) if guard else "all"
        if who not in ("all", "lane is 0", "thread is 0", "warp is 0"):
            raise Unsupported(f"gluon_sim has no model of guard {guard} in this inline asm:\n{text}")
        if who in ("thread is 0", "warp is 0") and me.worker:
            raise SimError(f"{here('asm')}: %tid.x is never so small in a worker partition")
        times = {"all": 32 * me.warps, "lane is 0": me.warps, "thread is 0": 1, "warp is 0": 32}[who]
        covers_all = who == "all" or (who == "lane is 0" and warp_synced)
        if instruction == "mov":
            if found[1].startswith("%"):
                variables[found[0]] = "lane" if found[1] == "%laneid" else "thread"
            elif found[0].startswith("$"):
                result = Int32(int(found[1]))
        elif instruction == "setp":
            variables[found[0]] = variables[found[1]] + " is 0"
        elif instruction == "setp_warp":
            if variables[found[1]] != "thread":
                raise Unsupported(f"gluon_sim has no model of a bound on {found[1]} in this inline asm:\n{text}")
            variables[found[0]] = "warp is 0"
        elif instruction == "fence_all":
            fence_async_all()
        elif instruction == "fence_shared":
            fence_async_shared()
        elif instruction == "warp_sync":
            warp_synced = True
        elif instruction == "bar":
            named_barrier(found[0] == "sync", int(found[1]), int(found[2]))
        elif instruction == "bulk_wait":
            TmaModule.store_wait(int(found[1]), read_only=found[0] is not None)
        elif instruction == "ld":
            sem = "acquire" if found[0] == "acquire" else None
            warp0 = who == "warp is 0"
            result = load(operand(found[3]), sem=sem, volatile=True, scope=found[1] or "gpu", warp0=warp0)
        elif instruction == "st":
            sem, own = "release" if found[0] == "release" else None, None if covers_all else me.barrier_time
            p, x = operand(found[2]), operand(found[3])
            store(p, x, sem=sem, scope=found[1] or "gpu", own=own, volatile=True)
        elif instruction == "red":
            p, x = operand(found[3]), operand(found[4])
            if found[2] == "add" and not getattr(p, "shape", None):
                x = x * times
            ATOMICS["atomic_" + found[2]](p, x, sem=found[0], scope=found[1], by_thread0=not covers_all)
    return result


def _look_at_clock() -> int:
    """Stands still, unless the simulation has ``ns_per_look``: polls that look at it then never sleep."""
    simulation = running()
    if simulation.ns_per_look:
        agent().last_poll = None
        simulation.nanoseconds += simulation.ns_per_look
    return simulation.nanoseconds


@asm(r"^mov\.u64 \$0, %globaltimer;$")
def _globaltimer(like):
    return Tensor(torch.full(unwrap(like).v.shape, _look_at_clock(), dtype=torch.int64))


@asm(r"mov\.u64 t, %globaltimer; mov\.b64 \{a, b\}, t;\s+shfl\.sync\.idx\.b32 a, a, 0, 31, 0xffffffff;")
def _globaltimer_of_lane_0(_):
    return Int64(_look_at_clock())


@asm(r"^shfl\.sync\.idx\.b32 \$0, \$1, 0, 31, 0xffffffff;$")
def _broadcast(x):
    """A partition acts as one here."""
    return x


@asm(r"atom\.relaxed\.gpu\.global\.add\.u32 v, \[\$1\], 1; shfl\.sync\.idx\.b32 \$0, v, 0, 31, 0xffffffff;")
def _take(pointer):
    """Lane 0 counts, and tells the others."""
    return Int32(int(as_torch(ATOMICS["atomic_add"](pointer, 1, sem="relaxed"))))


@asm(r"atom\.relaxed\.gpu\.global\.cas\.b64 old, \[\$1\], 0, \$2; setp\.eq\.u64 p, old, 0;\s+@p st\.relaxed")
def _first_report(pointer, first, *rest):
    """Words that are written by whoever finds the first one to be 0."""
    if int(as_torch(ATOMICS["atomic_cas"](pointer, 0, first, sem="relaxed"))) == 0:
        for offset, word in enumerate(rest):
            store(pointer + (offset + 1), word, volatile=True)
    return Int32(0)


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack, **_):
    text = unwrap(asm)
    for pattern, model in _models:
        match = pattern.search(text)
        if match:
            return model(*match.groups(), *args)
    if text not in _arithmetic:
        _arithmetic[text] = float_asm.parse(text)
    if _arithmetic[text] is not None:
        return Tensor(float_asm.run(_arithmetic[text], [x.v for x in args]))
    if text not in _parsed:
        _parsed[text] = parse(text)
    if _parsed[text] is None:
        raise Unsupported("gluon_sim has no model of this inline asm (add one with @gluon_sim.asm):\n" + text)
    return _run(_parsed[text], text, unwrap(constraints).count("="), args)
