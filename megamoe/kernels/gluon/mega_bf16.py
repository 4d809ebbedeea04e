"""The BF16 mega-kernel for Hopper: roles, tiles and waits are those of the FP8 one, ``mega_moe``. Device code.

There are no scales: tokens travel as they are, the activation is weighted and rounded to BF16. A consumer has one
64 x 256 accumulator and one product always in flight, as in ``bf16``; consumer 1 stays SKEW stages behind consumer 0.
The left half of a tile of GEMM 1 is gate columns, the right half up columns. Sums, activation and rounding have the
same bits as the grouped GEMMs'.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from megamoe.kernels.gluon import pieces
from megamoe.kernels.gluon.mega_pieces import (
    BLOCK,
    HALF,
    NOTE_LAYOUT,
    RESULTS_LAYOUT,
    await_tile,
    load_tiles,
    note_for_storer,
    pull_early_rows,
    pull_rows,
    routing_weights,
    scatter_rows,
    store_tiles,
    tell_end,
    tell_read,
    tile_biases,
    unpack,
)

# ---------------------------------------------------------------- consumers


@gluon.jit
def sum_tile(
    it0, num_k, turn, starts, bars, bufs, LEAST: gl.constexpr, STAGES: gl.constexpr, SKEW: gl.constexpr,
    LEADS: gl.constexpr, BIAS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """fp32 sums [64, 256] of ``num_k`` stages from number ``it0`` on.

    Args:
        turn: number of the tile. LEAST: of any tile's ``num_k``.
        starts: with BIAS, pointers to what the sums of either half start from.
    """
    full, empty, lead, results_full, results_empty = bars
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    if BIAS:
        cols = gl.arange(0, 2 * BLOCK, layout=gl.SliceLayout(0, L))
        left = gl.load(starts[0] + cols % BLOCK)
        right = gl.load(starts[1] + cols % BLOCK)
        start = gl.where(cols < BLOCK, left, right)
        sums = warpgroup_mma_init(gl.full([HALF, 2 * BLOCK], 0.0, gl.float32, L) + start[None, :])
    else:
        sums = warpgroup_mma_init(gl.full([HALF, 2 * BLOCK], 0.0, gl.float32, L))
    for k in range(num_k):
        it = it0 + k
        s = it % STAGES
        mbarrier.wait(full.index(s), (it // STAGES) & 1)
        b = bufs[1].index(s).permute((1, 0))
        sums = warpgroup_mma(bufs[0].index(s * 2 + C), b, sums, use_acc=BIAS or k > 0, is_async=True)
        sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))
        mbarrier.arrive(empty.index(gl.maximum(it - 1, 0) % STAGES), count=1, pred=k > 0)
        if C == 0:
            # Consumer 1 may start.
            mbarrier.arrive(lead.index(turn % LEADS), count=1, pred=k == SKEW)
    total = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(empty.index((it0 + num_k - 1) % STAGES), count=1)
    if C == 0:
        if LEAST <= SKEW:
            mbarrier.arrive(lead.index(turn % LEADS), count=1, pred=num_k <= SKEW)
    return total


@gluon.jit
def finish_tile(
    tile, total, weights, bars, d_bufs, told_note, row_target, slots, clamp, told, H: gl.constexpr,
    ACTIVATION: gl.constexpr, CLAMP: gl.constexpr, BIAS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """The epilogue of a tile ``(word, block)``. ``told``: as in ``tell_read``; returns those with this one."""
    full, empty, lead, results_full, results_empty = bars
    word, block = tile
    expert, n, valid, second = unpack(word)
    d_buf = d_bufs.index(C)
    left, right = pieces.halves(total)
    if second == 0:
        gate = pieces.activate_gate(left, clamp, ACTIVATION, CLAMP)
        act = pieces.multiply_up(gate, right, clamp, ACTIVATION, CLAMP)
        if not BIAS:
            act = act * weights[:, None]
        mbarrier.wait(results_empty.index(C), (told & 1) ^ 1)
        d_buf.store(act.to(gl.bfloat16))
        fence_async_shared()
        if C == 0:
            note_for_storer(told_note, word, block)
        mbarrier.arrive(results_full.index(C), count=1)
    else:
        if C == 1:
            # Consumer 0 has waited to tell.
            mbarrier.wait(results_empty.index(C), (told & 1) ^ 1)
        if BIAS:
            left = left * weights[:, None]
            right = right * weights[:, None]
        scatter_rows(d_buf, left, right, row_target, block * BLOCK + C * HALF, slots, n, H)
    return told + 1 - second


@gluon.jit
def consume(
    bars, bufs, d_bufs, told_note, tables, counters, peers, pool_words, slots, biases, early, pool_rows, clamp,
    H: gl.constexpr, INTER: gl.constexpr, STAGES: gl.constexpr, SKEW: gl.constexpr, LEADS: gl.constexpr,
    ACTIVATION: gl.constexpr, CLAMP: gl.constexpr, BIAS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Consumer C, rows 64 C .. 64 C + 63 of each tile: consumer 1 stays behind consumer 0."""
    full, empty, lead, results_full, results_empty = bars
    tiles, sizes, row_source, row_target, row_weights = tables
    UP_K: gl.constexpr = H // HALF
    DOWN_K: gl.constexpr = INTER // HALF
    LEAST: gl.constexpr = UP_K if UP_K < DOWN_K else DOWN_K
    # That of half the sums.
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    LR: gl.constexpr = gl.SliceLayout(1, L)
    pull_early_rows(tables, counters, peers, pool_words, pool_words, early, pool_rows, H, False, C)
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
            total = sum_tile(it0, num_k, turn, starts, bars, bufs, LEAST, STAGES, SKEW, LEADS, BIAS, C)
            told = tell_read(bars, told, tile, told_note, C)
            told = finish_tile(
                tile,
                total,
                weights,
                bars,
                d_bufs,
                told_note,
                row_target,
                slots,
                clamp,
                told,
                H,
                ACTIVATION,
                CLAMP,
                BIAS,
                C,
            )
        else:
            for k in range(num_k):
                it = it0 + k
                mbarrier.wait(full.index(it % STAGES), (it // STAGES) & 1)
                mbarrier.arrive(empty.index(it % STAGES), count=1)
        it0 += num_k
        turn += 1
        word, block = await_tile(it0, bars, bufs, STAGES)
        expert, n, valid, second = unpack(word)
    tell_end(bars, told, told_note, C)


# ---------------------------------------------------------------- the kernel


@gluon.jit(do_not_specialize=["budget_ns", "clamp", "early"])
def mega_moe_bf16_kernel(
    rows_desc, up_desc, act_desc, down_desc, store_desc, tiles, sizes, row_source, row_target, row_weights, pulled,
    finished, consumed, claimed, error, budget_ns, deltas, words, slots, pool_words, up_bias, down_bias, early,
    pool_rows, clamp, H: gl.constexpr, INTER: gl.constexpr, STAGES: gl.constexpr, SKEW: gl.constexpr,
    CHUNK: gl.constexpr, ACTIVATION: gl.constexpr, CLAMP: gl.constexpr, BIAS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, WORKER_REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """One launch; e local experts, P rows at most, S rows of the pool.

    Args:
        rows_desc, act_desc: bf16 [S, H] and [S, I], boxes [64, 64]. store_desc: as ``act_desc``, boxes [64, 128].
        up_desc, down_desc: bf16 [e * 2 I, H] and [e * H, I], boxes [128, 64].
        tiles: int32 pairs, see ``triton_route``. sizes: int32, the rows that there are.
        row_source, row_target, row_weights: [P], see ``triton_route``.
        pulled, finished, consumed, claimed: as in ``mega_moe_kernel``.
        error, budget_ns, deltas: as in ``PeerMemory``. words, slots: my part of the symmetric memory.
        pool_words: the same memory as the descriptor's. early, pool_rows: as in ``mega_moe_kernel``.
        up_bias, down_bias: with BIAS, as in ``mega_moe_kernel``.
    """
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, HALF, HALF], rows_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * BLOCK, HALF], up_desc.layout)
    d_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, BLOCK], RESULTS_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    # Consumer 0 is at most STAGES blocks of K ahead. It must not tell of one tile and then of the next of the same
    # barrier before consumer 1 has waited for the first: a barrier's parity could not tell them apart.
    NK: gl.constexpr = (H if H < INTER else INTER) // HALF
    TOLD: gl.constexpr = SKEW if SKEW < NK - 1 else NK - 1
    LEADS: gl.constexpr = 1 if NK + TOLD >= STAGES else (STAGES - TOLD + NK - 1) // NK
    gl.static_assert(SKEW > 0 and STAGES > SKEW and LEADS * NK + TOLD >= STAGES)
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
    bufs = (a_bufs, b_bufs, notes)
    tables = (tiles, sizes, row_source, row_target, row_weights)
    counters = (pulled, finished, consumed, claimed)
    # Nothing is read from where scales would be.
    peers = (deltas, words, words)
    descs = (rows_desc, up_desc, act_desc, down_desc, rows_desc, act_desc)
    waits = (error, budget_ns)
    biases = (up_bias, down_bias)
    # Barriers and shared memory are made ready while the tables are still being written.
    pieces.wait_for_previous_kernel()
    gl.warp_specialize(
        [
            (
                consume,
                (
                    bars, bufs, d_bufs, told_note, tables, counters, peers, pool_words, slots, biases, early, pool_rows,
                    clamp, H, INTER, STAGES, SKEW, LEADS, ACTIVATION, CLAMP, BIAS, 0,
                ),
            ),
            (
                consume,
                (
                    bars, bufs, d_bufs, told_note, tables, counters, peers, pool_words, slots, biases, early, pool_rows,
                    clamp, H, INTER, STAGES, SKEW, LEADS, ACTIVATION, CLAMP, BIAS, 1,
                ),
            ),
            (
                load_tiles,
                (descs, tables, bars, bufs, tables, counters, waits, pool_rows, H, INTER, STAGES, False),
            ),
            (store_tiles, (store_desc, bars, d_bufs, told_note, counters, pool_rows, None)),
            (pull_rows, (tables, counters, waits, peers, pool_words, pool_words, early, pool_rows, H, CHUNK, False, 0)),
            (pull_rows, (tables, counters, waits, peers, pool_words, pool_words, early, pool_rows, H, CHUNK, False, 1)),
        ],
        [4, 1, 1, 1, 1],
        [CONSUMER_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS, WORKER_REGISTERS],
    )  # fmt: skip
