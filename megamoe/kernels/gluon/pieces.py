"""Device code that the GEMM kernels share: consumers' turns, tile notes, activations, stores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from megamoe.kernels.gluon.spelling import tma_store

# Activations (``MoEConfig.activation``).
NONE = gl.constexpr(0)
SWIGLU = gl.constexpr(1)
SWIGLU_OAI = gl.constexpr(2)
GEGLU = gl.constexpr(3)
GEGLU_TANH = gl.constexpr(4)

# What the sums of a tile start from.
FROM_ZERO = gl.constexpr(0)
FROM_BIAS = gl.constexpr(1)
FROM_C = gl.constexpr(2)

# What is stored; ADD_FP32 adds to what is there.
BF16 = gl.constexpr(0)
FP32 = gl.constexpr(1)
FP8 = gl.constexpr(2)
ADD_FP32 = gl.constexpr(3)

MIN_AMAX = gl.constexpr(1e-10)
SWIGLU_OAI_ALPHA = gl.constexpr(1.702)


@gluon.jit
def wait_turn(C: gl.constexpr):
    """Waits until the other consumer has issued its wave, so one promotes its sums while the other's wave runs.

    Named barriers 8 and 9 are free: Triton counts up from 0. Timing alone depends on them, hence no memory clobber.
    """
    if C == 0:
        gl.inline_asm_elementwise("bar.sync 8, 256; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.sync 9, 256; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(C: gl.constexpr):
    """Lets the other consumer issue its next wave."""
    if C == 0:
        gl.inline_asm_elementwise(
            "bar.arrive 9, 256; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        gl.inline_asm_elementwise(
            "bar.arrive 8, 256; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def wait_for_previous_kernel():
    """Programmatic dependent launch: the next kernel's blocks may start, and this one waits for the last one's memory.

    What stands before, and the launch itself, overlaps with the end of the kernel before. Does nothing in a launch
    without the attribute.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 $0, 0;",
        "=r,r,~{memory}",
        [0],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def lanes(COUNT: gl.constexpr):
    """0 ... COUNT - 1 of the loader warp, an element a lane."""
    return gl.arange(0, COUNT, layout=gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def tile_note(row, n_block, valid, expert):
    """int32 [4] that tells the consumers what a stage's tile is; valid == 0: no more tiles."""
    lane = lanes(4)
    return gl.where(lane == 0, row, gl.where(lane == 1, n_block, gl.where(lane == 2, valid, expert)))


@gluon.jit
def read_note(note, LAYOUT: gl.constexpr):
    """(row, column block, valid rows, expert) of a note in shared memory."""
    row = note.slice(0, 1, 0).load(LAYOUT).item()
    n_block = note.slice(1, 1, 0).load(LAYOUT).item()
    valid = note.slice(2, 1, 0).load(LAYOUT).item()
    expert = note.slice(3, 1, 0).load(LAYOUT).item()
    return row, n_block, valid, expert


@gluon.jit
def bias_rows(bias_ptr, col, expert, n, L: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """fp32 [ROWS, COLS]: columns from ``col`` on of the expert's bias, the same in each row; 0 from column ``n`` on."""
    cols = col + gl.arange(0, COLS, layout=gl.SliceLayout(0, L))
    bias = gl.load(bias_ptr + expert.to(gl.int64) * n + cols, mask=cols < n, other=0.0).to(gl.float32)
    return gl.full([ROWS, COLS], 0.0, gl.float32, L) + bias[None, :]


@gluon.jit
def c_rows(c_ptr, row, col, valid, n, L: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """fp32 [ROWS, COLS] of the matrix C; 0 from row ``valid`` and column ``n`` on."""
    offset = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    cols = col + gl.arange(0, COLS, layout=gl.SliceLayout(0, L))
    pointers = c_ptr + (row.to(gl.int64) + offset)[:, None] * n + cols[None, :]
    return gl.load(pointers, mask=(offset < valid)[:, None] & (cols < n)[None, :], other=0.0).to(gl.float32)


@gluon.jit
def store_rows(d_ptr, row, col, valid, n, values, ADD: gl.constexpr):
    """Registers -> memory, or added to it; rows from ``valid`` and columns from ``n`` on are left untouched."""
    L: gl.constexpr = values.type.layout
    offset = gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, L))
    cols = col + gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, L))
    pointers = d_ptr + (row.to(gl.int64) + offset)[:, None] * n + cols[None, :]
    mask = (offset < valid)[:, None] & (cols < n)[None, :]
    if ADD:
        # One addition an element: the result does not depend on any order.
        gl.atomic_add(pointers, values, mask=mask, sem="relaxed")
    else:
        gl.store(pointers, values, mask=mask)


