"""The mega-kernel's path on GPUs: the bits of the staged path, graphs, torch.compile, and DeepGEMM's interface."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import megamoe.compat.deep_gemm as deep_gemm
from megamoe import DecodeRunner, MegaMoEError, MoE, MoEConfig, RouterConfig, Routing, mega_moe
from megamoe.comm.symm import SymmetricBuffer
from megamoe.kernels.quant import quantize_blockwise
from megamoe.kernels.weights import interleave_gate_up
from megamoe.layers.parallel import local_tensor
from megamoe.plan import plan_memory
from megamoe.types import Fp8Tensor
from tests.support.metrics import assert_close
from tests.support.processes import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")

BF16 = torch.bfloat16
ROUTER = RouterConfig(score="sigmoid", expert_bias=True)
SMALL = MoEConfig(1024, 512, 16, 4, router=ROUTER, precision="fp8", max_tokens_per_rank=128)
LARGE = MoEConfig(2048, 1408, 16, 4, router=ROUTER, precision="fp8", max_tokens_per_rank=2048)
CONFIGS = {
    "small": SMALL,
    "large": LARGE,
    "padded": replace(SMALL, intermediate_size=360, shared_intermediate_size=256),
    "clamped": replace(SMALL, activation="swiglu_oai"),
    "gelu": replace(SMALL, hidden_size=896, activation="geglu_tanh", activation_clamp=1.0),
    "biases": replace(SMALL, activation="swiglu_oai", bias=True),
    "biases, padded": replace(LARGE, intermediate_size=1440, activation="swiglu_oai", bias=True),
    "small pool": replace(LARGE, pool_bytes=128 * (2048 + 1408 + 4 * 27) * 12),
    "shared": replace(SMALL, shared_intermediate_size=1024, fuse_shared_experts=True),
    "shared, large": replace(LARGE, shared_intermediate_size=1408, fuse_shared_experts=True),
    "shared, padded, gate": replace(
        SMALL, intermediate_size=360, shared_intermediate_size=1080, shared_gate=True, fuse_shared_experts=True
    ),
    "bf16": replace(SMALL, precision="bf16", shared_intermediate_size=256),
    "bf16 large": replace(LARGE, precision="bf16"),
    "bf16 biases": replace(SMALL, precision="bf16", activation="swiglu_oai", bias=True),
    "bf16 clamped": replace(SMALL, precision="bf16", hidden_size=896, activation="swiglu_oai"),
}


def group_of(ranks: int):
    return dist.group.WORLD if ranks > 1 else None


def layers(config: MoEConfig, ranks: int, seed: int, *paths: str, dtype: torch.dtype = BF16) -> list[MoE]:
    """A layer with the same parameters for each path."""
    made = []
    for path in paths:
        torch.manual_seed(seed)
        moe = MoE(config, group_of(ranks), path=path, device="cuda", dtype=dtype).eval()
        if config.bias:
            for bias in (moe.experts.gate_up_proj_bias, moe.experts.down_proj_bias):
                torch.nn.init.normal_(local_tensor(bias))
        made.append(moe)
    return made


# ---------------------------------------------------------------- the layer


def bits_of_staged(rank: int, ranks: int, seed: int, name: str) -> None:
    config = CONFIGS[name]
    fused, staged = layers(config, ranks, seed, "fused", "staged")
    assert fused.explain().splitlines()[0] == "inference  fused: as asked for"
    assert ("shared     fused" in fused.explain()) == config.fuse_shared_experts
    generator = torch.Generator("cuda").manual_seed(seed + rank)
    full = config.max_tokens_per_rank
    for counts in ((full, full), (full, 37), (0, 5), (5, 0), (0, 0), (1, 1)):
        x = torch.randn(counts[rank], config.hidden_size, generator=generator, device="cuda")
        mask = torch.rand(counts[rank], generator=generator, device="cuda") < 0.8
        with torch.no_grad():
            assert torch.equal(fused(x.to(BF16), mask), staged(x.to(BF16), mask)), counts
            # From fp32, and to it.
            assert torch.equal(fused(x), staged(x)), counts
        theirs = [x.to(BF16).requires_grad_() for _ in range(2)]
        outs = [moe(each) for moe, each in zip((fused, staged), theirs, strict=True)]
        assert torch.equal(*outs)
        for out in outs:
            out.square().sum().backward()
        assert torch.equal(*(each.grad for each in theirs))
    assert torch.equal(fused.experts.slots.rows_received, staged.experts.slots.rows_received)
    fused.close()
    staged.close()


@pytest.mark.parametrize("name", CONFIGS)
def test_bits_of_staged_on_one_gpu(name, seed):
    bits_of_staged(0, 1, seed, name)


@two_gpus
@pytest.mark.parametrize("name", CONFIGS)
def test_bits_of_staged(name, seed):
    run_ranks(bits_of_staged, 2, seed, name, backend="nccl", timeout=400)


DECODED = ("small", "biases", "biases, padded", "bf16 biases", "shared", "shared, padded, gate")


def decode(rank: int, ranks: int, seed: int, name: str) -> None:
    """Replays equal eager calls of the staged path, with other tokens and weights each time."""
    config = CONFIGS[name]
    hidden = config.hidden_size
    fused, staged = layers(config, ranks, seed, "fused", "staged")
    runner = DecodeRunner(fused, hidden, (1, 8, 64))
    generator = torch.Generator().manual_seed(seed + rank)
    with torch.no_grad():
        for call in range(200):
            tokens = int(torch.randint(0, 65, (), generator=generator))
            x = torch.randn(tokens, hidden, generator=generator).to("cuda", BF16)
            size = runner.bucket_of(tokens)
            padded = torch.zeros(size, hidden, dtype=BF16, device="cuda")
            padded[:tokens] = x
            mask = torch.arange(size, device="cuda") < tokens
            out = runner(x).clone()
            assert torch.equal(out, staged(padded, mask)[:tokens]), call
            if call % 50 == 49:
                for moe in (fused, staged):
                    moe.experts.down_proj.mul_(0.5)
                    if config.fuse_shared_experts:
                        moe.shared_experts.gate_up_proj.neg_()
                        moe.shared_experts.down_proj.mul_(0.5)
                    if config.bias:
                        moe.experts.gate_up_proj_bias.neg_()
                        moe.experts.down_proj_bias.neg_()
    assert runner.captures == 3
    fused.close()
    staged.close()


@pytest.mark.parametrize("name", DECODED)
def test_decode_runner_on_one_gpu(name, seed):
    decode(0, 1, seed, name)


@two_gpus
@pytest.mark.parametrize("name", DECODED)
def test_decode_runner(name, seed):
    run_ranks(decode, 2, seed, name, backend="nccl", timeout=400)


@pytest.mark.parametrize("name", ["small", "biases, padded", "shared, padded, gate"])
@pytest.mark.parametrize("path", ["fused", "staged"])
def test_compiled(name, path, seed):
    config = CONFIGS[name]
    (moe,) = layers(config, 1, seed, path)
    torch._dynamo.reset()
    # Inductor would compute the router's weights with other roundings.
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for tokens in (128, 7, 64):
            x = torch.randn(tokens, config.hidden_size, device="cuda").to(BF16)
            assert torch.equal(compiled(x), moe(x)), tokens
    moe.close()
    torch._dynamo.reset()


def shared_experts_of_all_paths(rank: int, ranks: int, seed: int) -> None:
    """Close to the dense shared expert, for masked tokens too; training has its bits."""
    for name in ("shared", "shared, padded, gate"):
        config = CONFIGS[name]
        fused, collective = layers(config, ranks, seed, "fused", "collective")
        (dense,) = layers(replace(config, fuse_shared_experts=False), ranks, seed, "staged")
        generator = torch.Generator("cuda").manual_seed(seed + rank)
        for tokens, live in ((100, 0.8), (1, 1.0), (rank, 1.0), (7, 0.0)):
            x = torch.randn(tokens, config.hidden_size, generator=generator, device="cuda").to(BF16)
            mask = torch.rand(tokens, generator=generator, device="cuda") < live
            with torch.no_grad():
                wanted = dense(x, mask)
                assert_close(fused(x, mask), wanted, 0.12, f"{name}, fused")
                assert_close(collective(x, mask), wanted, 0.12, f"{name}, collective")
            assert torch.equal(fused(x, mask), dense(x, mask))
        for moe in (fused, collective, dense):
            moe.close()


def test_shared_experts_on_one_gpu(seed):
    shared_experts_of_all_paths(0, 1, seed)


@two_gpus
def test_shared_experts(seed):
    run_ranks(shared_experts_of_all_paths, 2, seed, backend="nccl", timeout=400)


# ---------------------------------------------------------------- the function


class Problem:
    """Experts of a rank, and random tokens for them."""

    def __init__(self, rank: int, ranks: int, seed: int, tokens: int = 128):
        self.ranks, self.generator = ranks, torch.Generator("cuda").manual_seed(seed + rank)
        plan = plan_memory(SMALL, ranks, tokens)
        self.buffer = SymmetricBuffer(plan, group_of(ranks))
        local = plan.num_local_experts
        self.up, self.down = self.weight(local, 1024, 1024), self.weight(local, 1024, 512)

    def weight(self, *shape: int) -> Fp8Tensor:
        return quantize_blockwise(torch.randn(*shape, device="cuda", generator=self.generator) * shape[-1] ** -0.5)

    def tokens(self, count: int, holes: float = 0.0) -> tuple[torch.Tensor, Routing]:
        x = torch.randn(count, 1024, device="cuda", generator=self.generator).to(BF16)
        index = torch.rand(count, 16, device="cuda", generator=self.generator).topk(4).indices
        hole = torch.rand(index.shape, device="cuda", generator=self.generator) < holes
        weights = torch.rand(count, 4, device="cuda", generator=self.generator)
        return x, Routing(index.masked_fill(hole, -1), weights)

    def call(self, x: torch.Tensor, routing: Routing, **options) -> torch.Tensor:
        with torch.no_grad():
            return mega_moe(x, routing, self.up, self.down, self.buffer, **options)


def graphs(rank: int, ranks: int, seed: int) -> None:
    """200 replays with changing tokens and routing; the first call may not be captured."""
    problem = Problem(rank, ranks, seed)
    x, routing = problem.tokens(64)
    out, counts = torch.empty_like(x), torch.zeros(16 // ranks, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(MegaMoEError, match="needs its scratch memory before"):
            problem.call(x, routing, out=out)
    problem.call(x, routing, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.call(x, routing, out=out, expert_counts=counts)
    total = torch.zeros_like(counts)
    for turn in range(200):
        new_x, new_routing = problem.tokens(64, holes=(0.0, 0.3, 1.0)[turn % 3])
        x.copy_(new_x)
        routing.topk_index.copy_(new_routing.topk_index)
        routing.topk_weights.copy_(new_routing.topk_weights)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, problem.call(x, routing, expert_counts=total)), turn
    assert torch.equal(counts, total) and total.sum() > 0
    problem.buffer.check()
    problem.buffer.close()


def test_replays_on_one_gpu(seed):
    graphs(0, 1, seed)


@two_gpus
def test_replays(seed):
    run_ranks(graphs, 2, seed, backend="nccl", timeout=400)


def bits_of_deep_gemm_calls(rank: int, ranks: int, seed: int) -> None:
    for tokens in (128, 4096):
        problem = Problem(rank, ranks, seed, tokens)
        buffer = deep_gemm.get_symm_buffer_for_mega_moe(group_of(ranks), 16, tokens, 4, 1024, 512)
        views = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
        plain = (problem.up.codes, problem.up.scales), (problem.down.codes, problem.down.scales)
        l1, l2 = deep_gemm.transform_weights_for_mega_moe_sm90(*plain)
        mixed = interleave_gate_up(l1[0].view(torch.uint8)).view(torch.float8_e4m3fn), l1[1]
        stats, counts = (torch.zeros(16 // ranks, dtype=torch.int32, device="cuda") for _ in range(2))
        for count in ((tokens, tokens), (3, 0), (0, 1), (tokens, 17)):
            x, routing = problem.tokens(count[rank], 0.2)
            deep_gemm.mega_moe_pre_dispatch_sm90(
                x, routing.topk_index.int(), routing.topk_weights, *views, len(x), routed_scaling_factor=0.5
            )
            y = torch.full_like(x, float("nan"))
            deep_gemm.fp8_mega_moe(y, l1, l2, buffer, stats, activation_clamp=2.0, num_tokens_bound=max(count))
            again = torch.full_like(x, float("nan"))
            deep_gemm.fp8_mega_moe(again, mixed, l2, buffer, activation_clamp=2.0, interleaved=True)
            scaled = Routing(routing.topk_index, routing.topk_weights * 0.5)
            expected = problem.call(x, scaled, clamp=2.0, expert_counts=counts)
            assert torch.equal(y, expected) and torch.equal(again, expected), count
        assert torch.equal(stats, counts)
        buffer.shared.check()
        buffer.destroy()
        problem.buffer.close()


def test_bits_of_deep_gemm_calls_on_one_gpu(seed):
    bits_of_deep_gemm_calls(0, 1, seed)


@two_gpus
def test_bits_of_deep_gemm_calls(seed):
    run_ranks(bits_of_deep_gemm_calls, 2, seed, backend="nccl", timeout=400)
