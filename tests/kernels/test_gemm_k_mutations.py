"""Planted bugs in Hopper's K-grouped kernels: the simulator's reports, or a wrong result, show each of them."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from megamoe.kernels.gluon import k_pieces, k_schedule, pieces, schedule  # noqa: E402
from megamoe.kernels.tiles import Tile  # noqa: E402
from tests.support.gluon_sim.mutation import SCHEDULES, Bug, assert_caught  # noqa: E402
from tests.support.k_gemm_cases import KCase  # noqa: E402
from tests.support.k_gemm_sim import Run  # noqa: E402

HELPERS = (schedule, pieces, k_schedule, k_pieces)

# ---------------------------------------------------------------- what shows the bugs

RAGGED = (130, 0, 257, 1)
THREE = Tile(128, 256, 3, 2)
SKEWED = Tile(128, 256, 3, 2, skew=1)

BF16 = Run(KCase(RAGGED, 128, 264), SKEWED, sms=2)
BF16_ADD = Run(KCase(RAGGED, 128, 128, add=True), SKEWED, sms=2)
BF16_FOUR = Run(KCase((1, 1), 72, 256), Tile(128, 256, 4, skew=1), sms=1)
BF16_LONG = Run(KCase((450,), 72, 16), SKEWED, sms=1)
BF16_ONE = Run(KCase((1,), 72, 16), SKEWED, sms=1)
BF16_SHORT = Run(KCase((1, 1), 72, 16), SKEWED, sms=1)
FP8 = Run(KCase(RAGGED, 128, 264, fp8=True), THREE, sms=2)
FP8_ADD = Run(KCase(RAGGED, 128, 136, fp8=True, add=True), THREE, sms=2)
FP8_LONG = Run(KCase((900,), 72, 16, fp8=True), THREE, sms=1)
FP8_ONE = Run(KCase((1,), 8, 136, fp8=True), THREE, sms=1)
SHARED = Run(KCase((260,), 128, 520), SKEWED, sms=2)
FEW_ROWS = Run(KCase((70,), 64, 16), SKEWED, sms=1)
MORE_ROWS = Run(KCase((70,), 88, 16), SKEWED, sms=1)
BANDS = Run(KCase((1,), 384, 512), SKEWED, sms=1)
MANY = Run(KCase((70,) + (0,) * 128 + (5, 0, 3), 8, 16, add=True), SKEWED, sms=2)
SAME = Run(KCase((1, 0, 1), 8, 16), SKEWED, sms=1)
BF16_STOP = Run(KCase((1,) * 4, 8, 16), SKEWED, sms=1)
BF16_COUNTED = Run(KCase((260, 0, 3), 128, 520), SKEWED, sms=4, counted=True)
FP8_COUNTED = Run(KCase((260, 0, 3), 128, 520, fp8=True), THREE, sms=4, counted=True)
FP8_STOP = Run(KCase((1,) * 4, 8, 16, fp8=True), THREE, sms=1)
FP8_SPARE = Run(KCase((130, 0), 8, 16, spare=128, fp8=True), THREE, sms=1)
BLOCKS = Run(KCase(RAGGED, 128, 264, fp8=True, blocks=True), THREE, sms=2)
BLOCKS_LONG = Run(KCase((900,), 72, 136, fp8=True, blocks=True), THREE, sms=1)
BLOCKS_SPARE = Run(KCase((130, 0), 8, 16, spare=128, fp8=True, blocks=True), THREE, sms=1)

FULL = KCase((128, 128, 112), 8, 16, spare=-16)
BACK = Run(FULL, SKEWED, ends=(300, 50, 420))
PAST = Run(FULL, SKEWED, ends=(2**31 - 1, 384, 384))
NEGATIVE = Run(FULL, SKEWED, ends=(-(2**31), 130, -1))

RUNS = {name: run for name, run in globals().items() if isinstance(run, Run)}

# ---------------------------------------------------------------- text of the kernels

EMPTY_WAIT = "mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)"
FULL_WAIT = "mbarrier.wait(full.index(s), (it // STAGES) & 1)"
STORE_NOTE = "notes.index(s).store(note)"
STOP_NOTE = "notes.index(s).store(pieces.tile_note(it * 0, 0, 0, 0))"
STOP = f"{STOP_NOTE}\n    mbarrier.arrive(full.index(s), count="
FULL_COUNT = "mbarrier.init(full.index(stage), count="
STOP_WAIT = f"    {EMPTY_WAIT}\n    {STOP_NOTE}"
PRODUCT = "sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))"
FREE_LAST = "mbarrier.arrive(empty.index((it - 1) % STAGES), count=1)"
FREE_PAUSING = "mbarrier.arrive(empty.index(it % STAGES), count=1)"
FULL_WAIT_BF16 = "mbarrier.wait(full.index(it % STAGES), (it // STAGES) & 1)"
TAKE_TURN = "mbarrier.wait(turns.index(C), (tiles & 1) ^ (1 - C))"
GIVE_TURN = "give_turn(turns, tiles, C)\n"
NEXT_WAVE = "f1 += scaled(p, scales1, sfb_bufs, s, 1, BLOCKS)"
FREE_FP8 = "mbarrier.arrive(empty.index(s), count=1)"
ROW_SCALES = "row_scales(sfa_bufs, sfb_bufs, s, C, LR, BLOCKS)"
NO_TILE = "last_expert = 2**30 if BLOCKS else -1"
STORE_BEFORE = "k_pieces.store_sums(d_desc, d_bufs, last_expert, last_row, last_col, f1, 2 * C, 2, ADD, 0)"
SHIFT_BF16 = "gl.minimum(rows - step * ROWS, ROWS) - ROWS"
SHIFT_FP8 = "(gl.minimum(rows, 128) + 15) // 16 * 16 - 128"
CLEAR_WAIT = "mbarrier.wait(bar, cleared & 1)"
OWN_END = "gl.load(index + expert, mask=expert < num_experts, other=0)"
NO_BLOCK = "gl.where(steps > 0, start // 128, num_blocks)"
BLOCK_MASK = "(sfb_col < sfb_cols) & (block < num_blocks)"
STORE_SCALES = "sfb_bufs.index(s).store(scales)"
NEXT_NOTE = "row, n_block, steps, expert = pieces.read_note(notes.index(s), LR)"
FIRST_TURN = "    if C == 1:\n        pieces.pass_turn(C)\n"


def ring(
    run: Run,
    stop: Run,
    counted: Run,
    bytes_expected: str,
    fewer_bytes: str,
    loaded: str,
    both_rows: str,
    last_wait: str,
    arrivals: str,
    full_waits: int,
) -> list[Bug]:
    """The loader and the ring of stages, much the same in both kernels.

    Args:
        stop: its last stage holds the first step of a tile. counted: takes its tiles from a counter.
        loaded: what stands after the loads. last_wait: for results, with ``tma.store_wait(0)``.
        both_rows: the row of a tile's half.
        arrivals: at a full stage. full_waits: how often a consumer waits for one.
    """
    return [
        Bug("loader: empty wait removed", run, f"            {EMPTY_WAIT}", "            pass"),
        Bug("loader: wrong parity", run, f"            {EMPTY_WAIT}", f"            {EMPTY_WAIT.replace(' ^ 1', '')}"),
        Bug(
            "loader: note stored before the empty wait",
            run,
            f"{EMPTY_WAIT}\n            {STORE_NOTE}",
            f"{STORE_NOTE}; {EMPTY_WAIT}",
        ),
        Bug(
            "loader: note stored after the arrival",
            run,
            STORE_NOTE,
            "pass",
            also=((loaded, f"{STORE_NOTE}; {loaded}"),),
        ),
        Bug("loader: too few bytes expected", run, bytes_expected, fewer_bytes),
        Bug("loader: stop note missing", run, STOP_NOTE, "pass"),
        Bug("loader: nobody told of the end", run, f"{STOP}{arrivals})", STOP_NOTE),
        Bug("loader: stop note stored into a stage in use", stop, STOP_WAIT, f"    {STOP_NOTE}"),
        Bug("loader: experts without rows left out", run, "= 1 if ADD else 0", "= 1"),
        Bug("loader: counts from its own last place", counted, " + place - before", " + place"),
        Bug("leave: the counter stays", counted, "flags.clear(counter)", "pass"),
        Bug("leave: counts the programs' first tiles alone", counted, "+ tiles - 1)", "- 1)"),
        Bug("full: another count", run, f"{FULL_COUNT}{arrivals})", f"{FULL_COUNT}3)"),
        Bug(
            "empty: count 1 instead of 2",
            run,
            "mbarrier.init(empty.index(stage), count=2)",
            "mbarrier.init(empty.index(stage), count=1)",
        ),
        Bug("consumer: wrong full parity", run, FULL_WAIT, FULL_WAIT.replace("& 1", "& 1 ^ 1"), full_waits),
        Bug("consumer: full wait removed", run, FULL_WAIT, "pass", full_waits),
        Bug("consumer: both halves of a tile stored in one place", run, both_rows, "row"),
        Bug("consumer: last store_wait removed", run, last_wait, last_wait.replace("tma.store_wait(0)", "pass")),
    ]


BF16_BUGS = [
    *ring(
        BF16,
        BF16_STOP,
        BF16_COUNTED,
        "384 * 2 * ROWS)",
        "256 * 2 * ROWS)",
        "it += 1\n        turn",
        "row // 128 * 128 + C * 64",
        "cta_barrier()\n    tma.store_wait(0)",
        "1",
        1,
    ),
    Bug("loader: rows past the end loaded", BF16, SHIFT_BF16, "step * 0"),
    Bug("loader: a row too many", BF16, SHIFT_BF16, SHIFT_BF16.replace("* ROWS,", "* ROWS + 1,")),
    Bug("loader: only A's rows shifted", BF16, "[row, shift, b_col]", "[row, 0, b_col]"),
    Bug("loader: the second half of A is the first", BF16, "a_col + 64 * c]", "a_col]"),
    Bug("consumer: both take the first half of A", BF16, "2 * s + C).reshape", "2 * s).reshape"),
    Bug(
        "consumer: keeps the sums of the tile before",
        BF16,
        "warpgroup_mma_init(zero), False)",
        "warpgroup_mma_init(kept), True)",
        also=(
            ("    tiles = 0\n", "    tiles = 0\n    kept = zero\n"),
            (
                "total = warpgroup_mma_wait(0, deps=[sums])\n",
                "total = warpgroup_mma_wait(0, deps=[sums]); kept = total\n",
            ),
        ),
    ),
    Bug("consumer: only the last step's sums", BF16_LONG, "C, sums, True)", "C, sums, False)"),
    Bug("consumer: full wait of a step removed", BF16_LONG, f"{FULL_WAIT_BF16}\n                sums", "sums"),
    Bug(
        "consumer: frees the stage in use",
        BF16_LONG,
        f"            {FREE_LAST}\n                it",
        f"            {FREE_PAUSING}\n                it",
    ),
    Bug(
        "consumer: frees a stage before its product is done",
        BF16_LONG,
        f"{PRODUCT}\n                {FREE_LAST}",
        f"{FREE_LAST}; {PRODUCT}",
    ),
    Bug("consumer: last product used before it is done", BF16, "wait(0, deps=[sums])", "wait(1, deps=[sums])"),
    Bug("consumer: a tile's last stage is not freed", BF16, f"{FREE_LAST}\n            # Consumer", "# Consumer"),
    Bug("lead: waits for a step that a short expert lacks", BF16_ONE, "gl.minimum(steps - 1, SKEW)", "SKEW + 1"),
    Bug("lead: wrong parity", BF16, "SKEW)), 0)", "SKEW)), 1)"),
    Bug("turn: nobody waits", BF16_SHORT, TAKE_TURN, "pass", 2),
    Bug("turn: not given at the end", BF16_SHORT, f"LR)\n    {GIVE_TURN}", "LR)\n    tma.store_wait(0)\n"),
    Bug("turn: given before there was a tile", BF16_STOP, "pred=tiles > 0", "pred=tiles >= 0"),
    Bug(
        "turn: not given by who pauses",
        SHARED,
        f"            {GIVE_TURN}            for _ in range(steps)",
        "            for _ in range(steps)",
    ),
    Bug("turn: not taken by who pauses", SHARED, f"            {TAKE_TURN}\n        else", "        else"),
    Bug("pause: stages not freed", SHARED, FREE_PAUSING, "pass"),
    Bug(
        "pause: stages freed before they are full",
        SHARED,
        f"{FULL_WAIT_BF16}\n                {FREE_PAUSING}",
        FREE_PAUSING,
    ),
    Bug("pause: the other consumer", FEW_ROWS, "(row >> C) & 1", "(row >> (1 - C)) & 1"),
    Bug("pause: nobody", SHARED, "(row >> C) & 1", "row < 0"),
    Bug("pause: consumer 1 with half of its rows in the matrix", MORE_ROWS, "a_col + 64 < m", "a_col + 100 < m"),
    Bug(
        "pause: the half of the tile before",
        SHARED,
        "pausing |= gl.where(a_col + 64 < m, 0, 2)",
        "pausing = gl.where(it > 0, pausing | 2, 0)",
    ),
]

FP8_BUGS = [
    *ring(
        FP8,
        FP8_STOP,
        FP8_COUNTED,
        "384 * 128 + (128 if BLOCKS else 384) * 4)",
        "384 * 128)",
        "it += 1\n            block",
        "row += C * 64",
        f"{STORE_BEFORE}\n    tma.store_wait(0)",
        "2 if BLOCKS else 1",
        3,
    ),
    Bug("loader: rows past the end loaded", FP8, SHIFT_FP8, "step * 0"),
    Bug("loader: sixteen rows too many", FP8, SHIFT_FP8, SHIFT_FP8.replace("+ 15", "+ 16")),
    Bug("loader: boxes that TMA cannot load", FP8, SHIFT_FP8, "gl.minimum(rows, 128) - 128"),
    Bug("loader: only A's rows shifted", FP8, "[b_col, block * 8, shift]", "[b_col, block * 8, 0]"),
    Bug("loader: rows counted one by one", FP8, "block * 8", "block * 128", occurrences=2),
    Bug("loader: the block stays", FP8_LONG, "block += 1", "pass"),
    Bug("loader: the rows stay", FP8_LONG, "rows -= 128", "pass"),
    Bug("loader: scales of the matrix's first block", FP8, "[block, a_col]", "[0, a_col]"),
    Bug("loader: columns' scales of the first tile", FP8, "[block, b_col]", "[block, 0]"),
    Bug(
        "loader: an expert without rows with scales of no expert",
        FP8_SPARE,
        NO_BLOCK,
        "start // 128",
    ),
    Bug("clear: nothing", FP8, "last.store(last.load(L) & mask[None, :])", "pass"),
    Bug("clear: a row too few", FP8, "kept - 4 *", "kept + 1 - 4 *"),
    Bug("clear: whole words", FP8_LONG, "gl.where(rows == 4, -1,", "gl.where(rows == 4, 0,"),
    Bug("clear: rows of whole steps", FP8, "gl.where(rows < 128, rows % 16, 0)", "rows % 16"),
    Bug("clear: only A", FP8, "clear_rest(b_bufs.index(s), kept, 256)", "pass"),
    Bug("clear: only B", FP8, "clear_rest(a_bufs.index(s), kept, 128)", "pass"),
    Bug("clear: the first columns only", FP8, "static_range(0, COLUMNS, 64)", "static_range(0, 64, 64)"),
    Bug("clear: fence removed", FP8, "fence_async_shared()\n                mbarrier", "mbarrier"),
    Bug("clear: before the rows are there", FP8, f"{CLEAR_WAIT}\n", "pass\n"),
    Bug("clear: wrong parity", FP8, CLEAR_WAIT, CLEAR_WAIT.replace("& 1", "& 1 ^ 1")),
    Bug("clear: phases not counted", FP8, "cleared += 1", "pass"),
    Bug("clear: nobody told", FP8, "mbarrier.arrive(full.index(s), count=1)\n                cleared", "cleared"),
    Bug("wave: both consumers take the first half of A", FP8, "slice(C * 64, 64, 0)\n    b", "slice(0, 64, 0)\n    b"),
    Bug(
        "wave: the second takes the first's columns",
        FP8,
        "reshape([256, 128]).slice(W * 128",
        "reshape([256, 128]).slice(0",
    ),
    Bug("scaled: second wave with the first's scales", FP8, "reshape([256]).slice(W * 128", "reshape([256]).slice(0"),
    Bug(
        "scaled: rows of the other consumer",
        FP8,
        "reshape([128]).slice(C * 64",
        "reshape([128]).slice(64 - C * 64",
    ),
    Bug("turn: nobody starts", FP8, FIRST_TURN, ""),
    Bug("turn: both start", FP8, FIRST_TURN, "    pieces.pass_turn(C)\n"),
    Bug("turn: 128 threads", FP8, "bar.arrive 9, 256", "bar.arrive 9, 128"),
    Bug(
        "consumer: frees a stage before the scales are read",
        FP8_LONG,
        f"                {NEXT_WAVE}\n                # Only now",
        f"                {FREE_FP8}; {NEXT_WAVE}\n                # Only now",
        also=((f"                {FREE_FP8}\n                it", "                it"),),
    ),
    Bug(
        "consumer: frees a tile's last stage before the scales are read",
        FP8,
        f"        {NEXT_WAVE}\n        if not BLOCKS:\n            {FREE_FP8}\n",
        f"        {FREE_FP8}; {NEXT_WAVE}\n",
    ),
    Bug(
        "consumer: a tile's last stage is not freed",
        FP8,
        f"        if not BLOCKS:\n            {FREE_FP8}\n",
        "",
    ),
    Bug(
        "consumer: last wave used before it is done",
        FP8,
        "wait(0, deps=[running])\n        if BLOCKS:",
        "wait(1, deps=[running])\n        if BLOCKS:",
    ),
    Bug(
        "consumer: scales of the step before",
        FP8_LONG,
        f"scales0, scales1 = {ROW_SCALES}\n            pieces",
        "pieces",
    ),
    Bug("consumer: the first tile stores one before it", FP8, NO_TILE, "last_expert = 0"),
    Bug(
        "consumer: the last tile's right half is not stored",
        FP8,
        f"    if last_expert >= 0:\n        {STORE_BEFORE}\n    tma",
        "    tma",
    ),
    Bug("consumer: right half over the left one", FP8_ONE, "last_col = col + 128", "last_col = col"),
    Bug("consumer: right half to the next tile's expert", FP8, "last_expert = expert", "last_expert = expert + 1"),
]

BLOCKS_BUGS = [
    Bug("loader: scales of the matrix's first block", BLOCKS_LONG, "block.to(gl.int64) * sfb_cols", "block * 0"),
    Bug("loader: scales of the first columns", BLOCKS, "n_block * 2 + pieces.lanes(2)", "pieces.lanes(2)"),
    Bug("loader: one scale for both halves", BLOCKS, "+ pieces.lanes(2)", "+ pieces.lanes(2) * 0"),
    Bug("loader: scales of columns that B lacks", BLOCKS, BLOCK_MASK, "block < num_blocks"),
    Bug("loader: scales of rows that B lacks", BLOCKS_SPARE, BLOCK_MASK, "sfb_col < sfb_cols"),
    Bug("loader: an expert without rows with scales of no expert", BLOCKS_SPARE, NO_BLOCK, "start // 128"),
    Bug("consumer: stores to an expert before the first", BLOCKS, NO_TILE, "last_expert = -1"),
    Bug("loader: scales not stored", BLOCKS, STORE_SCALES, "pass"),
    Bug(
        "loader: scales stored before the empty wait",
        BLOCKS_LONG,
        f"            {EMPTY_WAIT}",
        f"            {STORE_SCALES}; {EMPTY_WAIT}",
        also=((f"                {STORE_SCALES}\n", ""),),
    ),
    Bug(
        "loader: scales stored after the arrival",
        BLOCKS,
        f"{STORE_SCALES}\n                mbarrier.arrive(full.index(s), count=1)",
        f"mbarrier.arrive(full.index(s), count=1); {STORE_SCALES}",
    ),
    Bug(
        "loader: nobody told of the scales",
        BLOCKS,
        f"{STORE_SCALES}\n                mbarrier.arrive(full.index(s), count=1)",
        STORE_SCALES,
    ),
    Bug("loader: scales of B expected by TMA", BLOCKS, "(128 if BLOCKS else 384)", "384"),
    Bug("loader: arrives at the end once", BLOCKS, f"{STOP}2 if BLOCKS else 1)", f"{STOP}1)"),
    Bug("full: does not wait for the scales", BLOCKS, f"{FULL_COUNT}2 if BLOCKS else 1)", f"{FULL_COUNT}1)"),
    Bug("row scales: the other half's", BLOCKS, "(s).slice(0, 1, 0)", "(s).slice(1, 1, 0)"),
    Bug("row scales: the first half's for both", BLOCKS, "return a * b0, a * b1", "return a * b0, a * b0"),
    Bug("consumer: wrong full parity", BLOCKS, FULL_WAIT, FULL_WAIT.replace("& 1", "& 1 ^ 1"), 3),
    Bug("consumer: full wait removed", BLOCKS, FULL_WAIT, "pass", 3),
    Bug("consumer: frees the stage in use", BLOCKS_LONG, "empty.index((it - 1) % STAGES)", "empty.index(s)"),
    Bug(
        "consumer: frees a stage before its wave is done",
        BLOCKS_LONG,
        f"p = warpgroup_mma_wait(0, deps=[running])\n                {FREE_LAST}",
        f"{FREE_LAST}; p = warpgroup_mma_wait(0, deps=[running])",
    ),
    Bug(
        "consumer: frees a tile's last stage before its wave is done",
        BLOCKS,
        f"p = warpgroup_mma_wait(0, deps=[running])\n        if BLOCKS:\n            {FREE_FP8}\n",
        f"{FREE_FP8}; p = warpgroup_mma_wait(0, deps=[running])\n",
    ),
    Bug("consumer: a stage is not freed", BLOCKS_LONG, FREE_LAST, "pass"),
    Bug(
        "consumer: a tile's last stage is not freed",
        BLOCKS,
        f"        if BLOCKS:\n            {FREE_FP8}\n",
        "",
    ),
    Bug(
        "consumer: the second wave with the next step's scales",
        BLOCKS_LONG,
        f"scales0, next1 = {ROW_SCALES}",
        f"scales0, next1 = {ROW_SCALES}; scales1 = next1",
    ),
    Bug("consumer: the second wave with the first step's scales", BLOCKS_LONG, "scales1 = next1", "pass"),
]

SCHEDULE_BUGS = [
    Bug("turns: shared tiles are counted once", BF16_COUNTED, "tiles + gl.maximum(tiles - first, 0)", "tiles"),
    Bug("shared tiles: the same half twice", SHARED, "2 - past % 2", "2 - past * 0"),
    Bug("shared tiles: one tile to four programs", SHARED, "first + past // 2", "first + past // 4"),
    Bug("rows: start not aligned", BF16, "- 1) // schedule.GROUP_ALIGN * schedule.GROUP_ALIGN", "- 128)"),
    Bug("rows: end past the matrix", BACK, f"end = gl.minimum({OWN_END}, num_rows)", f"end = {OWN_END}"),
    Bug(
        "rows: end before past the matrix", PAST, "gl.minimum(gl.maximum(before, 0), num_rows)", "gl.maximum(before, 0)"
    ),
    Bug("rows: end before below zero", NEGATIVE, "gl.maximum(before, 0)", "before"),
    Bug("rows: negative number", BACK, "gl.maximum(end - start, 0)", "end - start"),
    Bug("rows: end before the first expert", BF16, "(expert > 0) & (expert < num_experts)", "expert < num_experts"),
    Bug("rows: end after the last expert", BF16, OWN_END, "gl.load(index + expert)"),
    Bug(
        "order: experts with as many steps left out",
        SAME,
        "(own < steps) | ((own == steps) & (ids > expert))",
        "own < steps",
    ),
    Bug("order: an expert again and again", BF16, "(ids > expert)", "(ids >= expert)"),
    Bug("order: the last one of the most", MANY, "if most > best:", "if most > 0:"),
    Bug(
        "order: only the first experts looked at",
        MANY,
        "range(0, num_experts, EXPERTS_AT_ONCE)",
        "range(0, 1, EXPERTS_AT_ONCE)",
        occurrences=2,
    ),
    Bug("seek: off by one", BF16, "tile >= tiles", "tile > tiles"),
    Bug("seek: tiles counted from the first expert's", BF16, "tile -= tiles", "tile -= 1"),
    Bug("bands: rows and columns swapped", BANDS, "+ within % rows, within //", "+ within // rows, within %"),
    Bug("bands: the last one as high as the others", BANDS, "num_m - first", "num_m"),
]

PIECES_BUGS = [
    Bug("store: fence removed", BF16, "fence_async_shared()\n        if ADD", "pass\n        if ADD"),
    Bug("store: store_wait removed", FP8, "tma.store_wait(COUNT - 1)", "pass"),
    Bug("store: store_wait removed, for the consumer that stores", BF16_FOUR, "tma.store_wait(COUNT - 1)", "pass"),
    Bug("store: waits for the store before the last too late", FP8, "(COUNT - 1)", "(COUNT)"),
    Bug("store: one buffer", FP8, "FIRST + PIECE % COUNT", "FIRST"),
    Bug("store: the other consumer's buffer", FP8, "FIRST + PIECE % COUNT", "PIECE % COUNT"),
    Bug("store: right half over the left one", FP8, "col + WIDTH // 2", "col"),
    Bug("store: overwrites instead of adding", BF16_ADD, "tma_add(d_desc", "tma_store(d_desc"),
    Bug("store: adds instead of overwriting", BF16, "            tma_store(d_desc", "            tma_add(d_desc"),
    Bug(
        "store: added twice",
        FP8_ADD,
        "tma_add(d_desc, [expert, row, col], d_buf)",
        "tma_add(d_desc, [expert, row, col], d_buf); tma_add(d_desc, [expert, row, col], d_buf)",
    ),
    Bug(
        "note: row in place of the column block",
        BF16,
        "0, row, gl.where(lane == 1, n_block,",
        "0, n_block, gl.where(lane == 1, row,",
    ),
]

BUGS = {
    f"{family}, {bug.name}": bug
    for family, bugs in dict(
        bf16=BF16_BUGS, fp8=FP8_BUGS, blocks=BLOCKS_BUGS, schedule=SCHEDULE_BUGS, pieces=PIECES_BUGS
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
