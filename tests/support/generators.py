"""Random routings and expert weights. All draw from torch's default generator: seed it with the ``seed`` fixture."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megamoe.types import Routing

ROUTING_KINDS = ("uniform", "zipf", "one_expert", "empty_experts", "dropped", "duplicates", "none")
"""What ``random_routing`` can draw:

- uniform: K distinct experts, all equally likely.
- zipf: K distinct experts, expert e with odds 1 / (e + 1).
- one_expert: every slot of every token to the same expert.
- empty_experts: only every other expert, so that the first, some in the middle and (odd E) the last get none.
- dropped: uniform, a third of the slots emptied by ids outside ``[0, E)``, every fifth token without any expert.
- duplicates: drawn with replacement.
- none: nothing is sent anywhere.
"""


def random_routing(
    kind: str,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Routing:
    """A routing of one of ``ROUTING_KINDS``; its weights are in (0.1, 1.1), also those of empty slots."""
    shape = (num_tokens, top_k)
    odds = torch.ones(num_experts)
    if kind == "zipf":
        odds = 1 / torch.arange(1, num_experts + 1)
    if kind == "one_expert":
        index = torch.randint(num_experts, (1, 1)).expand(shape).clone()
    elif kind == "none":
        index = torch.full(shape, -1)
    elif kind == "empty_experts":
        used = torch.arange(1, max(num_experts, 2), 2) % num_experts
        index = used[torch.randint(used.numel(), shape)]
    elif kind == "duplicates":
        index = torch.randint(num_experts, shape)
    else:
        # The K largest of log(odds) + Gumbel noise are K draws without replacement.
        noise = -torch.log(-torch.log(torch.rand(num_tokens, num_experts).clamp(1e-12, 1 - 1e-7)))
        index = (odds.log() + noise).topk(top_k, dim=1).indices
    if kind == "dropped":
        outside = torch.tensor([-1, -1, num_experts, -7, num_experts + 100])
        drop = torch.rand(shape) < 1 / 3
        drop[::5] = True
        index = torch.where(drop, outside[torch.randint(outside.numel(), shape)], index)
    weights = torch.rand(shape, dtype=dtype) + 0.1
    return Routing(index.to(device), weights.to(device))


@dataclass
class ExpertWeights:
    """Parameters of ``grouped_mlp``, in its order."""

    up_proj: torch.Tensor
    down_proj: torch.Tensor
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Those that are there."""
        return [t for t in (self.up_proj, self.down_proj, self.up_bias, self.down_bias) if t is not None]

    def requires_grad_(self) -> ExpertWeights:
        for tensor in self.tensors():
            tensor.requires_grad_()
        return self

    def to(self, *args, **kwargs) -> ExpertWeights:
        """Detached copies."""
        fields = (self.up_proj, self.down_proj, self.up_bias, self.down_bias)
        return ExpertWeights(*(None if t is None else t.detach().clone().to(*args, **kwargs) for t in fields))


def random_expert_weights(
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    activation: str = "swiglu",
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
) -> ExpertWeights:
    """Weights N(0, 1/fan_in), biases N(0, 1): every term matters for the result."""
    up_rows = intermediate_size * (1 if activation == "relu2" else 2)
    up_proj = torch.randn(num_experts, up_rows, hidden_size, dtype=dtype) * hidden_size**-0.5
    down_proj = torch.randn(num_experts, hidden_size, intermediate_size, dtype=dtype) * intermediate_size**-0.5
    if not bias:
        return ExpertWeights(up_proj, down_proj)
    up_bias = torch.randn(num_experts, up_rows, dtype=dtype)
    return ExpertWeights(up_proj, down_proj, up_bias, torch.randn(num_experts, hidden_size, dtype=dtype))
