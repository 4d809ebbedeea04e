"""Flags between programs and ranks: release and acquire, scopes, spin loops, proxies of global memory."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megamoe.kernels.gluon.spelling import cta_barrier, tma_load, tma_store, wait_global_writes
from tests.gluon_sim.schedules import always, always_reports
from tests.support.gluon_sim import Deadlock, Race, launch

LINE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
WIDE = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
PLAIN = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


@gluon.jit
def load_acquire(p):
    return gl.inline_asm_elementwise(
        "ld.acquire.sys.global.b32 $0, [$1];", "=r,l,~{memory}", [p], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def send(peers, x, rank, RANKS: gl.constexpr, SEM: gl.constexpr, BARRIER: gl.constexpr, SCOPE: gl.constexpr):
    """Write my row into every peer's inbox, then raise the peer's flag."""
    o = gl.arange(0, 512, layout=WIDE)
    v = gl.load(x + o)
    for r in range(RANKS):
        inbox = gl.load(peers + 2 * r).to(gl.pointer_type(gl.float32), bitcast=True)
        flags = gl.load(peers + 2 * r + 1).to(gl.pointer_type(gl.int32), bitcast=True)
        gl.store(inbox + rank * 512 + o, v)
        if BARRIER:
            cta_barrier()
        if SEM == "asm":
            gl.inline_asm_elementwise(
                "red.release.sys.global.add.u32 [$1], $2; mov.u32 $0, 0;",
                "=r,l,r,~{memory}",
                [flags + rank, 1],
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            gl.atomic_add(flags + rank, 1, sem=SEM, scope=SCOPE)


@gluon.jit
def receive(inbox, flags, out, RANKS: gl.constexpr, POLL: gl.constexpr, COUNT: gl.constexpr):
    o = gl.arange(0, 512, layout=WIDE)
    total = gl.full([512], 0.0, gl.float32, WIDE)
    for r in range(RANKS):
        if POLL == "acquire":
            while load_acquire(flags + r) < COUNT:
                pass
        elif POLL == "atomic":
            while gl.atomic_add(flags + r, 0, sem="acquire", scope="sys") < COUNT:
                pass
        else:
            while gl.load(flags + r, volatile=True) < COUNT:
                pass
        total += gl.load(inbox + r * 512 + o)
    gl.store(out + o, total)


@gluon.jit
def exchange(
    peers, x, inbox, flags, out, rank, RANKS: gl.constexpr, SEM: gl.constexpr, BARRIER: gl.constexpr,
    SCOPE: gl.constexpr, POLL: gl.constexpr, COUNT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    gl.warp_specialize(
        [
            (send, (peers, x, rank, RANKS, SEM, BARRIER, SCOPE)),
            (receive, (inbox, flags, out, RANKS, POLL, COUNT)),
        ],
        [4],
        [40],
    )


def exchange_between_ranks(policy, seed, ranks=3, SEM="release", BARRIER=True, SCOPE="sys", POLL="acquire", COUNT=1):
    x = [torch.randn(512) for _ in range(ranks)]
    inbox = [torch.full((ranks, 512), float("nan")) for _ in range(ranks)]
    flags = [torch.zeros(ranks, dtype=torch.int32) for _ in range(ranks)]
    out = [torch.zeros(512) for _ in range(ranks)]
    peers = torch.tensor([p for r in range(ranks) for p in (inbox[r].data_ptr(), flags[r].data_ptr())])
    options = dict(RANKS=ranks, SEM=SEM, BARRIER=BARRIER, SCOPE=SCOPE, POLL=POLL, COUNT=COUNT, num_warps=4)
    jobs = [(exchange, 1, (peers, x[r], inbox[r], flags[r], out[r], r), options) for r in range(ranks)]
    launch(jobs, policy=policy, seed=seed)
    for o in out:
        torch.testing.assert_close(o, sum(x))
    assert all((f == COUNT).all() for f in flags)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(POLL="atomic"),
        # Unguarded asm: each of the 128 threads adds 1, and releases its own work.
        dict(SEM="asm", COUNT=128, BARRIER=False),
    ],
    ids=str,
)
def test_exchange_between_ranks(options, seed):
    always(lambda policy, seed: exchange_between_ranks(policy, seed, **options))


@pytest.mark.parametrize(
    "options",
    [
        dict(POLL="volatile"),
        dict(SEM="relaxed"),
        # Thread 0 raises the flag, the other 127 may not have stored yet.
        dict(BARRIER=False),
    ],
    ids=str,
)
def test_flag_that_orders_too_little(options):
    always_reports(Race, "read of global r[012].inbox", lambda p, s: exchange_between_ranks(p, s, **options))


def test_scope_too_narrow_between_ranks():
    always_reports(Race, "needs .sys scope", lambda p, s: exchange_between_ranks(p, s, SCOPE="gpu"))


@gluon.jit
def poll_by_first_warp(p):
    return gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.lt.u32 p, t, 32; mov.b32 $0, 1;
        @p ld.acquire.sys.global.b32 $0, [$1]; }""",
        "=&r,l,~{memory}",
        [p],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def one_warp_polls(x, flag, out, BARRIER: gl.constexpr, num_warps: gl.constexpr):
    o = gl.arange(0, 512, layout=WIDE)
    if gl.program_id(0) == 0:
        gl.store(x + o, 7.0)
        cta_barrier()
        gl.atomic_add(flag, 1, sem="release", scope="gpu")
    else:
        while poll_by_first_warp(flag) < 1:
            pass
        if BARRIER:
            cta_barrier()
        gl.store(out + o, gl.load(x + o))


