"""The casts between the GEMMs of the FP8 MLP: against the public ones, and their kernels in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megamoe.kernels import mlp_quant, quant
from megamoe.kernels.reference import activate, activate_backward
from megamoe.kernels.scales import is_mn_major
from megamoe.types import Fp8Tensor
from tests.support.metrics import assert_close
from tests.support.plain_moe import ACTIVATIONS

ROOT = Path(__file__).parents[2]


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
    assert_same(mlp_quant.columns_of_rows(rows), quant.quantize_columnwise(quant.dequantize(rows)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clamp", [None, 0.5])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_backward(activation, clamp, dtype, seed):
    clamp = None if activation == "relu2" else clamp
    pre = torch.randn(128, 128 if activation == "relu2" else 256, dtype=dtype)
    grad, weights = torch.randn(128, 128, dtype=dtype), torch.rand(128) + 0.1
    weights[100:] = 0
    got = mlp_quant.activation_backward(grad, pre, weights, activation, clamp, columns=True, exact=True)
    act, grad_pre = activate_backward(pre, grad.float() * weights.unsqueeze(1), activation, clamp)
    assert torch.equal(got.exact, grad_pre) and not got.exact[100:].any()
    assert_same(got.pre.rows, quant.quantize_rowwise(grad_pre))
    assert_same(got.pre.columns, quant.quantize_columnwise(grad_pre))
    assert_same(got.act, quant.quantize_columnwise(act * weights.unsqueeze(1)))
    leaf = weights.clone().requires_grad_()
    (activate(pre, activation, clamp) * leaf.unsqueeze(1)).backward(grad.float())
    assert_close(got.row_weights, leaf.grad, 1e-6)
    if activation == "swiglu":
        rows, row_weights = quant.swiglu_backward_quantize_rowwise(grad, pre, weights, clamp)
        assert_same(got.pre.rows, rows)
        assert torch.equal(got.row_weights, row_weights)
    less = mlp_quant.activation_backward(grad, pre, weights, activation, clamp, columns=False)
    assert_same(less.pre.rows, got.pre.rows)
    assert less.act is None and less.pre.columns is None and less.exact is None


IN_INTERPRETER = """
import contextlib, sys
import torch
from megamoe.kernels import mlp_quant, quant, triton_mlp

torch.manual_seed(int(sys.argv[1]))
torch.cuda.device = lambda device: contextlib.nullcontext()

def compare(actual, expected, what):
    # The interpreter rounds to e4m3 in its own way, and loses the carry of what rounds up to a power of two.
    torch.testing.assert_close(actual.scales, expected.scales, rtol=1e-6, atol=0, msg=what)
    got, wanted = actual.codes.double(), expected.codes.double()
    lost = (2 * got == wanted) & (torch.frexp(wanted).mantissa.abs() == 0.5)
    far = ((got - wanted).abs() > 0.13 * wanted.abs() + 2**-9) & ~lost
    assert not far.any(), f"{what}: {int(far.sum())} values differ"
    share = float((got != wanted).float().mean())
    assert share < 0.06, f"{what}: {share:.3f} of the codes differ"

for rows, columns, dtype in ((256, 128, torch.float32), (128, 144, torch.bfloat16)):
    x = torch.randn(rows, columns).mul_(2.0 ** torch.randint(-4, 5, (rows, 1))).to(dtype)
    both = mlp_quant.Both(mlp_quant._empty_rows(x.shape, x.device), mlp_quant._empty_columns(x.shape, x.device))
    triton_mlp.both_ways(x, both.rows.codes, both.rows.scales, both.columns.codes.t(), both.columns.scales)
    wanted = mlp_quant.cast(x, columns=True)
    compare(both.rows, wanted.rows, "rows")
    compare(both.columns, wanted.columns, "columns")
    again = mlp_quant._empty_columns(x.shape, x.device)
    triton_mlp.columns_of_rows(wanted.rows.codes, wanted.rows.scales, again.codes.t(), again.scales)
    compare(again, mlp_quant.columns_of_rows(wanted.rows), "columns of rows")

for clamp in (None, 0.5):
    pre, grad, weights = torch.randn(128, 512), torch.randn(128, 256), torch.rand(128) + 0.1
    weights[100:] = 0
    got = mlp_quant._swiglu_backward(grad, pre, weights, clamp)
    wanted = mlp_quant.activation_backward(grad, pre, weights, "swiglu", clamp, columns=True)
    compare(got.pre.rows, wanted.pre.rows, "gradient, rows")
    compare(got.pre.columns, wanted.pre.columns, "gradient, columns")
    compare(got.act, wanted.act, "activation")
    torch.testing.assert_close(got.row_weights, wanted.row_weights, rtol=1e-4, atol=1e-4)
print("done")
"""


def test_kernels_in_the_interpreter(seed):
    """Which element goes where, and every scale; a process of its own, as triton decides at its import."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", IN_INTERPRETER, str(seed)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "done", done.stderr[-3000:]


# ---------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 256), (384, 4096), (256, 144), (128, 200), (256, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cast_gpu(shape, dtype, seed):
    x = torch.randn(shape, dtype=dtype) * 2.0 ** torch.randint(-4, 5, (shape[0], 1))
    got, wanted = mlp_quant.cast(x.cuda(), columns=True), mlp_quant.cast(x, columns=True)
    for mine, theirs in zip(got, wanted, strict=True):
        assert_same(on_cpu(mine), theirs)
    assert got.columns.codes.t().is_contiguous() and is_mn_major(got.rows.scales)
    assert_same(on_cpu(mlp_quant.columns_of_rows(got.rows)), mlp_quant.columns_of_rows(wanted.rows))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clamp", [None, 0.5])
def test_activation_backward_gpu(clamp, dtype, seed):
    """Row-wise the bits of the cast without columns; else the CPU's results but for the last bit of exp."""
    pre, grad = torch.randn(384, 1024, dtype=dtype), torch.randn(384, 512, dtype=dtype)
    weights = torch.rand(384) + 0.1
    options = grad.cuda(), pre.cuda(), weights.cuda(), "swiglu", clamp
    got, less = (mlp_quant.activation_backward(*options, columns=columns) for columns in (True, False))
    assert_close(quant.dequantize(got.pre.rows), quant.dequantize(less.pre.rows), 1e-3)
    assert_close(got.row_weights, less.row_weights, 1e-5)
    wanted = mlp_quant.activation_backward(grad, pre, weights, "swiglu", clamp, columns=True)
    for mine, theirs in ((got.pre.rows, wanted.pre.rows), (got.pre.columns, wanted.pre.columns), (got.act, wanted.act)):
        assert_close(quant.dequantize(on_cpu(mine)), quant.dequantize(theirs), 2e-3)
    assert got.act.codes.t().is_contiguous() and got.pre.columns.codes.t().is_contiguous()


def on_cpu(x: Fp8Tensor) -> Fp8Tensor:
    return Fp8Tensor(x.codes.cpu(), x.scales.cpu(), x.block)
