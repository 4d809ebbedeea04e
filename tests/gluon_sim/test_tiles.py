"""TMA boxes and wgmma operands: shapes, borders, orders, and what the hardware would not accept."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megamoe.kernels.gluon.spelling import reinterpret, tma_add, tma_load, tma_store
from tests.gluon_sim.schedules import always, always_reports
from tests.support.gluon_sim import Race, SimError, launch

ROWS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


def descriptor(t, block, layout=None):
    """Without swizzle unless a layout is given."""
    bits = t.element_size() * 8
    layout = layout or gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=len(block))
    return TensorDescriptor.from_tensor(t, block, layout)


def swizzled(t, block):
    dtype = {torch.bfloat16: gl.bfloat16, torch.float8_e4m3fn: gl.float8e4nv}[t.dtype]
    return descriptor(t, block, gl.NVMMASharedLayout.get_default_for(block, dtype))


# ---------------------------------------------------------------- boxes


@gluon.jit
def copy_box(
    x_desc, y_desc, row, column, ROWS_: gl.constexpr, COLUMNS: gl.constexpr, BYTES: gl.constexpr, WAIT: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    buf = gl.allocate_shared_memory(x_desc.dtype, [ROWS_, COLUMNS], x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, BYTES)
    tma_load(x_desc, [row, column], bar, buf)
    mbarrier.wait(bar, 0)
    tma_store(y_desc, [row, column], buf)
    if WAIT:
        tma.store_wait(0)


def run_copy_box(policy, seed, row=0, column=0, box=(1, 128), buffer=(1, 128), shape=(5, 200), WAIT=True, layout=None):
    x, y = torch.randn(shape), torch.full(shape, float("nan"))
    options = dict(ROWS_=buffer[0], COLUMNS=buffer[1], BYTES=box[0] * box[1] * 4, WAIT=WAIT, num_warps=4)
    args = (descriptor(x, list(box)), descriptor(y, list(box), layout), row, column)
    launch(copy_box, 1, args, options, policy=policy, seed=seed)
    rows, columns = slice(max(row, 0), max(row + box[0], 0)), slice(max(column, 0), max(column + box[1], 0))
    assert torch.equal(y[rows, columns], x[rows, columns])
    assert y.isnan().sum() == y.numel() - y[rows, columns].numel()


@pytest.mark.parametrize("row, column", [(0, 0), (4, 128), (5, 0), (2, 256)])
@pytest.mark.parametrize("box", [(1, 128), (2, 32), (16, 64)], ids=str)
def test_box_at_the_border(row, column, box):
    # The bytes of the whole box arrive, elements outside are not stored.
    always(lambda policy, seed: run_copy_box(policy, seed, row, column, box, box))


@gluon.jit
def read_box(x_desc, out, row, column, num_warps: gl.constexpr):
    buf = gl.allocate_shared_memory(gl.float32, [2, 32], x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, 256)
    tma_load(x_desc, [row, column], bar, buf)
    mbarrier.wait(bar, 0)
    o = gl.arange(0, 2, layout=gl.SliceLayout(1, ROWS))[:, None] * 32
    o = o + gl.arange(0, 32, layout=gl.SliceLayout(0, ROWS))[None, :]
    gl.store(out + o, buf.load(ROWS))


@pytest.mark.parametrize("row, column", [(4, 40), (-1, -4), (9, 0)])
def test_outside_of_the_tensor_is_zero(row, column):
    x, out = torch.randn(5, 48), torch.full((2, 32), float("nan"))
    launch(read_box, 1, (descriptor(x, [2, 32]), out, row, column), dict(num_warps=4))
    padded = torch.zeros(32, 128)
    padded[8:13, 8:56] = x
    assert torch.equal(out, padded[8 + row : 10 + row, 8 + column : 40 + column])


@gluon.jit
def add_box(x_desc, y_desc, row, column, FENCED: gl.constexpr, num_warps: gl.constexpr):
    buf = gl.allocate_shared_memory(x_desc.dtype, [2, 32], x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, 256)
    tma_load(x_desc, [0, 0], bar, buf)
    mbarrier.wait(bar, 0)
    values = buf.load(ROWS)
    buf.store(values + values)
    if FENCED:
        fence_async_shared()
    tma_add(y_desc, [row, column], buf)
    tma.store_wait(0)


@pytest.mark.parametrize("row, column", [(0, 0), (4, 40), (9, 0)])
def test_additions_to_the_same_elements(row, column):
    """All programs' are there, without a race; elements outside of the tensor are left out."""

    def run(policy, seed):
        x, y = torch.randint(-9, 9, (2, 32)).float(), torch.randint(-9, 9, (5, 48)).float()
        before = torch.zeros(32, 128)
        before[8:13, 8:56] = y
        before[8 + row : 10 + row, 8 + column : 40 + column] += 3 * 2 * x
        args = (descriptor(x, [2, 32]), descriptor(y, [2, 32]), row, column)
        launch(add_box, 3, args, dict(FENCED=True, num_warps=4), policy=policy, seed=seed)
        assert torch.equal(y, before[8:13, 8:56])

    always(run)


