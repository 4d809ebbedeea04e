"""``rebalance``: the same bits under every placement, bounded moves, in place; compiled code follows."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.distributed as dist

from megamoe import (
    ExpertPlacement,
    Experts,
    MoE,
    expert_load,
    rebalance,
)
from megamoe.layers import rebalance as module
from megamoe.layers.parallel import local_tensor
from megamoe.placement import copies_to_move
from tests.support.placed_model import HIDDEN, NUM_EXPERTS, TOP_K, WIDTH, Model, layer, whole
from tests.support.placements import random_placement
from tests.support.processes import run_ranks


def fill(experts: Experts) -> None:
    """Every value tells its logical expert, its row and its column: any misplaced one is seen."""
    for count, (_, parameter) in enumerate(experts.named_parameters(recurse=False)):
        local = local_tensor(parameter.detach())
        for slot, expert in enumerate(experts.slots.held):
            size = local[slot].numel()
            local[slot].copy_(((expert + 1) * 1000 + count * 100 + torch.arange(size) / size).view_as(local[slot]))


def check_contents(experts: Experts, before: dict[str, torch.Tensor]) -> None:
    """Each slot in use holds its expert of ``before [E, ...]``."""
    for name, parameter in experts.named_parameters(recurse=False):
        local = local_tensor(parameter)
        assert local.shape[0] == experts.placement.num_slots, name
        for slot, expert in enumerate(experts.slots.held):
            assert torch.equal(local[slot], before[name][expert]), (name, slot, expert)


def exact_call(experts: Experts, index: torch.Tensor) -> torch.Tensor:
    """Outputs in small integers: no sum is rounded, whatever its order, so that they show nothing but wrong rows."""
    x = torch.randint(-2, 3, (index.shape[0], HIDDEN), generator=torch.Generator().manual_seed(1)).float()
    weights = torch.ones(index.shape) + torch.arange(index.shape[1])
    return experts(x, index, weights)


def exact_experts(group) -> Experts:
    experts = Experts(layer(activation="relu2", bias=True), group).eval()
    for parameter in experts.parameters():
        local = local_tensor(parameter.detach())
        generator = torch.Generator().manual_seed(experts.slots.rank)
        local.copy_(torch.randint(-2, 3, local.shape, generator=generator).float())
    return experts


def random_ids(rng: random.Random, num_tokens: int) -> torch.Tensor:
    ids = [rng.choice([*range(NUM_EXPERTS), 0, 0, 0, -1]) for _ in range(3 * num_tokens)]
    return torch.tensor(ids, dtype=torch.int64).view(num_tokens, 3)


# ---------------------------------------------------------------- the same bits everywhere


def check_sequence(rank: int, world_size: int, seed: int) -> None:
    """Random placements, one after another, and back; ranks with 0, 5, 10 ... tokens."""
    group = dist.group.WORLD if world_size > 1 else None
    shared, own = random.Random(seed), random.Random(seed + rank + 1)
    torch.manual_seed(seed % 2**31)
    model = Model(group).eval()
    exact = exact_experts(group)
    state = {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}
    layers = [moe.experts for moe in model.layers]
    before = [{name: whole(p).clone() for name, p in experts.named_parameters()} for experts in [*layers, exact]]
    even = ExpertPlacement.even(NUM_EXPERTS, world_size)
    with torch.no_grad():
        x, index = torch.randn(5 * rank, HIDDEN), random_ids(own, 7 * (world_size - 1 - rank) + 3 * (world_size == 1))
        outputs, exact_output = model(x), exact_call(exact, index)
        placements = []
        for replicas in (0, 3, 0, 8, 1):
            placements += [random_placement(shared, NUM_EXPERTS, world_size, replicas), even]
        for placement in placements[: -1 if seed % 2 else None]:
            one_row = shared.choice([1, 200, 1 << 20])
            old = layers[0].placement
            assert rebalance(model, placement, max_bytes=one_row) == 2 * copies_to_move(old, placement)
            rebalance(exact, placement, max_bytes=one_row)
            for experts, values in zip([*layers, exact], before, strict=True):
                assert experts.placement == placement
                check_contents(experts, values)
            assert torch.equal(exact_call(exact, index), exact_output), placement
            if sum(map(len, placement.experts_by_rank)) == NUM_EXPERTS:
                assert torch.equal(model(x), outputs), placement
            else:
                # Replicas share an expert's rows: BLAS may round a product of few rows in another way.
                torch.testing.assert_close(model(x), outputs, rtol=1e-5, atol=1e-5)
        rebalance(model, even)
        assert torch.equal(model(x), outputs)
    now = model.state_dict()
    assert list(now) == list(state)
    for name, tensor in now.items():
        assert torch.equal(whole(tensor), state[name]), name
    # Training goes on as if nothing had been.
    model(x).sum().backward()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_same_bits_under_every_placement(world_size, seed):
    if world_size == 1:
        check_sequence(0, 1, seed)
    else:
        run_ranks(check_sequence, world_size, seed)


def check_dtypes(rank: int, world_size: int, seed: int) -> None:
    rng = random.Random(seed)
    for dtype, precision in ((torch.bfloat16, "bf16"), (torch.float64, "bf16"), (torch.float32, "fp8")):
        model = Model(dist.group.WORLD, precision=precision).to(dtype).eval()
        x = torch.randn(6, HIDDEN, dtype=dtype)
        with torch.no_grad():
            expected = model(x)
            for _ in range(2):
                rebalance(model, random_placement(rng, NUM_EXPERTS, world_size))
                assert torch.equal(model(x), expected), dtype
            assert all(p.dtype == dtype for moe in model.layers for p in moe.experts.parameters())


def test_dtypes_and_precisions(seed):
    run_ranks(check_dtypes, 2, seed)


# ---------------------------------------------------------------- what moves


def check_moves(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    experts = Experts(layer(), group).eval()
    fill(experts)
    before = {name: whole(p).clone() for name, p in experts.named_parameters()}
    messages = []
    original = dist.all_to_all_single

    def watched(received, message, receives, sends, **options):
        messages.append((received.numel() + message.numel(), sends))
        return original(received, message, receives, sends, **options)

    dist.all_to_all_single = watched
    expert_bytes = 4 * (2 * WIDTH * HIDDEN + HIDDEN * WIDTH)
    try:
        pointers = {name: local_tensor(p).data_ptr() for name, p in experts.named_parameters()}
        parameters = list(experts.parameters())
        # A swap between the ranks, and one within rank 1.
        swapped = ExpertPlacement.from_lists([[4, 1, 2, 3], [0, 5, 7, 6]])
        assert rebalance(experts, swapped) == 2
        assert [sum(sends) for _, sends in messages] == ([2 * WIDTH * HIDDEN * 4, HIDDEN * WIDTH * 4] if rank == 0 else
                                                         [6 * WIDTH * HIDDEN * 4, 3 * HIDDEN * WIDTH * 4])  # fmt: skip
        assert sum(sends[1 - rank] for _, sends in messages) == expert_bytes
        check_contents(experts, before)
        # In place: what holds the memory sees the new experts.
        assert all(a is b for a, b in zip(parameters, experts.parameters(), strict=True))
        assert pointers == {name: local_tensor(p).data_ptr() for name, p in experts.named_parameters()}
        # Nothing to do is nothing sent.
        messages.clear()
        assert rebalance(experts, swapped) == 0 and not messages
        # In slices: a cycle through all slots of both ranks.
        cycle = ExpertPlacement.from_lists([[6, 4, 1, 2], [3, 0, 5, 7]])
        limit = 2 * 4 * HIDDEN * 5
        assert rebalance(experts, cycle, max_bytes=2 * limit) == 2
        sizes = [size for size, _ in messages]
        assert len(sizes) > 6 and max(sizes) <= 2 * limit
        check_contents(experts, before)
        # Another number of slots: new parameters, that train as the old ones did or do not.
        experts.down_proj.requires_grad_(False)
        rebalance(experts, ExpertPlacement.from_lists([[6, 4, 1, 2, 0], [3, 0, 5, 7]]))
        check_contents(experts, before)
        assert experts.gate_up_proj.requires_grad and not experts.down_proj.requires_grad
        if rank == 1:
            assert not local_tensor(experts.down_proj)[4].any(), "unused slots are zero"
        rebalance(experts, ExpertPlacement.even(NUM_EXPERTS, 2))
        assert all(torch.equal(whole(p), before[name]) for name, p in experts.named_parameters())
    finally:
        dist.all_to_all_single = original


def test_only_what_changes_moves_and_in_bounded_messages():
    run_ranks(check_moves, 2)


def test_sources_share_the_sending():
    """Of expert 0, which three ranks have, each sends one copy to the three that want it."""
    old = ExpertPlacement.from_lists([[0], [0], [0], [1], [2], [3]])
    new = ExpertPlacement.from_lists([[0], [0], [0], [1, 0], [2, 0], [3, 0]])
    moves = module._plan_moves(old, new)
    assert [(move.source, move.rank, move.slot) for move in moves] == [(0, 3, 1), (1, 4, 1), (2, 5, 1)]
    # What a rank has already, it does not get from another one.
    moves = module._plan_moves(
        ExpertPlacement.from_lists([[0, 1], [1, 2]]), ExpertPlacement.from_lists([[1, 0], [2, 1]])
    )
    assert [(move.source, move.source_slot, move.rank, move.slot) for move in moves] == [
        (0, 1, 0, 0),
        (0, 0, 0, 1),
        (1, 1, 1, 0),
        (1, 0, 1, 1),
    ]


def test_one_layer_at_a_time_and_placements_per_layer(seed):
    model = Model().eval()
    x = torch.randn(9, HIDDEN)
    first, second = ExpertPlacement.from_lists([[*range(7, -1, -1)]]), ExpertPlacement.from_lists([[*range(8), 0]])
    with torch.no_grad():
        expected = model(x)
        for index, placement in enumerate((first, second)):
            rebalance(model, [first, second], layers=[index])
            assert model.layers[index].experts.placement == placement
            torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
        rebalance(model, first.to_dict())
        assert [moe.experts.placement for moe in model.layers] == [first, first]
        assert torch.equal(model(x), expected)
        # In inference mode too, and the parameters stay writable outside it.
        with torch.inference_mode():
            rebalance(model, second)
            model(x)
        model.layers[0].experts.down_proj.mul_(1)


def test_copies_of_a_placed_layer(seed):
    moe = MoE(layer()).eval()
    rebalance(moe, ExpertPlacement.from_lists([[3, 1, 0, 2, 4, 5, 6, 7]]))
    x = torch.randn(9, HIDDEN)
    with torch.no_grad():
        expected = moe(x)
        other = copy.deepcopy(moe)
        assert torch.equal(other(x), expected)
        rebalance(moe, ExpertPlacement.even(NUM_EXPERTS, 1))
        assert torch.equal(other(x), expected) and torch.equal(moe(x), expected)
        assert not torch.equal(other.experts.down_proj, moe.experts.down_proj)
    assert "experts 3, 1, 0, 2, 4, 5, 6, 7 of 1 ranks" in repr(other) and "of 1 ranks" not in repr(moe)


def test_tables_move_with_the_layer():
    moe = MoE(layer()).eval()
    rebalance(moe, ExpertPlacement.from_lists([[3, 1, 0, 2, 4, 5, 6, 7]]))
    moe.bfloat16().to("meta")
    slots = moe.experts.slots
    assert slots.replicas.is_meta and slots.rows_received.is_meta and slots.replicas.dtype == torch.int64
    moe.to_empty(device="cpu").reset_parameters()
    assert slots.translate(torch.arange(4)[:, None]).flatten().tolist() == [2, 1, 3, 0]
    with torch.no_grad():
        assert moe(torch.randn(5, HIDDEN)).isfinite().all()
    assert expert_load(moe).sum() == 5 * TOP_K


def test_reset_parameters_follows_the_placement():
    moe = Experts(layer())
    placed = Experts(layer())
    rebalance(placed, ExpertPlacement.from_lists([[3, 1, 0, 2, 4, 5, 6, 7, 3]]))
    for experts in (moe, placed):
        torch.manual_seed(5)
        experts.reset_parameters()
    check_contents(placed, {name: p.detach() for name, p in moe.named_parameters()})


# ---------------------------------------------------------------- compiled code


def test_compiled_code_sees_new_placements(seed):
    """While the number of slots stays nothing is compiled again, and rows are counted."""
    rng = random.Random(seed)
    moe = MoE(layer(activation="relu2")).eval()
    rebalance(moe, ExpertPlacement.even(NUM_EXPERTS, 1, num_slots=10))
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    call = torch.compile(moe, fullgraph=True, backend=backend)
    x = torch.randn(9, HIDDEN)
    with torch.no_grad():
        expected = moe(x)
        expert_load(moe)
        for replicas in (0, 2, 1):
            torch.testing.assert_close(call(x), expected, rtol=1e-5, atol=1e-5)
            assert expert_load(moe).sum() == 9 * TOP_K
            rebalance(moe, random_placement(rng, NUM_EXPERTS, 1, replicas, num_slots=10))
    assert len(compiled) == 1
