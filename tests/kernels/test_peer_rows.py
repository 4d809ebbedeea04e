"""The kernels that move rows between ranks, executed on the CPU with 1 to 3 ranks under adversarial schedules."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import torch  # noqa: E402
import triton  # noqa: E402

from megamoe.config import MoEConfig  # noqa: E402
from megamoe.kernels import flag_words, peer_rows  # noqa: E402
from megamoe.plan import plan_memory  # noqa: E402
from tests.support.exchange_sim import (  # noqa: E402
    Sizes,
    World,
    add_combine,
    add_dispatch,
    add_movements,
    check_combine,
    check_dispatch,
    check_movements,
    expert_results,
    make_tokens,
)
from tests.support.gluon_sim import POLICIES, Deadlock  # noqa: E402

TWO = Sizes()
THREE = Sizes(ranks=3, tokens=11, top_k=3, experts=6, hidden=144)
ONE = Sizes(ranks=1, experts=3)
TWO_FP8 = Sizes(fp8=True)
THREE_FP8 = Sizes(ranks=3, tokens=11, top_k=3, experts=6, hidden=272, fp8=True)
WORLDS = {"2": TWO, "3": THREE, "1": ONE, "2 fp8": TWO_FP8, "3 fp8": THREE_FP8}


@pytest.fixture(params=["one launch", "several launches"])
def launches(request, monkeypatch):
    """Both ways in which a movement is launched, at the same small sizes."""
    if request.param == "several launches":
        monkeypatch.setattr(peer_rows, "FUSED_ENTRIES", 0)
        monkeypatch.setattr(peer_rows, "FEW_BYTES", 0)


def counts_of(sizes: Sizes, call: int) -> list[int]:
    """Tokens of each rank: uneven, full, and none on each rank in turn."""
    choices = [sizes.tokens, 0, max(sizes.tokens - 3, 1), 1]
    return [choices[(rank + call) % 4] for rank in range(sizes.ranks)]


def exchange(
    sizes: Sizes, policy: str, seed: int, routings=("random", "holes", "random"), sms: int = 2, movements: str = ""
) -> None:
    """Several dispatches and combines one after another: nothing of one may reach another."""
    world = World(sizes)
    counts = [counts_of(sizes, call) for call in range(4)]
    done = add_movements(world, movements or "DC" * len(routings), counts, routings, sms)
    world.run(policy, seed)
    check_movements(world, done)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world", ["2", "3 fp8"])
def test_every_policy(world, policy, launches, seed):
    exchange(WORLDS[world], policy, seed)


@pytest.mark.parametrize("world", WORLDS)
def test_exchange(world, launches, seed):
    exchange(WORLDS[world], "random", seed)


@pytest.mark.parametrize("routing", ["one", "none", "twice", "holes"])
def test_routing(routing, launches, seed):
    for sizes in (TWO, THREE_FP8):
        exchange(sizes, "random", seed, (routing, "random"))


@pytest.mark.parametrize("movements", ["DDCCDC", "DCDDDCC", "DPRCCD"])
@pytest.mark.parametrize("world", ["2 fp8", "3", "1"])
def test_orders_of_movements(world, movements, launches, seed):
    """Two of a kind in a row wait for the earlier one, others do not; and combines in a row have other routings."""
    exchange(WORLDS[world], "random", seed, ("random", "holes", "twice"), 4, movements)


@pytest.mark.parametrize("sms", [1, 3, 5])
def test_any_number_of_programs(sms, launches, seed):
    exchange(THREE, "pct", seed, sms=sms)


@pytest.mark.parametrize("sms", [1, 2, 3, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_combine_in_steps(ranks, sms, seed, monkeypatch):
    """Fewer tokens than steps, and more: some of a rank's are announced by the first, none by the last."""
    monkeypatch.setattr(peer_rows, "FEW_BYTES", 0)
    for tokens, movements in ((1, "DCC"), (7, "DCDC"), (39, "DCC")):
        exchange(Sizes(ranks, tokens, 2, 6, 16), "random", seed, ("random", "holes"), sms, movements)


def test_combine_in_fewer_steps(seed, monkeypatch):
    """Neither few tokens nor many."""
    monkeypatch.setattr(peer_rows, "FEW_BYTES", 1)
    monkeypatch.setattr(peer_rows, "SOME", 1 << 30)
    for sizes in (TWO, THREE):
        exchange(sizes, "random", seed, ("random", "holes"), 2, "DCCDC")


