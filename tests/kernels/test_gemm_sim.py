"""Hopper's GEMM kernels executed on the CPU, under adversarial schedules: races, deadlocks, results, stray writes."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from megamoe.kernels import gemm_ops, tiles  # noqa: E402
from megamoe.kernels.gluon import launch  # noqa: E402
from tests.support import gluon_sim  # noqa: E402
from tests.support.gemm_cases import Case, Instance, compute, standard_cases  # noqa: E402

CASES = standard_cases()
POLICIES = ("rr", "random", "eager", "lazy", "starve", "pct")


@pytest.fixture
def simulated(monkeypatch):
    """Makes the public functions run the kernels in the simulator, on a GPU of three SMs."""

    def start(policy: str, seed: int, sms: int = 3) -> None:
        def gemm(kind, operands, tile, grid, **options):
            kernel, arguments = launch.arguments_of(kind, operands, tile, **options)
            gluon_sim.launch(kernel, (grid,), (), dict(arguments, num_warps=4), policy=policy, seed=seed)

        monkeypatch.setattr(launch, "gemm", gemm)
        monkeypatch.setattr(gemm_ops, "runs_kernels", lambda tensor: True)
        monkeypatch.setattr(gemm_ops, "get_num_sms", lambda device=None: sms)

    return start


def run(case: Case, seed: int, tile=None) -> None:
    instance = Instance(case, seed)
    out = instance.poisoned()
    compute(instance, out, instance.rows, tile)
    instance.check(out)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_cases(name, policy, simulated):
    seed = sum(map(ord, name + policy))
    print(f"seed {seed}")
    simulated(policy, seed)
    run(CASES[name], seed)


def tile_name(tile: tiles.Tile) -> str:
    return "x".join(str(int(field)) for field in dataclasses.astuple(tile))


TILES = tiles.legal_tiles(tiles.Problem(64, 4, 528, 1024, "masked", 3))


@pytest.mark.parametrize("tile", TILES, ids=tile_name)
def test_every_tile(tile, simulated):
    seed = TILES.index(tile)
    simulated(POLICIES[seed % len(POLICIES)], seed, sms=1 + seed % 3)
    counts = (tile.block_m + 3, 0, 1, tile.block_m)
    run(Case(counts, 264, 512 if tile.k_blocks < 4 else 1024, "masked", tile.block_m + 5), seed, tile)
