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
