"""What a call of the mega-kernel needs besides the exchange's memory, and how it is set: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megamoe.errors import check_int, fail_value
from megamoe.kernels import flag_words
from megamoe.kernels.layout import ALIGN, align_up
from megamoe.plan import POOL_BYTES, MemoryPlan
from megamoe.types import Fp8Tensor

Weight = Fp8Tensor | torch.Tensor
"""Of a mega-kernel: codes in blocks of 128 x 128, or BF16, as the plan's precision says."""

MOST_HIDDEN, MOST_INTERMEDIATE = 16384, 18432
MOST_LOCAL_EXPERTS, MOST_TOP_K = 256, 16
"""Limits of the table of tiles (8 bits for an expert, and for a tile of columns) and of what was tested."""

HOPPER_SMS = 132
"""SMs at most, for what must hold on any such GPU."""

MOST_LAG = 32
"""Blocks; keeps pools small where I is."""

FUSED_ENTRIES = 16384
"""(token, slot) pairs of all ranks up to which one launch stages, counts and plans; every program counts all."""

ROUTE_PROGRAMS = 32
"""Programs that stage and plan in one launch, if there are no more tokens."""

REGION_ALIGN = 1024

POOL_REGIONS = ("rows", "act", "row_scales", "act_scales")


@dataclass(frozen=True)
class MegaSettings:
    """How a mega-kernel runs; see ``choose_settings``.

    Attributes:
        sms: its programs, which must all run at once: at most the SMs that nothing else holds.
        group: most blocks of rows of an expert that are computed together, and so share weights in L2.
        lag: blocks by which GEMM 2 trails GEMM 1.
        stages: of the ring.
        skew: stages that the second consumer stays behind the first, 1 to ``stages - 1``; BF16 only.
        early: turns in which each consumer pulls four rows before its first tile; 0: none.
        chunk: int32 words that a warp of others copies at a time when it pulls a row.
        consumer_registers, worker_registers: of each thread of those roles.
    """

    sms: int
    group: int
    lag: int
    stages: int = 4
    skew: int = 1
    early: int = 1
    chunk: int = 512
    consumer_registers: int = 232
    worker_registers: int = 40


def choose_settings(
    *, tokens: int, ranks: int, top_k: int, num_experts: int, intermediate_size: int, sms: int, fp8: bool = True
) -> MegaSettings:
    """Settings that measured best on H200 (H = 7168, I = 2048, top-8, 32 experts on a GPU).

    Weights are read from memory once if an expert's blocks are computed together, while L2 holds the rows of 8. GEMM 2
    trails by as many blocks as all SMs compute tiles of GEMM 1 of at once, so that nobody waits for it, and by more
    where an expert has some blocks, and in FP8 many.

    Args:
        tokens: T, at most of any rank. intermediate_size: I. sms: SMs of the device. fp8: or BF16.
    """
    rows = ranks * tokens * top_k / num_experts
    # In BF16 the skew of its grouped GEMM.
    skew = 1 if fp8 else 2
    if rows <= 64:
        return MegaSettings(sms=sms, group=8, lag=_lag(sms, intermediate_size), skew=skew, early=4)
    tiles = sms * 3 // 2 if rows <= 256 else sms * 2 if fp8 else sms
    return MegaSettings(sms=sms, group=8, lag=_lag(tiles, intermediate_size), skew=skew)


