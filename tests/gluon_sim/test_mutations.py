"""Planted bugs in a warp-specialised GEMM: the simulator's reports, or a wrong result, show each of them."""

from __future__ import annotations

import pytest

from tests.gluon_sim import gemm
from tests.support.gluon_sim.mutation import SCHEDULES, Bug, assert_caught, plant
from tests.support.gluon_sim.scheduler import POLICIES

BF16_ROUNDING = 5e-3


def case(variant: gemm.Variant, **shape):
    """The variant runs and its result is right."""

    def run(module, policy, seed):
        error = module.relative_error(variant, policy, seed, **shape)
        assert error < BF16_ROUNDING, f"relative error {error}"

    return run


SIMPLE, LAG_WIDE = case(gemm.SIMPLE), case(gemm.LAG_WIDE)
PINGPONG_TILES, PINGPONG_BLOCKS = (
    case(gemm.PINGPONG_TILES),
    case(gemm.PINGPONG_BLOCKS, rows_per_expert=(128, 256), N=640),
)
VARIANTS = {
    "simple": SIMPLE,
    "lag": LAG_WIDE,
    "pingpong tiles": PINGPONG_TILES,
    "pingpong K blocks": PINGPONG_BLOCKS,
    "scales by TMA": case(gemm.SCALES_BY_TMA),
}

EMPTY_WAIT = "    mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)\n"
NEXT_SCALES = """                kn = gl.minimum(k + 1, NUM_K - 1)
                nb0 = gl.load(pb0 + kn)
                nb1 = gl.load(pb1 + kn)
"""
LAG_FULL_WAIT = """                mbarrier.wait(full.index(s), (it // STAGES) & 1)
                if SFA_TMA:
"""
PROMOTED = "                p0 = warpgroup_mma_wait(0, deps=[acc])\n"
FREE_STAGE = "                if NUM_WAVES == 1:\n                    mbarrier.arrive(empty.index(s), count=1)\n"
BUGS = [
    Bug("producer: empty wait removed", LAG_WIDE, EMPTY_WAIT, ""),
    Bug("producer: empty wait removed, pingpong", PINGPONG_TILES, EMPTY_WAIT, ""),
    Bug("producer: wrong parity", LAG_WIDE, "((it // STAGES) & 1) ^ 1)", "(it // STAGES) & 1)"),
    Bug("consumer: full wait removed", LAG_WIDE, LAG_FULL_WAIT, "                if SFA_TMA:\n"),
    Bug(
        "consumer: wrong full parity",
        LAG_WIDE,
        LAG_FULL_WAIT,
        LAG_FULL_WAIT.replace("(it // STAGES) & 1)", "((it // STAGES) & 1) ^ 1)"),
    ),
    Bug(
        "consumer: frees the stage in use",
        LAG_WIDE,
        "prev = gl.maximum(it - (1 if PINGPONG != 2 else 2), 0) % STAGES",
        "prev = s",
    ),
    Bug(
        "consumer: last arrive removed",
        LAG_WIDE,
        "            mbarrier.arrive(empty.index(last % STAGES), count=1)\n",
        "",
    ),
    Bug(
        "turn: wait removed",
        PINGPONG_TILES,
        "            mbarrier.wait(turn.index(C), (i + C - 1) & 1)\n",
        "            pass\n",
    ),
    Bug("turn: wrong parity", PINGPONG_TILES, "(i + C - 1) & 1", "(i + C) & 1"),
    Bug(
        "turn: arrive removed",
        PINGPONG_TILES,
        "            mbarrier.arrive(turn.index(1 - C), count=1)\n",
        "            pass\n",
    ),
    Bug("empty: count 1 instead of 2", LAG_WIDE, "count=2 if PINGPONG == 0 else 1", "count=1"),
    Bug("full: too few bytes expected", LAG_WIDE, "(TILE_M + TILE_N) * BLOCK_K +", "(TILE_M + TILE_N - 1) * BLOCK_K +"),
    Bug(
        "epilogue: fence removed",
        LAG_WIDE,
        "        d_buf.store(f0.to(gl.bfloat16))\n        fence_async_shared()\n",
        "        d_buf.store(f0.to(gl.bfloat16))\n",
    ),
    Bug(
        "epilogue: store_wait removed",
        LAG_WIDE,
        "            tma.store_wait(0)\n            d_buf.store(f1",
        "            d_buf.store(f1",
    ),
    Bug(
        "epilogue: first store_wait removed",
        PINGPONG_TILES,
        "        tma.store_wait(0)\n        d_buf.store(f0",
        "        d_buf.store(f0",
    ),
    Bug("epilogue: last store_wait removed", SIMPLE, "PINGPONG)\n    tma.store_wait(0)\n", "PINGPONG)\n"),
    Bug("consumer: frees the stage before the wgmma is done", SIMPLE, PROMOTED + FREE_STAGE, FREE_STAGE + PROMOTED),
    Bug("consumer: waits for all but one wgmma", SIMPLE, PROMOTED, PROMOTED.replace("wait(0", "wait(1")),
    Bug(
        "scales of the wrong block",
        LAG_WIDE,
        NEXT_SCALES,
        NEXT_SCALES.replace("gl.minimum(k + 1, NUM_K - 1)", "k"),
        occurrences=2,
    ),
    Bug("scales beyond the tensor", LAG_WIDE, "pa1 = pa0 + AW1 * WAVE_M", "pa1 = pa0 + 64 * m_total * WAVE_M"),
    Bug("producer: one tile too many", PINGPONG_BLOCKS, "has1 = t1 < num_tiles", "has1 = t1 <= num_tiles"),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", VARIANTS)
def test_without_a_bug(name, policy):
    VARIANTS[name](gemm, policy, 1)


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_bug_is_caught(bug):
    assert_caught(gemm, bug, needed=len(SCHEDULES))


def test_text_that_does_not_occur_is_an_error():
    with pytest.raises(ValueError, match="expected 1 times"):
        plant(gemm, Bug("none", SIMPLE, "no such text", ""))
    with pytest.raises(ValueError, match="expected 1 times"):
        plant(gemm, Bug("many", SIMPLE, "tma.store_wait(0)", ""))


def test_a_harmless_edit_is_not_caught():
    bug = Bug("renamed variable", SIMPLE, "row_b", "first_row_of_b", occurrences=4)
    with pytest.raises(AssertionError, match="shown by 0 of 3"):
        assert_caught(gemm, bug)
