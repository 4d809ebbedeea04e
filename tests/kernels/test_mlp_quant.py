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
    assert_same(mlp_quant.columns_of_rows(rows), quant.quantize_columnwise(quant.dequantize(rows)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("activation", "clamp"), FORMS)
def test_activation_backward(activation, clamp, dtype, seed):
    pre, grad, weights = case(activation, 256, 128, dtype)
    got = mlp_quant.activation_backward(grad, pre, weights, activation, clamp, columns=True, sums=True)
    act, grad_pre = activate_backward(pre, grad.float() * weights.unsqueeze(1), activation, clamp)
    assert torch.equal(got.sums, grad_pre.view(2, 128, -1).sum(dim=1)) and not grad_pre[-20:].any()
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
    assert less.act is None and less.pre.columns is None and less.sums is None


IN_INTERPRETER = """
import contextlib, sys
import torch
from megamoe.kernels import mlp_quant, quant, triton_activation, triton_mlp, triton_quant
from tests.kernels.test_mlp_quant import FORMS, case

torch.manual_seed(int(sys.argv[1]))
torch.cuda.device = lambda device: contextlib.nullcontext()

def compare(actual, expected, what):
    # The interpreter rounds to e4m3 in its own way, and loses the carry of what rounds up to a power of two.
    torch.testing.assert_close(actual.scales, expected.scales, rtol=1e-5, atol=0, msg=what)
    got, wanted = actual.codes.double(), expected.codes.double()
    # So does what lies so near to one that the last bit of exp decides.
    lost = (torch.frexp(got).mantissa.abs() == 0.5) & ((wanted == 2 * got) | (wanted == 1.875 * got))
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

for number, (activation, clamp) in enumerate(FORMS):
    pre, grad, weights = case(activation, 256, 256 if number == 0 else 128)
    options = grad, pre, weights, activation, clamp
    wanted = mlp_quant.activation_backward(*options, columns=True, sums=True)
    for columns, sums in ((True, True), (False, False), (True, False), (False, True)):
        got, what = mlp_quant._on_gpu(*options, columns, sums), f"{activation} {clamp} {columns} {sums}: "
        compare(got.pre.rows, wanted.pre.rows, what + "gradient, rows")
        torch.testing.assert_close(got.row_weights, wanted.row_weights, rtol=1e-4, atol=1e-4)
        assert (got.sums is not None) == sums and (got.act is not None) == columns == (got.pre.columns is not None)
        if columns:
            compare(got.pre.columns, wanted.pre.columns, what + "gradient, columns")
            compare(got.act, wanted.act, what + "activation")
        if sums:
            torch.testing.assert_close(got.sums, wanted.sums, rtol=1e-4, atol=1e-4)
        if number:
            break
    for weighted in (weights, None):
        act = mlp_quant._empty_rows(grad.shape, grad.device)
        triton_activation.forward(pre, weighted, act.codes, act.scales, activation, clamp)
        compare(act, mlp_quant.activation(pre, weighted, activation, clamp), f"{activation}: forward")
for shape, dtype in (((130, 257), torch.float32), ((2, 128, 200), torch.float32), ((130, 140), torch.bfloat16)):
    x = torch.randn(shape).to(dtype)
    wanted = quant.quantize_blockwise(x)
    turned = quant.transpose_fp8(wanted)
    both = [quant.Fp8Tensor(torch.empty_like(y.codes), torch.empty_like(y.scales), y.block) for y in (wanted, turned)]
    outputs = both[0].codes, both[0].scales, (both[1].codes, both[1].scales)
    triton_quant.blockwise(quant._matrices(x), *outputs, 128, 448.0, False, 1e-10)
    compare(both[0], wanted, "blocks")
    compare(both[1], turned, "blocks, turned")
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
@pytest.mark.parametrize(("activation", "clamp"), FORMS)
def test_activation_backward_gpu(activation, clamp, dtype, seed):
    """The CPU's results but for the last bits of exp and erf; the same bits again."""
    pre, grad, weights = case(activation, 384, 512, dtype)
    options = grad.cuda(), pre.cuda(), weights.cuda(), activation, clamp
    wanted = mlp_quant.activation_backward(grad, pre, weights, activation, clamp, columns=True, sums=True)
    got, again = (mlp_quant.activation_backward(*options, columns=True, sums=True) for _ in range(2))
    pairs = (got.pre.rows, wanted.pre.rows), (got.pre.columns, wanted.pre.columns), (got.act, wanted.act)
    for mine, theirs in pairs:
        assert_close(quant.dequantize(on_cpu(mine)), quant.dequantize(theirs), 2e-3)
    assert_close(got.row_weights.cpu(), wanted.row_weights, 1e-5)
    assert_close(got.sums.cpu(), wanted.sums, 1e-5)
    assert got.act.codes.t().is_contiguous() and got.pre.columns.codes.t().is_contiguous()
    assert torch.equal(again.sums, got.sums)
    assert_same(again.act, got.act)
    for columns, sums in ((False, False), (True, False), (False, True)):
        less = mlp_quant.activation_backward(*options, columns=columns, sums=sums)
        assert_close(quant.dequantize(less.pre.rows), quant.dequantize(got.pre.rows), 1e-3)
        assert_close(less.row_weights, got.row_weights, 1e-5)
        assert (less.sums is not None) == sums and (less.act is not None) == columns


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("activation", "clamp"), FORMS)
def test_activation_gpu(activation, clamp, dtype, seed):
    pre, _, weights = case(activation, 384, 512, dtype)
    for weighted in (weights, None):
        theirs = mlp_quant.activation(pre, weighted, activation, clamp)
        got = mlp_quant.activation(pre.cuda(), None if weighted is None else weighted.cuda(), activation, clamp)
        assert is_mn_major(got.scales)
        assert_close(quant.dequantize(on_cpu(got)), quant.dequantize(theirs), 2e-3)


def on_cpu(x: Fp8Tensor) -> Fp8Tensor:
    return Fp8Tensor(x.codes.cpu(), x.scales.cpu(), x.block)
