"""Hopper's K-grouped kernels executed on the CPU, under adversarial schedules: races, deadlocks, stray writes."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from megamoe.kernels.tiles import K_FORMS, Tile, legal_k_tiles  # noqa: E402
from megamoe.types import Fp8Tensor  # noqa: E402
from tests.support.k_gemm_cases import KCase, compute, operands_of, standard_cases  # noqa: E402
from tests.support.k_gemm_sim import Run, instance_of, simulated_k_gemm  # noqa: E402

CASES = standard_cases()
POLICIES = ("rr", "random", "eager", "lazy", "starve", "pct")

# A kernel's main paths: these run under all policies, the others under two that their names decide.
CORE = {f"{form}, {name}" for form in K_FORMS for name in ("ragged", "added")}
HUGE = 2**31 - 1


def schedules(name: str) -> list[str]:
    return list(POLICIES) if name in CORE else random.Random(name).sample(POLICIES, 2)


@pytest.mark.parametrize(("name", "policy"), [(name, policy) for name in CASES for policy in schedules(name)])
def test_cases(name, policy, seed):
    Run(CASES[name], sms=1 + seed % 4)(None, policy, seed % 1000)


def tile_name(tile: Tile) -> str:
    return "x".join(str(int(field)) for field in dataclasses.astuple(tile))


TILES = [
    (form, tile)
    for form in K_FORMS
    for tile in (*legal_k_tiles(form), Tile(128, 256, 2, group_m=1))
    # The others differ in the width of their bands.
    if tile.group_m in (1, legal_k_tiles(form)[0].group_m)
]
FORM = pytest.mark.parametrize("form", K_FORMS)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("form", "tile"), TILES, ids=lambda x: x if isinstance(x, str) else tile_name(x))
def test_every_tile(form, tile, out_dtype, seed):
    """Experts of no step, one, as many as stages, and more."""
    add = (tile.stages + tile.skew + out_dtype.itemsize) % 4 < 2
    case = KCase((1, 0, 192, 450), 136, 264, add=add, out_dtype=out_dtype, **operands_of(form))
    Run(case, tile, sms=1 + seed % 3)(None, POLICIES[(seed + tile.stages + tile.skew) % len(POLICIES)], seed % 1000)


@FORM
def test_tails_and_columns(form, seed):
    """Last steps of any length; columns that end anywhere in a tile and in a block of scales."""
    choose = random.Random(seed)
    counts = tuple(choose.choice((0, 128, 256)) + choose.randint(1, 127) for _ in range(3))
    for n in (8 * choose.randint(1, 15), 128 + 8 * choose.randint(1, 15), 256 + 8 * choose.randint(1, 15)):
        case = KCase(counts, 8 * choose.randint(1, 20), n, **operands_of(form))
        Run(case, sms=1 + seed % 3)(None, choose.choice(POLICIES), seed % 1000)


# ---------------------------------------------------------------- bounds


@FORM
@pytest.mark.parametrize(
    "ends",
    [(HUGE, HUGE, HUGE), (-5, 130, HUGE), (300, 50, 420), (-(2**31), 1, -1), (1, 2, 3)],
    ids=str,
)
def test_wild_ends_stay_in_the_matrix(ends, form, seed):
    case = KCase((128, 128, 112), 64, 136, spare=-16, **operands_of(form))
    Run(case, ends=ends)(None, POLICIES[seed % len(POLICIES)], seed % 1000)


# ---------------------------------------------------------------- independence


def with_rows_of(case: KCase, source, expert: int):
    """Fresh values, but for one expert's, which are the source's."""
    other = instance_of(case, 9)
    assert case.counts[expert] == source.case.counts[expert]
    (first, last), (start, end) = other.spans[expert], source.spans[expert]
    for mine, theirs in ((other.a, source.a), (other.b, source.b)):
        if isinstance(mine, Fp8Tensor):
            mine.codes.view(torch.uint8)[first:last] = theirs.codes.view(torch.uint8)[start:end]
            mine.scales[first // 128 : -(-last // 128)] = theirs.scales[start // 128 : -(-end // 128)]
        else:
            mine[first:last] = theirs[start:end]
    return other


@FORM
def test_an_expert_does_not_depend_on_the_rest(form):
    """Bitwise: beside other experts and counts, elsewhere in the matrix, in another order of work, on any SMs."""
    case = KCase((100, 170, 0, 33), 64, 136, **operands_of(form))
    source = instance_of(case, 8)
    results = []
    for counts, policy, sms in (
        ((100, 170, 0, 33), "rr", 3),
        ((300, 170, 140, 1), "random", 2),
        ((0, 170, 0, 0), "lazy", 1),
    ):
        changed = dataclasses.replace(case, counts=counts)
        instance = source if changed == case else with_rows_of(changed, source, 1)
        out = instance.poisoned()
        with simulated_k_gemm(policy, 5, sms):
            compute(instance, out)
        results.append(out[1])
    assert all(torch.equal(results[0], result) for result in results[1:])
    error = (results[0] - source.sums[1]).norm() / source.sums[1].norm()
    assert error < 1e-5
