"""A router of one's own: hash routing (arXiv 2106.04426), which sends each token id to fixed experts, no learning.

A router is any module that maps (hidden_states [T, H], token_mask [T] or None) to a ``Routing``. This one looks at the
token ids, which the model hands to it before the call.

Run: python examples/custom_router.py
"""

from __future__ import annotations

import torch
from torch import nn

from megamoe import MoE, MoEConfig, Routing

VOCABULARY = 1000


class HashRouter(nn.Module):
    """Each token id has ``top_k`` experts, drawn once at random, with equal weights."""

    def __init__(self, config: MoEConfig, vocabulary: int):
        super().__init__()
        self.config = config
        self.token_ids: torch.Tensor | None = None
        self.register_buffer("table", torch.empty(vocabulary, config.top_k, dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table.copy_(torch.rand(self.table.shape[0], self.config.num_experts).topk(self.config.top_k).indices)

    def forward(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None = None) -> Routing:
        index = self.table[self.token_ids.flatten()]
        if token_mask is not None:
            index = index.masked_fill(~token_mask.unsqueeze(1), -1)  # -1: no expert
        weights = torch.full(index.shape, 1 / self.config.top_k, device=index.device)
        return Routing(topk_index=index, topk_weights=weights)


class HashLayer(nn.Module):
    """Embedding, hash-routed experts, output head."""

    def __init__(self, config: MoEConfig):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.hidden_size)
        self.moe = MoE(config, router=HashRouter(config, VOCABULARY))
        self.head = nn.Linear(config.hidden_size, VOCABULARY)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        self.moe.router.token_ids = token_ids
        x = self.embedding(token_ids)
        return self.head(x + self.moe(x))


def main(steps: int = 20) -> tuple[float, float]:
    torch.manual_seed(0)
    model = HashLayer(MoEConfig(hidden_size=48, intermediate_size=64, num_experts=16, top_k=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    token_ids = torch.randint(VOCABULARY, (8, 64))
    targets = (token_ids * 7 + 3) % VOCABULARY

    losses = []
    for step in range(steps):
        loss = nn.functional.cross_entropy(model(token_ids).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 5 == 0 or step == steps - 1:
            print(f"step {step:3d}  loss {losses[-1]:.4f}")
    used = model.moe.router.table.unique().numel()
    print(f"{used} of {model.moe.config.num_experts} experts in use")
    return losses[0], losses[-1]


if __name__ == "__main__":
    before, after = main()
    assert after < 0.2 * before, f"the loss must fall: {before:.4f} -> {after:.4f}"
