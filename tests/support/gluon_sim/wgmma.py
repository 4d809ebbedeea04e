"""wgmma: each partition's run in order and asynchronously; the accumulator may be used after the wait only.

Products and sums are fp32 by torch. The GPU keeps fewer bits of fp8 products; results here are a little better.
"""

from __future__ import annotations

import torch

from .errors import SimError
from .shared_memory import Buffer
from .state import here, running, step, wait
from .tensors import Tensor
from .values import unwrap

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


class Accumulator:
    """The result of a wgmma that may be in flight."""

    def __init__(self, v: torch.Tensor | None, shape: list[int]):
        self.v, self.shape, self.event, self.clock = v, shape, None, None

    def _use(self, *_):
        raise SimError(f"{here('use')}: accumulator used without warpgroup_mma_wait")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = __getitem__ = _use
    to = reshape = permute = split = _use
    type = property(_use)


def warpgroup_mma_init(value):
    return value if isinstance(value, Accumulator) else Accumulator(value.v, value.shape)


def _check(a, b, acc, warps: int, who: str) -> None:
    """Shapes that the instruction has, and operands of 8 bits in K-major order."""
    (m, k), (k_of_b, n) = a.shape, b.shape
    size = b.view.element_size()
    rules = (
        (k == k_of_b and acc.shape == [m, n], "shapes do not match"),
        (m % 64 == 0 and n % 8 == 0 and k * size % 32 == 0, "M is a multiple of 64, N of 8, K of 32 bytes"),
        (warps % 4 == 0, "a warp group has 4 warps"),
        (isinstance(a, Tensor) or a.view.dtype.itemsize == size, "operands of different size"),
    )
    for holds, rule in rules:
        if not holds:
            raise SimError(f"{who}: {rule}: a {a.shape}, b {b.shape}, accumulator {acc.shape}, {warps} warps")
    if b.view.dtype in EIGHT_BITS and (b.view.stride(0) != 1 or (isinstance(a, Buffer) and a.view.stride(1) != 1)):
        raise SimError(f"{who}: 8-bit operands must be K-major")


def warpgroup_mma(a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False):
    me = step()
    who = here("wgmma")
    _check(a, b, acc, me.warps, who)
    result, clock = Accumulator(None, list(acc.shape)), me.lane()
    use = bool(unwrap(use_acc))
    registers = a.v.float() if isinstance(a, Tensor) else None

    def fire():
        for operand in (a, b):
            if isinstance(operand, Buffer):
                operand.allocation.access(operand.view, clock, False, True, who)
        left = registers if registers is not None else a.view.float()
        product = left @ b.view.float()
        result.v = product + acc.v if use else product

    before = [earlier.event for earlier in me.wgmmas[-1:]]
    result.event, result.clock = running().scheduler.event(who, fire, before), clock
    me.wgmmas.append(result)
    return result if unwrap(is_async) else warpgroup_mma_wait(0, deps=[result])


def warpgroup_mma_wait(num_outstanding=0, deps=None):
    """What is still in flight comes back as an accumulator, good for the next wgmma or wait only."""
    me, kept = step(), int(unwrap(num_outstanding))
    old = me.wgmmas[: len(me.wgmmas) - kept] if kept else list(me.wgmmas)
    wait(lambda: all(one.event.done for one in old), f"wgmma wait({kept})")
    for one in old:
        me.clock.acquire(one.clock)
    me.wgmmas = me.wgmmas[len(old) :]
    results = [
        Tensor(d.v) if isinstance(d, Accumulator) and not any(d is one for one in me.wgmmas) else d for d in deps or ()
    ]
    return results[0] if len(results) == 1 else tuple(results)
