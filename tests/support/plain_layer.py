"""A whole MoE layer written from the formulas, token by token: the expected values of the layer tests.

Nothing here comes from ``megamoe`` but the config. All is differentiable by autograd; meant for fp64.
"""

from __future__ import annotations

import torch

from megamoe import MoEConfig
from tests.support.generators import ExpertWeights
from tests.support.plain_moe import plain_activation, plain_moe


def plain_scores(logits: torch.Tensor, score: str) -> torch.Tensor:
    """``[T, E]`` of ``logits [T, E]``."""
    if score == "sigmoid":
        return 1 / (1 + torch.exp(-logits))
    if score == "sqrtsoftplus":
        return torch.sqrt(torch.log1p(torch.exp(logits)))
    exponentials = torch.exp(logits - logits.detach().max(dim=1, keepdim=True).values)
    return exponentials / exponentials.sum(dim=1, keepdim=True)


def plain_selection(scores: list[float], config: MoEConfig) -> list[int]:
    """The experts of one token, best first, of its selection scores; ties go to the lowest id."""
    router, size = config.router, len(scores) // config.router.num_groups
    groups = [range(first, first + size) for first in range(0, len(scores), size)]
    best = 1 if router.group_score == "max" else 2
    group_scores = [sum(sorted((scores[e] for e in group), reverse=True)[:best]) for group in groups]
    kept = sorted(range(len(groups)), key=lambda g: (-group_scores[g], g))[: router.topk_groups]
    candidates = [expert for group in kept for expert in groups[group]]
    return sorted(candidates, key=lambda e: (-scores[e], e))[: config.top_k]


def plain_routing(
    logits: torch.Tensor,
    config: MoEConfig,
    expert_bias: torch.Tensor | None = None,
    token_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``topk_index [T, K]`` and ``topk_weights [T, K]`` of ``logits [T, E]``."""
    scores = plain_scores(logits, config.router.score)
    choice = scores.detach() if expert_bias is None else scores.detach() + expert_bias
    index, weights = [], []
    for token in range(logits.shape[0]):
        if token_mask is not None and not token_mask[token]:
            index.append([-1] * config.top_k)
            weights.append(torch.zeros_like(logits[token, : config.top_k]))
            continue
        experts = plain_selection(choice[token].tolist(), config)
        chosen = torch.stack([scores[token, expert] for expert in experts])
        if config.router.renormalize:
            chosen = chosen / chosen.sum()
        index.append(experts)
        weights.append(chosen * config.router.scaling_factor)
    return torch.tensor(index).view(-1, config.top_k), torch.stack(weights) if weights else logits[:, : config.top_k]


def plain_layer(
    config: MoEConfig,
    parameters: dict[str, torch.Tensor],
    hidden_states: torch.Tensor,
    token_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[T, H]`` of ``hidden_states [T, H]``; ``parameters`` are named as in the layer's ``state_dict``."""
    logits = hidden_states @ parameters["router.weight"].t()
    if config.router.linear_bias:
        logits = logits + parameters["router.bias"]
    index, weights = plain_routing(logits, config, parameters.get("router.expert_bias"), token_mask)
    up_name = "gate_up_proj" if config.gated else "up_proj"
    experts = ExpertWeights(
        parameters[f"experts.{up_name}"],
        parameters["experts.down_proj"],
        parameters.get(f"experts.{up_name}_bias"),
        parameters.get("experts.down_proj_bias"),
    )
    out = plain_moe(hidden_states, index, weights, experts, config.activation, config.clamp)
    if config.shared_intermediate_size:
        pre = hidden_states @ parameters[f"shared_experts.{up_name}"].t()
        shared = plain_activation(pre, config.activation, config.clamp) @ parameters["shared_experts.down_proj"].t()
        if config.shared_gate:
            shared = shared / (1 + torch.exp(-hidden_states @ parameters["shared_experts.shared_gate"].t()))
        out = out + shared
    return out
