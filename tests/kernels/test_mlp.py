"""``grouped_mlp`` without quantisation, through dispatch and combine, against loops over tokens and slots in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch

from megamoe.comm.exchange import LocalExchange
from megamoe.kernels.mlp import grouped_mlp
from megamoe.kernels.mlp_options import MlpOptions
from megamoe.types import Routing
from tests.support.generators import ROUTING_KINDS, ExpertWeights, random_expert_weights, random_routing
from tests.support.metrics import assert_close, relative_error
from tests.support.plain_moe import ACTIVATIONS, plain_moe


def moe(x, topk_index, topk_weights, weights: ExpertWeights, options: MlpOptions, dtype=None) -> torch.Tensor:
    """The layer without its router: dispatch, grouped_mlp, combine."""
    exchange = LocalExchange(weights.up_proj.shape[0])
    sent = exchange.dispatch(x, Routing(topk_index, topk_weights), dtype or x.dtype)
    rows = grouped_mlp(
        sent.rows,
        sent.row_weights,
        weights.up_proj,
        weights.down_proj,
        sent.layout,
        options,
        weights.up_bias,
        weights.down_bias,
    )
    return exchange.combine(rows, sent.handle, x.dtype)


def leaves(x, topk_weights, weights: ExpertWeights) -> list[torch.Tensor]:
    return [x, topk_weights, *weights.tensors()]


NAMES = ("x", "topk_weights", "up_proj", "down_proj", "up_bias", "down_bias")


def check_against_plain(
    x, routing: Routing, weights: ExpertWeights, options: MlpOptions, tolerance: float, dtype=None
) -> None:
    """Output and all gradients; each expert's weight gradients on their own, zero where it has no rows."""
    leaf, topk_weights = x.clone().requires_grad_(), routing.topk_weights.clone().requires_grad_()
    weights.requires_grad_()
    out = moe(leaf, routing.topk_index, topk_weights, weights, options, dtype)
    assert out.dtype == x.dtype
    exact = weights.to(torch.float64).requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    exact_topk = routing.topk_weights.detach().double().requires_grad_()
    expected = plain_moe(exact_x, routing.topk_index, exact_topk, exact, options.activation, options.clamp)
    assert_close(out, expected, tolerance, "output")

    grad = torch.randn_like(out)
    inputs, exact_inputs = leaves(leaf, topk_weights, weights), leaves(exact_x, exact_topk, exact)
    actual = torch.autograd.grad(out, inputs, grad)
    wanted = torch.autograd.grad(expected, exact_inputs, grad.double(), materialize_grads=True)
    for name, leaf, got, want in zip(NAMES, inputs, actual, wanted, strict=False):
        assert got.dtype == leaf.dtype
        if name in ("x", "topk_weights"):
            assert_close(got, want, tolerance, f"gradient of {name}")
            continue
        for expert in range(want.shape[0]):
            assert_close(got[expert], want[expert], tolerance, f"gradient of {name}[{expert}]")


