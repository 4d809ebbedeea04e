"""``LocalExchange`` against loops over tokens and slots: rows, sums, and both backward passes."""

from __future__ import annotations

import pytest
import torch

from megamoe import MegaMoEError
from megamoe.comm.exchange import Exchange, LocalExchange
from megamoe.kernels.quant import dequantize, quantize_rowwise
from megamoe.kernels.scales import is_mn_major
from megamoe.types import Routing
from tests.support.generators import ROUTING_KINDS, random_routing
from tests.support.metrics import assert_close

CASES = [
    *(pytest.param(kind, 70, 6, 3, id=kind) for kind in ROUTING_KINDS),
    pytest.param("uniform", 0, 6, 3, id="no tokens"),
    pytest.param("uniform", 1, 6, 3, id="one token"),
    pytest.param("uniform", 70, 5, 5, id="K = E"),
    pytest.param("uniform", 70, 6, 1, id="K = 1"),
    pytest.param("duplicates", 70, 1, 2, id="one expert, twice per token"),
    pytest.param("dropped", 129, 2, 2, id="groups around one tile"),
    pytest.param("zipf", 257, 5, 2, id="groups of several tiles"),
    pytest.param("uniform", 40, 512, 8, id="512 experts"),
]


def pairs_in_row_order(routing: Routing, num_experts: int) -> list[tuple[int, int, int]]:
    """``(pool row, token, slot)`` of every pair with an expert: rows go by (expert, token, slot), groups of 128."""
    pairs, row = [], 0
    for expert in range(num_experts):
        for token, experts in enumerate(routing.topk_index.tolist()):
            for slot, chosen in enumerate(experts):
                if chosen == expert:
                    pairs.append((row, token, slot))
                    row += 1
        row = (row + 127) // 128 * 128
    return pairs


def plain_dispatch(values, pairs, num_rows):
    """Row p is ``values[token of p]``, zero for padding."""
    rows = torch.zeros(num_rows, *values.shape[1:], dtype=values.dtype)
    for row, token, _ in pairs:
        rows[row] = values[token]
    return rows


def plain_combine(rows, pairs, num_tokens):
    """Each token's rows added in ascending slot order, in fp32 (fp64 for fp64 rows)."""
    out = torch.zeros(num_tokens, rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32))
    for row, token, _ in sorted(pairs, key=lambda pair: pair[2]):
        out[token] += rows[row].to(out.dtype)
    return out


@pytest.mark.parametrize(("kind", "num_tokens", "num_experts", "top_k"), CASES)
def test_dispatch_and_combine(seed, kind, num_tokens, num_experts, top_k):
    routing = random_routing(kind, num_tokens, num_experts, top_k)
    pairs = pairs_in_row_order(routing, num_experts)
    x = torch.randn(num_tokens, 24)
    exchange = LocalExchange(num_experts)
    sent = exchange.dispatch(x, routing, torch.float32)
    assert len(sent.handle.tensors()) == 4 and all(isinstance(t, torch.Tensor) for t in sent.handle.tensors())
    assert torch.equal(sent.rows, plain_dispatch(x, pairs, sent.layout.num_rows))

    weights = torch.zeros(sent.layout.num_rows)
    for row, token, slot in pairs:
        weights[row] = routing.topk_weights[token, slot]
    assert torch.equal(sent.row_weights, weights)

    # Padding rows of results are undefined: poison them.
    results = torch.full((sent.layout.num_rows, 24), float("nan"))
    for row, _, _ in pairs:
        results[row] = torch.randn(24)
    out = exchange.combine(results, sent.handle, torch.float32)
    # Fixed order: not only close but the same bits.
    assert torch.equal(out, plain_combine(results, pairs, num_tokens))
    # A handle holds no state: a second use gives the same.
    assert torch.equal(exchange.combine(results, sent.handle, torch.float32), out)


@pytest.mark.parametrize("hidden", [24, 300])
@pytest.mark.parametrize(("kind", "num_tokens", "num_experts", "top_k"), CASES)
def test_codes(seed, kind, num_tokens, num_experts, top_k, hidden):
    """Cast before they are sent: the same codes, scales and gradients as of the rows."""
    routing, exchange = random_routing(kind, num_tokens, num_experts, top_k), LocalExchange(num_experts)
    x = torch.randn(num_tokens, hidden).bfloat16().requires_grad_()
    weights = routing.topk_weights.requires_grad_()
    plain = exchange.dispatch(x, Routing(routing.topk_index, weights), torch.bfloat16)
    sent = exchange.dispatch(x, Routing(routing.topk_index, weights), torch.bfloat16, fp8=True)
    assert plain.codes is None and torch.equal(sent.row_weights, plain.row_weights)
    assert sent.rows.shape == plain.rows.shape and sent.rows.dtype == plain.rows.dtype
    assert sent.rows.untyped_storage().nbytes() == 2, "only stands for the rows"
    assert torch.equal(dequantize(sent.codes), dequantize(quantize_rowwise(plain.rows)))
    assert is_mn_major(sent.codes.scales) and not sent.codes.scales.requires_grad

    grads = torch.randn_like(plain.rows), torch.randn_like(plain.row_weights)
    expected = torch.autograd.grad((plain.rows, plain.row_weights), (x, weights), grads)
    actual = torch.autograd.grad((sent.rows, sent.row_weights), (x, weights), grads)
    assert all(torch.equal(mine, other) for mine, other in zip(actual, expected, strict=True))


