"""BF16 K-grouped GEMM for Hopper: weight gradients, tile 128 x 256. Device code.

D[e] = A_e^T B_e or D[e] += A_e^T B_e over the rows of expert e; A [rows, M] and B [rows, N] are read as they lie, which
the tensor cores can. Roles as in ``bf16``; a step takes as many rows as the maps' boxes have. The consumers take turns
in all of the memory for results: while one stores, the other multiplies, alone as fast as both together. For the same
reason one of them can pause: the halves of the last tiles go to two programs where half of these would have no tile.

Rows past an expert's last one must not count, whatever they hold. The maps have two dimensions of rows with the same
stride, so element (q, r) is row q + r, and r < ROWS, those of a step. A box from (q, 0) has ROWS rows; one from
(q, left - ROWS) has ROWS - left rows with r < 0, which are outside of the tensor and hence zeros, and then ``left``
rows from row q on. A's rows and B's shift alike, so their order does not matter. An expert without rows has one such
step, of zeros only.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from megamoe.kernels.gluon import k_pieces, k_schedule, pieces, schedule
from megamoe.kernels.gluon.spelling import cta_barrier, tma_load


@gluon.jit
def load_tiles(
    a_desc,
    b_desc,
    bars,
    bufs,
    index,
    counter,
    counted,
    num_rows,
    num_experts,
    m,
    n,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    ADD: gl.constexpr,
):
    """The loader."""
    full, empty, turns = bars
    a_bufs, b_bufs, notes = bufs
    ROWS: gl.constexpr = a_desc.block_shape[1]
    num_m = (m + 127) // 128
    num_n = (n + 255) // 256
    # Nothing is to be added for an expert without rows.
    LEAST: gl.constexpr = 1 if ADD else 0
    walk = (index, num_rows, num_experts, num_m * num_n)
    it = 0
    first_shared = k_schedule.first_shared(walk, LEAST)
    turn = gl.program_id(0)
    place, pausing = k_schedule.shared_tile(turn, first_shared)
    tile, expert, steps = k_schedule.first_tile(walk, place, ROWS, LEAST)
    while steps >= LEAST:
        m_block, n_block = schedule.tile_in_group(tile, num_m, num_n, GROUP_M)
        a_col = m_block * 128
        b_col = n_block * 256
        start, rows = k_schedule.expert_rows(expert, index, num_rows, num_experts)
        tile_steps = gl.maximum(steps, 1)
        # Nothing is to be done for rows that D lacks either.
        pausing |= gl.where(a_col + 64 < m, 0, 2)
        note = pieces.tile_note(a_col + pausing, n_block, tile_steps, expert)
        for step in range(tile_steps):
            s = it % STAGES
            row = start + step * ROWS
            shift = gl.minimum(rows - step * ROWS, ROWS) - ROWS
            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
            notes.index(s).store(note)
            mbarrier.expect(full.index(s), 384 * 2 * ROWS)
            for c in gl.static_range(2):
                tma_load(a_desc, [row, shift, a_col + 64 * c], full.index(s), a_bufs.index(2 * s + c))
            tma_load(b_desc, [row, shift, b_col], full.index(s), b_bufs.index(s))
            it += 1
        turn = schedule.next_tile(turn, counter, counted)
        before = place
        place, pausing = k_schedule.shared_tile(turn, first_shared)
        tile, expert, steps = k_schedule.seek(tile + place - before, expert, steps, walk, ROWS, LEAST)
    s = it % STAGES
    mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
    notes.index(s).store(pieces.tile_note(it * 0, 0, 0, 0))
    mbarrier.arrive(full.index(s), count=1)
    schedule.leave(turn, k_schedule.turns_of(place - tile, first_shared), counter, counted)


@gluon.jit
def multiply(a_bufs, b_bufs, s, C: gl.constexpr, sums, USE_ACC: gl.constexpr):
    """64 x 256 x rows of a step on the tensor cores."""
    ROWS: gl.constexpr = a_bufs.shape[2]
    a = a_bufs.index(2 * s + C).reshape([ROWS, 64]).permute((1, 0))
    b = b_bufs.index(s).reshape([ROWS, 256])
    return warpgroup_mma(a, b, sums, use_acc=USE_ACC, is_async=True)


@gluon.jit
def give_turn(turns, tiles, C: gl.constexpr):
    """Once the last tile's results have left shared memory, the other consumer may use it."""
    # ptxas would wait before the product that was issued before.
    cta_barrier()
    tma.store_wait(0)
    mbarrier.arrive(turns.index(1 - C), count=1, pred=tiles > 0)


