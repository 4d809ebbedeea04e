"""``DecodeRunner`` on a CPU: buckets, padding and refusals. Graphs: test_decode_gpu.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megamoe import DecodeRunner, MoE, MoEConfig, RouterConfig
from megamoe.kernels import weight_cache
from megamoe.kernels.quant import quantize_blockwise
from megamoe.layers import decode
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


# ---------------------------------------------------------------- what a call costs


class Operators(TorchDispatchMode):
    """Names of torch's operators, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def replaying(runner: DecodeRunner) -> DecodeRunner:
    """With graphs that note what they are given."""
    for size, bucket in runner._buckets.items():
        bucket.out = torch.zeros(size, 32)

        def replay(bucket=bucket):
            bucket.out.copy_(torch.where(bucket.token_mask[:, None], bucket.hidden_states, torch.nan))

        bucket.graph = SimpleNamespace(replay=replay)
    return runner


@pytest.fixture
def runner() -> DecodeRunner:
    """Its graphs return the tokens that they are given, and NaN for masked ones."""
    return replaying(DecodeRunner(MoE(CONFIG).eval(), 32, (1, 4, 16), dtype=torch.float32))


def operators_of(call) -> list[str]:
    with Operators() as seen:
        call()
    return seen.names


def test_a_call_copies_its_tokens_and_checks_a_shape_once(runner, seed, monkeypatch):
    checked = []
    monkeypatch.setattr(decode, "check_tensor", lambda *arguments: checked.append(arguments[1].shape))
    x = torch.randn(3, 32)
    assert torch.equal(runner(x), x)
    own = len(operators_of(runner._buckets[4].graph.replay))
    assert operators_of(lambda: runner(x))[:-own] == ["copy_"]
    assert operators_of(lambda: runner(runner.input(3)))[:-own] == []
    # The mask, in a bucket of another number of tokens.
    runner(torch.randn(4, 32))
    assert operators_of(lambda: runner(x))[:-own] == ["copy_", "copy_"]
    assert checked == [(3, 32), (4, 32)]


def test_numbers_of_tokens_that_take_turns(runner, seed):
    """Each finds its own mask, whoever has used the bucket before."""
    for count in torch.randint(0, 17, (60,)).tolist():
        x = torch.randn(count, 32)
        out = runner(x)
        assert torch.equal(out, x)
        bucket = runner._buckets[runner.bucket_of(count)]
        assert bucket.token_mask.tolist() == [index < count for index in range(len(bucket.token_mask))]
        assert runner(x) is out


def test_tokens_written_to_the_input(seed):
    moe = MoE(CONFIG, dtype=torch.float64).eval()
    runner = DecodeRunner(moe, 32, (1, 4, 16), dtype=torch.float64)
    for count in (3, 16, 0, 4, 3):
        x, place = torch.randn(count, 32, dtype=torch.float64), runner.input(count)
        assert place is runner.input(count) and place.shape == (count, 32)
        place.copy_(x)
        torch.testing.assert_close(runner(place), moe(x), rtol=1e-12, atol=1e-12)
    # Part of another number's input is copied to where it lies already, and the rest is masked.
    runner.input(4).copy_(torch.randn(4, 32, dtype=torch.float64))
    part = runner.input(4)[:2]
    torch.testing.assert_close(runner(part), moe(part.clone()), rtol=1e-12, atol=1e-12)
    with fails(ValueError, "tokens", 17, "must not exceed the largest bucket, 16"):
        runner.input(17)
    with fails(ValueError, "num_tokens", -1, "must be at least 0"):
        runner.input(-1)


def test_gradients_and_inference_mode_leave_no_trace(seed):
    moe = MoE(CONFIG, dtype=torch.float32).eval()
    with torch.inference_mode():
        runner = DecodeRunner(moe, 32, (4,), dtype=torch.float32)
        inside = torch.randn(3, 32)
        runner(inside)
    x = torch.randn(3, 32, requires_grad=True)
    expected = moe(x).detach()
    torch.testing.assert_close(runner(x), expected)
    assert not runner.input(3).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(runner(x), expected)
        runner(torch.randn(2, 32))
    torch.testing.assert_close(runner(x.detach()[:2]), expected[:2])
    torch.testing.assert_close(runner(inside), moe(inside.clone()).detach())


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_copies_are_current_when_a_graph_is_replayed(precision, seed):
    moe = MoE(MoEConfig(32, 16, 4, 2, precision=precision)).eval()
    runner = DecodeRunner(moe, 32, (4,), dtype=torch.float32)
    x = torch.randn(3, 32)
    runner(x)
    replaying(runner)
    runner._steps.clear()
    memory = weight_cache._find(moe.experts.down_proj)
    assert (memory is not None) == (precision == "fp8")
    for _ in range(3):
        assert torch.equal(runner(x), x)
        for (padding, *_), made in memory.copies.items() if memory else ():
            wanted = quantize_blockwise(padding.pad(moe.experts.down_proj.detach()))
            assert torch.equal(made.plain.codes.float(), wanted.codes.float())
            assert torch.equal(made.plain.scales, wanted.scales)
        with torch.no_grad():
            moe.experts.down_proj.add_(torch.randn_like(moe.experts.down_proj))


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
    with fails(TypeError, "hidden_states", "list", "must be a torch.Tensor"):
        runner([[0.0] * 32] * 3)
    # Also of a shape that has been seen.
    runner(torch.zeros(3, 32))
    with fails(TypeError, "hidden_states.dtype", torch.float64, "must be one of torch.float32"):
        runner(torch.zeros(3, 32, dtype=torch.float64))
    with fails(ValueError, "hidden_states.device", "meta", "must be cpu"):
        runner(torch.zeros(3, 32, device="meta"))
