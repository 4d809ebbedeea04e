"""Planted bugs in what the BF16 mega-kernel has of its own; the others are in ``test_mega_mutations``."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

import torch  # noqa: E402

from megamoe.kernels import mega, triton_dispatch, triton_flags, triton_route  # noqa: E402
from megamoe.kernels.gluon import flags, mega_bf16, mega_pieces, spelling  # noqa: E402
from tests.support.gluon_sim.mutation import SCHEDULES, Bug, assert_caught  # noqa: E402
from tests.support.mega_sim import SETTINGS, MegaSizes, run_calls  # noqa: E402


class Calls:
    """Calls one after another by the kernels of a module: (tokens of each rank, routing)."""

    def __init__(self, *calls: tuple[list[int], str], skew: int = 1, sms: int = SETTINGS.sms, **sizes: int):
        self.sizes = MegaSizes(fp8=False, **sizes)
        self.calls, self.settings = calls, replace(SETTINGS, skew=skew, sms=sms)

    def __call__(self, module, policy: str, seed: int) -> None:
        torch.manual_seed(seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mega, module.__name__.rpartition(".")[2], module)
            run_calls(self.sizes, policy, seed, self.calls, settings=self.settings)


# Tiles of which consumer 1 has a part, and in the second call none.
TWO = Calls(([40, 40], "one"), ([20, 9], "random"))
HALF = Calls(([20, 9], "random"))
FULL = Calls(([40, 40], "one"))
WIDE = Calls(([40, 40], "one"), intermediate=512)
# A second block's tiles are stored while the first one's are scattered.
BLOCKS = Calls(([100, 100], "one"), tokens=100)
# Tiles of fewer blocks of K than consumer 1 stays behind.
SHORT = Calls(([40, 40], "one"), ([9, 9], "random"), skew=3, intermediate=128)
SHORTEST = Calls(([9, 9], "random"), sms=1, hidden=128, intermediate=128)

FREE = "        mbarrier.arrive(empty.index(gl.maximum(it - 1, 0) % STAGES), count=1, pred=k > 0)\n"
LAST = "    mbarrier.arrive(empty.index((it0 + num_k - 1) % STAGES), count=1)\n"
WEIGHTED = "            act = act * weights[:, None]\n"
FENCE = "        fence_async_shared()\n"
NOTE = "        if C == 0:\n            note_for_storer(told_note, word, block)\n"
ANNOUNCE = "        mbarrier.arrive(results_full.index(C), count=1)\n"
WAIT = "        mbarrier.wait(results_empty.index(C), (told & 1) ^ 1)\n"

KERNEL_BUGS = [
    # sums
    Bug("the first product is lost", HALF, "use_acc=BIAS or k > 0", "use_acc=BIAS or k > 1"),
    Bug("a stage is free while its product runs", WIDE, FREE, FREE.replace("gl.maximum(it - 1, 0)", "it")),
    Bug("a stage is never free", HALF, FREE, ""),
    Bug("the last stage is never free", HALF, LAST, ""),
    Bug("the last product is not waited for", HALF, "warpgroup_mma_wait(0, deps=[sums])", "sums"),
    Bug("rows of the other consumer", FULL, "bufs[0].index(s * 2 + C)", "bufs[0].index(s * 2)"),
    Bug(
        "blocks of K are twice as long",
        HALF,
        "    UP_K: gl.constexpr = H // HALF\n",
        "    UP_K: gl.constexpr = H // BLOCK\n",
    ),
    # the lead
    Bug("consumer 1 is not told", HALF, "count=1, pred=k == SKEW)", "count=1, pred=k < 0)"),
    Bug("consumer 1 is not told of short tiles", SHORT, "        if LEAST <= SKEW:\n", "        if LEAST < 0:\n"),
    Bug("consumer 1 is told twice", SHORT, "pred=num_k <= SKEW)", "pred=num_k > 0)"),
    Bug(
        "one barrier tells of tiles of few blocks",
        SHORTEST,
        "1 if NK + TOLD >= STAGES else (STAGES - TOLD + NK - 1) // NK",
        "1",
        also=((" and LEADS * NK + TOLD >= STAGES)", ")"),),
    ),
    Bug(
        "a half tile's stages are kept",
        HALF,
        "& 1)\n                mbarrier.arrive(empty.index(it % STAGES), count=1)\n",
        "& 1)\n",
    ),
    # results
    Bug(
        "gate and up mixed up",
        HALF,
        "pieces.activate_gate(left, clamp",
        "pieces.activate_gate(right, clamp",
        also=(("multiply_up(gate, right, clamp", "multiply_up(gate, left, clamp"),),
    ),
    Bug("routing weights are left out", HALF, WEIGHTED, "            pass\n"),
    Bug("routing weights of the first block", BLOCKS, "routing_weights(tile[1]", "routing_weights(tile[1] * 0"),
    Bug("routing weights of the other rows", FULL, "row_weights, LR, C)\n", "row_weights, LR, 0)\n"),
    Bug("GEMM 1 overwrites a buffer in use", WIDE, WAIT + "        d_buf.store", "        d_buf.store"),
    Bug(
        "GEMM 2 overwrites a buffer in use",
        BLOCKS,
        "to tell.\n    " + WAIT,
        "to tell.\n            pass\n",
    ),
    Bug("an activation is not fenced before its store", HALF, FENCE, ""),
    Bug(
        "an activation is announced before it is there",
        HALF,
        FENCE + NOTE + ANNOUNCE,
        FENCE,
        also=((WAIT + "        d_buf.store", WAIT + NOTE + ANNOUNCE + "        d_buf.store"),),
    ),
    Bug(
        "the halves of a result mixed up", HALF, "scatter_rows(d_buf, left, right,", "scatter_rows(d_buf, right, left,"
    ),
    Bug("results of the other rows", FULL, "block * BLOCK + C * HALF, slots", "block * BLOCK, slots"),
    # the loader and the pullers
    Bug(
        "a half tile's bytes are a full one's",
        HALF,
        "(2 * BLOCK + HALF) * BLOCK, pred=two == 0",
        "3 * BLOCK * BLOCK, pred=two == 0",
    ),
    Bug("up columns over gate columns", HALF, "index(s).slice(half * BLOCK, BLOCK, 0)", "index(s).slice(0, BLOCK, 0)"),
    Bug("weights of every other block of K", HALF, "[row, k * HALF]", "[row, k * BLOCK]"),
    Bug(
        "half of a row is pulled",
        HALF,
        "WORDS: gl.constexpr = H // 4 if SCALED else H // 2",
        "WORDS: gl.constexpr = H // 4",
        occurrences=2,
    ),
    Bug(
        "scales are pulled",
        HALF,
        "SCALES: gl.constexpr = H // BLOCK if SCALED else 0",
        "SCALES: gl.constexpr = H // BLOCK",
        occurrences=2,
    ),
]

ROUTE_BUGS = [
    Bug(
        "tokens are cast to codes",
        HALF,
        "K, H, FP8, LARGEST, ROWS, True, GROUPS",
        "K, H, True, LARGEST, ROWS, True, GROUPS",
    ),
]


@pytest.mark.parametrize("case", [TWO, WIDE, SHORT, SHORTEST], ids=range(4))
def test_cases_pass_without_a_bug(case):
    for policy, seed in SCHEDULES[:1]:
        case(mega_bf16, policy, seed)


@pytest.mark.parametrize("bug", KERNEL_BUGS, ids=str)
def test_bug_of_the_kernel_is_caught(bug):
    assert_caught(mega_bf16, bug, helpers=(spelling, flags, mega_pieces))


@pytest.mark.parametrize("bug", ROUTE_BUGS, ids=str)
def test_bug_of_the_plan_is_caught(bug):
    assert_caught(triton_route, bug, helpers=(triton_flags, triton_dispatch))