@gluon.jit
def consume_tiles(
    d_desc,
    bars,
    bufs,
    d_bufs,
    STAGES: gl.constexpr,
    SKEW: gl.constexpr,
    ADD: gl.constexpr,
    C: gl.constexpr,
):
    """Consumer C: rows 64 C .. 64 C + 63 of each tile."""
    full, empty, turns = bars
    a_bufs, b_bufs, notes = bufs
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    LR: gl.constexpr = gl.SliceLayout(1, L)
    zero = gl.full([64, 256], 0.0, gl.float32, L)
    it = 0
    tiles = 0
    mbarrier.wait(full.index(0), 0)
    row, n_block, steps, expert = pieces.read_note(notes.index(0), LR)
    if SKEW > 0 and C == 1:
        if steps > 0:
            # Starts when consumer 0 can start its step SKEW.
            mbarrier.wait(full.index(gl.minimum(steps - 1, SKEW)), 0)
    while steps > 0:
        if (row >> C) & 1:
            give_turn(turns, tiles, C)
            for _ in range(steps):
                mbarrier.wait(full.index(it % STAGES), (it // STAGES) & 1)
                mbarrier.arrive(empty.index(it % STAGES), count=1)
                it += 1
            mbarrier.wait(turns.index(C), (tiles & 1) ^ (1 - C))
        else:
            sums = multiply(a_bufs, b_bufs, it % STAGES, C, warpgroup_mma_init(zero), False)
            give_turn(turns, tiles, C)
            it += 1
            for _ in range(1, steps):
                mbarrier.wait(full.index(it % STAGES), (it // STAGES) & 1)
                sums = multiply(a_bufs, b_bufs, it % STAGES, C, sums, True)
                sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))
                mbarrier.arrive(empty.index((it - 1) % STAGES), count=1)
                it += 1
            total = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(empty.index((it - 1) % STAGES), count=1)
            # Consumer 0 is the first.
            mbarrier.wait(turns.index(C), (tiles & 1) ^ (1 - C))
            first = row // 128 * 128 + C * 64
            COUNT: gl.constexpr = d_bufs.shape[0]
            k_pieces.store_sums(d_desc, d_bufs, expert, first, n_block * 256, total, 0, COUNT, ADD, 0)
        tiles += 1
        s = it % STAGES
        mbarrier.wait(full.index(s), (it // STAGES) & 1)
        row, n_block, steps, expert = pieces.read_note(notes.index(s), LR)
    give_turn(turns, tiles, C)


@gluon.jit(
    do_not_specialize=["counted", "num_rows", "num_experts", "m", "n"],
    do_not_specialize_on_alignment=["index", "counter"],
)
def k_grouped_bf16_gemm_kernel(
    a_desc,
    b_desc,
    d_desc,
    index,
    counter,
    counted,
    num_rows,
    num_experts,
    m,
    n,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    SKEW: gl.constexpr,
    ADD: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One launch: as many programs as SMs.

    Args:
        a_desc, b_desc: A and B as [rows, ROWS, columns], see above; boxes [1, ROWS, 64] and [1, ROWS, 256].
        d_desc: D [experts, M, N], boxes [1, 64, columns that are stored at a time].
        index: int32 [experts], ends of the psum layout. counter, counted: see ``schedule``.
        ADD: the sums are added to D.
    """
    ROWS: gl.constexpr = a_desc.block_shape[1]
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, 1, ROWS, 64], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, ROWS, 256], b_desc.layout)
    D_BUFFERS: gl.constexpr = 1 if d_desc.block_shape[2] == 256 else 2
    d_bufs = gl.allocate_shared_memory(d_desc.dtype, [D_BUFFERS] + d_desc.block_shape, d_desc.layout)
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    notes = gl.allocate_shared_memory(gl.int32, [STAGES, 4], WORDS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    for consumer in gl.static_range(2):
        mbarrier.init(turns.index(consumer), count=1)
    bars = (full, empty, turns)
    bufs = (a_bufs, b_bufs, notes)
    pieces.wait_for_previous_kernel()
    gl.warp_specialize(
        [
            (consume_tiles, (d_desc, bars, bufs, d_bufs, STAGES, SKEW, ADD, 0)),
            (consume_tiles, (d_desc, bars, bufs, d_bufs, STAGES, SKEW, ADD, 1)),
            (
                load_tiles,
                (
                    a_desc,
                    b_desc,
                    bars,
                    bufs,
                    index,
                    counter,
                    counted,
                    num_rows,
                    num_experts,
                    m,
                    n,
                    STAGES,
                    GROUP_M,
                    ADD,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )
