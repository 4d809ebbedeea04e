"""Casts between the GEMMs of the FP8 MLP: each block of 128 x 128 is read once and leaves in every form. Device code.

A warp holds whole rows of a block, and a thread several rows of 8 columns: scales along rows are found within warps,
those along columns from the warps' maxima in shared memory. Column-wise codes come out dense along the rows, as the
K-grouped GEMM reads them: the codes of four rows make a word, words change places between threads, and each column's
128 bytes are written together. Programs stay, and load the next blocks meanwhile. The arithmetic is that of
``triton_quant`` and ``triton_activation``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.kernels.gluon.spelling import cta_barrier, reinterpret, tma_load
from megamoe.kernels.triton_activation import (
    gate_gradient,
    gate_share,
    gate_slope,
    gate_value,
    limit,
    times_up,
    up_gradient,
)
from megamoe.kernels.triton_quant import magnitude_bits, scale_of

BLOCK = gl.constexpr(128)

VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
MATRIX = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.constexpr_function
def block_layout(num_warps):
    """Of a block in registers."""
    return gl.BlockedLayout([BLOCK.value // (2 * num_warps), 8], [2, 16], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def parts_layout(num_warps):
    """Of the warps' maxima along columns: a thread has those of one column."""
    return gl.BlockedLayout([num_warps, 1], [1, 32], [1, num_warps], [1, 0])


@gluon.constexpr_function
def columns_layout(num_warps):
    """Of words of column-wise codes: 8 threads write a column."""
    return gl.BlockedLayout([1, 4], [4, 8], [num_warps, 1], [1, 0])


