"""A transformers model with its experts on 2 GPUs over NCCL, against transformers' own experts on one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megamoe import average_gradients
from megamoe.integrations.transformers import enable_expert_parallel
from tests.integrations.families import batch, build, experts_modules, generate, prompts, robust_seed
from tests.support.metrics import assert_close
from tests.support.processes import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]

FAMILIES = ("mixtral", "gpt_oss")
LENGTHS = ([5, 9, 3], [12])
TOLERANCE = 1e-4


def logits(model: nn.Module, sequences: list[list[int]]) -> torch.Tensor:
    return model(**{name: tensor.cuda() for name, tensor in batch(sequences).items()}).logits


def equals_one_gpu(rank: int, world_size: int, seeds: dict[str, int], seed: int) -> None:
    mesh = init_device_mesh("cuda", (1, world_size), mesh_dim_names=("data", "expert"))
    sequences = [prompts(seed + r, LENGTHS[r]) for r in range(world_size)]
    for family in FAMILIES:
        eager, model = build(family, seeds[family]).cuda(), build(family, seeds[family])
        # From host memory: each rank's experts go to its GPU.
        enable_expert_parallel(model, mesh["expert"])
        model.cuda()
        for module in experts_modules(model):
            assert all(p.to_local().is_cuda for p in module.parameters())
        out = logits(model, sequences[rank])
        assert_close(out, logits(eager, sequences[rank]), TOLERANCE, f"{family} logits")
        out.square().mean().backward()
        average_gradients(model, mesh)
        for r in range(world_size):
            (logits(eager, sequences[r]).square().mean() / world_size).backward()
        for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
            grad = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
            expected = torch.zeros_like(grad) if theirs.grad is None else theirs.grad
            assert_close(grad, expected, TOLERANCE, f"{family}, gradient of {name}")
        tokens = (40, 15)[rank]
        assert generate(model, sequences[rank], tokens) == generate(eager, sequences[rank], tokens)


def test_model_equals_one_gpu(seed):
    cases = [(prompts(seed + rank, lengths), 40) for rank, lengths in enumerate(LENGTHS)]
    seeds = {family: robust_seed(family, seed, cases) for family in FAMILIES}
    run_ranks(equals_one_gpu, 2, seeds, seed, backend="nccl", timeout=200)
