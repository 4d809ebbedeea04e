"""Rows that stay on their GPU: layouts and movements have the bits of the CPU's, and nothing waits or is copied."""

from __future__ import annotations

import contextlib

import pytest
import torch

from megamoe.comm.exchange import LocalExchange
from megamoe.kernels import local_rows
from megamoe.kernels.layout import invert_rows, layout_pairs, max_pool_rows
from megamoe.kernels.quant import quantize_rowwise
from megamoe.kernels.reference import combine_slots, permute
from megamoe.kernels.scales import is_mn_major
from megamoe.types import ExpertLayout, Fp8Tensor, Routing
from tests.support.generators import ROUTING_KINDS, random_routing

pytestmark = pytest.mark.gpu

DEVICE = "cuda"

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)

SIZES = [(0, 6, 3), (1, 6, 3), (70, 6, 3), (300, 1, 2), (257, 128, 8), (40, 1024, 8), (9, 1500, 8), (40_000, 128, 8)]
"""Tokens, experts (for 1500 there is no kernel) and slots."""


@contextlib.contextmanager
def strictly():
    """Raises where the host would wait for the device, and fills new memory with NaN."""
    torch.cuda.set_sync_debug_mode("error")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.cuda.set_sync_debug_mode("default")


def same(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    """Bit for bit, so that the sign of a zero counts."""
    actual = actual.cpu()
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    assert torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), what


