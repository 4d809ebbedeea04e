"""Planted bugs in the combine between ranks: the simulator's reports, or a wrong result, show each."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
pytest.importorskip("greenlet")

from megamoe.kernels import flag_words, triton_combine, triton_flags  # noqa: E402
from tests.support.exchange_cases import BF16, FP8, TELL, UNSEEN, WAIT, Calls, planted  # noqa: E402
from tests.support.exchange_sim import Sizes, World, add_combine, add_movements, expert_results  # noqa: E402
from tests.support.gluon_sim.mutation import SCHEDULES, Bug, assert_caught  # noqa: E402


def half_missing(module, policy: str, seed: int) -> None:
    """A rank that has not come to the second combine, whose first ended in steps."""
    with planted(module, seed, False):
        world = World(BF16)
        done = add_movements(world, "TCD", [[12, 12]], ("random",), zero_padding=False)
        world.run(policy, seed)
        add_combine(world, done[-1].tokens, expert_results(world, done[-1].tokens), ranks=[0])
        world.run_until_given_up(seed)
    assert world.errors == [[flag_words.SCATTERED + 1, 1, 2, 1], [0, 0, 0, 0]]


def combines(sizes: Sizes, few: bool, movements: str = "TC", sms: int = 2, counts=None, routings=("holes",)) -> Calls:
    """Most tables are made by the host: the dispatch has a suite of its own."""
    return Calls(sizes, few, movements, sms, counts, routings, zero_padding=False)


MIXED = ("random", "holes")
ONE = combines(BF16, True)
THREE = combines(FP8, True, counts=[[12, 1, 9]])
IN_TURNS = combines(BF16, True, "TCDC", routings=MIXED)
REUSED = combines(BF16, True, "PRCPRC", routings=MIXED)
# Only a combine has shown that the first dispatch has ended.
SHOWN = combines(BF16, True, "TCDD", counts=[[12, 12]], routings=MIXED)
IN_A_ROW = combines(BF16, True, "TTCCC", counts=[[12, 12]], routings=MIXED)
LONG = combines(Sizes(2, 2, 8, 8, 8208), True)
# More tokens than steps, several programs that write, several that begin to sum.
STEPS = combines(Sizes(2, 21, 3, 6, 80), False, "TTCCDC", 4, [[21, 9], [20, 21], [1, 21]], MIXED)
WIDE_STEPS = combines(Sizes(3, 21, 2, 6, 80), False, "TCC", 6, [[21, 0, 13]])
# The first step ends a token before the first tokens that are summed.
BORDER = combines(Sizes(2, 12, 3, 6, 80), False, "TCC", counts=[[12, 12]], routings=MIXED)
# The last step has tokens.
FULL = combines(Sizes(2, 64, 1, 2, 16), False, counts=[[64, 64]], routings=MIXED)

SEE_DISPATCHES = "tl.store(state + DISPATCHES_SEEN, dispatches"
ANNOUNCE = "publish(flags, everyone, SCATTERED, _announced(epoch, step, STEPS), my_rank, LANES)"
ALL_THERE = "        wait_all(flags, SCATTERED, _announced(epoch, 0, 1), error, budget_ns, R, LANES)\n"
FIRST_STEP = (
    "        wait_all(flags, SCATTERED, _announced(epoch, step, STEPS), error, budget_ns, R, LANES)\n        first"
)
NEXT_STEP = "                wait_all(flags, SCATTERED, _announced(epoch, step, STEPS), error, budget_ns, R, LANES)\n"
TAKE = 'first = tl.atomic_add(state + NEXT_TOKENS, SUM_TOKENS, sem="relaxed", scope="gpu").to(tl.int32)'
RESET = "tl.store(state + NEXT_TOKENS, tl.zeros([], tl.int64))"

NEXT_UNIT = "source, token, piece, rows_0, values = source_1"
READ_COLUMNS = "    col = piece * COLS + tl.arange(0, COLS)\n    values = ()"
WRITE_COLUMNS = "    col = piece * COLS + tl.arange(0, COLS)\n    target ="
SHARE = 'mask=tl.arange(0, LANES) < R, sem="release", scope="sys"'
FIRST_SUM = "total += values[k].to(tl.float32)"
WRITE_AFTER_THE_WAIT = (
    ALL_THERE.replace("        wait", "            wait")
    + "            for turn in tl.static_range(AHEAD):\n                _write_sum("
)
ADDED = "peer(flags, everyone, 8) + (KIND * KIND_WORDS + my_rank * LINE_WORDS)\n    shares"

COMBINE_BUGS = [
    # two combines in a row
    Bug("slots overwritten while they are summed", IN_A_ROW, WAIT, ""),
    Bug("slots overwritten while they are summed in steps", STEPS, WAIT, ""),
    Bug("waits for an older combine to be summed", IN_A_ROW, WAIT, WAIT.replace("ended,", "ended - 1,")),
    Bug("a wait is left out", IN_A_ROW, UNSEEN, UNSEEN.replace("ended", "ended - 1")),
    Bug("a wait is left out where there are steps", STEPS, UNSEEN, UNSEEN.replace("ended", "ended - 1")),
    Bug("a wait that is not needed", IN_TURNS, UNSEEN, "if True:"),
    Bug("more is told than has ended", IN_A_ROW, TELL, TELL.replace("ended", "ended + 1")),
    Bug("nobody tells", IN_A_ROW, "REDUCED, epoch - 1, 0, flags", "REDUCED, epoch - 1, -1, flags"),
    Bug("flags of the wrong kind", IN_A_ROW, "COMBINES_SEEN, REDUCED, epoch", "COMBINES_SEEN, SCATTERED, epoch"),
    Bug("dispatches are taken for combines", IN_A_ROW, "COMBINES_SEEN, REDUCED,", "DISPATCHES_SEEN, REDUCED,"),
    Bug("more dispatches are seen than there were", SHOWN, SEE_DISPATCHES, SEE_DISPATCHES + " + 1"),
    Bug("dispatches that have ended are not seen", ONE, SEE_DISPATCHES, SEE_DISPATCHES + " * 0"),
    Bug(
        "combines are seen as dispatches",
        REUSED,
        "dispatches = epochs_ended(state + DISPATCHES)",
        "dispatches = epochs_ended(state + COMBINES)",
    ),
    Bug("no program sees", ONE, "    if pid == programs - 1:\n", "    if pid == programs:\n"),
    # announcing
    Bug("results are not waited for", ONE, ALL_THERE, ""),
    Bug("results of the combine before are waited for", ONE, ALL_THERE, ALL_THERE.replace("epoch, 0", "epoch - 1, 0")),
    Bug(
        "results are not told",
        ONE,
        "arrive(flags, everyone, SCATTERED, SCATTERED_STEPS, pushers, my_rank, R, LANES)",
        "pass",
    ),
    Bug("steps are not told", STEPS, ANNOUNCE, "pass"),
    Bug("results are announced a step early", STEPS, ANNOUNCE, ANNOUNCE.replace("step, S", "step + 1, S")),
    Bug("results are announced a step late", FULL, ANNOUNCE, ANNOUNCE.replace("step, S", "step - 1, S")),
    Bug("all steps are announced as the last", STEPS, ANNOUNCE, ANNOUNCE.replace("step, S", "STEPS - 1, S")),
    Bug("steps reach into the next combine", STEPS, "(epoch - 1) * SCATTERED_STEPS", "(epoch - 1)"),
    Bug("each step counts as all", STEPS, "(step + 1) * (SCATTERED_STEPS // STEPS)", "(step + 1) * SCATTERED_STEPS"),
    Bug("the last step leaves tokens out", STEPS, "left = STEPS - 1 - step", "left = STEPS + 1 - step"),
    Bug(
        "writers leave out the last token of a step",
        STEPS,
        "while unit < end * (PIECES",
        "while unit < (end - 1) * (PIECES",
    ),
    Bug("writers begin anew in every step", STEPS, "            first = end\n", "            pass\n"),
    Bug("writers leave out a token", STEPS, "            first = end\n", "            first = end + 1\n"),
    Bug("tickets of a step are those of all", STEPS, "SCATTERED_TICKETS + step, pushers", "SCATTERED_TICKETS, pushers"),
    Bug("tickets are not given back", STEPS, "        tl.store(ticket, 0)\n", "        pass\n"),
    Bug("one writer fewer is waited for", STEPS, "+ step, pushers)", "+ step, pushers - 1)"),
    Bug("all programs are waited for", STEPS, "+ step, pushers)", "+ step, programs)"),
    Bug("one program more writes", STEPS, "and pid < pushers:", "and pid <= pushers:"),
    Bug("one program fewer writes", STEPS, "and pid < pushers:", "and pid < pushers - 1:"),
    # steps of the sums
    Bug("the first step is not waited for", STEPS, FIRST_STEP, "        first"),
    Bug("the first step is waited for only", STEPS, NEXT_STEP + "            if MOVE", "            if MOVE"),
    Bug("sums wait for a step too early", STEPS, NEXT_STEP, NEXT_STEP.replace("step, S", "step - 1, S")),
    Bug("sums go by their first token", STEPS, "if end < last:", "if end < first:"),
    Bug("sums go by one token more than there is", BORDER, "if end < last:", "if end < last - 1:"),
    Bug(
        "sums end a step late",
        STEPS,
        "end = _end_of(step, most, STEPS)\n        wait_all",
        "end = most\n        wait_all",
    ),
    Bug(
        "tokens of this rank only",
        STEPS,
        "most = tl.maximum(most, tl.load(sizes + 1 + r))",
        "most = tl.load(sizes + 1 + r)",
    ),
    Bug(
        "tokens are not counted",
        STEPS,
        TAKE.replace("first =", "            first ="),
        "            first += SUM_TOKENS",
    ),
    Bug(
        "tokens are taken twice",
        STEPS,
        "        " + TAKE + "\n        while",
        "        " + TAKE.replace("SUM_TOKENS", "1") + "\n        while",
    ),
    Bug(
        "tokens are left out",
        STEPS,
        "        " + TAKE + "\n        while",
        "        " + TAKE.replace("SUM_TOKENS", "SUM_TOKENS + 1") + "\n        while",
    ),
    Bug("the counter is kept", STEPS, RESET, "pass"),
    Bug("the counter is reset by the first to end", STEPS, "if is_last(state + SUMMED_TICKET, programs):", "if True:"),
    Bug("the counter is reset by the last writer", STEPS, "SUMMED_TICKET, programs):", "SUMMED_TICKET, pushers):"),
    Bug("the counter is never reset", STEPS, "SUMMED_TICKET, programs):", "SUMMED_TICKET, programs + 1):"),
    Bug("steps are reported as combines", half_missing, "(awaited + (STEPS - 1)) // STEPS", "awaited"),
    Bug("what was seen is reported in steps", half_missing, "seen_of_late // STEPS)", "seen_of_late)"),
    Bug("the end of a combine is not counted", IN_TURNS, "    end_program(state + COMBINES)\n", ""),
    # shares
    Bug(
        "one writer fewer adds its share",
        ONE,
        "SCATTERED_STEPS, pushers, my_rank",
        "SCATTERED_STEPS, pushers - 1, my_rank",
    ),
    Bug(
        "every writer adds all",
        ONE,
        "tl.where(tl.program_id(0) == 0, (epochs",
        "tl.where(tl.program_id(0) >= 0, (epochs",
    ),
    Bug(
        "nobody adds the rest", ONE, "tl.where(tl.program_id(0) == 0, (epochs", "tl.where(tl.program_id(0) < 0, (epochs"
    ),
    Bug("a share before the others of the program are done", ONE, "    tl.debug_barrier()\n    share =", "    share ="),
    Bug("a share without release", ONE, SHARE, SHARE.replace("release", "relaxed")),
    Bug("a share released to the own GPU only", ONE, SHARE, SHARE.replace("sys", "gpu")),
    Bug("two shares for the last rank", THREE, SHARE, SHARE.replace("< R,", "< LANES,")),
    Bug("shares to the rank itself only", ONE, ADDED, ADDED.replace("everyone", "everyone * 0")),
    Bug("a flag of another rank", THREE, ADDED, ADDED.replace("my_rank", "my_rank // 2")),
    Bug(
        "shares of several steps at once",
        STEPS,
        "if STEPS == 1:\n                arrive(flags, everyone, SCATTERED, SCATTERED_STEPS,",
        "if STEPS >= 1:\n                arrive(flags, everyone, SCATTERED, SCATTERED_STEPS // STEPS,",
    ),
    # tickets
    Bug("steps are announced by the first writer", STEPS, "== participants - 1", "== 0"),
    Bug(
        "ticket without order",
        STEPS,
        'tl.atomic_add(ticket, 1, sem="acq_rel"',
        'tl.atomic_add(ticket, 1, sem="relaxed"',
    ),
    Bug("ticket before the others of the program are done", STEPS, "    tl.debug_barrier()\n    last =", "    last ="),
    # writing
    Bug("results into my own slots", ONE, "target = peer(slots, tl.load(deltas + source), 4)", "target = slots"),
    Bug(
        "results into the first slot",
        ONE,
        "place = k * max_tokens.to(tl.int64) * WORDS + col",
        "place = 0 * max_tokens.to(tl.int64) * WORDS + col",
    ),
    Bug(
        "another rank's tokens",
        THREE,
        "source = (my_rank + 1 + turn % (R - 1)) % R",
        "source = (my_rank + turn % (R - 1)) % R",
    ),
    Bug("tokens that are not there", ONE, "tl.where(token < tokens, row, -1)", "row"),
    Bug("columns of the first piece only", LONG, "(WORDS + COLS - 1) // COLS", "1"),
    Bug("a piece is read twice", LONG, READ_COLUMNS, READ_COLUMNS.replace("piece * COLS + ", "")),
    Bug("a piece is written twice", LONG, WRITE_COLUMNS, WRITE_COLUMNS.replace("piece * COLS + ", "")),
    Bug("rows of the unit after are another's", STEPS, "unit + 2 * pushers, units", "unit + pushers, units"),
    Bug("units beyond the last", STEPS, "mask=unit < end, other=-1", "mask=unit >= 0, other=-1"),
    Bug("rows of the unit before", STEPS, NEXT_UNIT, NEXT_UNIT.replace("rows_0,", "_,")),
    Bug("the slots of the unit before", STEPS, NEXT_UNIT, NEXT_UNIT.replace("token,", "_,")),
    Bug("the piece of the unit before", LONG, NEXT_UNIT, NEXT_UNIT.replace("piece,", "_,")),
    Bug("the rank of the unit before", WIDE_STEPS, NEXT_UNIT, NEXT_UNIT.replace("source,", "_,")),
    Bug("values of the unit before", STEPS, NEXT_UNIT, NEXT_UNIT.replace("values =", "_ =")),
    Bug(
        "steps begin at the first token",
        STEPS,
        "        unit = pid\n        for step in range(STEPS):\n",
        "        for step in range(STEPS):\n            unit = pid\n",
    ),
    Bug("programs write by the launch's number", STEPS, "unit += pushers", "unit += programs"),
    Bug(
        "weights to the wrong pair",
        ONE,
        "tl.store(peer(slot_weights, tl.load(deltas + source), 4) + pair, value",
        "tl.store(peer(slot_weights, tl.load(deltas + source), 4) + pair // K * K, value",
    ),
    Bug("weights of the first step only", STEPS, "pair = first * K + (turn", "pair = (turn"),
    Bug(
        "weights of this rank only",
        STEPS,
        "range(tl.program_id(0), R * blocks, pushers)",
        "range(tl.program_id(0), blocks, pushers)",
    ),
    Bug("weights of nothing", ONE, "mask=sent, other=0.0)", "mask=mask, other=0.0)"),
    Bug("weights of the last program's share", ONE, "share = tl.cdiv(n, programs)", "share = n // programs"),
    # sums
    Bug("own rows are taken from slots", ONE, "start = far if FROM_SLOTS else", "start = far if True else"),
    Bug("slots without an expert are summed", ONE, "mask=inside & (row != NOWHERE)", "mask=inside"),
    Bug("slots of other ranks are left out", ONE, "mask=inside & (row != NOWHERE)", "mask=inside & (row >= 0)"),
    Bug(
        "the table of another rank",
        ONE,
        "place = (my_rank.to(tl.int64) * max_tokens",
        "place = ((1 - my_rank).to(tl.int64) * max_tokens",
    ),
    Bug("every token is the first of its group", STEPS, "row = places[t][k]", "row = places[0][k]"),
    Bug("tokens beyond the last", STEPS, "mask=inside & (token < n))", "mask=inside)"),
    Bug(
        "sums in bf16",
        ONE,
        "total += tl.load(start + col, mask=inside & (row != NOWHERE), other=0.0).to(tl.float32)",
        "value = tl.load(start + col, mask=inside & (row != NOWHERE), other=0.0)\n"
        "            total = (total + value).to(tl.bfloat16).to(tl.float32)",
    ),
    Bug("pieces of other columns", LONG, "col = turn % pieces * COLS + tl", "col = tl"),
    Bug(
        "own rows of the first sums are taken from slots",
        ONE,
        "inside & (places[k] == ELSEWHERE)",
        "inside & (places[k] != NOWHERE)",
    ),
    Bug("slots of the first sums are left out", ONE, "inside & (places[k] == ELSEWHERE)", "inside & (token < 0)"),
    Bug("own rows are not kept", ONE, "other=values[k])", "other=0.0)"),
    Bug(
        "slots of the first sums are read before all have written",
        ONE,
        ALL_THERE + "        if MOVE:\n            values = ()\n",
        "        if MOVE:\n            values = ()\n",
        also=(("            for turn in tl.static_range(AHEAD):\n                _write_sum(", WRITE_AFTER_THE_WAIT),),
    ),
    Bug("slots without an expert are the first row", ONE, "mask=inside & (row >= 0), other", "mask=inside, other"),
    Bug("first sums beyond the last token", ONE, "(col < H) & (token < n)\n", "col < H\n"),
    Bug("first sums beyond the last column", ONE, "(col < H) & (token < n)\n", "(col >= 0) & (token < n)\n"),
    Bug(
        "first sums in bf16",
        ONE,
        FIRST_SUM,
        "total = (total + values[k].to(tl.float32)).to(tl.bfloat16).to(tl.float32)",
    ),
    Bug("first sums in turns", LONG, "token = (turn // pieces)", "token = (turn % pieces)"),
    Bug("own rows of another sum", ONE, "near[turn]", "near[0]"),
    Bug("slots of another sum", ONE, "_read_far(pid + turn * programs", "_read_far(pid"),
    Bug("the first sum twice", ONE, "_write_sum(pid + turn * programs", "_write_sum(pid"),
    Bug("a sum is left out", ONE, "range(pid + AHEAD * programs", "range(pid + (AHEAD + 1) * programs"),
]


@pytest.mark.parametrize(
    "case",
    [ONE, THREE, IN_TURNS, REUSED, SHOWN, IN_A_ROW, LONG, STEPS, WIDE_STEPS, BORDER, FULL, half_missing],
    ids=range(12),
)
def test_cases_pass_without_a_bug(case):
    for policy, seed in SCHEDULES:
        case(triton_combine, policy, seed)


@pytest.mark.parametrize("bug", COMBINE_BUGS, ids=str)
def test_bug_of_the_combine_is_caught(bug):
    assert_caught(triton_combine, bug, helpers=(triton_flags,))
