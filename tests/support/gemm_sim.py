"""The public GEMMs run Hopper's kernels in the simulator, the original ones or copies with planted bugs."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from megamoe.kernels import gemm_ops
from megamoe.kernels.gluon import bf16, fp8, launch, skinny
from megamoe.kernels.tiles import Tile
from tests.support import gluon_sim
from tests.support.gemm_cases import Case, Instance, compute
from tests.support.metrics import relative_error


@contextmanager
def simulated_gemm(
    policy: str, seed: int, sms: int = 3, module: types.ModuleType | None = None, counted: bool | None = None
) -> Iterator[None]:
    """In this block the public functions run on a simulated GPU of ``sms`` multiprocessors.

    Args:
        module: has the kernels that run instead of those of the same names in the package.
        counted: programs take their tiles from a counter; default: but for one seed in three.
    """
    counted = seed % 3 != 0 if counted is None else counted
    counter = torch.zeros(1, dtype=torch.int32) if counted else None

    def gemm(kind, operands, tile, grid, **options):
        kernel, arguments = launch.arguments_of(kind, operands, tile, counter=counter, **options)
        if module is not None:
            kernel = getattr(module, kernel.fn.__name__)
        gluon_sim.launch(kernel, (grid,), (), dict(arguments, num_warps=4), policy=policy, seed=seed)
        assert counter is None or counter.item() == 0, "the counter of tiles is not zero for the next launch"

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(launch, "gemm", gemm))
        patches.enter_context(mock.patch.object(gemm_ops, "runs_kernels", lambda tensor: True))
        patches.enter_context(mock.patch.object(gemm_ops, "get_num_sms", lambda device=None: sms))
        yield


@functools.lru_cache(maxsize=64)
def instance_of(case: Case, seed: int = 0) -> Instance:
    """Kernels do not change an instance: results go elsewhere."""
    return Instance(case, seed)


def run_bounded(case: Case, index: Sequence[int], tile: Tile | None = None) -> None:
    """The case with ids, ends or counts that need not fit the matrix: exactly the rows within are right, and all memory
    around the result stays as it was. Each expert of the case has its full 128 rows.
    """
    instance = instance_of(case)
    values = torch.tensor(index, dtype=torch.int32)
    rows = dataclasses.replace(
        instance.rows, index=values.repeat_interleave(128) if case.kind == "contiguous" else values
    )
    shape = instance.poisoned().shape
    size = shape.numel()
    memory = torch.full((3 * size,), float("nan"), dtype=case.out_dtype)
    out = memory[size : 2 * size].view(shape)
    compute(instance, out, rows, tile)
    assert memory[:size].isnan().all() and memory[2 * size :].isnan().all(), "memory around the result was written"
    expected = torch.full(shape, float("nan"), dtype=torch.float32)
    with mock.patch.object(gemm_ops, "runs_kernels", lambda tensor: False):
        compute(instance, expected, rows)
    written = ~expected.isnan()
    assert torch.equal(written, ~out.isnan()), "other rows than those within the matrix were written"
    if written.any():
        assert relative_error(out[written].float(), expected[written]) < 5e-3


@dataclasses.dataclass(frozen=True)
class Run:
    """A case for planted bugs: one problem with one tile, ``run(module, policy, seed)``.

    Attributes:
        index: instead of the case's own; see ``run_bounded``.
        counted: see ``simulated_gemm``.
    """

    case: Case
    tile: Tile
    sms: int = 3
    index: tuple[int, ...] | None = None
    counted: bool | None = None

    @property
    def module(self) -> types.ModuleType:
        if not self.case.fp8:
            return bf16
        return fp8 if self.tile.is_wide else skinny

    def __call__(self, module: types.ModuleType, policy: str, seed: int) -> None:
        with simulated_gemm(policy, seed, self.sms, module, self.counted):
            if self.index is not None:
                run_bounded(self.case, self.index, self.tile)
                return
            instance = instance_of(self.case)
            out = instance.poisoned()
            compute(instance, out, instance.rows, self.tile)
            instance.check(out)
