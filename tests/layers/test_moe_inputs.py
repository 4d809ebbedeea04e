"""``MoE``: what a caller may pass: routers of their own, and wrong arguments, which raise with all four parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megamoe
from megamoe import MoE, MoEConfig, Routing
from tests.support.errors import fails

HIDDEN = 24


def layer(**changes) -> MoEConfig:
    return MoEConfig(**{**dict(hidden_size=HIDDEN, intermediate_size=20, num_experts=6, top_k=2), **changes})


# ---------------------------------------------------------------- custom router


class FixedRouter(nn.Module):
    """Sends token t to experts t and t + 1; has none of the attributes of ``Router``."""

    def forward(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None) -> Routing:
        index = torch.arange(hidden_states.shape[0]).unsqueeze(1) + torch.arange(2)
        if token_mask is not None:
            index = index.masked_fill(~token_mask.unsqueeze(1), -1)
        return Routing(index % 6, torch.full(index.shape, 0.5))


def test_custom_router(seed):
    moe = MoE(layer(), router=FixedRouter())
    x, mask = torch.randn(2, 3, HIDDEN), torch.tensor([[True, False, True], [True] * 3])
    index = torch.tensor([[t, (t + 1) % 6] for t in range(6)])
    expected = moe.experts(x.view(6, HIDDEN), index, torch.full((6, 2), 0.5))
    assert torch.equal(moe(x).view(6, HIDDEN), expected)
    assert megamoe.update_expert_biases(moe).shape == (0, 0)
    megamoe.set_aux_loss_scale(moe, 0.5)
    assert moe(x, token_mask=mask).shape == x.shape


def test_reset_parameters_with_a_router_that_has_none(seed):
    moe = MoE(layer(), router=FixedRouter())
    before = moe.experts.down_proj.detach().clone()
    moe.reset_parameters()
    assert not torch.equal(moe.experts.down_proj, before)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("value", "argument", "shown", "kind", "rule"),
    [
        pytest.param(torch.ones(2, 3, 25), "hidden_states.shape", [2, 3, 25], ValueError, "must end in", id="width"),
        pytest.param(torch.ones(24, 3), "hidden_states.shape", [24, 3], ValueError, "must end in", id="transposed"),
        pytest.param(
            torch.ones(3, HIDDEN, dtype=torch.int64), "hidden_states.dtype", torch.int64, TypeError, "one of", id="ids"
        ),
        pytest.param(
            torch.ones(3, HIDDEN, dtype=torch.bool), "hidden_states.dtype", torch.bool, TypeError, "one of", id="bool"
        ),
        pytest.param(
            torch.ones(3, HIDDEN, device="meta"), "hidden_states.device", "meta", ValueError, "must be cpu", id="device"
        ),
    ],
)
def test_wrong_hidden_states(value, argument, shown, kind, rule):
    with fails(kind, argument, shown, rule):
        MoE(layer())(value)


@pytest.mark.parametrize("value", [None, [1.0] * HIDDEN, 1.0])
def test_hidden_states_of_another_type(value):
    with pytest.raises(TypeError, match="hidden_states = .*must be a (torch.T|t)ensor") as caught:
        MoE(layer())(value)
    assert isinstance(caught.value, megamoe.MegaMoEError)


def test_scalar():
    with pytest.raises(megamoe.MegaMoEValueError, match="hidden_states"):
        MoE(layer())(torch.tensor(1.0))


@pytest.mark.parametrize(
    ("mask", "argument", "shown", "kind", "rule"),
    [
        (torch.ones(6, dtype=torch.bool), "token_mask.shape", [6], ValueError, "must be [2, 3]"),
        (torch.ones(3, 2, dtype=torch.bool), "token_mask.shape", [3, 2], ValueError, "must be [2, 3]"),
        (torch.ones(2, 3), "token_mask.dtype", torch.float32, TypeError, "must be one of torch.bool"),
        (torch.ones(2, 3, dtype=torch.bool, device="meta"), "token_mask.device", "meta", ValueError, "must be cpu"),
        ([[True] * 3] * 2, "token_mask", "list", TypeError, "must be a torch.Tensor"),
    ],
    ids=["flat", "transposed", "float", "device", "list"],
)
def test_wrong_mask(mask, argument, shown, kind, rule):
    with fails(kind, argument, shown, rule):
        MoE(layer())(torch.ones(2, 3, HIDDEN), token_mask=mask)


def test_capacity_counts_all_leading_dimensions():
    moe = MoE(layer(max_tokens_per_rank=6))
    moe(torch.ones(2, 3, HIDDEN))
    with fails(ValueError, "hidden_states.shape[0]", 7, "exceeds max_tokens_per_rank = 6"):
        moe(torch.ones(7, 1, HIDDEN))


@pytest.mark.parametrize("value", [torch.ones(7, HIDDEN), torch.ones(3, HIDDEN, dtype=torch.int64)], ids=["T", "dtype"])
def test_a_refused_call_counts_nothing(value):
    """The caller may split the batch and try again: its tokens must not count twice."""
    moe = MoE(layer(max_tokens_per_rank=6))
    with pytest.raises(megamoe.MegaMoEError):
        moe(value)
    assert not moe.router.tokens_per_expert.any()


@pytest.mark.parametrize("config", [None, {}, "mixtral"])
def test_config_must_be_a_config(config):
    with fails(TypeError, "config", type(config).__name__, "must be a MoEConfig"):
        MoE(config)


@pytest.mark.parametrize("argument", ["group", "balance_group"])
def test_groups_must_be_groups(argument):
    with fails(TypeError, argument, "int", "must be a ProcessGroup, a 1-D DeviceMesh or None"):
        MoE(layer(), **{argument: 3})


class TupleRouter(torch.nn.Module):
    def forward(self, hidden_states, token_mask=None):
        index = torch.zeros(hidden_states.shape[0], 1, dtype=torch.int64)
        return index, torch.ones(index.shape)


def test_custom_router_must_be_a_module_that_returns_a_routing():
    with fails(TypeError, "router", "function", "must be an nn.Module"):
        MoE(layer(), router=lambda hidden_states, token_mask: None)
    with fails(TypeError, "router's result", "tuple", "must be a Routing"):
        MoE(layer(), router=TupleRouter())(torch.ones(3, HIDDEN))


def test_dtype_must_be_floating():
    with fails(TypeError, "dtype", torch.int32, "must be a floating dtype"):
        MoE(layer(), dtype=torch.int32)
