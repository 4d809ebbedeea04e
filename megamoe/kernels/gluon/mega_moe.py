"""The FP8 mega-kernel for Hopper: tokens in from all ranks, both expert GEMMs, results out to all ranks. Device code.

One launch, as many programs as SMs, which must all run at once since they wait for each other's work. Rows are grouped
by expert, each expert's in blocks of 128 rows. Blocks take the slots of a pool in turns. Roles of a program:

- two warps pull rows: in the order of blocks they copy each from the rank that owns its token into the pool, once
  GEMM 2 has read the block that had the slot before, and count it in its block. The first rows are pulled by consumers;
- the loader warp takes tiles and feeds a ring of stages by TMA; tiles of GEMM 1 wait for their block's rows, tiles of
  GEMM 2 for their block's tiles of GEMM 1, and while they do the weights stream in;
- two consumers of four warps own 64 rows each of a tile of 128 x 256, as two waves of 128 columns. GEMM 1 takes gate
  and up of the same 128 columns, so that both meet in one thread; its result is activated, weighted and cast to FP8.
  GEMM 2's goes straight into the slots of the tokens' ranks;
- the storer warp writes tiles of GEMM 1 to memory and counts them, and tiles of GEMM 2 that have read their rows, while
  consumers go on.

Tiles come from a table in which GEMM 2 of a group of blocks trails GEMM 1 by a lag. A program takes the next one just
before it has loaded the one before, so that tiles with the same weights are computed at the same time, wherever. Every
wait is for an earlier tile of that order, if the pool is not too small (``mega_plan.least_pool_blocks``), so the first
unfinished tile can always go on. Tiles of at most 64 rows leave consumer 1 out.

Consumer 1 stays a block of K behind consumer 0, so that one's epilogue runs under the other's products. Sums and
epilogues have the same bits as the grouped GEMMs'. Their loop over K is not used itself: here a tile's halves are
loaded apart, and what a tile is comes from a table.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megamoe.kernels.gluon import pieces
from megamoe.kernels.gluon.mega_pieces import (
    BLOCK,
    HALF,
    NOTE_LAYOUT,
    RESULTS_LAYOUT,
    WEIGHT_SCALES_LAYOUT,
    await_tile,
    bias_rows,
    load_tiles,
    note_for_storer,
    phase_of,
    pool_row,
    pull_early_rows,
    pull_rows,
    routing_weights,
    scatter_rows,
    stage_of,
    store_tiles,
    tell_end,
    tell_read,
    tile_biases,
    unpack,
)
from megamoe.kernels.gluon.spelling import reinterpret

# ---------------------------------------------------------------- consumers


@gluon.jit
def wave(s, half, C: gl.constexpr, partial, bufs):
    """64 x 128 x 128 on the tensor cores. ``partial`` is ignored but names the registers: one set for all waves."""
    b = bufs[1].index(s * 2 + half).permute((1, 0))
    return warpgroup_mma(bufs[0].index(s * 2 + C), b, partial, use_acc=False, is_async=True)


@gluon.jit
def sum_tile(
    it0, num_k, turn, starts, bars, bufs, STAGES: gl.constexpr, LEADS: gl.constexpr, BIAS: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """fp32 sums of both waves: each product of 128 along K is scaled and added up in registers.

    The second wave's product of a K block is added after the wait for the next one. The first block is peeled off: with
    a zero partial ptxas would serialise the waves.

    Args:
        it0, num_k: first stage and number of blocks of K. turn: number of the tile.
        starts: with BIAS, pointers to what the sums of either wave start from.
    """
    full, empty, lead, results_full, results_empty = bars
    a_bufs, b_bufs, a_scales, b_scales, notes = bufs
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    LR: gl.constexpr = gl.SliceLayout(1, L)
    if BIAS:
        f1 = bias_rows(starts[1], L)
    else:
        f1 = gl.full([HALF, BLOCK], 0.0, gl.float32, L)
    s = stage_of(it0, STAGES)
    mbarrier.wait(full.index(s), phase_of(it0, STAGES))
    a = a_scales.index(s * 2 + C).reshape([HALF]).load(LR)
    b0 = b_scales.index(s).slice(0, 1, 0).load(LR)
    b1 = b_scales.index(s).slice(1, 1, 0).load(LR)
    running = wave(s, 0, C, f1, bufs)
    q = warpgroup_mma_wait(0, deps=[running])
    f0 = q * (a * b0)[:, None]
    if BIAS:
        f0 += bias_rows(starts[0], L)
    running1 = wave(s, 1, C, q, bufs)
    if C == 0:
        # Consumer 1 may start.
        mbarrier.arrive(lead.index(turn % LEADS), count=1)
    scale1 = a * b1
    for k in range(1, num_k):
        last = s
        s = stage_of(it0 + k, STAGES)
        mbarrier.wait(full.index(s), phase_of(it0 + k, STAGES))
        p = warpgroup_mma_wait(0, deps=[running1])
        mbarrier.arrive(empty.index(last), count=1)
        # After the arrive: Triton puts a barrier between it and the next shared read, which must not be the wave.
        a = a_scales.index(s * 2 + C).reshape([HALF]).load(LR)
        b0 = b_scales.index(s).slice(0, 1, 0).load(LR)
        b1 = b_scales.index(s).slice(1, 1, 0).load(LR)
        f1 += p * scale1[:, None]
        running = wave(s, 0, C, p, bufs)
        q = warpgroup_mma_wait(0, deps=[running])
        f0 += q * (a * b0)[:, None]
        running1 = wave(s, 1, C, q, bufs)
        scale1 = a * b1
    p = warpgroup_mma_wait(0, deps=[running1])
    mbarrier.arrive(empty.index(s), count=1)
    f1 += p * scale1[:, None]
    return f0, f1


@gluon.jit
def activate_rows(
    f0, f1, weights, clamp, act_scales, row, n, pool_rows, ACTIVATION: gl.constexpr, CLAMP: gl.constexpr,
    BIAS: gl.constexpr,
):  # fmt: skip
    """activation(gate) * up * routing weight in FP8, with BIAS without the weight.

    The scales, max(amax, 1e-10) / 448 of each row, go to memory.
    """
    L: gl.constexpr = f0.type.layout
    gate = pieces.activate_gate(f0, clamp, ACTIVATION, CLAMP)
    act = pieces.multiply_up(gate, f1, clamp, ACTIVATION, CLAMP)
    if not BIAS:
        act = act * weights[:, None]
    amax = gl.maximum(gl.max(gl.abs(act), 1), pieces.MIN_AMAX)
    rows = row + gl.arange(0, HALF, layout=gl.SliceLayout(1, L))
    gl.store(act_scales + n * pool_rows + rows, amax * (1.0 / 448.0))
    return (act * (448.0 / amax)[:, None]).to(gl.float8e4nv)


@gluon.jit
def finish_tile(
    tile, f0, f1, weights, bars, d_bufs, told_note, tables, slots, act_scales, pool_rows, clamp, told, H: gl.constexpr,
    ACTIVATION: gl.constexpr, CLAMP: gl.constexpr, BIAS: gl.constexpr, CODES: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """The epilogue of a tile ``(word, block)``. ``told``: as in ``tell_read``; returns those with this one."""
    full, empty, lead, results_full, results_empty = bars
    tiles, sizes, row_source, row_target, row_weights = tables
    word, block = tile
    expert, n, valid, second = unpack(word)
    d_buf = d_bufs.index(C)
    if second == 0:
        row = pool_row(block, pool_rows) + C * HALF
        codes = activate_rows(f0, f1, weights, clamp, act_scales, row, n, pool_rows, ACTIVATION, CLAMP, BIAS)
        mbarrier.wait(results_empty.index(C), (told & 1) ^ 1)
        reinterpret(d_buf, gl.float8e4nv, [HALF, BLOCK], CODES).store(codes)
        fence_async_shared()
        if C == 0:
            note_for_storer(told_note, word, block)
        mbarrier.arrive(results_full.index(C), count=1)
    else:
        if C == 1:
            # Consumer 0 has waited to tell.
            mbarrier.wait(results_empty.index(C), (told & 1) ^ 1)
        if BIAS:
            f0 = f0 * weights[:, None]
            f1 = f1 * weights[:, None]
        scatter_rows(d_buf, f0, f1, row_target, block * BLOCK + C * HALF, slots, n, H)
    return told + 1 - second


@gluon.jit
def consume(
    bars, bufs, d_bufs, told_note, tables, counters, peers, pool, slots, act_scales, biases, early, pool_rows, clamp,
    H: gl.constexpr, INTER: gl.constexpr, STAGES: gl.constexpr, LEADS: gl.constexpr, ACTIVATION: gl.constexpr,
    CLAMP: gl.constexpr, BIAS: gl.constexpr, CODES: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Consumer C, rows 64 C .. 64 C + 63 of each tile: consumer 1 stays behind consumer 0."""
    full, empty, lead, results_full, results_empty = bars
    tiles, sizes, row_source, row_target, row_weights = tables
    UP_K: gl.constexpr = H // BLOCK
    DOWN_K: gl.constexpr = INTER // BLOCK
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    LR: gl.constexpr = gl.SliceLayout(1, L)
    pull_early_rows(tables, counters, peers, pool[0], pool[1], early, pool_rows, H, True, C)
    it0 = 0
    turn = 0
    told = 0
    word, block = await_tile(it0, bars, bufs, STAGES)
    expert, n, valid, second = unpack(word)
    while valid > 0:
        tile = (word, block)
        if C == 1:
            mbarrier.wait(lead.index(turn % LEADS), (turn // LEADS) & 1)
        num_k = UP_K if second == 0 else DOWN_K
        if valid > C * HALF:
            weights = routing_weights(tile[1], row_weights, LR, C)
            starts = biases
            if BIAS:
                starts = tile_biases(tile[0], biases, H, INTER)
            f0, f1 = sum_tile(it0, num_k, turn, starts, bars, bufs, STAGES, LEADS, BIAS, C)
            told = tell_read(bars, told, tile, told_note, C)
            told = finish_tile(
                tile, f0, f1, weights, bars, d_bufs, told_note, tables, slots, act_scales, pool_rows, clamp, told, H,
                ACTIVATION, CLAMP, BIAS, CODES, C,
            )  # fmt: skip
        else:
            for k in range(num_k):
                s = stage_of(it0 + k, STAGES)
                mbarrier.wait(full.index(s), phase_of(it0 + k, STAGES))
                mbarrier.arrive(empty.index(s), count=1)
        it0 += num_k
        turn += 1
        word, block = await_tile(it0, bars, bufs, STAGES)
        expert, n, valid, second = unpack(word)
    tell_end(bars, told, told_note, C)


# ---------------------------------------------------------------- the kernel


@gluon.jit(do_not_specialize=["budget_ns", "clamp", "early"])
def mega_moe_kernel(
    rows_desc, up_desc, act_desc, down_desc, row_scales_desc, act_scales_desc, tiles, sizes, row_source, row_target,
    row_weights, pulled, finished, consumed, claimed, error, budget_ns, deltas, words, scales, slots, pool_words,
    pool_scales, act_scales, up_scales, down_scales, up_bias, down_bias, early, pool_rows, clamp, H: gl.constexpr,
    INTER: gl.constexpr, STAGES: gl.constexpr, CHUNK: gl.constexpr, ACTIVATION: gl.constexpr,
    CLAMP: gl.constexpr, BIAS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, WORKER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """One launch; e local experts, P rows at most, S rows of the pool.

    Args:
        rows_desc, act_desc: e4m3 [S, H] and [S, I], boxes [64, 128].
        up_desc, down_desc: e4m3 [e * 2 I, H] and [e * H, I], boxes [128, 128].
        row_scales_desc, act_scales_desc: fp32 [H / 128, S] and [I / 128, S], boxes [1, 64].
        tiles: int32 pairs, see ``triton_route``. sizes: int32, the rows that there are.
        row_source, row_target, row_weights: [P], see ``triton_route``.
        pulled, finished, consumed: int32 [P / 128], zeros. claimed: int32 [1], the number of programs.
        error, budget_ns, deltas: as in ``PeerMemory``. words, scales, slots: my part of the symmetric memory.
        pool_words, pool_scales, act_scales: the same memory as the descriptors'.
        up_scales, down_scales: fp32 [e, 2 I / 128, H / 128] and [e, H / 128, I / 128].
        up_bias, down_bias: with BIAS, fp32 or bf16 [e, 2 I] and [e, H]: what the sums start from. Routing weights then
            multiply the rows that are sent, not the activations.
        early: turns in which each consumer pulls four rows. pool_rows: S, a multiple of 128.
    """
    a_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, HALF, BLOCK], rows_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, BLOCK, BLOCK], up_desc.layout)
    d_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, BLOCK], RESULTS_LAYOUT)
    s_bufs = gl.allocate_shared_memory(gl.float32, [STAGES * 2, 1, HALF], row_scales_desc.layout)
    w_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 2], WEIGHT_SCALES_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # The bytes, and the scales of weights.
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(empty.index(stage), count=2)
    # Consumer 0 is at most STAGES blocks of K ahead. It must not tell of one tile and then of the next of the same
    # barrier before consumer 1 has waited for the first: a barrier's parity could not tell them apart.
    NK: gl.constexpr = (H if H < INTER else INTER) // BLOCK
    LEADS: gl.constexpr = (STAGES + NK - 1) // NK
    lead = gl.allocate_shared_memory(gl.int64, [LEADS, 1], mbarrier.MBarrierLayout())
    for tile in gl.static_range(LEADS):
        mbarrier.init(lead.index(tile), count=1)
    results_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    results_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(2):
        mbarrier.init(results_full.index(c), count=1)
        mbarrier.init(results_empty.index(c), count=1)
    bars = (full, empty, lead, results_full, results_empty)
    notes = gl.allocate_shared_memory(gl.int32, [STAGES, 2], NOTE_LAYOUT)
    told_note = gl.allocate_shared_memory(gl.int32, [2], NOTE_LAYOUT)
    bufs = (a_bufs, b_bufs, s_bufs, w_bufs, notes)
    tables = (tiles, sizes, row_source, row_target, row_weights)
    counters = (pulled, finished, consumed, claimed)
    peers = (deltas, words, scales)
    descs = (rows_desc, up_desc, act_desc, down_desc, row_scales_desc, act_scales_desc)
    waits = (error, budget_ns)
    biases = (up_bias, down_bias)
    pool = (pool_words, pool_scales)
    CODES: gl.constexpr = rows_desc.layout
    # Barriers and shared memory are made ready while the tables are still being written.
    pieces.wait_for_previous_kernel()
    gl.warp_specialize(
        [
            (
                consume,
                (
                    bars, bufs, d_bufs, told_note, tables, counters, peers, pool, slots, act_scales, biases, early,
                    pool_rows, clamp, H, INTER, STAGES, LEADS, ACTIVATION, CLAMP, BIAS, CODES, 0,
                ),
            ),
            (
                consume,
                (
                    bars, bufs, d_bufs, told_note, tables, counters, peers, pool, slots, act_scales, biases, early,
                    pool_rows, clamp, H, INTER, STAGES, LEADS, ACTIVATION, CLAMP, BIAS, CODES, 1,
                ),
            ),
            (
                load_tiles,
                (
                    descs, (up_scales, down_scales), bars, bufs, tables, counters, waits, pool_rows, H, INTER, STAGES,
                    True,
                ),
            ),
            (store_tiles, (act_desc, bars, d_bufs, told_note, counters, pool_rows, CODES)),
            (pull_rows, (tables, counters, waits, peers, pool_words, pool_scales, early, pool_rows, H, CHUNK, True, 0)),
            (pull_rows, (tables, counters, waits, peers, pool_words, pool_scales, early, pool_rows, H, CHUNK, True, 1)),
        ],
        [4, 1, 1, 1, 1],
        [CONSUMER_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS],
    )  # fmt: skip
