"""Which tile a block computes next: the walk over row groups, for all row layouts. Device code, run by the loader warp.

A group is a run of rows that tiles must not cross: an expert of the psum or masked layout, or all rows of the
contiguous and dense ones. Counts, ends and ids come from device memory and are bounded here, so no row outside the
matrix is ever named, whatever they hold.

A program's first tile is the one of its own number. It takes the others from a counter, each shortly before it has
loaded the one before: so tiles that share operands run at the same time, whatever programs have had to do, L2 has what
they share, and all end together. Without a counter tiles follow at fixed distances.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.gluon import flags

DENSE = gl.constexpr(0)
CONTIGUOUS = gl.constexpr(1)
PSUM = gl.constexpr(2)
MASKED = gl.constexpr(3)

GROUP_ALIGN = gl.constexpr(128)
"""Rows to which each group's start is aligned in the psum layout (``layout.ALIGN``)."""


@gluon.jit
def tile_in_group(tile, num_m, num_n, GROUP_M: gl.constexpr):
    """(row block, column block) of a group's tile; bands of GROUP_M row blocks, the row block runs fastest, for L2."""
    per_band = GROUP_M * num_n
    band = tile // per_band
    first = band * GROUP_M
    rows = gl.maximum(gl.minimum(num_m - first, GROUP_M), 1)
    within = tile - band * per_band
    return first + within % rows, within // rows


@gluon.jit
def group_rows(group, previous_end, index, num_rows, num_groups, LAYOUT: gl.constexpr):
    """(first row, end row) of a group; ``num_rows`` is that of the matrix, of one expert if masked."""
    if LAYOUT == PSUM:
        start = gl.minimum((previous_end + GROUP_ALIGN - 1) // GROUP_ALIGN * GROUP_ALIGN, num_rows)
        end = gl.load(index + gl.minimum(group, num_groups - 1))
        end = gl.maximum(gl.minimum(end, num_rows), start)
    elif LAYOUT == MASKED:
        start = gl.minimum(group, num_groups - 1) * num_rows
        end = start + gl.maximum(gl.minimum(gl.load(index + gl.minimum(group, num_groups - 1)), num_rows), 0)
    else:
        start = group * 0
        end = start + num_rows
    return start, end


@gluon.jit
def problem(index, num_rows, num_experts, num_n, LAYOUT: gl.constexpr):
    """What the walk needs to know: (index, rows, groups, experts, column blocks)."""
    num_groups = 1
    if LAYOUT == PSUM or LAYOUT == MASKED:
        num_groups = num_experts
    return index, num_rows, num_groups, num_experts, num_n


@gluon.jit
def first_group(walk, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr):
    """The walk's state: (group, number of its first tile, its row blocks, first row, end row)."""
    index, num_rows, num_groups, num_experts, num_n = walk
    group = gl.program_id(0) * 0
    start, end = group_rows(group, group, index, num_rows, num_groups, LAYOUT)
    return group, group, (end - start + BLOCK_M - 1) // BLOCK_M, start, end


@gluon.jit
def seek(tile, state, walk, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr):
    """Walks on to the group that holds ``tile``; group == num_groups if there is none."""
    index, num_rows, num_groups, num_experts, num_n = walk
    group, first, blocks, start, end = state
    while (group < num_groups) & (tile >= first + blocks * num_n):
        first += blocks * num_n
        group += 1
        start, end = group_rows(group, end, index, num_rows, num_groups, LAYOUT)
        blocks = (end - start + BLOCK_M - 1) // BLOCK_M
    return group, first, blocks, start, end


@gluon.jit
def tile_rows(tile, state, walk, BLOCK_M: gl.constexpr, GROUP_M: gl.constexpr, LAYOUT: gl.constexpr):
    """(first row, rows of the tile, expert, column block); the expert is -1 where the tile is to be left out."""
    index, num_rows, num_groups, num_experts, num_n = walk
    group, first, blocks, start, end = state
    m_block, n_block = tile_in_group(tile - first, blocks, num_n, GROUP_M)
    # Every second band goes back over the columns, whose last ones are still in L2.
    n_block = gl.where(m_block // GROUP_M % 2 == 1, num_n - 1 - n_block, n_block)
    row = start + m_block * BLOCK_M
    valid = gl.minimum(end - row, BLOCK_M)
    expert = group
    if LAYOUT == CONTIGUOUS:
        # One expert per aligned block of rows; its padding rows (-1) come last.
        expert = gl.load(index + gl.minimum(row // GROUP_ALIGN * GROUP_ALIGN, num_rows - 1))
        expert = gl.where(expert < num_experts, expert, -1)
    return row, valid, expert, n_block


@gluon.jit
def next_tile(tile, counter, counted):
    """The number of this program's tile after ``tile``; ``counted``: whether there is a counter."""
    if counted != 0:
        tile = gl.num_programs(0) + flags.take(counter)
    else:
        tile += gl.num_programs(0)
    return tile


@gluon.jit
def find(tile, state, walk, counter, counted, BLOCK_M: gl.constexpr, GROUP_M: gl.constexpr, LAYOUT: gl.constexpr):
    """This program's first tile from ``tile`` on: (its number, the walk's state, and what ``tile_rows`` says).

    The state's group is ``num_groups`` if there is none.
    """
    state = seek(tile, state, walk, BLOCK_M, LAYOUT)
    row, valid, expert, n_block = tile_rows(tile, state, walk, BLOCK_M, GROUP_M, LAYOUT)
    if LAYOUT == CONTIGUOUS:
        while (state[0] < walk[2]) & (expert < 0):
            tile = next_tile(tile, counter, counted)
            state = seek(tile, state, walk, BLOCK_M, LAYOUT)
            row, valid, expert, n_block = tile_rows(tile, state, walk, BLOCK_M, GROUP_M, LAYOUT)
    return tile, state, row, valid, expert, n_block


@gluon.jit
def leave(tile, tiles, counter, counted):
    """Sets the counter back for the next launch; ``tile``: the last answer. ``tiles``: how many there are.

    Each program that has had a tile has asked once in vain, and the tiles beyond the programs' first ones were asked
    for once: so many times as there are tiles. Whoever has asked last knows it.
    """
    if (counted != 0) & (tile == gl.num_programs(0) + tiles - 1):
        flags.clear(counter)
