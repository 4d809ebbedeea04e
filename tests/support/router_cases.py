"""Cases of the router's kernels, and what must hold of their results, on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from megamoe import RouterConfig
from megamoe.kernels import reference
from tests.support.metrics import assert_close

Route = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class RouterCase:
    """Sizes and a router.

    Attributes:
        ties: many experts have the same weights, and so the same scores.
        masked: some tokens, whose hidden states are NaN, are masked.
    """

    tokens: int
    hidden: int
    experts: int
    top_k: int
    router: RouterConfig = field(default_factory=RouterConfig)
    dtype: torch.dtype = torch.bfloat16
    ties: bool = False
    masked: bool = False

    def __str__(self) -> str:
        router = self.router
        parts = [f"{self.tokens} tokens", f"H{self.hidden}", f"E{self.experts}", f"K{self.top_k}", router.score]
        parts += [f"{router.topk_groups} of {router.num_groups} groups"] if router.num_groups > 1 else []
        parts += [name for name in ("ties", "masked") if getattr(self, name)]
        return " ".join(parts)

    def inputs(self, device: torch.device | str = "cpu") -> list[torch.Tensor | None]:
        """Tokens, weight, bias, expert bias and mask, at random."""
        experts, router = self.experts, self.router
        x = torch.randn(self.tokens, self.hidden).to(self.dtype)
        # Logits of unit variance, so that scores are well apart.
        weight = torch.randn(experts, self.hidden) * self.hidden**-0.5
        bias = torch.randn(experts) if router.linear_bias else None
        if self.ties:
            like = torch.randint(0, max(experts // 3, 1), (experts,))
            weight, bias = weight[like], None if bias is None else bias[like]
        expert_bias = None
        if router.expert_bias:
            # Below -1 all scores are negative, and -inf switches an expert off.
            expert_bias = torch.randint(-3, 3, (experts,)) / 2
            expert_bias[torch.randint(0, experts, ())] = float("-inf")
        mask = None
        if self.masked:
            mask = torch.rand(self.tokens) < 0.6
            x[~mask] = float("nan")
        return [None if t is None else t.to(device) for t in (x, weight, bias, expert_bias, mask)]


def scores_of(route: Route, case: RouterCase, inputs: list[torch.Tensor | None]) -> torch.Tensor:
    """``[T, E]``: the scores that the kernels work with, in the layout of the case's groups."""
    x, weight, bias, _, _ = inputs
    router = replace(case.router, topk_groups=case.router.num_groups, renormalize=False, scaling_factor=1.0)
    index, scores = route(x, weight, bias, None, None, case.experts, router)
    assert torch.equal(index.sort(dim=1).values, torch.arange(case.experts, device=x.device).expand_as(index))
    return torch.zeros_like(scores).scatter_(1, index, scores)


def check_case(route: Route, case: RouterCase, device: torch.device | str = "cpu") -> None:
    """Scores agree with the formulas; given the scores, selection and order are exactly the reference's."""
    inputs = case.inputs(device)
    x, weight, bias, expert_bias, mask = inputs
    live = torch.ones(case.tokens, dtype=torch.bool, device=x.device) if mask is None else mask
    index, weights = route(*inputs, case.top_k, case.router)
    assert index.dtype == torch.int64 and weights.dtype == torch.float32
    assert index.shape == weights.shape == (case.tokens, case.top_k)
    assert (index[~live] == -1).all() and (weights[~live] == 0).all(), "masked tokens"
    scores = scores_of(route, case, inputs)[live]
    logits = reference.router_logits(x[live].double(), weight, bias)
    assert_close(scores, reference.expert_scores(logits, case.router.score), 1e-5, "scores")
    router = case.router
    choice = scores if expert_bias is None else scores + expert_bias
    groups = router.num_groups, router.topk_groups, router.group_score
    wanted = reference.select_experts(choice, case.top_k, *groups)
    assert torch.equal(index[live], wanted), "selection"
    expected = reference.routing_weights(scores, wanted, router.renormalize, router.scaling_factor)
    assert_close(weights[live], expected, 1e-6, "weights")


def check_any_batch(route: Route, case: RouterCase, counts: list[int], device: torch.device | str = "cpu") -> None:
    """A token's bits are the same in batches of ``counts`` tokens, whatever its place and its company."""
    x, *others, mask = case.inputs(device)
    index, weights = route(x, *others, mask, case.top_k, case.router)
    for count in counts:
        chosen = torch.randint(0, case.tokens, (count,), device=x.device)
        part = None if mask is None else mask[chosen]
        got = route(x[chosen], *others, part, case.top_k, case.router)
        assert torch.equal(got[0], index[chosen]) and torch.equal(got[1], weights[chosen]), f"{count} tokens"
