"""Whole calls of the mega-kernel executed on the CPU with 1 to 3 ranks under adversarial schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

import torch  # noqa: E402

from megamoe.kernels import flag_words  # noqa: E402
from tests.support.exchange_sim import (  # noqa: E402
    add_combine,
    add_dispatch,
    check_combine,
    check_dispatch,
    check_told,
    expert_results,
    make_tokens,
)
from tests.support.gluon_sim import POLICIES, Deadlock  # noqa: E402
from tests.support.mega_sim import (  # noqa: E402
    SETTINGS,
    MegaSizes,
    MegaWorld,
    add_mega_call,
    check_outputs,
    check_tables,
    run_calls,
)

TWO = MegaSizes()
THREE = MegaSizes(ranks=3, tokens=11, top_k=3, experts=6, hidden=384, intermediate=128)
ONE = MegaSizes(ranks=1, experts=3, tokens=30)

launches = pytest.mark.parametrize("fused", [True, False], ids=["one launch", "several launches"])


@pytest.mark.parametrize(("number", "policy"), list(enumerate(POLICIES)))
def test_every_policy(number, policy, seed):
    """In one launch, or in several; see ``test_mega_ring`` too."""
    run_calls(TWO, policy, seed, [([20, 9], "random"), ([0, 40], "one")], number % 2 == 0)


@pytest.mark.parametrize(
    ("sizes", "calls"),
    [
        (THREE, [([11, 0, 4], "random"), ([1, 11, 11], "holes"), ([0, 0, 0], "random"), ([3, 3, 0], "one")]),
        (ONE, [([30], "random"), ([0], "random"), ([7], "holes")]),
    ],
    ids=["3 ranks", "1 rank"],
)
@launches
def test_ranks(sizes, calls, fused, seed):
    run_calls(sizes, "random", seed, calls, fused)


@pytest.mark.parametrize("policy", ["random", "slowrank"])
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@launches
def test_eight_ranks(fused, fp8, policy, seed):
    """As many as an NVLink domain often has, in every routing, some of them without tokens."""
    sizes = MegaSizes(ranks=8, experts=16, top_k=3, tokens=5, hidden=128, intermediate=128, fp8=fp8)
    counts = [5, 0, 3, 5, 1, 2, 5, 4], [0, 5, 0, 0, 5, 5, 2, 3], [2] * 8, [1, 0, 0, 0, 0, 0, 0, 5]
    run_calls(sizes, policy, seed, list(zip(counts, ("random", "holes", "one", "twice"), strict=True)), fused)


@pytest.mark.parametrize("routing", ["one", "none", "twice"])
def test_routing(routing, seed):
    run_calls(TWO, "random", seed, [([40, 30], routing), ([2, 1], "random")])


def test_blocks_of_every_height(seed):
    """At most 64 rows leave a consumer out; more than 128 take several blocks; and the exact borders."""
    for tokens in (64, 65, 129):
        sizes = MegaSizes(ranks=1, experts=1, top_k=1, tokens=tokens)
        run_calls(sizes, "pct", seed, [([tokens], "random")])
    run_calls(replace(TWO, tokens=80), "random", seed, [([80, 48], "one")])


@pytest.mark.parametrize(
    ("hidden", "intermediate"), [(128, 128), (128, 512), (512, 128), (384, 640), (1280, 256), (256, 1280)]
)
def test_shapes(hidden, intermediate, seed):
    """Tiles of one to ten blocks of K, and half a tile of columns; the ring holds four."""
    sizes = MegaSizes(hidden=hidden, intermediate=intermediate, tokens=9)
    run_calls(sizes, "random", seed, [([9, 5], "random")])


@pytest.mark.parametrize(("top_k", "experts"), [(1, 4), (16, 16), (5, 40)])
def test_slots_and_experts(top_k, experts, seed):
    run_calls(MegaSizes(top_k=top_k, experts=experts, tokens=5), "random", seed, [([5, 2], "random")])


@pytest.mark.parametrize(
    ("sms", "group", "lag", "early"),
    [(1, 1, 1, 0), (3, 2, 1, 1), (5, 1, 3, 4), (4, 4, 2, 2), (2, 8, 1, 40)],
)
def test_settings(sms, group, lag, early, seed):
    settings = replace(SETTINGS, sms=sms, group=group, lag=lag, early=early)
    sizes = replace(TWO, intermediate=512, tokens=24)
    run_calls(sizes, "random", seed, [([24, 20], "random"), ([24, 3], "one")], settings=settings)


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai", "geglu", "geglu_tanh"])
@pytest.mark.parametrize("clamp", [None, 0.3])
def test_activations(activation, clamp, seed):
    run_calls(replace(ONE, tokens=9), "random", seed, [([9], "random")], activation=activation, clamp=clamp)


def test_results_have_the_same_bits_under_every_schedule(seed):
    """Also in one or several launches, and with other settings."""
    tokens, results = make_tokens(TWO, [40, 23]), []
    for policy, fused, settings in (
        ("random", True, SETTINGS),
        ("lazy", False, SETTINGS),
        ("starve", True, replace(SETTINGS, sms=3, group=2, skew=2)),
    ):
        world, mine = MegaWorld(TWO, fused, sms=settings.sms), [replace(each) for each in tokens]
        add_mega_call(world, mine, settings=settings)
        world.run(policy, seed)
        results.append([each.out for each in mine])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(("fused", "policy"), [(True, "random"), (False, "slowrank")])
def test_calls_and_plain_movements_on_one_buffer(fused, policy, seed):
    """Each counts its dispatches and combines for all."""
    sizes = replace(TWO, tokens=9)
    world, mega_calls, plain_calls = MegaWorld(sizes, fused), [], []
    for step in "MDCMDDCCM":
        if step == "M":
            mega_calls.append(make_tokens(sizes, [9, 4], "holes"))
            add_mega_call(world, mega_calls[-1])
        elif step == "D":
            plain_calls.append((make_tokens(sizes, [3, 9]), []))
            add_dispatch(world, plain_calls[-1][0])
        else:
            tokens, rows = next((tokens, rows) for tokens, rows in plain_calls if not rows)
            rows.extend(expert_results(world, tokens))
            add_combine(world, tokens, rows)
    world.run(policy, seed)
    assert not any(any(error) for error in world.errors)
    for tokens in mega_calls:
        check_outputs(world, tokens)
    for tokens, rows in plain_calls:
        check_dispatch(world, tokens)
        check_combine(world, tokens, rows)
    check_told(world)


def test_all_programs_need_to_run_at_once(seed):
    """As many as there are: with one SM fewer they would wait for each other for ever."""
    settings = replace(SETTINGS, sms=3)
    world, tokens = MegaWorld(ONE, fused=False, sms=3), make_tokens(ONE, [30])
    add_mega_call(world, tokens, settings=settings)
    world.run("random", seed, resident=3)
    check_outputs(world, tokens)
    add_mega_call(world, tokens, settings=settings)
    with pytest.raises(Deadlock, match="wait_for_counter"):
        world.run("random", seed, resident=2)


# ---------------------------------------------------------------- the tables


@pytest.mark.parametrize(
    ("sizes", "sms", "group", "lag"),
    [
        (MegaSizes(ranks=1, experts=256, top_k=2, tokens=30, hidden=128, intermediate=18432), 132, 4, 2),
        (MegaSizes(ranks=2, experts=20, top_k=4, tokens=60, hidden=128, intermediate=1408), 7, 2, 3),
        (MegaSizes(ranks=1, experts=2, top_k=2, tokens=300, hidden=640, intermediate=128), 132, 8, 1),
        # Experts of several groups, which are not equally long.
        (MegaSizes(ranks=1, experts=2, top_k=2, tokens=900, hidden=128, intermediate=256), 5, 4, 2),
    ],
)
@launches
def test_tables(sizes, sms, group, lag, fused, seed):
    """Every tile once, in an order in which programs never wait for a later one, and every row where it belongs."""
    settings = replace(SETTINGS, sms=sms, group=group, lag=lag)
    world = MegaWorld(sizes, fused, sms=sms)
    tokens = make_tokens(sizes, [sizes.tokens, 17][: sizes.ranks], "holes")
    for rank, mine in enumerate(tokens):
        world.add(rank, world.route(rank, mine, settings))
    world.run("random", seed)
    assert not any(any(error) for error in world.errors)
    for rank in range(sizes.ranks):
        check_tables(world, tokens, rank, settings)


def test_rows_beyond_the_pool_are_dropped_and_reported(seed):
    sizes = replace(TWO, experts=4, top_k=2, tokens=20)
    world = MegaWorld(sizes, num_rows=128)
    tokens = make_tokens(sizes, [20, 20])
    for mine in tokens:
        # Both experts of rank 0, one of rank 1's.
        mine.index[:] = torch.tensor([0, 1])
        mine.index[10:, 1] = 2
    add_mega_call(world, tokens)
    # The slots of rows that are lost hold nothing.
    world.run("random", seed, race_check=False)
    assert [error[:3] for error in world.errors] == [[flag_words.CAPACITY, 256, 128], [0, 0, 0]]
    scratch = world.scratch[0]
    assert scratch["counts"].tolist() == [40, 0] and int(scratch["sizes"][0]) == 128


# ---------------------------------------------------------------- waits


@launches
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_does_not_come_is_named(missing, fused, seed):
    world = MegaWorld(THREE, fused)
    others = [rank for rank in range(3) if rank != missing]
    add_mega_call(world, make_tokens(THREE, [2, 2, 2]), ranks=others)
    world.run_until_given_up(seed)
    for rank in others:
        assert world.errors[rank] == [flag_words.READY + 1, missing, 1, 0]
    assert world.errors[missing] == [0, 0, 0, 0]


def test_a_rank_that_does_not_finish_is_named(seed):
    """It has brought its tokens, but its results are missing."""
    world, tokens = MegaWorld(TWO), make_tokens(TWO, [3, 3])
    rest = []
    for rank, mine in enumerate(tokens):
        first, *rest = world.launches(rank, mine)
        world.add(rank, [first])
    world.run("random", seed)
    world.add(0, world.launches(0, tokens[0])[1:])
    world.run_until_given_up(seed)
    assert world.errors == [[flag_words.SCATTERED + 1, 1, 1, 0], [0, 0, 0, 0]]


@launches
def test_a_rank_that_has_not_ended_its_last_dispatch_is_named(fused, seed):
    """Its tokens may still be read: no new ones are written."""
    world, tokens = MegaWorld(TWO, fused), make_tokens(TWO, [3, 3])
    add_dispatch(world, tokens)
    world.run("random", seed)
    add_mega_call(world, tokens, ranks=[0])
    world.run_until_given_up(seed)
    assert world.errors == [[flag_words.PULLED + 1, 1, 1, 0], [0, 0, 0, 0]]


def test_programs_that_cannot_run_at_once_give_up(seed):
    """What they waited for is named, and the memory is as good as new."""
    world, tokens = MegaWorld(ONE, fused=False), make_tokens(ONE, [30])
    add_mega_call(world, tokens)
    world.run_until_given_up(seed, resident=1)
    phase, block, target, seen = world.errors[0]
    assert phase == flag_words.PULLED_ROWS and 0 <= block < 3
    assert target == world.scratch[0]["counts"][block] and 0 <= seen < target
    world.memories[0].error.zero_()
    add_mega_call(world, tokens)
    world.run("random", seed)
    check_outputs(world, tokens)


def test_launches(seed):
    """Few tokens take three launches, many take five."""
    names = {True: ["route", "mega_moe", "combine"], False: ["stage", "count", "route", "mega_moe", "combine"]}
    for fused, expected in names.items():
        launches = MegaWorld(TWO, fused).launches(0, make_tokens(TWO, [3, 3])[0])
        assert [launch.kernel.fn.__name__ for launch in launches] == [f"{name}_kernel" for name in expected]
