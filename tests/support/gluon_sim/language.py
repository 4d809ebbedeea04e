"""Stand-ins for ``gl``, ``tl``, ``tma``, ``mbarrier`` and the wgmma functions, as a kernel sees them.

A name without a model raises ``Unsupported`` that says so. Layouts are carried along but mean nothing here.
"""

from __future__ import annotations

import builtins

import torch
import triton.language as real_tl
from triton.experimental.gluon import language as real_gl
from triton.experimental.gluon.language.nvidia import hopper as real_hopper

from megamoe.kernels.gluon import spelling

from . import wgmma
from .barriers import MBarrierModule, fence_async_shared, thread_barrier
from .errors import SimError, Unsupported
from .inline_asm import inline_asm_elementwise
from .pointer_access import ATOMICS, as_torch, load, store
from .scheduler import PARTITIONS
from .shared_memory import allocate_shared_memory
from .state import agent, running, wait
from .tensors import COMPUTE, Tensor
from .tma import TmaModule
from .values import Int32, unwrap


def simulated_range(*args, **_):
    """The kernel's ``range``: its variable is a run-time scalar."""
    args = [unwrap(a) for a in args]
    return (Int32.make(i, *args) for i in builtins.range(*map(int, args)))


def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    """Each partition becomes an agent; the first is the program's own warps."""
    me, simulation = agent(), running()
    warps = [me.warps] + [int(unwrap(w)) for w in worker_num_warps]
    if len(warps) != len(functions_and_args):
        raise SimError(f"{len(functions_and_args)} partitions, but warps for {len(warps)}")
    partitions = [
        simulation.scheduler.spawn(f"{me.name}/{i}:{f.__name__}", me.program, f, args, me.clock, me.grid, warps[i], i)
        for i, (f, args) in enumerate(functions_and_args)
    ]
    simulation.agents_of[me.program[2]] += partitions
    me.clock.tick()
    wait(lambda: all(p.dead for p in partitions), PARTITIONS)
    for p in partitions:
        me.clock.acquire(p.clock)
    return partitions[0].result


def static_assert(condition, message="", **_):
    if not unwrap(condition):
        raise SimError(f"static_assert: {message}")


def device_assert(condition, message="", mask=None, **_):
    if not bool(as_torch(condition).all()):
        raise SimError(f"device_assert: {message}")


def histogram(x, num_bins, mask=None, layout=None, **_):
    v, bins = x.v if mask is None else x.v[as_torch(mask).to(torch.bool)], int(unwrap(num_bins))
    return Tensor(torch.bincount(v.long(), minlength=bins)[:bins].to(torch.int32))


def _program_id(axis=0):
    me = agent()
    index = me.program[1]
    for size in me.grid[: unwrap(axis)]:
        index //= size
    return Int32(index % me.grid[unwrap(axis)] if unwrap(axis) < len(me.grid) else 0)


def _num_programs(axis=0):
    grid = agent().grid
    return Int32(grid[unwrap(axis)] if unwrap(axis) < len(grid) else 1)


def _same(x, *_, **__):
    return x


SHARED_BY_BOTH = dict(
    **COMPUTE,
    **ATOMICS,
    load=load,
    store=store,
    inline_asm_elementwise=inline_asm_elementwise,
    static_assert=static_assert,
    device_assert=device_assert,
    static_print=lambda *_, **__: None,
    device_print=lambda *_, **__: None,
    static_range=lambda *args: builtins.range(*[int(unwrap(a)) for a in args]),
    program_id=_program_id,
    num_programs=_num_programs,
    multiple_of=_same,
    max_contiguous=_same,
    max_constancy=_same,
    assume=lambda x: None,
    histogram=histogram,
    gather=lambda x, index, axis, **_: Tensor(torch.gather(x.v, unwrap(axis), index.v.long())),
)
GLUON = dict(
    **SHARED_BY_BOTH,
    allocate_shared_memory=lambda element_ty, shape, layout=None, value=None: allocate_shared_memory(
        element_ty, shape, layout, value
    ),
    warp_specialize=warp_specialize,
    num_warps=lambda: agent().warps,
    thread_barrier=thread_barrier,
    barrier=thread_barrier,  # its name from triton 3.7 on
)
TRITON = dict(
    **SHARED_BY_BOTH,
    range=simulated_range,
    cumsum=lambda x, axis=0, **_: Tensor(torch.cumsum(x.v, unwrap(axis), dtype=x.v.dtype)),
    view=lambda x, *shape: x.reshape(*shape),
    trans=lambda x, *dims: x.trans(*dims),
    debug_barrier=thread_barrier,
)


class Module:
    """Stands for a module: names with a model, and those that are not functions (dtypes, layouts) as they are."""

    def __init__(self, real, models, name: str):
        self._real, self._name = real, name
        self.__dict__.update(models)

    def __getattr__(self, name: str):
        real = getattr(self._real, name)
        if callable(real) and not isinstance(real, type) and not name.endswith("_type"):
            raise Unsupported(f"gluon_sim has no model of {self._name}.{name}")
        setattr(self, name, real)
        return real


def _static_methods(cls) -> dict:
    return {name: getattr(cls, name) for name in vars(cls) if not name.startswith("_")}


MODULES = [
    (real_gl, Module(real_gl, GLUON, "gl")),
    (real_tl, Module(real_tl, TRITON, "tl")),
    (real_hopper.mbarrier, Module(real_hopper.mbarrier, _static_methods(MBarrierModule), "mbarrier")),
    (real_hopper.tma, Module(real_hopper.tma, _static_methods(TmaModule), "tma")),
]
"""(module, what stands for it)."""

FUNCTIONS = [
    (real_hopper.fence_async_shared, fence_async_shared),
    (real_hopper.warpgroup_mma, wgmma.warpgroup_mma),
    (real_hopper.warpgroup_mma_init, wgmma.warpgroup_mma_init),
    (real_hopper.warpgroup_mma_wait, wgmma.warpgroup_mma_wait),
    (spelling.tma_add, TmaModule.async_atomic_add),
]
