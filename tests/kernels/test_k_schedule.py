"""Who computes which tile of the weight gradients, by the device code itself: each once, and nobody much longer."""

import random

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.kernels.gluon import k_schedule
from tests.support import gluon_sim


@gluon.jit
def walk_kernel(index, found, num_rows, num_experts, tiles, most, LEAST: gl.constexpr, num_warps: gl.constexpr):
    """Of each program's turns: its expert, the number of the tile, which consumers pause."""
    walk = (index, num_rows, num_experts, tiles)
    first = k_schedule.first_shared(walk, LEAST)
    turn = gl.program_id(0)
    place, pausing = k_schedule.shared_tile(turn, first)
    tile, expert, steps = k_schedule.first_tile(walk, place, 64, LEAST)
    row = found + gl.program_id(0) * most * 3
    while steps >= LEAST:
        gl.store(row, expert)
        gl.store(row + 1, tile)
        gl.store(row + 2, pausing)
        row += 3
        turn += gl.num_programs(0)
        before = place
        place, pausing = k_schedule.shared_tile(turn, first)
        tile, expert, steps = k_schedule.seek(tile + place - before, expert, steps, walk, 64, LEAST)


def walked(counts: list[int], tiles: int, programs: int, least: int) -> list[list[tuple[int, ...]]]:
    ends, position = [], 0
    for count in counts:
        ends.append(position + count)
        position += -(-count // 128) * 128
    most = len(counts) * tiles + 2
    found = torch.full((programs, most, 3), -1, dtype=torch.int32)
    arguments = dict(index=torch.tensor(ends, dtype=torch.int32), found=found, num_rows=position)
    arguments |= dict(num_experts=len(counts), tiles=tiles, most=most, LEAST=least, num_warps=1)
    gluon_sim.launch(walk_kernel, (programs,), (), arguments)
    return [[tuple(turn) for turn in program if turn[0] >= 0] for program in found.tolist()]


def test_every_half_of_every_tile_once(seed):
    choose = random.Random(seed)
    for _ in range(12):
        counts = [choose.choice((0, 1, choose.randint(1, 400))) for _ in range(choose.randint(1, 5))]
        tiles, programs, least = choose.randint(1, 7), choose.randint(1, 9), choose.randint(0, 1)
        turns = walked(counts, tiles, programs, least)
        halves = [
            (expert, tile, half)
            for program in turns
            for expert, tile, pausing in program
            for half in (0, 1)
            if not pausing >> half & 1
        ]
        experts = [expert for expert, count in enumerate(counts) if count or not least]
        wanted = {(expert, tile, half) for expert in experts for tile in range(tiles) for half in (0, 1)}
        assert len(halves) == len(set(halves)) and set(halves) == wanted, (counts, tiles, programs, least)


@pytest.mark.parametrize(
    ("tiles", "programs", "longest"), [(6, 4, 3), (7, 4, 4), (8, 4, 4), (1, 4, 1), (3, 4, 2), (9, 8, 3), (13, 8, 4)]
)
def test_last_tiles_are_shared_where_half_of_the_programs_would_have_none(tiles, programs, longest):
    """``longest``: halves of tiles that a program has at most."""
    turns = walked([70], tiles, programs, 0)
    assert max(sum(2 - bool(pausing) for _, _, pausing in program) for program in turns) == longest


def test_experts_without_rows_do_not_count_where_nothing_is_added_for_them():
    turns = walked([0, 70, 0], 6, 4, 1)
    assert max(sum(2 - bool(pausing) for _, _, pausing in program) for program in turns) == 3
