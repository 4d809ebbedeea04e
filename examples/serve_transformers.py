"""Expert-parallel serving of a transformers model: each rank holds a part of the experts and has its own prompts.

The model is a tiny random one; AutoModelForCausalLM.from_pretrained(...) takes its place. Needs transformers 5.

Run: torchrun --standalone --nproc-per-node 2 examples/serve_transformers.py
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

from megamoe.integrations.transformers import enable_expert_parallel, join

CONFIG = MixtralConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
    experts_implementation="eager",
)


def random_model(device: torch.device) -> MixtralForCausalLM:
    """The same on every rank, as a checkpoint would be; in fp64, so that rounding never decides between two tokens."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    return model.to(device, torch.float64).eval()


def prompts(rank: int) -> list[torch.Tensor]:
    """This rank's batches ``[prompts, length]``: as many and as long as they come."""
    generator = torch.Generator().manual_seed(rank)
    sizes = [(3, 7), (1, 20)] if rank == 0 else [(2, 4)]
    return [torch.randint(1, CONFIG.vocab_size, size, generator=generator) for size in sizes]


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()

    single = random_model(device)
    model = random_model(device)
    enable_expert_parallel(model, dist.group.WORLD)
    held = sum(p.to_local().numel() for p in model.parameters() if hasattr(p, "to_local"))
    print(f"[rank {rank}] holds {held:,} of {sum(p.numel() for p in single.parameters()):,} parameters as its experts")

    options = dict(max_new_tokens=64, do_sample=False)
    start, tokens = time.perf_counter(), 0
    # Ranks have different numbers of batches: one that is done takes part, without tokens, until all are.
    with join(model):
        outputs = []
        for batch in prompts(rank):
            outputs.append(model.generate(batch.to(device), **options))
            tokens += batch.shape[0] * options["max_new_tokens"]
    seconds = time.perf_counter() - start
    print(f"[rank {rank}] {tokens} tokens in {seconds:.1f} s: {tokens / seconds:,.0f} tokens/s")

    for batch, output in zip(prompts(rank), outputs, strict=True):
        expected = single.generate(batch.to(device), **options)
        assert torch.equal(output, expected), "expert-parallel and single-process texts differ"
    print(f"[rank {rank}] {len(outputs)} batches equal to one process")
    dist.destroy_process_group()
    # A gloo thread that still has to release its last tensor would abort the process in a closing interpreter.
    time.sleep(0.2)


if __name__ == "__main__":
    main()
