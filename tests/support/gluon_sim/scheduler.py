"""The scheduler: partitions are greenlets, operations of the engines (TMA, wgmma) are events that fire at any time.

Every visible operation of a kernel is a scheduling point. A policy picks what runs next among the partitions that can
run and the events whose predecessors are done. It never matters for the race checks whether a schedule was a lucky one:
they look at happens-before only.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Callable

import greenlet

from .clocks import Clock, Sync
from .errors import Deadlock, SimError

POLICIES = ("rr", "random", "eager", "lazy", "starve", "pct", "slowrank")
"""How the next step is chosen; all but the first depend on the seed.

- rr: engines at once, partitions in turn.
- random: anything, with bursts of one partition.
- eager, lazy: engines always first, always last.
- starve: one role (a partition's position and function) runs last.
- pct: random priorities with a few change points.
- slowrank: one rank runs last.
"""

PARTITIONS = "its partitions"
"""What a program waits for while its partitions run."""

HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


@functools.cache
def _is_ours(file: str) -> bool:
    """Whether it is the simulator's, not the kernel's."""
    return file.startswith(HERE)


class Agent:
    """One partition, or a whole program that is not partitioned.

    Attributes:
        program: (rank, number of the program, number of the launch).
        grid: programs along each axis.
        thread0: clock id of thread 0: its own scalar stores precede its own releases without a barrier.
        barrier_time: our time at the last barrier of the partition's threads.
        of_warp0: what only the first warp has acquired since.
        waiting: condition that we sleep on, or None; ``reason`` says what for.
        lanes: clocks for our asynchronous operations.
        wgmmas, stores: our wgmmas and TMA stores that have not been waited for, oldest first.
        last_poll: (where, address, value) of the last read that may belong to a spin loop.
        worker: 0 for the partition that the program's own warps run.
    """

    def __init__(self, scheduler, name, program, function, args, base=None, grid=(1,), warps=4, worker=0):
        self.name, self.program, self.scheduler = name, program, scheduler
        self.grid = grid
        self.clock = Clock(scheduler.new_tid(program[0], name, base), base)
        self.thread0 = scheduler.new_tid(program[0], name, base)
        self.clock.before[self.thread0] = self.clock.before.get(self.thread0, 0) + 1
        self.barrier_time, self.of_warp0 = self.clock.now - 1, Sync()
        self.waiting, self.reason, self.dead, self.result = None, "", False, None
        self.lanes, self.wgmmas, self.stores = [], [], []
        self.warps, self.worker = warps, worker
        self.last_poll = None
        self.priority = scheduler.random.random()
        self.greenlet = greenlet.greenlet(lambda: self._run(function, args))

    def _run(self, function, args):
        self.result = function(*args)
        self.dead = True

    @property
    def role(self) -> str:
        return self.name.split("/")[-1]

    def lane(self) -> Clock:
        """Clock of a fresh asynchronous operation. An id whose operation we know to be complete is used again."""
        for lane in self.lanes:
            if self.clock.knows(lane.tid, lane.now):
                break
        else:
            lane = Clock(self.scheduler.new_tid(self.program[0], "an engine working for " + self.name, self.clock))
            self.scheduler.engines[lane.tid] = self.program
            self.lanes.append(lane)
        time = max(lane.now, self.clock.before.get(lane.tid, 0)) + 1
        lane.before, lane.async_shared = dict(self.clock.before), dict(self.clock.async_shared)
        lane.async_global = dict(self.clock.async_global)
        lane.before[lane.tid] = time
        self.clock.tick()
        return lane

    def where(self) -> str:
        """The kernel's functions and line numbers, innermost first."""
        frame = self.greenlet.gr_frame if greenlet.getcurrent() is not self.greenlet else sys._getframe()
        out = []
        while frame is not None:
            code = frame.f_code
            if code is Agent._run.__code__:
                break
            if not _is_ours(code.co_filename):
                out.append(f"{code.co_name}:{frame.f_lineno}")
            frame = frame.f_back
        return " < ".join(out)


class Event:
    """An operation of an engine. It fires at any time once the events in ``after`` are done."""

    def __init__(self, label: str, fire: Callable[[], None], after, priority: float, program):
        self.label, self.fire, self.after, self.done = label, fire, list(after), False
        self.priority, self.program = priority, program

    def ready(self) -> bool:
        return all(e.done for e in self.after)


class Scheduler:
    """Runs agents and events under one policy until none is left.

    Attributes:
        engines: clock id of an operation of an engine -> the program that it works for.
        free: rank -> clock ids of finished kernels, to be used again, so that many launches stay cheap.
    """

    def __init__(self, policy: str = "random", seed: int = 0, max_steps: int = 5_000_000):
        if policy not in POLICIES:
            raise ValueError(f"policy = {policy!r}: expected one of {POLICIES}")
        self.policy, self.seed, self.max_steps = policy, seed, max_steps
        self.random = random.Random(f"{policy}{seed}")
        self.agents: list[Agent] = []
        self.events: list[Event] = []
        self.current: Agent | None = None
        self.steps = 0
        self.engines, self.free = {}, {}
        self._tids, self._names = 0, {}  # names: clock id -> [(first time, whose it is from there on)]
        self._turn, self._burst, self._victim = 0, 0, ""
        self._change_points = {self.random.randrange(1, 3000) for _ in range(5)}

    def new_tid(self, rank: int, name: str, base: Clock | None = None) -> int:
        """A clock id that belongs to ``name`` from now on."""
        if self.free.get(rank):
            tid = self.free[rank].pop()
            self.engines.pop(tid, None)
        else:
            self._tids += 1
            tid = self._tids
        self._names.setdefault(tid, []).append((base.before.get(tid, 0) + 1 if base else 1, name))
        return tid

    def name_of(self, tid: int, time: int) -> str:
        return next((name for first, name in reversed(self._names[tid]) if first <= time), str(tid))

    # ---------------------------------------------------------------- called from inside partitions

    def point(self) -> None:
        """Let anything else run first."""
        self._hub.switch()

    def wait(self, condition: Callable[[], bool], reason) -> None:
        """Sleep until ``condition()``; ``str(reason)`` is for the deadlock report and may change meanwhile."""
        self.current.waiting, self.current.reason = condition, reason
        self._hub.switch()

    def event(self, label: str, fire: Callable[[], None], after=()) -> Event:
        event = Event(label, fire, after, self.random.random(), self.current.program)
        self.events.append(event)
        return event

    def spawn(self, name, program, function, args, base=None, grid=(1,), warps=4, worker=0) -> Agent:
        agent = Agent(self, name, program, function, args, base, grid, warps, worker)
        self.agents.append(agent)
        return agent

    # ---------------------------------------------------------------- the hub

    def _pick(self, agents: list[Agent], events: list[Event]) -> Agent | Event:
        choice, both = self.random.choice, agents + events
        if self.policy == "rr":
            if events:
                return events[0]
            self._turn += 1
            return agents[self._turn % len(agents)]
        if self.policy == "eager" and events:
            return choice(events)
        if self.policy == "lazy":
            return choice(agents or events)
        if self.policy == "pct":
            best = max(both, key=lambda one: one.priority)
            if self.steps in self._change_points:
                best.priority = -self.steps
            return best
        if self.policy == "starve":
            if not self._victim or all(agent.role != self._victim for agent in self.agents):
                roles = sorted({agent.role for agent in self.agents})
                self._victim = roles[self.seed % len(roles)] if roles else ""
            return choice([a for a in agents if a.role != self._victim] + events or agents)
        if self.policy == "slowrank":
            ranks = 1 + max((agent.program[0] for agent in self.agents), default=0)
            return choice([one for one in both if one.program[0] != self.seed % ranks] or both)
        if self._burst > 0 and self.current in agents:
            self._burst -= 1
            return self.current
        self._burst = choice((0, 0, 0, 4, 40))
        return choice(both)

    def run(self, start_more: Callable[[], None] = lambda: None) -> None:
        """Run until nothing is left. ``start_more`` is called first and when something has ended; it may spawn."""
        self._hub = greenlet.getcurrent()
        something_ended = True
        while True:
            if something_ended:
                self.agents = [agent for agent in self.agents if not agent.dead]
                start_more()
                if not self.agents and not self.events:
                    return
            agents = [agent for agent in self.agents if agent.waiting is None or agent.waiting()]
            events = [event for event in self.events if not event.after or event.ready()]
            if not agents and not events:
                raise Deadlock("no partition can run " + self._report())
            self.steps += 1
            if self.steps > self.max_steps:
                raise SimError(f"more than {self.max_steps} steps " + self._report())
            chosen = self._pick(agents, events)
            if isinstance(chosen, Event):
                self.events.remove(chosen)
                chosen.fire()
                chosen.done = something_ended = True
            else:
                chosen.waiting, self.current = None, chosen
                chosen.greenlet.parent = self._hub
                chosen.greenlet.switch()
                something_ended = chosen.dead

    def _report(self) -> str:
        out = [f"(policy {self.policy}, seed {self.seed}, step {self.steps}):"]
        # Programs that wait for their partitions say nothing about the cause.
        for agent in sorted(self.agents, key=lambda agent: agent.reason == PARTITIONS):
            out.append(f"  {agent.name:28s} waits for {agent.reason}\n{'':31s}at {agent.where()}")
        out += [f"  engine: {event.label} waits for an earlier operation" for event in self.events]
        return "\n".join(out)