def test_addition_needs_a_fence_after_generic_stores():
    def run(policy, seed):
        x, y = torch.zeros(2, 32), torch.zeros(2, 32)
        args = (descriptor(x, [2, 32]), descriptor(y, [2, 32]), 0, 0)
        launch(add_box, 1, args, dict(FENCED=False, num_warps=4), policy=policy, seed=seed)

    always_reports(Race, "TMA add", run)


@pytest.mark.parametrize("row, column", [(-1, 0), (0, -64)])
def test_results_before_the_tensor(row, column):
    """A load may start there, a store may not."""
    text = r"an illegal instruction where a coordinate is negative"
    always_reports(SimError, text, lambda p, s: run_copy_box(p, s, row, column))

    def add(policy, seed):
        args = (descriptor(torch.zeros(2, 32), [2, 32]), descriptor(torch.zeros(5, 48), [2, 32]), row, column)
        launch(add_box, 1, args, dict(FENCED=True, num_warps=4), policy=policy, seed=seed)

    always_reports(SimError, text, add)


def test_box_and_buffer_differ():
    text = r"box fp32\[1, 128\], buffer fp32\[2, 128\]"
    always_reports(SimError, text, lambda p, s: run_copy_box(p, s, buffer=(2, 128)))


def test_swizzles_differ():
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    text = "TMA store .*: swizzle_byte_width is 0 in the buffer and 128 in the descriptor"
    always_reports(SimError, text, lambda p, s: run_copy_box(p, s, layout=layout))


@pytest.mark.parametrize("row, column", [(1, 2), (0, -1), (-1, 130)])
def test_box_that_tma_cannot_start_at(row, column):
    text = f"the box starts at {column}, not at a multiple of 16 bytes"
    always_reports(SimError, text, lambda p, s: run_copy_box(p, s, row, column))


def test_end_without_store_wait():
    always_reports(SimError, "ended without store_wait", lambda p, s: run_copy_box(p, s, WAIT=False))


@gluon.jit
def load_line(x_desc, start, slot, BOXES: gl.constexpr, BOX: gl.constexpr, num_warps: gl.constexpr):
    bufs = gl.allocate_shared_memory(gl.float32, [BOXES, BOX], x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, BOX * 4)
    tma_load(x_desc, [start], bar, bufs.index(slot))
    mbarrier.wait(bar, 0)


@pytest.mark.parametrize(
    "start, slot, box, text",
    [
        (2, 0, 32, "the box starts at 2, not at a multiple of 16 bytes"),
        (4, 1, 16, "the buffer starts at byte 64"),
        (4, 3, 32, r"index 3 of p0 smem0\[3, 32\] is out of range 0..2"),
    ],
)
def test_lines(start, slot, box, text):
    x = torch.randn(100)
    options = dict(BOXES=3, BOX=box, num_warps=4)
    launch(load_line, 1, (descriptor(x, [box]), 4, 0), options)
    with pytest.raises(SimError, match=text):
        launch(load_line, 1, (descriptor(x, [box]), start, slot), options)


# ---------------------------------------------------------------- wgmma


