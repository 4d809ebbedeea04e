"""Turns jitted kernels into functions that run here, and runs launches in streams."""

from __future__ import annotations

import builtins
import math
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .clocks import Clock
from .errors import SimError
from .global_memory import Memory
from .language import FUNCTIONS, MODULES, simulated_range
from .pointer_access import Pointer
from .scheduler import Scheduler
from .state import set_running
from .tensors import Tensor
from .tma import Descriptor
from .values import GL_DTYPES, Int32, Int64, Literal, fits_int32, unwrap

# ---------------------------------------------------------------- kernels as Python functions

_functions: dict[types.FunctionType, Callable] = {}
_callees: dict[types.FunctionType, Callable] = {}


class Launcher:
    """Takes the place of a kernel in a module: ``kernel[grid](*args, **kwargs)`` runs it under the simulator."""

    def __init__(self, kernel, options: dict[str, Any], simulations: list[Simulation]):
        self.kernel, self._options, self._simulations = kernel, options, simulations

    def __getitem__(self, grid):
        def run(*args, **kwargs):
            names = dict(zip(self.kernel.arg_names, args, strict=False), **kwargs)
            programs = grid(names) if callable(grid) else grid
            self._simulations.append(launch(self.kernel, programs, args, kwargs, **self._options))

        return run


def _python_function(x) -> types.FunctionType | None:
    """The function in a @gluon.jit, @triton.jit or constexpr_function object."""
    f = getattr(x, "fn", None)
    return f if isinstance(f, types.FunctionType) else None


class _Namespace:
    """Takes the place of a module whose jitted functions and constants a kernel uses by attribute."""

    def __init__(self, module: types.ModuleType):
        self._module = module

    def __getattr__(self, name: str):
        value = _stand_in(getattr(self._module, name))
        setattr(self, name, value)
        return value


def _stand_in(x):
    """What takes the place of a global of a kernel."""
    if isinstance(x, Launcher):
        x = x.kernel
    for real, model in MODULES:
        if x is real:
            return model
        if callable(x) and getattr(real, getattr(x, "__name__", "?"), None) is x:  # imported by name
            return getattr(model, x.__name__)
    for real, model in FUNCTIONS:
        if x is real:
            return model
    if isinstance(x, types.ModuleType):
        return _Namespace(x)
    kind = type(x).__name__
    if kind == "constexpr":
        return x.value
    if kind in ("GluonJITFunction", "JITFunction"):
        return _callee(x)
    return _python_function(x) if _python_function(x) and not isinstance(x, type) else x


def _names(code: types.CodeType) -> set[str]:
    nested = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*map(_names, nested))


def simulated(function: types.FunctionType) -> types.FunctionType:
    """The function with its own code, but stand-ins for its globals and ``Literal`` for its integers."""
    if function not in _functions:
        constants = tuple(Literal(c) if type(c) is int else c for c in function.__code__.co_consts)
        code = function.__code__.replace(co_consts=constants)
        names = {"__builtins__": builtins, "range": simulated_range, "__name__": function.__module__}
        defaults = tuple(unwrap(d) for d in function.__defaults__ or ())
        new = types.FunctionType(code, names, function.__name__, defaults, function.__closure__)
        new.__kwdefaults__ = function.__kwdefaults__
        _functions[function] = new
        for name in _names(function.__code__):
            if name in function.__globals__:
                names[name] = _stand_in(function.__globals__[name])
    return _functions[function]


def _run_time(x):
    """A constant passed for a run-time parameter is a scalar in the callee."""
    if type(x) not in (int, Literal):
        return x
    return Int32(x) if fits_int32(x) else Int64(x)


def _callee(jitted) -> Callable:
    """A jitted function that kernels call."""
    function = _python_function(jitted)
    if function not in _callees:
        constexpr = [p.is_constexpr for p in jitted.params]

        def call(*args, **kwargs):
            return new(*[a if c else _run_time(a) for a, c in zip(args, constexpr, strict=False)], **kwargs)

        _callees[function] = call  # before its globals are looked at: functions may call each other
        call.__name__ = function.__name__
        new = simulated(function)
    return _callees[function]


