"""Planted bugs in the mega-kernel and the planning before it: the simulator's reports, or a wrong result, show each."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

import torch  # noqa: E402

from megamoe.kernels import (  # noqa: E402
    flag_words,
    mega,
    peer_rows,
    triton_combine,
    triton_dispatch,
    triton_flags,
    triton_route,
)
from megamoe.kernels.gluon import flags, mega_moe, mega_pieces, spelling  # noqa: E402
from megamoe.kernels.mega_plan import MegaSettings  # noqa: E402
from tests.support.exchange_cases import WAIT as ENDED  # noqa: E402
from tests.support.exchange_sim import (  # noqa: E402
    add_combine,
    add_dispatch,
    check_combine,
    check_dispatch,
    check_told,
    expert_results,
    make_tokens,
)
from tests.support.gluon_sim.mutation import SCHEDULES, Bug, assert_caught  # noqa: E402
from tests.support.mega_sim import SETTINGS, MegaSizes, MegaWorld, add_mega_call, check_outputs  # noqa: E402

MORE_SCHEDULES = (
    *SCHEDULES,
    *((policy, seed) for seed in range(3, 7) for policy in ("random", "eager", "lazy", "pct")),
)
"""Some bugs show only where a program finds a tile ready when it looks ahead: not under every schedule."""


def use(patch: pytest.MonkeyPatch, module) -> None:
    """Launches take a module's kernels from here."""
    name = module.__name__.rpartition(".")[2]
    patch.setattr(peer_rows if name == "triton_combine" else mega, name, module)


class Calls:
    """Calls one after another by the kernels of a module: (tokens of each rank, routing)."""

    def __init__(
        self, sizes: MegaSizes, *calls: tuple[list[int], str], fused: bool = True, settings: MegaSettings = SETTINGS
    ):
        self.sizes, self.calls, self.fused, self.settings = sizes, calls, fused, settings

    def __call__(self, module, policy: str, seed: int) -> None:
        torch.manual_seed(seed)
        with pytest.MonkeyPatch.context() as patch:
            use(patch, module)
            world, done = MegaWorld(self.sizes, self.fused), []
            for counts, routing in self.calls:
                done.append(make_tokens(self.sizes, counts, routing))
                add_mega_call(world, done[-1], settings=self.settings)
            world.run(policy, seed)
        assert not any(any(error) for error in world.errors)
        for tokens in done:
            check_outputs(world, tokens)
        check_told(world)


SMALL = MegaSizes(tokens=40)
# Tiles of which consumer 1 has a part, and in the second call none.
TWO = Calls(SMALL, ([40, 40], "one"), ([20, 9], "random"))
HALF = Calls(SMALL, ([20, 9], "random"))
FULL = Calls(SMALL, ([40, 40], "one"))
BORDER = Calls(SMALL, ([32, 32], "one"))
HOLES = Calls(SMALL, ([12, 20], "holes"), ([20, 9], "holes"))
MANY = Calls(SMALL, ([20, 9], "holes"), ([9, 20], "random"), fused=False)
WIDE = Calls(MegaSizes(tokens=40, intermediate=512), ([40, 40], "one"))
# GEMM 2 of one block between GEMM 1 of others.
ALONE = Calls(MegaSizes(ranks=1, tokens=390), ([390], "one"), settings=replace(SETTINGS, sms=1))
# A second block's tiles are stored while the first one's are scattered.
BLOCKS = Calls(MegaSizes(tokens=100), ([100, 100], "one"))
# Blocks whose rows are pulled early by turns.
AGAIN = Calls(MegaSizes(tokens=100), ([100, 9], "one"), settings=replace(SETTINGS, early=3))
LONG = Calls(MegaSizes(hidden=1280, tokens=9), ([9, 9], "random"))
NARROW = Calls(MegaSizes(hidden=384, tokens=9), ([9, 9], "random"))


