"""The casts between the GEMMs of the FP8 MLP against the public ones, and Triton kernels in the simulator."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch

from megamoe.kernels import mlp_quant, quant
from megamoe.kernels.reference import activate, activate_backward
from megamoe.kernels.scales import is_mn_major
from megamoe.types import Fp8Tensor
from tests.support.metrics import assert_close
from tests.support.plain_moe import ACTIVATIONS

FORMS = [(name, None) for name in ACTIVATIONS] + [(name, 0.5) for name in ACTIVATIONS if name != "relu2"]


def case(activation: str, num_rows: int, inter: int, dtype=torch.float32) -> tuple[torch.Tensor, ...]:
    """Pre-activations, gradient and weights of rows; the last ones have none."""
    pre = torch.randn(num_rows, inter if activation == "relu2" else 2 * inter, dtype=dtype)
    weights = torch.rand(num_rows) + 0.1
    weights[-20:] = 0
    return pre, torch.randn(num_rows, inter, dtype=dtype), weights


def assert_same(actual: Fp8Tensor, expected: Fp8Tensor) -> None:
    assert actual.block == expected.block
    assert torch.equal(actual.scales, expected.scales)
    assert torch.equal(actual.codes.float(), expected.codes.float())


@pytest.mark.parametrize("shape", [(128, 256), (256, 144), (0, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cast(shape, dtype, seed):
    x = torch.randn(shape, dtype=dtype)
    both = mlp_quant.cast(x, columns=True)
    assert_same(both.rows, quant.quantize_rowwise(x))
    assert_same(both.columns, quant.quantize_columnwise(x))
    assert is_mn_major(both.rows.scales)
    rows, columns = mlp_quant.cast(x, columns=False)
    assert columns is None
    assert_same(rows, both.rows)
    assert_same(mlp_quant.columns_of_rows(rows), quant.quantize_blockwise(quant.dequantize(rows)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("activation", "clamp"), FORMS)
def test_activation_backward(activation, clamp, dtype, seed):
    pre, grad, weights = case(activation, 256, 128, dtype)
    got = mlp_quant.activation_backward(grad, pre, weights, activation, clamp, columns=True, sums=True)
    act, grad_pre = activate_backward(pre, grad.float() * weights.unsqueeze(1), activation, clamp)
    assert torch.equal(got.sums, grad_pre.view(2, 128, -1).sum(dim=1)) and not grad_pre[-20:].any()
    assert_same(got.pre.rows, quant.quantize_rowwise(grad_pre))
    assert_same(got.pre.columns, quant.quantize_columnwise(grad_pre))
    assert_same(got.act, quant.quantize_blockwise(act * weights.unsqueeze(1)))
    leaf = weights.clone().requires_grad_()
    (activate(pre, activation, clamp) * leaf.unsqueeze(1)).backward(grad.float())
    assert_close(got.row_weights, leaf.grad, 1e-6)
    if activation == "swiglu":
        rows, row_weights = quant.swiglu_backward_quantize_rowwise(grad, pre, weights, clamp)
        assert_same(got.pre.rows, rows)
        assert torch.equal(got.row_weights, row_weights)
    less = mlp_quant.activation_backward(grad, pre, weights, activation, clamp, columns=False)
    assert_same(less.pre.rows, got.pre.rows)
    assert less.act is None and less.pre.columns is None and less.sums is None


# ---------------------------------------------------------------- Triton kernels


@contextlib.contextmanager
def simulated(module):
    """Kernels of the module run in the simulator."""
    pytest.importorskip("triton")
    pytest.importorskip("greenlet")
    from tests.support import gluon_sim

    with mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()):
        with gluon_sim.simulated_launches(module):
            yield


@pytest.mark.parametrize(("activation", "clamp"), FORMS)
def test_forward_kernel(activation, clamp, seed):
    """exp differs in its last bits: few values move to the neighbouring code."""
    pytest.importorskip("triton")
    from megamoe.kernels import triton_activation

    pre, _, weights = case(activation, 128, 256)
    for row_weights in (weights, None):
        wanted = mlp_quant.activation(pre, row_weights, activation, clamp)
        got = mlp_quant._empty_rows((128, 256), pre.device)
        with simulated(triton_activation):
            triton_activation.forward(pre, row_weights, got.codes, got.scales, activation, clamp)
        torch.testing.assert_close(got.scales, wanted.scales, rtol=2e-6, atol=0)
        codes, expected = got.codes.float(), wanted.codes.float()
        assert ((codes - expected).abs() <= 0.13 * expected.abs() + 2**-9).all()
        assert (codes != expected).float().mean() < 2e-3


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((130, 257), torch.float32), ((2, 128, 200), torch.float32), ((130, 140), torch.bfloat16)],
    ids=str,
)
def test_blockwise_kernel(shape, dtype, seed):
    pytest.importorskip("triton")
    from megamoe.kernels import triton_quant

    x = torch.randn(shape).to(dtype)
    wanted = quant.quantize_blockwise(x)
    turned = quant.transpose_fp8(wanted)
    got, got_turned = (
        Fp8Tensor(torch.empty_like(y.codes), torch.empty_like(y.scales), y.block) for y in (wanted, turned)
    )
    outputs = got.codes, got.scales, (got_turned.codes, got_turned.scales)
    with simulated(triton_quant):
        triton_quant.blockwise(quant._matrices(x), *outputs, 128, 448.0, False, 1e-10)
    assert_same(got, wanted)
    assert_same(got_turned, turned)