@gluon.jit
def multiply(
    a_desc, b_desc, out, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, B_IS_KN: gl.constexpr,
    START: gl.constexpr, PARTS: gl.constexpr, FAULT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out [M, N] = PARTS * A @ rows START... of B, B [N, K] or, with B_IS_KN, [K, N]."""
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [1] + b_desc.block_type.shape, b_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
    tma_load(a_desc, [0, 0], bar, a)
    tma_load(b_desc, [0, 0], bar, b.index(0))
    mbarrier.wait(bar, 0)
    if B_IS_KN:
        right = b.index(0)
    else:
        right = b.index(0).slice(START, N, 0).permute((1, 0))
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    acc = warpgroup_mma_init(gl.full([M, N], 0.0, gl.float32, L))
    for i in gl.static_range(PARTS):
        acc = warpgroup_mma(a, right, acc, use_acc=i > 0, is_async=True)
    if FAULT == "used in flight":
        c = acc
    elif FAULT == "all but one":
        c = warpgroup_mma_wait(1, deps=[acc])
    elif FAULT == "not waited for":
        c = gl.full([M, N], 0.0, gl.float32, L)
    else:
        c = warpgroup_mma_wait(0, deps=[acc])
    rows = gl.arange(0, M, layout=gl.SliceLayout(1, L))
    columns = gl.arange(0, N, layout=gl.SliceLayout(0, L))
    gl.store(out + rows[:, None] * N + columns[None, :], c * 1.0)


def run_multiply(policy, seed, N=64, M=64, K=64, dtype=torch.bfloat16, kn=False, START=0, PARTS=1, FAULT="", warps=4):
    a, b = torch.randn(M, K).to(dtype), torch.randn(*((K, N) if kn else (START + N, K))).to(dtype)
    out = torch.full((M, N), float("nan"))
    options = dict(M=M, N=N, K=K, B_IS_KN=kn, START=START, PARTS=PARTS, FAULT=FAULT, num_warps=warps)
    args = (swizzled(a, [M, K]), swizzled(b, list(b.shape)), out)
    launch(multiply, 1, args, options, policy=policy, seed=seed)
    right = b.float() if kn else b[START:].float().t()
    torch.testing.assert_close(out, PARTS * (a.float() @ right), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("n", [8, 16, 64, 128, 256])
@pytest.mark.parametrize("kn", [False, True], ids=["N x K", "K x N"])
def test_wgmma_widths_and_orders_of_bf16(n, kn, seed):
    run_multiply("random", 0, N=n, kn=kn, PARTS=2)


def test_wgmma_of_fp8_and_of_slices(seed):
    run_multiply("lazy", 0, N=64, K=128, dtype=torch.float8_e4m3fn, START=64)
    always(lambda policy, s: run_multiply(policy, s, N=32, M=128, START=32, PARTS=3))


@pytest.mark.parametrize(
    "options, text",
    [
        (dict(FAULT="used in flight"), "accumulator used without warpgroup_mma_wait"),
        (dict(FAULT="all but one"), "accumulator used without warpgroup_mma_wait"),
        (dict(FAULT="not waited for"), "ended without warpgroup_mma_wait"),
        (dict(kn=True, K=128, dtype=torch.float8_e4m3fn), "8-bit operands must be K-major"),
        (dict(M=32), "M is a multiple of 64"),
        (dict(K=8), "K of 32 bytes"),
        (dict(warps=2), "a warp group has 4 warps"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wgmma_that_is_wrong(options, text):
    always_reports(SimError, text, lambda p, s: run_multiply(p, s, **options))


# ---------------------------------------------------------------- buffers


@gluon.jit
def reuse(out, num_warps: gl.constexpr):
    """A float32 buffer used as int8, then as float32 again."""
    o = gl.arange(0, 32, layout=LINE)
    PLAIN: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    buf = gl.allocate_shared_memory(gl.float32, [32], PLAIN)
    reinterpret(buf, gl.int8, [32], PLAIN).store(o.to(gl.int8))
    gl.store(out + o, buf.load(LINE).to(gl.int32, bitcast=True))


def test_reinterpret():
    out = torch.zeros(32, dtype=torch.int32)
    launch(reuse, 1, (out,), dict(num_warps=4))
    assert (out[0], out[7]) == (0x03020100, 0x1F1E1D1C)


@gluon.jit
def half_and_half(bufs, out, bar, FIRST: gl.constexpr):
    buf = bufs.index(0)
    gl.store(out + gl.arange(0, 64, layout=LINE), buf.load(LINE))
    mbarrier.arrive(bar, count=1)


@gluon.jit
def overwrite_halves(bufs, out, bar, FIRST: gl.constexpr):
    o = gl.arange(0, 32, layout=LINE)
    if FIRST:
        mbarrier.wait(bar, 0)
    bufs.index(0).slice(0, 32, 0).store(o)
    if not FIRST:
        mbarrier.wait(bar, 0)
    bufs.index(0).slice(32, 32, 0).store(o)


@gluon.jit
def halves(out, FIRST: gl.constexpr, num_warps: gl.constexpr):
    bufs = gl.allocate_shared_memory(gl.int32, [1, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bufs.index(0).store(gl.arange(0, 64, layout=LINE))
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    gl.warp_specialize(
        [(half_and_half, (bufs, out, bar, FIRST)), (overwrite_halves, (bufs, out, bar, FIRST))], [4], [64]
    )


def test_overlapping_views():
    out = torch.zeros(64, dtype=torch.int32)
    always(lambda p, s: launch(halves, 1, (out,), dict(FIRST=True, num_warps=4), policy=p, seed=s))
    text = r"(write|read) of p0 smem0\[1, 64\]\[bytes 0..(127|255)\] by p0/[01]"
    always_reports(Race, text, lambda p, s: launch(halves, 1, (out,), dict(FIRST=False, num_warps=4), policy=p, seed=s))


@gluon.jit
def fence_or_not(x_desc, out_desc, FENCE: gl.constexpr, num_warps: gl.constexpr):
    buf = gl.allocate_shared_memory(gl.float32, [32], x_desc.layout)
    buf.store(gl.full([32], 1.0, gl.float32, LINE))
    if FENCE:
        fence_async_shared()
    tma_store(out_desc, [0], buf)
    tma.store_wait(0)


def run_fence(policy, seed, FENCE):
    out = torch.zeros(32)
    args = (descriptor(out, [32]), descriptor(out, [32]))
    launch(fence_or_not, 1, args, dict(FENCE=FENCE, num_warps=4), policy=policy, seed=seed)
    assert (out == 1).all()


def test_tma_store_needs_a_fence_after_generic_stores():
    always(lambda p, s: run_fence(p, s, True))
    always_reports(Race, r"without fence_async_shared\(\)", lambda p, s: run_fence(p, s, False))
