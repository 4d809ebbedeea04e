"""Triton kernel that plans a mega-kernel: rows of the experts, their sources and targets, and the order of tiles.

It takes the exchange's lists as ``triton_dispatch`` stages and counts them, and makes no copy of any row: rows are
ordered by (expert, source rank, token, slot) here too. All tables are local and written anew in every call, so a call
that was given up on cannot spoil the next.

Tables, for P rows, each expert's in blocks of 128:

- ``row_source`` int32 [P]: rank << TOKEN_BITS | token, -1 = padding; ``row_target`` int64 [P]: the slot of the result,
  from my first slot, in units of 16 bytes, NO_TARGET = padding; ``row_weights`` fp32 [P].
- ``pulled``, ``finished``, ``consumed`` int32 [P / 128]: the mega-kernel's counters, zeros. Each block has its own,
  also where blocks share a slot of the pool: so no use of a slot can be taken for another.
- ``tiles`` int32 pairs: expert | column tile << 8 | rows << 16 | whether of GEMM 2 << 24, and the block. ``claimed``
  int32 [1]: how many of them programs of the mega-kernel have taken; each begins with that of its number.

Order of tiles: blocks of an expert are a group, since they share weights, or several of nearly equal length if they are
more than ``group``. GEMM 1 of the group that begins with block f comes before GEMM 2 of those that begin with block f -
``lag`` or later, and after that of all others. Within a group the block runs fastest: programs take tiles when they
come to them, so those that share weights are computed at the same time, and weights come from memory once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.kernels.triton_dispatch import (
    ALIGN,
    COUNTED_HERE,
    assign_rows,
    count_all,
    lay_out,
    stage_and_meet,
    sum_histograms,
    write_layout,
)
from megamoe.kernels.triton_flags import COMBINES, COMBINES_SEEN, DISPATCHES, begin, count_of, epochs_ended

NO_TARGET = tl.constexpr(-(1 << 62))


@triton.jit
def _blocks(block, total, capacity, BINS: tl.constexpr):
    """(expert, rows) of blocks."""
    starts, fit, _ = lay_out(total, capacity)
    ends = starts + (fit + (ALIGN - 1)) // ALIGN * ALIGN
    expert = tl.minimum(tl.sum((ends[None, :] <= (block * ALIGN)[:, None]).to(tl.int32), 1), BINS - 1)
    rows = tl.gather(fit, expert, 0) - (block * ALIGN - tl.gather(starts, expert, 0))
    return expert, tl.minimum(tl.maximum(rows, 0), ALIGN)


@triton.jit
def _write_blocks(
    total, num_blocks, capacity, row_source, row_target, pulled, finished, consumed, BINS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Zeroed counters, and marks on padding rows."""
    for first in range(tl.program_id(0) * BLOCKS, num_blocks, tl.num_programs(0) * BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        inside = block < num_blocks
        expert, rows = _blocks(block, total, capacity, BINS)
        tl.store(pulled + block, tl.zeros([BLOCKS], tl.int32), mask=inside)
        tl.store(finished + block, tl.zeros([BLOCKS], tl.int32), mask=inside)
        tl.store(consumed + block, tl.zeros([BLOCKS], tl.int32), mask=inside)
        offset = tl.arange(0, ALIGN)
        row = (block * ALIGN)[:, None] + offset[None, :]
        padding = inside[:, None] & (offset[None, :] >= rows[:, None])
        tl.store(row_source + row, tl.full([BLOCKS, ALIGN], -1, tl.int32), mask=padding)
        tl.store(row_target + row, tl.full([BLOCKS, ALIGN], NO_TARGET, tl.int64), mask=padding)


@triton.jit
def _first_group(block, first, blocks, share, num_blocks):
    """The first block of a group that is not before ``block``, or the end of all; of each expert the first block, the
    number of blocks and that of a group."""
    turns = tl.maximum((block[:, None] - first[None, :] + share[None, :] - 1) // share[None, :], 0) * share[None, :]
    return tl.min(tl.where(turns < blocks[None, :], first[None, :] + turns, num_blocks), 1)


@triton.jit
def _write_tiles(
    total, num_blocks, capacity, tiles, group, lag, UPS: tl.constexpr, DOWNS: tl.constexpr,
    BINS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The order of tiles: UPS of GEMM 1 and DOWNS of GEMM 2 for each block."""
    starts, fit, _ = lay_out(total, capacity)
    first_block, blocks = starts // ALIGN, (fit + (ALIGN - 1)) // ALIGN
    groups = tl.maximum((blocks + group - 1) // group, 1)
    share = tl.maximum((blocks + groups - 1) // groups, 1)
    downs = num_blocks * UPS
    num_tiles = num_blocks * (UPS + DOWNS)
    for start in range(tl.program_id(0) * TILES, num_tiles, tl.num_programs(0) * TILES):
        tile = start + tl.arange(0, TILES)
        second = (tile >= downs).to(tl.int32)
        tile_of_gemm = tile - second * downs
        columns = tl.where(second == 0, UPS, DOWNS)
        block = tile_of_gemm // columns
        n = tile_of_gemm - block * columns
        expert, rows = _blocks(block, total, capacity, BINS)
        start_here, share_here = tl.gather(first_block, expert, 0), tl.gather(share, expert, 0)
        first = start_here + (block - start_here) // share_here * share_here
        end = tl.minimum(first + share_here, start_here + tl.gather(blocks, expert, 0))
        # The block up to which the other GEMM's tiles come before.
        other = _first_group(
            tl.where(second == 0, first - lag, first + lag + 1), first_block, blocks, share, num_blocks
        )
        place = first * columns + other * (UPS + DOWNS - columns) + n * (end - first) + block - first
        mask = tile < num_tiles
        tl.store(tiles + 2 * place, expert | (n << 8) | (rows << 16) | (second << 24), mask=mask)
        tl.store(tiles + 2 * place + 1, block, mask=mask)


@triton.jit(
    do_not_specialize=[
        "n", "my_rank", "budget_ns", "num_experts", "max_tokens", "capacity", "programs", "group", "lag"
    ]
)  # fmt: skip
def route_kernel(
    x, x_stride, index, weights, n, flags, deltas, list_index, list_weights, rows, scales, state, error, budget_ns,
    my_rank, num_experts, max_tokens, min_amax, histograms, capacity, counts, starts, sizes, row_source, row_target,
    row_weights, pulled, finished, consumed, claimed, tiles, programs, group, lag, R: tl.constexpr, LANES: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, LOCAL: tl.constexpr, BINS: tl.constexpr, H: tl.constexpr, FP8: tl.constexpr,
    LARGEST: tl.constexpr, STAGE: tl.constexpr, ROWS: tl.constexpr, TABLE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, SUB: tl.constexpr, GROUPS: tl.constexpr, UPS: tl.constexpr, DOWNS: tl.constexpr,
    BLOCKS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """All tables of a call, for a mega-kernel of ``programs`` programs.

    STAGE: lists, and with ROWS tokens (FP8 or BF16), are staged here too, for few tokens; all programs must then run at
    once. Otherwise ``stage_kernel`` and ``count_kernel`` have run. Everyone's slots may be written afterwards: a rank
    that is READY has ended the combine before.
    """
    pid, num_programs = tl.program_id(0), tl.num_programs(0)
    everyone = begin(deltas, R, LANES)
    if STAGE:
        memory = (flags, deltas, list_index, list_weights, rows, scales)
        stage_and_meet(
            x, x_stride, index, weights, n, memory, everyone, state, error, budget_ns, my_rank, num_experts, max_tokens,
            epochs_ended(state + DISPATCHES) + 1, min_amax, R, LANES, K, H, FP8, LARGEST, ROWS, True, GROUPS,
        )  # fmt: skip

    per_rank = tl.cdiv(max_tokens, CHUNK)
    num_chunks = R * per_rank
    total = tl.zeros([BINS], tl.int32)
    # At least one turn: every program needs the totals.
    for turn in range(pid, tl.maximum(num_chunks, pid + 1), num_programs):
        source = turn % R
        first = turn // R * CHUNK
        end = tl.minimum(first + CHUNK, count_of(flags, source, max_tokens))
        if TABLE == COUNTED_HERE:
            total, before = count_all(
                flags, list_index, source, first, my_rank, max_tokens, R, K, KP, LOCAL, BINS, BLOCK
            )
        else:
            total, before = sum_histograms(histograms, num_chunks, source * per_rank + turn // R, BINS, 64)
        first_row, _, _ = lay_out(total, capacity)
        assign_rows(
            list_index, list_weights, row_source, row_weights, first_row + before, source, first, end, capacity,
            my_rank, max_tokens, row_source, row_target, tl.load(deltas + source), K, KP, LOCAL, BINS, SUB, H // 8,
        )  # fmt: skip
    if pid == 0:
        write_layout(total, capacity, counts, starts, sizes, flags, max_tokens, error, R, LANES, LOCAL, BINS)
        tl.store(state + COMBINES_SEEN, epochs_ended(state + COMBINES))
        tl.store(claimed, programs)
    _, _, needed = lay_out(total, capacity)
    num_blocks = tl.minimum(needed, capacity) // ALIGN
    _write_blocks(total, num_blocks, capacity, row_source, row_target, pulled, finished, consumed, BINS, BLOCKS)
    _write_tiles(total, num_blocks, capacity, tiles, group, lag, UPS, DOWNS, BINS, TILES)