CASES = [
    *(pytest.param(kind, 40, 6, 3, id=kind) for kind in ROUTING_KINDS),
    pytest.param("uniform", 0, 6, 3, id="no tokens"),
    pytest.param("uniform", 1, 6, 1, id="one token, K = 1"),
    pytest.param("uniform", 30, 5, 5, id="K = E"),
    pytest.param("duplicates", 40, 1, 2, id="one local expert, twice per token"),
    pytest.param("one_expert", 129, 3, 1, id="one row more than a tile"),
]


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(("kind", "num_tokens", "num_experts", "top_k"), CASES)
def test_routings(seed, kind, num_tokens, num_experts, top_k, bias):
    routing = random_routing(kind, num_tokens, num_experts, top_k, dtype=torch.float64)
    weights = random_expert_weights(num_experts, 24, 20, bias=bias, dtype=torch.float64)
    x = torch.randn(num_tokens, 24, dtype=torch.float64)
    check_against_plain(x, routing, weights, MlpOptions("swiglu"), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    ("activation", "clamp"), [(a, None) for a in ACTIVATIONS] + [(a, 0.7) for a in ACTIVATIONS if a != "relu2"]
)
def test_activations(seed, activation, clamp, bias, dtype):
    """A clamp of 0.7 cuts off about half of unit-scale gates and ups."""
    routing = random_routing("dropped", 30, 5, 2, dtype=dtype)
    weights = random_expert_weights(5, 24, 20, activation, bias, dtype)
    x = torch.randn(30, 24, dtype=dtype)
    check_against_plain(x, routing, weights, MlpOptions(activation, clamp), 1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(seed, activation, bias):
    """No formula at all: analytic against numerical derivatives of every input."""
    routing = random_routing("dropped", 4, 3, 2, dtype=torch.float64)
    weights = random_expert_weights(3, 3, 2, activation, bias, torch.float64).requires_grad_()
    x, topk_weights = torch.randn(4, 3, dtype=torch.float64, requires_grad=True), routing.topk_weights.requires_grad_()

    def layer(x, topk_weights, *tensors):
        return moe(x, routing.topk_index, topk_weights, ExpertWeights(*tensors), MlpOptions(activation))

    assert torch.autograd.gradcheck(layer, (x, topk_weights, *weights.tensors()), nondet_tol=0.0)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_frozen_inputs(seed, bias):
    """Every subset of trainable inputs: frozen ones get None, the others the very gradient they get among all."""
    routing = random_routing("dropped", 20, 4, 2)
    weights = random_expert_weights(4, 16, 12, bias=bias)
    x, grad = torch.randn(20, 16), torch.randn(20, 16)

    def gradients(trainable):
        tensors = [t.detach().clone().requires_grad_(need) for t, need in zip(INPUTS, trainable, strict=True)]
        out = moe(tensors[0], routing.topk_index, tensors[1], ExpertWeights(*tensors[2:]), MlpOptions("swiglu"))
        assert out.requires_grad == any(trainable)
        if any(trainable):
            out.backward(grad)
        return [t.grad for t in tensors]

    INPUTS = leaves(x, routing.topk_weights, weights)
    everything = gradients([True] * len(INPUTS))
    for trainable in itertools.product([False, True], repeat=len(INPUTS)):
        for name, need, got, want in zip(NAMES, trainable, gradients(trainable), everything, strict=False):
            assert (got is not None) == need, (name, trainable)
            assert not need or torch.equal(got, want), (name, trainable)


def small_case(bias: bool = True):
    """x, routing and weights in fp32, all trainable."""
    routing = random_routing("dropped", 20, 4, 2)
    weights = random_expert_weights(4, 16, 12, bias=bias).requires_grad_()
    x = torch.randn(20, 16, requires_grad=True)
    return x, Routing(routing.topk_index, routing.topk_weights.requires_grad_()), weights


def test_gradients_accumulate(seed):
    x, routing, weights = small_case()
    inputs = leaves(x, routing.topk_weights, weights)
    for _ in range(2):
        moe(x, routing.topk_index, routing.topk_weights, weights, MlpOptions("swiglu")).square().sum().backward()
    twice = [t.grad.clone() for t in inputs]
    for t in inputs:
        t.grad = None
    moe(x, routing.topk_index, routing.topk_weights, weights, MlpOptions("swiglu")).square().sum().backward()
    for t, total in zip(inputs, twice, strict=True):
        assert torch.equal(total, 2 * t.grad)


def test_retain_graph(seed):
    """The saved tensors survive a first backward pass unchanged; without retain_graph a second one raises."""
    x, routing, weights = small_case()
    inputs = leaves(x, routing.topk_weights, weights)
    out = moe(x, routing.topk_index, routing.topk_weights, weights, MlpOptions("swiglu")).square().sum()
    first = torch.autograd.grad(out, inputs, retain_graph=True)
    second = torch.autograd.grad(out, inputs)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, inputs)