def run_one_warp_polls(policy, seed, BARRIER=True):
    x, out, flag = torch.zeros(512), torch.zeros(512), torch.zeros(1, dtype=torch.int32)
    launch(one_warp_polls, 2, (x, flag, out), dict(BARRIER=BARRIER, num_warps=4), policy=policy, seed=seed)
    assert (out == 7).all()


def test_what_the_first_warp_acquires_is_everyones_after_a_barrier():
    always(run_one_warp_polls)
    always_reports(Race, r"read of global x\[0\] by p1", lambda p, s: run_one_warp_polls(p, s, BARRIER=False))


def test_lost_flag_is_a_deadlock_with_its_value():
    text = r"receive +waits for int32 at r[012].flags\[\d\] to change from 1\n +at load_acquire:\d+ < receive:\d+"
    always_reports(Deadlock, text, lambda p, s: exchange_between_ranks(p, s, COUNT=2))


# ---------------------------------------------------------------- a grid-wide barrier


@gluon.jit
def grid_barrier(counter, x, out, num_warps: gl.constexpr):
    p = gl.program_id(0)
    gl.store(x + p, p + 1)
    cta_barrier()
    gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    while load_acquire(counter) < gl.num_programs(0):
        pass
    gl.store(out + p, gl.load(x + (p + 1) % gl.num_programs(0)))


def run_grid_barrier(policy, seed, resident=None):
    counter, x, out = (torch.zeros(n, dtype=torch.int32) for n in (1, 5, 5))
    launch(grid_barrier, 5, (counter, x, out), dict(num_warps=4), resident=resident, policy=policy, seed=seed)
    assert out.tolist() == [2, 3, 4, 5, 1]


def test_grid_barrier():
    always(run_grid_barrier)


def test_grid_barrier_of_more_programs_than_are_resident():
    text = r"waits for int32 at counter\[0\] to change from 3"
    always_reports(Deadlock, text, lambda p, s: run_grid_barrier(p, s, resident=3))


# ---------------------------------------------------------------- proxies of global memory


@gluon.jit
def store_then_flag(dst_desc, flag, out, dst, src, COMPLETE: gl.constexpr, num_warps: gl.constexpr):
    """Program 0: TMA store, then a flag; program 1 reads what has been stored."""
    o = gl.arange(0, 256, layout=WIDE)
    if gl.program_id(0) == 0:
        buf = gl.allocate_shared_memory(gl.float32, [256], dst_desc.layout)
        buf.store(gl.load(src + o))
        fence_async_shared()
        tma_store(dst_desc, [0], buf)
        tma.store_wait(0)
        if COMPLETE:
            wait_global_writes()
        cta_barrier()
        gl.atomic_add(flag, 1, sem="release", scope="gpu")
    else:
        while load_acquire(flag) < 1:
            pass
        gl.store(out + o, gl.load(dst + o))


def run_store_then_flag(policy, seed, COMPLETE=True):
    src, dst, out = torch.randn(256), torch.full((256,), float("nan")), torch.zeros(256)
    flag = torch.zeros(1, dtype=torch.int32)
    args = (TensorDescriptor.from_tensor(dst, [256], PLAIN), flag, out, dst, src)
    launch(store_then_flag, 2, args, dict(COMPLETE=COMPLETE, num_warps=4), policy=policy, seed=seed)
    torch.testing.assert_close(out, src)


def test_flag_after_a_complete_tma_store():
    always(run_store_then_flag)


def test_store_wait_does_not_wait_for_the_global_write():
    text = r"global dst_desc\[\d+\]"
    always_reports(Race, text, lambda p, s: run_store_then_flag(p, s, COMPLETE=False))


@gluon.jit
def fence_both():
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def add_release(p):
    """Lane 0 of each warp, for its whole warp."""
    gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 l; mov.u32 l, %laneid; setp.eq.u32 p, l, 0; bar.warp.sync 0xffffffff;
        @p red.release.gpu.global.add.u32 [$1], $2; mov.u32 $0, 0; }""",
        "=r,l,r,~{memory}",
        [p, 1],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def store_then_tma(x_desc, x, flag, out, WRITER: gl.constexpr, READER: gl.constexpr, num_warps: gl.constexpr):
    """Program 0 writes x with plain stores, program 1 reads it by TMA."""
    o = gl.arange(0, 32, layout=LINE)
    if gl.program_id(0) == 0:
        gl.store(x + o, 7.0)
        if WRITER == "both":
            fence_both()
        if WRITER == "shared":
            fence_async_shared()
        add_release(flag)
    else:
        while load_acquire(flag) < 1:
            pass
        if READER == "both":
            fence_both()
        buf = gl.allocate_shared_memory(gl.float32, [32], x_desc.layout)
        bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(bar, count=1)
        mbarrier.expect(bar, 128)
        tma_load(x_desc, [0], bar, buf)
        mbarrier.wait(bar, 0)
        gl.store(out + o, buf.load(LINE))


def run_store_then_tma(policy, seed, WRITER="none", READER="none"):
    x, out, flag = torch.zeros(32), torch.zeros(32), torch.zeros(1, dtype=torch.int32)
    args = (TensorDescriptor.from_tensor(x, [32], PLAIN), x, flag, out)
    launch(store_then_tma, 2, args, dict(WRITER=WRITER, READER=READER, num_warps=1), policy=policy, seed=seed)
    assert (out == 7).all()


@pytest.mark.parametrize("side", ["WRITER", "READER"])
def test_proxy_fence_on_either_side(side):
    always(lambda policy, seed: run_store_then_tma(policy, seed, **{side: "both"}))


@pytest.mark.parametrize("fence", ["none", "shared"])
def test_tma_load_of_plain_stores_without_a_proxy_fence(fence):
    always_reports(Race, "without a fence.proxy.async", lambda p, s: run_store_then_tma(p, s, WRITER=fence))
