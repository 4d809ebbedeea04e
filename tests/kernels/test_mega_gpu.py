"""The mega-kernel on GPUs: the bits of the same layer in separate kernels, repeats, and graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megamoe import ExchangeError
from megamoe.bench.mega import MegaCase, MegaProblem
from megamoe.kernels.gemm import grouped_bf16_gemm_nt, grouped_fp8_gemm_nt
from megamoe.kernels.gemm_swiglu import grouped_bf16_gemm_swiglu_nt, grouped_fp8_gemm_swiglu_nt
from megamoe.kernels.mega_plan import MegaSettings, least_pool_blocks, plan_mega
from megamoe.kernels.row_groups import RowGroups
from megamoe.types import Routing
from tests.support.processes import run_ranks

pytestmark = pytest.mark.gpu

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")

precisions = pytest.mark.parametrize("precision", ["fp8", "bf16"])

SMALL = MegaCase(128, 1024, 512, 16, 4)
LARGE = MegaCase(2048, 2048, 1408, 16, 4)


def routed(problem: MegaProblem, routing: Routing, kind: str) -> Routing:
    index = routing.topk_index
    if kind == "one":
        index = torch.full_like(index, -1)
        index[:, 1] = problem.case.experts - 1
    elif kind == "none":
        index = torch.full_like(index, -1)
    elif kind == "twice":
        index = index[:, :1].expand(-1, index.shape[1]).contiguous()
    elif kind == "holes":
        index = torch.where(torch.rand(index.shape, device=index.device, generator=problem.generator) < 0.3, -1, index)
    return Routing(index, routing.topk_weights)


def settings_of(problem: MegaProblem) -> list[MegaSettings]:
    """Those that are chosen, other orders of tiles, and one other compilation."""
    chosen = problem.settings()
    return [chosen, replace(chosen, group=2, lag=4), replace(chosen, group=16, lag=1, skew=3, early=40)]


def check_bits(rank: int, ranks: int, seed: int, precision: str) -> None:
    group = dist.group.WORLD if ranks > 1 else None
    for case in (SMALL, LARGE):
        problem = MegaProblem(replace(case, precision=precision), group, seed=seed)
        full = case.tokens
        for counts in ((full, full), (full, 37), (0, 5), (5, 0), (0, 0), (1, 1)):
            for kind in ("random", "holes", "one", "twice", "none"):
                x, routing = problem.tokens(counts[rank])
                routing = routed(problem, routing, kind)
                expected = problem.staged(x, routing)
                for settings in settings_of(problem):
                    out = torch.full_like(x, float("nan"))
                    problem.fused(x, routing, out, settings)()
                    problem.buffer.check()
                    assert torch.equal(out, expected), (case, counts, kind, settings)
        problem.buffer.close()


def use_pool(problem: MegaProblem, blocks: int) -> None:
    """Calls of the problem from here on have a pool of ``blocks``."""
    plan = problem.plan
    pool_bytes = plan.pool_bytes // plan.pool_blocks * blocks
    problem.plan = plan_mega(plan.memory, plan.intermediate_size, plan.sms, pool_bytes=pool_bytes)
    assert problem.plan.pool_blocks == blocks
    problem.scratch = problem.plan.views(torch.empty(problem.plan.total, dtype=torch.uint8, device=problem.device))


def check_pools(rank: int, ranks: int, seed: int, precision: str) -> None:
    """The smallest pools, one after another, whose slots are taken up to ten times."""
    case = replace(LARGE, precision=precision)
    problem = MegaProblem(case, dist.group.WORLD if ranks > 1 else None, seed=seed)
    chosen = problem.settings()
    settings = [replace(chosen, group=group, lag=lag) for group, lag in ((1, 1), (4, 1), (3, 7), (8, 16))]
    for counts, kind in (((2048, 2048), "random"), ((2048, 37), "holes"), ((2048, 2048), "one"), ((0, 300), "random")):
        x, routing = problem.tokens(counts[rank])
        routing = routed(problem, routing, kind)
        expected = problem.staged(x, routing)
        for each in settings:
            for blocks in (least_pool_blocks(each), 3 * least_pool_blocks(each) // 2):
                use_pool(problem, blocks)
                out = torch.empty_like(x)
                call = problem.fused(x, routing, out, each)
                for turn in range(4):
                    out.fill_(float("nan"))
                    call()
                    problem.buffer.check()
                    assert torch.equal(out, expected), (counts, kind, each, blocks, turn)
    problem.buffer.close()


def check_biases(rank: int, ranks: int, seed: int, precision: str) -> None:
    """Also with the smallest pool."""
    from megamoe.kernels import mega

    problem = MegaProblem(replace(LARGE, precision=precision), dist.group.WORLD if ranks > 1 else None, seed=seed)
    case, weights, exchange = problem.case, problem.weights, problem.exchange
    first, second = grouped_fp8_gemm_swiglu_nt, grouped_fp8_gemm_nt
    if not case.fp8:
        first, second = grouped_bf16_gemm_swiglu_nt, grouped_bf16_gemm_nt
    columns = 2 * case.intermediate, case.hidden
    biases = tuple(torch.randn(weights.experts, n, device=problem.device, generator=problem.generator) for n in columns)
    x, routing = problem.tokens()
    rows, handle = exchange.dispatch_once(x, routing, torch.float8_e4m3fn if case.fp8 else torch.bfloat16)
    groups = RowGroups.psum(handle.layout.ends.to(torch.int32))
    settings = problem.settings()
    for activation, clamp in (("swiglu", None), ("swiglu_oai", 7.0)):
        act = first(rows, weights.up, groups, activation=activation, clamp=clamp, bias=biases[0])
        results = second(act, weights.down, groups, out_dtype=torch.float32, bias=biases[1])
        results = (results * handle.row_weights[:, None]).bfloat16()
        expected = exchange.return_rows(results, handle, torch.bfloat16)
        for blocks in (problem.plan.num_rows // 128, least_pool_blocks(settings)):
            use_pool(problem, blocks)
            out = torch.full_like(x, float("nan"))
            launches = mega.call(
                problem.plan, settings, problem.memory, problem.scratch, x, (routing.topk_index, routing.topk_weights),
                weights.up, weights.down, out, num_experts=case.experts, activation=activation, clamp=clamp,
                all_sms=problem.sms, biases=biases,
            )  # fmt: skip
            problem.buffer.run(launches)
            problem.buffer.check()
            assert torch.equal(out, expected), (activation, clamp, blocks)
    problem.buffer.close()


def check_graph(rank: int, ranks: int, seed: int, precision: str, replays: int) -> None:
    """New tokens and routing in the same tensors between replays."""
    case = replace(SMALL, precision=precision)
    problem = MegaProblem(case, dist.group.WORLD if ranks > 1 else None, seed=seed)
    x, routing = problem.tokens()
    out = torch.empty_like(x)
    call = problem.fused(x, routing, out, problem.settings())
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for turn in range(replays):
        new_x, new_routing = problem.tokens()
        x.copy_(new_x)
        routing.topk_index.copy_(new_routing.topk_index)
        routing.topk_weights.copy_(new_routing.topk_weights)
        out.fill_(float("nan"))
        graph.replay()
        if turn % 20 == 0:
            assert torch.equal(out, problem.staged(x, routing)), turn
    problem.buffer.check()
    problem.buffer.close()


def check_missing(rank: int, ranks: int, seed: int) -> None:
    problem = MegaProblem(SMALL, dist.group.WORLD, seed=seed)
    problem.memory = replace(problem.memory, budget_ns=2 * 10**9)
    x, routing = problem.tokens()
    out = torch.empty_like(x)
    call = problem.fused(x, routing, out, problem.settings())
    call()
    problem.buffer.check()
    if rank == 0:
        call()
        with pytest.raises(ExchangeError, match="for rank 1 to"):
            problem.buffer.check()
    problem.buffer.reset()
    call()
    problem.buffer.check()
    assert torch.equal(out, problem.staged(x, routing))
    problem.buffer.close()


@precisions
def test_bits_of_the_separate_kernels_on_one_rank(precision, seed):
    check_bits(0, 1, seed, precision)


@precisions
def test_pools_on_one_rank(precision, seed):
    check_pools(0, 1, seed, precision)


@precisions
def test_biases_on_one_rank(precision, seed):
    check_biases(0, 1, seed, precision)


@precisions
def test_graph_on_one_rank(precision, seed):
    check_graph(0, 1, seed, precision, 100)


@two_gpus
@precisions
def test_bits_of_the_separate_kernels(precision, seed):
    run_ranks(check_bits, 2, seed, precision, backend="nccl", timeout=400)


@two_gpus
@precisions
def test_pools(precision, seed):
    run_ranks(check_pools, 2, seed, precision, backend="nccl", timeout=400)


@two_gpus
@precisions
def test_biases(precision, seed):
    run_ranks(check_biases, 2, seed, precision, backend="nccl", timeout=400)


@two_gpus
@precisions
def test_graph(precision, seed):
    run_ranks(check_graph, 2, seed, precision, 2000, backend="nccl", timeout=400)


@two_gpus
def test_a_missing_rank_is_named_and_the_next_call_is_right(seed):
    run_ranks(check_missing, 2, seed, backend="nccl", timeout=200)


def check_nccl(rank: int, ranks: int, seed: int) -> None:
    """The benchmark's baseline gives the same results."""
    problem = MegaProblem(replace(LARGE, precision="bf16"), dist.group.WORLD, seed=seed)
    x, routing = problem.tokens()
    staged, nccl = problem.staged(x, routing).float(), problem.over_nccl(x, routing).float()
    assert (staged - nccl).norm() <= 4e-3 * staged.norm() and staged.any()
    problem.buffer.close()


@two_gpus
def test_separate_kernels_over_nccl(seed):
    run_ranks(check_nccl, 2, seed, backend="nccl", timeout=200)