def _lag(tiles: int, intermediate_size: int) -> int:
    """Whole blocks, of so many tiles of GEMM 1."""
    return min(MOST_LAG, max(1, tiles // -(-intermediate_size // 128)))


def least_pool_blocks(settings: MegaSettings) -> int:
    """Blocks that a pool must have room for, if it has not for all: with fewer, programs may wait in a circle.

    A block's rows wait until GEMM 2 has read the block that had its slot before. Before the first tile of GEMM 1 of a
    group of blocks, the order of tiles has all of GEMM 2 of the groups that begin more than ``lag`` blocks before it:
    so those must be all that its rows wait for, whatever the number of programs. See ``docs/mega_kernel.md``.
    """
    return settings.lag + settings.group


@dataclass(frozen=True)
class ScratchRegion:
    """A tensor of a rank's own memory: name, dtype, shape and its distance in bytes from the start."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class MegaPlan:
    """The memory of a rank's own for mega-kernels of one layer; layers that run one after another share it.

    Attributes:
        memory: of the exchange; rows travel, and GEMMs run, in FP8 or BF16 as ``memory.fp8`` says.
        intermediate_size: I.
        num_rows: P, rows that there are tables for.
        pool_blocks: blocks of 128 rows that the pool has room for: block b lies in slot ``b % pool_blocks``.
        sms: programs at most.
        chunk: tokens of one source rank that are counted together.
        fused: one launch stages, counts and plans.
        regions: in ascending order of offsets.
        total: bytes.
    """

    memory: MemoryPlan
    intermediate_size: int
    num_rows: int
    pool_blocks: int
    sms: int
    chunk: int
    fused: bool
    regions: tuple[ScratchRegion, ...]
    total: int

    @property
    def up_tiles(self) -> int:
        """Tiles of GEMM 1 for each block of rows: 128 columns of gate and of up."""
        return self.intermediate_size // 128

    @property
    def down_tiles(self) -> int:
        """Tiles of GEMM 2 for each block of rows: 256 columns."""
        return -(-self.memory.hidden_size // 256)

    @property
    def pool_bytes(self) -> int:
        """Of rows, activations and their scales."""
        return sum(region.nbytes for region in self.regions if region.name in POOL_REGIONS)

    def fit(self, settings: MegaSettings) -> MegaSettings:
        """``settings`` with as much of their lag and group as the pool has room for."""
        if self.pool_blocks >= min(least_pool_blocks(settings), self.num_rows // ALIGN):
            return settings
        group = min(settings.group, max(self.pool_blocks // 2, 1))
        return replace(settings, group=group, lag=min(settings.lag, max(self.pool_blocks - group, 1)))

    def check_pool(self, settings: MegaSettings) -> None:
        """Programs that run as ``settings`` say never wait for each other in a circle.

        Raises:
            MegaMoEError: the pool is too small for the order of tiles.
        """
        least = least_pool_blocks(settings)
        if self.pool_blocks < min(least, self.num_rows // ALIGN):
            fail_value(
                "pool_bytes",
                self.pool_bytes,
                f"must hold lag + group = {least} blocks of 128 rows for settings.lag = {settings.lag} and "
                f"settings.group = {settings.group}, or programs could wait for each other for ever",
                f"Pass {self.pool_bytes // self.pool_blocks * least}, or lower settings.lag or settings.group.",
            )

    def explain(self) -> str:
        """A table of the regions."""
        memory, blocks = self.memory, self.num_rows // ALIGN
        width = max(len(str(list(region.shape))) for region in self.regions)
        lines = [
            f"Mega-kernel in {'FP8' if memory.fp8 else 'BF16'}: {memory.ep_size} ranks, up to {memory.max_tokens} "
            f"tokens each, top-{memory.top_k}, hidden size {memory.hidden_size}, intermediate size "
            f"{self.intermediate_size}",
            f"{self.num_rows:,} rows at most in {blocks:,} blocks, {self.pool_blocks:,} of them in the pool at a time",
        ]
        for region in self.regions:
            lines.append(f"{region.name:12}  {str(list(region.shape)):{width}}  {region.nbytes:>14,} bytes")
        for name, nbytes in (("pool", self.pool_bytes), ("total", self.total)):
            lines.append(f"{name:12}  {'':{width}}  {nbytes:>14,} bytes = {nbytes / 2**20:.1f} MiB on each rank")
        return "\n".join(lines)

    def views(self, scratch: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each region as a tensor: views of ``scratch``, uint8 ``[total]``."""
        out = {}
        for region in self.regions:
            out[region.name] = (
                scratch[region.offset : region.offset + region.nbytes].view(region.dtype).view(region.shape)
            )
        return out


def next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def plan_mega(
    memory: MemoryPlan, intermediate_size: int, sms: int, num_rows: int | None = None, pool_bytes: int = POOL_BYTES
) -> MegaPlan:
    """The scratch memory of a mega-kernel: every table and pool that it needs, nothing allocated.

    It grows with the tokens, ranks and slots, the pool up to ``pool_bytes``.

    Args:
        memory: of the exchange, planned for the precision of the GEMMs.
        intermediate_size: I.
        sms: programs at most.
        num_rows: P, rows that there are tables for, a multiple of 128; default: the most that any routing needs. Rows
            beyond are lost and reported, as in a dispatch.
        pool_bytes: of the pool at most. A pool that cannot hold all P rows at once takes them in turns; see
            ``MegaPlan.check_pool``.

    Raises:
        MegaMoEError: a size is not a multiple of 128 or beyond the kernel's limits, or the pool holds no block.
    """
    hidden, local = memory.hidden_size, memory.num_local_experts
    for name, size, most in (
        ("hidden_size", hidden, MOST_HIDDEN),
        ("intermediate_size", intermediate_size, MOST_INTERMEDIATE),
    ):
        if size < 1 or size % 128 or size > most:
            fail_value(name, size, f"must be a multiple of 128 up to {most}", "Pad the weights with zeros.")
    if local > MOST_LOCAL_EXPERTS:
        fail_value("num_local_experts", local, f"must be at most {MOST_LOCAL_EXPERTS}", "Use more ranks.")
    if memory.top_k > MOST_TOP_K:
        fail_value("top_k", memory.top_k, f"must be at most {MOST_TOP_K}", "Use separate kernels.")
    if memory.max_tokens >= 1 << flag_words.TOKEN_BITS:
        fail_value("tokens", memory.max_tokens, f"must be below 2^{flag_words.TOKEN_BITS}", "Lower it.")
    check_int("sms", sms, 1)
    if num_rows is None:
        num_rows = memory.most_rows
    check_int("num_rows", num_rows, ALIGN)
    if num_rows % ALIGN:
        fail_value("num_rows", num_rows, f"must be a multiple of {ALIGN}", f"Pass {align_up(num_rows)}.")
    check_int("pool_bytes", pool_bytes, 1)
    groups, act_groups = hidden // 128, intermediate_size // 128
    blocks = num_rows // ALIGN
    # Codes and scales, or BF16.
    block_bytes = ALIGN * (hidden + intermediate_size) * 2
    if memory.fp8:
        block_bytes = ALIGN * (hidden + intermediate_size + 4 * (groups + act_groups))
    pool_blocks = min(blocks, pool_bytes // block_bytes)
    if pool_blocks < 1:
        fail_value("pool_bytes", pool_bytes, f"must hold a block of 128 rows, {block_bytes} bytes", "Raise it.")
    pool_rows = pool_blocks * ALIGN
    if memory.fp8 and pool_rows * max(groups, act_groups) >= 2**31:
        fail_value(
            "pool_bytes", pool_bytes, f"holds {pool_rows} rows, whose scales must be fewer than 2^31", "Lower it."
        )
    ranks, pairs = memory.ep_size, memory.ep_size * memory.max_tokens * next_power_of_two(memory.top_k)
    # One chunk for each program, if there may be so many: each costs a look at all counts.
    fused = pairs <= FUSED_ENTRIES
    programs = sms if fused else 2 * sms
    chunk = 8
    while chunk < 128 and ranks * -(-memory.max_tokens // chunk) > programs:
        chunk *= 2
    chunks, bins = ranks * -(-memory.max_tokens // chunk), max(16, next_power_of_two(local))
    tiles = blocks * (act_groups + -(-hidden // 256))
    fp32, int32, int64 = torch.float32, torch.int32, torch.int64
    element = torch.float8_e4m3fn if memory.fp8 else torch.bfloat16
    sizes = [
        ("counts", int64, (local,)),
        ("starts", int64, (local,)),
        ("sizes", int32, (1 + ranks,)),
        ("pulled", int32, (blocks,)),
        ("finished", int32, (blocks,)),
        ("consumed", int32, (blocks,)),
        ("claimed", int32, (1,)),
        ("tiles", int32, (tiles, 2)),
        ("histograms", int32, (chunks, bins)),
        ("row_source", int32, (num_rows,)),
        ("row_target", int64, (num_rows,)),
        ("row_weights", fp32, (num_rows,)),
        ("rows", element, (pool_rows, hidden)),
        ("act", element, (pool_rows, intermediate_size)),
    ]
    if memory.fp8:
        sizes += [("row_scales", fp32, (groups, pool_rows)), ("act_scales", fp32, (act_groups, pool_rows))]
    regions, offset = [], 0
    for name, dtype, shape in sizes:
        regions.append(ScratchRegion(name, dtype, shape, offset))
        offset += align_up(regions[-1].nbytes, REGION_ALIGN)
    return MegaPlan(
        memory=memory,
        intermediate_size=intermediate_size,
        num_rows=num_rows,
        pool_blocks=pool_blocks,
        sms=sms,
        chunk=chunk,
        fused=fused,
        regions=tuple(regions),
        total=offset,
    )
