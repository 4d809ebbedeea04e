"""The order of a mega-kernel's tiles, and what its programs wait for: a model without a simulator.

All waits are for counters that only grow, so whatever can go on can still do so later: if programs that go on as far as
they can all come to their end, they do so under every schedule, and if they do not, they are stuck under each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Tile = tuple[int, int]
"""(whether of GEMM 2, block)"""


def order_of_tiles(blocks: int, ups: int, downs: int, programs: int, group: int, lag: int) -> list[list[Tile]]:
    """Each program's tiles in their order, as ``triton_route`` describes it."""
    groups = [range(first, min(first + group, blocks)) for first in range(0, blocks, group)]
    numbers = [0, 0]
    order: list[list[Tile]] = [[] for _ in range(programs)]

    def deal(second: int, g: int) -> None:
        for _ in range((ups, downs)[second]):
            for block in groups[g]:
                program = numbers[second] % programs
                order[programs - 1 - program if second else program].append((second, block))
                numbers[second] += 1

    for g in range(len(groups) + lag + 1):
        if g < len(groups):
            deal(0, g)
        # Once GEMM 1 is lag groups ahead.
        if 0 <= g - lag < len(groups):
            deal(1, g - lag)
    return order


@dataclass(frozen=True)
class Held:
    """Whether a program with ``turns`` must finish a tile of GEMM 1 before the next tile's rows are there."""

    pool: int
    reused: bool = True

    def awaited(self, last: Tile, tile: Tile) -> bool:
        (_, b), (second, block) = last, tile
        if second:
            return block >= b
        return self.reused and block >= self.pool and (block - b) * 128 > self.pool * 128 // 2


def unfinished(
    order: Sequence[Sequence[Tile]], ups: int, downs: int, pool: int, held: Held | None = None
) -> list[Tile]:
    """The next tile of each program that never comes to its end. ``held``: programs take turns."""
    blocks = 1 + max((block for tiles in order for _, block in tiles), default=-1)
    left_up, left_down = [ups] * blocks, [downs] * blocks
    place, holding = [0] * len(order), [None] * len(order)
    pulled, moved = 0, True
    while moved:
        moved = False
        while pulled < blocks and (pulled < pool or not left_down[pulled - pool]):
            pulled += 1
        for program, tiles in enumerate(order):
            while place[program] < len(tiles):
                tile = second, block = tiles[place[program]]
                last = holding[program]
                if last is not None and held.awaited(last, tile):
                    left_up[last[1]] -= 1
                    holding[program], moved = None, True
                    continue
                if block >= pulled if second == 0 else left_up[block] > 0:
                    break
                if last is not None:
                    left_up[last[1]] -= 1
                    holding[program] = None
                if second:
                    left_down[block] -= 1
                elif held is None:
                    left_up[block] -= 1
                else:
                    holding[program] = tile
                place[program] += 1
                moved = True
            if place[program] == len(tiles) and holding[program] is not None:
                left_up[holding[program][1]] -= 1
                holding[program], moved = None, True
    return [tiles[at] for tiles, at in zip(order, place, strict=True) if at < len(tiles)]