def maps_of(index: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``slot_to_row`` and ``row_to_slot`` of a GPU's pool, on the CPU."""
    _, pair_to_row = layout_pairs(index.flatten(), num_experts)
    return pair_to_row.view(index.shape), invert_rows(pair_to_row, max_pool_rows(index.numel(), num_experts))


def values(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(shape).to(dtype)
    return x.masked_fill_(torch.rand(shape) < 0.1, -0.0)


# ---------------------------------------------------------------- layout


@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SIZES)
def test_layout(num_tokens, num_experts, top_k, ids_dtype, seed):
    for kind in ROUTING_KINDS:
        kind = "duplicates" if top_k > num_experts else kind
        ids = random_routing(kind, num_tokens, num_experts, top_k).topk_index.flatten()
        wanted, pair_to_row = layout_pairs(ids, num_experts)
        there = ids.to(ids_dtype).to(DEVICE)
        # Some of torch's deterministic operators, which serve more experts, wait.
        with strictly() if num_experts <= local_rows.MOST_EXPERTS else contextlib.nullcontext():
            layout, rows, pairs = local_rows.layout_both_ways(there, num_experts)
        same(layout.counts, wanted.counts, kind)
        same(layout.starts, wanted.starts, kind)
        same(rows, pair_to_row, kind)
        same(pairs, invert_rows(pair_to_row, layout.num_rows), kind)
        assert layout.num_rows == max_pool_rows(ids.numel(), num_experts)


def test_ids_of_other_kinds(seed):
    far = torch.tensor([2**40, 1, -(2**40), 2**32, 0, 2**31, -1])
    same(local_rows.layout_both_ways(far.to(DEVICE), 2)[1], torch.tensor([-1, 128, -1, -1, 0, -1, -1]), "64 bits")
    strided = random_routing("dropped", 500, 6, 4).topk_index[:, 2]
    there = torch.empty(500, 4, dtype=torch.int64, device=DEVICE)[:, 2].copy_(strided)
    same(local_rows.layout_both_ways(there, 6)[1], layout_pairs(strided, 6)[1], "strided")


def test_layouts_are_the_same_again(seed):
    ids = random_routing("zipf", 30_000, 100, 8).topk_index.flatten().to(DEVICE)
    first = local_rows.layout_both_ways(ids, 100)
    for _ in range(20):
        again = local_rows.layout_both_ways(ids, 100)
        assert torch.equal(again[1], first[1]) and torch.equal(again[2], first[2])


# ---------------------------------------------------------------- movements


@DTYPES
@pytest.mark.parametrize("hidden", [1, 24, 33, 300, 2880, 4096, 7168])
def test_movements(hidden, dtype, seed):
    for kind in ROUTING_KINDS:
        index = random_routing(kind, 60, 6, 3).topk_index
        slot_to_row, row_to_slot = maps_of(index, 6)
        tokens = values(60, hidden, dtype=dtype)
        row_to_token = row_to_slot.div(3, rounding_mode="floor")
        rows = permute(tokens, row_to_token)
        weights = values(180, dtype=dtype)
        results = values(row_to_slot.numel(), hidden, dtype=dtype)
        results[row_to_slot < 0] = float("nan")
        there = [x.to(DEVICE) for x in (tokens, slot_to_row, row_to_slot, row_to_token, weights, results)]
        with strictly():
            sent = local_rows.send_rows(*there[:3])
            gathered = local_rows.permute(there[0], there[3])
            row_weights = local_rows.permute(there[4], there[2])
            sums = [local_rows.combine_slots(there[5], there[1], out) for out in (dtype, torch.float32, torch.bfloat16)]
        same(sent, rows, kind)
        same(gathered, rows, kind)
        same(row_weights, permute(weights, row_to_slot), kind)
        for out in sums:
            same(out, combine_slots(results, slot_to_row, out.dtype), (kind, out.dtype))


@pytest.mark.parametrize("hidden", [1, 24, 300, 2880, 7168])
def test_codes(hidden, seed):
    for kind in ROUTING_KINDS:
        index = random_routing(kind, 60, 6, 3).topk_index
        slot_to_row, row_to_slot = maps_of(index, 6)
        tokens = quantize_rowwise(torch.randn(60, hidden))
        there = Fp8Tensor(tokens.codes.to(DEVICE), tokens.scales.to(DEVICE), tokens.block)
        maps = slot_to_row.to(DEVICE), row_to_slot.to(DEVICE)
        with strictly():
            sent = local_rows.send_codes(there, *maps)
        expected = local_rows.send_codes(tokens, slot_to_row, row_to_slot)
        assert torch.equal(sent.codes.cpu().view(torch.uint8), expected.codes.view(torch.uint8)), kind
        assert torch.equal(sent.scales.cpu(), expected.scales) and is_mn_major(sent.scales), kind


@pytest.mark.parametrize("num_experts", [1, 100, 1024, 5000])
def test_group_ends(num_experts, seed):
    counts = torch.randint(0, 300, (num_experts,))
    layout = ExpertLayout(counts, torch.randint(0, 2**20, (num_experts,)), 2**21)
    there = ExpertLayout(layout.counts.to(DEVICE), layout.starts.to(DEVICE), layout.num_rows)
    for padded in (False, True):
        same(local_rows.group_ends(there, padded), local_rows.group_ends(layout, padded), padded)


@pytest.mark.parametrize("top_k", [1, 2, 7, 8, 9, 10, 22, 64])
def test_numbers_of_slots(top_k, seed):
    index = random_routing("dropped", 50, 64, top_k).topk_index
    slot_to_row, row_to_slot = maps_of(index, 64)
    tokens = values(50, 136, dtype=torch.bfloat16)
    results = values(row_to_slot.numel(), 136, dtype=torch.bfloat16)
    there = [x.to(DEVICE) for x in (tokens, slot_to_row, row_to_slot, results)]
    with strictly():
        sent, out = local_rows.send_rows(*there[:3]), local_rows.combine_slots(there[3], there[1], torch.bfloat16)
    same(sent, permute(tokens, row_to_slot.div(top_k, rounding_mode="floor")), "sent")
    same(out, combine_slots(results, slot_to_row, torch.bfloat16), "sum")


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x[:, 3:203], id="columns"),
        pytest.param(lambda x: x[::2, 8:208], id="every other row"),
        pytest.param(lambda x: x[:200].t(), id="transposed"),
        pytest.param(lambda x: x[:1, :200].expand(200, 200), id="one row for all"),
        pytest.param(lambda x: x[:1, :1].expand(200, 200), id="one value for all"),
    ],
)
def test_views(view, seed):
    """``y.sum().backward()``, say, hands over an expanded scalar."""
    base = values(512, 512, dtype=torch.bfloat16)
    x, there = view(base), view(base.to(DEVICE))
    assert there.stride() == x.stride()
    num_rows, hidden = x.shape
    index = random_routing("dropped", num_rows, 6, 2).topk_index
    slot_to_row, row_to_slot = maps_of(index, 6)
    row_to_token = row_to_slot.div(2, rounding_mode="floor")
    sent = local_rows.send_rows(there, slot_to_row.to(DEVICE), row_to_slot.to(DEVICE))
    same(sent, permute(x, row_to_token), "sent")
    same(local_rows.permute(there, row_to_token.to(DEVICE)), permute(x, row_to_token), "gathered")
    sources = torch.randint(-1, num_rows, (90, 3))
    out = local_rows.combine_slots(there, sources.to(DEVICE), torch.float32)
    same(out, combine_slots(x, sources, torch.float32), "sum")


def test_nothing_to_move():
    none = torch.zeros(0, 2, dtype=torch.int64, device=DEVICE)
    for rows in (0, 300):
        row_to_slot = torch.full((rows,), -1, device=DEVICE)
        sent = local_rows.send_rows(torch.zeros(0, 40, device=DEVICE), none, row_to_slot)
        same(sent, torch.zeros(rows, 40), "no tokens")
        gathered = local_rows.permute(torch.zeros(0, 40, device=DEVICE), row_to_slot)
        same(gathered, torch.zeros(rows, 40), "no rows")
        same(local_rows.permute(torch.zeros(0, device=DEVICE), row_to_slot), torch.zeros(rows), "no values")
    nowhere = torch.full((7, 2), -1, device=DEVICE)
    out = local_rows.combine_slots(torch.zeros(0, 40, device=DEVICE), nowhere, torch.bfloat16)
    same(out, torch.zeros(7, 40, dtype=torch.bfloat16), "no results")


