"""Choice of tiles for the grouped GEMMs: a pure function of the problem, by a model of what a tile costs.

Nothing here needs a GPU. Cycles are those of an SM; rates are those of an H200 under load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARED_MEMORY = 227 * 1024
"""Bytes that a block can have on Hopper."""

RESERVED = 1024
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
        halved: 64 of the rows are a tile, which one consumer computes: more tiles for few rows (FP8 activations).
    """

    block_m: int
    block_n: int
    stages: int
    group_m: int = 8
    together: int = 1
    k_blocks: int = 1
    swap: bool = False
    skew: int = 0
    halved: bool = False

    @property
    def rows(self) -> int:
        """Rows of A that a tile computes."""
        return self.block_m // 2 if self.halved else self.block_m

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
        out_bytes: of an element of the result.
        blocks: blocks of 128 rows of all groups together, if they are known.
    """

    rows: int
    groups: int
    n: int
    k: int
    kind: str
    sms: int
    wide_only: bool = False
    out_bytes: int = 2
    blocks: int | None = None

    def row_tiles(self, rows: int) -> int:
        """Tiles of so many rows, over all groups."""
        return self.groups * _ceil(max(self.rows, 1), rows) if self.blocks is None else self.blocks * (128 // rows)


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


def _skinny_stages(block_m: int, block_n: int, k_blocks: int, swap: bool, out_bytes: int) -> int:
    # With swap the results change their order through shared memory.
    scratch = 2 * 64 * block_m * out_bytes if swap else 0
    return min((SHARED_MEMORY - RESERVED - scratch) // stage_bytes(block_m, block_n, k_blocks), 12)


def _group_m(problem: Problem, block_m: int, size: int = 1) -> int:
    """Row blocks per band: measured best widths. One block per group: stay inside a group; many: wide bands, as far as
    L2 holds the rows beside the columns. ``size``: bytes of an element."""
    blocks = _ceil(problem.rows, block_m)
    if blocks >= 32 and problem.k * size <= 4096:
        return 32
    return 1 if blocks <= 1 else 4 if blocks < 6 else 8 if blocks < 16 else 16


def legal_tiles(problem: Problem, dtype: str = "fp8") -> list[Tile]:
    """Every tile that computes the problem rightly, best guess of the other fields included."""
    num_k = _ceil(problem.k, 128)
    size = 2 if dtype == "bf16" else 1
    wide = Tile(128, 256, 4, _group_m(problem, 128, size), skew=2 if dtype == "bf16" else 0)
    tiles = [wide]
    if problem.rows <= 256 and num_k >= 2:
        # Beside two stages at a time: across experts, which pays only when each row of weights is long.
        tiles += dict.fromkeys((replace(wide, together=2), replace(wide, together=2, group_m=8)))
    if dtype == "bf16":
        return tiles
    if problem.wide_only:
        if problem.rows <= 256:
            tiles.append(replace(wide, group_m=_group_m(problem, 64), halved=True))
        return tiles
    tiles += [replace(tile, block_n=192) for tile in tiles]
    for block_m, block_n, swap in SKINNY:
        # Rows of a contiguous block share an expert that is read from its first row.
        if problem.kind == "contiguous" and block_m != 128:
            continue
        for k_blocks in (4, 2, 1):
            stages = _skinny_stages(block_m, block_n, k_blocks, swap, problem.out_bytes)
            if num_k % k_blocks or stages < 2 or (k_blocks > 2 and block_n >= 128 and block_m >= 64):
                continue
            if k_blocks > 1 and (block_m, block_n) == (64, 256):
                continue
            for together in (1, 2):
                if together * 2 <= stages:
                    tiles.append(Tile(block_m, block_n, stages, _group_m(problem, block_m), together, k_blocks, swap))
    return tiles


def is_legal(tile: Tile, problem: Problem, dtype: str = "fp8") -> bool:
    """Whether a kernel can run the tile: one of ``legal_tiles``, or one with fewer stages or another order."""
    stages = {
        (legal.block_m, legal.block_n, legal.k_blocks, legal.swap, legal.halved): legal.stages
        for legal in legal_tiles(problem, dtype)
    }
    most = stages.get((tile.block_m, tile.block_n, tile.k_blocks, tile.swap, tile.halved), 0)
    order = tile.group_m >= 1 and tile.together in (1, 2) and 0 <= tile.skew < tile.stages
    return 2 <= tile.stages <= most and order


CLOCK = 1.6e3
"""Cycles per microsecond under load."""

FIXED = 3.0
"""Microseconds from launch to the first request, and to leave."""

DRAM_RATE = 2600.0
"""Bytes per cycle from device memory, all SMs together."""

DRAM_RATE_OF_SM = 22.0
"""Bytes per cycle from device memory that one SM takes at most."""

SM_RATE = 85.0
"""Bytes per cycle from L2 that one SM takes at most."""

LATENCY = 1800.0
"""Cycles from a request to its data; with the ring's bytes it limits what one SM takes."""

LONG_K = 32
"""Blocks of 128 along K from which requesting two stages at a time pays."""

WIDE_CYCLES = 1122.0
"""Cycles per block of 128 along K of the 128 x 256 tile, tensor cores kept busy (measured)."""

HALVED = 0.72
"""Cycles of a tile that one consumer computes, relative to a whole one (measured)."""

SHARED_WEIGHTS = 0.15
"""Additional cost of weights that several blocks read at the same time, per further block."""


REPEATED_ROWS = 0.06
"""Cost of bytes of A that come from L2, relative to those from device memory."""