@pytest.mark.parametrize("steps", [2, 4, 16])
def test_any_number_of_steps(steps, seed, monkeypatch):
    monkeypatch.setattr(peer_rows, "FEW_BYTES", 0)
    monkeypatch.setattr(peer_rows, "STEPS", steps)
    exchange(Sizes(2, 21, 2, 6, 16), "lazy", seed, ("random", "holes"), 4, "DCCDC")


def test_combines_with_and_without_steps(seed, monkeypatch):
    """They count alike: a buffer serves both."""
    world, done = World(TWO), []
    for few in (0, 1 << 30, 0):
        monkeypatch.setattr(peer_rows, "FEW_BYTES", few)
        done += add_movements(world, "DCC", [[20, 7]], ["holes"], 4)
    world.run("random", seed)
    check_movements(world, done)


@pytest.mark.parametrize("sms", [4, 8, 16])
@pytest.mark.parametrize("sizes", [Sizes(2, 8, 3, 6, 2064), Sizes(2, 8, 3, 6, 272, fp8=True)], ids=["bf16", "fp8"])
@pytest.mark.parametrize("early", [True, False])
def test_tiles_of_one_to_four_tokens(sizes, sms, early, seed, monkeypatch):
    """Read before their rows are known, and after."""
    if not early:
        monkeypatch.setattr(peer_rows, "EARLY_TOKENS", 0)
    exchange(sizes, "random", seed, ("random", "holes"), sms, "DC")


def test_sums_of_few_tokens_and_of_more(seed, monkeypatch):
    """Of several turns and several pieces of a row."""
    for wide in (3, 4):
        monkeypatch.setattr(peer_rows, "WIDE_TOKENS", wide)
        exchange(Sizes(2, 3, 2, 4, 8208), "random", seed, ("random", "holes"), 1, "DC")


def constants_of(tokens: int, dtype: torch.dtype, hidden: int = 7168) -> tuple[dict, dict]:
    """Of the kernels of a dispatch and a combine of two ranks on 132 SMs."""
    plan = plan_memory(MoEConfig(hidden, 128, 64, 8, precision="fp8"), 2, tokens)
    views = {each.name: torch.empty(each.nbytes, dtype=torch.uint8, device="meta") for each in plan.regions}
    memory = peer_rows.peer_memory(plan, views, 0, torch.empty(2, dtype=torch.int64, device="meta"), 1)
    table = peer_rows.empty_table(memory, 32, plan.most_rows, torch.device("meta"))
    x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta")
    index = torch.empty(tokens, 8, dtype=torch.int64, device="meta")
    rows = torch.empty(plan.most_rows, hidden, dtype=dtype, device="meta")
    scales = torch.empty(hidden // 128, plan.most_rows, device="meta").t() if dtype == torch.float8_e4m3fn else None
    common = dict(num_experts=64, num_sms=None, all_sms=132)
    *_, dispatch = peer_rows.dispatch(
        memory, x, (index, index.float()), table, rows, scales, num_tokens=tokens, zero_padding=False, **common
    )
    (combine,) = peer_rows.combine(memory, x.new_empty(rows.shape), None, index, table, x, None, **common)
    return dispatch.arguments, combine.arguments


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_few_tokens_are_read_early_and_summed_in_small_pieces(dtype):
    for tokens, early, columns, ahead in ((1, True, 2048, 2), (63, True, 2048, 2), (64, True, 4096, 1)):
        dispatch, combine = constants_of(tokens, dtype)
        assert dispatch["AHEAD"] is early and dispatch["ROWS"] == 1
        assert (combine["STEPS"], combine["SUM_COLS"], combine["AHEAD"]) == (1, columns, ahead)
    for tokens in (65, 128, 256, 1024):
        dispatch, combine = constants_of(tokens, dtype)
        assert dispatch["AHEAD"] is False
        assert combine["AHEAD"] == 1 and combine["SUM_COLS"] == (4096 if tokens < 1024 else 8192)


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (8, 5), (9, 2), (33, 1), (17, 8)])
def test_sizes_around_tiles(tokens, top_k, launches, seed):
    exchange(Sizes(2, tokens, top_k, 8, 144), "random", seed, ("random", "holes"))


def test_many_experts(launches, seed):
    """More experts than 16, no power of two."""
    exchange(Sizes(2, 70, 8, 70, 16), "random", seed, ("random",))


