"""Activations and their gradients against fp64 formulas."""

from __future__ import annotations

import math

import pytest
import torch

from megamoe.kernels.reference import activate, activate_backward
from tests.support.metrics import assert_close
from tests.support.plain_moe import ACTIVATIONS, plain_activation

CASES = [
    *((activation, None) for activation in ACTIVATIONS),
    *((activation, 1.5) for activation in ACTIVATIONS if activation != "relu2"),
    ("swiglu_oai", 7.0),
]


def pre_activations(*shape: int, clamp: float | None) -> torch.Tensor:
    """fp64 N(0, 4), with no value so close to a kink (0 and +-clamp) that a finite difference would cross it."""
    pre = 2 * torch.randn(*shape, dtype=torch.float64)
    for kink in (0.0, *(() if clamp is None else (clamp, -clamp))):
        pre = torch.where((pre - kink).abs() < 1e-3, kink + 0.01, pre)
    return pre


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("activation", "clamp"), CASES)
def test_values(seed, activation, clamp, dtype):
    pre = pre_activations(50, 24, clamp=clamp).to(dtype)
    value = activate(pre, activation, clamp)
    # The arithmetic is fp32 also for bf16 inputs.
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert value.shape == (50, 24 if activation == "relu2" else 12)
    assert_close(value, plain_activation(pre.double(), activation, clamp), 1e-13 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize(("activation", "clamp"), CASES)
def test_gradients(seed, activation, clamp):
    pre = pre_activations(6, 8, clamp=clamp).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: activate(p, activation, clamp), (pre,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("activation", "clamp"), CASES)
def test_activate_backward(seed, activation, clamp, dtype):
    pre = pre_activations(50, 24, clamp=clamp).to(dtype)
    grad = torch.randn(50, 24 if activation == "relu2" else 12).to(dtype)
    # Inside an autograd function's backward pass gradients are off.
    with torch.no_grad():
        value, grad_pre = activate_backward(pre, grad, activation, clamp)
    exact = pre.double().requires_grad_()
    expected = plain_activation(exact, activation, clamp)
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.double())
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    assert_close(value, expected, tolerance)
    assert_close(grad_pre, expected_grad, tolerance)
    assert value.dtype == grad_pre.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not value.requires_grad and not grad_pre.requires_grad


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        pytest.param(20.0, -20.0, silu(7) * -7, id="gate above, up below"),
        pytest.param(20.0, 20.0, silu(7) * 7, id="both above"),
        # Clamped from below too, the gate would give silu(-7) * 2.
        pytest.param(-20.0, 2.0, silu(-20) * 2, id="gate has no lower limit"),
        pytest.param(3.0, -5.0, silu(3) * -5, id="inside"),
    ],
)
def test_clamp_of_swiglu(gate, up, expected):
    value = activate(torch.tensor([[gate, up]], dtype=torch.float64), "swiglu", 7.0)
    assert value.item() == pytest.approx(expected, rel=1e-12)


def test_clamp_of_swiglu_oai():
    """gpt-oss: clamp first, then g * sigmoid(1.702 g) * (u + 1)."""
    value = activate(torch.tensor([[20.0, -20.0]], dtype=torch.float64), "swiglu_oai", 7.0)
    assert value.item() == pytest.approx(7 / (1 + math.exp(-1.702 * 7)) * -6, rel=1e-12)


@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a != "relu2"])
def test_clamped_values_have_no_gradient(activation):
    """Columns: gate at 20, gate at -20, then up at -20, 20; the limit is 7."""
    pre = torch.tensor([[20.0, -2.0, 1.0, 1.0, 1.0, 1.0, -20.0, 20.0]], dtype=torch.float64)
    _, grad = activate_backward(pre, torch.ones(1, 4), activation, 7.0)
    assert (grad[0] != 0).tolist() == [False, True, True, True, True, True, False, False]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_halves(activation):
    """Gate columns come first; a zero gate gives zero whatever up is, a zero up need not (swiglu_oai adds 1)."""
    pre = torch.tensor([[0.0, 0.0, 3.0, -2.0]])
    if activation == "relu2":
        assert activate(pre, activation, None).tolist() == [[0.0, 0.0, 9.0, 0.0]]
    else:
        assert activate(pre, activation, None).tolist() == [[0.0, 0.0]]
        swapped = activate(pre.roll(2, dims=1), activation, None)
        assert (swapped != 0).all() if activation == "swiglu_oai" else (swapped == 0).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_pre_activations_are_finite(activation):
    pre = torch.tensor([[1e4, -1e4, 1e4, -1e4, 1e4, 1e4, -1e4, -1e4]], requires_grad=True)
    value = activate(pre, activation, None)
    (grad,) = torch.autograd.grad(value.sum(), pre)
    assert value.isfinite().all() and grad.isfinite().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_rows_and_no_rows(seed, activation):
    pre = torch.randn(5, 8)
    pre[2] = float("nan")
    assert activate(pre, activation, None).isnan().any(dim=1).tolist() == [False, False, True, False, False]
    value, grad = activate_backward(pre[:0], torch.zeros(0, 8 if activation == "relu2" else 4), activation, None)
    assert value.shape[0] == 0 and grad.shape == (0, 8)


def test_strided_pre_activations(seed):
    pre = torch.randn(16, 10).t()[:, ::2]
    assert torch.equal(activate(pre, "swiglu", None), activate(pre.contiguous(), "swiglu", None))
