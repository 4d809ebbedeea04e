"""The public K-grouped GEMMs run Hopper's kernels in the simulator, the original ones or copies with planted bugs."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from megamoe.kernels import gemm_k_ops
from megamoe.kernels.gluon import k_bf16, k_fp8, launch
from megamoe.kernels.row_groups import RowGroups
from megamoe.kernels.tiles import Tile
from tests.support import gluon_sim
from tests.support.k_gemm_cases import KCase, KInstance, compute
from tests.support.metrics import relative_error


@contextmanager
def simulated_k_gemm(
    policy: str, seed: int, sms: int = 3, module: types.ModuleType | None = None, counted: bool | None = None
) -> Iterator[None]:
    """In this block the public functions run on a simulated GPU of ``sms`` multiprocessors.

    Args:
        module: has the kernels that run instead of those of the same names in the package.
        counted: programs take their tiles from a counter; default: but for one seed in three.
    """
    counted = seed % 3 != 0 if counted is None else counted
    counter = torch.zeros(1, dtype=torch.int32) if counted else None

    def k_gemm(operands, tile, grid):
        kernel, arguments = launch.k_arguments_of(operands, tile, counter)
        if module is not None:
            kernel = getattr(module, kernel.fn.__name__)
        gluon_sim.launch(kernel, (grid,), (), dict(arguments, num_warps=4), policy=policy, seed=seed)
        assert counter is None or counter.item() == 0, "the counter of tiles is not zero for the next launch"

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(launch, "k_gemm", k_gemm))
        patches.enter_context(mock.patch.object(gemm_k_ops, "runs_kernels", lambda tensor: True))
        patches.enter_context(mock.patch.object(gemm_k_ops, "get_num_sms", lambda device=None: sms))
        yield


@functools.lru_cache(maxsize=64)
def instance_of(case: KCase, seed: int = 0) -> KInstance:
    """Kernels do not change an instance: results go elsewhere."""
    return KInstance(case, seed)


def run_bounded(instance: KInstance, ends: Sequence[int], tile: Tile | None = None) -> None:
    """The problem with ends that need not fit the matrix: the reference's result, and all memory around it stays as it
    was. All rows of the instance have an expert.
    """
    rows = RowGroups.psum(torch.tensor(ends, dtype=torch.int32))
    size = instance.old.numel()
    memory = torch.full((3 * size,), float("nan"))
    out = memory[size : 2 * size].view(instance.old.shape)
    compute(instance, out, tile, rows)
    assert memory[:size].isnan().all() and memory[2 * size :].isnan().all(), "memory around the result was written"
    expected = torch.empty_like(out)
    with mock.patch.object(gemm_k_ops, "runs_kernels", lambda tensor: False):
        compute(instance, expected, tile, rows)
    for expert in range(len(ends)):
        assert relative_error(out[expert], expected[expert]) < 1e-5, f"expert {expert}"


@dataclasses.dataclass(frozen=True)
class Run:
    """A case for planted bugs: one problem with one tile, ``run(module, policy, seed)``.

    Attributes:
        ends: instead of the case's own; see ``run_bounded``.
        counted: see ``simulated_k_gemm``.
    """

    case: KCase
    tile: Tile | None = None
    sms: int = 3
    ends: tuple[int, ...] | None = None
    counted: bool | None = None

    @property
    def module(self) -> types.ModuleType:
        return k_fp8 if self.case.fp8 else k_bf16

    def __call__(self, module: types.ModuleType | None, policy: str, seed: int) -> None:
        instance = instance_of(self.case)
        with simulated_k_gemm(policy, seed, self.sms, module, self.counted):
            if self.ends is not None:
                run_bounded(instance, self.ends, self.tile)
                return
            out = instance.poisoned()
            compute(instance, out, self.tile)
            instance.check(out)
