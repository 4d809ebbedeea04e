"""``CollectiveExchange`` over NCCL on 2 GPUs: the layer equals one GPU's, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megamoe import MoE, MoEConfig, RouterConfig
from tests.support.metrics import assert_close
from tests.support.processes import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]

TOKENS = ((130, 70), (0, 200), (0, 0))


def layer_equals_one_gpu(rank: int, world_size: int, seed: int, dtype: torch.dtype, precision: str) -> None:
    config = MoEConfig(
        hidden_size=256,
        intermediate_size=384,
        num_experts=8,
        top_k=2,
        shared_intermediate_size=128,
        precision=precision,
        router=RouterConfig(aux_loss_coef=0.01),
    )
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    device = torch.device("cuda", rank)
    layers = []
    for group in (None, dist.group.WORLD):
        torch.manual_seed(seed)
        torch.cuda.manual_seed(seed)
        layers.append(MoE(config, group, device=device, dtype=dtype))
    single, moe = layers
    for tokens in TOKENS:
        generator = torch.Generator(device).manual_seed(seed)
        total = sum(tokens)
        x = torch.randn(total, 256, generator=generator, device=device, dtype=dtype)
        grad = torch.randn(total, 256, generator=generator, device=device, dtype=dtype)
        start = sum(tokens[:rank])
        part = slice(start, start + tokens[rank])
        single.zero_grad()
        moe.zero_grad()
        ours, theirs = x[part].clone().requires_grad_(), x.clone().requires_grad_()
        out, expected = moe(ours), single(theirs)
        out.backward(grad[part])
        expected.backward(grad)
        assert_close(out, expected[part], tolerance, f"{tokens}: output")
        local = config.num_experts // world_size
        mine = slice(rank * local, (rank + 1) * local)
        for name, parameter in single.experts.named_parameters():
            gradient = getattr(moe.experts, name).grad.to_local() * world_size
            assert_close(gradient, parameter.grad[mine], tolerance, f"{tokens}: gradient of {name}")


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float32, "bf16"), (torch.bfloat16, "bf16"), (torch.bfloat16, "fp8")],
    ids=["fp32", "bf16", "fp8"],
)
def test_layer_equals_one_gpu(dtype, precision, seed):
    run_ranks(layer_equals_one_gpu, 2, seed, dtype, precision, backend="nccl", timeout=120)