class Mixed:
    """Plain dispatches (D) and combines by the last one's table (C), and calls (M), on one buffer."""

    def __init__(self, movements: str):
        self.movements = movements

    def __call__(self, module, policy: str, seed: int) -> None:
        torch.manual_seed(seed)
        with pytest.MonkeyPatch.context() as patch:
            use(patch, module)
            world, dispatches, combines, calls = MegaWorld(SMALL), [], [], []
            for movement in self.movements:
                if movement == "M":
                    calls.append(make_tokens(SMALL, [9, 9]))
                    add_mega_call(world, calls[-1])
                elif movement == "D":
                    dispatches.append(make_tokens(SMALL, [9, 9]))
                    add_dispatch(world, dispatches[-1])
                else:
                    tokens = [replace(mine) for mine in dispatches[-1]]
                    combines.append((tokens, expert_results(world, tokens)))
                    add_combine(world, *combines[-1])
            world.run(policy, seed)
        for tokens in dispatches:
            check_dispatch(world, tokens)
        for tokens, rows in combines:
            check_combine(world, tokens, rows)
        for tokens in calls:
            check_outputs(world, tokens)
        check_told(world)


def stuck(module, policy: str, seed: int) -> None:
    """Programs that cannot run at once are given up on, with what they waited for."""
    torch.manual_seed(seed)
    sizes = MegaSizes(ranks=1, experts=1, top_k=1, tokens=30)
    with pytest.MonkeyPatch.context() as patch:
        use(patch, module)
        world = MegaWorld(sizes, fused=False)
        add_mega_call(world, make_tokens(sizes, [30]))
        world.run_until_given_up(seed, resident=1)
    phase, block, target, seen = world.errors[0]
    assert (phase, block, target) == (flag_words.PULLED_ROWS, 0, 30) and 0 < seen < 30


FREE_STAGE = "    mbarrier.wait(empty.index(s), phase_of(it, STAGES) ^ 1)\n"
NOTE = "    if k == 0:\n        bufs[-1].index(s).store(note)\n"
EARLY_START = "            to_words = pool_words + rows.to(gl.int64) * WORDS\n"
EARLY_COUNT = "            flags.add(pulled + rows // BLOCK, here.to(gl.int32))\n"
COUNTED_EARLY = EARLY_COUNT + EARLY_START
WAIT = "            flags.wait_for_counter(awaited[0], awaited[1], block, awaited[2], error, budget_ns, False)\n"
FENCE_ON_THE_WAY_OUT = ("        fence.proxy.async; bar.warp.sync", "        bar.warp.sync")
FREE = "    mbarrier.arrive(results_empty.index(C), count=1)\n"
TOLD_BEFORE = "        if second == 1:\n            mbarrier.wait(results_empty.index(C), (told & 1) ^ 1)\n"
STORED_BEFORE = "to tell.\n            mbarrier.wait(results_empty.index(C), (told & 1) ^ 1)\n"
COUNT = "    flags.add(counter, 1)\n"
STORED = "    wait_global_writes()\n"
TARGET = "target = (INTER // BLOCK) * (1 + (valid > HALF).to(gl.int32))"
PULLED = "            flags.add(pulled + row // BLOCK, 1)\n"
PULL = "            to_words = pool_words + place.to(gl.int64) * WORDS\n"
FREE_LAST = "        mbarrier.arrive(empty.index(last), count=1)\n"

