"""The exchange's operators: names of exchanges, fake kernels and gradients, on one rank and on two."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist

from megamoe import MegaMoEError
from megamoe.comm import exchange_ops
from megamoe.comm.collective import CollectiveExchange
from megamoe.comm.exchange import Exchange, LocalExchange
from megamoe.types import Routing
from tests.support.generators import random_routing
from tests.support.processes import run_ranks

HIDDEN = 8


class OwnExchange(LocalExchange):
    """A transport that does not share its name."""

    def __init__(self, num_experts: int):
        self.num_experts = self.num_local_experts = num_experts


class EagerExchange(Exchange):
    """A transport with the six data movements and nothing else."""

    num_experts = num_local_experts = 4

    def __init__(self):
        self.inner = LocalExchange(4)

    def plan(self, routing):
        return self.inner.plan(routing)

    def send_rows(self, tokens, handle):
        return self.inner.send_rows(tokens, handle)

    def return_rows(self, rows, handle, out_dtype):
        return self.inner.return_rows(rows, handle, out_dtype)

    def send_weights(self, topk_weights, handle):
        return self.inner.send_weights(topk_weights, handle)

    def return_weights(self, row_weights, handle):
        return self.inner.return_weights(row_weights, handle)


def round_trip(exchange: Exchange, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    sent = exchange.dispatch(x, routing, x.dtype)
    return exchange.combine(sent.rows * sent.row_weights.unsqueeze(1), sent.handle, x.dtype)


# ---------------------------------------------------------------- names


def test_interchangeable_exchanges_share_a_name():
    first, second, other = LocalExchange(4), LocalExchange(4), LocalExchange(5)
    assert first.name == second.name != other.name
    assert exchange_ops.find(first.name) in (first, second) and exchange_ops.find(other.name) is other
    own = OwnExchange(4), OwnExchange(4)
    assert own[0].name != own[1].name
    assert [exchange_ops.find(exchange.name) for exchange in own] == list(own)


def test_names_keep_nothing_alive():
    own = OwnExchange(4)
    name = own.name
    del own
    gc.collect()
    with pytest.raises(MegaMoEError, match=rf"exchange = '{name}': no living exchange.*Keep the layer that owns it"):
        exchange_ops.find(name)
    assert name not in exchange_ops._by_name


def test_a_name_lives_as_long_as_any_of_its_exchanges():
    first, second = LocalExchange(77), LocalExchange(77)
    name = first.name
    del second
    assert exchange_ops.find(name) is first
    twin = copy.deepcopy(first)
    del first
    gc.collect()
    assert exchange_ops.find(name) is twin
    del twin
    with pytest.raises(MegaMoEError, match="no living exchange"):
        exchange_ops.find(name)


def test_compiled_code_of_an_exchange_that_is_gone_raises(seed):
    """The code may outlive the layer: it must name the exchange, neither crash nor use another."""
    exchange = OwnExchange(4)
    name = exchange.name
    routing, x = random_routing("uniform", 5, 4, 2), torch.randn(5, HIDDEN)
    graphs = []

    def keep_graph(graph, inputs):
        graphs.append((graph, inputs))
        return graph

    torch.compile(round_trip, backend=keep_graph, fullgraph=True)(exchange, x, routing)
    torch._dynamo.reset()
    graph, inputs = graphs[0]
    assert torch.equal(graph(*inputs)[0], round_trip(LocalExchange(4), x, routing))
    del exchange
    gc.collect()
    with pytest.raises(MegaMoEError, match=f"exchange = '{name}': no living exchange"):
        graph(*inputs)


def test_a_transport_without_shapes_works_in_eager_mode_and_says_why_it_cannot_be_compiled(seed):
    exchange = EagerExchange()
    routing, x = random_routing("uniform", 5, 4, 2), torch.randn(5, HIDDEN)
    assert torch.equal(round_trip(exchange, x, routing), round_trip(LocalExchange(4), x, routing))
    with pytest.raises(Exception, match="EagerExchange.*cannot be traced by torch.compile.*Give it handle_type"):
        torch.compile(round_trip, backend="eager", fullgraph=True)(exchange, x, routing)


# ---------------------------------------------------------------- operators


def check_operators(exchange: Exchange, routing: Routing, x: torch.Tensor, row_dtype: torch.dtype) -> None:
    """``opcheck`` of every operator: schema, fake kernel, gradients; and that they do what the methods do."""
    name, index = exchange.name, routing.topk_index
    weights = routing.topk_weights.detach().requires_grad_()
    torch.library.opcheck(exchange_ops.plan, (index, weights.detach(), name, True))
    handle = exchange.plan(routing)
    tensors, num_tokens, num_rows = list(handle.tensors()), exchange.num_tokens(handle), handle.layout.num_rows
    assert num_tokens == x.shape[0]
    x = x.detach().requires_grad_()

    torch.library.opcheck(exchange_ops.dispatch, (x, weights, tensors, name, num_rows, row_dtype))
    rows, row_weights = exchange_ops.dispatch(x, weights, tensors, name, num_rows, row_dtype)
    sent = exchange.dispatch(x, Routing(index, weights), row_dtype)
    assert torch.equal(rows, sent.rows) and torch.equal(row_weights, sent.row_weights)
    gradients = torch.randn_like(rows), torch.randn_like(row_weights)
    wanted = torch.autograd.grad((sent.rows, sent.row_weights), (x, weights), gradients)
    got = torch.autograd.grad((rows, row_weights), (x, weights), gradients)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    for needed in ([True, True], [False, True]):
        arguments = (*gradients, tensors, name, *weights.shape, x.dtype, weights.dtype, needed)
        torch.library.opcheck(exchange_ops.dispatch_backward, arguments)

    results = gradients[0].requires_grad_()
    torch.library.opcheck(exchange_ops.combine, (results, tensors, name, num_tokens, x.dtype))
    out = exchange_ops.combine(results, tensors, name, num_tokens, x.dtype)
    expected = exchange.combine(results, handle, x.dtype)
    assert torch.equal(out, expected)
    grad = torch.randn_like(out)
    (got,), (wanted,) = torch.autograd.grad(out, results, grad), torch.autograd.grad(expected, results, grad)
    assert torch.equal(got, wanted)
    torch.library.opcheck(exchange_ops.combine_backward, (grad, tensors, name, num_rows, row_dtype))


@pytest.mark.parametrize(
    ("kind", "num_tokens", "row_dtype"),
    [("dropped", 9, torch.float32), ("uniform", 140, torch.bfloat16), ("none", 3, torch.float32)],
)
def test_operators_of_the_local_exchange(kind, num_tokens, row_dtype, seed):
    check_operators(
        LocalExchange(4), random_routing(kind, num_tokens, 4, 2), torch.randn(num_tokens, HIDDEN), row_dtype
    )


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_shapes_are_known_without_data_where_nothing_waits_for_the_device(num_tokens):
    """Off the CPU the pool's size follows from T: compiled code has no size that depends on data."""
    routing = random_routing("uniform", num_tokens, 4, 2, device="meta")
    exchange = LocalExchange(4)
    planned, like = exchange.plan(routing), exchange.plan_like(routing, new_size=None)
    for actual, expected in zip(like.tensors(), planned.tensors(), strict=True):
        assert (actual.shape, actual.dtype, actual.device) == (expected.shape, expected.dtype, expected.device)


def operators_of_two_ranks(rank: int, world_size: int, seed: int) -> None:
    exchange = CollectiveExchange(4, dist.group.WORLD)
    again = CollectiveExchange(4, dist.group.WORLD)
    assert exchange.name == again.name != CollectiveExchange(6, dist.group.WORLD).name
    torch.manual_seed(seed + rank)
    count = (9, 5)[rank]
    check_operators(exchange, random_routing("dropped", count, 4, 2), torch.randn(count, HIDDEN), torch.bfloat16)


def test_operators_of_two_ranks(seed):
    run_ranks(operators_of_two_ranks, 2, seed)
