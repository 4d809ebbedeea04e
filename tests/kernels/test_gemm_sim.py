"""Hopper's GEMM kernels executed on the CPU, under adversarial schedules: races, deadlocks, results, stray writes."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from megamoe.kernels.tiles import Problem, Tile, legal_tiles  # noqa: E402
from tests.support.gemm_cases import Case, Instance, compute, standard_cases  # noqa: E402
from tests.support.gemm_sim import Run, instance_of, simulated_gemm  # noqa: E402

CASES = standard_cases()
POLICIES = ("rr", "random", "eager", "lazy", "starve", "pct")

# A kernel's main path each: these run under all policies, the others under two that their names decide.
CORE = ("psum", "masked, odd M_max", "swiglu to fp8", "bf16, psum", "bf16 nn, psum, tails of N and K")


def schedules(name: str) -> list[str]:
    return list(POLICIES) if name in CORE else random.Random(name).sample(POLICIES, 2)


def seed_of(text: str) -> int:
    seed = sum(map(ord, text))
    print(f"seed {seed}")
    return seed


@pytest.mark.parametrize(("name", "policy"), [(name, policy) for name in CASES for policy in schedules(name)])
def test_cases(name, policy):
    seed = seed_of(name + policy)
    instance = instance_of(CASES[name], seed % 3)
    out = instance.poisoned()
    with simulated_gemm(policy, seed):
        compute(instance, out, instance.rows)
    instance.check(out)


def test_every_policy_sees_every_kernel():
    fp8 = {policy for name in CASES if not name.startswith("bf16") for policy in schedules(name)}
    bf16 = {policy for name in CASES if name.startswith("bf16") for policy in schedules(name)}
    assert fp8 == bf16 == set(POLICIES)


# ---------------------------------------------------------------- tiles


def tile_name(tile: Tile) -> str:
    return "x".join(str(int(field)) for field in dataclasses.astuple(tile))


TILES = legal_tiles(Problem(64, 4, 528, 1024, "masked", 3))
BF16_TILES = [
    *legal_tiles(Problem(64, 4, 528, 1024, "masked", 3), "bf16"),
    # Fewer stages leave room for whole rows of the result; and no lead.
    Tile(128, 256, 3, skew=2),
    Tile(128, 256, 3),
    Tile(128, 256, 2, group_m=1),
]


@pytest.mark.parametrize("tile", TILES, ids=tile_name)
def test_every_tile(tile):
    seed = seed_of(tile_name(tile))
    counts = (tile.block_m + 3, 0, 1, tile.block_m)
    # Columns end inside a tile, and K, if stages are small, inside a pair of them.
    k = {1: 384, 2: 512, 4: 512 * tile.together}[tile.k_blocks]
    case = Case(counts, 3 * tile.block_n // 2 // 8 * 8, k, "masked", tile.block_m + 5)
    Run(case, tile, sms=1 + seed % 3)(None, POLICIES[seed % len(POLICIES)], seed)


@pytest.mark.parametrize("nn", [False, True], ids=["nt", "nn"])
@pytest.mark.parametrize("tile", BF16_TILES, ids=tile_name)
def test_every_bf16_tile(tile, nn):
    seed = seed_of(tile_name(tile)) + nn
    case = Case((131, 0, 1, 128), 392, 320, "masked", 133, fp8=False, nn=nn)
    Run(case, tile, sms=1 + seed % 3)(None, POLICIES[seed % len(POLICIES)], seed)


@pytest.mark.parametrize("kind", ["contiguous", "psum", "masked"])
@pytest.mark.parametrize("tile", legal_tiles(Problem(64, 4, 512, 384, "psum", 3, wide_only=True)), ids=tile_name)
def test_every_tile_with_an_activation(tile, kind):
    seed = seed_of(tile_name(tile) + kind)
    case = Case((100, 0, 64, 1, 129), 512, 384, kind, 130, activation="swiglu", weighted=True, fp8_out=True)
    Run(case, tile, sms=1 + seed % 3)(None, POLICIES[seed % len(POLICIES)], seed)


# ---------------------------------------------------------------- bounds

KERNELS = {
    "fp8": (True, Tile(128, 256, 3)),
    "fp8, narrow": (True, Tile(128, 192, 3)),
    "skinny": (True, Tile(128, 64, 3, swap=True)),
    "bf16": (False, Tile(128, 256, 3, skew=2)),
}
HUGE = 2**31 - 1
WILD = {
    "contiguous": [(3, -7, 2**30), (1, HUGE, -(2**31))],
    "psum": [(-5, HUGE, 64), (128, -(2**31), 300), (HUGE, HUGE, HUGE)],
    "masked": [(HUGE, -3, 129), (-(2**31), 128, -300)],
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("kind", "index"), [(kind, index) for kind, many in WILD.items() for index in many])
def test_wild_indices_stay_in_the_matrix(kind, index, kernel):
    """Ids, ends and counts out of range: cut or left out. Memory around the result stays as it was."""
    fp8, tile = KERNELS[kernel]
    seed = seed_of(f"{kind}{index}{kernel}")
    case = Case((128, 128, 128), 256, 128, kind, 128, fp8=fp8)
    Run(case, tile, index=index)(None, POLICIES[seed % len(POLICIES)], seed)


# ---------------------------------------------------------------- independence


def expert_rows(instance: Instance, x: torch.Tensor, expert: int) -> torch.Tensor:
    """Bits of an expert's rows in ``a`` or a result."""
    start, end = instance.written[expert]
    x = x.reshape(-1, x.shape[-1])
    return (x.view(torch.uint8) if x.element_size() == 1 else x)[start:end]


