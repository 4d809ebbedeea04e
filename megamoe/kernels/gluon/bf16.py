"""BF16 grouped GEMM for Hopper, tile 128 x 256, plain or with a fused activation. Device code.

D = A B^T (NT, B [experts * N, K]) or A B (NN, B [experts, K, N]), fp32 sums in the tensor cores' accumulators. Roles as
in ``fp8``; a consumer has one 64 x 256 accumulator and one product always in flight. Consumer 1 starts SKEW stages
behind consumer 0 and stays there, so each one's stores run under the other's products. With an activation the left half
of B's tile is gate rows and the right half up rows.
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

from megamoe.kernels.gluon import pieces, schedule
from megamoe.kernels.gluon.spelling import tma_load


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
    n,
    k,
    LAYOUT: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    TOGETHER: gl.constexpr,
    ACTIVATION: gl.constexpr,
    TRANSPOSED_B: gl.constexpr,
):
    """The loader; requests TOGETHER stages at a time."""
    full, empty = bars
    a_bufs, b_bufs, notes = bufs
    BOTH: gl.constexpr = ACTIVATION != pieces.NONE
    STEP: gl.constexpr = 128 if BOTH else 256
    columns = n // 2 if BOTH else n
    num_n = (columns + STEP - 1) // STEP
    num_k = (k + 63) // 64
    walk = schedule.problem(index, num_rows, num_experts, num_n, LAYOUT)
    it = 0
    state = schedule.first_group(walk, 128, LAYOUT)
    tile, state, row, valid, expert, n_block = schedule.find(
        gl.program_id(0), state, walk, counter, counted, 128, GROUP_M, LAYOUT
    )
    while state[0] < walk[2]:
        note = pieces.tile_note(row, n_block, valid, expert)
        a_row = row
        b_expert = expert
        b_col = n_block * STEP
        b_row = expert * n + b_col
        for k0 in range(0, num_k, TOGETHER):
            for h in gl.static_range(TOGETHER):
                if k0 + h < num_k:
                    s = (it + h) % STAGES
                    mbarrier.wait(empty.index(s), (((it + h) // STAGES) & 1) ^ 1)
                    notes.index(s).store(note)
                    mbarrier.expect(full.index(s), 384 * 128)
            for h in gl.static_range(TOGETHER):
                if k0 + h < num_k:
                    s = (it + h) % STAGES
                    k_col = (k0 + h) * 64
                    if TRANSPOSED_B:
                        tma_load(b_desc, [b_expert, k_col, b_col], full.index(s), b_bufs.index(s))
                    elif BOTH:
                        gate = b_bufs.index(s).slice(0, 128, 0)
                        up = b_bufs.index(s).slice(128, 128, 0)
                        tma_load(b_desc, [b_row, k_col], full.index(s), gate)
                        tma_load(b_desc, [b_row + n // 2, k_col], full.index(s), up)
                    else:
                        tma_load(b_desc, [b_row, k_col], full.index(s), b_bufs.index(s))
            for h in gl.static_range(TOGETHER):
                if k0 + h < num_k:
                    s = (it + h) % STAGES
                    tma_load(a_desc, [a_row, (k0 + h) * 64], full.index(s), a_bufs.index(s))
            it += gl.minimum(num_k - k0, TOGETHER)
        tile, state, row, valid, expert, n_block = schedule.find(
            schedule.next_tile(tile, counter, counted), state, walk, counter, counted, 128, GROUP_M, LAYOUT
        )
    s = it % STAGES
    mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
    notes.index(s).store(pieces.tile_note(it * 0, 0, 0, 0))
    mbarrier.arrive(full.index(s), count=1)
    schedule.leave(tile, state[1], counter, counted)


@gluon.jit
def consume_tiles(
    d_desc,
    pre_desc,
    d_ptr,
    start_ptr,
    weights_ptr,
    clamp,
    bars,
    bufs,
    d_bufs,
    n,
    k,
    STAGES: gl.constexpr,
    SKEW: gl.constexpr,
    WIDE: gl.constexpr,
    ACTIVATION: gl.constexpr,
    CLAMP: gl.constexpr,
    WEIGHTED: gl.constexpr,
    PRE: gl.constexpr,
    START: gl.constexpr,
    OUT: gl.constexpr,
    TRANSPOSED_B: gl.constexpr,
    C: gl.constexpr,
):
    """Consumer C: rows 64 C .. 64 C + 63 of each tile."""
    full, empty = bars
    a_bufs, b_bufs, notes = bufs
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    LR: gl.constexpr = gl.SliceLayout(1, L)
    BOTH: gl.constexpr = ACTIVATION != pieces.NONE
    num_k = (k + 63) // 64
    columns = n // 2 if BOTH else n
    d_buf = d_bufs.index(C)
    zero = gl.full([64, 256], 0.0, gl.float32, L)
    it = 0
    mbarrier.wait(full.index(0), 0)
    row, n_block, valid, expert = pieces.read_note(notes.index(0), LR)
    if SKEW > 0 and C == 1:
        if valid > 0:
            # Starts when consumer 0 can start its step SKEW.
            mbarrier.wait(full.index(gl.minimum(num_k - 1, SKEW)), 0)
    while valid > 0:
        row += C * 64
        valid -= C * 64
        col = n_block * (128 if BOTH else 256)
        if START == pieces.FROM_C:
            sums = warpgroup_mma_init(pieces.c_rows(start_ptr, row, col, valid, n, L, 64, 256))
        elif START == pieces.FROM_BIAS:
            if BOTH:
                gate = pieces.bias_rows(start_ptr, col, expert, n, L, 64, 256)
                up = pieces.bias_rows(start_ptr, col + columns - 128, expert, n, L, 64, 256)
                left = gl.arange(0, 256, layout=gl.SliceLayout(0, L)) < 128
                sums = warpgroup_mma_init(gl.where(left[None, :], gate, up))
            else:
                sums = warpgroup_mma_init(pieces.bias_rows(start_ptr, col, expert, n, L, 64, 256))
        else:
            sums = warpgroup_mma_init(zero)
        for kb in range(num_k):
            s = it % STAGES
            mbarrier.wait(full.index(s), (it // STAGES) & 1)
            a = a_bufs.index(s).slice(C * 64, 64, 0)
            if TRANSPOSED_B:
                b = b_bufs.index(s).reshape([64, 256])
            else:
                b = b_bufs.index(s).permute((1, 0))
            if START == pieces.FROM_ZERO:
                sums = warpgroup_mma(a, b, sums, use_acc=kb > 0, is_async=True)
            else:
                sums = warpgroup_mma(a, b, sums, use_acc=True, is_async=True)
            sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))
            mbarrier.arrive(empty.index(gl.maximum(it - 1, 0) % STAGES), count=1, pred=kb > 0)
            it += 1
        total = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index((it - 1) % STAGES), count=1)
        if BOTH:
            gate, up = pieces.halves(total)
            if PRE:
                pieces.store_half(pre_desc, d_buf, row, col, valid, gate.to(gl.bfloat16), 0)
                pieces.store_half(pre_desc, d_buf, row, col, valid, up.to(gl.bfloat16), 1)
            gate = pieces.activate_gate(gate, clamp, ACTIVATION, CLAMP)
            act = pieces.multiply_up(gate, up, clamp, ACTIVATION, CLAMP)
            if WEIGHTED:
                offset = gl.arange(0, 64, layout=gl.SliceLayout(1, act.type.layout))
                weights = gl.load(weights_ptr + row.to(gl.int64) + offset, mask=offset < valid, other=0.0)
                act = act * weights[:, None]
            pieces.store_tile(d_desc, d_ptr, d_buf, row, col, valid, columns, act.to(gl.bfloat16))
        elif OUT == pieces.BF16:
            if WIDE:
                pieces.store_tile(d_desc, d_ptr, d_buf, row, col, valid, n, total.to(gl.bfloat16))
            else:
                left, right = pieces.halves(total)
                pieces.store_tile(d_desc, d_ptr, d_buf, row, col, valid, n, left.to(gl.bfloat16))
                pieces.store_tile(d_desc, d_ptr, d_buf, row, col + 128, valid, n, right.to(gl.bfloat16))
        else:
            left, right = pieces.halves(total)
            pieces.store_wide_rows(d_ptr, row, col, valid, n, left, False)
            pieces.store_wide_rows(d_ptr, row, col + 128, valid, n, right, False)
        s = it % STAGES
        mbarrier.wait(full.index(s), (it // STAGES) & 1)
        row, n_block, valid, expert = pieces.read_note(notes.index(s), LR)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["counted", "num_rows", "num_experts", "n8", "k", "clamp"],
    do_not_specialize_on_alignment=["start_ptr", "weights_ptr", "index", "counter"],
)
def bf16_gemm_kernel(
    a_desc,
    b_desc,
    d_desc,
    pre_desc,
    d_ptr,
    start_ptr,
    weights_ptr,
    index,
    counter,
    counted,
    num_rows,
    num_experts,
    n8,
    k,
    clamp,
    LAYOUT: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    TOGETHER: gl.constexpr,
    SKEW: gl.constexpr,
    WIDE: gl.constexpr,
    ACTIVATION: gl.constexpr,
    CLAMP: gl.constexpr,
    WEIGHTED: gl.constexpr,
    PRE: gl.constexpr,
    START: gl.constexpr,
    OUT: gl.constexpr,
    TRANSPOSED_B: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One launch: as many programs as SMs.

    Args:
        a_desc: A, boxes [128, 64]. b_desc: B as [experts * N, K], boxes [256, 64] (with an activation [128, 64]), or as
            [experts, K, N], boxes [1, 64, 256] (TRANSPOSED_B). d_desc: D, boxes [64, 256] (WIDE) or [64, 128].
        pre_desc: with PRE the sums before the activation, bf16 [2, rows, N / 2], boxes [1, 64, 128].
        start_ptr: the bias [experts, N], or C like D (START; D may be C).
        weights_ptr: fp32 [rows], routing weights. index, counter, counted: see ``schedule``. n8: N / 8.
    """
    n = n8 * 8
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 64], a_desc.layout)
    if TRANSPOSED_B:
        b_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 64, 256], b_desc.layout)
    else:
        b_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 256, 64], b_desc.layout)
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    notes = gl.allocate_shared_memory(gl.int32, [STAGES, 4], WORDS)
    if OUT == pieces.BF16:
        d_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256 if WIDE else 128], d_desc.layout)
    else:
        d_bufs = notes  # not used
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    bars = (full, empty)
    bufs = (a_bufs, b_bufs, notes)
    pieces.wait_for_previous_kernel()
    gl.warp_specialize(
        [
            (
                consume_tiles,
                (
                    d_desc,
                    pre_desc,
                    d_ptr,
                    start_ptr,
                    weights_ptr,
                    clamp,
                    bars,
                    bufs,
                    d_bufs,
                    n,
                    k,
                    STAGES,
                    SKEW,
                    WIDE,
                    ACTIVATION,
                    CLAMP,
                    WEIGHTED,
                    PRE,
                    START,
                    OUT,
                    TRANSPOSED_B,
                    0,
                ),
            ),
            (
                consume_tiles,
                (
                    d_desc,
                    pre_desc,
                    d_ptr,
                    start_ptr,
                    weights_ptr,
                    clamp,
                    bars,
                    bufs,
                    d_bufs,
                    n,
                    k,
                    STAGES,
                    SKEW,
                    WIDE,
                    ACTIVATION,
                    CLAMP,
                    WEIGHTED,
                    PRE,
                    START,
                    OUT,
                    TRANSPOSED_B,
                    1,
                ),
            ),
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
                    n,
                    k,
                    LAYOUT,
                    STAGES,
                    GROUP_M,
                    TOGETHER,
                    ACTIVATION,
                    TRANSPOSED_B,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )
