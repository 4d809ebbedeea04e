"""``MoE``: the whole layer against a loop over tokens, every shape of input, training, checkpointing, state."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import megamoe
from megamoe import MoE, MoEConfig, RouterConfig
from megamoe.comm.exchange import LocalExchange
from tests.support.metrics import assert_close, relative_error
from tests.support.plain_layer import plain_layer

HIDDEN, WIDTH = 24, 20
DOUBLE = torch.float64


def layer(num_experts: int = 6, top_k: int = 2, router: RouterConfig | None = None, **changes) -> MoEConfig:
    fields = dict(hidden_size=HIDDEN, intermediate_size=WIDTH, num_experts=num_experts, top_k=top_k)
    return MoEConfig(**{**fields, **changes}, router=router or RouterConfig())


def build(config: MoEConfig, dtype: torch.dtype = torch.float32) -> MoE:
    """A layer whose biases are not zero, so that every term matters."""
    moe = MoE(config).to(dtype)
    with torch.no_grad():
        for name, tensor in moe.state_dict().items():
            if name.endswith("bias"):
                tensor.normal_(std=0.3)
    return moe


SHARED = dict(shared_intermediate_size=28)
GROUPS = dict(num_groups=4, topk_groups=2)
DEEPSEEK = RouterConfig(score="sigmoid", scaling_factor=2.5, group_score="sum_top2", expert_bias=True, **GROUPS)

CONFIGS = {
    "plain": layer(),
    "one_expert": layer(1, 1),
    "one_slot": layer(5, 1, RouterConfig(renormalize=False)),
    "all_experts": layer(5, 5),
    "ids_above_255": layer(300, 3),
    "shared": layer(**SHARED),
    "shared_gate": layer(**SHARED, shared_gate=True, activation="geglu"),
    "relu2_shared": layer(**SHARED, activation="relu2", router=RouterConfig(score="sqrtsoftplus")),
    "deepseek_v2": layer(12, 4, RouterConfig(renormalize=False, scaling_factor=16.0, **GROUPS), **SHARED),
    "deepseek_v3": layer(12, 4, DEEPSEEK, **SHARED),
    "gpt_oss": layer(6, 3, RouterConfig(linear_bias=True), activation="swiglu_oai", activation_clamp=0.7, bias=True),
    "clamped_geglu_tanh": layer(activation="geglu_tanh", activation_clamp=0.5, **SHARED),
}

# ---------------------------------------------------------------- against the formulas


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("masked", [False, True], ids=["all_tokens", "masked"])
def test_layer(name, masked, seed):
    config = CONFIGS[name]
    moe = build(config, DOUBLE)
    x = torch.randn(3, 7, HIDDEN, dtype=DOUBLE)
    mask = torch.rand(3, 7) < 0.6 if masked else None
    grad = torch.randn_like(x)
    parameters = {key: tensor.detach().clone() for key, tensor in moe.state_dict().items()}
    leaves = [parameters[key].requires_grad_() for key, _ in moe.named_parameters()]
    plain_x, moe_x = x.clone().requires_grad_(), x.clone().requires_grad_()

    expected = plain_layer(config, parameters, plain_x.view(21, HIDDEN), None if mask is None else mask.view(21))
    expected.backward(grad.view(21, HIDDEN))
    actual = moe(moe_x) if mask is None else moe(moe_x, token_mask=mask)
    actual.backward(grad)
    assert_close(actual, expected.view_as(x), 1e-12, "output")
    assert_close(moe_x.grad, plain_x.grad, 1e-12, "input gradient")
    assert len(leaves) == len(list(moe.parameters()))
    for (key, parameter), leaf in zip(moe.named_parameters(), leaves, strict=True):
        # One expert with weight 1 gives the router a gradient of zero, up to rounding.
        difference = (parameter.grad - leaf.grad).norm()
        assert float(difference) <= 1e-12 * float(leaf.grad.norm()) + 1e-12, f"gradient of {key}"


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 3, 2), (0,), (2, 0), (0, 4)], ids=str)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_leading_dimensions_are_tokens(shape, precision, seed):
    moe = MoE(layer(**SHARED, precision=precision, router=RouterConfig(aux_loss_coef=0.1)))
    x = torch.randn(*shape, HIDDEN, requires_grad=True)
    out = moe(x, token_mask=torch.ones(shape, dtype=torch.bool))
    assert out.shape == x.shape and out.dtype == x.dtype
    assert torch.equal(out, moe(x)) and torch.equal(out.view(-1, HIDDEN), moe(x.view(-1, HIDDEN)))
    out.sum().backward()
    assert x.grad.shape == x.shape
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert x.numel() or not parameter.grad.any(), name


def test_strided_inputs_and_gradients(seed):
    """Sequence-first views, sliced columns, expanded rows, the zero-stride gradient of a sum."""
    moe = MoE(layer(**SHARED))
    base = torch.randn(4, 5, 2 * HIDDEN)
    views = [base.transpose(0, 1)[..., :HIDDEN], base[:, ::2, ::2], base[0, 0, HIDDEN:].expand(3, 2, HIDDEN)]
    for view in views:
        assert not view.is_contiguous()
        strided, dense = view.detach().requires_grad_(), view.detach().clone(memory_format=torch.contiguous_format)
        dense.requires_grad_()
        moe.zero_grad()
        out = moe(strided)
        out.sum().backward()
        grads = [parameter.grad.clone() for parameter in moe.parameters()]
        moe.zero_grad()
        expected = moe(dense)
        expected.backward(torch.ones(expected.shape))
        assert torch.equal(out, expected) and torch.equal(strided.grad, dense.grad)
        assert all(torch.equal(p.grad, g) for p, g in zip(moe.parameters(), grads, strict=True))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_nan_token_stays_in_its_row(precision, seed):
    router = RouterConfig(aux_loss_coef=0.1, z_loss_coef=0.1)
    moe = MoE(layer(**SHARED, precision=precision, router=router))
    clean = torch.randn(3, 10, HIDDEN)
    others = torch.ones(3, 10, dtype=torch.bool)
    others[1, 4] = False
    # The losses average over tokens, so other tokens' gradients depend on counts: compare with the losses off below.
    poisoned = clean.clone()
    poisoned[1, 4] = float("nan")
    poisoned.requires_grad_()
    out = moe(poisoned)
    out.sum().backward()
    assert out[1, 4].isnan().all()
    # FP8 may round a code the other way where another number of rows changes the order of a sum.
    tolerance = 1e-5 if precision == "bf16" else 2e-2
    assert_close(out[others], moe(clean)[others], tolerance)
    assert poisoned.grad[others].isfinite().all()

    plain = MoE(layer(**SHARED, precision=precision))
    plain.load_state_dict(moe.state_dict())
    grads = []
    for x in (clean, poisoned):
        leaf = x.detach().clone().requires_grad_()
        plain(leaf).sum().backward()
        grads.append(leaf.grad[others])
    assert_close(grads[1], grads[0], tolerance, "gradient of the other tokens")


def test_masked_tokens_get_the_shared_expert_only(seed):
    moe = MoE(layer(**SHARED))
    x, mask = torch.randn(4, 5, HIDDEN), torch.rand(4, 5) < 0.5
    out = moe(x, token_mask=mask)
    assert_close(out[~mask], moe.shared_experts(x[~mask]), 1e-6)
    assert_close(out[mask], moe(x[mask]), 1e-6)
    no_shared = MoE(layer())
    assert not no_shared(x, token_mask=mask)[~mask].any()


def test_nan_in_masked_tokens_harms_nothing(seed):
    moe = MoE(layer(router=RouterConfig(aux_loss_coef=0.1, z_loss_coef=0.1)))
    x, mask = torch.randn(4, 5, HIDDEN), torch.rand(4, 5) < 0.5
    x[~mask] = float("nan")
    out = moe(x, token_mask=mask)
    assert out.isfinite().all()
    out.square().sum().backward()
    for name, parameter in moe.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_dtype_policy(parameters, inputs, autocast, seed):
    """Output in the input's dtype, GEMMs in autocast's or the parameters' dtype, the router in fp32."""
    config = layer(**SHARED, shared_gate=True)
    moe = MoE(config, dtype=parameters)
    assert moe.router.weight.dtype == torch.float32
    assert all(p.dtype == parameters for part in (moe.experts, moe.shared_experts) for p in part.parameters())
    x = torch.randn(40, HIDDEN).to(inputs).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = moe(x)
    assert out.dtype == inputs
    exact = MoE(config).double()
    exact.load_state_dict(moe.state_dict())
    expected = exact(x.detach().double())
    rounds = autocast or torch.bfloat16 in (parameters, inputs)
    error = relative_error(out, expected)
    assert 5e-4 < error < 2e-2 if rounds else error < 1e-5
    out.sum().backward()
    assert x.grad.dtype == inputs
    assert all(parameter.grad.dtype == parameter.dtype for parameter in moe.parameters())