def _argument(memory: Memory, name: str, x):
    """An argument of a launch as the kernel sees it."""
    if isinstance(x, torch.Tensor):
        memory.register(x, name)
        return Pointer(x.data_ptr(), GL_DTYPES[x.dtype])
    if type(x).__name__ == "TensorDescriptor":
        memory.register(x.base, name)
        dtype = GL_DTYPES[x.base.dtype]
        padding = getattr(x, "padding", "zero")
        return Descriptor(x.base.data_ptr(), dtype, x.shape, x.strides, x.block_shape, x.layout, padding)
    if isinstance(x, float):
        return Tensor(torch.tensor(x, dtype=torch.float32))
    return x if isinstance(x, bool) else _run_time(x)


# ---------------------------------------------------------------- streams


class Simulation:
    """State of one run.

    Attributes:
        agents_of: number of a launch -> its partitions, while it runs.
        allocations: shared memory of the launches that run.
        nanoseconds, ns_per_look: the device's clock, and how far it goes on whenever a kernel looks at it.
    """

    nanoseconds = ns_per_look = 0

    def __init__(self, policy: str, seed: int, race_check: bool, max_steps: int):
        self.scheduler = Scheduler(policy, seed, max_steps)
        self.memory = Memory(self.scheduler, race_check)
        self.allocations, self.allocation_counts = [], {}
        self.named_barriers, self.agents_of, self.launches = {}, {}, 0

    @property
    def steps(self) -> int:
        """How often something was chosen to run."""
        return self.scheduler.steps


class Stream:
    """The launches of one rank, one after another. A kernel starts when the one before is complete, its TMA stores
    included; the boundary orders everything, for both proxies."""

    def __init__(self, simulation: Simulation, rank: int, items, resident: int, alone: bool):
        self.simulation, self.rank, self.items = simulation, rank, list(items)
        self.resident, self.alone = resident, alone
        self.clock = Clock(simulation.scheduler.new_tid(rank, f"host of rank {rank}"))
        self.waiting_programs, self.launch = [], None

    def advance(self) -> None:
        """Start what can start; called when something has ended."""
        scheduler = self.simulation.scheduler
        while True:
            if self.launch is None:
                if not self.items:
                    return
                item = self.items.pop(0)
                if callable(item):
                    item(self.simulation)
                    continue
                self._start(*item)
            agents = self.simulation.agents_of[self.launch]
            alive = {agent.program for agent in agents if not agent.dead}
            while self.waiting_programs and len(alive) < self.resident:
                name, program, function, grid, warps = self.waiting_programs.pop(0)
                agents.append(scheduler.spawn(name, program, function, (), self.clock, grid, warps))
                alive.add(program)
            if alive or any(event.program[2] == self.launch for event in scheduler.events):
                return
            self._finish()

    def _start(self, kernel, grid, args, kwargs=None) -> None:
        simulation, kwargs = self.simulation, kwargs or {}
        grid = tuple(map(int, grid)) if isinstance(grid, (tuple, list)) else (int(grid),)
        self.launch = simulation.launches
        simulation.launches += 1
        simulation.agents_of[self.launch] = []
        constexpr = {p.name for p in kernel.params if p.is_constexpr}
        given = dict(zip(kernel.arg_names, args, strict=False))
        given.update({name: x for name, x in kwargs.items() if name in kernel.arg_names})
        function = simulated(_python_function(kernel))
        prefix = "" if self.alone else f"r{self.rank}."
        given = {
            name: unwrap(x) if name in constexpr else _argument(simulation.memory, prefix + name, x)
            for name, x in given.items()
        }
        label = "p" if self.alone else f"{prefix}{function.__name__}#{self.launch} p"
        warps = int(unwrap(kwargs.get("num_warps", 4)))
        self.waiting_programs = [
            (f"{label}{i}", (self.rank, i, self.launch), lambda: function(**given), grid, warps)
            for i in range(math.prod(grid))
        ]

    def _finish(self) -> None:
        simulation, clock = self.simulation, self.clock
        for allocation in simulation.allocations:
            for barrier in allocation.barriers.values() if allocation.program[2] == self.launch else ():
                if barrier.bytes:
                    raise SimError(f"the kernel ended with bytes outstanding on {barrier}")
        simulation.allocations = [a for a in simulation.allocations if a.program[2] != self.launch]
        free = simulation.scheduler.free.setdefault(self.rank, [])
        for agent in simulation.agents_of.pop(self.launch):
            if not all(store.read_waited_for for store in agent.stores):
                raise SimError(f"{agent.name} ended without store_wait for its last TMA stores")
            if agent.wgmmas:
                raise SimError(f"{agent.name} ended without warpgroup_mma_wait for its last wgmmas")
            for one in [agent.clock, *agent.lanes]:
                clock.acquire(one)
                free.append(one.tid)
            free.append(agent.thread0)
        clock.tick()
        clock.fence_proxy(global_memory=True)
        self.launch = None


