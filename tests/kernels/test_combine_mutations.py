"""Planted bugs in the combine between ranks: the simulator's reports, or a wrong result, show each."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
pytest.importorskip("greenlet")

from megamoe.kernels import flag_words, triton_combine, triton_flags  # noqa: E402
from tests.support.exchange_cases import (  # noqa: E402
    BF16,
    COMBINES,
    LONG_COMBINE,
    ONE,
    ONE_FP8,
    REUSED,
    SHOWN,
    STEPS,
    TELL,
    UNSEEN,
    WAIT,
    WIDE_STEPS,
    Calls,
    planted,
)
from tests.support.exchange_sim import Sizes, World, add_combine, add_movements, expert_results  # noqa: E402
from tests.support.gluon_sim.mutation import SCHEDULES, Bug, assert_caught  # noqa: E402


def half_missing(module, policy: str, seed: int) -> None:
    """A rank that has not come to the second combine, whose first ended in steps."""
    with planted(module, seed, False):
        world = World(BF16)
        done = add_movements(world, "DCD", [[12, 12]], ("random",))
        world.run(policy, seed)
        add_combine(world, done[-1].tokens, expert_results(world, done[-1].tokens), ranks=[0])
        world.run_until_given_up(seed)
    assert world.errors == [[flag_words.SCATTERED + 1, 1, 2, 1], [0, 0, 0, 0]]


# The first step ends a token before the first tokens that are summed.
BORDER = Calls(Sizes(2, 12, 3, 6, 80), False, "DCC", counts=[[12, 12]])

# The last step has tokens.
FULL = Calls(Sizes(2, 64, 1, 2, 16), False, "DC", counts=[[64, 64]])

SEE_DISPATCHES = "tl.store(state + DISPATCHES_SEEN, epochs_ended(state + DISPATCHES)"
ANNOUNCE = "publish(flags, everyone, SCATTERED, _announced(epoch, step, STEPS), my_rank, LANES)"
ALL_THERE = "        wait_all(flags, SCATTERED, _announced(epoch, 0, 1), error, budget_ns, R, LANES)\n"
FIRST_STEP = (
    "        wait_all(flags, SCATTERED, _announced(epoch, step, STEPS), error, budget_ns, R, LANES)\n        first"
)
NEXT_STEP = "                wait_all(flags, SCATTERED, _announced(epoch, step, STEPS), error, budget_ns, R, LANES)\n"
TAKE = 'first = tl.atomic_add(state + NEXT_TOKENS, SUM_TOKENS, sem="relaxed", scope="gpu").to(tl.int32)'
RESET = "tl.store(state + NEXT_TOKENS, tl.zeros([], tl.int64))"

COMBINE_BUGS = [
    # two combines in a row
    Bug("slots overwritten while they are summed", COMBINES, WAIT, ""),
    Bug("slots overwritten while they are summed in steps", STEPS, WAIT, ""),
    Bug("waits for an older combine to be summed", COMBINES, WAIT, WAIT.replace("ended,", "ended - 1,")),
    Bug("a wait is left out", COMBINES, UNSEEN, UNSEEN.replace("ended", "ended - 1")),
    Bug("a wait is left out where there are steps", STEPS, UNSEEN, UNSEEN.replace("ended", "ended - 1")),
    Bug("a wait that is not needed", ONE, UNSEEN, "if True:"),
    Bug("more is told than has ended", COMBINES, TELL, TELL.replace("ended", "ended + 1")),
    Bug("nobody tells", COMBINES, "REDUCED, epoch - 1, 0, flags", "REDUCED, epoch - 1, -1, flags"),
    Bug("flags of the wrong kind", COMBINES, "COMBINES_SEEN, REDUCED, epoch", "COMBINES_SEEN, SCATTERED, epoch"),
    Bug("dispatches are taken for combines", COMBINES, "COMBINES_SEEN, REDUCED,", "DISPATCHES_SEEN, REDUCED,"),
    Bug("more dispatches are seen than there were", SHOWN, SEE_DISPATCHES, SEE_DISPATCHES + " + 1"),
    Bug("dispatches that have ended are not seen", ONE, SEE_DISPATCHES, SEE_DISPATCHES + " * 0"),
    Bug(
        "combines are seen as dispatches",
        REUSED,
        SEE_DISPATCHES,
        SEE_DISPATCHES.replace("+ DISPATCHES)", "+ COMBINES)"),
    ),
    Bug("no program sees", ONE, "    if pid == programs - 1:\n", "    if pid == programs:\n"),
    # announcing
    Bug("results are not waited for", ONE, ALL_THERE, ""),
    Bug("results of the combine before are waited for", ONE, ALL_THERE, ALL_THERE.replace("epoch, 0", "epoch - 1, 0")),
    Bug("results are not told", ONE, ANNOUNCE, "pass"),
    Bug("results are announced before they are there", ONE, ANNOUNCE, ANNOUNCE.replace("step, S", "step + 1, S")),
    Bug("results are announced a step early", STEPS, ANNOUNCE, ANNOUNCE.replace("step, S", "step + 1, S")),
    Bug("results are announced a step late", FULL, ANNOUNCE, ANNOUNCE.replace("step, S", "step - 1, S")),
    Bug("all steps are announced as the last", STEPS, ANNOUNCE, ANNOUNCE.replace("step, S", "STEPS - 1, S")),
    Bug("steps reach into the next combine", STEPS, "(epoch - 1) * SCATTERED_STEPS", "(epoch - 1)"),
    Bug("each step counts as all", STEPS, "(step + 1) * (SCATTERED_STEPS // STEPS)", "(step + 1) * SCATTERED_STEPS"),
    Bug("the last step leaves tokens out", STEPS, "left = STEPS - 1 - step", "left = STEPS + 1 - step"),
    Bug(
        "writers leave out the last token of a step",
        STEPS,
        "(start, end * (R - 1), p",
        "(start, (end - 1) * (R - 1), p",
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
    Bug("steps are reported as combines", half_missing, "(epoch + (STEPS - 1)) // STEPS", "epoch"),
    Bug("what was seen is reported in steps", half_missing, "at_most // STEPS)", "at_most)"),
    Bug("the end of a combine is not counted", ONE, "    end_program(state + COMBINES)\n", ""),
    # writing
    Bug("results into my own slots", ONE, "target = peer(slots, tl.load(deltas + source), 4)", "target = slots"),
    Bug(
        "results into the first slot",
        ONE,
        "place = (slot * max_tokens.to(tl.int64) + token)[:, None] * WORDS",
        "place = (slot * 0 + token)[:, None] * WORDS",
    ),
    Bug(
        "another rank's tokens",
        ONE_FP8,
        "source = (my_rank + 1 + turn % (R - 1)) % R",
        "source = (my_rank + turn % (R - 1)) % R",
    ),
    Bug("tokens that are not there", ONE, "(slot < K) & (token < tl.load(sizes + 1 + source))", "(slot < K)"),
    Bug("columns of the first piece only", LONG_COMBINE, "c in range(0, WORDS, COLS)", "c in range(0, COLS, COLS)"),
    Bug("the next token's rows are the next program's", STEPS, "tl.minimum(turn + pushers,", "tl.minimum(turn + 1,"),
    Bug("rows of the token before", STEPS, "source, token, row = following", "source, token, _ = following"),
    Bug("the slots of the token before", STEPS, "source, token, row = following", "source, _, row = following"),
    Bug("the rank of the token before", WIDE_STEPS, "source, token, row = following", "_, token, row = following"),
    Bug("the last turn is the one before", ONE, "end * (R - 1) - 1)", "end * (R - 1) - 2)"),
    Bug("steps begin at the first token", STEPS, "start = first * (R - 1) + tl", "start = tl"),
    Bug(
        "programs write by the launch's number", STEPS, "end * (R - 1), pushers)", "end * (R - 1), tl.num_programs(0))"
    ),
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
    Bug("pieces of other columns", LONG_COMBINE, "col = piece * COLS + tl", "col = tl"),
]


@pytest.mark.parametrize(
    "case", [ONE, ONE_FP8, REUSED, SHOWN, COMBINES, STEPS, WIDE_STEPS, LONG_COMBINE, half_missing], ids=range(9)
)
def test_cases_pass_without_a_bug(case):
    for policy, seed in SCHEDULES:
        case(triton_combine, policy, seed)


@pytest.mark.parametrize("bug", COMBINE_BUGS, ids=str)
def test_bug_of_the_combine_is_caught(bug):
    assert_caught(triton_combine, bug, helpers=(triton_flags,))
