"""Activations x routing weights between the GEMMs: torch against formulas, and the kernels in the simulator."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch

from megamoe.kernels import mlp_activation
from megamoe.kernels.mlp_activation import activate_rows, activate_rows_backward
from tests.kernels.test_mlp_quant import FORMS
from tests.support.metrics import assert_close
from tests.support.plain_moe import plain_activation

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# Of a result that is rounded once.
TOLERANCES = {BF16: 3e-3, FP16: 4e-4, FP32: 1e-5, FP64: 1e-13}


class Rows:
    """Pre-activations, gradients and weights; ``exact``: results of autograd on the formulas, in fp64."""

    def __init__(self, activation, clamp, num_rows=40, inter=24, dtype=FP32, pre_dtype=None):
        self.form = activation, clamp
        self.pre = torch.randn(num_rows, inter * (1 if activation == "relu2" else 2)).to(pre_dtype or dtype)
        self.grad = torch.randn(num_rows, inter).to(dtype)
        self.weights = torch.rand(num_rows, dtype=FP64 if dtype == FP64 else FP32) + 0.1
        self.weights[-5:] = 0
        self.dtype = dtype

    def exact(self) -> dict[str, torch.Tensor]:
        pre, weights = self.pre.double().requires_grad_(), self.weights.double().requires_grad_()
        plain = plain_activation(pre, *self.form)
        act = plain * weights.unsqueeze(1)
        grad_pre, grad_weights = torch.autograd.grad(act, (pre, weights), self.grad.double())
        return {"plain": plain, "act": act, "grad_pre": grad_pre, "grad_weights": grad_weights}

    def to(self, device: str) -> Rows:
        moved = Rows.__new__(Rows)
        moved.__dict__ = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in vars(self).items()}
        return moved

    def results(self, with_act=True) -> dict[str, torch.Tensor | None]:
        found = {
            "plain": activate_rows(self.pre, None, *self.form, self.dtype),
            "forward": activate_rows(self.pre, self.weights, *self.form, self.dtype),
        }
        backward = activate_rows_backward(self.grad, self.pre, self.weights, *self.form, self.dtype, with_act)
        return {**found, **dict(zip(("grad_pre", "act", "grad_weights"), backward, strict=True))}


def check(rows: Rows, results: dict[str, torch.Tensor], factor: float = 1.0) -> None:
    """``factor``: of the tolerance."""
    exact = rows.exact()
    exact["forward"] = exact["act"]
    for name, got in results.items():
        wide = FP64 if rows.dtype == FP64 else FP32
        assert got.dtype == (wide if name == "grad_weights" else rows.dtype), name
        assert got.is_contiguous()
        tolerance = TOLERANCES[wide if name == "grad_weights" else rows.dtype]
        assert_close(got.cpu(), exact[name], factor * tolerance, f"{name} of {rows.form}")
    assert not results["grad_pre"][-5:].any() and not results["act"][-5:].any()


@pytest.mark.parametrize("dtype", [FP32, FP64, BF16, FP16], ids=str)
@pytest.mark.parametrize(("activation", "clamp"), FORMS)
def test_cpu(activation, clamp, dtype, seed):
    rows = Rows(activation, clamp, dtype=dtype)
    results = rows.results()
    check(rows, results)
    less = rows.results(with_act=False)
    assert less["act"] is None and torch.equal(less["grad_pre"], results["grad_pre"])


# ---------------------------------------------------------------- the kernels


def poison(rows: Rows) -> None:
    """Rows that are nobody's, and values at the limits."""
    rows.pre[3:6] = torch.tensor([float("nan"), float("inf"), -float("inf")]).view(3, 1)
    rows.pre[6], rows.pre[7] = 0.5, -0.5
    rows.pre[8, 1] = float("nan")
    rows.grad[9, 2] = float("nan")


def assert_agree(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: str) -> None:
    """Also in what is not finite, but for rows of infinite pre-activations, where formulas differ."""
    for name, want in wanted.items():
        tolerance = 1e-5 if want.dtype == FP32 else 1e-2
        mine, theirs = (x.cpu().float()[[*range(4), *range(6, len(x))]] for x in (got[name], want))
        message = f"{what}: {name}"
        torch.testing.assert_close(
            mine, theirs, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text, m=message: f"{m}: {text}"
        )


@contextlib.contextmanager
def simulated():
    """Kernels compute with any tensors, in the simulator."""
    pytest.importorskip("triton")
    pytest.importorskip("greenlet")
    from megamoe.kernels import triton_activation
    from tests.support import gluon_sim

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()))
        patches.enter_context(mock.patch.object(mlp_activation, "runs_triton", lambda *tensors: True))
        patches.enter_context(gluon_sim.simulated_launches(triton_activation))
        yield


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_kernels(number, seed):
    dtype = (FP32, BF16, FP16)[number % 3]
    inter = (24, 300, 256, 12, 128)[number % 5]
    rows = Rows(*FORMS[number], num_rows=43, inter=inter, dtype=dtype, pre_dtype=FP32 if number % 2 else dtype)
    with simulated():
        results, less = rows.results(), rows.results(with_act=False)
    check(rows, results)
    assert less["act"] is None
    assert torch.equal(less["grad_pre"], results["grad_pre"])
    assert torch.equal(less["grad_weights"], results["grad_weights"])
    poison(rows)
    with simulated():
        got = rows.results()
    assert_agree(got, rows.results(), str(FORMS[number]))


def test_kernels_read_column_slices_and_no_rows(seed):
    wide = Rows("swiglu", None, num_rows=16, inter=48)
    rows = Rows("swiglu", None, num_rows=16, inter=24)
    rows.pre, rows.grad = wide.pre[:, 8:56], wide.grad[:, 10:34]
    assert rows.pre.stride(0) == 96
    with simulated():
        check(rows, rows.results())
        assert Rows("geglu", 0.5, num_rows=0).results()["grad_pre"].shape == (0, 48)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(256, 1024), (129, 264), (8, 24), (1000, 768)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("activation", "clamp"), FORMS)
def test_gpu(activation, clamp, dtype, shape, seed):
    """Against fp64; the same bits again, and whatever the other rows hold."""
    for pre_dtype in {dtype, FP32}:
        rows = Rows(activation, clamp, *shape, dtype, pre_dtype)
        there = rows.to("cuda")
        results, again, less = there.results(), there.results(), there.results(with_act=False)
        check(rows, results)
        for name, want in results.items():
            assert torch.equal(again[name], want), name
            if name == "act":
                assert less[name] is None
            else:
                assert_close(less[name], want, 1e-3, name)
        if shape[0] > 128:
            poison(there)
            poison(rows)
            poisoned = there.results()
            assert_agree(poisoned, rows.results(), str(pre_dtype))
            for name, want in results.items():
                assert torch.equal(poisoned[name][10:], want[10:]), name


@pytest.mark.gpu
def test_gpu_runs_kernels(seed):
    """And fp64 does not: they would compute it in fp32."""
    assert mlp_activation.runs_triton(torch.empty(1, device="cuda"))
    rows = Rows("swiglu", None, dtype=FP64)
    check(rows, rows.to("cuda").results())
