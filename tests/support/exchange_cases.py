"""Movements of rows by planted kernels, and the lines that are planted in more than one suite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from megamoe.kernels import peer_rows
from tests.support.exchange_sim import Sizes, World, add_movements, check_movements

BF16 = Sizes(2, 12, 3, 6, 272)
FP8 = Sizes(3, 12, 2, 6, 272, fp8=True)


class Calls:
    """Movements, one after another, by the kernels of a module: letters as for ``add_movements``."""

    def __init__(
        self,
        sizes: Sizes,
        few: bool,
        movements: str = "DCDCDC",
        sms: int = 2,
        counts: list[list[int]] | None = None,
        routings: Sequence[str] = ("random", "holes"),
        zero_padding: bool = True,
    ):
        self.sizes, self.few, self.movements, self.sms = sizes, few, movements, sms
        self.counts = counts or [[sizes.tokens, 1, 9], [9, sizes.tokens, 0]]
        self.routings, self.zero_padding = routings, zero_padding

    def __call__(self, module, policy: str, seed: int) -> None:
        with planted(module, seed, self.few):
            world = World(self.sizes)
            counts = [each[: self.sizes.ranks] for each in self.counts]
            done = add_movements(world, self.movements, counts, self.routings, self.sms, self.zero_padding)
            world.run(policy, seed)
        check_movements(world, done, self.zero_padding)


@contextmanager
def planted(module, seed: int, few: bool = True) -> Iterator[None]:
    """Launches take a module's kernels from here; not few: tables are counted before, results announced in steps."""
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_rows, module.__name__.rpartition(".")[2], module)
        if not few:
            patch.setattr(peer_rows, "FUSED_ENTRIES", 0)
            patch.setattr(peer_rows, "FEW_BYTES", 0)
        yield


ONE = Calls(BF16, True)
ONE_FP8 = Calls(FP8, True)
MANY = Calls(BF16, False)
MANY_FP8 = Calls(FP8, False)
REUSED = Calls(BF16, True, "PRCPRC")
MANY_REUSED = Calls(BF16, False, "PRCPRC")
LONG_ROWS = Calls(Sizes(2, 8, 1, 2, 2064), True, "DC")
# Few tokens of a tile, whose rows are kept.
NARROW = Calls(Sizes(2, 4, 2, 4, 272, fp8=True), True, "PR", 4)
# Two of a kind in a row, and three.
DISPATCHES = Calls(BF16, True, "DDD", counts=[[12, 12]])
MANY_DISPATCHES = Calls(BF16, False, "DDD", counts=[[12, 12]])
# Only a combine has shown that the first has ended.
SHOWN = Calls(BF16, True, "DCDD", counts=[[12, 12]])
COMBINES = Calls(BF16, True, "DDCCC", counts=[[12, 12]])

# Of ``wait_until_ended``.
WAIT = "        wait_all(flags, KIND, ended, error, budget_ns, R, LANES)\n"
UNSEEN = "if tl.load(state + SEEN) < ended:"
TELL = "publish(flags, everyone, KIND, ended, my_rank, LANES)"
