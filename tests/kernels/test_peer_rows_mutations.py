"""Planted bugs in the kernels that move rows between ranks: the simulator's reports, or a wrong result, show each."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
pytest.importorskip("greenlet")

from dataclasses import replace  # noqa: E402

import torch  # noqa: E402

from megamoe.kernels import flag_words, peer_rows, triton_combine, triton_dispatch, triton_flags  # noqa: E402
from tests.support.exchange_sim import (  # noqa: E402
    Sizes,
    World,
    add_combine,
    add_dispatch,
    check_combine,
    check_dispatch,
    check_returned_weights,
    expert_results,
    make_tokens,
)
from tests.support.gluon_sim.mutation import SCHEDULES, Bug, assert_caught  # noqa: E402

BF16 = Sizes(2, 12, 3, 6, 272)
FP8 = Sizes(3, 12, 2, 6, 272, fp8=True)


class Calls:
    """Dispatches and combines, one after another, by the kernels of a module."""

    def __init__(self, sizes: Sizes, fused: bool, calls: int = 3, reuse: bool = False, combines: int = 1):
        self.sizes, self.fused, self.calls, self.reuse, self.combines = sizes, fused, calls, reuse, combines

    def __call__(self, module, policy: str, seed: int) -> None:
        torch.manual_seed(seed)
        patch = pytest.MonkeyPatch()
        patch.setattr(peer_rows, module.__name__.rpartition(".")[2], module)
        if not self.fused:
            patch.setattr(peer_rows, "FUSED_ENTRIES", 0)
            patch.setattr(peer_rows, "FUSED_BYTES", 0)
        try:
            self._run(policy, seed)
        finally:
            patch.undo()

    def _run(self, policy: str, seed: int) -> None:
        sizes = self.sizes
        world, done = World(sizes), []
        for call in range(self.calls):
            full = [sizes.tokens, 1, 9] if call % 2 == 0 else [9, sizes.tokens, 0]
            tokens = make_tokens(sizes, full[: sizes.ranks], "holes" if call == 1 else "random")
            add_dispatch(world, tokens, move=not self.reuse)
            if self.reuse:
                add_dispatch(world, tokens, reuse=True)
            for _ in range(self.combines):
                tokens = [replace(mine) for mine in tokens]
                rows = expert_results(world, tokens)
                add_combine(world, tokens, rows, [mine.table.row_weights for mine in tokens])
                done.append((tokens, rows))
        world.run(policy, seed)
        assert not any(any(error) for error in world.errors)
        for tokens, rows in done:
            check_dispatch(world, tokens)
            check_combine(world, tokens, rows)
            check_returned_weights(world, tokens)


ONE = Calls(BF16, True)
ONE_FP8 = Calls(FP8, True)
MANY = Calls(BF16, False)
MANY_FP8 = Calls(FP8, False)
REUSED = Calls(BF16, True, 2, reuse=True)
MANY_REUSED = Calls(BF16, False, 2, reuse=True)
# A combine waits for all that a dispatch must wait for, and the other way round: so several of a kind in a row.
COMBINES = Calls(BF16, False, 2, combines=2)
LONG_ROWS = Calls(Sizes(2, 8, 1, 2, 2064), True, 1)


def overflow(module, policy: str, seed: int) -> None:
    """More rows than fit: the rest stays within bounds, and is reported."""
    torch.manual_seed(seed)
    patch = pytest.MonkeyPatch()
    patch.setattr(peer_rows, module.__name__.rpartition(".")[2], module)
    try:
        world = World(BF16)
        tokens = make_tokens(BF16, [12, 12])
        for mine in tokens:
            mine.index[:] = torch.tensor([0, 1, 4])
        add_dispatch(world, tokens, capacity=128)
        world.run(policy, seed)
    finally:
        patch.undo()
    assert [error[:3] for error in world.errors] == [[flag_words.CAPACITY, 256, 128], [0, 0, 0]]
    assert tokens[0].table.counts.tolist() == [24, 0, 0] and int(tokens[0].table.sizes[0]) == 128
    assert tokens[0].table.pair_to_row[:, :12].max() < 128


def missing(module, policy: str, seed: int) -> None:
    """A rank that does not come is given up on, and named."""
    torch.manual_seed(seed)
    patch = pytest.MonkeyPatch()
    patch.setattr(peer_rows, module.__name__.rpartition(".")[2], module)
    try:
        world = World(FP8)
        add_dispatch(world, make_tokens(FP8, [3, 3, 3]), ranks=[0, 2])
        world.run_until_given_up(seed)
    finally:
        patch.undo()
    assert world.errors == [[flag_words.READY + 1, 1, 1, 0], [0, 0, 0, 0], [flag_words.READY + 1, 1, 1, 0]]


DISPATCH_BUGS = [
    # flags
    Bug(
        "no barrier before a flag is raised",
        ONE,
        '''    """Raise my flag at every rank, after all that this program's threads did before."""
    tl.debug_barrier()
