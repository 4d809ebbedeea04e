"""The order of a mega-kernel's tiles, and what its programs wait for: a model without a simulator.

All waits are for counters that only grow, so whatever can go on can still do so later: if programs that go on as far as
they can all come to their end, they do so under every schedule, and if they do not, they are stuck under each.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

Tile = tuple[int, int]
"""(whether of GEMM 2, block)"""


def order_of_tiles(blocks_of: Sequence[int], ups: int, downs: int, group: int, lag: int) -> list[Tile]:
    """All tiles in their order, as ``triton_route`` describes it. ``blocks_of``: each expert's number of blocks."""
    groups: list[range] = []
    for blocks in blocks_of:
        if blocks:
            length = -(-blocks // -(-blocks // group))
            first = groups[-1].stop if groups else 0
            end = first + blocks
            groups += [range(start, min(start + length, end)) for start in range(first, end, length)]
    order: list[Tile] = []
    done = 0
    for blocks in groups:
        while done < len(groups) and groups[done].start + lag < blocks.start:
            order += [(1, block) for _ in range(downs) for block in groups[done]]
            done += 1
        order += [(0, block) for _ in range(ups) for block in blocks]
    for blocks in groups[done:]:
        order += [(1, block) for _ in range(downs) for block in blocks]
    return order


def unfinished(order: Sequence[Tile], programs: int, ups: int, downs: int, pool: int, seed: int = 0) -> list[Tile]:
    """Tiles that are never computed. Programs, which go on in any order, take the next tile when they begin one."""
    blocks = 1 + max((block for _, block in order), default=-1)
    left_up, left_down = [ups] * blocks, [downs] * blocks
    generator = random.Random(seed)
    # Of each program the tile that it is at, and the one that it has taken beside it.
    held: list[list[int]] = [[program] for program in range(min(programs, len(order)))]
    taken = len(held)
    pulled, moved = 0, True
    while moved:
        moved = False
        while pulled < blocks and (pulled < pool or not left_down[pulled - pool]):
            pulled += 1
        for mine in generator.sample(held, len(held)):
            if mine and len(mine) < 2 and taken < len(order):
                mine.append(taken)
                taken += 1
                moved = True
            if mine:
                second, block = order[mine[0]]
                if block < pulled if second == 0 else left_up[block] == 0:
                    (left_up, left_down)[second][block] -= 1
                    mine.pop(0)
                    moved = True
    return [order[place] for mine in held for place in mine]
