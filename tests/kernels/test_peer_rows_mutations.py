"""Planted bugs in the dispatch between ranks and its flags: the simulator's reports, or a wrong result, show each."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import torch  # noqa: E402

from megamoe.kernels import flag_words, triton_dispatch, triton_flags, triton_rows  # noqa: E402
from tests.support.exchange_cases import (  # noqa: E402
    BF16,
    COMBINES,
    DISPATCHES,
    FP8,
    LONG_ROWS,
    MANY,
    MANY_DISPATCHES,
    MANY_FP8,
    MANY_REUSED,
    NARROW,
    ONE,
    ONE_FP8,
    REUSED,
    SHOWN,
    TELL,
    UNSEEN,
    WAIT,
    Calls,
    planted,
)
from tests.support.exchange_sim import Sizes, World, add_dispatch, make_tokens  # noqa: E402
from tests.support.gluon_sim.mutation import SCHEDULES, Bug, assert_caught  # noqa: E402


def overflow(module, policy: str, seed: int) -> None:
    """More rows than fit: the rest stays within bounds, and is reported."""
    with planted(module, seed):
        world = World(BF16)
        tokens = make_tokens(BF16, [12, 12])
        for mine in tokens:
            mine.index[:] = torch.tensor([0, 1, 4])
        add_dispatch(world, tokens, capacity=128)
        world.run(policy, seed)
    assert [error[:3] for error in world.errors] == [[flag_words.CAPACITY, 256, 128], [0, 0, 0]]
    assert tokens[0].table.counts.tolist() == [24, 0, 0] and int(tokens[0].table.sizes[0]) == 128
    assert tokens[0].table.pair_to_row[:, :12].max() < 128


def missing(module, policy: str, seed: int) -> None:
    """A rank that does not come is given up on, and named; later waits end at once."""
    with planted(module, seed):
        world = World(FP8)
        add_dispatch(world, make_tokens(FP8, [3, 3, 3]), ranks=[0, 2])
        first = world.run_until_given_up(seed)
        add_dispatch(world, make_tokens(FP8, [3, 3, 3]), ranks=[0, 2])
        later = world.run_until_given_up(seed)
    assert world.errors == [[flag_words.READY + 1, 1, 1, 0], [0, 0, 0, 0], [flag_words.READY + 1, 1, 1, 0]]
    assert later.nanoseconds < first.nanoseconds / 10


MORE_SMS = Calls(BF16, True, "DC", 4, [[3, 12]])

# More pairs than one look takes: where tokens are read after it, and beside it.
TWO_LOOKS = Calls(Sizes(2, 130, 8, 8, 16), True, "D", counts=[[130, 7]])
EARLY_LOOKS = Calls(Sizes(2, 64, 17, 18, 16), True, "D", counts=[[64, 7]])

SEE_COMBINES = "tl.store(state + COMBINES_SEEN, combines)"
READY = (
    "        publish(flags, everyone, READY, epoch, my_rank, LANES)\n"
    "    wait_all(flags, READY, epoch, error, budget_ns, R, LANES)\n"
)
ARRIVE = "        arrive(flags, everyone, READY, 1, stagers, my_rank, R, LANES)\n"
COUNT = "        if tl.program_id(0) == 0:\n            tell_count(flags, everyone, n, my_rank, LANES)\n"
LOOK = "look = look_at_pairs(flags, list_index, 0, my_rank, max_tokens, R, K, KP, LOCAL, BLOCK)\n"
READ_AHEAD = "delta = tl.load(deltas + source)\n            needed"
SCALES_AHEAD = (
    "row_scales = read_scales(scales, delta, token, needed",
    "row_scales = read_scales(scales, 0, token, needed",
)
SCALES = ("row_scales = read_scales(scales, delta, token, last", "row_scales = read_scales(scales, 0, token, last")
KEPT = "row = rows[k] if KEEP else tl.load(table + token.to(tl.int64) * K + k, mask=mask, other=-1)\n        place = "

DISPATCH_BUGS = [
    # flags
    Bug(
        "no barrier before a flag is raised",
        MANY,
        "    tl.debug_barrier()\n    pointers = peer(flags, everyone, 8) + (KIND",
        "    pointers = peer(flags, everyone, 8) + (KIND",
    ),
    Bug("flag raised without release", MANY, "st.release.sys.global.b64", "st.relaxed.sys.global.b64"),
    Bug("flag released to the own GPU only", MANY, "st.release.sys.global.b64", "st.release.gpu.global.b64"),
    Bug("flag read without acquire", ONE, "ld.acquire.sys.global.b64", "ld.relaxed.sys.global.b64"),
    Bug("flag acquired from the own GPU only", ONE, "ld.acquire.sys.global.b64", "ld.acquire.gpu.global.b64"),
    Bug(
        "waits for one rank only",
        ONE_FP8,
        "if _of_lane_0(tl.min(seen, 0) < epoch):\n        start",
        "if _of_lane_0(tl.max(seen, 0) < epoch):\n        start",
        also=(("while _of_lane_0((tl.min(seen, 0) < epoch)", "while _of_lane_0((tl.max(seen, 0) < epoch)"),),
    ),
    Bug(
        "flag of another rank",
        MANY_FP8,
        "(KIND * KIND_WORDS + my_rank * LINE_WORDS)\n    tl.inline",
        "(KIND * KIND_WORDS + my_rank // 2 * LINE_WORDS)\n    tl.inline",
    ),
    Bug(
        "count told to oneself only",
        ONE,
        "pointers = peer(flags, everyone, 8) + (COUNT",
        "pointers = peer(flags, everyone * 0, 8) + (COUNT",
    ),
    Bug(
        "one program that stages is not waited for", ONE, "READY, 1, stagers, my_rank", "READY, 1, stagers - 1, my_rank"
    ),
    Bug(
        "programs that do not stage are waited for",
        MORE_SMS,
        "READY, 1, stagers, my",
        "READY, 1, tl.num_programs(0), my",
    ),
    Bug(
        "flags are raised at the first rank only",
        ONE,
        "minimum(tl.arange(0, LANES), RANKS - 1)",
        "arange(0, LANES) * 0",
    ),
    Bug(
        "warps that do not poll go on before the first",
        ONE,
        "    # The acquire of one thread becomes that of all; and all go on together, whatever each has seen.\n"
        "    tl.debug_barrier()\n",
        "",
    ),
    Bug("counts are told after the flag", ONE, COUNT + ARRIVE, ARRIVE + COUNT),
    Bug("counts are told by nobody", ONE, COUNT, COUNT.replace("== 0", "< 0")),
    Bug("two epochs at once", DISPATCHES, ARRIVE, ARRIVE.replace("READY, 1,", "READY, 2,")),
    Bug("no limit to a wait", missing, "& (waited <= budget)", "& (waited >= 0)"),
    Bug(
        "the wrong rank is blamed",
        missing,
        "tl.where(seen < epoch, rank, RANKS)",
        "tl.where(seen < epoch, rank + 1, RANKS)",
    ),
    Bug("waits after an error take as long", missing, "tl.where(failed == 0, budget_ns, -1)", "budget_ns"),
    # two dispatches in a row
    Bug("inputs overwritten while others read", DISPATCHES, WAIT, ""),
    Bug("waits for an older dispatch to be read", MANY_DISPATCHES, WAIT, WAIT.replace("ended,", "ended - 1,")),
    Bug("a wait is left out", DISPATCHES, UNSEEN, UNSEEN.replace("ended", "ended - 1")),
    Bug("a wait is left out where tables are counted", MANY_DISPATCHES, UNSEEN, UNSEEN.replace("ended", "ended - 1")),
    Bug("a wait that is not needed", ONE, UNSEEN, "if True:"),
    Bug("more is told than has ended", DISPATCHES, TELL, TELL.replace("ended", "ended + 1")),
    Bug("less is told than has ended", DISPATCHES, TELL, TELL.replace("ended", "ended - 1")),
    Bug("nobody tells", DISPATCHES, "min_amax, tl.num_programs(0) - 1, R", "min_amax, tl.num_programs(0), R"),
    Bug("nobody tells where tables are counted", MANY_DISPATCHES, "epoch, min_amax, 0, R", "epoch, min_amax, -1, R"),
    Bug("what is told is not told to all", DISPATCHES, TELL, TELL.replace("everyone", "everyone * 0")),
    Bug(
        "flags of the wrong kind",
        DISPATCHES,
        "DISPATCHES_SEEN, PULLED, epoch - 1",
        "DISPATCHES_SEEN, READY, epoch - 1",
    ),
    Bug(
        "a dispatch waits for itself",
        DISPATCHES,
        "DISPATCHES_SEEN, PULLED, epoch - 1",
        "DISPATCHES_SEEN, PULLED, epoch",
    ),
    Bug("combines are taken for dispatches", ONE, "DISPATCHES_SEEN, PULLED,", "COMBINES_SEEN, PULLED,"),
    Bug("more combines are seen than there were", COMBINES, SEE_COMBINES, SEE_COMBINES[:-1] + " + 1)"),
    Bug("combines that have ended are not seen", ONE, SEE_COMBINES, "pass"),
    Bug(
        "dispatches are seen as combines",
        COMBINES,
        "combines = epochs_ended(state + COMBINES)",
        "combines = epochs_ended(state + DISPATCHES)",
    ),
    # inputs
    Bug(
        "inputs announced before they are there",
        MANY,
        READY + "    per_rank",
        READY.replace("READY, epoch, my", "READY, epoch + 1, my") + "    per_rank",
    ),
    Bug(
        "lists of others are not waited for",
        MANY,
        "    wait_all(flags, READY, epoch, error, budget_ns, R, LANES)\n    per_rank",
        "    per_rank",
    ),
    Bug(
        "staged rows are not waited for",
        ONE,
        ARRIVE + READY.partition("\n")[2],
        ARRIVE,
    ),
    Bug("stagers without tokens are waited for", Calls(BF16, True, "DC", 4, [[0, 12]]), "tl.maximum(n, 1)", "n"),
    Bug(
        "reused tables: rows are not waited for",
        MANY_REUSED,
        "        wait_all(flags, READY, epoch, error, budget_ns, R, LANES)\n\n",
        "\n",
    ),
    Bug(
        "the lists of a neighbour",
        ONE,
        "first = my_rank.to(tl.int64) * max_tokens * K",
        "first = (1 - my_rank).to(tl.int64) * max_tokens * K",
    ),
    Bug(
        "ids beyond the experts are kept",
        Calls(Sizes(2, 12, 3, 6, 16), True),
        "(expert >= 0) & (expert < num_experts), expert, -1)",
        "(expert >= 0) & (expert < num_experts), expert, 2)",
    ),
    Bug(
        "later blocks of the lists are left out",
        TWO_LOOKS,
        "range(pid + programs, tl.cdiv(n * K, BLOCK), programs)",
        "range(pid + programs, programs, programs)",
    ),
    Bug(
        "every block of the lists is the first",
        TWO_LOOKS,
        "weight = _load_lists(index, weights, n, block, num",
        "weight = _load_lists(index, weights, n, pid, num",
    ),
    Bug(
        "last columns of a row are not staged",
        LONG_ROWS,
        "tl.static_range((num_groups + GROUPS - 1) // GROUPS)",
        "tl.static_range(num_groups // GROUPS)",
    ),
    Bug(
        "last columns of a long row are not staged",
        Calls(Sizes(2, 2, 1, 2, 4112), False, "DC", counts=[[2, 2]]),
        "tl.static_range(0, num_groups, GROUPS)",
        "tl.static_range(0, num_groups - 1, GROUPS)",
    ),
    Bug(
        "a token's first pieces are the program's first",
        Calls(LONG_ROWS.sizes, True, "DC", 1),
        "            if t != pid:\n",
        "            if t < pid:\n",
    ),
    Bug(
        "scale of the codes is not the scale that is sent",
        ONE_FP8,
        "(value * tl.div_rn(1.0, scale)[:, None])",
        "(value * tl.div_rn(2.0, scale)[:, None])",
    ),
    # the table
    Bug("rows of earlier ranks are not counted", ONE, "end = source * max_tokens + first", "end = first"),
    Bug(
        "tokens that are not there are counted",
        ONE,
        "return expert, token < count",
        "return expert, token < max_tokens",
    ),
    Bug("the halves of a histogram", ONE, "[:, None] == 0, both, 0)", "[:, None] == 1, both, 0)"),
    Bug("the next look is the same", TWO_LOOKS, "start + BLOCK, my_rank", "start, my_rank"),
    Bug(
        "rows of later tokens are counted",
        MANY,
        "tl.where((row < chunk)[:, None], count, 0)",
        "tl.where((row <= chunk)[:, None], count, 0)",
    ),
    Bug("chunks of another source", MANY, "source * per_rank + turn // R, BINS, 64)", "source + turn // R, BINS, 64)"),
    Bug(
        "a chunk's end is the rank's",
        MANY,
        "        end = tl.minimum(first + CHUNK, count_of(flags, source, max_tokens))\n        count =",
        "        end = count_of(flags, source, max_tokens)\n        count =",
    ),
    Bug("the first look is the second", TWO_LOOKS, LOOK + "    return", LOOK.replace("0", "BLOCK") + "    return"),
    Bug("the first look is the second, beside reads", ONE, LOOK + " " * 12, LOOK.replace("0", "BLOCK") + " " * 12),
    Bug("the next look is the same, beside reads", EARLY_LOOKS, "start + BLOCK, my_rank", "start, my_rank"),
    Bug(
        "rows of a pair count itself",
        ONE,
        "(tl.cumsum(hit, 0) - 1 + next_row[None, :])",
        "(tl.cumsum(hit, 0) + next_row[None, :])",
    ),
    Bug(
        "the next part starts anew",
        Calls(Sizes(2, 12, 8, 300, 16), True, "DC"),
        "        next_row += tl.sum(hit, 0)\n",
        "",
    ),
    Bug(
        "experts start where the last ended",
        ONE,
        "blocks = (total + (ALIGN - 1)) // ALIGN\n",
        "blocks = total // ALIGN\n",
    ),
    Bug("pairs of others get a row", ONE, "tl.where(mine, row, tl.where(", "tl.where(mask, row, tl.where("),
    Bug("pairs of no expert are another rank's", ONE, "tl.where(elsewhere, ELSEWHERE, NOWHERE)", "ELSEWHERE"),
    Bug("pairs of other ranks are nobody's", ONE, "tl.where(elsewhere, ELSEWHERE, NOWHERE)", "NOWHERE"),
    Bug("pairs of no expert have one", ONE, "elsewhere = named & (mine == 0)", "elsewhere = mine == 0"),
    Bug(
        "slots beyond K",
        ONE,
        "mask = (token < end) & (slot < K)\n        expert, mine, named, place",
        "mask = token < end\n        expert, mine, named, place",
    ),
    Bug("rows beyond the capacity", overflow, "mine = mine & (row < capacity)", "mine = mine & (row < capacity + 128)"),
    Bug("counts beyond the capacity", overflow, "tl.maximum(tl.minimum(total, capacity - starts), 0)", "total"),
    Bug("overflow is not reported", overflow, "if needed > capacity:", "if needed > capacity + 128:"),
    Bug("sizes of the rows that do not fit", overflow, "tl.minimum(needed, capacity)", "needed"),
    # rows
    Bug(
        "token of another rank",
        ONE,
        "source = peer(words, delta, 4) + token.to(tl.int64) * WORDS",
        "source = words + token.to(tl.int64) * WORDS",
    ),
    Bug("rows only for the last slot", MANY, "last = tl.maximum(last, row)", "last = row"),
    Bug("rows that are read ahead only for the last slot", ONE, "needed = needed | (", "needed = ("),
    Bug("rows that are read ahead for experts of others", ONE, "(expert >= 0) & (expert < LOCAL))", "(expert < 0))"),
    Bug("rows that are read ahead are one's own", ONE, READ_AHEAD, READ_AHEAD.replace("source", "my_rank")),
    Bug("scales that are read ahead are one's own", ONE_FP8, *SCALES_AHEAD),
    Bug("scales are one's own", MANY_FP8, *SCALES),
    Bug(
        "rows that are read ahead are the first chunk's",
        ONE,
        "token = first + tl.arange(0, ROWS)",
        "token = tl.arange(0, ROWS)",
    ),
    Bug("slots in turns", NARROW, KEPT + "row", KEPT.replace("rows[k]", "rows[0]") + "row"),
    Bug("scales of the first slot", NARROW, KEPT + "group", KEPT.replace("rows[k]", "rows[0]") + "group"),
    Bug(
        "columns of the first piece only",
        Calls(LONG_ROWS.sizes, False, "DC"),
        "for c in range(0, WORDS, COLS):\n            value",
        "for c in range(0, COLS, COLS):\n            value",
    ),
    Bug(
        "scales of another token",
        ONE_FP8,
        "source = peer(scales, delta, 4) + token.to(tl.int64) * SCALES",
        "source = peer(scales, delta, 4) + token.to(tl.int64)",
    ),
    Bug(
        "scales not transposed",
        ONE_FP8,
        "* scale_stride + row[:, None]\n        tl.store(out_scales + place, value",
        "+ row[:, None] * SCALES\n        tl.store(out_scales + place, value",
    ),
    Bug("padding from the wrong row", ONE, "starts + total, 0), 0)", "starts + total + 1, 0), 0)"),
    Bug(
        "padding of one expert is left",
        ONE,
        "for expert in range(tl.program_id(0), LOCAL, tl.num_programs(0)):",
        "for expert in range(tl.program_id(0), LOCAL - 1, tl.num_programs(0)):",
    ),
    Bug(
        "padding of the weights is left",
        ONE,
        "tl.store(row_weights + row, tl.zeros([ROWS], tl.float32), mask=mask)",
        "pass",
    ),
    Bug(
        "padding of scales is left",
        ONE_FP8,
        "                if SCALES > 0:\n                    group",
        "                if SCALES > 1000:\n                    group",
    ),
    Bug(
        "reused tables: no padding",
        REUSED,
        "total = tl.load(counts + bins, mask=bins < LOCAL, other=0).to(tl.int32)",
        "total = tl.zeros([BINS], tl.int32)",
    ),
    Bug("the end of a dispatch is not counted", ONE, "    end_program(state + DISPATCHES)\n", ""),
]


@pytest.mark.parametrize(
    "case",
    [ONE, ONE_FP8, MANY, MANY_FP8, REUSED, MANY_REUSED, DISPATCHES, MANY_DISPATCHES, SHOWN, COMBINES, LONG_ROWS, NARROW]
    + [TWO_LOOKS, EARLY_LOOKS, overflow, missing],
    ids=range(16),
)
def test_cases_pass_without_a_bug(case):
    for policy, seed in SCHEDULES:
        case(triton_dispatch, policy, seed)


@pytest.mark.parametrize("bug", DISPATCH_BUGS, ids=str)
def test_bug_of_the_dispatch_is_caught(bug):
    assert_caught(triton_dispatch, bug, helpers=(triton_flags, triton_rows))
