"""Planted bugs in Hopper's GEMM kernels: the simulator's reports, or a wrong result, show each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

import torch  # noqa: E402

from megamoe.kernels.gluon import pieces, schedule  # noqa: E402
from megamoe.kernels.tiles import Tile  # noqa: E402
from tests.support.gemm_cases import Case  # noqa: E402
from tests.support.gemm_sim import Run  # noqa: E402
from tests.support.gluon_sim.mutation import SCHEDULES, Bug, assert_caught  # noqa: E402

HELPERS = (schedule, pieces)

RAGGED = (100, 0, 200)
WIDE = Tile(128, 256, 3, 2)
TWO_STAGES = Tile(128, 256, 2, 2)
NARROW = Tile(128, 192, 3, 2)
PAIRS = Tile(128, 256, 4, 2, together=2)
BF16 = Tile(128, 256, 3, 2, skew=2)
BF16_PAIRS = Tile(128, 256, 4, 2, together=2, skew=2)
FP32 = dict(out_dtype=torch.float32)

# ---------------------------------------------------------------- what shows the bugs

FP8_PSUM = Run(Case(RAGGED, 512, 384), WIDE)
FP8_PAIRS = Run(Case((100, 130), 256, 384), PAIRS, sms=1)
FP8_TAILS = Run(Case((100, 1, 130), 264, 208), TWO_STAGES)
FP8_MASKED = Run(Case((0, 130, 1), 256, 256, "masked", 140), WIDE)
FP8_BANDS = Run(Case((0, 300), 512, 128), WIDE)
FP8_HALF = Run(Case((100, 64, 1, 70), 256, 384), WIDE, sms=1)
FP8_NARROW = Run(Case(RAGGED, 456, 256, bias=True), NARROW)
FP8_ADD = Run(Case((150,), 264, 256, "dense", accumulate=True, **FP32), WIDE)
FP8_BIAS = Run(Case(RAGGED, 264, 256, bias=True), WIDE)
SWIGLU_BIAS = Run(Case(RAGGED, 512, 256, activation="swiglu", bias=True), WIDE)
SWIGLU_CLAMP = Run(Case((100,), 256, 128, activation="swiglu", clamp=0.5), WIDE)
SWIGLU_FP8 = Run(Case((100, 0, 130), 512, 256, "masked", 140, activation="swiglu", fp8_out=True), WIDE, sms=1)
SWIGLU_HALVED = Run(
    Case((100, 1, 64), 512, 256, "contiguous", activation="swiglu", fp8_out=True), replace(WIDE, halved=True)
)
SWIGLU_PRE = Run(Case(RAGGED, 512, 256, activation="swiglu", fp8_out=True, pre=True), WIDE)

COUNTED = Run(Case((300, 0, 200), 512, 128), WIDE, sms=5, counted=True)
COUNTED_IDS = Run(Case((128,) * 5, 512, 128, "contiguous"), WIDE, index=(1, -7, 4, -1, 2), counted=True)

FEW = Run(Case((19, 0, 1), 264, 512, "masked", 21), Tile(16, 128, 3, 2, k_blocks=2, swap=True))
FEW_PAIRS = Run(Case((19, 0, 16), 264, 384, "masked", 21), Tile(16, 64, 5, 2, together=2, swap=True), sms=1)
FEW_ROWS = Run(Case((130, 1), 40, 256, "masked", 131), Tile(128, 16, 4, 2, k_blocks=2))
FEW_COLUMNS = Run(Case((70,), 264, 256, "dense"), Tile(64, 256, 3))

BF16_PSUM = Run(Case(RAGGED, 512, 192, fp8=False), BF16)
BF16_PAIRS_PSUM = Run(Case((100, 130), 256, 192, fp8=False), BF16_PAIRS, sms=1)
BF16_SHORT = Run(Case((100,), 256, 64, fp8=False), BF16)
BF16_NN = Run(Case((100, 1, 130), 264, 208, fp8=False, nn=True), BF16)
BF16_ADD = Run(Case((150,), 264, 192, "dense", fp8=False, accumulate=True, **FP32), BF16)
BF16_BIAS = Run(Case(RAGGED, 264, 192, fp8=False, bias=True), BF16)
BF16_SWIGLU = Run(Case(RAGGED, 512, 192, fp8=False, activation="swiglu", bias=True), BF16)
BF16_PRE = Run(Case((100, 1, 129), 272, 192, fp8=False, activation="swiglu", pre=True), BF16)

FULL = (128, 128, 128)
WILD_IDS = Run(Case(FULL, 256, 128, "contiguous"), WIDE, index=(1, -7, 3))
WILD_ENDS = Run(Case(FULL, 256, 128), WIDE, index=(128, -100, 500))
WILD_COUNTS = Run(Case(FULL, 256, 128, "masked", 128), WIDE, index=(200, -300, 129))
WILD = {"ids": WILD_IDS, "ends": WILD_ENDS, "counts": WILD_COUNTS}

RUNS = {name: run for name, run in globals().items() if isinstance(run, Run)}

# ---------------------------------------------------------------- text of the kernels

EMPTY_WAIT = "mbarrier.wait(empty.index(s), (((it + h) // STAGES) & 1) ^ 1)"
STOP_WAIT = "mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)"
FULL_WAIT = "mbarrier.wait(full.index(s), (it // STAGES) & 1)"
FULL_COUNT = "mbarrier.init(full.index(stage), count="
EMPTY_COUNT = "mbarrier.init(empty.index(stage), count="
STORE_NOTE = "notes.index(s).store(note)"
LATE_NOTE = "notes.index(it % STAGES).store(note)"
STORE_SCALES = "sfb_bufs.index(s).store(scales0)"
LATE_SCALES = "sfb_bufs.index(it % STAGES).store(scales0)"
STEP = "it += gl.minimum("
STOP_NOTE = "notes.index(s).store(pieces.tile_note(it * 0, 0, 0, 0))"
FIRST_TURN = "    if C == 1:\n        pieces.pass_turn(C)\n"
FREE_BEFORE = "mbarrier.arrive(empty.index((it - 1) % STAGES), count=1)"
FREE_LAST = "mbarrier.arrive(empty.index(it % STAGES), count=1)"
SECOND_WAVE = "q = warpgroup_mma_wait(0, deps=[running1])"
FREE_SKINNY = "mbarrier.arrive(empty.index(s), count=1)"
FREE_BF16 = "mbarrier.arrive(empty.index(gl.maximum(it - 1, 0) % STAGES), count=1, pred=kb > 0)"
PRODUCT_BF16 = "sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))"
STORED_MASK = "mask = (offset < valid)[:, None] & (cols < n)[None, :]\n"
STORED = "tma_store(d_desc, [row, col], d_buf)"
BUFFERED = "d_buf.store(values)\n    if valid"
HOLE = "            tile = next_tile(tile, counter, counted)\n            state"
LAST_GROUP = "gl.load(index + gl.minimum(group, num_groups - 1))"
ADDED = "pieces.store_wide_rows(d_ptr, row, col, valid, n, sums"
PRODUCTS_SKINNY = "warpgroup_mma_wait(0, deps=[q0, q1])"


def after(first: str, second: str) -> str:
    return f"{first}; {second}"


def ring(
    run: Run, pairs: Run, arrivals: int, bytes_expected: str, fewer_bytes: str, pair: str = "num_k - k0"
) -> list[Bug]:
    """The ring of stages, much the same in all three kernels.

    Args:
        arrivals: of the loader, for each stage.
        pair: how many stages are left to be asked for.
    """
    stop = f"{STOP_NOTE}\n    mbarrier.arrive(full.index(s), count={arrivals})"
    return [
        Bug("loader: empty wait removed", run, EMPTY_WAIT, "pass"),
        Bug("loader: wrong parity", run, EMPTY_WAIT, EMPTY_WAIT.replace(" ^ 1", "")),
        Bug("loader: note stored before the empty wait", run, EMPTY_WAIT, after(STORE_NOTE, EMPTY_WAIT)),
        Bug("loader: note stored after the arrival", run, STORE_NOTE, "pass", also=((STEP, after(LATE_NOTE, STEP)),)),
        Bug("loader: too few bytes expected", run, bytes_expected, fewer_bytes),
        Bug("loader: a pair counted whole at an odd end", pairs, f"{STEP}{pair}, TOGETHER)", f"{STEP}{pair}, 9)"),
        Bug("loader: stop note missing", run, STOP_NOTE, "pass"),
        Bug("loader: nobody told of the end", run, stop, STOP_NOTE),
        Bug("loader: stop note stored into a stage in use", run, STOP_WAIT, "pass"),
        Bug("full: another count", run, f"{FULL_COUNT}{arrivals})", f"{FULL_COUNT}{3 - arrivals})"),
        Bug("empty: count 1 instead of 2", run, f"{EMPTY_COUNT}2)", f"{EMPTY_COUNT}1)"),
        Bug("consumer: wrong full parity", run, FULL_WAIT, FULL_WAIT.replace("& 1", "& 1 ^ 1"), occurrences=2),
        Bug("consumer: full wait removed", run, FULL_WAIT, "pass", occurrences=2),
    ]


FP8_BUGS = [
    *ring(FP8_PSUM, FP8_PAIRS, 2, "(BLOCK_M + 128 + WIDTH) * 128 + 128 * 4", "(BLOCK_M + 128 + WIDTH) * 128"),
    Bug(
        "loader: scales stored after the arrival",
        FP8_PSUM,
        STORE_SCALES,
        "pass",
        also=((STEP, after(LATE_SCALES, STEP)),),
    ),
    Bug("loader: up rows beside the gate rows", SWIGLU_BIAS, "second = n // 2", "second = 128"),
    Bug("loader: the second wave's scale row", SWIGLU_BIAS, "gl.where(lane == 0, first, second)", "(first + lane * 0)"),
    Bug("loader: masked scale column of the whole matrix", FP8_MASKED, "sfa_col = row - expert * num_rows", "pass"),
    Bug("loader: masked scale row of the first expert", FP8_MASKED, "sfa_row = expert * num_k", "pass"),
    Bug("narrow: second wave right of the first in all tiles", FP8_NARROW, "128 - n_block % 2 * 128", "128"),
    Bug("narrow: first wave at the left in all tiles", FP8_NARROW, "first = n_block % 2 * 64", "pass"),
    Bug("turn: nobody starts", FP8_PSUM, FIRST_TURN, ""),
    Bug("turn: both start", FP8_PSUM, FIRST_TURN, "    pieces.pass_turn(C)\n"),
    Bug("turn: a pass missing in each tile", FP8_PSUM, "pieces.pass_turn(C)\n            scale1", "scale1"),
    Bug(
        "turn: none passed in tiles of one consumer",
        FP8_HALF,
        "range(2):\n                    pieces.wait",
        "range(1):\n                    pieces.wait",
    ),
    Bug("half: stages are not freed", FP8_HALF, f"pass_turn(C)\n                {FREE_SKINNY}", "pass_turn(C)"),
    Bug("half: one stage too few", FP8_HALF, "it += num_k - 1", "it += num_k - 2"),
    Bug("half: what is to be stored is dropped", FP8_HALF, "it += num_k - 1", "it += num_k - 1; last_valid = 0"),
    Bug("halved: id of the half's own first row", SWIGLU_HALVED, "row // GROUP_ALIGN * GROUP_ALIGN", "row"),
    Bug("half: full tiles of one consumer", FP8_HALF, "valid if C == 1 else 1", "0 if C == 1 else 1"),
    Bug("turn: 128 threads", FP8_PSUM, "bar.arrive 9, 256", "bar.arrive 9, 128"),
    Bug("turn: waits on its own barrier", FP8_PSUM, "bar.sync 9, 256", "bar.sync 8, 256"),
    Bug(
        "consumer: frees a stage before its second wave is done",
        FP8_PSUM,
        f"{SECOND_WAVE}\n                {FREE_BEFORE}",
        after(FREE_BEFORE, SECOND_WAVE),
    ),
    Bug(
        "consumer: frees a tile's last stage before its second wave is done",
        FP8_PSUM,
        f"{SECOND_WAVE}\n            if",
        f"{after(FREE_LAST, SECOND_WAVE)}\n            if",
        also=((f"p = q\n            {FREE_LAST}", "p = q"),),
    ),
    Bug("consumer: frees the stage in use", FP8_PSUM, FREE_BEFORE, FREE_BEFORE.replace("(it - 1)", "it")),
    Bug("consumer: a tile's last stage is not freed", FP8_PSUM, FREE_LAST, "pass"),
    Bug(
        "consumer: last wave used before it is done",
        FP8_PSUM,
        f"{SECOND_WAVE}\n            if",
        SECOND_WAVE.replace("wait(0", "wait(1") + "\n            if",
    ),
    Bug("consumer: second wave with the first's scale", FP8_PSUM, "scale1 = a * b1", "scale1 = a * b0", occurrences=2),
    Bug("consumer: the first tile stores one before it", FP8_MASKED, "last_valid = 0", "last_valid = 64"),
    Bug("consumer: second part stored over the first", FP8_PSUM, "0 if BOTH else second", "0"),
    Bug("consumer: bias of the next columns instead of up's", SWIGLU_BIAS, "col + second, expert", "col + 128, expert"),
    Bug("consumer: stores with the first tile's expert", SWIGLU_FP8, "last_expert = expert", "pass"),
    Bug("activated: scales of the first expert if masked", SWIGLU_FP8, "block += expert * (n // 128)", "pass"),
    Bug("activated: scales of rows of no expert", SWIGLU_FP8, "inside = offset < valid", "inside = offset < 64"),
    Bug("pre-activations: gate for up", SWIGLU_PRE, "f1.to(gl.bfloat16), 1)", "f0.to(gl.bfloat16), 1)"),
    Bug(
        "pre-activations: rows of consumer 0",
        SWIGLU_PRE,
        "d1_buf, row, col, valid, f0",
        "d1_buf, row - C * 64, col, valid, f0",
    ),
    Bug(
        "pre-activations: before the last product",
        SWIGLU_PRE,
        "valid, f1.to(gl.bfloat16), 1)",
        "valid, (f1 - q * of_rows(scale1, L1)[:, None]).to(gl.bfloat16), 1)",
    ),
    Bug("store: last store_wait removed", FP8_PSUM, "WEIGHTED, OUT)\n    tma.store_wait(0)\n", "WEIGHTED, OUT)\n"),
    Bug("store: C overwritten", FP8_ADD, f"{ADDED}, OUT == pieces.ADD_FP32)", f"{ADDED}, False)"),
    Bug(
        "store: C added twice",
        FP8_ADD,
        f"{ADDED}, OUT",
        f"{ADDED} + pieces.c_rows(d_ptr, row, col, valid, n, sums.type.layout, 64, sums.shape[1]), OUT",
    ),
]

SKINNY_BUGS = [
    *ring(FEW, FEW_PAIRS, 2, "* 128 + SFA_COLS * 4)", "* 128)", "(num_k - k0) // KS"),
    Bug("loader: rows of the next tile", FEW, "tma_load(a_desc, [a_row,", "tma_load(a_desc, [row,"),
    Bug("loader: scales stored after the arrival", FEW, STORE_SCALES, "pass", also=((STEP, after(LATE_SCALES, STEP)),)),
    Bug("loader: scales of one K block for both", FEW, "+ lane // 2", "+ lane // 4"),
    Bug("loader: scales beyond the weights", FEW_COLUMNS, "(sfb_row < sfb_rows) & (lane", "(lane"),
    Bug(
        "consumer: frees the stage before the scales are read",
        FEW,
        "sums += p0 *",
        f"{FREE_SKINNY}; sums += p0 *",
        also=((f"{FREE_SKINNY}\n            it += 1", "it += 1"),),
    ),
    Bug("consumer: waits for all products but one", FEW, PRODUCTS_SKINNY, PRODUCTS_SKINNY.replace("wait(0", "wait(1")),
    Bug("consumer: right half with the left's scale", FEW_COLUMNS, "constexpr = FIRST_N // 128", "constexpr = 0"),
    Bug("consumer: second consumer stores rows of no expert", FEW_ROWS, "valid -= FIRST_M", "pass"),
    Bug("consumer: column mask dropped", FEW, "& (cols < n)[:, None]", ""),
]

BF16_BUGS = [
    *ring(BF16_PSUM, BF16_PAIRS_PSUM, 1, "384 * 128)", "256 * 128)"),
    Bug("loader: coordinates swapped", BF16_NN, "[b_expert, k_col, b_col]", "[b_expert, b_col, k_col]"),
    Bug("consumer: frees the stage in use", BF16_PSUM, FREE_BF16, FREE_BF16.replace("gl.maximum(it - 1, 0)", "it")),
    Bug(
        "consumer: frees a stage before its product is done",
        BF16_PSUM,
        f"{PRODUCT_BF16}\n            {FREE_BF16}",
        after(FREE_BF16, PRODUCT_BF16),
    ),
    Bug("consumer: last product used before it is done", BF16_PSUM, "wait(0, deps=[sums])", "wait(1, deps=[sums])"),
    Bug("consumer: a tile's last stage is not freed", BF16_PSUM, FREE_BEFORE, "pass"),
    Bug("lead: wrong parity", BF16_SHORT, "SKEW)), 0)", "SKEW)), 1)"),
    Bug("lead: waits for a stage that a short K lacks", BF16_SHORT, "gl.minimum(num_k - 1, SKEW)", "SKEW"),
    Bug("consumer: C dropped", BF16_ADD, "use_acc=True", "use_acc=kb > 0"),
    Bug("consumer: C added twice", BF16_ADD, "valid, n, left, False)", "valid, n, left, True)"),
    Bug("consumer: bias of up's next columns", BF16_SWIGLU, "col + columns - 128", "col + columns"),
    Bug("pre-activations: gate and up swapped", BF16_PRE, "up.to(gl.bfloat16), 1)", "up.to(gl.bfloat16), 0)"),
    Bug(
        "pre-activations: of the next tile",
        BF16_PRE,
        "d_buf, row, col, valid, gate",
        "d_buf, row, col + 128, valid, gate",
    ),
    Bug("consumer: gate and up swapped", BF16_SWIGLU, "gate, up = pieces.halves", "up, gate = pieces.halves"),
]

SCHEDULE_BUGS = [
    Bug(
        "next: a tile is taken twice", COUNTED, "gl.num_programs(0) + flags.take", "gl.num_programs(0) - 1 + flags.take"
    ),
    Bug("next: a tile is left out", COUNTED, "gl.num_programs(0) + flags.take", "gl.num_programs(0) + 1 + flags.take"),
    Bug(
        "find: behind a hole at a fixed distance",
        COUNTED_IDS,
        HOLE,
        "            tile += gl.num_programs(0)\n            state",
    ),
    Bug("leave: the counter stays", COUNTED, "flags.clear(counter)", "pass"),
    Bug("leave: whoever leaves clears the counter", COUNTED, " & (tile == gl.num_programs(0) + tiles - 1)", ""),
    Bug("leave: counts the programs' first tiles alone", COUNTED, "+ tiles - 1)", "- 1)"),
    Bug(
        "bands: go forth only, and back from beyond",
        FP8_BANDS,
        "num_n - 1 - n_block, n_block)",
        "num_n - n_block, n_block)",
    ),
    Bug("seek: off by one", FP8_PSUM, "tile >= first + blocks * num_n", "tile > first + blocks * num_n"),
    Bug("seek: reads past the last group", FP8_PSUM, LAST_GROUP, "gl.load(index + group)", occurrences=2),
    Bug("find: takes a tile of no expert", WILD_IDS, "(expert < 0)", "(expert < -100)"),
    Bug("bands: the last one as high as the others", FP8_BANDS, "num_m - first", "num_m"),
    Bug("bands: rows and columns swapped", FP8_PSUM, "+ within % rows, within //", "+ within // rows, within %"),
    Bug("psum: start not aligned", FP8_PSUM, "GROUP_ALIGN - 1) // GROUP_ALIGN * GROUP_ALIGN", "0)"),
    Bug("psum: end past the matrix", WILD_ENDS, "gl.minimum(end, num_rows)", "end"),
    Bug(
        "psum: end before the start",
        WILD_ENDS,
        "gl.maximum(gl.minimum(end, num_rows), start)",
        "gl.minimum(end, num_rows)",
    ),
    Bug("masked: count above M_max", WILD_COUNTS, f"gl.minimum({LAST_GROUP}, num_rows)", LAST_GROUP),
    Bug("masked: negative count", WILD_COUNTS, ", num_rows), 0)", ", num_rows), -1000)"),
    Bug("contiguous: id past the experts", WILD_IDS, "gl.where(expert < num_experts, expert, -1)", "expert"),
    Bug("tile: rows not cut at the group's end", FP8_PSUM, "gl.minimum(end - row, BLOCK_M)", "BLOCK_M + 0 * row"),
]

PIECES_BUGS = [
    Bug("store: fence removed", FP8_PSUM, f"fence_async_shared()\n        {STORED}", STORED),
    Bug(
        "half: fence removed",
        SWIGLU_PRE,
        "fence_async_shared()\n        tma_store(d_desc, [HALF",
        "tma_store(d_desc, [HALF",
    ),
    Bug("half: store_wait removed", SWIGLU_PRE, f"tma.store_wait(0)\n    {BUFFERED} > 0", f"{BUFFERED} > 0"),
    Bug("half: store_wait removed, bf16", BF16_PRE, f"tma.store_wait(0)\n    {BUFFERED} > 0", f"{BUFFERED} > 0"),
    Bug("half: the other one", BF16_PRE, "[HALF, row, col]", "[1 - HALF, row, col]"),
    Bug("store: store_wait removed", FP8_PSUM, f"tma.store_wait(0)\n    {BUFFERED} >=", f"{BUFFERED} >="),
    Bug("store: part of a tile by TMA", FP8_PSUM, "if valid >= ROWS:", "if valid > 0:"),
    Bug("store: column mask dropped", FP8_TAILS, STORED_MASK, "mask = (offset < valid)[:, None]\n"),
    Bug("store: row mask dropped", FP8_TAILS, STORED_MASK, "mask = (cols < n)[None, :]\n"),
    Bug("store: rows of a part not counted down", FP8_TAILS, "valid - first,", "valid,"),
    Bug("store: a quarter of the columns twice", FP8_ADD, "QUARTER * h + QUARTER", "QUARTER * h"),
    Bug("bias of the first expert", FP8_BIAS, "bias_ptr + expert.to(gl.int64) * n", "bias_ptr"),
    Bug("C of the next row", BF16_ADD, "c_ptr + (row.to(gl.int64) +", "c_ptr + (row.to(gl.int64) + 1 +"),
    Bug(
        "note: row in place of the column block",
        FP8_PSUM,
        "0, row, gl.where(lane == 1, n_block,",
        "0, n_block, gl.where(lane == 1, row,",
    ),
    Bug("activation: the gate is not clamped", SWIGLU_CLAMP, "gate > clamp, clamp", "gate > clamp, gate"),
]

BUGS = {
    f"{family}, {bug.name}": bug
    for family, bugs in dict(
        fp8=FP8_BUGS, skinny=SKINNY_BUGS, bf16=BF16_BUGS, schedule=SCHEDULE_BUGS, pieces=PIECES_BUGS
    ).items()
    for bug in bugs
}


@pytest.mark.parametrize("name", RUNS)
def test_without_a_bug(name):
    run = RUNS[name]
    for policy, seed in SCHEDULES:
        run(run.module, policy, seed)


@pytest.mark.parametrize("name", BUGS)
def test_bug_is_caught(name):
    bug = BUGS[name]
    findings = assert_caught(bug.case.module, bug, helpers=HELPERS, needed=len(SCHEDULES))
    print(*findings, sep="\n")