MEGA_BUGS = [
    # counters between programs
    Bug("counted without release", HALF, "@p red.release.gpu", "@p red.relaxed.gpu"),
    Bug("counter read without acquire", HALF, "ld.acquire.gpu", "ld.relaxed.gpu"),
    Bug("lanes do not meet before one counts", HALF, " bar.warp.sync 0xffffffff;", ""),
    Bug("every lane counts", HALF, "@p red.release", "red.release"),
    Bug(
        "proxies are fenced on neither side",
        HALF,
        *FENCE_ON_THE_WAY_OUT,
        also=(('"fence.proxy.async; mov.u32 $0, 0;"', '"mov.u32 $0, 0;"'),),
    ),
    Bug("no limit to a wait", stuck, "& (waited <= budget)", "& (waited >= 0)"),
    Bug("the wrong numbers are reported", stuck, "phase, block, target, seen)", "phase, target, block, seen)"),
    Bug("a wait that fails is not reported", stuck, "        if seen < target:\n", "        if seen < 0:\n"),
    # what tiles wait for
    Bug("waits for one row too many", HALF, "    target = valid\n", "    target = valid + 1\n"),
    Bug("waits for one row too few", HALF, "    target = valid\n", "    target = valid - 1\n"),
    Bug("full tiles count as half ones", FULL, TARGET, "target = INTER // BLOCK + valid * 0"),
    Bug("half tiles count as full ones", HALF, TARGET, "target = INTER // BLOCK * 2 + valid * 0"),
    Bug("64 rows count as a full tile", BORDER, TARGET, TARGET.replace("> HALF", ">= HALF")),
    Bug("GEMM 2 waits for another block", HALF, "counter = finished + block\n", "counter = finished\n"),
    Bug("the next tile is taken for ready", TWO, "(following[0]) >= following[1]:", "(following[0]) >= 0:"),
    Bug("rows are loaded without a wait", HALF, WAIT, ""),
    # the loader
    Bug("up columns are gate columns", HALF, "row, gate, gate + INTER, two", "row, gate, gate + BLOCK, two"),
    Bug("weights of the first expert", HALF, "gate = expert * (2 * INTER) + n", "gate = expert * 0 + n"),
    Bug(
        "a half tile's bytes are a full one's",
        HALF,
        "(2 * BLOCK + HALF) * BLOCK + HALF * 4, pred=two == 0",
        "3 * BLOCK * BLOCK + BLOCK * 4, pred=two == 0",
    ),
    Bug("scales of other rows", FULL, "[k, row + HALF], bar", "[k, row], bar"),
    Bug("a stage is not waited for", HALF, FREE_STAGE + NOTE, NOTE),
    Bug(
        "a stage holds the scales of the block before",
        HALF,
        "gl.load(w_scales + k)",
        "gl.load(w_scales + k - (k > 0))",
    ),
    Bug(
        "a note is written before its stage is free",
        WIDE,
        FREE_STAGE + NOTE,
        NOTE + FREE_STAGE,
    ),
    Bug("consumers are not told of the end", HALF, "count=2 if SCALED else 1)\n", "count=2, pred=False)\n"),
    Bug(
        "every other block of K is left out",
        LONG,
        "range(start, LOOK)",
        "range(start, LOOK, 2)",
    ),
    Bug("both halves have the same scales", HALF, "+ n + half * (INTER // BLOCK)) * UP_K", "+ n + half * 0) * UP_K"),
    Bug("scales of another expert", HALF, "pointers = up_scales + (expert *", "pointers = up_scales + (0 *"),
    Bug("scales beyond the last are read", NARROW, "gl.minimum(block, H // BLOCK - 1)", "block"),
    Bug("the ring turns too late", HALF, "return (it >> 2) & 1", "return ((it + 1) >> 2) & 1"),
    # the storer
    Bug(
        "waits only until the buffer may be reused",
        HALF,
        "cp.async.bulk.wait_group 0;",
        "cp.async.bulk.wait_group.read 0;",
    ),
    Bug("a tile is counted before it is stored", HALF, STORED + FREE + COUNT, COUNT + STORED + FREE),
    Bug("a buffer is free before it is stored", WIDE, STORED + FREE + COUNT, FREE + STORED + COUNT),
    Bug("turns of the other half", ALONE, "results_full.index(1), turn1 & 1", "results_full.index(1), turn0 & 1"),
    # pulling
    Bug(
        "a row is counted before it is there",
        HALF,
        PULL,
        PULL + PULLED,
        also=(
            (
                " " * 16 + "gl.store(to_words + start + col, chunk, mask=col + start < WORDS)\n" + PULLED,
                " " * 16 + "gl.store(to_words + start + col, chunk, mask=col + start < WORDS)\n",
            ),
        ),
    ),
    Bug(
        "rows are left out", HALF, "row += gl.num_programs(0) * PULLERS\n", "row += gl.num_programs(0) * PULLERS + 1\n"
    ),
    Bug("tokens of one's own", HALF, "gl.load(deltas + (source >> TOKEN_BITS)) * 4", "gl.load(deltas) * 4"),
    Bug("scales of another token", HALF, "scales + delta + token * SCALES", "scales + delta + token"),
    Bug(
        "scales of another row",
        HALF,
        "(group + first) * pool_rows + place, value",
        "(group + first) * pool_rows, value",
    ),
    # pulling early
    Bug("early rows are counted before they are there", HALF, EARLY_COUNT, "", also=((EARLY_START, COUNTED_EARLY),)),
    Bug("early rows are not counted", HALF, EARLY_COUNT, ""),
    Bug("both consumers pull the same rows", HALF, "* 2 + C) * EARLY", "* 2) * EARLY"),
    Bug(
        "early rows are pulled again",
        HALF,
        "row = early_rows(early, pool_rows) + gl.program_id(0) * PULLERS",
        "row = gl.program_id(0) * PULLERS",
    ),
    Bug("early rows of one's own", HALF, "deltas + (source >> TOKEN_BITS), mask", "deltas + source * 0, mask"),
    Bug(
        "early scales of another token",
        HALF,
        "delta1 + token1 * SCALES",
        "delta1 + token1",
    ),
    Bug(
        "early scales of another row",
        HALF,
        "[None, :] + rows1[:, None]",
        "[None, :] + (rows1 - row)[:, None]",
    ),
    Bug("half an early row", HALF, "(col + start < WORDS)[None, :]", "(col + start < WORDS // 2)[None, :]"),
    Bug("early rows only once", AGAIN, "row += gl.num_programs(0) * (2 * EARLY)", "row += pool_rows"),
    # consumers
    Bug(
        "a half tile's stages are kept",
        HALF,
        "STAGES))\n                mbarrier.arrive(empty.index(s), count=1)\n",
        "STAGES))\n",
    ),
    Bug(
        "a stage is free before its product is done",
        WIDE,
        "        p = warpgroup_mma_wait(0, deps=[running1])\n" + FREE_LAST,
        FREE_LAST + "        p = warpgroup_mma_wait(0, deps=[running1])\n",
    ),
    Bug(
        "consumer 1 is not told",
        HALF,
        "lead.index(turn % LEADS), count=1)",
        "lead.index(turn % LEADS), count=1, pred=False)",
    ),
    Bug(
        "scales are not waited for",
        HALF,
        "mbarrier.init(full.index(stage), count=2)",
        "mbarrier.init(full.index(stage), count=1)",
    ),
    Bug(
        "one barrier tells of tiles of few blocks",
        WIDE,
        "(STAGES + NK - 1) // NK",
        "1",
    ),
    Bug("scales of the other wave", HALF, "scale1 = a * b1\n    for", "scale1 = a * b0\n    for"),
    Bug("routing weights are left out", HALF, "        act = act * weights[:, None]\n", "        pass\n"),
    Bug("the codes' scale is not the one stored", HALF, "amax * (1.0 / 448.0))", "amax * (1.1 / 448.0))"),
    Bug(
        "GEMM 1 overwrites a buffer in use",
        FULL,
        "(told & 1) ^ 1)\n        reinterpret",
        "told & 1)\n        reinterpret",
    ),
    Bug("consumer 0's GEMM 2 overwrites a buffer in use", TWO, TOLD_BEFORE, "        if second == 1:\n"),
    Bug("consumer 1's GEMM 2 overwrites a buffer in use", BLOCKS, STORED_BEFORE, "to tell.\n            pass\n"),
    Bug("codes are not fenced before their store", HALF, "        fence_async_shared()\n", ""),
    Bug(
        "scales are stored after the codes are announced",
        HALF,
        "    gl.store(act_scales + n * pool_rows + rows, amax * (1.0 / 448.0))\n",
        "",
        also=(
            ("(448.0 / amax)[:, None]).to(gl.float8e4nv)", "(448.0 / amax)[:, None]).to(gl.float8e4nv), amax, rows"),
            ("        codes = activate_rows(", "        codes, amax, rows = activate_rows("),
            (
                "told_note, word, block)\n        mbarrier.arrive(results_full.index(C), count=1)\n",
                "told_note, word, block)\n        mbarrier.arrive(results_full.index(C), count=1)\n"
                "        gl.store(act_scales + n * pool_rows + rows, amax * (1.0 / 448.0))\n",
            ),
        ),
    ),
    # results
    Bug(
        "padding rows are scattered", HALF, "wanted = (target != NO_TARGET)[:, None]", "wanted = (target != 1)[:, None]"
    ),
    Bug(
        "columns beyond the last are stored",
        NARROW,
        "        wanted = wanted & ((2 * n + 1) * BLOCK < H)\n",
        "        pass\n",
    ),
    Bug("the second wave over the first", HALF, "gl.store(pointers + BLOCK, d_buf", "gl.store(pointers, d_buf"),
    Bug("one wave twice", HALF, "d_buf.store(f1.to(gl.bfloat16))", "d_buf.store(f0.to(gl.bfloat16))"),
]