def run_streams(
    streams: Sequence[Sequence],
    *,
    policy: str = "random",
    seed: int = 0,
    resident: int | None = None,
    extra: dict[str, torch.Tensor] | None = None,
    race_check: bool = True,
    max_steps: int = 5_000_000,
    setup: Callable[[Simulation], None] | None = None,
) -> Simulation:
    """Run several ranks at once, each with launches in stream order.

    Args:
        streams: for each rank a list of ``(kernel, grid, args, kwargs)``, or host functions that get the simulation.
        policy: one of ``POLICIES``.
        resident: at most so many programs of a kernel at a time, the number of SMs; they start in order.
        extra: tensors by name that are reached only through addresses in memory, such as peer pointers.
        setup: called with the simulation before anything runs.

    Raises:
        SimError: a fault of a kernel; see the package.
    """
    simulation = Simulation(policy, seed, race_check, max_steps)
    set_running(simulation)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, t in (extra or {}).items():
            simulation.memory.register(t, name)
        if setup is not None:
            setup(simulation)
        alone = len(streams) == 1 and len(streams[0]) == 1  # short names in reports
        running = [Stream(simulation, r, items, resident or 1 << 30, alone) for r, items in enumerate(streams)]

        def advance() -> None:
            for stream in running:
                stream.advance()

        simulation.scheduler.run(advance)
    finally:
        torch.set_num_threads(threads)
        set_running(None)
    return simulation


def launch(kernel, grid=None, args=(), kwargs=None, **options) -> Simulation:
    """Run one kernel, or several ranks' kernels together: ``kernel`` is then a list of (kernel, grid, args, kwargs).

    Args:
        grid: number of programs, an int or a tuple of up to three.
        args, kwargs: as for ``kernel[grid](*args, **kwargs)``; CPU tensors, ``TensorDescriptor``s and numbers. Launch
            options such as ``maxnreg`` are ignored.
        options: those of ``run_streams``.
    """
    jobs = kernel if isinstance(kernel, list) else [(kernel, grid, args, kwargs)]
    return run_streams([[job] for job in jobs], **options)


@contextmanager
def simulated_launches(*modules: types.ModuleType, **options) -> Iterator[list[Simulation]]:
    """In this block ``kernel[grid](...)`` of the modules' host functions runs under the simulator, at once.

    Args:
        options: those of ``run_streams``.

    Yields:
        the simulations, in launch order.
    """
    simulations: list[Simulation] = []
    kernels = [
        (module, name, x)
        for module in modules
        for name, x in vars(module).items()
        if type(x).__name__ in ("GluonJITFunction", "JITFunction")
    ]
    for module, name, kernel in kernels:
        setattr(module, name, Launcher(kernel, options, simulations))
    try:
        yield simulations
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)
