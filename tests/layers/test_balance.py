"""Load balancing: auxiliary loss and z-loss with their gradients, and the bias update."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from megamoe import MoE, MoEConfig, Router, RouterConfig, set_aux_loss_scale, update_expert_biases
from megamoe.layers.balance import load_balancing_loss, router_z_loss
from tests.support.configs import router_layer
from tests.support.errors import fails
from tests.support.metrics import assert_close
from tests.support.plain_layer import plain_routing, plain_scores

HIDDEN = 16
DOUBLE = torch.float64


def layer(num_experts: int = 6, top_k: int = 2, **router) -> MoEConfig:
    return router_layer(HIDDEN, num_experts, top_k, **router)


def plain_aux_loss(logits: torch.Tensor, config: MoEConfig) -> torch.Tensor:
    """E * sum_e f_e P_e, one expert after the other; scores that are no probabilities are divided by their sum."""
    index, _ = plain_routing(logits, config)
    scores = plain_scores(logits, config.router.score)
    probs = scores / scores.sum(dim=1, keepdim=True)
    loss = 0
    for expert in range(config.num_experts):
        fraction = float((index == expert).sum()) / index.numel()
        loss = loss + config.num_experts * fraction * probs[:, expert].mean()
    return loss


def plain_z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Mean of log(sum(exp(logits)))^2."""
    return sum(torch.log(torch.exp(row).sum()) ** 2 for row in logits) / logits.shape[0]


def router_gradient(config: MoEConfig, weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, scale=None):
    """Gradient of the router's weight for the upstream gradient ``grad [T, K]``, and the router."""
    router = Router(config).double()
    with torch.no_grad():
        router.weight.copy_(weight)
    if scale is not None:
        set_aux_loss_scale(router, scale)
    router(x).topk_weights.backward(grad)
    return router.weight.grad, router


# ---------------------------------------------------------------- the losses


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_losses_against_the_formulas(score, top_k, seed):
    config = layer(6, top_k, score=score, aux_loss_coef=0.1, z_loss_coef=0.1)
    router = Router(config).double()
    x = torch.randn(31, HIDDEN, dtype=DOUBLE)
    router(x)
    logits = (x @ router.weight.t()).detach()
    assert_close(router.aux_loss, plain_aux_loss(logits, config), 1e-12, "aux_loss")
    assert_close(router.z_loss, plain_z_loss(logits), 1e-12, "z_loss")


def test_aux_loss_is_1_when_balanced_and_num_experts_when_collapsed():
    num_experts = 5
    balanced = torch.full((10, num_experts), 1 / num_experts)
    assert_close(load_balancing_loss(balanced, torch.full((num_experts,), 4)), torch.tensor(1.0), 1e-6)
    collapsed = torch.zeros(10, num_experts)
    collapsed[:, 3] = 1
    loss = load_balancing_loss(collapsed, torch.tensor([0, 0, 0, 10, 0]))
    assert_close(loss, torch.tensor(float(num_experts)), 1e-6)


def test_losses_count_unmasked_tokens_only(seed):
    probs, logits = torch.rand(8, 5).softmax(1), torch.randn(8, 5)
    mask = torch.tensor([True, True, False, True, False, False, True, True])
    counts = torch.tensor([3, 0, 1, 4, 2])
    assert_close(load_balancing_loss(probs, counts, mask), load_balancing_loss(probs[mask], counts), 1e-6)
    assert_close(router_z_loss(logits, mask), router_z_loss(logits[mask]), 1e-6)


def test_layers_do_not_cancel(seed):
    """Two layers that collapse onto opposite experts each report their own imbalance (not that of their sum)."""
    model = nn.ModuleList(Router(layer(2, 1, aux_loss_coef=1.0)) for _ in range(2))
    tokens = torch.ones(8, HIDDEN)
    for expert, router in enumerate(model):
        with torch.no_grad():
            router.weight.zero_()
            router.weight[expert] = 1
        router(tokens)
        assert router.aux_loss > 1.99


