"""``expert_load``: rows are counted once, where they arrive, under every placement."""

from __future__ import annotations

import functools
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

import megamoe
from megamoe import (
    ExpertPlacement,
    MoE,
    RouterConfig,
    balance_placement,
    expert_load,
    rebalance,
)
from tests.support.placed_model import HIDDEN, NUM_EXPERTS, TOP_K, Model, layer
from tests.support.placements import random_placement
from tests.support.processes import run_ranks


def count_ids(counts: torch.Tensor, router: nn.Module, inputs: tuple, routing: megamoe.Routing) -> None:
    counts += routing.topk_index.flatten().bincount(minlength=NUM_EXPERTS)


def check_load(rank: int, world_size: int, seed: int) -> list[list[int]]:
    torch.manual_seed(seed % 2**31)
    group = dist.group.WORLD if world_size > 1 else None
    model = Model(group, router=RouterConfig(aux_loss_coef=0.1))
    x = torch.randn(3 + 4 * rank, HIDDEN)
    expected = torch.zeros(2, NUM_EXPERTS, dtype=torch.int64)
    for moe, row in zip(model.layers, expected, strict=True):
        moe.router.register_forward_hook(functools.partial(count_ids, row))
    # In training the routers count, in evaluation the experts.
    model(x).sum().backward()
    trained, _ = expected.clone(), expected.zero_()
    assert not expert_load(model).any()
    model.eval()
    assert torch.equal(megamoe.update_expert_biases(model), summed(trained, group))
    rng = random.Random(seed)
    with torch.no_grad():
        for replicas in (0, 2, 5):
            model(x)
            model(x[:1])
            rebalance(model, random_placement(rng, NUM_EXPERTS, world_size, replicas))
        model(x[:0])
        model(x)
    load = expert_load(model, reset=False)
    assert load.dtype == torch.int64 and torch.equal(load, summed(expected, group))
    assert torch.equal(expert_load(model), load) and not expert_load(model).any()
    # Each rank counts what it receives.
    index = torch.full((4, 2), -1)
    index[rank:, 0] = 3
    experts = model.layers[0].experts
    rebalance(experts, ExpertPlacement.even(NUM_EXPERTS, world_size))
    with torch.no_grad():
        experts(torch.randn(4, HIDDEN), index, torch.ones(4, 2))
    here = 3 in experts.slots.held
    assert experts.slots.rows_received.tolist() == [0, 0, 0, here * sum(4 - r for r in range(world_size)), 0, 0, 0, 0]
    placement = balance_placement(load, world_size, -(-NUM_EXPERTS // world_size) + 1)
    rebalance(model, placement)
    return [[*map(list, p.experts_by_rank)] for p in placement]


def summed(counts: torch.Tensor, group) -> torch.Tensor:
    counts = counts.clone()
    if group is not None:
        dist.all_reduce(counts, group=group)
    return counts


@pytest.mark.parametrize("world_size", [1, 2])
def test_expert_load(world_size, seed):
    if world_size == 1:
        check_load(0, 1, seed)
    else:
        first, second = run_ranks(check_load, 2, seed)
        assert first == second, "every rank computes the same placements"


def test_expert_load_of_layers_of_several_sizes():
    model = nn.ModuleList([MoE(layer()), MoE(layer(num_experts=3)), nn.Linear(2, 2)]).eval()
    for moe in model[:2]:
        with torch.no_grad():
            moe(torch.randn(5, HIDDEN))
    load = expert_load(model)
    assert load.shape == (2, NUM_EXPERTS) and load.sum(dim=1).tolist() == [5 * TOP_K] * 2
    assert not load[1, 3:].any()
    assert expert_load(nn.Linear(2, 2)).shape == (0, 0)