def test_more_than_2_31_elements():
    """Of the pool, whose last rows the last expert has."""
    num_tokens, hidden, experts = 40_000, 7296, 8
    index = torch.arange(experts, device=DEVICE).repeat(num_tokens, 1)
    _, rows, pairs = local_rows.layout_both_ways(index.flatten(), experts)
    rows = rows.view(num_tokens, experts)
    tokens = torch.arange(num_tokens, device=DEVICE).remainder(251).to(torch.bfloat16).unsqueeze(1).repeat(1, hidden)
    sent = local_rows.send_rows(tokens, rows, pairs)
    assert sent.numel() > 2**31
    assert torch.equal(sent[:, 0], torch.where(pairs >= 0, tokens[pairs // experts, 0], 0))
    assert torch.equal(sent[:, -1], sent[:, 0]) and torch.equal(sent.amax(1), sent[:, 0])
    out = local_rows.combine_slots(sent, rows, torch.float32)
    assert torch.equal(out[:, 0], 8 * tokens[:, 0].float()) and torch.equal(out.amax(1), out[:, -1])


# ---------------------------------------------------------------- the exchange


def passes(exchange: LocalExchange, x, weights, index, grad, dtype):
    """Rows, their weights, the sum, and the gradients of tokens and weights."""
    sent = exchange.dispatch(x, Routing(index, weights), dtype)
    out = exchange.combine(sent.rows * sent.row_weights.to(dtype).unsqueeze(1), sent.handle, x.dtype)
    return sent.rows, sent.row_weights, out, *torch.autograd.grad(out, (x, weights), grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ROUTING_KINDS)
def test_both_passes_have_the_bits_of_the_cpu(kind, dtype, seed):
    """But for the weights' gradients, which are sums over columns."""
    routing, exchange = random_routing(kind, 150, 10, 4), LocalExchange(10)
    inputs = torch.randn(150, 264), routing.topk_weights, routing.topk_index, torch.randn(150, 264)
    leaves = [x.requires_grad_() if number < 2 else x for number, x in enumerate(inputs)]
    there = [x.detach().to(DEVICE).requires_grad_(number < 2) for number, x in enumerate(inputs)]
    wanted, got = passes(exchange, *leaves, dtype), passes(exchange, *there, dtype)
    num_rows = wanted[0].shape[0]
    for name, mine, theirs in zip(("rows", "row weights"), got, wanted, strict=False):
        same(mine[:num_rows].detach(), theirs.detach(), name)
        assert not mine[num_rows:].any(), name
    same(got[2].detach(), wanted[2].detach(), "sum")
    same(got[3], wanted[3], "gradient of the tokens")
    torch.testing.assert_close(got[4].cpu(), wanted[4], rtol=2e-2, atol=2e-1)


def test_no_copies_of_the_pool(seed):
    """Forward and backward need the pool, the result, and a few numbers for each slot and row."""
    tokens, hidden, experts, top_k = 4096, 2048, 16, 8
    routing, exchange = random_routing("uniform", tokens, experts, top_k), LocalExchange(experts)
    index, weights = routing.topk_index.to(DEVICE), routing.topk_weights.to(DEVICE).requires_grad_()
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    grad, pool = torch.randn_like(x), max_pool_rows(tokens * top_k, experts) * hidden * 2
    small = pool // 32

    def most_during(call):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        return result, torch.cuda.max_memory_allocated() - before

    sent, most = most_during(lambda: exchange.dispatch(x, Routing(index, weights), torch.bfloat16))
    assert pool <= most <= pool + small
    out, most = most_during(lambda: exchange.combine(sent.rows, sent.handle, torch.bfloat16))
    assert x.nbytes <= most <= x.nbytes + small
    grads, most = most_during(lambda: torch.autograd.grad(out, (sent.rows,), grad))
    assert pool <= most <= pool + small
    sides = (sent.rows, sent.row_weights), (x, weights), (*grads, torch.ones_like(sent.row_weights))
    _, most = most_during(lambda: torch.autograd.grad(*sides))
    assert x.nbytes <= most <= x.nbytes + small


def test_graphs_follow_the_routing(seed):
    """A captured forward and backward pass, replayed with other tokens and another routing."""
    exchange = LocalExchange(10)

    def drawn(kind):
        routing = random_routing(kind, 150, 10, 4)
        x, grad = torch.randn(150, 264).bfloat16(), torch.randn(150, 264).bfloat16()
        return [t.to(DEVICE) for t in (x, routing.topk_weights, routing.topk_index, grad)]

    static = [t.requires_grad_(number < 2) for number, t in enumerate(drawn("uniform"))]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        passes(exchange, *static, torch.bfloat16)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = passes(exchange, *static, torch.bfloat16)
    for kind in ROUTING_KINDS:
        inputs = drawn(kind)
        for place, value in zip(static, inputs, strict=True):
            place.data.copy_(value)
        graph.replay()
        leaves = [t.requires_grad_(number < 2) for number, t in enumerate(inputs)]
        wanted = passes(exchange, *leaves, torch.bfloat16)
        for number, (mine, theirs) in enumerate(zip(results, wanted, strict=True)):
            assert torch.equal(mine, theirs), (kind, number)
