"""``Router``: fp32 whatever surrounds it, the same decision for a token in any batch, masks, counters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megamoe import MoE, MoEConfig, Router, RouterConfig, Routing, update_expert_biases
from tests.support.configs import router_layer
from tests.support.errors import fails
from tests.support.metrics import assert_close
from tests.support.plain_layer import plain_routing

HIDDEN = 16


def layer(num_experts: int = 8, top_k: int = 2, **router) -> MoEConfig:
    return router_layer(HIDDEN, num_experts, top_k, **router)


def counts_of(index: torch.Tensor, num_experts: int) -> list[int]:
    return [int((index == expert).sum()) for expert in range(num_experts)]


# ---------------------------------------------------------------- decisions


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(layer(), id="softmax"),
        pytest.param(layer(renormalize=False, scaling_factor=2.5), id="softmax_raw_scaled"),
        pytest.param(layer(score="sigmoid", expert_bias=True), id="sigmoid_with_bias"),
        pytest.param(layer(score="sqrtsoftplus", renormalize=False), id="sqrtsoftplus"),
        pytest.param(layer(linear_bias=True), id="bias_on_the_logits"),
        pytest.param(layer(12, 4, num_groups=4, topk_groups=2), id="groups_by_max"),
        # A bias below -1 makes all scores negative: a limited group must still lose to every kept one.
        pytest.param(
            layer(12, 4, num_groups=4, topk_groups=2, group_score="sum_top2", score="sigmoid", expert_bias=True),
            id="groups_by_sum_top2_negative_scores",
        ),
        pytest.param(layer(5, 1), id="one_slot"),
        pytest.param(layer(6, 6), id="all_experts"),
        pytest.param(layer(512, 10), id="ids_above_255"),
        pytest.param(layer(1, 1), id="one_expert"),
    ],
)
def test_routing_against_the_formulas(config, seed):
    router = Router(config).double()
    with torch.no_grad():
        for tensor in (router.bias, router.expert_bias):
            if tensor is not None:
                tensor.normal_().sub_(3.0)
    x = torch.randn(40, HIDDEN, dtype=torch.float64, requires_grad=True)
    logits = x @ router.weight.t() + (0 if router.bias is None else router.bias)
    index, weights = plain_routing(logits, config, router.expert_bias)

    routing = router(x)
    assert isinstance(routing, Routing)
    assert routing.topk_index.dtype == torch.int64
    assert torch.equal(routing.topk_index, index)
    assert_close(routing.topk_weights, weights, 1e-12, "weights")
    grad = torch.randn_like(weights)
    inputs = [x, *router.parameters()]
    expected = torch.autograd.grad(weights, inputs, grad)
    for actual, wanted in zip(torch.autograd.grad(routing.topk_weights, inputs, grad), expected, strict=True):
        # One renormalised slot has weight 1 whatever the logits: a gradient of zero up to rounding.
        assert float((actual - wanted).norm()) <= 1e-12 * float(wanted.norm()) + 1e-12


@pytest.mark.parametrize("num_experts", [8, 512])
@pytest.mark.parametrize("groups", [1, 4])
def test_ties_go_to_the_lowest_id(num_experts, groups):
    router = Router(layer(num_experts, 3, num_groups=groups, topk_groups=min(groups, 2)))
    nn.init.zeros_(router.weight)
    assert torch.equal(router(torch.randn(5, HIDDEN)).topk_index, torch.tensor([[0, 1, 2]] * 5))


def test_ties_at_the_cut_go_to_the_lowest_id():
    # Expert 9 is best, then 1, 3, 5 and 7 are equal: two of them fit.
    router = Router(layer(10, 3))
    with torch.no_grad():
        router.weight.zero_()
        router.weight[9, 0], router.weight[1:9:2, 0] = 2.0, 1.0
    tokens = torch.zeros(4, HIDDEN)
    tokens[:, 0] = 1
    assert torch.equal(router(tokens).topk_index, torch.tensor([[9, 1, 3]] * 4))


@pytest.mark.parametrize("router", [dict(), dict(num_groups=4, topk_groups=2)], ids=["plain", "groups"])
def test_nan_token_gets_distinct_experts_and_harms_no_other(router, seed):
    module = Router(layer(8, 4, **router))
    x = torch.randn(6, HIDDEN)
    expected = module(x)
    x[2] = float("nan")
    routing = module(x)
    assert routing.topk_index[2].unique().numel() == 4
    assert 0 <= routing.topk_index[2].min() and routing.topk_index[2].max() < 8
    others = [0, 1, 3, 4, 5]
    assert torch.equal(routing.topk_index[others], expected.topk_index[others])
    assert torch.equal(routing.topk_weights[others], expected.topk_weights[others])


# ---------------------------------------------------------------- precision


def near_tie_router(**options) -> tuple[Router, torch.Tensor, torch.Tensor]:
    """A router whose logits differ by 1/1024 near 1, a token that makes them, and the experts from best to worst.

    BF16 has steps of 1/128 there: it cannot tell eight neighbours apart and would choose by id.
    """
    router = Router(layer(16, 16, **options))
    rank = torch.randperm(16)
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:, 0] = 1 + rank / 1024
    token = torch.zeros(1, HIDDEN)
    token[0, 0] = 1
    return router, token, rank.argsort(descending=True).view(1, -1)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_fp32_under_autocast(score, seed):
    router, token, best = near_tie_router(score=score)
    weights = router(token).topk_weights
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            routing = router(token)
            assert torch.equal(routing.topk_index, best)
            assert torch.equal(routing.topk_weights, weights) and routing.topk_weights.dtype == torch.float32
            # What a preceding linear layer hands over under autocast.
            assert torch.equal(router(token.to(dtype)).topk_index, best)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("cast", ["to_dtype", "method", "to_tensor", "parent"])
def test_fp32_in_a_half_precision_model(dtype, cast, seed):
    router, token, best = near_tie_router(expert_bias=True, linear_bias=True)
    weight = router.weight.detach().clone()
    if cast == "to_dtype":
        router.to(dtype)
    elif cast == "method":
        getattr(router, {torch.bfloat16: "bfloat16", torch.float16: "half"}[dtype])()
    elif cast == "to_tensor":
        router.to(torch.empty(1, dtype=dtype))
    else:
        nn.Sequential(nn.Linear(2, 2), router).to("cpu", dtype)
    assert all(tensor.dtype == torch.float32 for tensor in (router.weight, router.bias, router.expert_bias))
    assert router.tokens_per_expert.dtype == torch.int64
    assert torch.equal(router.weight, weight)
    routing = router(token.to(dtype))
    assert torch.equal(routing.topk_index, best)
    assert routing.topk_weights.dtype == torch.float32


def test_small_bias_updates_survive_a_bf16_model():
    # BF16 has steps of 0.25 at 34.5: it would lose every update.
    router = Router(layer(4, 1, expert_bias=True, bias_update_rate=1e-3)).bfloat16()
    router.expert_bias.fill_(34.5)
    for _ in range(10):
        router.tokens_per_expert.copy_(torch.tensor([0, 8, 4, 4]))
        update_expert_biases(router)
        router.bfloat16()
    expected = torch.tensor([0.01, -0.01, 0.0, 0.0], dtype=torch.float64)
    assert_close(router.expert_bias.double() - 34.5, expected, 1e-2)


def test_double_widens():
    router = Router(layer(linear_bias=True, expert_bias=True)).double()
    assert all(tensor.dtype == torch.float64 for tensor in (router.weight, router.bias, router.expert_bias))
    assert router(torch.randn(3, HIDDEN, dtype=torch.float64)).topk_weights.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_any_other_cast_returns_from_double_to_fp32(dtype):
    router = Router(layer(expert_bias=True)).double().to(dtype)
    assert router.weight.dtype == router.expert_bias.dtype == torch.float32


def test_gradients_move_with_the_parameters():
    router = Router(layer())
    router(torch.randn(3, HIDDEN)).topk_weights[:, 0].sum().backward()
    grad = router.weight.grad.clone()
    router.bfloat16()
    assert router.weight.grad.dtype == torch.float32 and torch.equal(router.weight.grad, grad)


def test_decision_does_not_depend_on_the_batch_size():
    """Expert 7 leads by 1/512, less than a BF16 step; the bias of expert 8 decides only if that is rounded away."""
    router = Router(layer(16, 1, score="sigmoid", expert_bias=True))
    with torch.no_grad():
        router.weight.zero_()
        router.weight[7, 0], router.weight[8, 0] = 1 + 1 / 512, 1.0
        router.expert_bias[8] = 1 / 8192
    for num_tokens in (1, 2, 8, 9, 16, 17, 64, 129):
        tokens = torch.zeros(num_tokens, HIDDEN)
        tokens[:, 0] = 1
        assert torch.equal(router(tokens).topk_index, torch.full((num_tokens, 1), 7)), num_tokens


def test_weights_of_one_token_and_of_nine_agree(seed):
    router = Router(layer(32, 4))
    tokens = torch.randn(9, HIDDEN)
    together = router(tokens).topk_weights
    alone = torch.cat([router(token.unsqueeze(0)).topk_weights for token in tokens])
    assert_close(together, alone, 1e-6)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_gradients_are_finite_at_extreme_logits(score, renormalize):
    # Scores that underflow to 0 in fp32: sqrt has an infinite slope there.
    router = Router(layer(4, 2, score=score, renormalize=renormalize))
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:, 0] = torch.tensor([200.0, 1.0, -1.0, -200.0])
    tokens = torch.randn(3, HIDDEN)
    tokens[:, 0] = torch.tensor([1.0, -1.0, 0.0])
    tokens.requires_grad_()
    weights = router(tokens).topk_weights
    assert weights.isfinite().all()
    (weights * torch.tensor([1.0, 2.0])).sum().backward()
    assert router.weight.grad.isfinite().all() and tokens.grad.isfinite().all()


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_masked_tokens_go_nowhere_and_count_nowhere(score, seed):
    config = layer(score=score, aux_loss_coef=0.5, z_loss_coef=0.25, expert_bias=True)
    masked, alone = Router(config), Router(config)
    alone.load_state_dict(masked.state_dict())
    x = torch.randn(10, HIDDEN)
    mask = torch.tensor([True, False] * 5)
    x[~mask] = float("nan")
    routing, expected = masked(x, mask), alone(x[mask])

    assert (routing.topk_index[~mask] == -1).all() and (routing.topk_weights[~mask] == 0).all()
    assert torch.equal(routing.topk_index[mask], expected.topk_index)
    assert_close(routing.topk_weights[mask], expected.topk_weights, 1e-6)
    assert torch.equal(masked.tokens_per_expert, alone.tokens_per_expert)
    assert_close(masked.aux_loss, alone.aux_loss, 1e-6, "aux_loss")
    assert_close(masked.z_loss, alone.z_loss, 1e-6, "z_loss")
    # NaN in padding tokens, and in whatever gradient arrives for them, must not reach the weights.
    grad = torch.randn_like(routing.topk_weights)
    expected.topk_weights.backward(grad[mask])
    grad[~mask] = float("nan")
    routing.topk_weights.backward(grad)
    assert_close(masked.weight.grad, alone.weight.grad, 1e-5, "router gradient")


def test_mask_of_ones_is_no_mask(seed):
    config = layer(aux_loss_coef=0.5, z_loss_coef=0.25)
    masked, plain = Router(config), Router(config)
    masked.load_state_dict(plain.state_dict())
    x = torch.randn(9, HIDDEN)
    with_mask, without = masked(x, torch.ones(9, dtype=torch.bool)), plain(x)
    assert torch.equal(with_mask.topk_index, without.topk_index)
    assert torch.equal(with_mask.topk_weights, without.topk_weights)
    assert torch.equal(masked.tokens_per_expert, plain.tokens_per_expert)
    for routing in (with_mask, without):
        routing.topk_weights.backward(torch.ones_like(routing.topk_weights))
    assert_close(masked.aux_loss, plain.aux_loss, 1e-6)
    assert_close(masked.z_loss, plain.z_loss, 1e-6)
    assert_close(masked.weight.grad, plain.weight.grad, 1e-5)


@pytest.mark.parametrize("num_tokens", [0, 4])
def test_no_token_at_all(num_tokens):
    """T = 0, and T > 0 with everything masked."""
    router = Router(layer(aux_loss_coef=1.0, z_loss_coef=1.0))
    routing = router(torch.randn(num_tokens, HIDDEN), torch.zeros(num_tokens, dtype=torch.bool))
    assert routing.topk_index.shape == routing.topk_weights.shape == (num_tokens, 2)
    assert (routing.topk_index == -1).all()
    assert router.tokens_per_expert.sum() == 0 and router.aux_loss == 0 and router.z_loss == 0
    routing.topk_weights.sum().backward()
    assert torch.equal(router.weight.grad, torch.zeros_like(router.weight))


# ---------------------------------------------------------------- counters


def test_counters_count_pairs_in_training_only(seed):
    router = Router(layer(8, 3))
    index = router(torch.randn(20, HIDDEN)).topk_index
    assert router.tokens_per_expert.tolist() == counts_of(index, 8)
    assert router.tokens_per_expert.sum() == 60
    router.eval()
    router(torch.randn(20, HIDDEN))
    assert router.tokens_per_expert.tolist() == counts_of(index, 8)


def test_micro_batches_add_up(seed):
    router, x = Router(layer(8, 3)), torch.randn(30, HIDDEN)
    expected = counts_of(router(x).topk_index, 8)
    router.tokens_per_expert.zero_()
    for micro_batch in x.split([7, 0, 23]):
        router(micro_batch)
    assert router.tokens_per_expert.tolist() == expected


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_checkpointing_counts_once(use_reentrant, seed):
    moe = MoE(layer(8, 3, aux_loss_coef=0.1))
    x = torch.randn(12, HIDDEN, requires_grad=True)
    expected = counts_of(moe.router(x).topk_index, 8)
    moe.router.tokens_per_expert.zero_()
    out = checkpoint(moe, x, use_reentrant=use_reentrant)
    assert moe.router.tokens_per_expert.tolist() == expected
    out.sum().backward()
    assert moe.router.tokens_per_expert.tolist() == expected
    # Also inside an outer checkpoint, and when the graph is walked twice.
    out = checkpoint(lambda y: checkpoint(moe, y, use_reentrant=use_reentrant), x, use_reentrant=use_reentrant)
    out.sum().backward()
    assert moe.router.tokens_per_expert.tolist() == [2 * count for count in expected]


def test_losses_are_reported_for_training_only():
    router = Router(layer(aux_loss_coef=0.1, z_loss_coef=0.1))
    assert router.aux_loss is None and router.z_loss is None
    router.eval()(torch.randn(4, HIDDEN))
    assert router.aux_loss is None and router.z_loss is None
    router.train()(torch.randn(4, HIDDEN))
    assert not router.aux_loss.requires_grad and not router.z_loss.requires_grad
    off = Router(layer())
    off(torch.randn(4, HIDDEN))
    assert off.aux_loss is None and off.z_loss is None


# ---------------------------------------------------------------- state


def test_state_dict_holds_the_bias_but_not_the_counters(seed):
    config = layer(expert_bias=True, linear_bias=True)
    router = Router(config)
    router.expert_bias.normal_()
    router(torch.randn(5, HIDDEN))
    state = router.state_dict()
    assert {name: (tuple(t.shape), t.dtype) for name, t in state.items()} == {
        "weight": ((8, HIDDEN), torch.float32),
        "bias": ((8,), torch.float32),
        "expert_bias": ((8,), torch.float32),
    }
    fresh = Router(config)
    fresh.load_state_dict(state)
    assert torch.equal(fresh.expert_bias, router.expert_bias) and fresh.tokens_per_expert.sum() == 0
    assert Router(layer()).state_dict().keys() == {"weight"}


def test_loading_bf16_values_keeps_fp32():
    router = Router(layer(expert_bias=True))
    router.load_state_dict({name: tensor.bfloat16() for name, tensor in router.state_dict().items()})
    assert router.weight.dtype == router.expert_bias.dtype == torch.float32


def test_copies_count_apart(seed):
    router = Router(layer(expert_bias=True, aux_loss_coef=0.1))
    router(torch.randn(5, HIDDEN))
    twin = copy.deepcopy(router)
    twin(torch.randn(5, HIDDEN))
    assert (router.tokens_per_expert.sum(), twin.tokens_per_expert.sum()) == (10, 20)


@pytest.mark.parametrize(("init_std", "expected"), [(None, 256**-0.5), (0.02, 0.02)])
def test_initial_values(init_std, expected, seed):
    router_config = RouterConfig(expert_bias=True, linear_bias=True)
    config = MoEConfig(256, 8, num_experts=64, top_k=2, router=router_config, init_std=init_std)
    router = Router(config)
    weight = router.weight.detach()
    assert abs(float(weight.std()) / expected - 1) < 0.05
    assert abs(float(weight.mean())) < 0.05 * expected
    router.expert_bias.fill_(1)
    router.tokens_per_expert.fill_(1)
    torch.manual_seed(3)
    router.reset_parameters()
    again = copy.deepcopy(router.weight)
    assert not router.bias.any() and not router.expert_bias.any() and not router.tokens_per_expert.any()
    torch.manual_seed(3)
    router.reset_parameters()
    assert torch.equal(router.weight, again)


def test_repr():
    assert repr(Router(layer(12, 4, num_groups=4, topk_groups=2, score="sigmoid"))) == (
        f"Router(hidden_size={HIDDEN}, num_experts=12, top_k=4, score=sigmoid, groups=2/4)"
    )


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("shape", [(3, HIDDEN + 1), (2, 3, HIDDEN), (HIDDEN,), ()])
def test_wrong_shape(shape):
    with fails(ValueError, "hidden_states.shape", list(shape), f"must be [any, {HIDDEN}]"):
        Router(layer())(torch.randn(shape))


@pytest.mark.parametrize(
    ("value", "argument", "shown", "kind", "rule"),
    [
        (torch.randn(3, HIDDEN, device="meta"), "hidden_states.device", "meta", ValueError, "must be cpu"),
        (torch.ones(3, HIDDEN, dtype=torch.int64), "hidden_states.dtype", torch.int64, TypeError, "must be one of"),
        ([[0.0] * HIDDEN], "hidden_states", "list", TypeError, "must be a torch.Tensor"),
    ],
    ids=["device", "dtype", "type"],
)
def test_wrong_hidden_states(value, argument, shown, kind, rule):
    with fails(kind, argument, shown, rule):
        Router(layer())(value)


@pytest.mark.parametrize(
    ("mask", "argument", "value", "kind", "rule"),
    [
        (torch.ones(2, dtype=torch.bool), "token_mask.shape", [2], ValueError, "must be [3]"),
        (torch.ones(3, 1, dtype=torch.bool), "token_mask.shape", [3, 1], ValueError, "must be [3]"),
        # An attention mask of ones and zeros is not a mask of tokens: ~1 == -2 is true.
        (torch.ones(3, dtype=torch.int64), "token_mask.dtype", torch.int64, TypeError, "must be one of torch.bool"),
        (torch.ones(3, dtype=torch.bool, device="meta"), "token_mask.device", "meta", ValueError, "must be cpu"),
        ([True] * 3, "token_mask", "list", TypeError, "must be a torch.Tensor"),
    ],
)
def test_wrong_mask(mask, argument, value, kind, rule):
    with fails(kind, argument, value, rule):
        Router(layer())(torch.randn(3, HIDDEN), mask)


def test_config_must_be_a_config():
    with fails(TypeError, "config", "dict", "must be a MoEConfig"):
        Router({"hidden_size": 8})