def test_dtype_policy_is_documented():
    text = " ".join((MoE.__doc__ + MoE.forward.__doc__).split())
    for part in ("router stays in fp32", "in the dtype of ``hidden_states``"):
        assert part in text


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_training_reduces_the_loss(precision, parameters, seed):
    router = RouterConfig(score="sigmoid", expert_bias=True, aux_loss_coef=1e-3)
    torch.manual_seed(seed % 1000)
    moe = MoE(layer(4, 2, router, precision=precision, **SHARED), dtype=parameters)
    x = torch.randn(64, HIDDEN, dtype=parameters)
    target = torch.tanh(x.float() @ torch.randn(HIDDEN, HIDDEN) * HIDDEN**-0.5)
    optimizer = torch.optim.AdamW(moe.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = nn.functional.mse_loss(moe(x).float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        megamoe.update_expert_biases(moe)
        losses.append(loss.item())
    assert losses[-1] < 0.25 * losses[0], losses
    assert moe.router.expert_bias.any() and not moe.router.tokens_per_expert.any()


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_fp8_gradients_are_close_to_fp32(bias, seed):
    """Within the error of e4m3: 2^-4 relative at most per code, about 2.5 % per GEMM operand."""
    fields = dict(hidden_size=256, intermediate_size=128, num_experts=4, top_k=2, bias=bias)
    exact, quantised = MoE(MoEConfig(**fields)), MoE(MoEConfig(**fields, precision="fp8"))
    quantised.load_state_dict(exact.state_dict())
    x, grad = torch.randn(300, 256), torch.randn(300, 256)
    results = []
    for moe in (exact, quantised):
        leaf = x.clone().requires_grad_()
        out = moe(leaf)
        out.backward(grad)
        results.append({"output": out, "input": leaf.grad, **{n: p.grad for n, p in moe.named_parameters()}})
    for name, expected in results[0].items():
        error = relative_error(results[1][name], expected)
        if name == "experts.down_proj_bias":
            assert error < 1e-5, "not a result of a GEMM"
        else:
            assert 0.01 < error < 0.12, f"{name}: {error:.3f}"


# ---------------------------------------------------------------- activation checkpointing


def run(moe: MoE, x: torch.Tensor, grad: torch.Tensor, **options) -> list[torch.Tensor]:
    """Output and all gradients, checkpointed if there are ``options``."""
    moe.zero_grad()
    leaf = x.clone().requires_grad_()
    out = checkpoint(moe, leaf, **options) if options else moe(leaf)
    out.backward(grad)
    return [out.detach(), leaf.grad, *(parameter.grad.clone() for parameter in moe.parameters())]


CHECKPOINTING = {
    "non_reentrant": dict(use_reentrant=False),
    "reentrant": dict(use_reentrant=True),
    "save_routing": dict(use_reentrant=False, context_fn=megamoe.save_routing),
}


@pytest.mark.parametrize("mode", CHECKPOINTING)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_checkpointing_changes_no_bit(mode, precision, seed):
    router = RouterConfig(score="sigmoid", expert_bias=True, aux_loss_coef=0.1, z_loss_coef=0.1)
    moe = build(layer(router=router, precision=precision, **SHARED))
    x, grad = torch.randn(3, 9, HIDDEN), torch.randn(3, 9, HIDDEN)
    expected = run(moe, x, grad)
    counts = moe.router.tokens_per_expert.clone()
    for got, wanted in zip(run(moe, x, grad, **CHECKPOINTING[mode]), expected, strict=True):
        assert torch.equal(got, wanted)
    assert torch.equal(moe.router.tokens_per_expert, 2 * counts)


@pytest.mark.parametrize("recompute", ["none", "activation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_rows_are_cast_before_they_are_sent(dtype, recompute, monkeypatch, seed):
    """Each token once, not each of its rows: no bit changes."""
    moe = build(layer(precision="fp8", recompute=recompute, bias=recompute == "none"), dtype)
    x, grad = torch.randn(41, HIDDEN, dtype=dtype), torch.randn(41, HIDDEN, dtype=dtype)
    sent = []
    send_codes = LocalExchange.send_codes
    monkeypatch.setattr(LocalExchange, "send_codes", lambda *args: sent.append(args) or send_codes(*args))
    results = run(moe, x, grad)
    assert len(sent) == 1
    monkeypatch.setattr(LocalExchange, "sends_codes", False)
    for got, wanted in zip(results, run(moe, x, grad), strict=True):
        assert torch.equal(got, wanted)
    assert len(sent) == 1


def near_tie() -> tuple[MoE, torch.Tensor]:
    """A layer with one slot and tokens that go to expert 3 (even tokens) or 5 (odd ones), the last by a hair to 3."""
    moe = MoE(layer(6, 1, RouterConfig(renormalize=False)))
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[3, 0] = moe.router.weight[5, 1] = 1
    x = torch.randn(9, HIDDEN)
    x[0::2, 0], x[0::2, 1] = 1.0, 0.0
    x[1::2, 0], x[1::2, 1] = 0.0, 1.0
    # First in the pool of expert 3: were it gone, all rows after it would move up.
    x[0, 1] = 1.0 - 1e-5
    return moe, x


@pytest.mark.parametrize("mode", CHECKPOINTING)
def test_near_tie_that_flips_in_the_recomputation(mode, seed):
    """What lies before the router may recompute with another rounding. ``save_routing`` keeps the experts of the
    forward pass; without it one token flips, and the others' gradients must still be theirs."""
    moe, x = near_tie()
    grad = torch.randn_like(x)
    expected = run(moe, x, grad)
    moe.router.tokens_per_expert.zero_()
    calls, indices = [], []
    moe.router.register_forward_hook(lambda module, args, routing: indices.append(routing.topk_index))

    def block(hidden_states: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        nudge = torch.zeros_like(hidden_states)
        nudge[0, 1] = 2e-5 * (len(calls) - 1)
        return moe(hidden_states + nudge)

    moe.zero_grad()
    leaf = x.clone().requires_grad_()
    checkpoint(block, leaf, **CHECKPOINTING[mode]).backward(grad)
    assert len(calls) == 2, "nothing was recomputed"
    forward_choice = torch.tensor([3, 5] * 4 + [3])
    assert torch.equal(indices[0].flatten(), forward_choice)
    assert moe.router.tokens_per_expert.tolist() == [0, 0, 0, 5, 0, 4]
    assert torch.equal(indices[1].flatten()[1:], forward_choice[1:])
    assert indices[1][0] == (3 if mode == "save_routing" else 5)
    assert_close(leaf.grad[1:], expected[1][1:], 1e-3, "gradient of the tokens that did not flip")
    if mode == "save_routing":
        assert_close(leaf.grad, expected[1], 1e-3, "input gradient")
        for got, wanted in zip(moe.parameters(), expected[2:], strict=True):
            assert_close(got.grad, wanted, 1e-3)


# ---------------------------------------------------------------- state


def test_state_dict_is_the_canonical_layout(seed):
    shapes = {name: tuple(tensor.shape) for name, tensor in MoE(CONFIGS["deepseek_v3"]).state_dict().items()}
    assert shapes == {
        "router.weight": (12, 24),
        "router.expert_bias": (12,),
        "experts.gate_up_proj": (12, 40, 24),
        "experts.down_proj": (12, 24, 20),
        "shared_experts.gate_up_proj": (56, 24),
        "shared_experts.down_proj": (24, 28),
    }
    assert set(MoE(CONFIGS["gpt_oss"]).state_dict()) == {
        "router.weight",
        "router.bias",
        "experts.gate_up_proj",
        "experts.gate_up_proj_bias",
        "experts.down_proj",
        "experts.down_proj_bias",
    }
    assert MoE(layer()).shared_experts is None


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_fresh_layer_with_loaded_state_gives_the_same_bits(name, precision, seed):
    config = MoEConfig.from_dict({**CONFIGS[name].to_dict(), "precision": precision})
    moe, x = build(config), torch.randn(9, HIDDEN)
    file = io.BytesIO()
    torch.save(moe.state_dict(), file)
    file.seek(0)
    fresh = MoE(config)
    assert not torch.equal(fresh(x), moe(x))
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(fresh(x), moe(x))
    assert torch.equal(copy.deepcopy(moe)(x), moe(x))


def test_missing_and_unexpected_keys_are_refused():
    moe = MoE(layer())
    state = moe.state_dict()
    del state["experts.down_proj"]
    state["experts.w2"] = torch.ones(1)
    with pytest.raises(RuntimeError, match="experts.down_proj"):
        moe.load_state_dict(state)


@pytest.mark.parametrize("name", CONFIGS)
def test_reset_parameters_draws_what_construction_draws(name, seed):
    torch.manual_seed(7)
    moe = MoE(CONFIGS[name])
    expected = {key: tensor.clone() for key, tensor in moe.state_dict().items()}
    moe.reset_parameters()
    assert not torch.equal(moe.experts.down_proj, expected["experts.down_proj"])
    for tensor in moe.state_dict().values():
        tensor.fill_(9)
    torch.manual_seed(7)
    moe.reset_parameters()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in moe.state_dict().items())


def test_meta_device_then_materialise(seed):
    config = CONFIGS["deepseek_v3"]
    moe = MoE(config, device="meta")
    assert all(tensor.is_meta for tensor in (*moe.parameters(), *moe.buffers()))
    moe.to_empty(device="cpu")
    torch.manual_seed(7)
    moe.reset_parameters()
    torch.manual_seed(7)
    expected, x = MoE(config), torch.randn(9, HIDDEN)
    assert torch.equal(moe(x), expected(x))
    assert torch.equal(moe.router.tokens_per_expert, expected.router.tokens_per_expert)


def test_repr():
    text = repr(MoE(CONFIGS["deepseek_v3"]))
    for part in (
        "num_experts=12",
        "top_k=4",
        "groups=2/4",
        "activation=swiglu",
        "precision=bf16",
        "intermediate_size=28",
    ):
        assert part in text
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:-1]] == [
        "(router)",
        "(experts)",
        "(shared_experts)",
    ]


def test_runs_without_warnings(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moe = MoE(CONFIGS["deepseek_v3"])
        moe(torch.randn(5, HIDDEN, requires_grad=True)).sum().backward()
