"""``grouped_mlp`` as an operator: fake kernels, gradients, and the explicit derivatives of the activations."""

from __future__ import annotations

import pytest
import torch

from megamoe.comm.exchange import LocalExchange
from megamoe.config import ACTIVATIONS
from megamoe.kernels import mlp
from megamoe.kernels.mlp import grouped_mlp
from megamoe.kernels.mlp_activation import activate_backward as by_formula
from megamoe.kernels.mlp_options import MlpOptions
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
    for actual, wanted in zip(by_formula(pre.to(dtype), grad, activation, clamp), expected, strict=True):
        assert actual.dtype == wanted.dtype
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


CASES = [
    # precision, activation, bias, rows, parameters, tokens, recompute
    ("bf16", "swiglu", False, FP32, FP32, 20, "none"),
    ("bf16", "swiglu_oai", True, BF16, FP32, 20, "none"),
    ("bf16", "relu2", False, BF16, BF16, 20, "activation"),
    ("bf16", "geglu", True, FP64, FP64, 20, "activation"),
    ("bf16", "swiglu", False, FP32, FP32, 0, "none"),
    ("fp8", "swiglu", False, BF16, BF16, 20, "none"),
    ("fp8", "swiglu", False, BF16, FP32, 20, "activation"),
    ("fp8", "relu2", False, FP32, FP32, 20, "none"),
    ("fp8", "geglu", True, BF16, BF16, 20, "activation"),
    ("fp8", "swiglu", True, FP64, FP64, 20, "none"),
    ("fp8", "swiglu", False, BF16, BF16, 0, "none"),
]


@pytest.mark.parametrize(
    ("precision", "activation", "bias", "row_dtype", "dtype", "num_tokens", "recompute"),
    CASES,
    ids=[" ".join(str(value) for value in case) for case in CASES],
)
def test_operator(precision, activation, bias, row_dtype, dtype, num_tokens, recompute, seed):
    # Neither size is a multiple of what FP8 needs.
    hidden, width = 24, 12
    routing = random_routing("dropped", num_tokens, 3, 2)
    sent = LocalExchange(3).dispatch(torch.randn(num_tokens, hidden), routing, row_dtype)
    weights = random_expert_weights(3, hidden, width, activation, bias, dtype).requires_grad_()
    rows, row_weights = sent.rows.detach().requires_grad_(), sent.row_weights.detach().requires_grad_()
    layout = sent.layout
    operands = rows, row_weights, weights.up_proj, weights.down_proj, weights.up_bias, weights.down_bias
    constants = (activation, 0.5 if activation == "swiglu_oai" else None, precision, 0.25, recompute)
    options = MlpOptions(*constants)
    arguments = (*operands, layout.counts, layout.starts, *constants, True)
    torch.library.opcheck(mlp._operator, arguments)

    inputs = [tensor for tensor in operands if tensor is not None]
    expected = grouped_mlp(*operands[:4], layout, options, *operands[4:])
    out, *kept = mlp._operator(*arguments)
    assert torch.equal(out, expected)
    assert not any(tensor.requires_grad for tensor in kept)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, inputs, grad)
    for got, want in zip(torch.autograd.grad(out, inputs, grad), wanted, strict=True):
        assert torch.equal(got, want)

    needed = [tensor is not None for tensor in operands]
    detached = [None if tensor is None else tensor.detach() for tensor in operands]
    saved_rows = None if precision == "fp8" else detached[0]
    for which in (needed, [False, False, True, *[False] * 3], [True, *[False] * 5]):
        saved = (grad, saved_rows, *kept, *detached[1:], layout.counts, layout.starts, *constants)
        torch.library.opcheck(mlp._backward_operator, (*saved, which))

    # Without a backward pass nothing is kept.
    plain = (*detached, layout.counts, layout.starts, *constants, False)
    torch.library.opcheck(mlp._operator, plain)
    out, *kept = mlp._operator(*plain)
    assert not any(tensor.numel() for tensor in kept)
    with torch.no_grad():
        assert torch.equal(out, grouped_mlp(*operands[:4], layout, options, *operands[4:]))


def test_second_derivative_raises(seed):
    routing = random_routing("uniform", 5, 3, 2)
    sent = LocalExchange(3).dispatch(torch.randn(5, 16), routing, FP32)
    weights = random_expert_weights(3, 16, 12).requires_grad_()
    operands = sent.rows, sent.row_weights, weights.up_proj, weights.down_proj, None, None
    constants = "swiglu", None, "bf16", 1.0, "none", True
    out, *_ = mlp._operator(*operands, sent.layout.counts, sent.layout.starts, *constants)
    (grad,) = torch.autograd.grad(out.square().sum(), weights.up_proj, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad.sum().backward()
