"""The order of a mega-kernel's tiles, and what its programs wait for: a model without a simulator.

All waits are for counters that only grow, so whatever can go on can still do so later: if programs that go on as far as
they can all come to their end, they do so under every schedule, and if they do not, they are stuck under each.
"""

from __future__ import annotations

from collections.abc import Sequence

Tile = tuple[int, int]
"""(whether of GEMM 2, block)"""


def order_of_tiles(
    halves: Sequence[bool], ups: int, downs: int, programs: int, group: int, lag: int
) -> list[list[Tile]]:
    """Each program's tiles in their order, as ``triton_route`` describes it.

    Args:
        halves: of each block, whether it has at most 64 rows.
    """
    groups = [range(first, min(first + group, len(halves))) for first in range(0, len(halves), group)]
    sizes = [columns * halves.count(half) for columns in (ups, downs) for half in (False, True)]
    numbers = [sum(sizes[:kind]) for kind in range(4)]
    order: list[list[Tile]] = [[] for _ in range(programs)]

    def deal(second: int, g: int) -> None:
        for half in (False, True):
            for _ in range((ups, downs)[second]):
                for block in groups[g]:
                    if halves[block] == half:
                        order[numbers[2 * second + half] % programs].append((second, block))
                        numbers[2 * second + half] += 1

    for g in range(len(groups) + lag + 1):
        if g < len(groups):
            deal(0, g)
        # Once GEMM 1 is lag groups ahead.
        if 0 <= g - lag < len(groups):
            deal(1, g - lag)
    return order


def unfinished(order: Sequence[Sequence[Tile]], ups: int, downs: int, pool: int) -> list[Tile]:
    """The next tile of each program that never comes to its end."""
    blocks = 1 + max((block for tiles in order for _, block in tiles), default=-1)
    left_up, left_down = [ups] * blocks, [downs] * blocks
    place = [0] * len(order)
    pulled, moved = 0, True
    while moved:
        moved = False
        while pulled < blocks and (pulled < pool or not left_down[pulled - pool]):
            pulled += 1
        for program, tiles in enumerate(order):
            while place[program] < len(tiles):
                second, block = tiles[place[program]]
                if block >= pulled if second == 0 else left_up[block] > 0:
                    break
                (left_up, left_down)[second][block] -= 1
                place[program] += 1
                moved = True
    return [tiles[at] for tiles, at in zip(order, place, strict=True) if at < len(tiles)]
