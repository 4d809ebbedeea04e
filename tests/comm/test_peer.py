"""``PeerExchange`` on several ranks: its kernels run by the simulator, beside the exchange of one rank."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import torch  # noqa: E402

from megamoe.comm.exchange import LocalExchange  # noqa: E402
from megamoe.comm.peer import PeerExchange  # noqa: E402
from megamoe.kernels.quant import quantize_rowwise  # noqa: E402
from megamoe.types import Routing  # noqa: E402
from tests.support.errors import fails  # noqa: E402
from tests.support.exchange_sim import Sizes, make_tokens  # noqa: E402
from tests.support.peer_world import run_peers  # noqa: E402

TWO = Sizes()
THREE = Sizes(ranks=3, tokens=11, top_k=3, experts=6, hidden=144)
ONE = Sizes(ranks=1, experts=3)
BF16 = torch.bfloat16


def experts(rows: torch.Tensor, layout, row_weights: torch.Tensor, first: int) -> torch.Tensor:
    """A differentiable stand-in for the experts: each scales its rows by a number of its own and by their weight."""
    out = torch.zeros_like(rows)
    for expert, (start, end) in enumerate(layout.spans()):
        piece = rows[start:end].float() * (0.5 + first + expert) * row_weights[start:end, None]
        out[start:end] = piece.to(rows.dtype)
    return out


def layer(exchange, rank: int, tokens, grad: torch.Tensor):
    """Output and gradients of tokens and routing weights of one layer."""
    x = tokens.x.clone().requires_grad_()
    weights = tokens.weights.clone().requires_grad_()
    dispatched = exchange.dispatch(x, Routing(tokens.index, weights), BF16)
    first = rank * exchange.num_local_experts
    rows = experts(dispatched.rows, dispatched.layout, dispatched.row_weights, first)
    out = exchange.combine(rows, dispatched.handle, BF16)
    out.backward(grad)
    return out.detach(), x.grad, weights.grad


def on_one_rank(sizes: Sizes, tokens, grads):
    """The same layer with all experts and all ranks' tokens in one place."""
    exchange = LocalExchange(sizes.experts)
    together = make_tokens(sizes, [0])[0]
    together.x = torch.cat([mine.x for mine in tokens])
    together.index = torch.cat([mine.index for mine in tokens])
    together.weights = torch.cat([mine.weights for mine in tokens])
    results = layer(exchange, 0, together, torch.cat(grads))
    return zip(*(result.split([mine.x.shape[0] for mine in tokens]) for result in results), strict=True)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("routing", ["random", "holes", "one"])
@pytest.mark.parametrize("sizes", [TWO, THREE, ONE], ids=lambda sizes: sizes.ranks)
def test_forward_and_backward_have_the_bits_of_one_rank(sizes, routing, exact, seed):
    counts = [sizes.tokens, 0, 5][: sizes.ranks]
    tokens = make_tokens(sizes, counts, routing)
    grads = [torch.randn(count, sizes.hidden).bfloat16() for count in counts]

    def run(rank: int, exchange: PeerExchange):
        exchange.exact = exact
        return layer(exchange, rank, tokens[rank], grads[rank])

    for actual, expected in zip(run_peers(sizes, run), on_one_rank(sizes, tokens, grads), strict=True):
        for mine, theirs in zip(actual, expected, strict=True):
            # Sums over columns are taken in another order where tensors differ in size.
            if mine.dim() == 2 and mine.shape[1] == sizes.top_k:
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(mine, theirs)


