"""mbarriers and named barriers: counts, bytes, parities, overruns and what they order."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megamoe.kernels.gluon.spelling import tma_load
from tests.gluon_sim.schedules import always, always_reports
from tests.support.gluon_sim import Deadlock, Race, SimError, launch

LINE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
PLAIN = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


@gluon.jit
def make_barriers(n: gl.constexpr, count: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(bars.index(i), count=count)
    return bars


# ---------------------------------------------------------------- phases


@gluon.jit
def run_ahead(bars, n, BARRIERS: gl.constexpr):
    for i in range(n):
        mbarrier.arrive(bars.index(i % BARRIERS), count=1)


@gluon.jit
def follow(bars, n, BARRIERS: gl.constexpr):
    for i in range(n):
        mbarrier.wait(bars.index(i % BARRIERS), (i // BARRIERS) & 1)


@gluon.jit
def unsynchronised(n, BARRIERS: gl.constexpr, num_warps: gl.constexpr):
    bars = make_barriers(BARRIERS, 1)
    gl.warp_specialize([(follow, (bars, n, BARRIERS)), (run_ahead, (bars, n, BARRIERS))], [1], [24])


def run_unsynchronised(policy, seed, n, barriers):
    launch(unsynchronised, 1, (n,), dict(BARRIERS=barriers, num_warps=1), policy=policy, seed=seed)


@pytest.mark.parametrize("n, barriers", [(1, 1), (2, 2)])
def test_phases_that_are_waited_for(n, barriers):
    always(lambda policy, seed: run_unsynchronised(policy, seed, n, barriers))


def test_overrun():
    # The second phase may end before the first has been waited for.
    text = "overrun: phase 1|waits for parity 0 of p0"
    always_reports((Race, Deadlock), text, lambda p, s: run_unsynchronised(p, s, 2, 1))


@gluon.jit
def arrive_twice(bar, back, ACKNOWLEDGED: gl.constexpr):
    mbarrier.arrive(bar, count=1)
    if ACKNOWLEDGED:
        mbarrier.wait(back, 0)
    mbarrier.arrive(bar, count=1)


@gluon.jit
def wait_for_the_second(bar, back, FIRST: gl.constexpr):
    if FIRST:
        mbarrier.wait(bar, 0)
    mbarrier.arrive(back, count=1)
    mbarrier.wait(bar, 1)


@gluon.jit
def second_phase(FIRST: gl.constexpr, ACKNOWLEDGED: gl.constexpr, num_warps: gl.constexpr):
    bars = make_barriers(2, 1)
    both = (bars.index(0), bars.index(1))
    gl.warp_specialize(
        [(wait_for_the_second, (both[0], both[1], FIRST)), (arrive_twice, (both[0], both[1], ACKNOWLEDGED))], [1], [24]
    )


def run_second_phase(policy, seed, FIRST, ACKNOWLEDGED=True):
    options = dict(FIRST=FIRST, ACKNOWLEDGED=ACKNOWLEDGED, num_warps=1)
    launch(second_phase, 1, (), options, policy=policy, seed=seed)


def test_second_phase_after_the_first():
    always(lambda policy, seed: run_second_phase(policy, seed, FIRST=True))


def test_wait_that_may_start_two_phases_early_is_ambiguous():
    # Parity 1 is also that of the phase before the first: the wait may pass at once, which the end of phase 0 shows.
    text = "ambiguous parity: p0 .* may still be in phase 0 when this wait for phase 1 starts|overrun: phase 0"
    always_reports(Race, text, lambda p, s: run_second_phase(p, s, FIRST=False))


def test_phase_that_may_end_twice_before_the_wait():
    text = "overrun: phase 1|waits for parity 0"
    always_reports((Race, Deadlock), text, lambda p, s: run_second_phase(p, s, FIRST=True, ACKNOWLEDGED=False))


# ---------------------------------------------------------------- counts, predicates, bytes


@gluon.jit
def signal(bar, x, n, COUNT: gl.constexpr, TIMES: gl.constexpr):
    gl.store(x + gl.arange(0, 32, layout=LINE), 5)
    for i in gl.static_range(TIMES):
        mbarrier.arrive(bar, count=COUNT, pred=n > i)


@gluon.jit
def wait_and_read(bar, x, out):
    o = gl.arange(0, 32, layout=LINE)
    mbarrier.wait(bar, 0)
    gl.store(out + o, gl.load(x + o))


@gluon.jit
def arrivals(x, out, n, EXPECTED: gl.constexpr, COUNT: gl.constexpr, TIMES: gl.constexpr, num_warps: gl.constexpr):
    bar = make_barriers(1, EXPECTED).index(0)
    gl.warp_specialize([(wait_and_read, (bar, x, out)), (signal, (bar, x, n, COUNT, TIMES))], [1], [24])


def run_arrivals(policy, seed, n=1, EXPECTED=1, COUNT=1, TIMES=1):
    x, out = (torch.zeros(32, dtype=torch.int32) for _ in range(2))
    options = dict(EXPECTED=EXPECTED, COUNT=COUNT, TIMES=TIMES, num_warps=1)
    launch(arrivals, 1, (x, out, n), options, policy=policy, seed=seed)
    assert (out == 5).all()


@pytest.mark.parametrize("options", [dict(), dict(EXPECTED=4, COUNT=2, TIMES=2, n=2), dict(TIMES=3, n=1)], ids=str)
def test_arrivals_without_bytes_publish_earlier_work(options):
    always(lambda policy, seed: run_arrivals(policy, seed, **options))


def test_arrival_that_a_predicate_switches_off():
    text = r"waits for parity 0 of p0 smem0\[1, 1\]\[0\]\(phase 0 open: 0/1 arrivals, 0 bytes outstanding\)"
    always_reports(Deadlock, text, lambda p, s: run_arrivals(p, s, n=0))


def test_more_arrivals_than_the_count():
    always_reports(SimError, "more arrivals than", lambda p, s: run_arrivals(p, s, EXPECTED=2, COUNT=3))


@gluon.jit
def load_box(x_desc, out, BYTES: gl.constexpr, INIT: gl.constexpr, WAIT: gl.constexpr, num_warps: gl.constexpr):
    buf = gl.allocate_shared_memory(gl.float32, [32], x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    if INIT:
        mbarrier.init(bar, count=1)
    mbarrier.expect(bar, BYTES)
    tma_load(x_desc, [0], bar, buf)
    if WAIT:
        mbarrier.wait(bar, 0)
        gl.store(out + gl.arange(0, 32, layout=LINE), buf.load(LINE))


def run_load_box(policy, seed, BYTES=128, INIT=True, WAIT=True):
    x, out = torch.randn(32), torch.zeros(32)
    options = dict(BYTES=BYTES, INIT=INIT, WAIT=WAIT, num_warps=1)
    args = (TensorDescriptor.from_tensor(x, [32], PLAIN), out)
    launch(load_box, 1, args, options, policy=policy, seed=seed)
    if WAIT:
        assert torch.equal(out, x)


def test_bytes_of_a_box():
    always(run_load_box)


def test_too_many_bytes_expected():
    always_reports(Deadlock, "1/1 arrivals, 4 bytes outstanding", lambda p, s: run_load_box(p, s, BYTES=132))
    text = "ended with bytes outstanding on p0"
    always_reports(SimError, text, lambda p, s: run_load_box(p, s, BYTES=132, WAIT=False))


def test_too_few_bytes_expected():
    always_reports(SimError, "phase 0 gets 4 bytes more than expected", lambda p, s: run_load_box(p, s, BYTES=124))


def test_barrier_without_init():
    always_reports(SimError, "used before mbarrier.init", lambda p, s: run_load_box(p, s, INIT=False))


# ---------------------------------------------------------------- named barriers


@gluon.jit
def bar_sync():
    gl.inline_asm_elementwise("bar.sync 8, 64; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def bar_arrive(THREADS: gl.constexpr):
    if THREADS == 64:
        gl.inline_asm_elementwise(
            "bar.arrive 8, 64; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        gl.inline_asm_elementwise(
            "bar.arrive 8, 96; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def write_and_arrive(x, o, EARLY: gl.constexpr, THREADS: gl.constexpr, TIMES: gl.constexpr):
    if EARLY:
        bar_arrive(THREADS)
    gl.store(x + o, 7)
    if not EARLY:
        for _ in gl.static_range(TIMES):
            bar_arrive(THREADS)


@gluon.jit
def sync_and_read(x, out, o):
    bar_sync()
    gl.store(out + o, gl.load(x + o))


@gluon.jit
def named(x, out, EARLY: gl.constexpr, THREADS: gl.constexpr, TIMES: gl.constexpr, num_warps: gl.constexpr):
    o = gl.arange(0, 32, layout=LINE)
    gl.warp_specialize([(sync_and_read, (x, out, o)), (write_and_arrive, (x, o, EARLY, THREADS, TIMES))], [1], [24])


def run_named(policy, seed, EARLY=False, THREADS=64, TIMES=1):
    x, out = (torch.zeros(32, dtype=torch.int32) for _ in range(2))
    options = dict(EARLY=EARLY, THREADS=THREADS, TIMES=TIMES, num_warps=1)
    launch(named, 1, (x, out), options, policy=policy, seed=seed)
    assert (out == 7).all()


def test_named_barrier():
    always(run_named)


def test_named_barrier_arrival_before_the_work():
    always_reports(Race, "not ordered after an earlier", lambda p, s: run_named(p, s, EARLY=True))


def test_named_barrier_with_different_thread_counts():
    always_reports(
        SimError, r"named barrier 8 of p0 .* is used with (64|96) threads", lambda p, s: run_named(p, s, THREADS=96)
    )


def test_named_barrier_that_nobody_joins():
    always_reports(Deadlock, r"waits for named barrier 8 of p0 \(phase 0: 32/64", lambda p, s: run_named(p, s, TIMES=0))