SEE_COMBINES = "epochs_ended(state + COMBINES))\n        tl.store(claimed"

ROUTE_BUGS = [
    Bug("GEMM 2 comes too early", HALF, "first - lag, first + lag + 1)", "first - lag, first + lag)"),
    Bug("tiles of a group leave gaps", HALF, "n * (end - first)", "n * (end - first + 1)"),
    Bug("a tile is taken twice", TWO, "tl.store(claimed, programs)", "tl.store(claimed, programs - 1)"),
    Bug("a tile is left out", TWO, "tl.store(claimed, programs)", "tl.store(claimed, programs + 1)"),
    Bug(
        "tiles of GEMM 2 first",
        BLOCKS,
        "tl.where(second == 0, first - lag, first + lag + 1)",
        "tl.where(second == 0, num_blocks + group, 0)",
    ),
    Bug(
        "counters of rows are kept",
        TWO,
        "        tl.store(pulled + block, tl.zeros([BLOCKS], tl.int32), mask=inside)\n",
        "",
    ),
    Bug(
        "counters of tiles are kept",
        TWO,
        "        tl.store(finished + block, tl.zeros([BLOCKS], tl.int32), mask=inside)\n",
        "",
    ),
    Bug(
        "padding rows have a source",
        TWO,
        "        tl.store(row_source + row, tl.full([BLOCKS, ALIGN], -1, tl.int32), mask=padding)\n",
        "",
    ),
    Bug(
        "padding rows have a target",
        TWO,
        "        tl.store(row_target + row, tl.full([BLOCKS, ALIGN], NO_TARGET, tl.int64), mask=padding)\n",
        "",
    ),
    Bug("padding from the wrong row", HALF, "offset[None, :] >= rows[:, None]", "offset[None, :] > rows[:, None]"),
    Bug(
        "rows of a block from its expert's first",
        Calls(MegaSizes(ranks=1, experts=1, top_k=1, tokens=150), ([150], "random")),
        "- (block * ALIGN - tl.gather(starts, expert, 0))",
        "- 0",
    ),
    Bug("results stay here", HALF, "delta + (slot * max_tokens.to(tl.int64)", "(slot * max_tokens.to(tl.int64)"),
    Bug(
        "slots and tokens mixed up",
        HALF,
        "(slot * max_tokens.to(tl.int64) + token) * UNITS",
        "(token * K + slot).to(tl.int64) * UNITS",
    ),
    Bug("tokens of the wrong rank", HALF, "source << TOKEN_BITS | token", "(1 - source) << TOKEN_BITS | token"),
    Bug(
        "chunks of another source",
        MANY,
        "source * per_rank + turn // R, BINS, 64)\n        first_row",
        "turn // R, BINS, 64)\n        first_row",
    ),
    Bug(
        "lists are not waited for",
        HOLES,
        "        arrive(flags, everyone, READY, 1, stagers, my_rank, R, LANES)\n"
        "    wait_all(flags, READY, epoch, error, budget_ns, R, LANES)\n",
        "        arrive(flags, everyone, READY, 1, stagers, my_rank, R, LANES)\n",
    ),
    Bug("tokens overwritten while others read them", Mixed("DM"), ENDED, ""),
    Bug("more combines are seen than there were", Mixed("DMC"), SEE_COMBINES, SEE_COMBINES.replace("))", ") + 1)")),
    Bug("combines that have ended are not seen", MANY, SEE_COMBINES, SEE_COMBINES.replace("))", ") * 0)")),
]

