"""Rings of stages whose producer warp also stores small tensors to shared memory, as persistent kernels do."""

import re

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megamoe.kernels.gluon.spelling import tma_load
from tests.gluon_sim.schedules import always, always_reports
from tests.support.gluon_sim import Deadlock, Race, SimError, launch

STAGES = 2
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
ROWS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
WORDS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def scalar(buf, FLOAT: gl.constexpr):
    """First element of a buffer, as a scalar of every thread."""
    if FLOAT:
        return gl.max(buf.slice(0, 1, 0).load(ROWS), 0)
    else:
        return gl.sum(buf.slice(0, 1, 0).load(ROWS), 0)


@gluon.jit
def produce(x_desc, tiles, factors, bars, bufs, n, STAGES: gl.constexpr, FAULT: gl.constexpr):
    """Items are (number of a row, factor, the row by TMA); row -1 ends the ring and has no bytes."""
    full, empty = bars
    x_bufs, tile_bufs, factor_bufs = bufs
    o = gl.arange(0, 32, layout=LINE)
    for it in range(n + 1):
        s = it % STAGES
        row = gl.load(tiles + it)
        if FAULT != "no empty wait":
            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
        if FAULT == "store after expect":
            mbarrier.expect(full.index(s), 512 if row >= 0 else 0)
        tile_bufs.index(s).store(gl.load(tiles + it + o * 0))
        factor_bufs.index(s).store(gl.load(factors + it + o, mask=o < 1, other=1.0))
        if row >= 0:
            if FAULT != "store after expect":
                mbarrier.expect(full.index(s), 512)
            tma_load(x_desc, [row, 0], full.index(s), x_bufs.index(s))
        else:
            if FAULT != "store after expect":
                mbarrier.arrive(full.index(s), count=1)


@gluon.jit
def consume(out, bars, bufs, width, unused, STAGES: gl.constexpr, C: gl.constexpr, FAULT: gl.constexpr):
    full, empty = bars
    x_bufs, tile_bufs, factor_bufs = bufs
    o = C * 64 + gl.arange(0, 64, layout=ROWS)
    it = 0
    row = 0
    while row >= 0:
        s = it % STAGES
        if FAULT != "no full wait":
            mbarrier.wait(full.index(s), (it // STAGES) & 1)
        row = scalar(tile_bufs.index(s), False)
        factor = scalar(factor_bufs.index(s), True)
        if FAULT == "freed too early":
            mbarrier.arrive(empty.index(s), count=1)
        if row >= 0:
            x = x_bufs.index(s).reshape([128]).slice(C * 64, 64, 0).load(ROWS)
            # width is of 32 bits, row * width need not be.
            gl.store(out + row.to(gl.int64) * width + o, x * factor, mask=o < width)
        if FAULT != "freed too early":
            mbarrier.arrive(empty.index(s), count=1, pred=row >= 0)
        it += 1
    if FAULT == "unused pointer":
        gl.store(unused, it)


@gluon.jit
def ring(
    x_desc, tiles, factors, out, unused, n, width, STAGES: gl.constexpr, FAULT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    x_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 128], x_desc.layout)
    tile_bufs = gl.allocate_shared_memory(gl.int32, [STAGES, 32], WORDS)
    factor_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 32], WORDS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    bars = (full, empty)
    bufs = (x_bufs, tile_bufs, factor_bufs)
    gl.warp_specialize(
        [
            (consume, (out, bars, bufs, width, unused, STAGES, 0, FAULT)),
            (consume, (out, bars, bufs, width, unused, STAGES, 1, FAULT)),
            (produce, (x_desc, tiles, factors, bars, bufs, n, STAGES, FAULT)),
        ],
        [4, 1],
        [240, 24],
    )


def run_ring(policy, seed, FAULT="", n=5, width=100):
    x, factors = torch.randn(8, width), torch.rand(n + 33)
    tiles = torch.full((n + 33,), -1, dtype=torch.int32)
    tiles[:n] = torch.arange(n) % 8
    out = torch.full((n, width), float("nan"))
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    # The box is wider than the tensor: its bytes count all the same.
    args = (TensorDescriptor.from_tensor(x, [1, 128], layout), tiles, factors, out, tiles, n, width)
    launch(ring, 1, args, dict(STAGES=STAGES, FAULT=FAULT, num_warps=4, maxnreg=168), policy=policy, seed=seed)
    assert torch.equal(out, x[:n] * factors[:n, None])


def test_ring(seed):
    always(run_ring)


def test_empty_ring():
    always(lambda policy, seed: run_ring(policy, seed, n=0))


def test_store_into_a_stage_that_may_be_in_use():
    text = (
        r"write of p0 smem\d\[2, 32\]\[bytes \d+..\d+\] by p0/2:produce \[store at produce:\d+\] is not ordered"
        # Seen from the other side.
        r"|read of p0 smem\d\[2, 32\].* is not ordered after the write by p0/2:produce"
        # Or a whole round ahead of a load of the same stage.
        "|more arrivals than p0 smem3"
    )
    always_reports((Race, SimError), text, lambda p, s: run_ring(p, s, FAULT="no empty wait"))


def test_read_before_the_full_wait():
    text = "which nothing has written|read of p0 smem1.* by p0/[01]:consume .* is not ordered after the write by p0/2"
    always_reports((Race, SimError), text, lambda p, s: run_ring(p, s, FAULT="no full wait"))


def test_store_that_the_expect_does_not_publish():
    text = "which nothing has written|read of p0 smem[12].* is not ordered after the write by p0/2:produce"
    always_reports((Race, SimError), text, lambda p, s: run_ring(p, s, FAULT="store after expect", n=0))


def test_stage_freed_before_it_is_read():
    # The last arrivals are for a phase that nobody opens, so only the order shows it.
    text = r"is not ordered after the read by p0/[01]:consume"
    always_reports(Race, text, lambda p, s: run_ring(p, s, FAULT="freed too early", n=6))


def test_scalar_stores_after_a_release_are_not_covered_by_it():
    # Through a pointer that the other variants leave unused; what both consumers did before is ordered by the ring.
    always_reports(Race, r"write of global tiles\[0\]", lambda p, s: run_ring(p, s, FAULT="unused pointer"))


def test_report_of_a_ring_that_stands_still():
    with pytest.raises(Deadlock) as raised:
        launch(ring, 1, ring_without_end(), dict(STAGES=STAGES, FAULT="", num_warps=4), policy="rr")
    lines = str(raised.value).splitlines()
    assert re.fullmatch(r"no partition can run \(policy rr, seed 0, step \d+\):", lines[0])
    waiting = [line.split() for line in lines[1:] if "waits for" in line]
    assert [words[0] for words in waiting] == ["p0/0:consume", "p0/1:consume", "p0"]
    assert "parity 1 of p0 smem3[2, 1][0](phase 1 open: 0/1 arrivals, 0 bytes outstanding)" in lines[1]
    assert "at consume:" in lines[2]


def ring_without_end():
    """Arguments whose list of rows lacks the end: the producer stops after ``n`` + 1 items."""
    x, out = torch.randn(8, 128), torch.zeros(2, 128)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    tiles = torch.zeros(40, dtype=torch.int32)
    tiles[1] = 1
    return TensorDescriptor.from_tensor(x, [1, 128], layout), tiles, torch.ones(40), out, tiles, 1, 128
