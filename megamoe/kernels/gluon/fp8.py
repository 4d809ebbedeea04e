"""FP8 grouped GEMM for Hopper, tile 128 x 256 or 128 x 192, plain or with a fused activation. Device code.

D = A B^T: A [rows, K] e4m3 with one scale per 1x128, B [experts * N, K] e4m3 with one scale per 128x128. Each product
of 128 along K comes from the tensor cores and is scaled and added up in fp32 registers (they keep about 14 bits).

Three roles on each SM. The loader warp walks the tiles and fills a ring of stages by TMA; the ring does not stop
between tiles. Two consumers of four warps own 64 rows each and run two waves of columns per stage, taking turns: one
scales its last wave while the other's runs. The waves are two parts of the tile or, with an activation, gate and up of
the same 128 columns, so that both meet in one thread and weights need no interleaving. A tile's results are stored
under the next tile's first wave.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from megamoe.kernels.gluon import pieces, schedule
from megamoe.kernels.gluon.spelling import reinterpret, tma_load


@gluon.jit
def wave_columns(n_block, n, WIDTH: gl.constexpr, BOTH: gl.constexpr):
    """First row of B of either wave, counted from the tile's first.

    A narrow second wave is left of the first in odd tiles: so no wave crosses a border of 128 columns and their scales.
    """
    first = n_block * 0
    second = first + 128
    if BOTH:
        second = n // 2
    elif WIDTH == 64:
        first = n_block % 2 * 64
        second = 128 - n_block % 2 * 128
    return first, second


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
    n,
    k,
    LAYOUT: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    TOGETHER: gl.constexpr,
    BLOCK_M: gl.constexpr,
    WIDTH: gl.constexpr,
    BOTH: gl.constexpr,
):
    """The loader. TOGETHER = 2 requests two stages at a time: 256 contiguous bytes of each row, which suits DRAM."""
    a_desc, b_desc, b1_desc, sfa_desc = descs
    full, empty = bars
    a_bufs, b_bufs, b1_bufs, sfa_bufs, sfb_bufs, notes = bufs
    STEP: gl.constexpr = 128 if BOTH else 128 + WIDTH
    columns = n // 2 if BOTH else n
    num_n = (columns + STEP - 1) // STEP
    num_k = (k + 127) // 128
    sfb_rows = (n + 127) // 128
    lane = pieces.lanes(2)
    walk = schedule.problem(index, num_rows, num_experts, num_n, LAYOUT)
    it = 0
    state = schedule.first_group(walk, BLOCK_M, LAYOUT)
    tile, state, row, valid, expert, n_block = schedule.find(
        gl.program_id(0), state, walk, counter, counted, BLOCK_M, GROUP_M, LAYOUT
    )
    while state[0] < walk[2]:
        first, second = wave_columns(n_block, n, WIDTH, BOTH)
        a_row = row
        b_row = expert * n + n_block * STEP
        sfa_row = 0
        sfa_col = row
        if LAYOUT == schedule.MASKED:
            sfa_row = expert * num_k
            sfa_col = row - expert * num_rows
        note = pieces.tile_note(row, n_block, valid, expert)
        sfb_row = (n_block * STEP + gl.where(lane == 0, first, second)) // 128
        sfb = sfb_ptr + (expert.to(gl.int64) * sfb_rows + sfb_row) * num_k
        sfb_mask = sfb_row < sfb_rows
        for k0 in range(0, num_k, TOGETHER):
            scales0 = gl.load(sfb + k0, mask=sfb_mask, other=0.0)
            scales1 = scales0
            if TOGETHER == 2:
                scales1 = gl.load(sfb + k0 + 1, mask=sfb_mask & (k0 + 1 < num_k), other=0.0)
            for h in gl.static_range(TOGETHER):
                if k0 + h < num_k:
                    s = (it + h) % STAGES
                    mbarrier.wait(empty.index(s), (((it + h) // STAGES) & 1) ^ 1)
                    mbarrier.expect(full.index(s), (BLOCK_M + 128 + WIDTH) * 128 + 128 * 4)
                    tma_load(b_desc, [b_row + first, (k0 + h) * 128], full.index(s), b_bufs.index(s))
                    if TOGETHER == 1:
                        tma_load(b1_desc, [b_row + second, k0 * 128], full.index(s), b1_bufs.index(s))
            if TOGETHER == 2:
                for h in gl.static_range(TOGETHER):
                    if k0 + h < num_k:
                        s = (it + h) % STAGES
                        tma_load(b1_desc, [b_row + second, (k0 + h) * 128], full.index(s), b1_bufs.index(s))
            for h in gl.static_range(TOGETHER):
                if k0 + h < num_k:
                    s = (it + h) % STAGES
                    tma_load(a_desc, [a_row, (k0 + h) * 128], full.index(s), a_bufs.index(s).slice(0, BLOCK_M, 0))
                    tma_load(sfa_desc, [sfa_row + k0 + h, sfa_col], full.index(s), sfa_bufs.index(s))
            # Last, for the scales of B come from memory too.
            for h in gl.static_range(TOGETHER):
                if k0 + h < num_k:
                    s = (it + h) % STAGES
                    if h == 0:
                        sfb_bufs.index(s).store(scales0)
                    else:
                        sfb_bufs.index(s).store(scales1)
                    notes.index(s).store(note)
                    mbarrier.arrive(full.index(s), count=1)
            it += gl.minimum(num_k - k0, TOGETHER)
        tile, state, row, valid, expert, n_block = schedule.find(
            schedule.next_tile(tile, counter, counted), state, walk, counter, counted, BLOCK_M, GROUP_M, LAYOUT
        )
    s = it % STAGES
    mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
    notes.index(s).store(pieces.tile_note(it * 0, 0, 0, 0))
    mbarrier.arrive(full.index(s), count=2)
    schedule.leave(tile, state[1], counter, counted)


@gluon.jit
def wave(a_bufs, b_bufs, s, C: gl.constexpr, partial):
    """64 x columns x 128 on the tensor cores. ``partial`` is ignored but names the registers: one set for all waves."""
    a = a_bufs.index(s).slice(C * 64, 64, 0)
    return warpgroup_mma(a, b_bufs.index(s).permute((1, 0)), partial, use_acc=False, is_async=True)


@gluon.jit
def store_activated(
    d_desc,
    d_buf,
    results,
    row,
    col,
    valid,
    expert,
    gate,
    up,
    LAYOUT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    CLAMP: gl.constexpr,
    WEIGHTED: gl.constexpr,
    OUT: gl.constexpr,
):
    """activation(gate) * up * routing weight; to FP8 with scale = max(amax, 1e-10) / 448 per row of 128 columns."""
    d_ptr, sf_ptr, sf_stride, weights_ptr, clamp, num_rows, n = results
    L: gl.constexpr = gate.type.layout
    offset = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    rows = row.to(gl.int64) + offset
    inside = offset < valid
    gate = pieces.activate_gate(gate, clamp, ACTIVATION, CLAMP)
    act = pieces.multiply_up(gate, up, clamp, ACTIVATION, CLAMP)
    if WEIGHTED:
        act = act * gl.load(weights_ptr + rows, mask=inside, other=0.0)[:, None]
    if OUT == pieces.FP8:
        amax = gl.maximum(gl.max(gl.abs(act), 1), pieces.MIN_AMAX)
        block = col // 128
        sf_rows = rows
        if LAYOUT == schedule.MASKED:
            block += expert * (n // 128)
            sf_rows -= expert * num_rows
        gl.store(sf_ptr + block.to(gl.int64) * sf_stride + sf_rows, amax * (1.0 / 448.0), mask=inside)
        pieces.store_tile(d_desc, d_ptr, d_buf, row, col, valid, n, (act * (448.0 / amax)[:, None]).to(gl.float8e4nv))
    else:
        pieces.store_tile(d_desc, d_ptr, d_buf, row, col, valid, n, act.to(gl.bfloat16))


@gluon.jit
def store_part(d_desc, d_ptr, d_buf, row, col, valid, n, sums, OUT: gl.constexpr):
    if OUT == pieces.FP32 or OUT == pieces.ADD_FP32:
        pieces.store_wide_rows(d_ptr, row, col, valid, n, sums, OUT == pieces.ADD_FP32)
    else:
        pieces.store_tile(d_desc, d_ptr, d_buf, row, col, valid, n, sums.to(gl.bfloat16))


@gluon.jit
def store_last(
    places,
    results,
    last,
    f0,
    f1,
    LAYOUT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    CLAMP: gl.constexpr,
    WEIGHTED: gl.constexpr,
    OUT: gl.constexpr,
):
    """What is left of a tile when the next one's first wave runs: all with an activation, else the second wave's."""
    d_desc, d_buf, d1_desc, d1_buf = places
    row, col, valid, expert = last
    if ACTIVATION != pieces.NONE:
        store_activated(
            d_desc,
            d_buf,
            results,
            row,
            col,
            valid,
            expert,
            f0,
            f1,
            LAYOUT,
            ACTIVATION,
            CLAMP,
            WEIGHTED,
            OUT,
        )
    else:
        store_part(d1_desc, results[0], d1_buf, row, col, valid, results[6], f1, OUT)


@gluon.jit
def consume_tiles(
    d_descs,
    d_ptr,
    bias_ptr,
    sf_ptr,
    sf_stride,
    weights_ptr,
    clamp,
    bars,
    bufs,
    d_bufs,
    num_rows,
    n,
    k,
    LAYOUT: gl.constexpr,
    STAGES: gl.constexpr,
    WIDTH: gl.constexpr,
    ACTIVATION: gl.constexpr,
    CLAMP: gl.constexpr,
    WEIGHTED: gl.constexpr,
    PRE: gl.constexpr,
    BIAS: gl.constexpr,
    OUT: gl.constexpr,
    C: gl.constexpr,
):
    """Consumer C: rows 64 C .. 64 C + 63 of each tile."""
    full, empty = bars
    a_bufs, b_bufs, b1_bufs, sfa_bufs, sfb_bufs, notes = bufs
    # Consumer 1 takes a narrow wave first: it runs beside the other's wide one, each long enough to scale the last.
    LATE: gl.constexpr = 1 if WIDTH < 128 and C == 1 else 0
    W0: gl.constexpr = WIDTH if LATE == 1 else 128
    W1: gl.constexpr = 128 if LATE == 1 else WIDTH
    if LATE == 1:
        d1_desc, d_desc = d_descs
        b1_bufs, b_bufs = b_bufs, b1_bufs
    else:
        d_desc, d1_desc = d_descs
    d_buf = d_bufs[LATE].index(C)
    d1_buf = d_bufs[1 - LATE].index(C)
    if PRE and OUT == pieces.FP8:
        # Both results take turns in the larger one's memory.
        CODES: gl.constexpr = d_desc.layout
        d_buf = reinterpret(d1_buf, gl.float8e4nv, [2, 64, 128], CODES).index(0)
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W0, 32])
    L1: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W1, 32])
    LR: gl.constexpr = gl.SliceLayout(1, L)
    BOTH: gl.constexpr = ACTIVATION != pieces.NONE
    NARROW: gl.constexpr = WIDTH < 128
    STEP: gl.constexpr = 128 if BOTH else 128 + WIDTH
    num_k = (k + 127) // 128
    columns = n // 2 if BOTH else n
    results = (d_ptr, sf_ptr, sf_stride, weights_ptr, clamp, num_rows, columns)
    places = (d_desc, d_buf, d1_desc, d1_buf)
    f0 = gl.full([64, W0], 0.0, gl.float32, L)
    f1 = gl.full([64, W1], 0.0, gl.float32, L1)
    p = f0
    # The partial of a narrow second wave; a full one shares the first's registers.
    q = f1
    # The tile before, stored inside the next one; none yet.
    last_row = 0
    last_col = 0
    last_valid = 0
    last_expert = 0
    it = 0
    if C == 1:
        pieces.pass_turn(C)
    mbarrier.wait(full.index(0), 0)
    row, n_block, valid, expert = pieces.read_note(notes.index(0), LR)
    while valid > 0:
        row += C * 64
        valid -= C * 64
        # Consumer 0 has a row in every tile.
        left = valid if C == 1 else 1
        if left > 0:
            col = n_block * STEP
            if LATE == 1:
                second, first = wave_columns(n_block, n, WIDTH, BOTH)
            else:
                first, second = wave_columns(n_block, n, WIDTH, BOTH)
            # K block 0; the tile before is stored under wave 0.
            s = it % STAGES
            a = sfa_bufs.index(s).reshape([128]).slice(C * 64, 64, 0).load(LR)
            b0 = sfb_bufs.index(s).slice(LATE, 1, 0).load(LR)
            b1 = sfb_bufs.index(s).slice(1 - LATE, 1, 0).load(LR)
            pieces.wait_turn(C)
            running = wave(a_bufs, b_bufs, s, C, p)
            pieces.pass_turn(C)
            last = (last_row, last_col, last_valid, last_expert)
            store_last(places, results, last, f0, f1, LAYOUT, ACTIVATION, CLAMP, WEIGHTED, OUT)
            if BIAS:
                f0 = pieces.bias_rows(bias_ptr, col + first, expert, n, L, 64, W0)
            p = warpgroup_mma_wait(0, deps=[running])
            if BIAS:
                f0 += p * (a * b0)[:, None]
            else:
                f0 = p * (a * b0)[:, None]
            pieces.wait_turn(C)
            if NARROW:
                running1 = wave(a_bufs, b1_bufs, s, C, q)
            else:
                running1 = wave(a_bufs, b1_bufs, s, C, p)
            pieces.pass_turn(C)
            scale1 = a * b1
            if BIAS:
                f1 = pieces.bias_rows(bias_ptr, col + second, expert, n, L1, 64, W1)
            else:
                f1 = gl.full([64, W1], 0.0, gl.float32, L1)
            for _ in range(1, num_k):  # not unrolled: ptxas would spill
                it += 1
                s = it % STAGES
                mbarrier.wait(full.index(s), (it // STAGES) & 1)
                q = warpgroup_mma_wait(0, deps=[running1])
                mbarrier.arrive(empty.index((it - 1) % STAGES), count=1)
                # After the arrive: Triton puts a barrier between it and the next shared read, not to be the wave.
                a = sfa_bufs.index(s).reshape([128]).slice(C * 64, 64, 0).load(LR)
                b0 = sfb_bufs.index(s).slice(LATE, 1, 0).load(LR)
                b1 = sfb_bufs.index(s).slice(1 - LATE, 1, 0).load(LR)
                f1 += q * of_rows(scale1, L1)[:, None]
                pieces.wait_turn(C)
                if NARROW:
                    running = wave(a_bufs, b_bufs, s, C, p)
                else:
                    running = wave(a_bufs, b_bufs, s, C, q)
                pieces.pass_turn(C)
                p = warpgroup_mma_wait(0, deps=[running])
                f0 += p * (a * b0)[:, None]
                pieces.wait_turn(C)
                if NARROW:
                    running1 = wave(a_bufs, b1_bufs, s, C, q)
                else:
                    running1 = wave(a_bufs, b1_bufs, s, C, p)
                pieces.pass_turn(C)
                scale1 = a * b1
            # The second wave of the last K block still runs.
            last_row = row
            last_col = col + (0 if BOTH else second)
            last_valid = valid
            last_expert = expert
            if not BOTH:
                store_part(d_desc, d_ptr, d_buf, row, col + first, valid, columns, f0, OUT)
            q = warpgroup_mma_wait(0, deps=[running1])
            if not NARROW:
                p = q
            mbarrier.arrive(empty.index(it % STAGES), count=1)
            f1 += q * of_rows(scale1, L1)[:, None]
            if PRE:
                pieces.store_half(d1_desc, d1_buf, row, col, valid, f0.to(gl.bfloat16), 0)
                pieces.store_half(d1_desc, d1_buf, row, col, valid, f1.to(gl.bfloat16), 1)
        else:
            # No rows here: only the turns. What is to be stored stays where it is.
            for k in range(num_k):
                s = (it + k) % STAGES
                mbarrier.wait(full.index(s), ((it + k) // STAGES) & 1)
                for _ in gl.static_range(2):
                    pieces.wait_turn(C)
                    pieces.pass_turn(C)
                mbarrier.arrive(empty.index(s), count=1)
            it += num_k - 1
        it += 1
        s = it % STAGES
        mbarrier.wait(full.index(s), (it // STAGES) & 1)
        row, n_block, valid, expert = pieces.read_note(notes.index(s), LR)
    last = (last_row, last_col, last_valid, last_expert)
    store_last(places, results, last, f0, f1, LAYOUT, ACTIVATION, CLAMP, WEIGHTED, OUT)
    tma.store_wait(0)


@gluon.jit
def of_rows(scale, L: gl.constexpr):
    """One value per row of the first wave's layout in the second wave's: the same registers."""
    return gl.convert_layout(scale, gl.SliceLayout(1, L), assert_trivial=True)


@gluon.jit(
    do_not_specialize=["counted", "num_rows", "num_experts", "n8", "k", "sf_stride", "clamp"],
    do_not_specialize_on_alignment=["sfb_ptr", "bias_ptr", "sf_ptr", "weights_ptr", "index", "counter"],
)
def fp8_gemm_kernel(
    a_desc,
    b_desc,
    b1_desc,
    sfa_desc,
    d_desc,
    d1_desc,
    sfb_ptr,
    d_ptr,
    bias_ptr,
    sf_ptr,
    weights_ptr,
    index,
    counter,
    counted,
    num_rows,
    num_experts,
    n8,
    k,
    sf_stride,
    clamp,
    LAYOUT: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    TOGETHER: gl.constexpr,
    BLOCK_M: gl.constexpr,
    WIDTH: gl.constexpr,
    ACTIVATION: gl.constexpr,
    CLAMP: gl.constexpr,
    WEIGHTED: gl.constexpr,
    PRE: gl.constexpr,
    BIAS: gl.constexpr,
    OUT: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One launch: as many programs as SMs.

    Args:
        a_desc: A, boxes [BLOCK_M, 128].
        b_desc, b1_desc: B as [experts * N, K], boxes [128, 128] and [WIDTH, 128], for the first and the second wave.
        sfa_desc: scales of A, fp32 [K / 128, rows] (masked: [experts * K / 128, rows]), boxes [1, 128].
        d_desc, d1_desc: D, boxes [64, 128] and [64, WIDTH].
        sfb_ptr: fp32 [experts, ceil(N / 128), ceil(K / 128)].
        bias_ptr: [experts, N]. weights_ptr: fp32 [rows], routing weights. n8: N / 8.
        index, counter, counted: see ``schedule``.
        sf_ptr: scales of D, [columns / 128, rows] (masked: [experts * columns / 128, rows]), stride ``sf_stride``.
        BLOCK_M: rows that are a tile: 128, or 64, which are consumer 0's.
        WIDTH: columns of the second wave, 128 or 64; 128 with an activation.
    """
    n = n8 * 8
    BOTH: gl.constexpr = ACTIVATION != pieces.NONE
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], b_desc.layout)
    b1_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, WIDTH, 128], b1_desc.layout)
    sfa_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 128], sfa_desc.layout)
    sfb_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 2], WORDS)
    notes = gl.allocate_shared_memory(gl.int32, [STAGES, 4], WORDS)
    # The results of full-width waves take turns in one buffer; fp32 ones need none.
    d_bufs = notes
    d1_bufs = notes
    if OUT == pieces.BF16 or OUT == pieces.FP8:
        if PRE:
            WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
            d_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], WIDE)
        else:
            d_bufs = gl.allocate_shared_memory(d_desc.dtype, [2, 64, 128], d_desc.layout)
        d1_bufs = d_bufs
        if WIDTH < 128:
            d1_bufs = gl.allocate_shared_memory(d1_desc.dtype, [2, 64, WIDTH], d1_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # The loader arrives when it has asked for the operands and when it has written the scales of B.
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(empty.index(stage), count=2)
    bars = (full, empty)
    bufs = (a_bufs, b_bufs, b1_bufs, sfa_bufs, sfb_bufs, notes)
    d_descs = (d_desc, d1_desc)
    both_d_bufs = (d_bufs, d1_bufs)
    descs = (a_desc, b_desc, b1_desc, sfa_desc)
    pieces.wait_for_previous_kernel()
    gl.warp_specialize(
        [
            (
                consume_tiles,
                (
                    d_descs,
                    d_ptr,
                    bias_ptr,
                    sf_ptr,
                    sf_stride,
                    weights_ptr,
                    clamp,
                    bars,
                    bufs,
                    both_d_bufs,
                    num_rows,
                    n,
                    k,
                    LAYOUT,
                    STAGES,
                    WIDTH,
                    ACTIVATION,
                    CLAMP,
                    WEIGHTED,
                    PRE,
                    BIAS,
                    OUT,
                    0,
                ),
            ),
            (
                consume_tiles,
                (
                    d_descs,
                    d_ptr,
                    bias_ptr,
                    sf_ptr,
                    sf_stride,
                    weights_ptr,
                    clamp,
                    bars,
                    bufs,
                    both_d_bufs,
                    num_rows,
                    n,
                    k,
                    LAYOUT,
                    STAGES,
                    WIDTH,
                    ACTIVATION,
                    CLAMP,
                    WEIGHTED,
                    PRE,
                    BIAS,
                    OUT,
                    1,
                ),
            ),
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
                    n,
                    k,
                    LAYOUT,
                    STAGES,
                    GROUP_M,
                    TOGETHER,
                    BLOCK_M,
                    WIDTH,
                    BOTH,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )
