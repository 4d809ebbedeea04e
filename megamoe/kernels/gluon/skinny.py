"""FP8 GEMM for few rows per expert, bound by reading the weights. Device code.

As ``fp8``, with tiles of BLOCK_M rows of A x BLOCK_N rows of B. A stage holds KS blocks of 128 along K that are
requested together: KS x 128 contiguous bytes of each row of weights, which DRAM pages like. With SWAP the weights are
the tensor cores' 64-row operand (D^T = B A^T), so their work grows with BLOCK_M; without it the rows of A are. The two
consumers split the 64-row operand where it has 128 rows, the other one else.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from megamoe.kernels.gluon import pieces, schedule
from megamoe.kernels.gluon.spelling import tma_load

SCALES = gl.constexpr(8)
"""Scales of B in a stage: KS blocks of up to two rows of blocks."""


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
    BLOCK_N: gl.constexpr,
    KS: gl.constexpr,
    SFA_COLS: gl.constexpr,
):
    """The loader. K / 128 rounded up is a multiple of KS; TOGETHER stages are requested at a time."""
    a_desc, b_desc, sfa_desc = descs
    full, empty = bars
    a_bufs, b_bufs, sfa_bufs, sfb_bufs, notes = bufs
    num_n = (n + BLOCK_N - 1) // BLOCK_N
    num_k = (k + 127) // 128
    sfb_rows = (n + 127) // 128
    lane = pieces.lanes(SCALES)
    walk = schedule.problem(index, num_rows, num_experts, num_n, LAYOUT)
    late = gl.maximum(num_k - KS * STAGES, 0) // (KS * TOGETHER) * (KS * TOGETHER)
    it = 0
    state = schedule.first_group(walk, BLOCK_M, LAYOUT)
    tile, state, row, valid, expert, n_block = schedule.find(
        gl.program_id(0), state, walk, counter, counted, BLOCK_M, GROUP_M, LAYOUT
    )
    while state[0] < walk[2]:
        note = pieces.tile_note(row, n_block, valid, expert)
        a_row = row
        b_row = expert * n + n_block * BLOCK_N
        sfa_row = 0
        sfa_col = row
        if LAYOUT == schedule.MASKED:
            sfa_row = expert * num_k
            sfa_col = row - expert * num_rows
        # Lane 2 j + h: K block j, weight rows 128 h ... of the tile.
        sfb_row = n_block * BLOCK_N // 128 + lane % 2
        sfb = sfb_ptr + (expert.to(gl.int64) * sfb_rows + sfb_row) * num_k + lane // 2
        sfb_mask = (sfb_row < sfb_rows) & (lane < 2 * KS)
        for k0 in range(0, num_k, KS * TOGETHER):
            scales0 = gl.load(sfb + k0, mask=sfb_mask, other=0.0)
            scales1 = scales0
            if TOGETHER == 2:
                scales1 = gl.load(sfb + k0 + KS, mask=sfb_mask & (k0 + KS < num_k), other=0.0)
            for h in gl.static_range(TOGETHER):
                if k0 + h * KS < num_k:
                    s = (it + h) % STAGES
                    mbarrier.wait(empty.index(s), (((it + h) // STAGES) & 1) ^ 1)
                    mbarrier.expect(full.index(s), KS * ((BLOCK_M + BLOCK_N) * 128 + SFA_COLS * 4))
                    for j in gl.static_range(KS):
                        tma_load(b_desc, [b_row, (k0 + h * KS + j) * 128], full.index(s), b_bufs.index(s * KS + j))
            for h in gl.static_range(TOGETHER):
                if k0 + h * KS < num_k:
                    s = (it + h) % STAGES
                    for j in gl.static_range(KS):
                        kb = k0 + h * KS + j
                        tma_load(a_desc, [a_row, kb * 128], full.index(s), a_bufs.index(s * KS + j))
                        tma_load(sfa_desc, [sfa_row + kb, sfa_col], full.index(s), sfa_bufs.index(s * KS + j))
            # Last, for the scales of B come from memory too.
            for h in gl.static_range(TOGETHER):
                if k0 + h * KS < num_k:
                    s = (it + h) % STAGES
                    if h == 0:
                        sfb_bufs.index(s).store(scales0)
                    else:
                        sfb_bufs.index(s).store(scales1)
                    notes.index(s).store(note)
                    mbarrier.arrive(full.index(s), count=1)
            it += gl.minimum((num_k - k0) // KS, TOGETHER)
            if k0 == late:
                # Looks for the next tile while the ring is full.
                tile, state, row, valid, expert, n_block = schedule.find(
                    schedule.next_tile(tile, counter, counted), state, walk, counter, counted, BLOCK_M, GROUP_M, LAYOUT
                )
    s = it % STAGES
    mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
    notes.index(s).store(pieces.tile_note(it * 0, 0, 0, 0))
    mbarrier.arrive(full.index(s), count=2)
    schedule.leave(tile, state[1], counter, counted)


@gluon.jit
def multiply(
    a_bufs, b_bufs, i, partial, SWAP: gl.constexpr, SPLIT_ROWS: gl.constexpr, COLS: gl.constexpr, C: gl.constexpr
):
    """64 x COLS x 128 on the tensor cores, consumer C's share of one K block."""
    if SWAP:
        wide = b_bufs.index(i)
        narrow = a_bufs.index(i)
    else:
        wide = a_bufs.index(i)
        narrow = b_bufs.index(i)
    if SPLIT_ROWS:
        wide = wide.slice(C * 64, 64, 0)
    else:
        narrow = narrow.slice(C * COLS, COLS, 0)
    return warpgroup_mma(wide, narrow.permute((1, 0)), partial, use_acc=False, is_async=True)