# ---------------------------------------------------------------- their gradients


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("which", ["aux", "z"])
@pytest.mark.parametrize("coefficient", [0.0, 1.0, 2.0])
def test_attached_gradient_equals_that_of_an_explicit_loss(score, which, coefficient, seed):
    plain = layer(score=score)
    config = layer(score=score, **{f"{which}_loss_coef": coefficient})
    x = torch.randn(29, HIDDEN, dtype=DOUBLE)
    weight = (torch.randn(6, HIDDEN, dtype=DOUBLE) * HIDDEN**-0.5).requires_grad_()
    upstream = torch.randn(29, 2, dtype=DOUBLE)

    logits = x @ weight.t()
    main = (plain_routing(logits, plain)[1] * upstream).sum()
    loss = plain_aux_loss(logits, plain) if which == "aux" else plain_z_loss(logits)
    (expected,) = torch.autograd.grad(main + coefficient * loss, weight)
    actual, _ = router_gradient(config, weight, x, upstream)
    assert_close(actual, expected, 1e-12)


@pytest.mark.parametrize("which", ["aux", "z"])
def test_attached_gradient_does_not_depend_on_the_upstream_gradient(which, seed):
    config = layer(**{f"{which}_loss_coef": 0.5})
    x = torch.randn(29, HIDDEN, dtype=DOUBLE)
    weight = torch.randn(6, HIDDEN, dtype=DOUBLE)
    upstream = torch.randn(29, 2, dtype=DOUBLE)
    attached = []
    for factor in (0.0, 1.0, -3.0, 100.0):
        main, _ = router_gradient(layer(), weight, x, factor * upstream)
        both, _ = router_gradient(config, weight, x, factor * upstream)
        attached.append(both - main)
    assert attached[0].norm() > 1e-4
    for other in attached[1:]:
        assert_close(other, attached[0], 1e-8)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_gradients_are_finite_with_zero_router_weights(score, seed):
    config = layer(score=score, aux_loss_coef=1.0, z_loss_coef=1.0)
    x = torch.randn(12, HIDDEN, dtype=DOUBLE)
    grad, router = router_gradient(config, torch.zeros(6, HIDDEN, dtype=DOUBLE), x, torch.ones(12, 2, dtype=DOUBLE))
    assert grad.isfinite().all() and grad.norm() > 0
    # All logits equal: P_e = 1/6, and log(6)^2.
    assert_close(router.aux_loss, torch.tensor(1.0), 1e-12)
    assert_close(router.z_loss, torch.tensor(math.log(6) ** 2), 1e-7)


def test_whole_layer_carries_the_gradient(seed):
    """Through experts and shared expert, in the router, the input, and nowhere else."""

    def gradients(coefficient: float):
        torch.manual_seed(seed)
        router = RouterConfig(aux_loss_coef=coefficient, z_loss_coef=coefficient)
        moe = MoE(MoEConfig(HIDDEN, 8, 6, 2, router=router, shared_intermediate_size=8)).double()
        x = torch.randn(29, HIDDEN, dtype=DOUBLE, requires_grad=True)
        moe(x).sum().backward()
        return moe, x

    (plain, plain_x), (moe, x) = gradients(0.0), gradients(0.25)
    leaf = x.detach().clone().requires_grad_()
    logits = leaf @ moe.router.weight.t()
    loss = 0.25 * (plain_aux_loss(logits, moe.config) + plain_z_loss(logits))
    expected_x, expected_weight = torch.autograd.grad(loss, [leaf, moe.router.weight])
    assert_close(x.grad - plain_x.grad, expected_x, 1e-9, "input")
    assert_close(moe.router.weight.grad - plain.router.weight.grad, expected_weight, 1e-9, "router")
    for name, parameter in moe.experts.named_parameters():
        assert torch.equal(parameter.grad, plain.experts.get_parameter(name).grad), name


