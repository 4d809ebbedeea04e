"""``SharedExperts``: against the formulas, dtypes, layout, and what a user may pass wrongly."""

from __future__ import annotations

import pytest
import torch

from megamoe import MoEConfig, SharedExperts
from tests.support.errors import fails
from tests.support.metrics import assert_close
from tests.support.plain_moe import ACTIVATIONS, plain_activation

HIDDEN, WIDTH = 24, 20
CLAMPED = [name for name in ACTIVATIONS if name != "relu2"]


def layer(**changes) -> MoEConfig:
    fields = dict(hidden_size=HIDDEN, intermediate_size=8, num_experts=4, top_k=2, shared_intermediate_size=WIDTH)
    return MoEConfig(**{**fields, **changes})


@pytest.mark.parametrize(("activation", "clamp"), [*((a, None) for a in ACTIVATIONS), *((a, 0.5) for a in CLAMPED)])
@pytest.mark.parametrize("gate", [False, True], ids=["no_gate", "gate"])
def test_outputs_and_gradients(activation, clamp, gate, seed):
    config = layer(activation=activation, shared_gate=gate, activation_clamp=clamp)
    shared = SharedExperts(config).double()
    x = torch.randn(13, HIDDEN, dtype=torch.float64, requires_grad=True)
    up_proj = shared.up_proj if activation == "relu2" else shared.gate_up_proj
    expected = plain_activation(x @ up_proj.t(), activation, config.clamp) @ shared.down_proj.t()
    if gate:
        expected = expected / (1 + torch.exp(-(x @ shared.shared_gate.t())))
    actual = shared(x)
    assert_close(actual, expected, 1e-12)
    inputs, grad = [x, *shared.parameters()], torch.randn_like(x)
    wanted = torch.autograd.grad(expected, inputs, grad)
    for got, want in zip(torch.autograd.grad(actual, inputs, grad), wanted, strict=True):
        assert_close(got, want, 1e-12)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_is_never_quantised(precision, seed):
    shared = SharedExperts(layer(precision=precision))
    x = torch.randn(13, HIDDEN)
    expected = plain_activation(x.double() @ shared.gate_up_proj.double().t(), "swiglu") @ shared.down_proj.double().t()
    assert_close(shared(x), expected, 1e-6)


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_output_has_the_dtype_of_the_input(parameters, inputs, autocast, seed):
    shared = SharedExperts(layer(shared_gate=True)).to(parameters)
    x = torch.randn(30, HIDDEN).to(inputs).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = shared(x)
    out.sum().backward()
    assert out.dtype == inputs and x.grad.dtype == inputs and shared.down_proj.grad.dtype == parameters
    exact = SharedExperts(layer(shared_gate=True)).double()
    exact.load_state_dict(shared.state_dict())
    coarsest = max(torch.finfo(dtype).eps for dtype in (parameters, inputs, torch.float32))
    assert_close(out, exact(x.detach().double()), 4 * max(coarsest, torch.finfo(torch.bfloat16).eps * autocast))


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_few_tokens(num_tokens):
    shared = SharedExperts(layer(shared_gate=True))
    out = shared(torch.randn(num_tokens, HIDDEN))
    assert out.shape == (num_tokens, HIDDEN)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in shared.parameters())


def test_nan_token_stays_in_its_row(seed):
    shared = SharedExperts(layer(shared_gate=True))
    x = torch.randn(9, HIDDEN)
    expected = shared(x)
    x[4] = float("nan")
    out = shared(x)
    assert out[4].isnan().all()
    assert torch.equal(out[[0, 1, 2, 3, 5, 6, 7, 8]], expected[[0, 1, 2, 3, 5, 6, 7, 8]])


@pytest.mark.parametrize(
    ("changes", "shapes"),
    [
        (dict(), {"gate_up_proj": (40, 24), "down_proj": (24, 20)}),
        (dict(shared_gate=True), {"gate_up_proj": (40, 24), "down_proj": (24, 20), "shared_gate": (1, 24)}),
        (dict(activation="relu2"), {"up_proj": (20, 24), "down_proj": (24, 20)}),
        # The config's bias is that of the routed experts.
        (dict(bias=True), {"gate_up_proj": (40, 24), "down_proj": (24, 20)}),
    ],
)
def test_state_dict(changes, shapes, seed):
    shared = SharedExperts(layer(**changes))
    state = shared.state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == shapes
    fresh, x = SharedExperts(layer(**changes)), torch.randn(5, HIDDEN)
    fresh.load_state_dict(state)
    assert torch.equal(fresh(x), shared(x))


@pytest.mark.parametrize("init_std", [None, 0.02])
def test_initial_values(init_std, seed):
    config = MoEConfig(256, 8, 4, 2, shared_intermediate_size=64, shared_gate=True, init_std=init_std)
    shared = SharedExperts(config)
    for name, fan_in in (("gate_up_proj", 256), ("down_proj", 64)):
        std = fan_in**-0.5 if init_std is None else init_std
        assert abs(float(shared.get_parameter(name).detach().std()) / std - 1) < 0.05
    assert shared.shared_gate.any()
    torch.manual_seed(1)
    shared.reset_parameters()
    before = shared.down_proj.detach().clone()
    torch.manual_seed(1)
    shared.reset_parameters()
    assert torch.equal(shared.down_proj, before)


def test_repr():
    assert repr(SharedExperts(layer())) == f"SharedExperts(hidden_size={HIDDEN}, intermediate_size={WIDTH})"


@pytest.mark.parametrize(
    ("value", "argument", "shown", "kind", "rule"),
    [
        (torch.ones(3, HIDDEN + 1), "hidden_states.shape", [3, HIDDEN + 1], ValueError, f"must be [any, {HIDDEN}]"),
        # Would come back truncated to integers.
        (torch.ones(3, HIDDEN, dtype=torch.int64), "hidden_states.dtype", torch.int64, TypeError, "must be one of"),
        (torch.ones(3, HIDDEN, device="meta"), "hidden_states.device", "meta", ValueError, "must be cpu"),
        ([[1.0] * HIDDEN], "hidden_states", "list", TypeError, "must be a torch.Tensor"),
    ],
    ids=["shape", "dtype", "device", "type"],
)
def test_bad_input(value, argument, shown, kind, rule):
    with fails(kind, argument, shown, rule):
        SharedExperts(layer())(value)


def test_needs_a_width():
    with fails(ValueError, "config.shared_intermediate_size", 0, "at least 1"):
        SharedExperts(layer(shared_intermediate_size=0))