@gluon.jit
def scale_of(
    sfa_bufs,
    sfb_bufs,
    s,
    j: gl.constexpr,
    KS: gl.constexpr,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    HALF: gl.constexpr,
    SWAP: gl.constexpr,
    SFA_COLS: gl.constexpr,
    LT: gl.constexpr,
):
    """Product of both scales of K block j of a stage, to be broadcast along the weights' dimension."""
    sfb = sfb_bufs.index(s).slice(2 * j + HALF, 1, 0).load(LT)
    sfa = sfa_bufs.index(s * KS + j).reshape([SFA_COLS]).slice(FIRST, COUNT, 0).load(LT)
    scale = sfa * sfb
    if SWAP:
        scale = scale[None, :]
    else:
        scale = scale[:, None]
    return scale


@gluon.jit
def consume_tiles(
    d_ptr,
    bias_ptr,
    bars,
    bufs,
    n,
    k,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    KS: gl.constexpr,
    SFA_COLS: gl.constexpr,
    SWAP: gl.constexpr,
    BIAS: gl.constexpr,
    OUT: gl.constexpr,
    C: gl.constexpr,
):
    full, empty = bars
    a_bufs, b_bufs, sfa_bufs, sfb_bufs, notes = bufs
    SPLIT_ROWS: gl.constexpr = (BLOCK_N if SWAP else BLOCK_M) == 128
    COLS: gl.constexpr = (BLOCK_M if SWAP else BLOCK_N) // (1 if SPLIT_ROWS else 2)
    # Consumer C's part of the tile: rows of A from FIRST_M, rows of B from FIRST_N.
    FIRST_M: gl.constexpr = C * (BLOCK_M // 2) if SPLIT_ROWS != SWAP else 0
    FIRST_N: gl.constexpr = C * (BLOCK_N // 2) if SPLIT_ROWS == SWAP else 0
    ROWS_M: gl.constexpr = COLS if SWAP else 64
    HALF: gl.constexpr = FIRST_N // 128
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLS, 32])
    LT: gl.constexpr = gl.SliceLayout(0 if SWAP else 1, L)
    # Results in memory order: n runs fastest, along dimension 0 with SWAP.
    LO: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]) if SWAP else L
    LN: gl.constexpr = gl.SliceLayout(1 if SWAP else 0, LO)
    LM: gl.constexpr = gl.SliceLayout(0 if SWAP else 1, LO)
    num_k = (k + 127) // 128
    p0 = gl.full([64, COLS], 0.0, gl.float32, L)
    p1 = p0
    p2 = p0
    p3 = p0
    it = 0
    mbarrier.wait(full.index(0), 0)
    row, n_block, valid, expert = pieces.read_note(notes.index(0), LT)
    while valid > 0:
        row += FIRST_M
        col = n_block * BLOCK_N + FIRST_N
        valid -= FIRST_M
        sums = gl.full([64, COLS], 0.0, gl.float32, L)
        if BIAS:
            # As in ``fp8``: added at the end it would give other bits.
            place = col + gl.arange(0, 64 if SWAP else COLS, layout=gl.SliceLayout(1 if SWAP else 0, L))
            bias = gl.load(bias_ptr + expert.to(gl.int64) * n + place, mask=place < n, other=0.0).to(gl.float32)
            if SWAP:
                sums += bias[:, None]
            else:
                sums += bias[None, :]
        for _ in range(0, num_k, KS):
            s = it % STAGES
            mbarrier.wait(full.index(s), (it // STAGES) & 1)
            # All products of the stage in flight: ptxas would serialise them if each was scaled in turn.
            q0 = multiply(a_bufs, b_bufs, s * KS, p0, SWAP, SPLIT_ROWS, COLS, C)
            if KS >= 2:
                q1 = multiply(a_bufs, b_bufs, s * KS + 1, p1, SWAP, SPLIT_ROWS, COLS, C)
            if KS == 4:
                q2 = multiply(a_bufs, b_bufs, s * KS + 2, p2, SWAP, SPLIT_ROWS, COLS, C)
                q3 = multiply(a_bufs, b_bufs, s * KS + 3, p3, SWAP, SPLIT_ROWS, COLS, C)
                p0, p1, p2, p3 = warpgroup_mma_wait(0, deps=[q0, q1, q2, q3])
            elif KS == 2:
                p0, p1 = warpgroup_mma_wait(0, deps=[q0, q1])
            else:
                p0 = warpgroup_mma_wait(0, deps=[q0])
            sums += p0 * scale_of(sfa_bufs, sfb_bufs, s, 0, KS, FIRST_M, ROWS_M, HALF, SWAP, SFA_COLS, LT)
            if KS >= 2:
                sums += p1 * scale_of(sfa_bufs, sfb_bufs, s, 1, KS, FIRST_M, ROWS_M, HALF, SWAP, SFA_COLS, LT)
            if KS == 4:
                sums += p2 * scale_of(sfa_bufs, sfb_bufs, s, 2, KS, FIRST_M, ROWS_M, HALF, SWAP, SFA_COLS, LT)
                sums += p3 * scale_of(sfa_bufs, sfb_bufs, s, 3, KS, FIRST_M, ROWS_M, HALF, SWAP, SFA_COLS, LT)
            mbarrier.arrive(empty.index(s), count=1)
            it += 1
        m_offset = gl.arange(0, ROWS_M, layout=LM)
        cols = col + gl.arange(0, 64 if SWAP else COLS, layout=LN)
        if OUT == pieces.BF16:
            values = gl.convert_layout(sums.to(gl.bfloat16), LO)
        else:
            values = gl.convert_layout(sums, LO)
        rows = (row.to(gl.int64) + m_offset) * n
        if SWAP:
            pointers = d_ptr + rows[None, :] + cols[:, None]
            mask = (m_offset < valid)[None, :] & (cols < n)[:, None]
        else:
            pointers = d_ptr + rows[:, None] + cols[None, :]
            mask = (m_offset < valid)[:, None] & (cols < n)[None, :]
        if OUT == pieces.ADD_FP32:
            gl.atomic_add(pointers, values, mask=mask, sem="relaxed")
        else:
            gl.store(pointers, values, mask=mask)
        s = it % STAGES
        mbarrier.wait(full.index(s), (it // STAGES) & 1)
        row, n_block, valid, expert = pieces.read_note(notes.index(s), LT)


@gluon.jit(
    do_not_specialize=["counted", "num_rows", "num_experts", "n8", "k"],
    do_not_specialize_on_alignment=["sfb_ptr", "bias_ptr", "index", "counter"],
)
def fp8_skinny_gemm_kernel(
    a_desc,
    b_desc,
    sfa_desc,
    sfb_ptr,
    d_ptr,
    bias_ptr,
    index,
    counter,
    counted,
    num_rows,
    num_experts,
    n8,
    k,
    LAYOUT: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    TOGETHER: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    KS: gl.constexpr,
    SFA_COLS: gl.constexpr,
    SWAP: gl.constexpr,
    BIAS: gl.constexpr,
    OUT: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One launch: as many programs as SMs. Arguments as of ``fp8.fp8_gemm_kernel``.

    Boxes: A [BLOCK_M, 128], B [BLOCK_N, 128], scales of A [1, SFA_COLS] with SFA_COLS >= BLOCK_M, at least 32: a TMA
    destination is aligned to 128 bytes.
    """
    n = n8 * 8
    a_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * KS, BLOCK_M, 128], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * KS, BLOCK_N, 128], b_desc.layout)
    sfa_bufs = gl.allocate_shared_memory(gl.float32, [STAGES * KS, 1, SFA_COLS], sfa_desc.layout)
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    sfb_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, SCALES], WORDS)
    notes = gl.allocate_shared_memory(gl.int32, [STAGES, 4], WORDS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # The loader arrives when it has asked for the operands and when it has written the scales of B.
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(empty.index(stage), count=2)
    bars = (full, empty)
    bufs = (a_bufs, b_bufs, sfa_bufs, sfb_bufs, notes)
    descs = (a_desc, b_desc, sfa_desc)
    pieces.wait_for_previous_kernel()
    gl.warp_specialize(
        [
            (
                consume_tiles,
                (d_ptr, bias_ptr, bars, bufs, n, k, STAGES, BLOCK_M, BLOCK_N, KS, SFA_COLS, SWAP, BIAS, OUT, 0),
            ),
            (
                consume_tiles,
                (d_ptr, bias_ptr, bars, bufs, n, k, STAGES, BLOCK_M, BLOCK_N, KS, SFA_COLS, SWAP, BIAS, OUT, 1),
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
                    BLOCK_N,
                    KS,
                    SFA_COLS,
                ),
            ),
        ],
        [4, 1],
        [208, 88],
    )