@pytest.mark.parametrize(("tokens", "top_k"), [(130, 8), (64, 17)])
def test_more_pairs_than_one_look_at_the_lists_takes(tokens, top_k, seed):
    """Of tokens that are read after the count of rows, and beside it."""
    sizes = Sizes(2, tokens, top_k, 70, 16)
    assert 2 * tokens * triton.next_power_of_2(top_k) > 2048
    exchange(sizes, "random", seed, ("random",))


def test_expert_of_many_rows(launches, seed):
    """More than one block of 128 rows."""
    exchange(Sizes(2, 90, 2, 4, 16), "random", seed, ("one", "twice"))


def test_plan_without_rows_and_reused_tables(launches, seed):
    """The table first, then rows by it, twice: what training does."""
    for sizes in (TWO, THREE_FP8):
        world = World(sizes)
        tokens = make_tokens(sizes, counts_of(sizes, 0), "holes")
        add_dispatch(world, tokens, move=False)
        world.run("random", seed)
        check_dispatch(world, tokens)
        for turn in range(2):
            for mine in tokens:
                mine.x = torch.randn_like(mine.x, dtype=torch.float32).bfloat16()
            add_dispatch(world, tokens, reuse=True)
            world.run("slowrank", seed + turn)
            check_dispatch(world, tokens)
        assert not any(any(error) for error in world.errors)


