"""Runs Gluon (Hopper) and plain Triton kernels on the CPU under adversarial schedules, and reports their faults.

    launch(kernel, grid, args, kwargs, policy="random", seed=0)
    run_streams([[(kernel, grid, args, kwargs), ...] of rank 0, [...] of rank 1], policy="random", seed=0)
    with simulated_launches(module, policy="random", seed=0): module.host_function(...)

The code that runs is the kernel's own; only its globals (``gl``, ``tma``, ``mbarrier`` ...) are replaced, so line
numbers in reports are the kernel's. Works with triton 3.6 to 3.9.

Model:

- Partitions, programs and ranks interleave at every visible operation. TMA copies and wgmmas run at any later time, a
  partition's wgmmas in order. ``POLICIES`` choose the order; the same policy and seed give the same run.
- Races are found by vector clocks, so under lucky schedules too: shared memory by bytes, global memory by elements, the
  async proxy by its fences, ambiguous mbarrier parities and overruns by what orders phases and waits.
- Also reported: int32 overflow, out-of-bounds and misaligned accesses, reads of memory that nobody has written, wrong
  counts and bytes of mbarriers, misuse of named barriers, accumulators used before the wait, scopes too narrow between
  ranks. A deadlock says which partition waits for what, in which line.

Not seen: threads within a partition (it acts as one, except that thread 0 releases for the others only after a
barrier), registers, layouts, bank conflicts, performance, the GPU's rounding of fp8 products and of approximate
functions, clusters, weak memory beyond happens-before.
"""

from .errors import Deadlock, Race, SimError, Unsupported
from .inline_asm import asm
from .scheduler import POLICIES
from .simulation import Simulation, launch, run_streams, simulated_launches

__all__ = [
    "POLICIES",
    "Deadlock",
    "Race",
    "SimError",
    "Simulation",
    "Unsupported",
    "asm",
    "launch",
    "run_streams",
    "simulated_launches",
]