def test_a_transport_without_codes_says_so():
    with pytest.raises(MegaMoEError, match="exchange = 'LocalExchange': sends no codes"):
        Exchange.send_codes(LocalExchange(2), None, None)


@pytest.mark.parametrize(("kind", "num_tokens", "num_experts", "top_k"), CASES)
def test_gradients(seed, kind, num_tokens, num_experts, top_k):
    routing = random_routing(kind, num_tokens, num_experts, top_k)
    pairs = pairs_in_row_order(routing, num_experts)
    x = torch.randn(num_tokens, 24, requires_grad=True)
    topk_weights = routing.topk_weights.requires_grad_()
    exchange = LocalExchange(num_experts)
    sent = exchange.dispatch(x, Routing(routing.topk_index, topk_weights), torch.float32)

    # The gradient of a padding row goes nowhere, whatever it is.
    grad_rows, grad_row_weights = torch.randn_like(sent.rows), torch.randn_like(sent.row_weights)
    padding = torch.ones(sent.layout.num_rows, dtype=torch.bool)
    padding[[row for row, _, _ in pairs]] = False
    grad_rows[padding], grad_row_weights[padding] = float("nan"), float("nan")
    grad_x, grad_weights = torch.autograd.grad(
        (sent.rows, sent.row_weights), (x, topk_weights), (grad_rows, grad_row_weights)
    )
    assert torch.equal(grad_x, plain_combine(grad_rows, pairs, num_tokens))
    expected = torch.zeros_like(topk_weights)
    for row, token, slot in pairs:
        expected[token, slot] = grad_row_weights[row]
    assert torch.equal(grad_weights, expected)

    results = torch.randn_like(grad_rows).requires_grad_()
    out = exchange.combine(results, sent.handle, torch.float32)
    grad_out = torch.randn(num_tokens, 24)
    (grad_results,) = torch.autograd.grad(out, results, grad_out)
    # Zero for padding rows: the FP8 weight gradients rely on it.
    assert torch.equal(grad_results, plain_dispatch(grad_out, pairs, sent.layout.num_rows))


def test_order_of_the_sum_is_that_of_the_slots():
    """1 + 2^-24 + 2^-24 is 1 in ascending order and more in descending, which here is that of the experts."""
    routing = Routing(torch.tensor([[2, 1, 0]]), torch.ones(1, 3))
    exchange = LocalExchange(3)
    sent = exchange.dispatch(torch.ones(1, 1), routing, torch.float32)
    results = torch.zeros(sent.layout.num_rows, 1)
    results[[256, 128, 0]] = torch.tensor([[1.0], [2.0**-24], [2.0**-24]])
    assert exchange.combine(results, sent.handle, torch.float32).item() == 1.0


def test_bf16_rows_are_summed_in_fp32_and_rounded_once(seed):
    """In forward and backward: 64 terms summed in BF16 would lose most of its 8 bits."""
    index = torch.arange(64).expand(5, 64)
    x = torch.randn(5, 16, requires_grad=True)
    exchange = LocalExchange(64)
    sent = exchange.dispatch(x, Routing(index, torch.ones(5, 64)), torch.bfloat16)
    assert sent.rows.dtype == torch.bfloat16
    assert torch.equal(sent.rows[0], x[0].bfloat16())

    pairs = pairs_in_row_order(Routing(index, torch.ones(5, 64)), 64)
    grad_rows = torch.randn_like(sent.rows)
    (grad_x,) = torch.autograd.grad(sent.rows, x, grad_rows)
    assert grad_x.dtype == torch.float32
    assert torch.equal(grad_x, plain_combine(grad_rows, pairs, 5))

    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        out = exchange.combine(grad_rows, sent.handle, dtype)
        assert torch.equal(out, plain_combine(grad_rows, pairs, 5).to(dtype))


def test_fp64_stays_fp64(seed):
    routing = random_routing("uniform", 20, 6, 3, dtype=torch.float64)
    x = torch.randn(20, 8, dtype=torch.float64)
    exchange = LocalExchange(6)
    sent = exchange.dispatch(x, routing, torch.float64)
    assert_close(exchange.combine(sent.rows, sent.handle, torch.float64), 3 * x, 1e-15)


