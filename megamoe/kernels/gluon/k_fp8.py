"""FP8 K-grouped GEMM for Hopper: weight gradients, tile 128 x 256. Device code.

D[e] = A_e^T B_e or D[e] += A_e^T B_e over the rows of expert e: e4m3, one scale per column and 128 rows, or of B one
per 128 columns and 128 rows (BLOCKS), which takes half as many instructions beside the products. Each product over 128
rows comes from the tensor cores and is scaled and added up in fp32 registers. Roles, waves and turns as in ``fp8``; a
step takes 128 rows. The tensor cores want e4m3 operands dense along the rows: A is read as [M, rows].

Rows past an expert's last one must not count, whatever they hold. The maps of A and B have two dimensions along the
rows, so element (q, r) is row 16 q + r, and r < 128. A box from (q, 0) has 128 rows; one from (q, left - 128) has
128 - left zeros, for r < 0 is outside of the tensor, and then ``left`` rows from row 16 q on. A's rows and B's shift
alike, so their order does not matter. Boxes start at multiples of 16 rows only: where the last rows are no multiple,
the loader waits for them and clears the rest. An expert without rows has one such step, of zeros only; its scales come
from outside too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megamoe.kernels.gluon import k_pieces, k_schedule, pieces, schedule
from megamoe.kernels.gluon.spelling import reinterpret, tma_load


@gluon.jit
def clear_rest(codes, kept, COLUMNS: gl.constexpr):
    """Of the last 16 rows of a step, only ``kept`` stay; the others become zeros. Run by the loader warp.

    Args:
        codes: [COLUMNS, 1, 128] in shared memory.
    """
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, 1], [1, 0])
    words = reinterpret(codes, gl.int32, [COLUMNS, 32], WORDS)
    rows = gl.minimum(gl.maximum(kept - 4 * gl.arange(0, 4, layout=gl.SliceLayout(0, L)), 0), 4)
    mask = gl.where(rows == 4, -1, (1 << 8 * gl.minimum(rows, 3)) - 1)
    # A part at a time: the loader has few registers.
    for first in gl.static_range(0, COLUMNS, 64):
        last = words.slice(first, 64, 0).slice(28, 4, 1)
        last.store(last.load(L) & mask[None, :])


@gluon.jit
def load_tiles(
    descs,
    bars,
    bufs,
    sfb_ptr,
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
    BLOCKS: gl.constexpr,
):
    """The loader."""
    a_desc, b_desc, sfa_desc, sfb_desc = descs
    full, empty = bars
    a_bufs, b_bufs, sfa_bufs, sfb_bufs, notes = bufs
    num_m = (m + 127) // 128
    num_n = (n + 255) // 256
    # Nothing is to be added for an expert without rows.
    LEAST: gl.constexpr = 1 if ADD else 0
    walk = (index, num_rows, num_experts, num_m * num_n)
    num_blocks = (num_rows + 127) // 128
    sfb_cols = (n + 127) // 128
    it = 0
    cleared = 0
    place = gl.program_id(0)
    tile, expert, steps = k_schedule.first_tile(walk, place, 128, LEAST)
    while steps >= LEAST:
        m_block, n_block = schedule.tile_in_group(tile, num_m, num_n, GROUP_M)
        a_col = m_block * 128
        b_col = n_block * 256
        start, rows = k_schedule.expert_rows(expert, index, num_rows, num_experts)
        block = gl.where(steps > 0, start // 128, num_blocks)
        tile_steps = gl.maximum(steps, 1)
        note = pieces.tile_note(a_col, n_block, tile_steps, expert)
        sfb_col = n_block * 2 + pieces.lanes(2)
        for step in range(tile_steps):
            s = it % STAGES
            shift = (gl.minimum(rows, 128) + 15) // 16 * 16 - 128
            # With rows to clear, the bytes arrive at the barrier after the ring's.
            kept = gl.where(rows < 128, rows % 16, 0)
            bar = full.index(gl.where(kept > 0, STAGES, s))
            if BLOCKS:
                sfb = sfb_ptr + block.to(gl.int64) * sfb_cols + sfb_col
                scales = gl.load(sfb, mask=(sfb_col < sfb_cols) & (block < num_blocks), other=0.0)
            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
            notes.index(s).store(note)
            mbarrier.expect(bar, 384 * 128 + (128 if BLOCKS else 384) * 4)
            tma_load(a_desc, [a_col, block * 8, shift], bar, a_bufs.index(s))
            tma_load(b_desc, [b_col, block * 8, shift], bar, b_bufs.index(s))
            tma_load(sfa_desc, [block, a_col], bar, sfa_bufs.index(s))
            if BLOCKS:
                # Last, for these come from memory too.
                sfb_bufs.index(s).store(scales)
                mbarrier.arrive(full.index(s), count=1)
            else:
                tma_load(sfb_desc, [block, b_col], bar, sfb_bufs.index(s))
            it += 1
            block += 1
            rows -= 128
            if step == tile_steps - 1:
                # Looks for the next tile while the ring is full.
                before = place
                place = schedule.next_tile(place, counter, counted)
                tile, expert, steps = k_schedule.seek(tile + place - before, expert, steps, walk, 128, LEAST)
            if kept > 0:
                mbarrier.wait(bar, cleared & 1)
                clear_rest(a_bufs.index(s), kept, 128)
                clear_rest(b_bufs.index(s), kept, 256)
                fence_async_shared()
                mbarrier.arrive(full.index(s), count=1)
                cleared += 1
    s = it % STAGES
    mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
    notes.index(s).store(pieces.tile_note(it * 0, 0, 0, 0))
    mbarrier.arrive(full.index(s), count=2 if BLOCKS else 1)
    schedule.leave(place, place - tile, counter, counted)


@gluon.jit
def wave(a_bufs, b_bufs, s, C: gl.constexpr, W: gl.constexpr, partial):
    """64 x 128 x 128 on the tensor cores. ``partial`` is ignored but names the registers: one set for all waves."""
    a = a_bufs.index(s).reshape([128, 128]).slice(C * 64, 64, 0)
    b = b_bufs.index(s).reshape([256, 128]).slice(W * 128, 128, 0)
    return warpgroup_mma(a, b.permute((1, 0)), partial, use_acc=False, is_async=True)


@gluon.jit
def row_scales(sfa_bufs, sfb_bufs, s, C: gl.constexpr, L: gl.constexpr, BLOCKS: gl.constexpr):
    """What the sums of either wave are multiplied by, a number a row."""
    a = sfa_bufs.index(s).reshape([128]).slice(C * 64, 64, 0).load(L)
    if BLOCKS:
        b0 = sfb_bufs.index(s).slice(0, 1, 0).load(L)
        b1 = sfb_bufs.index(s).slice(1, 1, 0).load(L)
        return a * b0, a * b1
    else:
        return a, a


@gluon.jit
def scaled(partial, scales, sfb_bufs, s, W: gl.constexpr, BLOCKS: gl.constexpr):
    """A wave's sums times the scales of both sides."""
    L: gl.constexpr = partial.type.layout
    result = partial * scales[:, None]
    if not BLOCKS:
        column_scales = sfb_bufs.index(s).reshape([256]).slice(W * 128, 128, 0).load(gl.SliceLayout(0, L))
        result = result * column_scales[None, :]
    return result