def test_losses_reach_no_frozen_router(seed):
    moe = MoE(layer(aux_loss_coef=1.0))
    moe.router.requires_grad_(False)
    moe(torch.randn(5, HIDDEN)).sum().backward()
    assert moe.router.weight.grad is None and moe.experts.down_proj.grad is not None


# ---------------------------------------------------------------- set_aux_loss_scale


def test_accumulated_micro_batches_equal_the_mean_of_their_losses(seed):
    config = layer(aux_loss_coef=0.5, z_loss_coef=0.25)
    micro_batches = torch.randn(3, 10, HIDDEN, dtype=DOUBLE)
    weight = torch.randn(6, HIDDEN, dtype=DOUBLE, requires_grad=True)
    expected = torch.zeros_like(weight)
    for x in micro_batches:
        logits = x @ weight.t()
        loss = (0.5 * plain_aux_loss(logits, config) + 0.25 * plain_z_loss(logits)) / 3
        expected += torch.autograd.grad(loss, weight)[0]

    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"router": Router(config)})).double()
    router = model[1]["router"]
    with torch.no_grad():
        router.weight.copy_(weight)
    set_aux_loss_scale(model, 1 / 3)
    for x in micro_batches:
        (router(x).topk_weights * 0).sum().backward()
    assert_close(router.weight.grad, expected, 1e-12)
    # What is logged is the loss itself, not scaled.
    assert_close(router.z_loss, plain_z_loss((micro_batches[-1] @ weight.t()).detach()), 1e-12)


@pytest.mark.parametrize("which", ["aux", "z"])
@pytest.mark.parametrize("scale", [0, 1.0, 65536.0])
def test_scale_multiplies_the_attached_gradient(which, scale, seed):
    config = layer(**{f"{which}_loss_coef": 0.5})
    x, weight = torch.randn(9, HIDDEN, dtype=DOUBLE), torch.randn(6, HIDDEN, dtype=DOUBLE)
    upstream = torch.zeros(9, 2, dtype=DOUBLE)
    once, _ = router_gradient(config, weight, x, upstream)
    scaled, _ = router_gradient(config, weight, x, upstream, scale)
    assert once.norm() > 0
    assert_close(scaled, once * scale, 1e-12)


@pytest.mark.parametrize(
    ("scale", "kind", "rule"),
    [
        (-1.0, ValueError, ">= 0"),
        (float("nan"), ValueError, "finite"),
        (float("inf"), ValueError, "finite"),
        ("1", TypeError, "must be a number"),
        (True, TypeError, "must be a number"),
    ],
)
def test_bad_scale(scale, kind, rule):
    with fails(kind, "scale", scale, rule):
        set_aux_loss_scale(Router(layer()), scale)


# ---------------------------------------------------------------- update_expert_biases


def biased_router(counts: list[int], rate: float = 1e-3, expert_bias: bool = True) -> Router:
    router = Router(layer(len(counts), 1, expert_bias=expert_bias, bias_update_rate=rate))
    router.tokens_per_expert.copy_(torch.tensor(counts))
    return router


def test_underloaded_experts_go_up_and_overloaded_down():
    router = biased_router([0, 10, 4, 6], rate=0.01)
    update_expert_biases(router)
    # Mean 5: signs +, -, +, -, whose mean is 0.
    assert_close(router.expert_bias, torch.tensor([0.01, -0.01, 0.01, -0.01]), 1e-6)