''',
        '''    """Raise my flag at every rank, after all that this program's threads did before."""
''',
    ),
    Bug("flag raised without release", ONE, "st.release.sys.global.b64", "st.relaxed.sys.global.b64"),
    Bug("flag released to the own GPU only", ONE, "st.release.sys.global.b64", "st.release.gpu.global.b64"),
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
        ONE_FP8,
        "(KIND * KIND_WORDS + my_rank * LINE_WORDS)",
        "(KIND * KIND_WORDS + my_rank // 2 * LINE_WORDS)",
    ),
    Bug(
        "count told to oneself only",
        ONE,
        "pointers = peer(flags, tl.load(deltas + _ranks(RANKS, LANES)), 8) + (COUNT",
        "pointers = peer(flags, tl.load(deltas + _ranks(RANKS, LANES)) * 0, 8) + (COUNT",
    ),
    Bug("programs do not wait for each other", ONE, "== participants - 1", "== 0"),
    Bug(
        "ticket without order",
        ONE,
        'tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu")',
        'tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu")',
    ),
    Bug(
        "ticket before the others of the program are done",
        ONE,
        "    tl.debug_barrier()\n    last =",
        "    last =",
    ),
    Bug("programs that stage are not all waited for", ONE, "if participants > 1:", "if participants > 2:"),
    Bug("ticket is not given back", ONE, "        tl.store(ticket, 0)\n", "        pass\n"),
    Bug("no limit to a wait", missing, "& (waited <= budget)", "& (waited >= 0)"),
    Bug(
        "the wrong rank is blamed",
        missing,
        "tl.where(seen < epoch, rank, RANKS)",
        "tl.where(seen < epoch, rank + 1, RANKS)",
    ),
    # inputs
    Bug(
        "inputs overwritten while others read",
        MANY_REUSED,
        "    wait_all(flags, PULLED, epoch - 1, error, budget_ns, R, LANES)\n",
        "",
    ),
    Bug(
        "waits for an older dispatch to be read",
        MANY_REUSED,
        "wait_all(flags, PULLED, epoch - 1,",
        "wait_all(flags, PULLED, epoch - 2,",
    ),
    Bug(
        "inputs announced before they are there",
        MANY,
        "publish(flags, deltas, READY, epoch, my_rank, R, LANES)\n    wait_all(flags, READY, epoch, error, budget_ns, "
        "R, LANES)\n    per_rank",
        "publish(flags, deltas, READY, epoch + 1, my_rank, R, LANES)\n    wait_all(flags, READY, epoch, error, "
        "budget_ns, R, LANES)\n    per_rank",
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
        "            publish(flags, deltas, READY, epoch, my_rank, R, LANES)\n    wait_all(flags, READY, epoch, error, "
        "budget_ns, R, LANES)\n",
        "            publish(flags, deltas, READY, epoch, my_rank, R, LANES)\n",
    ),
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
        "last columns of a row are not staged",
        LONG_ROWS,
        "num_groups: tl.constexpr = (H + 127) // 128",
        "num_groups: tl.constexpr = H // 128",
    ),
    Bug(
        "scale of the codes is not the scale that is sent",
        ONE_FP8,
        "(value * tl.div_rn(1.0, scale)[:, None])",
        "(value * tl.div_rn(2.0, scale)[:, None])",
    ),
    # the table
    Bug("rows of earlier ranks are not counted", ONE, "(place < source * max_tokens + first)", "(place < first)"),
    Bug("tokens that are not there are counted", ONE, "mine = (token < count) & (expert >= 0)", "mine = (expert >= 0)"),
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
    Bug(
        "rows of a pair count itself",
        ONE,
        "(tl.cumsum(hit, 0) - 1 + next_row[None, :])",
        "(tl.cumsum(hit, 0) + next_row[None, :])",
    ),
    Bug(
        "the next part starts anew",
        Calls(Sizes(2, 12, 8, 300, 16), True, 1),
        "        next_row += tl.sum(hit, 0)\n",
        "",
    ),
    Bug(
        "experts start where the last ended",
        ONE,
        "blocks = (total + (ALIGN - 1)) // ALIGN\n",
        "blocks = total // ALIGN\n",
    ),
    Bug("pairs of others get a row", ONE, "tl.where(mine, row, -1)", "row"),
    Bug(
        "slots beyond K",
        ONE,
        "mask = (token < end) & (slot < K)\n        expert, mine, place",
        "mask = token < end\n        expert, mine, place",
    ),
    Bug("rows beyond the capacity", overflow, "mine = mine & (row < capacity)", "mine = mine & (row < capacity + 128)"),
    Bug("counts beyond the capacity", overflow, "tl.maximum(tl.minimum(total, capacity - starts), 0)", "total"),
    Bug("overflow is not reported", overflow, "if needed > capacity:", "if needed > capacity + 128:"),
    Bug("sizes of the rows that do not fit", overflow, "tl.minimum(needed, capacity)", "needed"),
    # rows
    Bug(
        "token of another rank",
        ONE,
        "source = peer(words, delta, 4) + token64 * WORDS",
        "source = words + token64 * WORDS",
    ),
    Bug("rows only for the last slot", ONE, "last = tl.maximum(last, tl.load(", "last = tl.minimum(last, tl.load("),
    Bug(
        "columns of the first piece only",
        LONG_ROWS,
        "for c in range(0, WORDS, COLS):\n            col = c + tl.arange(0, COLS)\n            inside = (col",
        "for c in range(0, COLS, COLS):\n            col = c + tl.arange(0, COLS)\n            inside = (col",
    ),
    Bug(
        "scales of another token",
        ONE_FP8,
        "source = peer(scales, delta, 4) + token64 * SCALES",
        "source = peer(scales, delta, 4) + token64",
    ),
    Bug(
        "scales not transposed",
        ONE_FP8,
        "* scale_stride + row[:, None]\n                tl.store(out_scales + place, value",
        "+ row[:, None] * SCALES\n                tl.store(out_scales + place, value",
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
    Bug(
        "a dispatch is told to have ended before it has",
        MANY_REUSED,
        "epochs_ended(state + DISPATCHES), my_rank",
        "epochs_ended(state + DISPATCHES) + 1, my_rank",
    ),
    Bug(
        "reads are not told",
        MANY_REUSED,
        "    publish(flags, deltas, PULLED, epochs_ended(state + DISPATCHES), my_rank, RANKS, LANES)\n",
        "",
    ),
]

COMBINE_BUGS = [
    Bug(
        "slots overwritten while they are summed",
        COMBINES,
        "        wait_all(flags, REDUCED, epoch - 1, error, budget_ns, R, LANES)\n",
        "",
    ),
    Bug(
        "results are not waited for",
        MANY,
        "        wait_all(flags, SCATTERED, epoch, error, budget_ns, R, LANES)\n",
        "",
    ),
    Bug(
        "results are not told",
        ONE,
        "tl.num_programs(0)):\n            publish(flags, deltas, SCATTERED, epoch, my_rank, R, LANES)\n",
        "tl.num_programs(0)):\n            pass\n",
    ),
    Bug(
        "sums are not told",
        COMBINES,
        "    publish(flags, deltas, REDUCED, epochs_ended(state + COMBINES), my_rank, RANKS, LANES)\n",
        "",
    ),
    Bug(
        "a combine is told to have ended before it has",
        COMBINES,
        "epochs_ended(state + COMBINES), my_rank",
        "epochs_ended(state + COMBINES) + 1, my_rank",
    ),
    Bug("the end of a combine is not counted", ONE, "        end_program(state + COMBINES)\n", "        pass\n"),
    Bug("results into my own slots", ONE, "target = peer(slots, tl.load(deltas + source), 4)", "target = slots"),
    Bug(
        "results into the first slot",
        ONE,
        "place = (k * max_tokens.to(tl.int64) + token)[:, None] * WORDS",
        "place = token[:, None] * WORDS",
    ),
    Bug(
        "another rank's tokens",
        ONE_FP8,
        "source = (my_rank + 1 + turn % (R - 1)) % R",
        "source = (my_rank + turn % (R - 1)) % R",
    ),
    Bug("own rows are taken from slots", ONE, "here = expert // LOCAL == my_rank", "here = expert < 0"),
    Bug(
        "slots without an expert are summed",
        ONE,
        "there = (expert >= 0) & (expert < num_experts)\n",
        "there = mask\n",
    ),
    Bug(
        "sums in bf16",
        ONE,
        "total += near.to(tl.float32) + far.to(tl.float32)",
        "total += (near + far).to(tl.bfloat16).to(tl.float32) * 1.01",
    ),
    Bug(
        "weights to the wrong pair",
        ONE,
        "tl.store(peer(slot_weights, tl.load(deltas + source), 4) + pair, value",
        "tl.store(peer(slot_weights, tl.load(deltas + source), 4) + pair // K * K, value",
    ),
    Bug(
        "weights of nothing",
        ONE,
        "tl.load(slot_weights + pair, mask=sent, other=0.0)",
        "tl.load(slot_weights + pair, mask=mask, other=0.0)",
    ),
]


@pytest.mark.parametrize(
    "case", [ONE, ONE_FP8, MANY, MANY_FP8, REUSED, MANY_REUSED, COMBINES, LONG_ROWS, overflow, missing], ids=range(10)
)
def test_cases_pass_without_a_bug(case):
    for policy, seed in SCHEDULES:
        case(triton_dispatch, policy, seed)


@pytest.mark.parametrize("bug", DISPATCH_BUGS, ids=str)
def test_bug_of_the_dispatch_is_caught(bug):
    assert_caught(triton_dispatch, bug, helpers=(triton_flags,))


@pytest.mark.parametrize("bug", COMBINE_BUGS, ids=str)
def test_bug_of_the_combine_is_caught(bug):
    assert_caught(triton_combine, bug, helpers=(triton_flags,))
