"""``grouped_mlp`` as an operator: fake kernels, gradients, and the explicit derivatives of the activations."""

from __future__ import annotations

import pytest
import torch

from megamoe.comm.exchange import LocalExchange
from megamoe.config import ACTIVATIONS
from megamoe.kernels import mlp
from megamoe.kernels.mlp import MlpOptions, grouped_mlp
from megamoe.kernels.reference import activate_backward
from tests.support.generators import random_expert_weights, random_routing

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64


@pytest.mark.parametrize("dtype", [FP32, FP64, BF16])
@pytest.mark.parametrize("clamp", [None, 0.5])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives_have_the_bits_of_autograd(activation, clamp, dtype, seed):
    """Also at the limits of the clamp, at 0 and beyond the finite numbers."""
    clamp = None if activation == "relu2" else clamp
    special = torch.tensor([0.0, 0.5, -0.5, float("inf"), -float("inf"), float("nan")])
    pre = torch.cat([torch.randn(40, 12), special.view(-1, 1).expand(-1, 12)])
    pre[:, 0], pre[3, 7] = 0.5, float("nan")
    grad = torch.randn(pre.shape[0], 12 if activation == "relu2" else 6)
    expected = activate_backward(pre.to(dtype), grad, activation, clamp)
    for actual, wanted in zip(mlp._activate_backward(pre.to(dtype), grad, activation, clamp), expected, strict=True):
        assert actual.dtype == wanted.dtype
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


CASES = [
    # precision, activation, bias, rows, parameters, tokens
    ("bf16", "swiglu", False, FP32, FP32, 20),
    ("bf16", "swiglu_oai", True, BF16, FP32, 20),
    ("bf16", "relu2", False, BF16, BF16, 20),
    ("bf16", "geglu", True, FP64, FP64, 20),
    ("bf16", "swiglu", False, FP32, FP32, 0),
    ("fp8", "swiglu", False, BF16, BF16, 20),
    ("fp8", "relu2", False, FP32, FP32, 20),
    ("fp8", "swiglu", True, FP64, FP64, 20),
]


@pytest.mark.parametrize(("precision", "activation", "bias", "row_dtype", "dtype", "num_tokens"), CASES)
def test_operator(precision, activation, bias, row_dtype, dtype, num_tokens, seed):
    routing = random_routing("dropped", num_tokens, 3, 2)
    sent = LocalExchange(3).dispatch(torch.randn(num_tokens, 16), routing, row_dtype)
    weights = random_expert_weights(3, 16, 12, activation, bias, dtype).requires_grad_()
    rows, row_weights = sent.rows.detach().requires_grad_(), sent.row_weights.detach().requires_grad_()
    layout = sent.layout
    operands = rows, row_weights, weights.up_proj, weights.down_proj, weights.up_bias, weights.down_bias
    constants = (activation, 0.5 if activation == "swiglu_oai" else None, precision, 0.25)
    options = MlpOptions(*constants)
    arguments = (*operands, layout.counts, layout.starts, *constants)
    torch.library.opcheck(mlp._operator, arguments)

    inputs = [tensor for tensor in operands if tensor is not None]
    expected = grouped_mlp(*operands[:4], layout, options, *operands[4:])
    out, pre, unweighted = mlp._operator(*arguments)
    assert torch.equal(out, expected)
    assert not pre.requires_grad and not unweighted.requires_grad
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, inputs, grad)
    for got, want in zip(torch.autograd.grad(out, inputs, grad), wanted, strict=True):
        assert torch.equal(got, want)

    needed = [tensor is not None for tensor in operands]
    detached = [None if tensor is None else tensor.detach() for tensor in operands]
    for which in (needed, [False, False, True, *[False] * 3], [True, *[False] * 5]):
        saved = (grad, *detached, pre, unweighted, layout.counts, layout.starts, *constants)
        torch.library.opcheck(mlp._backward_operator, (*saved, which))


def test_second_derivative_raises(seed):
    routing = random_routing("uniform", 5, 3, 2)
    sent = LocalExchange(3).dispatch(torch.randn(5, 16), routing, FP32)
    weights = random_expert_weights(3, 16, 12).requires_grad_()
    operands = sent.rows, sent.row_weights, weights.up_proj, weights.down_proj, None, None
    out, _, _ = mlp._operator(*operands, sent.layout.counts, sent.layout.starts, "swiglu", None, "bf16", 1.0)
    (grad,) = torch.autograd.grad(out.square().sum(), weights.up_proj, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad.sum().backward()