@gluon.jit
def halves(values):
    """Left and right half of the columns of [64, 128] in the tensor cores' layout: a renaming of registers."""
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, values.shape[1] // 2, 32]
    )
    left, right = values.reshape([64, 2, values.shape[1] // 2]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, L, assert_trivial=True), gl.convert_layout(right, L, assert_trivial=True)


@gluon.jit
def store_wide_rows(d_ptr, row, col, valid, n, values, ADD: gl.constexpr):
    """``store_rows`` in four steps, which need fewer registers for addresses."""
    QUARTER: gl.constexpr = values.shape[1] // 4
    left, right = halves(values)
    for h in gl.static_range(2):
        if h == 0:
            a, b = halves(left)
        else:
            a, b = halves(right)
        store_rows(d_ptr, row, col + 2 * QUARTER * h, valid, n, a, ADD)
        store_rows(d_ptr, row, col + 2 * QUARTER * h + QUARTER, valid, n, b, ADD)


@gluon.jit
def store_tile(d_desc, d_ptr, d_buf, row, col, valid, n, values):
    """Registers -> shared -> global memory by TMA, which only the next use of d_buf waits for.

    Columns from ``n`` on are left out. The rows of a tile that its group cuts short are copied one by one: TMA would
    write them all.
    """
    ROWS: gl.constexpr = values.shape[0]
    COLS: gl.constexpr = values.shape[1]
    VECTOR: gl.constexpr = 128 // values.dtype.primitive_bitwidth
    THREADS: gl.constexpr = COLS // VECTOR  # of a row
    L: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // THREADS, THREADS], [4, 1], [1, 0])
    tma.store_wait(0)
    d_buf.store(values)
    if valid >= ROWS:
        fence_async_shared()
        tma_store(d_desc, [row, col], d_buf)
    elif valid > 0:
        for first in gl.static_range(0, ROWS, 16):
            store_rows(d_ptr, row + first, col, valid - first, n, d_buf.slice(first, 16, 0).load(L), False)


@gluon.jit
def store_half(d_desc, d_buf, row, col, valid, values, HALF: gl.constexpr):
    """Registers -> shared -> global memory by TMA, into one half of the columns of a matrix.

    All rows of the tile are written if any is valid. ``d_desc`` has the halves as its first dimension, and so bounds.
    """
    tma.store_wait(0)
    d_buf.store(values)
    if valid > 0:
        fence_async_shared()
        tma_store(d_desc, [HALF, row, col], d_buf.reshape([1, values.shape[0], values.shape[1]]))


@gluon.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) = (1 + tanh(x / 2)) / 2 by the hardware's tanh, to 2.5e-4: a tenth of bfloat16's rounding.

    One special-function instruction instead of two: with exp2 and a reciprocal they bound the whole epilogue.
    """
    half = gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x * 0.5], dtype=gl.float32, is_pure=True, pack=1
    )
    return 0.5 + 0.5 * half


@gluon.jit
def erf(x):
    """Within 6e-7, without the library's branches: ptxas would serialise the wave that runs meanwhile.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26:
    erf(s) = 1 - (a1 t + ... + a5 t^5) exp(-s^2), t = 1 / (1 + 0.3275911 s). One block, so that it stays together.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .f32 s, t, e, p; abs.f32 s, $1; fma.rn.f32 t, s, 0f3EA7BA05, 0f3F800000; rcp.approx.ftz.f32 t, t; "
        "mul.f32 e, s, s; mul.f32 e, e, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; "
        "fma.rn.f32 p, t, 0f3F87DC22, 0fBFBA00E3; fma.rn.f32 p, p, t, 0f3FB5F0E3; fma.rn.f32 p, p, t, 0fBE91A98E; "
        "fma.rn.f32 p, p, t, 0f3E827906; mul.f32 p, p, t; neg.f32 p, p; fma.rn.f32 p, p, e, 0f3F800000; "
        "copysign.f32 $0, $1, p; }",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def activate_gate(gate, clamp, ACTIVATION: gl.constexpr, CLAMP: gl.constexpr):
    """fp32 factor that the gate contributes; ``multiply_up`` is the rest of ``reference.activate``."""
    if CLAMP:
        # Not minimum: NaN passes.
        gate = gl.where(gate > clamp, clamp, gate)
    if ACTIVATION == SWIGLU:
        gate = gate * sigmoid(gate)
    elif ACTIVATION == SWIGLU_OAI:
        gate = gate * sigmoid(gate * SWIGLU_OAI_ALPHA)
    elif ACTIVATION == GEGLU_TANH:
        # tanh(y) = 2 sigmoid(2 y) - 1
        gate = gate * sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate = 0.5 * gate * (1.0 + erf(gate * 0.7071067811865476))
    return gate


@gluon.jit
def multiply_up(gate, up, clamp, ACTIVATION: gl.constexpr, CLAMP: gl.constexpr):
    """fp32 result of the activation from ``activate_gate``'s and the up columns."""
    if CLAMP:
        up = gl.where(up > clamp, clamp, gl.where(up < -clamp, -clamp, up))
    if ACTIVATION == SWIGLU_OAI:
        up = up + 1.0
    return gate * up