@gluon.jit
def pack_four(a, b, c, d):
    """The e4m3 codes of four fp32 values as one word, ``a`` in the lowest byte."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f",
        [a, b, c, d],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def store_column_codes(codes_t, scaled, row_block, col, row_blocks, num_cols):
    """Codes of the fp32 block ``scaled`` -> int32 ``codes_t [num_cols, 32 * row_blocks]``, from column ``col`` on."""
    S: gl.constexpr = columns_layout(gl.num_warps())
    even, odd = scaled.reshape([32, 4, BLOCK]).permute((0, 2, 1)).reshape([32, BLOCK, 2, 2]).split()
    first, third = even.split()
    second, fourth = odd.split()
    words = gl.convert_layout(pack_four(first, second, third, fourth).permute((1, 0)), S)
    cols = col + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, S))
    word = row_block * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, S))
    start = codes_t + cols.to(gl.int64)[:, None] * (row_blocks * 32) + word[None, :]
    gl.store(start, words, mask=(cols < num_cols)[:, None])


@gluon.jit
def store_row_codes(codes, scaled, row_block, col, stride, num_cols):
    """Codes of the fp32 block ``scaled`` -> ``codes`` with rows of ``stride``."""
    L: gl.constexpr = scaled.type.layout
    rows = row_block * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, L))
    cols = col + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, L))
    start = codes + rows.to(gl.int64)[:, None] * stride + cols[None, :]
    gl.store(start, scaled.to(gl.float8e4nv), mask=(cols < num_cols)[None, :])


@gluon.jit
def reciprocal(x):
    """Rounded to nearest, as a division is, in fewer instructions."""
    return gl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def scale_and_inverse(amax_bits, min_amax, LARGEST: gl.constexpr):
    """fp32 scale and its reciprocal, by which values are multiplied."""
    scale = scale_of(amax_bits, min_amax, LARGEST, False)
    return scale, reciprocal(scale)


@gluon.jit
def cast_rows(value, buffers, codes, scales, row_block, col, stride, num_cols, min_amax, LARGEST: gl.constexpr):
    """Casts rows of a block; ``scales`` points to those of its columns."""
    maxima, _, inverses, _ = buffers
    L: gl.constexpr = value.type.layout
    V: gl.constexpr = gl.SliceLayout(0, parts_layout(gl.num_warps()))
    maxima.store(gl.max(magnitude_bits(value), axis=1))
    scale, inverse = scale_and_inverse(maxima.load(V), min_amax, LARGEST)
    gl.store(scales + row_block * BLOCK + gl.arange(0, BLOCK, layout=V), scale)
    inverses.store(inverse)
    scaled = value * inverses.load(gl.SliceLayout(1, L))[:, None]
    store_row_codes(codes, scaled, row_block, col, stride, num_cols)


@gluon.jit
def column_parts(value):
    """int32 [warps, 128]: the maxima of each warp's rows."""
    W: gl.constexpr = gl.num_warps()
    return gl.max(magnitude_bits(value).reshape([W, BLOCK // W, BLOCK]), axis=1)


@gluon.jit
def cast_both(
    source,
    buffers,
    codes,
    scales,
    codes_t,
    scales_t,
    row_block,
    col,
    row_blocks,
    stride,
    num_cols,
    min_amax,
    SHARED: gl.constexpr,
    LARGEST: gl.constexpr,
):
    """Casts rows and columns of a block: fp32, or in shared memory (SHARED), from where it is read again for each form.

    ``scales`` points to those of the block's columns.
    """
    maxima, parts, row_inverses, column_inverses = buffers
    value = source
    if SHARED:
        value = fp32_block(source)
    L: gl.constexpr = value.type.layout
    C: gl.constexpr = parts_layout(gl.num_warps())
    V: gl.constexpr = gl.SliceLayout(0, C)
    maxima.store(gl.max(magnitude_bits(value), axis=1))
    parts.store(column_parts(value))
    scale, inverse = scale_and_inverse(maxima.load(V), min_amax, LARGEST)
    scale_t, inverse_t = scale_and_inverse(gl.max(parts.load(C), axis=0), min_amax, LARGEST)
    lane = gl.arange(0, BLOCK, layout=V)
    gl.store(scales + row_block * BLOCK + lane, scale)
    gl.store(scales_t + row_block.to(gl.int64) * num_cols + col + lane, scale_t, mask=col + lane < num_cols)
    row_inverses.store(inverse)
    column_inverses.store(inverse_t)
    if SHARED:
        value = fp32_block(source)
    inverse = row_inverses.load(gl.SliceLayout(1, L))
    store_row_codes(codes, value * inverse[:, None], row_block, col, stride, num_cols)
    if SHARED:
        cta_barrier()
        value = fp32_block(source)
    inverse_t = column_inverses.load(gl.SliceLayout(0, L))
    store_column_codes(codes_t, value * inverse_t[None, :], row_block, col, row_blocks, num_cols)


@gluon.jit
def cast_block(value, codes_t, scales_t, row_block, col, row_blocks, num_cols, min_amax, LARGEST: gl.constexpr):
    """Casts a block with one scale, into codes that are dense along the rows."""
    scale, inverse = scale_and_inverse(gl.max(magnitude_bits(value)), min_amax, LARGEST)
    gl.store(scales_t + row_block.to(gl.int64) * gl.cdiv(num_cols, BLOCK) + col // BLOCK, scale)
    store_column_codes(codes_t, value * inverse, row_block, col, row_blocks, num_cols)


@gluon.jit
def cast_buffers():
    """(rows' maxima, warps' maxima along columns, rows' and columns' reciprocals) in shared memory."""
    maxima = gl.allocate_shared_memory(gl.int32, [BLOCK], VECTOR)
    parts = gl.allocate_shared_memory(gl.int32, [gl.num_warps(), BLOCK], MATRIX)
    row_inverses = gl.allocate_shared_memory(gl.float32, [BLOCK], VECTOR)
    column_inverses = gl.allocate_shared_memory(gl.float32, [BLOCK], VECTOR)
    return maxima, parts, row_inverses, column_inverses


@gluon.jit
def fp32_block(buffer):
    """A block from shared memory."""
    W: gl.constexpr = gl.num_warps()
    L: gl.constexpr = block_layout(W)
    if buffer.dtype == gl.bfloat16:
        # In words: one instruction an element, where the compiler's conversion takes three for two.
        WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
        PAIRS: gl.constexpr = gl.BlockedLayout([BLOCK // (2 * W), 4], [2, 16], [W, 1], [1, 0])
        word = reinterpret(buffer, gl.int32, [BLOCK, BLOCK // 2], WORDS).load(PAIRS)
        pairs = gl.join((word << 16).to(gl.float32, bitcast=True), (word & -65536).to(gl.float32, bitcast=True))
        return gl.convert_layout(pairs.reshape([BLOCK, BLOCK]), L, assert_trivial=True)
    else:
        return buffer.load(L).to(gl.float32)


@gluon.jit
def first_block(col_blocks):
    """Row and column of this program's first block, and how many rows and columns of blocks each next one is on."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    return program // col_blocks, program % col_blocks, programs // col_blocks, programs % col_blocks


@gluon.jit
def next_block(row_block, col_block, step_rows, step_cols, col_blocks):
    """Row and column of the block that is so many rows and columns of blocks further on, row after row."""
    col_block += step_cols
    row_block += step_rows
    over = col_block >= col_blocks
    return gl.where(over, row_block + 1, row_block), gl.where(over, col_block - col_blocks, col_block)


@gluon.jit
def load_matrix(descs, xs, x_scales, bars, stage, row_block, col_block, SCALED: gl.constexpr):
    """Starts to load a block, and the scales of its rows."""
    x_desc, scales_desc = descs
    bar = bars.index(stage)
    BYTES: gl.constexpr = BLOCK * BLOCK * (x_desc.dtype.primitive_bitwidth // 8)
    mbarrier.expect(bar, BYTES + (BLOCK * 4 if SCALED else 0))
    tma_load(x_desc, [row_block * BLOCK, col_block * BLOCK], bar, xs.index(stage))
    if SCALED:
        tma_load(scales_desc, [col_block, row_block * BLOCK], bar, x_scales.index(stage))


@gluon.jit(do_not_specialize=["row_blocks"])
def cast_kernel(
    x_desc,
    x_scales_desc,
    codes,
    scales,
    codes_t,
    scales_t,
    row_blocks,
    num_cols,
    scale_group_stride,
    min_amax,
    SCALED: gl.constexpr,
    STAGES: gl.constexpr,
    LARGEST: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Row-wise and column-wise codes of ``x``, or only the latter where ``x`` is in row-wise codes itself (SCALED).

    A program casts one block after another; the next ones are on their way meanwhile.

    Args:
        x_desc: [rows, num_cols], boxes [128, 128]. x_scales_desc: [groups of 128 columns, rows], boxes [1, 128].
    """
    L: gl.constexpr = block_layout(num_warps)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_shape, x_desc.layout)
    x_scales = xs
    if SCALED:
        x_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK], x_scales_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=1)
    buffers = cast_buffers()
    descs = (x_desc, x_scales_desc)
    col_blocks = (num_cols + BLOCK - 1) // BLOCK
    row_block, col_block, step_rows, step_cols = first_block(col_blocks)
    row_ahead = row_block
    col_ahead = col_block
    for stage in gl.static_range(STAGES):
        if row_ahead < row_blocks:
            load_matrix(descs, xs, x_scales, bars, stage, row_ahead, col_ahead, SCALED)
        row_ahead, col_ahead = next_block(row_ahead, col_ahead, step_rows, step_cols, col_blocks)
    stage = 0
    phase = 0
    while row_block < row_blocks:
        mbarrier.wait(bars.index(stage), phase)
        col = col_block * BLOCK
        if SCALED:
            value = fp32_block(xs.index(stage))
            value *= x_scales.index(stage).reshape([BLOCK]).load(gl.SliceLayout(1, L))[:, None]
            cast_block(value, codes_t, scales_t, row_block, col, row_blocks, num_cols, min_amax, LARGEST)
        else:
            cast_both(
                xs.index(stage),
                buffers,
                codes,
                scales + col_block.to(gl.int64) * scale_group_stride,
                codes_t,
                scales_t,
                row_block,
                col,
                row_blocks,
                num_cols,
                num_cols,
                min_amax,
                True,
                LARGEST,
            )
        cta_barrier()
        if row_ahead < row_blocks:
            load_matrix(descs, xs, x_scales, bars, stage, row_ahead, col_ahead, SCALED)
        row_ahead, col_ahead = next_block(row_ahead, col_ahead, step_rows, step_cols, col_blocks)
        row_block, col_block = next_block(row_block, col_block, step_rows, step_cols, col_blocks)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


# ---------------------------------------------------------------- activations


@gluon.jit
def load_inputs(descs, inputs, bars, stage, row_block, col_block, num_cols, HALVES: gl.constexpr):
    """Starts to load a block's gradient, gate and up."""
    grad_desc, pre_desc = descs
    grads, gates, ups = inputs
    row = row_block * BLOCK
    col = col_block * BLOCK
    bar = bars.index(stage)
    mbarrier.expect(bar, (HALVES + 1) * BLOCK * BLOCK * (grad_desc.dtype.primitive_bitwidth // 8))
    tma_load(grad_desc, [row, col], bar, grads.index(stage))
    tma_load(pre_desc, [row, col], bar, gates.index(stage))
    if HALVES == 2:
        tma_load(pre_desc, [row, num_cols + col], bar, ups.index(stage))


@gluon.jit
def rows_of(weights, row_block):
    """fp32 [128, 1] of a block's rows."""
    rows = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, block_layout(gl.num_warps())))
    return gl.load(weights + row_block * BLOCK + rows).to(gl.float32)[:, None]


@gluon.jit
def load_pre(inputs, stage, HALVES: gl.constexpr):
    """Gate and up of a block; ``relu2`` has no up, and gate stands in its place."""
    _, gates, ups = inputs
    gate = fp32_block(gates.index(stage))
    up = gate
    if HALVES == 2:
        up = fp32_block(ups.index(stage))
    return gate, up


@gluon.jit
def cast_gradient(
    value,
    outputs,
    buffers,
    half,
    scale_group_stride,
    row_block,
    col_block,
    row_blocks,
    num_cols,
    width,
    min_amax,
    WITH_COLUMNS: gl.constexpr,
    WITH_SUMS: gl.constexpr,
    LARGEST: gl.constexpr,
):
    """Stores a block of the gate's gradient (``half`` 0) or up's (1) in every form that is asked for."""
    codes, scales, codes_t, scales_t, sums, sum_parts = outputs
    group = half * (num_cols // BLOCK) + col_block
    col = group * BLOCK
    group_scales = scales + group.to(gl.int64) * scale_group_stride
    if WITH_SUMS:
        W: gl.constexpr = gl.num_warps()
        C: gl.constexpr = parts_layout(W)
        sum_parts.store(gl.sum(value.reshape([W, BLOCK // W, BLOCK]), axis=1))
        cols = col + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, C))
        gl.store(sums + row_block.to(gl.int64) * width + cols, gl.sum(sum_parts.load(C), axis=0))
    if WITH_COLUMNS:
        cast_both(
            value,
            buffers,
            codes,
            group_scales,
            codes_t,
            scales_t,
            row_block,
            col,
            row_blocks,
            width,
            width,
            min_amax,
            False,
            LARGEST,
        )
    else:
        cast_rows(value, buffers, codes, group_scales, row_block, col, width, width, min_amax, LARGEST)


@gluon.jit(do_not_specialize=["row_blocks"])
def activation_backward_kernel(
    grad_desc,
    pre_desc,
    row_weights,
    codes,
    scales,
    codes_t,
    scales_t,
    act_t,
    act_scales_t,
    weight_grads,
    sums,
    row_blocks,
    num_cols,
    scale_group_stride,
    min_amax,
    clamp,
    ACTIVATION: gl.constexpr,
    CLAMP: gl.constexpr,
    WITH_COLUMNS: gl.constexpr,
    WITH_SUMS: gl.constexpr,
    STAGES: gl.constexpr,
    LARGEST: gl.constexpr,
    num_warps: gl.constexpr,
):
    """A program casts one block after another; the inputs of the next ones are on their way meanwhile.

    Args:
        grad_desc, pre_desc: the gradient [rows, I] and the pre-activations, boxes [128, 128].
    """
    L: gl.constexpr = block_layout(num_warps)
    HALVES: gl.constexpr = 1 if ACTIVATION == "relu2" else 2
    # What would not fit into registers beside the rest is loaded or computed twice.
    SHARE_AGAIN: gl.constexpr = CLAMP and WITH_COLUMNS and ACTIVATION != "geglu"
    INPUTS_AGAIN: gl.constexpr = WITH_SUMS or (CLAMP and not SHARE_AGAIN)
    SHAPE: gl.constexpr = [STAGES] + grad_desc.block_shape
    grads = gl.allocate_shared_memory(grad_desc.dtype, SHAPE, grad_desc.layout)
    gates = gl.allocate_shared_memory(grad_desc.dtype, SHAPE, grad_desc.layout)
    ups = gates
    if HALVES == 2:
        ups = gl.allocate_shared_memory(grad_desc.dtype, SHAPE, grad_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=1)
    buffers = cast_buffers()
    descs = (grad_desc, pre_desc)
    inputs = (grads, gates, ups)
    sum_parts = bars
    if WITH_SUMS:
        sum_parts = gl.allocate_shared_memory(gl.float32, [num_warps, BLOCK], MATRIX)
    outputs = (codes, scales, codes_t, scales_t, sums, sum_parts)
    col_blocks = num_cols // BLOCK
    width = HALVES * num_cols
    row_block, col_block, step_rows, step_cols = first_block(col_blocks)
    row_ahead = row_block
    col_ahead = col_block
    for stage in gl.static_range(STAGES):
        if row_ahead < row_blocks:
            load_inputs(descs, inputs, bars, stage, row_ahead, col_ahead, num_cols, HALVES)
        row_ahead, col_ahead = next_block(row_ahead, col_ahead, step_rows, step_cols, col_blocks)
    stage = 0
    phase = 0
    while row_block < row_blocks:
        mbarrier.wait(bars.index(stage), phase)
        gate, up = load_pre(inputs, stage, HALVES)
        gate, up = limit(gate, up, clamp, CLAMP)
        share = gate_share(gate, ACTIVATION)
        act = times_up(gate_value(gate, share, ACTIVATION), up, ACTIVATION)
        part = gl.sum(fp32_block(grads.index(stage)) * act, axis=1)
        rows = row_block * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, L))
        gl.store(weight_grads + col_block.to(gl.int64) * (row_blocks * BLOCK) + rows, part)
        if WITH_COLUMNS:
            col = col_block * BLOCK
            act *= rows_of(row_weights, row_block)
            cast_block(act, act_t, act_scales_t, row_block, col, row_blocks, num_cols, min_amax, LARGEST)
        # The inputs again, from shared memory: beside the activation they would not fit into registers.
        cta_barrier()
        upstream = fp32_block(grads.index(stage)) * rows_of(row_weights, row_block)
        gate, up = load_pre(inputs, stage, HALVES)
        limited_gate, limited_up = limit(gate, up, clamp, CLAMP)
        if SHARE_AGAIN:
            share = gate_share(limited_gate, ACTIVATION)
        slope = gate_slope(limited_gate, share, ACTIVATION)
        through_up = times_up(upstream, limited_up, ACTIVATION)
        gate_grad = gate_gradient(gate, through_up, slope, clamp, ACTIVATION, CLAMP)
        if INPUTS_AGAIN:
            cta_barrier()
            upstream = fp32_block(grads.index(stage)) * rows_of(row_weights, row_block)
            gate, up = load_pre(inputs, stage, HALVES)
            limited_gate, _ = limit(gate, up, clamp, CLAMP)
        up_grad = up_gradient(up, upstream, gate_value(limited_gate, share, ACTIVATION), clamp, CLAMP)
        cta_barrier()
        if row_ahead < row_blocks:
            load_inputs(descs, inputs, bars, stage, row_ahead, col_ahead, num_cols, HALVES)
        row_ahead, col_ahead = next_block(row_ahead, col_ahead, step_rows, step_cols, col_blocks)
        for half in gl.static_range(HALVES):
            cast_gradient(
                gate_grad if half == 0 else up_grad,
                outputs,
                buffers,
                half,
                scale_group_stride,
                row_block,
                col_block,
                row_blocks,
                num_cols,
                width,
                min_amax,
                WITH_COLUMNS,
                WITH_SUMS,
                LARGEST,
            )
        row_block, col_block = next_block(row_block, col_block, step_rows, step_cols, col_blocks)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
