"""An MoE layer in plain model code: a transformer block whose feed-forward is an ``MoE``, trained for a few steps.

Run: python examples/moe_layer.py
"""

from __future__ import annotations

import torch
from torch import nn

from megamoe import MoE, MoEConfig, RouterConfig, clip_grad_norm_, update_expert_biases

CONFIG = MoEConfig(
    hidden_size=64,
    intermediate_size=96,
    num_experts=8,
    top_k=2,
    shared_intermediate_size=64,
    router=RouterConfig(score="sigmoid", expert_bias=True, bias_update_rate=0.01, aux_loss_coef=1e-3),
)


class Block(nn.Module):
    """Pre-norm attention, then a mixture of experts where a dense model has its MLP."""

    def __init__(self, config: MoEConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size)
        self.attention = nn.MultiheadAttention(config.hidden_size, num_heads=4, batch_first=True)
        self.moe_norm = nn.RMSNorm(config.hidden_size)
        self.moe = MoE(config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.attention_norm(hidden_states)
        hidden_states = hidden_states + self.attention(x, x, x, need_weights=False)[0]
        return hidden_states + self.moe(self.moe_norm(hidden_states))


def main(steps: int = 60) -> tuple[float, float]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(CONFIG), Block(CONFIG), nn.Linear(CONFIG.hidden_size, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    inputs = torch.randn(16, 12, CONFIG.hidden_size)
    targets = inputs[..., :4].cumsum(dim=1)  # each position sums what came before: needs attention

    first = None
    for step in range(steps):
        # The auxiliary loss is attached to the graph inside the layer: nothing to add here.
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm_(model, max_norm=1.0)
        optimizer.step()
        counts = update_expert_biases(model)  # [layers, experts], moves the selection biases towards equal load
        first = loss.item() if first is None else first
        if step % 10 == 0 or step == steps - 1:
            busiest = (counts.max(dim=1).values / counts.double().mean(dim=1)).max()
            print(f"step {step:3d}  loss {loss.item():.4f}  grad norm {norm:.2f}  busiest expert {busiest:.2f}x mean")
    return first, loss.item()


if __name__ == "__main__":
    before, after = main()
    assert after < 0.5 * before, f"the loss must fall: {before:.4f} -> {after:.4f}"