def with_expert_of(case: Case, source: Instance, expert: int) -> Instance:
    """Fresh values, but for one expert's, which are the source's."""
    other = Instance(case, 9)
    count = case.counts[expert]
    assert count == source.case.counts[expert]
    operands = [(other.a, source.a), (other.b, source.b)]
    if case.fp8:
        pairs = [(other.a.codes.view(torch.uint8), source.a.codes.view(torch.uint8))]
        pairs += [
            (other.b.codes.view(torch.uint8), source.b.codes.view(torch.uint8)),
            (other.b.scales, source.b.scales),
        ]
        other.a.scales[expert, :count] = source.a.scales[expert, :count]
    else:
        pairs = operands
    for mine, theirs in pairs:
        mine[expert] = theirs[expert]
    return other


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_do_not_depend_on_the_rest(kernel):
    """Bitwise: an expert's rows beside other rows, other counts, other weights, in another order of work."""
    fp8, tile = KERNELS[kernel]
    case = Case((100, 70, 0, 33), 264, 384, "masked", 140, fp8=fp8)
    source = instance_of(case)
    results = []
    for counts, policy, sms in (
        ((100, 70, 0, 33), "rr", 3),
        ((3, 70, 140, 1), "random", 2),
        ((0, 70, 0, 0), "lazy", 1),
    ):
        changed = dataclasses.replace(case, counts=counts)
        instance = source if changed == case else with_expert_of(changed, source, 1)
        out = instance.poisoned()
        with simulated_gemm(policy, 5, sms):
            compute(instance, out, instance.rows, tile)
        results.append(expert_rows(instance, out, 1))
    assert all(torch.equal(results[0], result) for result in results[1:])
    start, end = source.written[1]
    error = (results[0].float() - source.expected[start:end]).norm() / source.expected[start:end].norm()
    assert error < 5e-3


SOME_TILES = [
    Tile(128, 256, 3),
    Tile(128, 192, 3),
    Tile(128, 32, 3),
    Tile(64, 16, 5, k_blocks=4),
    Tile(128, 64, 3, swap=True),
    Tile(64, 128, 4, k_blocks=2, swap=True),
]


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_all_tiles_give_the_same_bits(bias):
    """So a layer's results do not depend on how many rows there are. Sums start from the bias in each kernel."""
    instance = instance_of(Case((100, 0, 33), 264, 512, bias=bias))
    results = []
    for tile in SOME_TILES:
        out = instance.poisoned()
        with simulated_gemm("random", 5, 2):
            compute(instance, out, instance.rows, tile)
        results.append([expert_rows(instance, out, expert) for expert in (0, 2)])
    for tile, result in zip(SOME_TILES, results, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(results[0], result, strict=True)), tile
