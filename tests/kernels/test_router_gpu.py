"""The router's kernels on GPUs: the reference's selection, the same bits in any batch, in two launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megamoe import Router, RouterConfig
from megamoe.kernels import routing
from tests.support.configs import router_layer
from tests.support.router_cases import RouterCase, check_any_batch, check_case

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
GROUPS = dict(num_groups=8, topk_groups=4)
DEEPSEEK_V3 = RouterConfig("sigmoid", group_score="sum_top2", expert_bias=True, scaling_factor=2.5, **GROUPS)

ROUTERS = {
    "mixtral": RouterCase(1, 4096, 8, 2),
    "64 experts": RouterCase(1, 7168, 64, 8),
    "deepseek v2": RouterCase(1, 5120, 160, 6, RouterConfig(renormalize=False, num_groups=8, topk_groups=3)),
    "deepseek v3": RouterCase(1, 7168, 256, 8, DEEPSEEK_V3),
    "gpt-oss": RouterCase(1, 2880, 128, 4, RouterConfig(linear_bias=True)),
    "sqrtsoftplus": RouterCase(1, 4100, 384, 6, RouterConfig("sqrtsoftplus", expert_bias=True), torch.float16),
    "odd sizes": RouterCase(1, 333, 21, 21, RouterConfig(num_groups=3, topk_groups=3), torch.float32),
    "most experts": RouterCase(1, 2048, 1024, 32, RouterConfig("sigmoid", linear_bias=True)),
}
COUNTS = [1, 3, 8, 64, 129, 256, 512]


@pytest.mark.parametrize("name", ROUTERS)
def test_against_the_reference(name, seed):
    for tokens in COUNTS:
        for ties, masked in ((False, False), (True, True)):
            check_case(routing.route, replace(ROUTERS[name], tokens=tokens, ties=ties, masked=masked), DEVICE)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("name", ROUTERS)
def test_the_same_bits_in_any_batch(name, masked, seed):
    check_any_batch(routing.route, replace(ROUTERS[name], tokens=512, masked=masked), COUNTS + [2, 5, 7, 100], DEVICE)


def test_rows_that_are_not_dense(seed):
    case = RouterCase(9, 512, 32, 4)
    x, weight, *others = case.inputs(DEVICE)
    expected = routing.route(x, weight, *others, 4, case.router)
    wide = torch.full((9, 600), float("nan"), dtype=x.dtype, device=DEVICE)
    wide[:, 3:515] = x
    for rows, matrix in ((wide[:, 3:515], weight), (x.t().contiguous().t(), weight.t().contiguous().t())):
        got = routing.route(rows, matrix, *others, 4, case.router)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


# ---------------------------------------------------------------- the module


def trained_router() -> Router:
    router = Router(router_layer(1024, 64, 8, score="sigmoid", expert_bias=True), device=DEVICE).eval()
    router.expert_bias.normal_(std=0.1)
    return router


@torch.no_grad()
def test_two_launches(seed):
    router, x, mask = trained_router(), torch.randn(33, 1024, device=DEVICE).bfloat16(), torch.arange(33) != 7
    mask = mask.to(DEVICE)
    router(x, mask)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        router(x, mask)
        torch.cuda.synchronize()
    kernels = [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert sorted(kernels) == ["_select_kernel", "router_gemm_kernel"]


def test_gradients_and_many_tokens_take_torch(seed):
    """And agree, where no near-tie decides."""
    router = trained_router()
    x = torch.randn(routing.MOST_TOKENS + 1, 1024, device=DEVICE)
    recorded = router(x)
    assert recorded.topk_weights.requires_grad
    with torch.no_grad():
        many, few = router(x), router(x[:-1])
    assert torch.equal(many.topk_index, recorded.topk_index)
    # Another order of sums may swap neighbours.
    assert (few.topk_index != recorded.topk_index[:-1]).float().mean() < 0.01
    same = (few.topk_index == recorded.topk_index[:-1]).all(dim=1)
    torch.testing.assert_close(few.topk_weights[same], recorded.topk_weights[:-1][same], rtol=1e-4, atol=0)


@torch.no_grad()
def test_compiled(seed):
    torch._dynamo.reset()
    router = trained_router()
    compiled = torch.compile(router, fullgraph=True)
    for tokens in (33, 1, routing.MOST_TOKENS):
        x, mask = torch.randn(tokens, 1024, device=DEVICE).bfloat16(), torch.rand(tokens, device=DEVICE) < 0.7
        got, expected = compiled(x, mask), router(x, mask)
        assert torch.equal(got.topk_index, expected.topk_index)
        assert torch.equal(got.topk_weights, expected.topk_weights)
    torch._dynamo.reset()


@torch.no_grad()
def test_graphs(seed):
    """A captured call has the bits of eager ones, with other tokens and masks."""
    router = trained_router()
    x, mask = (
        torch.zeros(40, 1024, device=DEVICE, dtype=torch.bfloat16),
        torch.ones(40, dtype=torch.bool, device=DEVICE),
    )
    router(x, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = router(x, mask)
    for _ in range(20):
        x.copy_(torch.randn(40, 1024))
        mask.copy_(torch.rand(40) < 0.7)
        x[~mask] = float("nan")
        graph.replay()
        expected = router(x, mask)
        assert torch.equal(result.topk_index, expected.topk_index)
        assert torch.equal(result.topk_weights, expected.topk_weights)