def test_pool_is_exact_only_where_asked_for(seed):
    sizes = Sizes(tokens=80)
    tokens = make_tokens(sizes, [80, 3])

    def run(rank: int, exchange: PeerExchange):
        routing = Routing(tokens[rank].index, tokens[rank].weights)
        exact = exchange.plan(routing).layout.num_rows
        with torch.no_grad():
            bounded = exchange.plan(routing).layout.num_rows
        return exact, bounded

    for rank, (exact, bounded) in enumerate(run_peers(sizes, run)):
        index = torch.cat([mine.index for mine in tokens]).flatten()
        counts = index.bincount(minlength=sizes.experts)[rank * sizes.local : (rank + 1) * sizes.local]
        assert exact == int(((counts + 127) // 128 * 128).sum())
        # All 320 pairs that two ranks can have, in two experts.
        assert bounded == 512


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float8_e4m3fn])
def test_dispatch_once(dtype, seed):
    sizes = Sizes(ranks=2, hidden=272, fp8=dtype == torch.float8_e4m3fn)
    tokens = make_tokens(sizes, [20, 7], "holes")

    def run(rank: int, exchange: PeerExchange):
        mine = tokens[rank]
        rows, handle = exchange.dispatch_once(mine.x, Routing(mine.index, mine.weights), dtype)
        return rows, handle

    for rank, (rows, handle) in enumerate(run_peers(sizes, run)):
        starts, counts = handle.layout.starts.tolist(), handle.layout.counts.tolist()
        for local, (start, count) in enumerate(zip(starts, counts, strict=True)):
            expert = rank * sizes.local + local
            sent = [mine.x[(mine.index == expert).nonzero()[:, 0]] for mine in tokens]
            x = torch.cat(sent)
            assert x.shape[0] == count
            if sizes.fp8:
                expected = quantize_rowwise(x)
                codes = rows.codes[start : start + count].view(torch.uint8)
                assert torch.equal(codes, expected.codes.view(torch.uint8))
                assert torch.equal(rows.scales[start : start + count], expected.scales)
                assert rows.scales.stride(0) == 1
            else:
                assert torch.equal(rows[start : start + count], x.to(dtype))


def test_barrier(seed):
    run_peers(THREE, lambda rank, exchange: [exchange.barrier() for _ in range(3)])


# ---------------------------------------------------------------- arguments


def alone(function, sizes: Sizes = ONE, **options):
    return run_peers(sizes, lambda rank, exchange: function(exchange), **options)


def routing_of(sizes: Sizes, tokens: int, top_k: int | None = None) -> Routing:
    top_k = sizes.top_k if top_k is None else top_k
    return Routing(torch.zeros(tokens, top_k, dtype=torch.int64), torch.ones(tokens, top_k))


def test_too_many_tokens():
    with fails(ValueError, "tokens", 21, "must not exceed the 20"):
        alone(lambda exchange: exchange.plan(routing_of(ONE, 21)))


def test_wrong_number_of_slots():
    with fails(ValueError, "routing.topk_index.shape", [3, 3], "must be [T, 2]"):
        alone(lambda exchange: exchange.plan(routing_of(ONE, 3, 3)))


def test_rows_of_a_dtype_that_does_not_travel():
    def run(exchange):
        handle = exchange.plan(routing_of(ONE, 3))
        exchange.send_rows(torch.zeros(3, ONE.hidden), handle)

    with fails(TypeError, "hidden_states.dtype", torch.float32, "must be one of"):
        alone(run)


def test_rows_of_another_width():
    def run(exchange):
        handle = exchange.plan(routing_of(ONE, 3))
        exchange.return_rows(torch.zeros(handle.layout.num_rows, 16, dtype=BF16), handle, BF16)

    with pytest.raises(ValueError, match="rows.shape = .*must be \\[any, 160\\]"):
        alone(run)


def test_handle_of_another_exchange():
    def run(exchange):
        handle = LocalExchange(3).plan(routing_of(ONE, 3))
        exchange.return_rows(torch.zeros(0, ONE.hidden, dtype=BF16), handle, BF16)

    with fails(ValueError, "handle", "LocalHandle", "must be a PeerHandle"):
        alone(run)


def test_fp8_needs_room_for_scales():
    with fails(ValueError, "dtype", torch.float8_e4m3fn, "needs a plan with room for scales"):
        alone(lambda e: e.dispatch_once(torch.zeros(3, ONE.hidden), routing_of(ONE, 3), torch.float8_e4m3fn))


def test_bad_options():
    with fails(ValueError, "capacity", 200, "must be a multiple of 128"):
        alone(lambda exchange: None, capacity=200)
    with fails(ValueError, "num_sms", 0, "must be at least 1"):
        alone(lambda exchange: None, num_sms=0)
