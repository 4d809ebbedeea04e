"""A persistent, warp-specialised FP8 grouped GEMM for the mutation suite: a producer warp and two consumers.

D[M, N] (BF16) = A[m, :] @ B[expert of m].T with FP8 A [M, K], B [E, N, K] and fp32 scales: SFA [K/128, M] for 1x128
blocks of A, SFB [E, N/128, K/128] for 128x128 blocks of B. ``m_indices`` int32 [M] is the expert of each row, constant
within blocks of 128 rows. It is here for its synchronisation, not to be fast.
"""

import dataclasses

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

from megamoe.kernels.gluon.spelling import tma_load, tma_store
from tests.support.gluon_sim import launch

BLOCK_K = gl.constexpr(128)
WAVE_M = gl.constexpr(64)  # rows of one wgmma of a consumer
WAVE_N = gl.constexpr(128)  # its columns: one block of B scales


@gluon.jit
def tile_coords(tile, num_m, num_n: gl.constexpr, GROUP_M: gl.constexpr):
    """Row block and column block of a tile; row blocks run fastest within groups of GROUP_M."""
    per_group = GROUP_M * num_n
    group = tile // per_group
    first = group * GROUP_M
    rows = gl.minimum(num_m - first, GROUP_M)
    r = tile - group * per_group
    return first + r % rows, r // rows


@gluon.jit
def tile_of(i, c, PINGPONG: gl.constexpr):
    """The i-th tile of consumer c. PINGPONG 0: both share a tile; 1: tiles in turn; 2: two tiles, K blocks in turn."""
    pid = gl.program_id(0)
    num_programs = gl.num_programs(0)
    if PINGPONG == 0:
        return pid + i * num_programs
    elif PINGPONG == 1:
        return pid + (2 * i + c) * num_programs
    else:
        return 2 * (pid + i * num_programs) + c


@gluon.jit
def item_of(i, c, k, NUM_K: gl.constexpr, PINGPONG: gl.constexpr):
    """Number in the ring of K block k of the i-th tile of consumer c."""
    if PINGPONG == 0:
        return i * NUM_K + k
    elif PINGPONG == 1:
        return (2 * i + c) * NUM_K + k
    else:
        return 2 * (i * NUM_K + k) + c


@gluon.jit
def load_item(
    it, m_blk, row_b, k, descs, bars, bufs, m_total, TILE_M: gl.constexpr, TILE_N: gl.constexpr, STAGES: gl.constexpr,
    SFA_TMA: gl.constexpr,
):  # fmt: skip
    a_desc, b_desc, sfa_desc = descs
    full, empty, turn = bars
    a_bufs, b_bufs, sfa_bufs = bufs
    NA: gl.constexpr = TILE_M // WAVE_M
    NB: gl.constexpr = TILE_N // WAVE_N
    s = it % STAGES
    mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
    bar = full.index(s)
    nbytes: gl.constexpr = (TILE_M + TILE_N) * BLOCK_K + (TILE_M * 4 if SFA_TMA else 0)
    mbarrier.expect(bar, nbytes)
    for h in gl.static_range(NA):
        tma_load(a_desc, [m_blk * TILE_M + h * WAVE_M, k * BLOCK_K], bar, a_bufs.index(s * NA + h))
    for h in gl.static_range(NB):
        tma_load(b_desc, [row_b + h * WAVE_N, k * BLOCK_K], bar, b_bufs.index(s * NB + h))
    if SFA_TMA:
        for h in gl.static_range(NA):
            tma_load(sfa_desc, [k * m_total + m_blk * TILE_M + h * WAVE_M], bar, sfa_bufs.index(s * NA + h))


