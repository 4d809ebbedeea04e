"""Router maths against fp64 formulas, and expert selection against a loop over tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.kernels.reference import expert_scores, router_logits, routing_weights, select_experts
from tests.support.metrics import assert_close

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


def select_by_loop(row: list[float], top_k: int, num_groups: int, topk_groups: int, group_score: str) -> list[int]:
    """The experts of one token, best first, ties to the lowest id (of a group, then of an expert)."""
    size = len(row) // num_groups
    merits = []
    for group in range(num_groups):
        members = sorted(row[group * size : (group + 1) * size], reverse=True)
        merits.append(members[0] if group_score == "max" else members[0] + members[1])
    kept = sorted(range(num_groups), key=lambda group: (-merits[group], group))[:topk_groups]
    candidates = [expert for expert in range(len(row)) if expert // size in kept]
    return sorted(candidates, key=lambda expert: (-row[expert], expert))[:top_k]


def check_selection(scores: torch.Tensor, top_k: int, num_groups=1, topk_groups=1, group_score="max") -> None:
    index = select_experts(scores, top_k, num_groups, topk_groups, group_score)
    assert index.dtype == torch.int64
    assert index.shape == (scores.shape[0], top_k)
    for token, row in enumerate(scores.tolist()):
        expected = select_by_loop(row, top_k, num_groups, topk_groups, group_score)
        assert index[token].tolist() == expected, f"token {token}: {row}"


@st.composite
def selections(draw):
    """Scores on a coarse grid around zero, so that ties are common and some groups have only negative scores."""
    num_groups = draw(st.integers(1, 4))
    group_size = draw(st.integers(1, 4))
    topk_groups = draw(st.integers(1, num_groups))
    top_k = draw(st.integers(1, group_size * topk_groups))
    group_score = draw(st.sampled_from(["max", "sum_top2"] if group_size > 1 else ["max"]))
    grid = st.integers(-6, 3).map(lambda i: i / 4)
    rows = draw(
        st.lists(st.lists(grid, min_size=group_size * num_groups, max_size=group_size * num_groups), max_size=4)
    )
    scores = torch.tensor(rows, dtype=torch.float32).view(len(rows), group_size * num_groups)
    return scores, top_k, num_groups, topk_groups, group_score


@settings(max_examples=300)
@given(selections())
def test_selection(case):
    check_selection(*case)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_groups", "topk_groups", "group_score"),
    [
        pytest.param(5, 2, 1, 1, "max", id="E odd"),
        pytest.param(6, 3, 3, 2, "sum_top2", id="E no power of two, in groups"),
        pytest.param(7, 7, 1, 1, "max", id="K = E"),
        pytest.param(8, 1, 1, 1, "max", id="K = 1"),
        pytest.param(1, 1, 1, 1, "max", id="one expert"),
        pytest.param(256, 8, 8, 4, "sum_top2", id="DeepSeek-V3"),
        pytest.param(160, 6, 8, 3, "max", id="DeepSeek-V2"),
        pytest.param(384, 8, 1, 1, "max", id="Kimi K2: E no power of two"),
        pytest.param(512, 10, 1, 1, "max", id="Qwen3-Next: ids above 255"),
        pytest.param(512, 8, 16, 2, "sum_top2", id="512 experts in groups"),
    ],
)
def test_selection_of_model_shapes(seed, num_experts, top_k, num_groups, topk_groups, group_score):
    # Multiples of 2^-12: the sums of two are exact, here and in the loop.
    scores = (torch.rand(50, num_experts) * 4096).floor() / 4096 - 0.5
    check_selection(scores, top_k, num_groups, topk_groups, group_score)


def test_winners_above_255():
    """Ids kept in 8 bits anywhere would come back modulo 256."""
    scores = torch.zeros(1, 512)
    scores[0, [511, 256, 300]] = torch.tensor([3.0, 2.0, 1.0])
    assert select_experts(scores, 3).tolist() == [[511, 256, 300]]


def test_ties_go_to_the_lowest_id():
    # Long rows: short ones may come out right from an unstable sort.
    assert select_experts(torch.zeros(2, 384), 8).tolist() == [list(range(8))] * 2
    assert select_experts(torch.zeros(1, 12), 4, 4, 2, "sum_top2").tolist() == [[0, 1, 2, 3]]


def test_negative_scores_never_choose_a_masked_group():
    """With a selection bias all scores can be negative: a masked group filled with 0 would win."""
    scores = torch.tensor([[-9.0, -8.0, -1.0, -2.0, -0.5, -10.0]])
    assert select_experts(scores, 2, 3, 1, "max").tolist() == [[4, 5]]
    assert select_experts(scores, 2, 3, 1, "sum_top2").tolist() == [[2, 3]]


def test_group_scores_differ():
    """One excellent expert against two good ones."""
    scores = torch.tensor([[0.9, 0.0, 0.6, 0.5]])
    assert select_experts(scores, 1, 2, 1, "max").tolist() == [[0]]
    assert select_experts(scores, 1, 2, 1, "sum_top2").tolist() == [[2]]


@pytest.mark.parametrize("groups", [(1, 1, "max"), (4, 2, "max"), (4, 2, "sum_top2")], ids=str)
def test_nan_rows_give_distinct_experts(seed, groups):
    scores = torch.rand(6, 16)
    clean = select_experts(scores, 6, *groups)
    scores[1] = float("nan")
    scores[3, 5] = float("nan")
    scores[4, ::2] = float("nan")
    index = select_experts(scores, 6, *groups)
    for row in index.tolist():
        assert len(set(row)) == 6 and min(row) >= 0 and max(row) < 16
    assert torch.equal(index[[0, 2, 5]], clean[[0, 2, 5]])


def test_selection_of_views(seed):
    scores = torch.rand(12, 40).t()[::2]
    assert torch.equal(select_experts(scores, 4, 3, 2, "max"), select_experts(scores.contiguous(), 4, 3, 2, "max"))
    assert select_experts(torch.zeros(0, 8), 2, 2, 1, "sum_top2").shape == (0, 2)


# ---------------------------------------------------------------- scores and weights


def plain_scores(logits: torch.Tensor, score: str) -> torch.Tensor:
    if score == "softmax":
        shifted = torch.exp(logits - logits.max(dim=1, keepdim=True).values)
        return shifted / shifted.sum(dim=1, keepdim=True)
    if score == "sigmoid":
        return 1 / (1 + torch.exp(-logits))
    return (logits.clamp(min=0) + torch.log1p(torch.exp(-logits.abs()))).sqrt()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_scores_and_gradients(seed, score, spread):
    logits = (torch.randn(40, 12) * spread).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    scores, expected = expert_scores(logits, score), plain_scores(exact, score)
    assert scores.dtype == torch.float32
    # Element by element: the small scores of a softmax would vanish in a norm.
    assert ((scores.double() - expected) / expected).abs().max() < 2e-5

    grad = torch.randn_like(scores)
    (actual,) = torch.autograd.grad(scores, logits, grad)
    (wanted,) = torch.autograd.grad(expected, exact, grad.double())
    assert_close(actual, wanted, 1e-5)
    # softplus(x) is x above 20, which costs 1e-10.
    assert_close(expert_scores(exact, score), expected, 1e-9, "fp64")


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("size", [30.0, 90.0, 200.0, 1e4])
def test_extreme_logits_have_finite_scores_and_gradients(score, size):
    """Beyond about 100, exp of the logit under- or overflows in fp32."""
    logits = torch.tensor([[-size, 0.0, size], [-size, -size, -size], [size, size, size]], requires_grad=True)
    scores = expert_scores(logits, score)
    expected = plain_scores(logits.detach().double(), score)
    assert scores.isfinite().all() and (scores >= 0).all()
    assert_close(scores, expected, 1e-5)
    (grad,) = torch.autograd.grad(scores, logits, torch.ones_like(scores))
    assert grad.isfinite().all(), f"gradient of {score} at {logits.tolist()}: {grad.tolist()}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_router_logits_are_computed_in_fp32(seed, dtype, bias):
    x, weight = torch.randn(40, 256).to(dtype), torch.randn(12, 256) / 16
    offset = torch.randn(12) if bias else None
    logits = router_logits(x, weight, offset)
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = x.double() @ weight.double().t() + (offset.double() if bias else 0)
    assert_close(logits, expected, 1e-6)


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("scaling_factor", [1.0, 2.5])
@pytest.mark.parametrize("renormalize", [False, True])
def test_routing_weights(seed, renormalize, scaling_factor, top_k):
    scores = torch.rand(20, 8) + 0.01
    index = torch.stack([torch.randperm(8)[:top_k] for _ in range(20)])
    weights = routing_weights(scores, index, renormalize, scaling_factor)
    assert weights.shape == (20, top_k)
    expected = torch.empty(20, top_k, dtype=torch.float64)
    for token in range(20):
        chosen = [float(scores[token, expert]) for expert in index[token].tolist()]
        total = math.fsum(chosen) if renormalize else 1.0
        expected[token] = torch.tensor([value / total * scaling_factor for value in chosen], dtype=torch.float64)
    assert ((weights - expected) / expected).abs().max() < 1e-6


def test_routing_weights_of_vanishing_scores():
    """Sigmoid scores can underflow to zero together: no division by zero, also not in the gradient."""
    logits = torch.full((1, 4), -1e4, requires_grad=True)
    weights = routing_weights(expert_scores(logits, "sigmoid"), torch.tensor([[0, 2]]), True, 1.0)
    assert weights.tolist() == [[0.0, 0.0]]
    (grad,) = torch.autograd.grad(weights.sum(), logits)
    assert grad.isfinite().all()


@pytest.mark.parametrize("renormalize", [False, True])
def test_gradient_of_routing_weights(seed, renormalize):
    scores = (torch.rand(5, 6, dtype=torch.float64) + 0.1).requires_grad_()
    index = torch.stack([torch.randperm(6)[:3] for _ in range(5)])
    assert torch.autograd.gradcheck(lambda s: routing_weights(s, index, renormalize, 2.5), (scores,))


@pytest.mark.parametrize("group_score", ["max", "sum_top2"])
def test_experts_that_are_switched_off_do_not_let_masked_groups_in(group_score):
    """All three experts of the kept group are needed, and one of them has score -inf."""
    scores = torch.tensor([[0.5, 0.5, 0.5, float("-inf"), 9.0, 8.0]])
    assert select_experts(scores, 3, 2, 1, group_score).tolist() == [[4, 5, 3]]
