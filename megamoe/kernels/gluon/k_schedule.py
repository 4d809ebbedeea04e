"""Which tile of which expert's weight gradient a block computes next. Device code, run by the loader warp.

All experts have the same number of tiles, but not of rows to sum over. Those with the most rows come first: what some
blocks have to do longer than others is then a short tile. Where the last tiles would keep at most half of the blocks
busy, two blocks can share each. Ends come from device memory and are bounded here, so no row outside the matrix is ever
named, whatever they hold.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.gluon import pieces, schedule

EXPERTS_AT_ONCE = gl.constexpr(128)
"""Whose rows are looked at together, four in each lane of the loader warp."""


@gluon.jit
def expert_rows(expert, index, num_rows, num_experts):
    """(first row, number of rows) of each expert: from the end of the one before, aligned, to its own end."""
    before = gl.load(index + expert - 1, mask=(expert > 0) & (expert < num_experts), other=0)
    before = gl.minimum(gl.maximum(before, 0), num_rows)
    start = (before + schedule.GROUP_ALIGN - 1) // schedule.GROUP_ALIGN * schedule.GROUP_ALIGN
    end = gl.minimum(gl.load(index + expert, mask=expert < num_experts, other=0), num_rows)
    return start, gl.maximum(end - start, 0)


@gluon.jit
def next_expert(expert, steps, index, num_rows, num_experts, BLOCK_K: gl.constexpr):
    """(expert, its steps of BLOCK_K rows) after another in the order of fewer steps, then of ids; -1 steps: none."""
    best = gl.program_id(0) * 0 - 1
    best_expert = best
    for first in range(0, num_experts, EXPERTS_AT_ONCE):
        ids = first + pieces.lanes(EXPERTS_AT_ONCE)
        start, rows = expert_rows(ids, index, num_rows, num_experts)
        own = (rows + BLOCK_K - 1) // BLOCK_K
        later = (own < steps) | ((own == steps) & (ids > expert))
        own = gl.where(later & (ids < num_experts), own, -1)
        most = gl.max(own, 0)
        if most > best:
            best = most
            best_expert = gl.min(gl.where(own == most, ids, num_experts), 0)
    return best_expert, best


@gluon.jit
def first_shared(walk, LEAST: gl.constexpr):
    """Number of the first tile that two programs share: after the last full round of all programs, if half of them
    would have none; else the number of tiles.
    """
    index, num_rows, num_experts, tiles = walk
    experts = num_experts
    if LEAST > 0:
        experts = num_experts * 0
        for first in range(0, num_experts, EXPERTS_AT_ONCE):
            start, rows = expert_rows(first + pieces.lanes(EXPERTS_AT_ONCE), index, num_rows, num_experts)
            experts += gl.sum((rows > 0).to(gl.int32), 0)
    total = experts * tiles
    rest = total % gl.num_programs(0)
    return total - gl.where(2 * rest <= gl.num_programs(0), rest, 0)


@gluon.jit
def shared_tile(turn, first):
    """(number of a program's tile, which consumers pause: bit C for consumer C).

    Args:
        turn: counts the programs and their tiles. first: ``first_shared``.
    """
    past = gl.maximum(turn - first, 0)
    return gl.where(turn < first, turn, first + past // 2), gl.where(turn < first, 0, 2 - past % 2)


@gluon.jit
def turns_of(tiles, first):
    """How many turns there are for so many tiles: two for each that is shared."""
    return tiles + gl.maximum(tiles - first, 0)


@gluon.jit
def first_tile(walk, tile, BLOCK_K: gl.constexpr, LEAST: gl.constexpr):
    """Where the ``tile``-th tile of all is: (its number among its expert's, expert, the expert's steps).

    Fewer than LEAST steps if there is none. ``walk``: (index, rows of the matrix, experts, tiles of each).
    """
    index, num_rows, num_experts, tiles = walk
    expert, steps = next_expert(-1, 0x7FFFFFFF, index, num_rows, num_experts, BLOCK_K)
    return seek(tile, expert, steps, walk, BLOCK_K, LEAST)


@gluon.jit
def seek(tile, expert, steps, walk, BLOCK_K: gl.constexpr, LEAST: gl.constexpr):
    """Walks on to the expert of ``tile``, a number counted from this expert's first tile."""
    index, num_rows, num_experts, tiles = walk
    while (steps >= LEAST) & (tile >= tiles):
        tile -= tiles
        expert, steps = next_expert(expert, steps, index, num_rows, num_experts, BLOCK_K)
    return tile, expert, steps
