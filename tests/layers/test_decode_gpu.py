"""``DecodeRunner`` on GPUs: replays equal eager calls, whatever the routing and the number of tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megamoe import DecodeRunner, MegaMoEError, MoE, MoEConfig, RouterConfig
from tests.support.processes import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CONFIG = MoEConfig(256, 128, 16, 4, router=RouterConfig(score="sigmoid", expert_bias=True), max_tokens_per_rank=64)
BF16 = torch.bfloat16


def replays_equal_eager(moe: MoE, device: torch.device, generator: torch.Generator, calls: int) -> None:
    runner = DecodeRunner(moe, 256, (1, 8, 64))
    assert runner.captures == 3
    with torch.no_grad():
        for call in range(calls):
            tokens = int(torch.randint(0, 65, (), generator=generator))
            x = torch.randn(tokens, 256, generator=generator).to(device, BF16)
            size = runner.bucket_of(tokens)
            padded = torch.zeros(size, 256, dtype=BF16, device=device)
            padded[:tokens] = x
            mask = torch.arange(size, device=device) < tokens
            out = runner(x).clone()
            assert torch.equal(out, moe(padded, mask)[:tokens]), call
            if call % 50 == 49:
                moe.experts.down_proj.mul_(0.5)
    assert runner.captures == 3


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_one_gpu(precision, seed):
    device = torch.device("cuda", 0)
    moe = MoE(replace(CONFIG, precision=precision), device=device, dtype=BF16).eval()
    replays_equal_eager(moe, device, torch.Generator().manual_seed(seed), 200)


@torch.no_grad()
def test_a_token_has_the_same_bits_in_any_bucket(seed):
    """Of the routing; the experts' GEMMs take other tiles for more rows, so outputs agree to rounding."""
    device = torch.device("cuda", 0)
    moe = MoE(CONFIG, device=device, dtype=BF16).eval()
    seen = []
    moe.router.register_forward_hook(lambda module, inputs, routing: seen.append(routing))
    runner = DecodeRunner(moe, 256, (1, 8, 64))
    # Of each bucket, the largest first: two calls, and the capture.
    routings = {size: seen[3 * place + 2] for place, size in enumerate((64, 8, 1))}
    x = torch.randn(64, 256, device=device).to(BF16)
    runner(x)
    expected = routings[64].topk_index.clone(), routings[64].topk_weights.clone()
    for size in (1, 8):
        for start in range(0, 64, size):
            runner(x[start : start + size])
            assert torch.equal(routings[size].topk_index, expected[0][start : start + size])
            assert torch.equal(routings[size].topk_weights, expected[1][start : start + size])


@torch.no_grad()
def test_the_input_of_a_runner(seed):
    device = torch.device("cuda", 0)
    runner = DecodeRunner(MoE(CONFIG, device=device, dtype=BF16).eval(), 256, (1, 8, 64))
    for count in (1, 5, 8, 5, 64, 0, 33):
        x = torch.randn(count, 256, device=device).to(BF16)
        expected = runner(x).clone()
        runner.input(count).fill_(float("nan"))
        runner.input(count).copy_(x)
        assert torch.equal(runner(runner.input(count)), expected)


@torch.no_grad()
def test_streams_take_turns(seed):
    """A replay waits for the casts of another stream, which a busy one has not begun yet."""
    device = torch.device("cuda", 0)
    moe = MoE(replace(CONFIG, precision="fp8"), device=device, dtype=BF16).eval()
    runner, x = DecodeRunner(moe, 256, (8,)), torch.randn(8, 256, device=device).to(BF16)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    for turn in range(10):
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[turn % 2]):
            torch.cuda._sleep(20_000_000)
            moe.experts.down_proj.mul_(-1)
            moe.experts.refresh_copies()
        with torch.cuda.stream(streams[1 - turn % 2]):
            out = runner(x).clone()
        torch.cuda.synchronize()
        assert torch.equal(out, moe(x)), turn


def _two_gpus(rank: int, ranks: int, seed: int) -> None:
    device = torch.device("cuda", rank)
    torch.manual_seed(seed)
    moe = MoE(CONFIG, dist.group.WORLD, path="staged", device=device, dtype=BF16).eval()
    # Ranks have different numbers of tokens.
    replays_equal_eager(moe, device, torch.Generator().manual_seed(seed + rank), 1000)
    collective = MoE(CONFIG, dist.group.WORLD, device=device, dtype=BF16).eval()
    with pytest.raises(MegaMoEError, match='experts.exchange = .*path="staged"'):
        DecodeRunner(collective, 256)
    moe.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_two_gpus(seed):
    run_ranks(_two_gpus, 2, seed, backend="nccl", timeout=200)
