"""``grouped_mlp`` in BF16 with the activation inside GEMM 1, as on Hopper GPUs; here the reference computes it."""

from __future__ import annotations

import pytest
import torch

from megamoe.comm.exchange import LocalExchange
from megamoe.kernels import gemm_swiglu, mlp, pool_gemm
from megamoe.kernels.gemm_swiglu import ACTIVATIONS
from megamoe.kernels.mlp_options import MlpOptions
from tests.kernels.test_mlp import check_against_plain, leaves, moe
from tests.kernels.test_mlp_fp8_training import Case, kept_bytes
from tests.support.generators import random_expert_weights, random_routing
from tests.support.metrics import assert_close
from tests.support.plain_moe import plain_moe

BF16 = torch.bfloat16
BIAS = pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])


@pytest.fixture(autouse=True)
def fused(monkeypatch) -> list[dict]:
    """The options of each call of the fused GEMM."""
    calls, real = [], gemm_swiglu.grouped_bf16_gemm_swiglu_nt

    def recorded(*args, **options):
        calls.append(options)
        return real(*args, **options)

    monkeypatch.setattr(gemm_swiglu, "grouped_bf16_gemm_swiglu_nt", recorded)
    monkeypatch.setattr(
        pool_gemm,
        "fuses_activation",
        lambda rows, up_proj, activation: rows.dtype == BF16 and activation in ACTIVATIONS,
    )
    return calls


@BIAS
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_against_fp64(activation, bias, fused, seed):
    routing = random_routing("zipf", 60, 5, 2, dtype=torch.float32)
    weights = random_expert_weights(5, 256, 192, activation, bias).to(BF16)
    check_against_plain(torch.randn(60, 256).bfloat16(), routing, weights, MlpOptions(activation), 7e-3)
    assert len(fused) == 1 and fused[0]["pre"].dtype == BF16


def test_clamp(fused, seed):
    """The result only: pre-activations near the limit are rounded across it, and their gradients with them."""
    routing = random_routing("zipf", 60, 5, 2, dtype=torch.float32)
    weights = random_expert_weights(5, 256, 192).to(BF16)
    arguments = torch.randn(60, 256).bfloat16(), routing.topk_index, routing.topk_weights
    out = moe(*arguments, weights, MlpOptions("swiglu", 0.7))
    exact = plain_moe(arguments[0].double(), *arguments[1:], weights.to(torch.float64), "swiglu", 0.7)
    assert_close(out, exact, 7e-3)
    assert len(fused) == 1


@BIAS
@pytest.mark.parametrize("activation", ["swiglu", "geglu_tanh"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_the_same_bits(dtype, activation, bias, fused, seed):
    """With and without recomputation, in training and inference; fp32 parameters beside BF16 rows too."""
    case = Case(activation, bias)
    case.weights = case.weights.to(dtype).requires_grad_()
    results = []
    for recompute in ("none", "activation"):
        x, topk = case.x.clone().requires_grad_(), case.routing.topk_weights.clone().requires_grad_()
        out = moe(x, case.routing.topk_index, topk, case.weights, case.options(recompute, "bf16"), BF16)
        results.append([out, *torch.autograd.grad(out, leaves(x, topk, case.weights), case.grad)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    # Forward with pre-activations; without; again in the backward pass.
    assert [options["pre"] is not None for options in fused] == [True, False, True]
    with torch.no_grad():
        arguments = case.x, case.routing.topk_index, case.routing.topk_weights, case.weights
        assert torch.equal(moe(*arguments, case.options("none", "bf16"), BF16), results[0][0])
    assert fused[-1]["pre"] is None


@BIAS
def test_kept_memory(bias, seed):
    """Pre-activations in BF16, also with a bias."""
    hidden, width = 512, 256
    case = Case(bias=bias, hidden=hidden, width=width)
    assert kept_bytes(case, "none", "bf16") == 2 * hidden + 4 * width
    assert kept_bytes(case, "activation", "bf16") == 2 * hidden


@BIAS
@pytest.mark.parametrize("recompute", ["none", "activation"])
def test_operator(recompute, bias, seed):
    """Its fake knows what is kept."""
    case = Case(bias=bias, hidden=32, width=16, tokens=20)
    sent = LocalExchange(3).dispatch(case.x, case.routing, BF16)
    operands = sent.rows.detach().requires_grad_(), sent.row_weights.detach().requires_grad_()
    weights = case.weights
    operands += weights.up_proj, weights.down_proj, weights.up_bias, weights.down_bias
    constants = "swiglu", None, "bf16", 0.5, recompute
    for trained in (True, False):
        if not trained:
            operands = tuple(None if x is None else x.detach() for x in operands)
        torch.library.opcheck(mlp._operator, (*operands, sent.layout.counts, sent.layout.starts, *constants, trained))


def test_relu2_is_not_fused(fused, seed):
    routing = random_routing("zipf", 60, 5, 2)
    weights = random_expert_weights(5, 64, 48, "relu2").to(BF16)
    check_against_plain(torch.randn(60, 64).bfloat16(), routing, weights, MlpOptions("relu2"), 7e-3)
    assert not fused


def test_choice(monkeypatch):
    """On a Hopper GPU, BF16, an activation with a gate, rows of whole 16 bytes."""
    monkeypatch.undo()
    monkeypatch.setattr(pool_gemm.gemm_ops, "runs_kernels", lambda x: True)

    def chosen(hidden=64, width=48, dtype=BF16, activation="swiglu"):
        rows, up_proj = torch.empty(128, hidden, dtype=dtype), torch.empty(2, 2 * width, hidden)
        return pool_gemm.fuses_activation(rows, up_proj, activation)

    assert chosen() and chosen(activation="geglu")
    assert not chosen(hidden=60)
    assert not chosen(width=44)
    assert not chosen(dtype=torch.float32)
    assert not chosen(activation="relu2")
    monkeypatch.setattr(pool_gemm.gemm_ops, "runs_kernels", lambda x: False)
    assert not chosen()