SUMMED = "        wait_all(flags, SCATTERED, _announced(epoch, 0, 1), error, budget_ns, R, LANES)\n"
SENT = "tl.where((expert >= 0) & (expert < num_experts), ELSEWHERE, NOWHERE)"

SUM_BUGS = [
    Bug(
        "the end of the dispatch is not counted",
        HOLES,
        "    if FROM_SLOTS:\n        end_program(state + DISPATCHES)\n",
        "",
    ),
    Bug("the end of the combine is not counted", HOLES, "    end_program(state + COMBINES)\n", ""),
    Bug(
        "results are not told",
        HALF,
        "    if FROM_SLOTS:\n        if pid == 0:\n",
        "    if FROM_SLOTS:\n        if pid < 0:\n",
    ),
    Bug("results are not waited for", HALF, SUMMED, ""),
    Bug("waits for the results before", HOLES, SUMMED, SUMMED.replace("epoch, 0", "epoch - 1, 0")),
    Bug("slots without an expert are summed", HOLES, SENT, SENT.replace("expert >= 0", "expert >= -1")),
    Bug("slots of an expert that is none are summed", HOLES, SENT, SENT.replace(" & (expert < num_experts)", "")),
    Bug("own rows are left out", HALF, SENT, SENT.replace("num_experts)", "num_experts) & (expert // 2 != my_rank)")),
    Bug("the call's own dispatch is not seen", HOLES, "(1 if FROM_SLOTS else 0)", "0"),
    Bug("more dispatches are seen than there were", Mixed("MDM"), "(1 if FROM_SLOTS else 0)", "2"),
]


@pytest.mark.parametrize(
    "case", [TWO, BORDER, HOLES, MANY, WIDE, NARROW, stuck, *map(Mixed, ("DM", "DMC", "MDM"))], ids=range(10)
)
def test_cases_pass_without_a_bug(case):
    for policy, seed in SCHEDULES[:1]:
        case(mega_moe, policy, seed)


@pytest.mark.parametrize("bug", MEGA_BUGS, ids=str)
def test_bug_of_the_kernel_is_caught(bug):
    assert_caught(mega_moe, bug, MORE_SCHEDULES, helpers=(spelling, flags, mega_pieces))


@pytest.mark.parametrize("bug", ROUTE_BUGS, ids=str)
def test_bug_of_the_plan_is_caught(bug):
    assert_caught(triton_route, bug, MORE_SCHEDULES, helpers=(triton_flags, triton_dispatch))


@pytest.mark.parametrize("bug", SUM_BUGS, ids=str)
def test_bug_of_the_sum_is_caught(bug):
    assert_caught(triton_combine, bug, MORE_SCHEDULES, helpers=(triton_flags,))