def test_gradcheck(seed):
    routing = random_routing("dropped", 7, 3, 2, dtype=torch.float64)
    exchange = LocalExchange(3)
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    weights = routing.topk_weights.requires_grad_()

    def weighted_sum(x, weights):
        sent = exchange.dispatch(x, Routing(routing.topk_index, weights), torch.float64)
        return exchange.combine(sent.rows.tanh() * sent.row_weights.unsqueeze(1), sent.handle, torch.float64)

    assert torch.autograd.gradcheck(weighted_sum, (x, weights))


def test_zero_stride_gradient(seed):
    """``y.sum().backward()`` hands an expanded scalar to the backward pass."""
    routing = random_routing("dropped", 30, 6, 3)
    x = torch.randn(30, 8, requires_grad=True)
    exchange = LocalExchange(6)
    sent = exchange.dispatch(x, routing, torch.float32)
    exchange.combine(sent.rows, sent.handle, torch.float32).sum().backward()
    used = ((routing.topk_index >= 0) & (routing.topk_index < 6)).sum(dim=1)
    assert torch.equal(x.grad, used.float().unsqueeze(1).expand(30, 8))


def test_strided_inputs(seed):
    routing = random_routing("uniform", 30, 6, 4)
    strided = Routing(routing.topk_index[:, ::2], routing.topk_weights[:, ::2])
    dense = Routing(strided.topk_index.contiguous(), strided.topk_weights.contiguous())
    x = torch.randn(16, 60).t()[::2]
    exchange = LocalExchange(6)
    sent = exchange.dispatch(x, strided, torch.float32)
    expected = exchange.dispatch(x.contiguous(), dense, torch.float32)
    assert torch.equal(sent.rows, expected.rows)
    assert torch.equal(sent.row_weights, expected.row_weights)
    results = torch.randn(8, sent.layout.num_rows).t()
    out = exchange.combine(results, sent.handle, torch.float32)
    assert torch.equal(out, exchange.combine(results.contiguous(), expected.handle, torch.float32))


def test_nan_token_spoils_only_its_own_rows(seed):
    routing = random_routing("uniform", 30, 6, 3)
    x = torch.randn(30, 8)
    x[7] = float("nan")
    exchange = LocalExchange(6)
    sent = exchange.dispatch(x, routing, torch.float32)
    out = exchange.combine(sent.rows, sent.handle, torch.float32)
    assert out.isnan().any(dim=1).nonzero().flatten().tolist() == [7]


def test_frozen_inputs(seed):
    """Gradients of the one do not depend on whether the other needs any."""
    routing = random_routing("dropped", 30, 6, 3)
    exchange = LocalExchange(6)

    def gradients(need_x: bool, need_weights: bool):
        x = X.clone().requires_grad_(need_x)
        weights = routing.topk_weights.clone().requires_grad_(need_weights)
        sent = exchange.dispatch(x, Routing(routing.topk_index, weights), torch.float32)
        out = exchange.combine(sent.rows * sent.row_weights.unsqueeze(1), sent.handle, torch.float32)
        if need_x or need_weights:
            (out * G).sum().backward()
        else:
            assert not out.requires_grad
        return x.grad, weights.grad

    X, G = torch.randn(30, 8), torch.randn(30, 8)
    both = gradients(True, True)
    only_x, only_weights = gradients(True, False), gradients(False, True)
    assert torch.equal(only_x[0], both[0]) and only_x[1] is None
    assert torch.equal(only_weights[1], both[1]) and only_weights[0] is None
    gradients(False, False)


def test_second_derivative_raises(seed):
    """Silently wrong second derivatives would be worse than none."""
    routing = random_routing("uniform", 5, 3, 2)
    x = torch.randn(5, 4, requires_grad=True)
    exchange = LocalExchange(3)
    sent = exchange.dispatch(x, routing, torch.float32)
    (grad,) = torch.autograd.grad(sent.rows.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    results = torch.randn_like(sent.rows).requires_grad_()
    out = exchange.combine(results, sent.handle, torch.float32)
    (grad,) = torch.autograd.grad(out.square().sum(), results, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_nothing_waits_for_the_device():
    """Meta tensors hold no data: a host read anywhere in dispatch or combine would raise."""
    index = torch.empty(9, 2, dtype=torch.int64, device="meta")
    x = torch.empty(9, 8, device="meta", requires_grad=True)
    weights = torch.empty(9, 2, device="meta", requires_grad=True)
    exchange = LocalExchange(4)
    sent = exchange.dispatch(x, Routing(index, weights), torch.bfloat16)
    out = exchange.combine(sent.rows * sent.row_weights.unsqueeze(1), sent.handle, torch.float32)
    out.sum().backward()
    assert out.shape == (9, 8)
    assert x.grad.shape == x.shape and weights.grad.shape == weights.shape