@gluon.jit
def producer(
    descs, bars, bufs, m_indices, num_m, m_total, N: gl.constexpr, K: gl.constexpr, TILE_M: gl.constexpr,
    TILE_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, PINGPONG: gl.constexpr, SFA_TMA: gl.constexpr,
):  # fmt: skip
    NUM_K: gl.constexpr = K // BLOCK_K
    NUM_N: gl.constexpr = N // TILE_N
    num_tiles = num_m * NUM_N
    pid = gl.program_id(0)
    num_programs = gl.num_programs(0)
    if PINGPONG == 2:
        num_pairs = (num_tiles + 1) // 2
        for i in range(0, (num_pairs - pid + num_programs - 1) // num_programs):
            t0 = tile_of(i, 0, PINGPONG)
            t1 = t0 + 1
            has1 = t1 < num_tiles
            m0, n0 = tile_coords(t0, num_m, NUM_N, GROUP_M)
            m1, n1 = tile_coords(gl.minimum(t1, num_tiles - 1), num_m, NUM_N, GROUP_M)
            rb0 = gl.load(m_indices + m0 * TILE_M) * N + n0 * TILE_N
            rb1 = gl.load(m_indices + m1 * TILE_M) * N + n1 * TILE_N
            for k in range(NUM_K):
                it0 = item_of(i, 0, k, NUM_K, PINGPONG)
                it1 = item_of(i, 1, k, NUM_K, PINGPONG)
                load_item(it0, m0, rb0, k, descs, bars, bufs, m_total, TILE_M, TILE_N, STAGES, SFA_TMA)
                if has1:
                    load_item(it1, m1, rb1, k, descs, bars, bufs, m_total, TILE_M, TILE_N, STAGES, SFA_TMA)
    else:
        for i in range(0, (num_tiles - pid + num_programs - 1) // num_programs):
            m_blk, n_blk = tile_coords(pid + i * num_programs, num_m, NUM_N, GROUP_M)
            row_b = gl.load(m_indices + m_blk * TILE_M) * N + n_blk * TILE_N
            for k in range(NUM_K):
                load_item(i * NUM_K + k, m_blk, row_b, k, descs, bars, bufs, m_total, TILE_M, TILE_N, STAGES, SFA_TMA)


@gluon.jit
def mma_wave(it, a_half, b_half, acc, bufs, NA: gl.constexpr, NB: gl.constexpr, STAGES: gl.constexpr):
    s = it % STAGES
    a = bufs[0].index(s * NA + a_half)
    b = bufs[1].index(s * NB + b_half).permute((1, 0))
    return warpgroup_mma(a, b, acc, use_acc=False, is_async=True)


@gluon.jit
def consumer(
    d_desc, bars, bufs, d_bufs, ptrs, num_m, m_total, N: gl.constexpr, K: gl.constexpr, TILE_M: gl.constexpr,
    TILE_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, PINGPONG: gl.constexpr, SFA_TMA: gl.constexpr,
    LAG: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    full, empty, turn = bars
    sfa_ptr, sfb_ptr, m_indices = ptrs
    NUM_K: gl.constexpr = K // BLOCK_K
    NUM_N: gl.constexpr = N // TILE_N
    NA: gl.constexpr = TILE_M // WAVE_M
    NB: gl.constexpr = TILE_N // WAVE_N
    # Waves of this consumer: the rows are split between both unless each has tiles of its own.
    WM: gl.constexpr = NA if PINGPONG != 0 else NA // 2
    A0: gl.constexpr = 0 if PINGPONG != 0 else C * WM
    NUM_WAVES: gl.constexpr = WM * NB
    gl.static_assert(NUM_WAVES == 1 or NUM_WAVES == 2)
    AW1: gl.constexpr = 1 if WM == 2 else 0  # rows of wave 1
    BW1: gl.constexpr = 1 if NB == 2 else 0  # its columns

    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    LR: gl.constexpr = gl.SliceLayout(1, L)
    rows = gl.arange(0, WAVE_M, layout=LR)
    sfb_n: gl.constexpr = N // 128

    num_tiles = num_m * NUM_N
    i = 0
    tile = tile_of(i, C, PINGPONG)
    while tile < num_tiles:
        m_blk, n_blk = tile_coords(tile, num_m, NUM_N, GROUP_M)
        expert = gl.load(m_indices + m_blk * TILE_M)
        pb0 = sfb_ptr + (expert * sfb_n + n_blk * NB) * NUM_K
        pb1 = pb0 + BW1 * NUM_K
        pa0 = sfa_ptr + m_blk * TILE_M + A0 * WAVE_M + rows
        pa1 = pa0 + AW1 * WAVE_M

        zero = gl.full([WAVE_M, WAVE_N], 0.0, gl.float32, L)
        f0 = zero
        f1 = zero
        # Scales are loaded one block ahead.
        nb0 = gl.load(pb0)
        nb1 = gl.load(pb1)
        na0 = gl.load(pa0)
        na1 = gl.load(pa1)

        if PINGPONG == 1:
            # A wait more than one phase ahead is ambiguous: all earlier items have to be there.
            mbarrier.wait(turn.index(C), (i + C - 1) & 1)
        if LAG:
            # The last wave of a block is scaled after the next block's wait.
            raw = warpgroup_mma_init(zero)
            sl = gl.full([WAVE_M], 0.0, gl.float32, LR)
            for k in range(NUM_K):
                it = item_of(i, C, k, NUM_K, PINGPONG)
                s = it % STAGES
                b0 = nb0
                b1 = nb1
                kn = gl.minimum(k + 1, NUM_K - 1)
                nb0 = gl.load(pb0 + kn)
                nb1 = gl.load(pb1 + kn)
                mbarrier.wait(full.index(s), (it // STAGES) & 1)
                if SFA_TMA:
                    a0 = bufs[2].index(s * NA + A0).load(LR)
                    a1 = bufs[2].index(s * NA + A0 + AW1).load(LR)
                    fence_async_shared()
                else:
                    a0 = na0
                    a1 = na1
                    na0 = gl.load(pa0 + kn * m_total)
                    na1 = gl.load(pa1 + kn * m_total)
                p = warpgroup_mma_wait(0, deps=[raw])
                prev = gl.maximum(it - (1 if PINGPONG != 2 else 2), 0) % STAGES
                mbarrier.arrive(empty.index(prev), count=1, pred=k > 0)
                if NUM_WAVES == 1:
                    f0 += p * sl[:, None]
                    raw = mma_wave(it, A0, 0, p, bufs, NA, NB, STAGES)
                    sl = a0 * b0
                else:
                    f1 += p * sl[:, None]
                    q = mma_wave(it, A0, 0, p, bufs, NA, NB, STAGES)
                    q0 = warpgroup_mma_wait(0, deps=[q])
                    f0 += q0 * (a0 * b0)[:, None]
                    raw = mma_wave(it, A0 + AW1, BW1, q0, bufs, NA, NB, STAGES)
                    sl = a1 * b1
            p = warpgroup_mma_wait(0, deps=[raw])
            last = item_of(i, C, NUM_K - 1, NUM_K, PINGPONG)
            mbarrier.arrive(empty.index(last % STAGES), count=1)
            if NUM_WAVES == 1:
                f0 += p * sl[:, None]
            else:
                f1 += p * sl[:, None]
        else:
            part = zero
            for k in range(NUM_K):
                it = item_of(i, C, k, NUM_K, PINGPONG)
                s = it % STAGES
                b0 = nb0
                b1 = nb1
                kn = gl.minimum(k + 1, NUM_K - 1)
                nb0 = gl.load(pb0 + kn)
                nb1 = gl.load(pb1 + kn)
                mbarrier.wait(full.index(s), (it // STAGES) & 1)
                acc = mma_wave(it, A0, 0, part if NUM_WAVES == 2 else zero, bufs, NA, NB, STAGES)
                if SFA_TMA:
                    a0 = bufs[2].index(s * NA + A0).load(LR)
                    a1 = bufs[2].index(s * NA + A0 + AW1).load(LR)
                    fence_async_shared()
                else:
                    a0 = na0
                    a1 = na1
                    na0 = gl.load(pa0 + kn * m_total)
                    na1 = gl.load(pa1 + kn * m_total)
                p0 = warpgroup_mma_wait(0, deps=[acc])
                if NUM_WAVES == 1:
                    mbarrier.arrive(empty.index(s), count=1)
                f0 += p0 * (a0 * b0)[:, None]
                if NUM_WAVES == 2:
                    acc1 = mma_wave(it, A0 + AW1, BW1, p0, bufs, NA, NB, STAGES)
                    part = warpgroup_mma_wait(0, deps=[acc1])
                    mbarrier.arrive(empty.index(s), count=1)
                    f1 += part * (a1 * b1)[:, None]

        if PINGPONG == 1:
            mbarrier.arrive(turn.index(1 - C), count=1)
        # The store is waited for when its buffer is needed again.
        om = m_blk * TILE_M + A0 * WAVE_M
        on = n_blk * TILE_N
        d_buf = d_bufs.index(C)
        tma.store_wait(0)
        d_buf.store(f0.to(gl.bfloat16))
        fence_async_shared()
        tma_store(d_desc, [om, on], d_buf)
        if NUM_WAVES == 2:
            tma.store_wait(0)
            d_buf.store(f1.to(gl.bfloat16))
            fence_async_shared()
            tma_store(d_desc, [om + AW1 * WAVE_M, on + BW1 * WAVE_N], d_buf)
        i += 1
        tile = tile_of(i, C, PINGPONG)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_m", "m_total"])
def grouped_gemm_kernel(
    a_desc, b_desc, d_desc, sfa_desc, sfa_ptr, sfb_ptr, m_indices, num_m, m_total, N: gl.constexpr, K: gl.constexpr,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, PINGPONG: gl.constexpr,
    SFA_TMA: gl.constexpr, LAG: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    NA: gl.constexpr = TILE_M // WAVE_M
    NB: gl.constexpr = TILE_N // WAVE_N
    a_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * NA, WAVE_M, BLOCK_K], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * NB, WAVE_N, BLOCK_K], b_desc.layout)
    d_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, WAVE_M, WAVE_N], d_desc.layout)
    NUM_SFA: gl.constexpr = STAGES * NA if SFA_TMA else 1
    sfa_bufs = gl.allocate_shared_memory(gl.float32, [NUM_SFA, WAVE_M], sfa_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for st in gl.static_range(STAGES):
        mbarrier.init(full.index(st), count=1)
        mbarrier.init(empty.index(st), count=2 if PINGPONG == 0 else 1)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(2):
        mbarrier.init(turn.index(c), count=1)
    bars = (full, empty, turn)
    bufs = (a_bufs, b_bufs, sfa_bufs)
    descs = (a_desc, b_desc, sfa_desc)
    ptrs = (sfa_ptr, sfb_ptr, m_indices)
    gl.warp_specialize(
        [
            (consumer, (d_desc, bars, bufs, d_bufs, ptrs, num_m, m_total, N, K, TILE_M, TILE_N, STAGES, GROUP_M,
                        PINGPONG, SFA_TMA, LAG, 0)),
            (consumer, (d_desc, bars, bufs, d_bufs, ptrs, num_m, m_total, N, K, TILE_M, TILE_N, STAGES, GROUP_M,
                        PINGPONG, SFA_TMA, LAG, 1)),
            (producer, (descs, bars, bufs, m_indices, num_m, m_total, N, K, TILE_M, TILE_N, STAGES, GROUP_M, PINGPONG,
                        SFA_TMA)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Variant:
    tile_m: int
    tile_n: int
    stages: int
    pingpong: int = 0
    sfa_tma: bool = False
    lag: bool = False


SIMPLE = Variant(128, 128, 6)
LAG_WIDE = Variant(128, 256, 4, lag=True)
SCALES_BY_TMA = Variant(256, 128, 3, sfa_tma=True)
PINGPONG_TILES = Variant(128, 128, 6, pingpong=1)
PINGPONG_BLOCKS = Variant(128, 128, 6, pingpong=2, lag=True)


def relative_error(variant: Variant, policy: str, seed: int, rows_per_expert=(256, 256), N=512, K=512, programs=3):
    """Run the kernel under the simulator; |D - reference| / |reference|, about 1.7e-3 for the rounding to BF16."""
    generator = torch.Generator().manual_seed(seed)
    sizes, num_experts = torch.tensor(rows_per_expert), len(rows_per_expert)
    M = int(sizes.sum())
    a = torch.randn(M, K, generator=generator).to(torch.float8_e4m3fn)
    b = torch.randn(num_experts, N, K, generator=generator).to(torch.float8_e4m3fn)
    sfa = torch.rand(K // 128, M, generator=generator) * 0.9 + 0.1
    sfb = torch.rand(num_experts, N // 128, K // 128, generator=generator) * 0.9 + 0.1
    experts = torch.arange(num_experts, dtype=torch.int32).repeat_interleave(sizes)
    d = torch.full((M, N), float("nan"), dtype=torch.bfloat16)

    def descriptor(t, block, dtype):
        return TensorDescriptor.from_tensor(t, block, gl.NVMMASharedLayout.get_default_for(block, dtype))

    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    args = (
        descriptor(a, [64, 128], gl.float8e4nv),
        descriptor(b.view(-1, K), [128, 128], gl.float8e4nv),
        descriptor(d, [64, 128], gl.bfloat16),
        TensorDescriptor.from_tensor(sfa.view(-1), [64], plain),
        *(sfa, sfb, experts, M // variant.tile_m, M),
    )
    options = dict(
        N=N,
        K=K,
        TILE_M=variant.tile_m,
        TILE_N=variant.tile_n,
        STAGES=variant.stages,
        GROUP_M=8,
        PINGPONG=variant.pingpong,
        SFA_TMA=variant.sfa_tma,
        LAG=variant.lag,
        num_warps=4,
    )
    launch(grouped_gemm_kernel, programs, args, options, policy=policy, seed=seed)
    reference = torch.empty(M, N)
    scaled = a.float() * sfa.t().repeat_interleave(128, 1)
    for e in range(num_experts):
        weights = b[e].float() * sfb[e].repeat_interleave(128, 0).repeat_interleave(128, 1)
        reference[experts == e] = scaled[experts == e] @ weights.t()
    return float((d.float() - reference).norm() / reference.norm())