def test_padding_is_left_alone_where_not_asked_for(launches, seed):
    world = World(TWO)
    tokens = make_tokens(TWO, [20, 3])
    add_dispatch(world, tokens, zero_padding=False)
    world.run("random", seed)
    check_dispatch(world, tokens, zero_padding=False)
    for mine in tokens:
        starts, ends = mine.table.starts, mine.table.starts + mine.table.counts
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            assert mine.rows[start:end].isfinite().all()
            assert mine.rows[end : (end + 127) // 128 * 128].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dtypes_of_inputs_and_results(dtype, launches, seed):
    world = World(TWO_FP8)
    tokens = make_tokens(TWO_FP8, [20, 3])
    for mine in tokens:
        mine.x = mine.x.to(dtype)
    add_dispatch(world, tokens)
    rows = expert_results(world, tokens)
    add_combine(world, tokens, rows, out_dtype=dtype)
    world.run("random", seed)
    check_dispatch(world, tokens)
    check_combine(world, tokens, rows)


def test_rows_beyond_the_capacity_are_dropped_and_reported(launches, seed):
    world = World(TWO)
    tokens = make_tokens(TWO, [20, 20])
    for mine in tokens:
        mine.index[:] = torch.tensor([0, 3])
    # 40 rows for experts 0 and 3, the others of each rank have none: one block is enough, none is not.
    add_dispatch(world, tokens, capacity=128)
    world.run("random", seed)
    assert not any(any(error) for error in world.errors)
    for mine in tokens:
        mine.index[:, 1] = mine.index[:, 0] + 1
        mine.index[:, 0] = 0
    add_dispatch(world, tokens, capacity=128)
    world.run("random", seed)
    assert [error[:3] for error in world.errors] == [[flag_words.CAPACITY, 256, 128], [0, 0, 0]]
    table = tokens[0].table
    assert table.counts.tolist() == [40, 0]
    assert (table.starts <= 128).all() and table.pair_to_row[:, :20].max() < 128
    assert torch.equal(tokens[0].rows[:20], tokens[0].x)


def test_wild_tables_of_counts_stay_within_bounds(seed):
    """Whatever lies in a peer's memory, nothing outside the pool is written: the simulator would say so."""
    world = World(TWO)
    for memory in world.memories:
        memory.list_index.copy_(torch.randint(-(2**31), 2**31 - 1, memory.list_index.shape))
    tokens = make_tokens(TWO, [20, 20], "holes")
    add_dispatch(world, tokens)
    world.run("random", seed)
    check_dispatch(world, tokens)


# ---------------------------------------------------------------- waits


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_does_not_dispatch_is_named(missing, launches, seed):
    world = World(THREE)
    others = [rank for rank in range(3) if rank != missing]
    tokens = make_tokens(THREE, [5, 5, 5])
    add_dispatch(world, tokens, ranks=others)
    world.run_until_given_up(seed)
    for rank in others:
        assert world.errors[rank] == [flag_words.READY + 1, missing, 1, 0]
    assert world.errors[missing] == [0, 0, 0, 0]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_does_not_come_back_is_named(missing, launches, seed):
    """It may still be reading the others' tokens: they do not write new ones."""
    world = World(THREE)
    others = [rank for rank in range(3) if rank != missing]
    tokens = make_tokens(THREE, [5, 5, 5])
    for _ in range(2):
        add_dispatch(world, tokens)
    world.run("random", seed)
    add_dispatch(world, tokens, ranks=others)
    world.run_until_given_up(seed)
    for rank in others:
        assert world.errors[rank] == [flag_words.PULLED + 1, missing, 2, 1]
    assert world.errors[missing] == [0, 0, 0, 0]


@pytest.mark.parametrize("earlier", [0, 1])
def test_a_rank_that_does_not_combine_is_named(earlier, launches, seed):
    world = World(TWO)
    tokens = make_tokens(TWO, [5, 5])
    for turn in range(earlier + 1):
        add_dispatch(world, tokens)
        rows = expert_results(world, tokens)
        if turn < earlier:
            add_combine(world, tokens, rows)
    world.run("random", seed)
    add_combine(world, tokens, rows, ranks=[1])
    world.run_until_given_up(seed)
    assert world.errors == [[0, 0, 0, 0], [flag_words.SCATTERED + 1, 0, earlier + 1, earlier]]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_has_not_ended_its_last_combine_is_named(missing, launches, seed):
    """It may still be summing its slots: they are not written anew."""
    world = World(TWO)
    tokens = make_tokens(TWO, [5, 5])
    add_dispatch(world, tokens)
    rows = expert_results(world, tokens)
    add_combine(world, tokens, rows)
    world.run("random", seed)
    add_combine(world, tokens, rows, ranks=[1 - missing])
    world.run_until_given_up(seed)
    # Not a rank that waits in vain for the missing one itself.
    assert world.errors[1 - missing] == [flag_words.REDUCED + 1, missing, 1, 0]
    assert world.errors[missing] == [0, 0, 0, 0]


def test_waits_after_an_error_end_at_once(launches, seed):
    """And the first error stays."""
    world = World(TWO)
    tokens = make_tokens(TWO, [5, 5])
    add_dispatch(world, tokens, ranks=[0])
    first = world.run_until_given_up(seed)
    add_dispatch(world, tokens, ranks=[0])
    rows = torch.zeros(world.plan.most_rows, TWO.hidden, dtype=torch.bfloat16)
    add_combine(world, tokens, [rows, rows], ranks=[0])
    later = world.run_until_given_up(seed)
    assert world.errors == [[flag_words.READY + 1, 1, 1, 0], [0, 0, 0, 0]]
    assert later.nanoseconds < first.nanoseconds / 10


def test_fewer_tokens_in_a_table_than_there_are_are_no_endless_loop(seed, monkeypatch):
    """What a dispatch whose waits ended at once may leave."""
    monkeypatch.setattr(peer_rows, "FEW_BYTES", 0)
    world = World(TWO)
    tokens = make_tokens(TWO, [20, 20])
    add_dispatch(world, tokens, ranks=[0])
    world.run_until_given_up(seed)
    tokens[0].table.sizes[1:] = torch.tensor([1, 0])
    rows = torch.zeros(world.plan.most_rows, TWO.hidden, dtype=torch.bfloat16)
    add_combine(world, tokens, [rows, rows], ranks=[0])
    world.run_until_given_up(seed)
    assert world.errors == [[flag_words.READY + 1, 1, 1, 0], [0, 0, 0, 0]]


def test_a_missing_rank_is_waited_for(seed):
    """Without a limit in sight the others sleep: they do not give up early."""
    world = World(TWO)
    add_dispatch(world, make_tokens(TWO, [5, 5]), ranks=[0])
    with pytest.raises(Deadlock, match="wait_all"):
        world.run("random", seed)


def test_barrier(seed):
    world = World(THREE)
    for policy in POLICIES:
        for rank in range(3):
            for _ in range(3):
                world.add(rank, peer_rows.barrier(world.memories[rank]))
        world.run(policy, seed)
    assert not any(any(error) for error in world.errors)
    for memory in world.memories:
        assert memory.state[flag_words.BARRIERS] == 3 * len(POLICIES) << flag_words.EPOCH_BITS


def test_a_rank_that_misses_a_barrier_is_named(seed):
    world = World(THREE)
    for rank in (0, 2):
        world.add(rank, peer_rows.barrier(world.memories[rank]))
    world.run_until_given_up(seed)
    assert world.errors[0] == world.errors[2] == [flag_words.BARRIER + 1, 1, 1, 0]
