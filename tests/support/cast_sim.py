"""The casts of ``mlp_quant`` run Hopper's kernels in the simulator, the original ones or copies with planted bugs."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from triton.experimental.gluon import language as gl

from megamoe.kernels import mlp_quant
from megamoe.kernels.gluon import cast_launch
from megamoe.types import Fp8Tensor
from tests.support import gluon_sim
from tests.support.gluon_sim.shared_memory import poison
from tests.support.gluon_sim.tensors import Tensor

CVT = r"cvt\.rn\.satfinite\.e4m3x2\.f32"


@gluon_sim.asm(
    rf"^{{ \.reg \.b16 low, high; {CVT} low, \$(\d), \$(\d); "
    rf"{CVT} high, \$(\d), \$(\d); mov\.b32 \$0, {{low, high}}; }}$"
)
def _pack_four(*arguments):
    """The first operand of each conversion becomes the upper byte."""
    numbers, values = [int(number) for number in arguments[:4]], arguments[4:]
    order = numbers[1], numbers[0], numbers[3], numbers[2]
    codes = [values[number - 1].to(gl.float8e4nv).v.view(torch.uint8) for number in order]
    return Tensor(torch.stack(codes, -1).view(torch.int32).squeeze(-1))


@contextmanager
def simulated_casts(
    policy: str = "random", seed: int = 0, sms: int = 3, module: types.ModuleType | None = None
) -> Iterator[None]:
    """In this block the casts run on a simulated GPU of ``sms`` multiprocessors, into poisoned memory.

    Args:
        module: has the kernels that run instead of those of the same names in the package.
    """

    def launch(kernel, arguments, device, sms):
        name = kernel.fn.__name__
        if module is not None:
            kernel = getattr(module, name)
        for output in ("weight_grads", "sums"):
            if output in arguments:
                poison(arguments[output])
        warps = cast_launch.OPTIONS[name]["num_warps"]
        gluon_sim.launch(kernel, (sms,), (), dict(arguments, num_warps=warps), policy=policy, seed=seed)

    def poisoned(make):
        def function(*args):
            made: Fp8Tensor = make(*args)
            poison(made.codes)
            poison(made.scales)
            return made

        return function

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(cast_launch, "_launch", launch))
        patches.enter_context(mock.patch.object(mlp_quant, "runs_kernels", lambda tensor: True))
        patches.enter_context(mock.patch.object(mlp_quant, "get_num_sms", lambda device: sms))
        for name in ("_empty_rows", "_empty_columns"):
            patches.enter_context(mock.patch.object(mlp_quant, name, poisoned(getattr(mlp_quant, name))))
        yield