@gluon.jit
def consume_tiles(
    d_desc,
    bars,
    bufs,
    d_bufs,
    STAGES: gl.constexpr,
    ADD: gl.constexpr,
    BLOCKS: gl.constexpr,
    C: gl.constexpr,
):
    """Consumer C: rows 64 C .. 64 C + 63 of each tile."""
    full, empty = bars
    a_bufs, b_bufs, sfa_bufs, sfb_bufs, notes = bufs
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    LR: gl.constexpr = gl.SliceLayout(1, L)
    f0 = gl.full([64, 128], 0.0, gl.float32, L)
    f1 = f0
    p = f0
    # The tile before, whose right half is stored inside the next one; none yet. Stores past the last expert write
    # nothing; before the first one they are illegal.
    last_expert = 2**30 if BLOCKS else -1
    last_row = 0
    last_col = 0
    it = 0
    if C == 1:
        pieces.pass_turn(C)
    mbarrier.wait(full.index(0), 0)
    row, n_block, steps, expert = pieces.read_note(notes.index(0), LR)
    while steps > 0:
        row += C * 64
        col = n_block * 256
        # The first step; the tile before is stored under wave 0.
        s = it % STAGES
        scales0, scales1 = row_scales(sfa_bufs, sfb_bufs, s, C, LR, BLOCKS)
        pieces.wait_turn(C)
        running = wave(a_bufs, b_bufs, s, C, 0, p)
        pieces.pass_turn(C)
        # Always with BLOCKS: its barriers then need not be in the loop.
        if BLOCKS or last_expert >= 0:
            k_pieces.store_sums(d_desc, d_bufs, last_expert, last_row, last_col, f1, 2 * C, 2, ADD, 0)
        p = warpgroup_mma_wait(0, deps=[running])
        f0 = scaled(p, scales0, sfb_bufs, s, 0, BLOCKS)
        pieces.wait_turn(C)
        running = wave(a_bufs, b_bufs, s, C, 1, p)
        pieces.pass_turn(C)
        f1 = gl.full([64, 128], 0.0, gl.float32, L)
        for _ in range(1, steps):  # not unrolled: ptxas would spill
            if BLOCKS:
                it += 1
                s = it % STAGES
                mbarrier.wait(full.index(s), (it // STAGES) & 1)
                p = warpgroup_mma_wait(0, deps=[running])
                mbarrier.arrive(empty.index((it - 1) % STAGES), count=1)
                # After the arrive: Triton puts a barrier between it and the next shared read, which must not be the
                # wave.
                scales0, next1 = row_scales(sfa_bufs, sfb_bufs, s, C, LR, BLOCKS)
                f1 += scaled(p, scales1, sfb_bufs, s, 1, BLOCKS)
                scales1 = next1
            else:
                p = warpgroup_mma_wait(0, deps=[running])
                f1 += scaled(p, scales1, sfb_bufs, s, 1, BLOCKS)
                # Only now: the columns' scales lay in the stage.
                mbarrier.arrive(empty.index(s), count=1)
                it += 1
                s = it % STAGES
                mbarrier.wait(full.index(s), (it // STAGES) & 1)
                scales0, scales1 = row_scales(sfa_bufs, sfb_bufs, s, C, LR, BLOCKS)
            pieces.wait_turn(C)
            running = wave(a_bufs, b_bufs, s, C, 0, p)
            pieces.pass_turn(C)
            p = warpgroup_mma_wait(0, deps=[running])
            f0 += scaled(p, scales0, sfb_bufs, s, 0, BLOCKS)
            pieces.wait_turn(C)
            running = wave(a_bufs, b_bufs, s, C, 1, p)
            pieces.pass_turn(C)
        # The second wave of the last step still runs.
        k_pieces.store_sums(d_desc, d_bufs, expert, row, col, f0, 2 * C, 2, ADD, 0)
        p = warpgroup_mma_wait(0, deps=[running])
        if BLOCKS:
            mbarrier.arrive(empty.index(s), count=1)
        f1 += scaled(p, scales1, sfb_bufs, s, 1, BLOCKS)
        if not BLOCKS:
            mbarrier.arrive(empty.index(s), count=1)
        last_expert = expert
        last_row = row
        last_col = col + 128
        it += 1
        s = it % STAGES
        mbarrier.wait(full.index(s), (it // STAGES) & 1)
        row, n_block, steps, expert = pieces.read_note(notes.index(s), LR)
    if last_expert >= 0:
        k_pieces.store_sums(d_desc, d_bufs, last_expert, last_row, last_col, f1, 2 * C, 2, ADD, 0)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["counted", "num_rows", "num_experts", "m", "n"],
    do_not_specialize_on_alignment=["sfb_ptr", "index", "counter"],
)
def k_grouped_fp8_gemm_kernel(
    a_desc,
    b_desc,
    sfa_desc,
    sfb_desc,
    sfb_ptr,
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
    ADD: gl.constexpr,
    BLOCKS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One launch: as many programs as SMs.

    Args:
        a_desc, b_desc: A and B as [columns, rows / 16, 128], see above; boxes [128, 1, 128] and [256, 1, 128].
        sfa_desc, sfb_desc: their scales, fp32 [rows / 128, columns], boxes [1, 128] and [1, 256].
        sfb_ptr: B's scales with BLOCKS, fp32 [rows / 128, columns / 128]; sfb_desc is not used then.
        d_desc: D [experts, M, N], boxes [1, 64, columns that are stored at a time].
        index: int32 [experts], ends of the psum layout. counter, counted: see ``schedule``.
        ADD: the sums are added to D.
    """
    a_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 1, 128], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 256, 1, 128], b_desc.layout)
    sfa_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 128], sfa_desc.layout)
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if BLOCKS:
        sfb_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 2], WORDS)
    else:
        sfb_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 256], sfb_desc.layout)
    d_bufs = gl.allocate_shared_memory(d_desc.dtype, [4] + d_desc.block_shape, d_desc.layout)
    notes = gl.allocate_shared_memory(gl.int32, [STAGES, 4], WORDS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # With BLOCKS the loader arrives again when it has written the scales.
        mbarrier.init(full.index(stage), count=2 if BLOCKS else 1)
        mbarrier.init(empty.index(stage), count=2)
    mbarrier.init(full.index(STAGES), count=1)
    bars = (full, empty)
    bufs = (a_bufs, b_bufs, sfa_bufs, sfb_bufs, notes)
    descs = (a_desc, b_desc, sfa_desc, sfb_desc)
    pieces.wait_for_previous_kernel()
    gl.warp_specialize(
        [
            (consume_tiles, (d_desc, bars, bufs, d_bufs, STAGES, ADD, BLOCKS, 0)),
            (consume_tiles, (d_desc, bars, bufs, d_bufs, STAGES, ADD, BLOCKS, 1)),
            (
                load_tiles,
                (
                    descs,
                    bars,
                    bufs,
                    sfb_ptr,
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
                    BLOCKS,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )
