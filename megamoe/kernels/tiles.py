"""Choice of tiles for the grouped GEMMs: a pure function of the problem, by a model of what a tile costs.

Nothing here needs a GPU. Cycles are those of an SM; rates are those of an H200 under load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARED_MEMORY = 227 * 1024
"""Bytes that a block can have on Hopper."""

RESERVED = 1536
"""Bytes kept free for barriers and what the compiler passes to the warps."""


@dataclass(frozen=True, order=True)
class Tile:
    """How a kernel divides its work.

    Attributes:
        block_m: rows of A in a tile.
        block_n: rows of B in a tile (columns of the result; gate and up columns together with an activation).
        stages: of the ring in shared memory.
        group_m: row blocks that are walked before the next column block, for reuse in L2.
        together: stages requested at a time.
        k_blocks: blocks of 128 along K in a stage.
        swap: the weights are the tensor cores' 64-row operand.
        skew: stages by which the second consumer trails (BF16).
    """

    block_m: int
    block_n: int
    stages: int
    group_m: int = 8
    together: int = 1
    k_blocks: int = 1
    swap: bool = False
    skew: int = 0

    @property
    def is_wide(self) -> bool:
        """Whether the kernel with two waves of columns runs it, not the one for few rows."""
        return self.block_m == 128 and self.block_n in (256, 192)


@dataclass(frozen=True)
class Problem:
    """Sizes that decide on the tile.

    Attributes:
        rows: usual rows per group.
        groups: experts.
        n, k: columns of the result (of B) and length of the sums.
        kind: "dense", "contiguous", "psum" or "masked".
        sms: streaming multiprocessors to use.
        wide_only: an activation is fused, which the other kernels lack.
    """

    rows: int
    groups: int
    n: int
    k: int
    kind: str
    sms: int
    wide_only: bool = False


def _ceil(x: int, y: int) -> int:
    return -(-x // y)


SKINNY = tuple(
    (m, n, swap)
    for m, n, swap in (
        (16, 128, True),
        (32, 128, True),
        (64, 128, True),
        (64, 256, False),
        (16, 64, True),
        (32, 64, True),
        (64, 64, True),
        (128, 64, True),
        (64, 32, False),
        (128, 32, False),
        (64, 16, False),
        (128, 16, False),
        (128, 128, False),
    )
)
"""(block_m, block_n, swap) of the tiles for few rows."""


def stage_bytes(block_m: int, block_n: int, k_blocks: int) -> int:
    """Shared memory of a stage of FP8 operands with its scales and barriers."""
    return k_blocks * ((block_m + block_n) * 128 + max(block_m, 32) * 4) + 64


def _skinny_stages(block_m: int, block_n: int, k_blocks: int, swap: bool) -> int:
    # With swap the results change their order through shared memory, as fp32 at most.
    scratch = 2 * 64 * block_m * 4 if swap else 0
    return min((SHARED_MEMORY - RESERVED - scratch) // stage_bytes(block_m, block_n, k_blocks), 12)


def _group_m(problem: Problem, block_m: int) -> int:
    """Row blocks per band: measured best widths. One block per group: stay inside a group; many: wide bands."""
    blocks = _ceil(problem.rows, block_m)
    return 1 if blocks <= 1 else 8 if blocks < 16 else 16 if blocks < 32 else 32


def legal_tiles(problem: Problem, dtype: str = "fp8") -> list[Tile]:
    """Every tile that computes the problem rightly, best guess of the other fields included."""
    num_k = _ceil(problem.k, 128)
    wide = Tile(128, 256, 4, _group_m(problem, 128), skew=2 if dtype == "bf16" else 0)
    tiles = [wide]
    if problem.rows <= 256 and num_k >= 2:
        tiles.append(replace(wide, together=2))
        tiles += [replace(wide, group_m=8, together=together) for together in (1, 2) if wide.group_m != 8]
    if dtype == "bf16":
        return tiles
    if problem.wide_only:
        return tiles
    tiles += [replace(tile, block_n=192) for tile in tiles]
    for block_m, block_n, swap in SKINNY:
        # Rows of a contiguous block share an expert that is read from its first row.
        if problem.kind == "contiguous" and block_m != 128:
            continue
        for k_blocks in (4, 2, 1):
            stages = _skinny_stages(block_m, block_n, k_blocks, swap)
            if num_k % k_blocks or stages < 2 or (k_blocks > 2 and block_n >= 128 and block_m >= 64):
                continue
            if k_blocks > 1 and (block_m, block_n) == (64, 256):
                continue
            for together in (1, 2):
                if together * 2 <= stages:
                    tiles.append(Tile(block_m, block_n, stages, _group_m(problem, block_m), together, k_blocks, swap))
    return tiles


CLOCK = 1.6e3
"""Cycles per microsecond under load."""

DRAM_RATE = 2600.0
"""Bytes per cycle from device memory, all SMs together."""

SM_RATE = 44.0
"""Bytes per cycle that one SM takes from L2 or device memory."""

WIDE_CYCLES = 1122.0
"""Cycles per block of 128 along K of the 128 x 256 tile, tensor cores kept busy (measured)."""

TILE_CYCLES = 1500.0
"""Cycles to start and end a tile that nothing hides."""


def _compute_cycles(tile: Tile) -> float:
    """Cycles per block of 128 along K when everything is in shared memory."""
    if tile.is_wide:
        return WIDE_CYCLES * (tile.block_n / 256)
    operand, columns = (tile.block_n, tile.block_m) if tile.swap else (tile.block_m, tile.block_n)
    warpgroups = max(operand // 64, 1)
    per_consumer = columns if operand == 128 else columns / 2
    # Products of both consumers, then scaling and the latency of a stage.
    return 2.0 * columns * warpgroups + 1.5 * per_consumer + 260.0 / tile.k_blocks


def cost(tile: Tile, problem: Problem) -> float:
    """Modelled microseconds: full waves of tiles and a last partial one, each bound by arithmetic or by memory."""
    num_k = _ceil(problem.k, 128)
    blocks = _ceil(max(problem.rows, 1), tile.block_m)
    columns = _ceil(problem.n, tile.block_n)
    tiles = problem.groups * blocks * columns
    tile_bytes = (tile.block_m + tile.block_n) * 128 * num_k
    # Weights come from device memory once, rows of A from L2 after the first reader.
    fresh_bytes = tile.block_n * 128 * num_k / blocks
    request = {1: 1.12, 2: 1.04}.get(tile.together * tile.k_blocks, 1.0)

    def wave(active: int) -> float:
        bound_by_sm = max(num_k * _compute_cycles(tile), tile_bytes / SM_RATE)
        return max(bound_by_sm, active * fresh_bytes * request / DRAM_RATE) + TILE_CYCLES

    full, rest = divmod(tiles, problem.sms)
    cycles = full * wave(problem.sms) + (wave(rest) if rest else 0.0)
    return cycles / CLOCK + 2.0


def choose_tile(problem: Problem, dtype: str = "fp8") -> Tile:
    """The legal tile of the least modelled cost; ties go to the first."""
    return min(legal_tiles(problem, dtype), key=lambda tile: cost(tile, problem))
