"""``torch.compile(moe, fullgraph=True)`` on two gloo ranks: the bits of eager mode, the same order of collectives, the
errors of a rank that does not come."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func

from megamoe import ExchangeError, MoE, MoEConfig, RouterConfig
from tests.support.compiling import assert_same, graph_breaks, skip_without_cpp_compiler, step
from tests.support.processes import run_ranks

HIDDEN = 24
CONFIG = MoEConfig(
    hidden_size=HIDDEN,
    intermediate_size=20,
    num_experts=6,
    top_k=2,
    bias=True,
    shared_intermediate_size=16,
    router=RouterConfig(score="sigmoid", expert_bias=True, aux_loss_coef=0.1, z_loss_coef=0.01),
)


def steps_equal_eager_ones(
    rank: int, world_size: int, seed: int, config: MoEConfig, backend: str, token_counts, tolerance: float
) -> tuple[int, list[list[str]]]:
    """With ``aot``: the compilations of this rank, the collectives of the first forward and backward graph."""
    torch.manual_seed(seed)
    moe = MoE(config, dist.group.WORLD)
    graphs = []

    def keep_graph(graph, inputs):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    def aot(graph, inputs):
        return aot_module_simplified(graph, inputs, fw_compiler=keep_graph, bw_compiler=keep_graph)

    code = torch.compile(moe, backend=aot if backend == "aot" else backend, fullgraph=True)

    def call(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 1:
            torch._dynamo.mark_dynamic(x, 0)
        return code(x)

    for tokens in token_counts:
        torch.manual_seed(seed + rank)
        x = torch.randn(tokens[rank], HIDDEN)
        assert_same(step(moe, call, x), step(moe, moe, x), tolerance, f"tokens {tokens}")
    assert not graph_breaks()
    return len(graphs) // 2, [collectives_in_order(graph) for graph in graphs[:2]]


def collectives_in_order(graph: torch.fx.Graph) -> list[str]:
    """The operators with collectives; each must need the one before it, directly or not."""
    names = ("sum_over_ranks", "plan", "dispatch", "combine", "combine_backward", "dispatch_backward")
    operators = {getattr(torch.ops.megamoe, name).default: name for name in names}
    found, before = [], None
    for node in graph.nodes:
        if node.target in operators:
            assert before is None or before in ancestors(node), f"{node} does not need {before}"
            found.append(operators[node.target])
            before = node
    return found


def ancestors(node: torch.fx.Node) -> set[torch.fx.Node]:
    seen, waiting = set(), [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in seen:
                seen.add(source)
                waiting.append(source)
    return seen


def test_bits_of_eager_mode(seed):
    token_counts = ((7, 5), (12, 0), (30, 130), (0, 0))
    results = run_ranks(steps_equal_eager_ones, 2, seed, CONFIG, "aot", token_counts, 0.0, timeout=240)
    # Ranks compile apart from each other: nothing but the data keeps their collectives in one order.
    order = [["sum_over_ranks", "plan", "dispatch", "combine"], ["combine_backward", "dispatch_backward"]]
    # One compilation for any T, one for T = 0.
    assert results == [(2, order), (2, order)]


def test_inductor(seed):
    skip_without_cpp_compiler()
    # Without what has no part in the exchange: it is compiled as on one rank.
    config = replace(CONFIG, shared_intermediate_size=0, router=RouterConfig())
    run_ranks(steps_equal_eager_ones, 2, seed, config, "inductor", ((7, 5), (4, 30)), 1e-5, timeout=240)


def one_rank_does_not_come(rank: int, world_size: int, done_file: str) -> None:
    torch.manual_seed(0)
    moe = MoE(CONFIG, dist.group.WORLD)
    code = torch.compile(moe, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, HIDDEN, requires_grad=True)
    out = code(x)
    if rank == 1:
        deadline = time.monotonic() + 120
        while not os.path.exists(done_file) and time.monotonic() < deadline:
            time.sleep(0.05)
        return
    failed = "the collective failed on rank 0 of 2.*timeout"
    with pytest.raises(ExchangeError, match=rf"expert exchange, phase 'dispatch': {failed}"):
        out.sum().backward()
    with pytest.raises(ExchangeError, match=rf"load-balancing loss: {failed}"):
        code(x)
    open(done_file, "w").close()


def test_one_rank_does_not_come(tmp_path):
    run_ranks(one_rank_does_not_come, 2, str(tmp_path / "done"), collective_timeout=15.0, timeout=240)
