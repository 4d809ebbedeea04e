"""A mega-kernel's pool that blocks take in turns: smaller than any call needs, and as small as it may be."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import replace

import pytest

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

import torch  # noqa: E402

from megamoe.kernels import flag_words, mega, triton_dispatch, triton_flags, triton_route  # noqa: E402
from megamoe.kernels.gluon import flags, mega_bf16, mega_moe, mega_pieces, spelling  # noqa: E402
from megamoe.kernels.mega_plan import least_pool_blocks  # noqa: E402
from tests.support.exchange_sim import make_tokens  # noqa: E402
from tests.support.gluon_sim import POLICIES, Deadlock  # noqa: E402
from tests.support.gluon_sim.mutation import SCHEDULES, Bug, assert_caught  # noqa: E402
from tests.support.mega_order import order_of_tiles, unfinished  # noqa: E402
from tests.support.mega_sim import SETTINGS, MegaSizes, MegaWorld, add_mega_call, check_outputs, run_calls  # noqa: E402

LEAST = least_pool_blocks(SETTINGS)
# A block for each expert.
ONE = MegaSizes(ranks=1, experts=22, top_k=2, tokens=14, hidden=128, intermediate=128)
TWO = replace(ONE, ranks=2, experts=24)

# ---------------------------------------------------------------- the order of tiles


def test_the_smallest_pool_suffices_whatever_the_order(seed):
    """Under every schedule, see ``mega_order``."""
    sizes = itertools.product((1, 7, 40), (1, 2, 5), (1, 3), (1, 2, 3, 5, 16, 33), (1, 2, 4, 8), (1, 2, 3))
    generator = random.Random(seed)
    for blocks, ups, downs, programs, group, lag in sizes:
        blocks_of: list[int] = []
        while blocks > 0:
            blocks_of.append(min(blocks, generator.choice((0, 1, 2, 5, 17))))
            blocks -= blocks_of[-1]
        order = order_of_tiles(blocks_of, ups, downs, group, lag)
        least = least_pool_blocks(replace(SETTINGS, group=group, lag=lag))
        for pool in (least, least + 1, 2 * least):
            stuck = unfinished(order, programs, ups, downs, pool, generator.random())
            assert not stuck, (blocks_of, ups, downs, programs, group, lag)


@pytest.mark.parametrize(("group", "lag"), [(1, 1), (1, 12), (8, 1), (5, 3), (8, 12)])
def test_no_smaller_pool_suffices_for_all_orders(group, lag):
    """One program, whose last group begins ``lag`` blocks after the first one, does not come round with less."""
    order = order_of_tiles([1] * lag + [group], 2, 3, group, lag)
    least = least_pool_blocks(replace(SETTINGS, group=group, lag=lag))
    assert unfinished(order, 1, 2, 3, least - 1) and not unfinished(order, 1, 2, 3, least)


# ---------------------------------------------------------------- whole calls


@functools.cache
def whole_pool(fp8: bool, seed: int) -> list[torch.Tensor]:
    """Outputs of ``ONE`` where nothing waits for a slot."""
    torch.manual_seed(seed)
    return [tokens.out for tokens in run_calls(replace(ONE, fp8=fp8), "random", seed, [([14], "each")])[0]]


@pytest.mark.parametrize(("number", "policy"), list(enumerate(POLICIES)))
def test_every_policy(number, policy, seed):
    """Slots are taken 11 times, and results have the bits of a pool that has room for all."""
    settings = replace(SETTINGS, sms=1 + number % 3, skew=1 + number % 2)
    fp8 = number % 2 == 0
    torch.manual_seed(seed)
    done = run_calls(
        replace(ONE, fp8=fp8), policy, seed, [([14], "each")], number > 2, pool_blocks=LEAST, settings=settings
    )
    assert all(torch.equal(mine.out, out) for mine, out in zip(done[0], whole_pool(fp8, seed), strict=True))


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_calls_of_skewed_ranks(fp8, seed):
    """Counters of one call mean nothing to the next. All to one expert, a rank without tokens, none at all."""
    calls = [([14, 1], "each"), ([0, 14], "each"), ([14, 14], "one"), ([0, 0], "random"), ([3, 14], "each")]
    settings = replace(SETTINGS, sms=3)
    run_calls(replace(TWO, fp8=fp8), "slowrank", seed, calls, not fp8, pool_blocks=LEAST, settings=settings)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_blocks_of_one_expert(fp8, seed):
    """Full blocks, with tiles of several programs, all on one rank; the last one is a half."""
    sizes = MegaSizes(tokens=153, top_k=1, hidden=384, intermediate=256, fp8=fp8)
    settings = replace(SETTINGS, sms=3)
    run_calls(sizes, "random", seed, [([153, 140], "one")], pool_blocks=LEAST, settings=settings)


@pytest.mark.parametrize(("sms", "group", "lag", "more"), [(2, 2, 1, 0), (5, 1, 2, 0), (3, 2, 2, 0), (4, 1, 1, 1)])
def test_settings(sms, group, lag, more, seed):
    """``more`` blocks than the smallest pool."""
    # More rows than the pool has are not pulled early.
    settings = replace(SETTINGS, sms=sms, group=group, lag=lag, early=500 * more)
    pool = least_pool_blocks(settings) + more
    run_calls(replace(ONE, fp8=sms % 2 == 0), "pct", seed, [([14], "each")], pool_blocks=pool, settings=settings)


# ---------------------------------------------------------------- pools that are too small


def test_a_smaller_pool_is_stuck(seed):
    """So the bound is no larger than it must be."""
    world, tokens = MegaWorld(ONE, sms=1, pool_blocks=LEAST - 1), make_tokens(ONE, [14], "each")
    add_mega_call(world, tokens, settings=replace(SETTINGS, sms=1))
    with pytest.raises(Deadlock, match="wait_for_counter"):
        world.run("random", seed)


def test_a_wait_for_a_slot_is_given_up_on_and_the_next_call_is_right(seed):
    settings = replace(SETTINGS, sms=1)
    world, tokens = MegaWorld(ONE, sms=1, pool_blocks=LEAST - 1), make_tokens(ONE, [14], "each")
    add_mega_call(world, tokens, settings=settings)
    world.run_until_given_up(seed)
    # Rows of each warp's next block wait for the slot of the one before, and tiles of block 1 for its rows.
    phase, block, target, seen = world.errors[0]
    if phase == flag_words.CONSUMED_TILES:
        assert 0 <= block < ONE.experts and (target, seen) == (1, 0)
    else:
        rows = int(world.scratch[0]["counts"][1])
        assert (phase, block, target) == (flag_words.PULLED_ROWS, 1, rows) and 0 <= seen < rows
    world.memories[0].error.zero_()
    plan = MegaWorld(ONE, sms=1, pool_blocks=LEAST).mega_plan
    world.mega_plan = replace(world.mega_plan, pool_blocks=plan.pool_blocks)
    for region in plan.regions:
        world.scratch[0][region.name] = torch.empty(region.shape, dtype=region.dtype)
    add_mega_call(world, tokens, settings=settings)
    world.run("random", seed)
    check_outputs(world, tokens)


# ---------------------------------------------------------------- planted bugs


class Calls:
    """A call by the kernels of a module, with the smallest pool."""

    def __init__(self, sizes: MegaSizes, counts: list[int], routing: str, **settings):
        self.sizes, self.counts, self.routing = sizes, counts, routing
        self.settings = replace(SETTINGS, **settings)

    def __call__(self, module, policy: str, seed: int) -> None:
        torch.manual_seed(seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mega, module.__name__.rpartition(".")[2], module)
            calls = [(self.counts, self.routing)]
            run_calls(self.sizes, policy, seed, calls, pool_blocks=LEAST, settings=self.settings)


SMALL = replace(ONE, experts=7, tokens=7)
EACH = Calls(SMALL, [7], "each")
ALONE = Calls(SMALL, [7], "each", sms=1)
BF16 = Calls(replace(SMALL, fp8=False), [7], "each")
# More blocks of K than stages.
DEEP = Calls(replace(SMALL, intermediate=640), [7], "each")
# Several tiles of GEMM 2 for each block.
WIDE = Calls(replace(SMALL, hidden=640), [7], "each", sms=3)

WAIT = "            if row >= pool_rows:\n"
BEFORE = "before = (row - pool_rows) // BLOCK"
AWAIT = "flags.wait_for_counter(consumed + before, reads, before, phase, error, budget_ns, True)"
TELL = "            told = tell_read(bars, told, tile, told_note, C)\n"
TOLD = "        mbarrier.wait(results_full.index(0), turn0 & 1)\n"
FREE = "            mbarrier.wait(results_empty.index(C), (told & 1) ^ 1)\n            note_for"
COUNT = "            flags.add(consumed + block, 1)\n"

SHARED_BUGS = [
    Bug("no wait before a slot is filled again", EACH, WAIT, "            if row < 0:\n"),
    Bug("the first row does not wait", EACH, WAIT, WAIT.replace(">=", ">")),
    Bug("waits for the turn before", EACH, BEFORE, "before = gl.maximum(row - 2 * pool_rows, 0) // BLOCK"),
    Bug("waits for the block before", EACH, BEFORE, "before = gl.maximum((row - pool_rows) // BLOCK - 1, 0)"),
    Bug("waits for the block after", ALONE, BEFORE, BEFORE + " + 1"),
    Bug("waits for one tile of several", WIDE, "reads = columns_tiles(H) + before * 0", "reads = 1 + before * 0"),
    Bug(
        "a wait that acquires nothing",
        EACH,
        AWAIT,
        "while gl.load(consumed + before, volatile=True) < reads:\n                    pass",
    ),
    Bug(
        "slots from a smaller pool",
        EACH,
        "return block * BLOCK % pool_rows",
        "return block * BLOCK % (pool_rows - BLOCK)",
    ),
    Bug("slots of the next block", EACH, "return block * BLOCK % pool_rows", "return (block + 1) * BLOCK % pool_rows"),
    Bug("rows beside their slot", EACH, "place = row % pool_rows", "place = row % (pool_rows - 1)"),
    Bug(
        "scales beside their slot",
        EACH,
        "* pool_rows + place, value",
        "* pool_rows + (place + BLOCK) % pool_rows, value",
    ),
    Bug(
        "rows are counted for the slot",
        EACH,
        "flags.add(pulled + row // BLOCK, 1)",
        "flags.add(pulled + place // BLOCK, 1)",
    ),
    Bug(
        "the loader knows no slots",
        EACH,
        "row = pool_row(block, pool_rows)\n        w_scales",
        "row = block * BLOCK\n        w_scales",
    ),
    Bug(
        "the storer knows no slots",
        EACH,
        "row = pool_row(block, pool_rows)\n            store_half",
        "row = block * BLOCK\n            store_half",
    ),
    Bug("tiles that have not read are counted", EACH, TOLD, ""),
    Bug("GEMM 2's tiles are not counted", EACH, COUNT, ""),
    Bug("counted for another block", EACH, COUNT, COUNT.replace("+ block", "+ block + 1")),
    Bug("told of a tile before the last one's store", EACH, FREE, "            note_for"),
]

FP8_BUGS = [
    Bug(
        "told before the tile is summed up",
        DEEP,
        TELL,
        "",
        also=(("            f0, f1 = sum_tile(", TELL + "            f0, f1 = sum_tile("),),
    ),
    Bug("scales of activations know no slots", EACH, "row = pool_row(block, pool_rows) + C", "row = block * BLOCK + C"),
]

BF16_BUGS = [
    Bug(
        "told before the tile is summed up",
        BF16,
        TELL,
        "",
        also=(("            total = sum_tile(", TELL + "            total = sum_tile("),),
    ),
]

ROUTE_BUGS = [
    Bug(
        "counters are kept",
        EACH,
        "        tl.store(consumed + block, tl.zeros([BLOCKS], tl.int32), mask=inside)\n",
        "",
    ),
]


@pytest.mark.parametrize(("case", "module"), [(EACH, mega_moe), (WIDE, mega_moe), (BF16, mega_bf16)])
def test_cases_pass_without_a_bug(case, module):
    for policy, seed in SCHEDULES[:1]:
        case(module, policy, seed)


@pytest.mark.parametrize("bug", [*SHARED_BUGS, *FP8_BUGS], ids=str)
def test_bug_of_the_kernel_is_caught(bug):
    assert_caught(mega_moe, bug, helpers=(spelling, flags, mega_pieces))


@pytest.mark.parametrize("bug", BF16_BUGS, ids=str)
def test_bug_of_the_bf16_kernel_is_caught(bug):
    assert_caught(mega_bf16, bug, helpers=(spelling, flags, mega_pieces))


@pytest.mark.parametrize("bug", ROUTE_BUGS, ids=str)
def test_bug_of_the_plan_is_caught(bug):
    assert_caught(triton_route, bug, helpers=(triton_flags, triton_dispatch))
