"""Expert parallelism: each rank holds a part of the experts and its own tokens; gradients are those of one process.

Run: torchrun --standalone --nproc-per-node 2 examples/expert_parallel.py
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megamoe import MoE, MoEConfig, RouterConfig, average_gradients, clip_grad_norm_

CONFIG = MoEConfig(
    hidden_size=64,
    intermediate_size=96,
    num_experts=8,
    top_k=2,
    router=RouterConfig(aux_loss_coef=0.01),
)
TOKENS_PER_RANK = 40


def batch(rank: int) -> torch.Tensor:
    """This rank's tokens; any rank can make any other's, for the check."""
    return torch.randn(TOKENS_PER_RANK, CONFIG.hidden_size, generator=torch.Generator().manual_seed(rank))


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (1, world_size), mesh_dim_names=("data", "expert"))

    # The same seed on every rank: an expert's initial weights depend on the seed and its id only.
    torch.manual_seed(0)
    moe = MoE(CONFIG, mesh["expert"], device=device)
    print(f"[rank {rank}] {moe.experts}")

    out = moe(batch(rank).to(device))
    out.square().mean().backward()
    average_gradients(moe, mesh)
    norm = clip_grad_norm_(moe, max_norm=float("inf"))

    # The same step in one process, over all ranks' tokens.
    torch.manual_seed(0)
    single = MoE(CONFIG, device=device)
    expected = single(torch.cat([batch(r) for r in range(world_size)]).to(device))
    expected.square().mean().backward()
    expected_norm = clip_grad_norm_(single, max_norm=float("inf"))

    mine = slice(rank * TOKENS_PER_RANK, (rank + 1) * TOKENS_PER_RANK)
    torch.testing.assert_close(out, expected[mine], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm, expected_norm, rtol=1e-4, atol=0)
    for (name, ours), theirs in zip(moe.named_parameters(), single.parameters(), strict=True):
        grad = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
        error = (grad - theirs.grad).norm() / theirs.grad.norm()
        assert error < 1e-4, f"gradient of {name}: relative error {error:.1e}"
        print(f"[rank {rank}] gradient of {name}: relative error {error:.1e} against one process")
    dist.destroy_process_group()
    # A gloo thread that still has to release its last tensor would abort the process in a closing interpreter.
    time.sleep(0.2)


if __name__ == "__main__":
    main()