def test_biases_do_not_drift():
    # Mean 4.5: signs +, +, +, -; their mean 0.5 is taken off.
    router = biased_router([4, 4, 0, 10], rate=0.01)
    update_expert_biases(router)
    assert_close(router.expert_bias, torch.tensor([0.005, 0.005, 0.005, -0.015]), 1e-6)
    for counts in ([9, 0, 0, 0], [1, 2, 3, 5], [0, 7, 0, 7]):
        router.tokens_per_expert.copy_(torch.tensor(counts))
        update_expert_biases(router)
    assert abs(float(router.expert_bias.sum())) < 1e-7
    assert router.expert_bias.abs().max() > 0.01


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [3, 3, 3, 3]], ids=["no_tokens", "balanced"])
def test_nothing_moves_without_imbalance(counts):
    router = biased_router(counts)
    before = torch.randn(4)
    router.expert_bias.copy_(before)
    update_expert_biases(router)
    assert torch.equal(router.expert_bias, before)


def test_update_zeroes_the_counters_so_that_a_second_one_does_nothing():
    router = biased_router([0, 10, 4, 6])
    update_expert_biases(router)
    assert not router.tokens_per_expert.any()
    before = router.expert_bias.clone()
    assert not update_expert_biases(router).any()
    assert torch.equal(router.expert_bias, before)


def test_bias_leads_to_equal_load(seed):
    """Skewed logits, constant data: the updates alone bring the load close to uniform."""
    router = Router(layer(8, 2, score="sigmoid", expert_bias=True, bias_update_rate=0.01)).eval()
    x = torch.randn(400, HIDDEN)
    x[:, 0] = 2
    with torch.no_grad():
        router.weight[:, 0] = torch.linspace(-0.6, 0.6, 8)

    def load() -> torch.Tensor:
        return torch.bincount(router(x).topk_index.flatten(), minlength=8)

    first = load()
    assert first.max() > 160, "the data are not skewed"
    for _ in range(150):
        router.tokens_per_expert.copy_(load())
        update_expert_biases(router)
    assert load().max() < 120 and load().min() > 80


def test_models_whose_layers_differ():
    """With and without bias, 4 and 6 experts, layers that are no MoE, a layer used twice."""
    biased, plain = biased_router([0, 10, 4, 6]), biased_router([1, 2, 3, 4], expert_bias=False)
    wide = biased_router([6, 0, 0, 0, 0, 0])
    model = nn.Sequential(nn.Linear(2, 2), biased, nn.ModuleList([plain, nn.LayerNorm(2)]), wide, biased)
    counts = update_expert_biases(model)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [[0, 10, 4, 6, 0, 0], [1, 2, 3, 4, 0, 0], [6, 0, 0, 0, 0, 0]]
    assert not any(router.tokens_per_expert.any() for router in (biased, plain, wide))
    assert_close(biased.expert_bias, torch.tensor([1e-3, -1e-3, 1e-3, -1e-3]), 1e-6)
    step = torch.tensor([-1e-3] + [1e-3] * 5)
    assert_close(wide.expert_bias, step - step.mean(), 1e-6)
    assert plain.expert_bias is None


def test_each_layer_has_its_own_rate():
    slow, fast = biased_router([0, 2], rate=1e-3), biased_router([0, 2], rate=1e-2)
    update_expert_biases(nn.ModuleList([slow, fast]))
    assert_close(slow.expert_bias * 10, fast.expert_bias, 1e-6)


def test_model_without_moe():
    counts = update_expert_biases(nn.Linear(2, 2))
    assert counts.shape == (0, 0) and counts.dtype == torch.int64


def test_counts_of_whole_layers_over_micro_batches(seed):
    model = nn.Sequential(*(MoE(layer(6, 2, expert_bias=True)) for _ in range(2)))
    for num_tokens in (5, 8):
        model(torch.randn(num_tokens, HIDDEN))
    assert update_expert_biases(model).sum(dim=1).tolist() == [26, 26]
    assert all(moe.router.expert_bias.any() for moe in model)


def test_update_takes_part_in_no_graph(seed):
    moe = MoE(layer(expert_bias=True))
    out = moe(torch.randn(5, HIDDEN))
    update_expert_biases(moe)
    assert not moe.router.expert_bias.requires_grad
    # The backward pass of a step may still be pending: the bias is not one of its saved tensors.
    out.sum().backward()