def _compute_cycles(tile: Tile) -> float:
    """Cycles per block of 128 along K when everything is in shared memory."""
    if tile.is_wide:
        return WIDE_CYCLES * (0.8 if tile.block_n == 192 else HALVED if tile.halved else 1.0)
    operand, columns = (tile.block_n, tile.block_m) if tile.swap else (tile.block_m, tile.block_n)
    warpgroups = max(operand // 64, 1)
    per_consumer = columns if operand == 128 else columns / 2
    # Products of both consumers, then scaling and the latency of a stage.
    return 2.0 * columns * warpgroups + 1.5 * per_consumer + 260.0 / tile.k_blocks


def cost(tile: Tile, problem: Problem) -> float:
    """Modelled microseconds, bound by arithmetic and L2 of the busiest SM, or by device memory."""
    num_k = _ceil(problem.k, 128)
    blocks = _ceil(max(problem.rows, 1), tile.rows)
    tiles = problem.row_tiles(tile.rows) * _ceil(problem.n, tile.block_n)
    sharing = 1 + SHARED_WEIGHTS * (min(blocks, 4) - 1) if problem.rows <= 128 else 1.0
    # Wide tiles are stored while the next one runs, the others are not.
    store = 12.0 * tile.block_m * tile.block_n / 256
    in_flight = (tile.stages - 1) * (tile.block_m + tile.block_n) * 128 * tile.k_blocks
    block_bytes = (tile.block_m + tile.block_n) * 128
    per_block = max(_compute_cycles(tile), block_bytes / min(SM_RATE, in_flight / LATENCY))
    busiest = _ceil(tiles, problem.sms) * (
        num_k * per_block * sharing**0.5 + (200 if tile.is_wide else 400 + store / 2)
    )

    # Weights come from device memory once; longer runs of each of their rows suit it.
    run = tile.k_blocks * (tile.together if num_k >= LONG_K else 1)
    request = {1: 1.12, 2: 1.04}.get(run, 1.0) * (1.02 if tile.together == 2 and num_k < LONG_K else 1.0)
    rate = min(DRAM_RATE, DRAM_RATE_OF_SM * min(tiles, problem.sms))
    weights = problem.groups * problem.n * 128 * num_k * request * sharing
    # Each tile reads its rows of A again, from L2.
    again = REPEATED_ROWS * tiles * tile.block_m * 128 * num_k
    memory = (weights + again) / rate
    # Neither bound hides the other fully when they are close.
    both = (busiest**3 + memory**3) ** (1 / 3)
    return (both + LATENCY + store) / CLOCK + FIXED


def choose_tile(problem: Problem, dtype: str = "fp8") -> Tile:
    """The legal tile of the least modelled cost; ties go to the first."""
    return min(legal_tiles(problem, dtype), key=lambda tile: cost(tile, problem))


# ---------------------------------------------------------------- K-grouped


K_FORMS = ("bf16", "fp8", "fp8-blocks")
"""Operands of the K-grouped kernels; "fp8-blocks": B has one scale per 128 x 128 codes, not per column and 128 rows."""


def k_form(columns: int, scale_columns: int | None) -> str:
    """Which of ``K_FORMS`` a B of so many columns and columns of scales belongs to; None for BF16."""
    if scale_columns is None:
        return "bf16"
    return "fp8" if scale_columns == columns else "fp8-blocks"


def k_step_rows(stages: int, form: str) -> int:
    """Rows that a stage of the K-grouped kernels holds: 128 bytes of each column, or half of that with many stages."""
    return 128 if form != "bf16" else 64 if stages <= 4 else 32


def k_stage_bytes(stages: int, form: str) -> int:
    """Shared memory of a stage of the K-grouped kernels: 128 + 256 columns of operands, and scales per column."""
    if form == "bf16":
        return 384 * 2 * k_step_rows(stages, form)
    return 384 * 128 + 4 * {"fp8": 384, "fp8-blocks": 128}[form]


def store_columns(stages: int, form: str, out_bytes: int) -> int:
    """Columns of a K-grouped result that are stored at a time; 0 if the stages leave no room for buffers of 64 rows.

    FP8: two buffers for each consumer, at most half of what is stored at once, so that the two take turns. BF16: one
    buffer with a tile's columns, else two, for the consumer that stores.
    """
    room = SHARED_MEMORY - RESERVED - stages * k_stage_bytes(stages, form)
    columns = 256 if form == "bf16" else 64
    while columns and (4 if form != "bf16" else 1 if columns == 256 else 2) * 64 * columns * out_bytes > room:
        columns //= 2
    return columns if columns * out_bytes >= 64 else 0


def legal_k_tiles(form: str) -> list[Tile]:
    """Tiles of the K-grouped kernel for one of ``K_FORMS``, the preferred one first."""
    if form == "bf16":
        tiles = [Tile(128, 256, stages, 16, skew=skew) for stages, skew in ((8, 4), (4, 2), (4, 0), (3, 1))]
    else:
        # FP8 results are stored beside products: with a stage less they leave the registers at once.
        tiles = [Tile(128, 256, 3), Tile(128, 256, 4)]
        # With scales of blocks the products are too fast for three stages.
        tiles = tiles[::-1] if form == "fp8-blocks" else tiles
    return tiles + [replace(tiles[0], group_m=group_m) for group_m in (4, 8, 16) if group_m != tiles[0].group_m]


def is_legal_k(tile: Tile, form: str, out_bytes: int) -> bool:
    """Whether a K-grouped kernel can run the tile: one of ``legal_k_tiles``, or with fewer stages or another order."""
    shape = (tile.block_m, tile.block_n, tile.together, tile.k_blocks, tile.swap) == (128, 256, 1, 1, False)
    order = tile.group_m >= 1 and 0 <= tile.skew < tile.stages and (form == "bf16" or not tile.skew)
    order &= not tile.halved
    return shape and order and tile.stages >= 2 and store_columns(tile.stages, form, out_bytes) > 0