def test_second_derivative_raises(seed):
    x, routing, weights = small_case()
    out = moe(x, routing.topk_index, routing.topk_weights, weights, MlpOptions("swiglu"))
    (grad,) = torch.autograd.grad(out.square().sum(), weights.up_proj, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_weights_changed_before_backward_are_noticed(seed):
    """An optimizer step between forward and backward would silently give the gradient of other weights."""
    x, routing, weights = small_case()
    out = moe(x, routing.topk_index, routing.topk_weights, weights, MlpOptions("swiglu"))
    with torch.no_grad():
        weights.down_proj.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_zero_stride_gradient(seed, precision):
    """``y.sum().backward()`` equals the backward pass of explicit ones."""
    x, routing, weights = small_case()
    inputs = leaves(x, routing.topk_weights, weights)
    out = moe(x, routing.topk_index, routing.topk_weights, weights, MlpOptions("swiglu", precision=precision))
    expected = torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
    for got, want in zip(torch.autograd.grad(out.sum(), inputs), expected, strict=True):
        assert torch.equal(got, want)
    # Also where nothing lies between the sum and grouped_mlp.
    sent = LocalExchange(4).dispatch(x.detach(), routing, x.dtype)
    options = MlpOptions("swiglu", precision=precision)
    row_weights = sent.row_weights.detach()
    rows = grouped_mlp(sent.rows, row_weights, weights.up_proj, weights.down_proj, sent.layout, options)
    valid = (sent.handle.row_to_slot >= 0).float().unsqueeze(1)
    (expected,) = torch.autograd.grad(rows, weights.down_proj, torch.ones_like(rows), retain_graph=True)
    (got,) = torch.autograd.grad((rows * valid).sum(), weights.down_proj, retain_graph=True)
    assert_close(expected, got, 1e-6)
    assert torch.equal(torch.autograd.grad(rows.sum(), weights.down_proj)[0], expected)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_autocast_changes_nothing(seed, precision):
    """The dtypes are the caller's choice: autocast must not turn the fp32 steps or GEMMs into bf16."""
    x, routing, weights = small_case()
    inputs = leaves(x, routing.topk_weights, weights)

    def run():
        options = MlpOptions("swiglu", precision=precision)
        out = moe(x, routing.topk_index, routing.topk_weights, weights, options)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    grad = torch.randn_like(x)
    expected = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run()
    for got, want in zip(actual, expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_weight_grad_scale(seed, precision):
    """Scales gradients of weights and biases, nothing else; exact for a power of two."""
    x, routing, weights = small_case()
    inputs, grad = leaves(x, routing.topk_weights, weights), torch.randn_like(x)
    results = []
    for scale in (1.0, 0.25):
        options = MlpOptions("swiglu", precision=precision, weight_grad_scale=scale)
        out = moe(x, routing.topk_index, routing.topk_weights, weights, options)
        results.append([out, *torch.autograd.grad(out, inputs, grad)])
    for name, whole, scaled in zip(("output", *NAMES), *results, strict=True):
        factor = 1.0 if name in ("output", "x", "topk_weights") else 0.25
        assert torch.equal(scaled, whole * factor), name


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bf16(seed, activation, bias):
    """All tensors in bf16 against the fp64 loops on the same values.

    One rounding (0.17 % rms) of a GEMM's operand and one of the result; a bf16 accumulation would cost several percent.
    """
    routing = random_routing("zipf", 60, 5, 2, dtype=torch.float32)
    weights = random_expert_weights(5, 256, 192, activation, bias).to(torch.bfloat16)
    check_against_plain(torch.randn(60, 256).bfloat16(), routing, weights, MlpOptions(activation), 5e-3)


def test_bf16_rows_with_fp32_parameters(seed):
    """Mixed precision training: bf16 GEMMs, gradients in the parameters' fp32, x stays fp32 outside."""
    routing = random_routing("zipf", 60, 5, 2)
    weights = random_expert_weights(5, 256, 192, bias=True)
    x = torch.randn(60, 256)
    check_against_plain(x, routing, weights, MlpOptions("swiglu"), 7e-3, dtype=torch.bfloat16)
    out = moe(x, routing.topk_index, routing.topk_weights, weights, MlpOptions("swiglu"), torch.bfloat16)
    exact = moe(x, routing.topk_index, routing.topk_weights, weights, MlpOptions("swiglu"))
    # And it does compute in bf16.
    assert relative_error(out, exact) > 1e-3
    # Weight gradients come from fp32 sums in fp32: they hold bits that bf16 does not have.
    (grad,) = torch.autograd.grad(out.sum(), weights.down_proj)
    assert not torch.equal(grad, grad.bfloat16().float())


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_nan_token_spoils_only_its_own_output(seed, precision):
    x, routing, weights = small_case()
    options = MlpOptions("swiglu", precision=precision)
    x, index = x.detach().clone(), routing.topk_index.clone()
    index[7] = torch.tensor([0, 2])
    clean = moe(x, index, routing.topk_weights, weights, options)
    x[7, 3] = float("nan")
    out = moe(x, index, routing.topk_weights, weights, options)
    others = torch.arange(20) != 7
    assert out[7].isnan().all()
    assert out[others].isfinite().all()
    assert_close(out[others], clean[others], 1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_poisoned_padding_rows_change_nothing(seed, precision):
    """Forward results of valid rows do not depend on padding rows: the same bits with NaN there."""
    x, routing, weights = small_case()
    sent = LocalExchange(4).dispatch(x, routing, x.dtype)
    padding = sent.handle.row_to_slot < 0
    rows, row_weights = sent.rows.detach().clone(), sent.row_weights.detach()
    arguments = (
        row_weights,
        weights.up_proj,
        weights.down_proj,
        sent.layout,
        MlpOptions("swiglu", precision=precision),
    )
    clean = grouped_mlp(rows, *arguments, weights.up_bias, weights.down_bias)
    rows[padding] = float("nan")
    poisoned = grouped_mlp(rows, *arguments, weights.up_bias, weights.down_bias)
    assert torch.equal(poisoned[~padding], clean[~padding])
    assert clean[~padding].isfinite().all()


def test_strided_weights(seed):
    """Parameters may be slices of a larger buffer, as after sharding."""
    routing = random_routing("uniform", 20, 3, 2)
    x = torch.randn(20, 16)
    buffer = random_expert_weights(6, 16, 12, bias=True)
    views = ExpertWeights(*(t[::2] for t in buffer.tensors()))
    copies = views.to(torch.float32)
    out = moe(x, routing.topk_index, routing.topk_weights, views, MlpOptions("swiglu"))
    assert_close(out, moe(x, routing.topk_index, routing.topk_weights, copies, MlpOptions("swiglu")), 1e-6)
