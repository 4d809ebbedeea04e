"""The order of a mega-kernel's tiles, and what its programs wait for: a model without a simulator.

All waits are for counters that only grow, so whatever can go on can still do so later: if programs that go on as far as
they can all come to their end, they do so under every schedule, and if they do not, they are stuck under each.
"""

from __future__ import annotations

from collections.abc import Sequence

Tile = tuple[int, int]
"""(whether of GEMM 2, block)"""


def order_of_tiles(
    experts: Sequence[Sequence[bool]], ups: int, downs: int, programs: int, group: int, lag: int
) -> list[list[Tile]]:
    """Each program's tiles in their order, as ``triton_route`` describes it.

    Args:
        experts: of each block of each expert, whether it has at most 64 rows.
    """
    halves = [half for blocks in experts for half in blocks]
    groups = []
    for blocks in experts:
        if blocks:
            length = -(-len(blocks) // -(-len(blocks) // group))
            first = groups[-1].stop if groups else 0
            end = first + len(blocks)
            groups += [range(start, min(start + length, end)) for start in range(first, end, length)]
    sizes = [columns * halves.count(half) for columns in (ups, downs) for half in (False, True)]
    numbers = [sum(sizes[:kind]) for kind in range(4)]
    order: list[list[Tile]] = [[] for _ in range(programs)]

    def deal(second: int, blocks: range) -> None:
        for half in (False, True):
            for _ in range((ups, downs)[second]):
                for block in blocks:
                    if halves[block] == half:
                        order[numbers[2 * second + half] % programs].append((second, block))
                        numbers[2 * second + half] += 1

    done = 0
    for blocks in groups:
        while done < len(groups) and groups[done].start + lag < blocks.start:
            deal(1, groups[done])
            done += 1
        deal(0, blocks)
    for blocks in groups[done:]:
        deal(1, blocks)
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
