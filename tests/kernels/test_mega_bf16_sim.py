"""Whole calls of the BF16 mega-kernel executed on the CPU with 1 to 3 ranks under adversarial schedules.

What it shares with the FP8 one (tables, routings, waits that are given up on) is in ``test_mega_sim``, the pool in
``test_mega_ring``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

import torch  # noqa: E402

from megamoe.kernels.gemm import grouped_bf16_gemm_nt  # noqa: E402
from megamoe.kernels.gemm_swiglu import grouped_bf16_gemm_swiglu_nt  # noqa: E402
from megamoe.kernels.row_groups import RowGroups  # noqa: E402
from tests.support.exchange_sim import (  # noqa: E402
    Tokens,
    add_combine,
    add_dispatch,
    check_combine,
    check_dispatch,
    expert_results,
    make_tokens,
)
from tests.support.gemm_sim import simulated_gemm  # noqa: E402
from tests.support.gluon_sim import POLICIES  # noqa: E402
from tests.support.mega_sim import (  # noqa: E402
    SETTINGS,
    MegaSizes,
    MegaWorld,
    add_mega_call,
    check_outputs,
    run_calls,
)

TWO = MegaSizes(fp8=False)
THREE = replace(TWO, ranks=3, tokens=11, top_k=3, experts=6, hidden=384, intermediate=128)
ONE = replace(TWO, ranks=1, experts=3, tokens=30)


@pytest.mark.parametrize(("policy", "skew"), [(policy, 1 + number % 3) for number, policy in enumerate(POLICIES)])
def test_every_policy(policy, skew, seed):
    settings, fused = replace(SETTINGS, skew=skew), skew != 2
    run_calls(TWO, policy, seed, [([20, 9], "random"), ([0, 40], "one")], fused, settings=settings)


@pytest.mark.parametrize("fused", [True, False], ids=["one launch", "several launches"])
def test_ranks(fused, seed):
    calls = [([11, 0, 4], "random"), ([1, 11, 11], "holes"), ([0, 0, 0], "random"), ([3, 3, 0], "one")]
    run_calls(THREE, "random", seed, calls, fused)


def test_blocks_of_every_height(seed):
    """At most 64 rows leave a consumer out; more than 128 take several blocks; and the exact borders."""
    for tokens in (64, 65, 129):
        sizes = replace(ONE, experts=1, top_k=1, tokens=tokens)
        run_calls(sizes, "pct", seed, [([tokens], "random")], settings=replace(SETTINGS, skew=2))
    run_calls(replace(TWO, tokens=80), "random", seed, [([80, 48], "one")])


@pytest.mark.parametrize(
    ("hidden", "intermediate"), [(128, 128), (128, 512), (512, 128), (384, 512), (640, 128), (128, 896)]
)
def test_shapes(hidden, intermediate, seed):
    """Tiles of two to fourteen blocks of K, and half a tile of columns; the ring holds four."""
    sizes = replace(TWO, hidden=hidden, intermediate=intermediate, tokens=9)
    for policy, skew in (("random", 1), ("eager", 3)):
        run_calls(sizes, policy, seed, [([9, 5], "random")], settings=replace(SETTINGS, skew=skew))


@pytest.mark.parametrize(
    ("sms", "group", "lag", "skew", "early"),
    [(1, 1, 1, 1, 0), (3, 2, 1, 3, 4), (5, 1, 3, 2, 2), (2, 8, 1, 1, 40)],
)
def test_settings(sms, group, lag, skew, early, seed):
    settings = replace(SETTINGS, sms=sms, group=group, lag=lag, skew=skew, early=early)
    sizes = replace(TWO, intermediate=512, tokens=24)
    run_calls(sizes, "random", seed, [([24, 20], "random"), ([24, 3], "one")], settings=settings)


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai", "geglu", "geglu_tanh"])
@pytest.mark.parametrize("clamp", [None, 0.3])
def test_activations(activation, clamp, seed):
    run_calls(replace(ONE, tokens=9), "random", seed, [([9], "random")], activation=activation, clamp=clamp)


def separate_kernels(world: MegaWorld, tokens: list[Tokens], policy: str, seed: int) -> list[torch.Tensor]:
    """The same layer by a dispatch, grouped GEMMs and a combine, under the simulator too."""
    tokens = [replace(mine) for mine in tokens]
    add_dispatch(world, tokens)
    world.run(policy, seed)
    results = []
    with simulated_gemm(policy, seed):
        for mine, (up, down) in zip(tokens, world.weights, strict=True):
            ends = (mine.table.starts + mine.table.counts).int()
            rows = RowGroups.psum(ends)
            weights = mine.table.row_weights
            act = grouped_bf16_gemm_swiglu_nt(mine.rows, up, rows, row_weights=weights)
            results.append(grouped_bf16_gemm_nt(act, down, rows))
    add_combine(world, tokens, results)
    world.run(policy, seed)
    return [mine.out for mine in tokens]


def test_results_have_the_same_bits_under_every_schedule_and_in_separate_kernels(seed):
    """Also in one or several launches, and with other settings."""
    tokens, results = make_tokens(TWO, [40, 23]), []
    for policy, fused, settings in (
        ("random", True, SETTINGS),
        ("lazy", False, replace(SETTINGS, skew=3)),
        ("starve", True, replace(SETTINGS, sms=3, group=2, skew=2)),
    ):
        world, mine = MegaWorld(TWO, fused, sms=settings.sms), [replace(each) for each in tokens]
        add_mega_call(world, mine, settings=settings)
        world.run(policy, seed)
        results.append([each.out for each in mine])
    results.append(separate_kernels(MegaWorld(TWO), tokens, "random", seed))
    assert any(out.any() for out in results[0])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_calls_and_plain_movements_on_one_buffer(seed):
    sizes = replace(TWO, tokens=9)
    world, plain = MegaWorld(sizes, fused=False), make_tokens(sizes, [3, 9])
    first, last = (make_tokens(sizes, counts, "holes") for counts in ([9, 4], [2, 9]))
    add_mega_call(world, first)
    add_dispatch(world, plain)
    rows = expert_results(world, plain)
    add_combine(world, plain, rows)
    add_mega_call(world, last)
    world.run("slowrank", seed)
    assert not any(any(error) for error in world.errors)
    check_outputs(world, first)
    check_outputs(world, last)
    check_dispatch(world, plain)
    check_combine(world, plain, rows)


def test_tokens_that_lie_in_the_shared_memory(seed):
    """They are not staged again."""
    world, tokens = MegaWorld(TWO), make_tokens(TWO, [20, 9], "holes")
    for rank, mine in enumerate(tokens):
        rows = world.memories[rank].rows.view(torch.bfloat16)[: mine.x.numel()]
        rows.copy_(mine.x.flatten())
        staged = replace(mine, x=None)
        world.add(rank, world.launches(rank, staged))
        mine.out = staged.out
    world.run("random", seed)
    check_outputs(world, tokens)
