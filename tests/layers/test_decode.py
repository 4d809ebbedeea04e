"""``DecodeRunner`` on a CPU: buckets, padding and refusals. Graphs: test_decode_gpu.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megamoe import DecodeRunner, MoE, MoEConfig, RouterConfig
from tests.support.errors import fails

CONFIG = MoEConfig(32, 16, 4, 2, router=RouterConfig(score="sigmoid", expert_bias=True), shared_intermediate_size=16)


class Recorded(nn.Module):
    """A layer that notes what it is called with; masked tokens must not matter to it."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.sizes, self.live = layer, [], []

    def forward(self, hidden_states, token_mask):
        self.sizes.append(hidden_states.shape[0])
        self.live.append(int(token_mask.sum()))
        # Whatever is in the padding.
        return self.layer(torch.where(token_mask[:, None], hidden_states, torch.randn_like(hidden_states)), token_mask)


def test_any_number_of_tokens(seed):
    moe = MoE(CONFIG, dtype=torch.float64).eval()
    recorded = Recorded(moe).eval()
    runner = DecodeRunner(recorded, 32, (1, 4, 16), dtype=torch.float64)
    counts = torch.randint(0, 17, (100,)).tolist() + [0, 16, 1]
    for count in counts:
        x = torch.randn(count, 32, dtype=torch.float64)
        torch.testing.assert_close(runner(x), moe(x), rtol=1e-12, atol=1e-12)
    assert set(recorded.sizes) <= {1, 4, 16} and recorded.live == counts
    assert runner.captures == 0 and runner.buckets == (1, 4, 16)


@pytest.mark.parametrize(("tokens", "bucket"), [(0, 1), (1, 1), (2, 4), (4, 4), (5, 16), (16, 16)])
def test_the_next_bucket(tokens, bucket):
    assert DecodeRunner(MoE(CONFIG).eval(), 32, (1, 4, 16)).bucket_of(tokens) == bucket


def test_weights_that_change_in_place_are_seen(seed):
    moe = MoE(CONFIG, dtype=torch.float32).eval()
    runner = DecodeRunner(moe, 32, (4,), dtype=torch.float32)
    x = torch.randn(3, 32)
    before = runner(x).clone()
    with torch.no_grad():
        moe.experts.down_proj.mul_(-1)
        moe.shared_experts.down_proj.mul_(-1)
    torch.testing.assert_close(runner(x), -before)


def test_no_gradients_are_recorded(seed):
    runner = DecodeRunner(MoE(CONFIG, dtype=torch.float32).eval(), 32, (4,), dtype=torch.float32)
    assert not runner(torch.randn(3, 32)).requires_grad


def test_bad_arguments():
    moe = MoE(CONFIG).eval()
    with fails(TypeError, "layer", "function", "must be an nn.Module"):
        DecodeRunner(lambda x, mask: x, 32)
    with fails(ValueError, "buckets", [4, 1], "must be ascending"):
        DecodeRunner(moe, 32, (4, 1))
    with fails(ValueError, "buckets", [], "must be ascending"):
        DecodeRunner(moe, 32, ())
    with fails(ValueError, "buckets", 0, "must be at least 1"):
        DecodeRunner(moe, 32, (0, 1))
    with fails(ValueError, "hidden_size", 0, "must be at least 1"):
        DecodeRunner(moe, 0)
    with fails(ValueError, "layer.training", True, "must be False"):
        DecodeRunner(MoE(CONFIG), 32)
    runner = DecodeRunner(moe, 32, (1, 4), dtype=torch.float32)
    with fails(ValueError, "tokens", 5, "must not exceed the largest bucket, 4"):
        runner(torch.zeros(5, 32))
    with fails(TypeError, "hidden_states.dtype", torch.float64, "must be one of torch.float32"):
        runner(torch.zeros(3, 32, dtype=torch.float64))
    with fails(ValueError, "hidden_states.shape", [3, 31], "must be [any, 32]"):
        runner(torch.zeros(3, 31))
