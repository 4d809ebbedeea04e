"""What ``rebalance`` refuses, on all ranks at once, and what a layer refuses under a placement."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from megamoe import (
    ExpertPlacement,
    MegaMoEError,
    MoE,
    expert_load,
    rebalance,
)
from tests.support.errors import fails
from tests.support.placed_model import HIDDEN, NUM_EXPERTS, WIDTH, Model, layer, whole
from tests.support.placements import random_placement
from tests.support.processes import run_ranks

# ---------------------------------------------------------------- refused under a placement


PLACED = ExpertPlacement.from_lists([[1, 0, 2, 3, 4, 5, 6, 7]])


@pytest.mark.parametrize("placement", [PLACED, ExpertPlacement.from_lists([[*range(8), 0]])], ids=["order", "replica"])
def test_training_and_checkpoints_need_the_default_placement(placement, seed):
    moe = MoE(layer())
    state, x = moe.state_dict(), torch.randn(9, HIDDEN)
    rebalance(moe, placement)
    refused = [lambda: moe(x), moe.state_dict, lambda: moe.load_state_dict(state), lambda: moe.experts.state_dict()]
    for call, action in zip(refused, ["forward", "state_dict", "load_state_dict", "state_dict"], strict=True):
        with fails(ValueError, "placement.is_default", False, action), torch.enable_grad():
            call()
    with torch.no_grad():
        moe(x)
    # Frozen experts do not train: gradients flow through them.
    moe.experts.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    moe(leaf).sum().backward()
    assert leaf.grad.any()
    moe.experts.requires_grad_(True)
    for parameter in moe.experts.parameters():
        parameter.grad = torch.ones_like(parameter)
    rebalance(moe, ExpertPlacement.even(NUM_EXPERTS, 1))
    # Gradients of other experts are none.
    assert all(parameter.grad is None for parameter in moe.experts.parameters())
    moe.load_state_dict(state)
    moe(x).sum().backward()


def check_checkpoint(rank: int, world_size: int, folder: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = Model(dist.group.WORLD)
    expected = {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}
    rebalance(model, random_placement(random.Random(seed), NUM_EXPERTS, world_size, 3))
    with pytest.raises(MegaMoEError, match=r"state_dict needs the default placement.*ExpertPlacement.even\(8, 2\)"):
        dcp.save(model.state_dict(), checkpoint_id=folder)
    rebalance(model, ExpertPlacement.even(NUM_EXPERTS, world_size))
    dcp.save(model.state_dict(), checkpoint_id=folder)
    other = Model(dist.group.WORLD).state_dict()
    dcp.load(other, checkpoint_id=folder)
    assert all(torch.equal(whole(tensor), expected[name]) for name, tensor in other.items())


def test_distributed_checkpoint(tmp_path, seed):
    run_ranks(check_checkpoint, 2, str(tmp_path / "checkpoint"), seed)


# ---------------------------------------------------------------- bad placements


def everywhere(call) -> str:
    """The message of the error that ``call`` raises."""
    with pytest.raises(MegaMoEError) as caught:
        call()
    return str(caught.value)


def check_refusals(rank: int, world_size: int) -> list[str]:
    model = Model(dist.group.WORLD).eval()
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(rank))
    even = ExpertPlacement.even(NUM_EXPERTS, world_size)
    swapped = ExpertPlacement.from_lists([[4, 1, 2, 3], [0, 5, 6, 7]])
    broken = {**even.to_dict(), "experts_by_rank": [[0, 1, 2, 3], [4, 5, 6, 6]]}
    with torch.no_grad():
        expected = model(x)
    calls = [
        lambda: rebalance(model, swapped if rank else even),
        lambda: rebalance(model, broken if rank else even.to_dict()),
        lambda: rebalance(model, [swapped] * (2 + rank)),
        lambda: rebalance(model, swapped, layers=[rank]),
        # Each would meet the other layer's rows.
        lambda: rebalance(model, swapped, layers=[rank, 1 - rank]),
        lambda: rebalance(model, swapped, max_bytes=1000 + rank),
        lambda: rebalance(model, ExpertPlacement.even(4, 2) if rank else swapped),
        lambda: rebalance(model, ExpertPlacement.even(8, 4)),
        lambda: rebalance(model, 5),
    ]
    messages = [everywhere(call) for call in calls]
    # Nothing has moved, and the ranks are still in step.
    with torch.no_grad():
        assert torch.equal(model(x), expected)
        rebalance(model, swapped)
        assert torch.equal(model(x), expected)
    return messages


def test_all_ranks_refuse_together():
    results = run_ranks(check_refusals, 2)
    rules = [
        ("placement = [1]: must be equal on all ranks", None),
        ("placement = {1: 'experts without a slot = [7]: must be none.", "experts without a slot = [7]: must be none."),
        ("placement = {1: 'len(placement) = 3", "len(placement) = 3: must be the 2 Experts layers"),
        ("layers = [1]: must be equal on all ranks", None),
        ("layers = [1]: must be equal on all ranks", None),
        ("max_bytes = [1]: must be equal on all ranks", None),
        ("placement = {1: \"placement.num_experts = 4", "placement.num_experts = 4: must be the layer's 8"),
        ("placement.ep_size = 4: must be the layer's 2", None),
        ("placement = 'int': must be an ExpertPlacement", None),
    ]  # fmt: skip
    for messages, which in zip(results, (0, 1), strict=True):
        for message, rule in zip(messages, rules, strict=True):
            start = rule[which] or rule[0]
            assert message.startswith(start), message


@pytest.mark.parametrize(
    ("options", "kind", "name", "value", "rule"),
    [
        ({"placement": None}, TypeError, "placement", "NoneType", "must be an ExpertPlacement"),
        ({"placement": "x"}, TypeError, "placement", "str", "must be an ExpertPlacement"),
        ({"placement": [PLACED]}, ValueError, "len(placement)", 1, "must be the 2 Experts layers"),
        ({"layers": [2]}, ValueError, "layers", 2, "must be in [0, 2)"),
        ({"layers": [-1]}, ValueError, "layers", -1, "must be in [0, 2)"),
        ({"layers": 0}, TypeError, "layers", 0, "must be a sequence"),
        ({"max_bytes": 0}, ValueError, "max_bytes", 0, "must be at least 1"),
        ({"placement": {}}, ValueError, "ExpertPlacement keys", [], "must be num_experts"),
    ],
)
def test_refused(options, kind, name, value, rule):
    with fails(kind, name, value, rule):
        rebalance(Model(), **{"placement": PLACED, **options})


def test_models_that_cannot_be_rebalanced():
    with fails(ValueError, "model", "Linear", "must have Experts layers"):
        rebalance(nn.Linear(2, 2), PLACED)
    with fails(ValueError, "gate_up_proj", "meta", "has no data to move"):
        rebalance(MoE(layer(), device="meta"), PLACED)
    moe = MoE(layer())
    moe.experts.down_proj = nn.Parameter(moe.experts.down_proj.detach()[:4])
    with fails(ValueError, "down_proj.shape", [4, HIDDEN, WIDTH], "must have this rank's 8 slots in dimension 0"):
        rebalance(moe, PLACED)
    model = Model()
    model.layers[0].experts.group = object()
    for call in (lambda: rebalance(model, PLACED), lambda: expert_load(model)):
        with fails(ValueError, "model (ranks per layer)", [1, 1], "layers must share one expert-parallel group"):
            call()
