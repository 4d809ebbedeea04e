"""``MoEConfig`` and ``RouterConfig``: every rule, and the round trip through JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamoe import MoEConfig, RouterConfig
from tests.support.errors import fails

INFINITY, NAN = float("inf"), float("nan")
SIZES = dict(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2)


def layer(**changes) -> MoEConfig:
    return MoEConfig(**{**SIZES, **changes})


EVERYTHING = layer(
    router=RouterConfig(
        score="sigmoid",
        renormalize=False,
        scaling_factor=2.5,
        num_groups=4,
        topk_groups=2,
        group_score="sum_top2",
        expert_bias=True,
        bias_update_rate=2e-3,
        linear_bias=True,
        aux_loss_coef=0.01,
        z_loss_coef=0.001,
    ),
    activation="swiglu_oai",
    activation_clamp=5.5,
    bias=True,
    shared_intermediate_size=48,
    shared_gate=True,
    fuse_shared_experts=True,
    precision="fp8",
    recompute="activation",
    max_tokens_per_rank=4096,
    pool_bytes=1 << 28,
    init_std=0.02,
)


def test_defaults():
    config = layer()
    assert config.router == RouterConfig()
    assert dataclasses.asdict(config.router) == dict(
        score="softmax",
        renormalize=True,
        scaling_factor=1.0,
        num_groups=1,
        topk_groups=1,
        group_score="max",
        expert_bias=False,
        bias_update_rate=1e-3,
        linear_bias=False,
        aux_loss_coef=0.0,
        z_loss_coef=0.0,
    )
    rest = {name: value for name, value in config.to_dict().items() if name not in SIZES and name != "router"}
    assert rest == dict(
        activation="swiglu",
        activation_clamp=None,
        bias=False,
        shared_intermediate_size=0,
        shared_gate=False,
        fuse_shared_experts=False,
        precision="bf16",
        recompute="none",
        max_tokens_per_rank=None,
        pool_bytes=None,
        init_std=None,
    )


@pytest.mark.parametrize("kind", [MoEConfig, RouterConfig])
def test_every_field_is_documented(kind):
    for field in dataclasses.fields(kind):
        assert f"        {field.name}: " in kind.__doc__, f"{kind.__name__}.{field.name}"


def test_frozen_and_hashable():
    config = layer()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.top_k = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.router.score = "sigmoid"
    assert hash(config) == hash(layer()) and config == layer() and config != layer(top_k=3)


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai", "geglu", "geglu_tanh", "relu2"])
def test_gated(activation):
    assert layer(activation=activation).gated is (activation != "relu2")


@pytest.mark.parametrize(
    ("activation", "clamp", "in_force"),
    [
        ("swiglu", None, None),
        ("swiglu", 7.0, 7.0),
        # gpt-oss clamps unless told otherwise.
        ("swiglu_oai", None, 7.0),
        ("swiglu_oai", 5.0, 5.0),
        ("geglu", 3, 3),
    ],
)
def test_clamp(activation, clamp, in_force):
    assert layer(activation=activation, activation_clamp=clamp).clamp == in_force


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "num_experts", "top_k"])
@pytest.mark.parametrize(
    ("value", "kind", "rule"),
    [
        (0, ValueError, "at least 1"),
        (-1, ValueError, "at least 1"),
        (2.0, TypeError, "must be an integer"),
        ("2", TypeError, "must be an integer"),
        (None, TypeError, "must be an integer"),
        pytest.param(True, TypeError, "must be an integer", id="bool_is_no_size"),
    ],
)
def test_sizes(name, value, kind, rule):
    with fails(kind, name, value, rule):
        layer(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "kind", "rule"),
    [
        ("activation", "silu", ValueError, "must be one of 'swiglu', 'swiglu_oai', 'geglu', 'geglu_tanh', 'relu2'"),
        ("activation", None, ValueError, "must be one of"),
        ("precision", "fp16", ValueError, "must be one of 'bf16', 'fp8'"),
        ("recompute", True, ValueError, "must be one of 'none', 'activation'"),
        ("router", {}, TypeError, "must be a RouterConfig"),
        ("router", None, TypeError, "must be a RouterConfig"),
        ("bias", 1, TypeError, "must be a bool"),
        ("bias", None, TypeError, "must be a bool"),
        ("shared_gate", 1, TypeError, "must be a bool"),
        ("fuse_shared_experts", "fp8", TypeError, "must be a bool"),
        ("shared_intermediate_size", -1, ValueError, "at least 0"),
        ("shared_intermediate_size", False, TypeError, "must be an integer"),
        ("activation_clamp", 0.0, ValueError, "> 0"),
        ("activation_clamp", -7.0, ValueError, "> 0"),
        ("activation_clamp", INFINITY, ValueError, "finite"),
        ("activation_clamp", NAN, ValueError, "finite"),
        ("activation_clamp", "7", TypeError, "must be a number"),
        ("activation_clamp", True, TypeError, "must be a number"),
        ("max_tokens_per_rank", 0, ValueError, "at least 1"),
        ("max_tokens_per_rank", 1.5, TypeError, "must be an integer"),
        ("max_tokens_per_rank", True, TypeError, "must be an integer"),
        ("pool_bytes", 0, ValueError, "at least 1"),
        ("pool_bytes", 1e9, TypeError, "must be an integer"),
        ("init_std", -0.02, ValueError, ">= 0"),
        ("init_std", NAN, ValueError, "finite"),
        ("init_std", "0.02", TypeError, "must be a number"),
        # Rules between fields.
        ("shared_gate", True, ValueError, "needs a shared expert"),
        ("fuse_shared_experts", True, ValueError, "needs a shared expert"),
        ("top_k", 9, ValueError, "must not exceed num_experts = 8"),
    ],
)
def test_layer_rules(name, value, kind, rule):
    with fails(kind, name, value, rule):
        layer(**{name: value})


def test_relu2_has_no_clamp():
    with fails(ValueError, "activation_clamp", 7.0, "no meaning for relu2"):
        layer(activation="relu2", activation_clamp=7.0)


@pytest.mark.parametrize(
    ("name", "value", "kind", "rule"),
    [
        ("score", "relu", ValueError, "must be one of 'softmax', 'sigmoid', 'sqrtsoftplus'"),
        ("score", None, ValueError, "must be one of"),
        ("group_score", "sum", ValueError, "must be one of 'max', 'sum_top2'"),
        ("renormalize", 1, TypeError, "must be a bool"),
        ("renormalize", None, TypeError, "must be a bool"),
        ("expert_bias", 0, TypeError, "must be a bool"),
        ("linear_bias", "yes", TypeError, "must be a bool"),
        ("scaling_factor", 0.0, ValueError, "> 0"),
        ("scaling_factor", -1.0, ValueError, "> 0"),
        ("scaling_factor", NAN, ValueError, "finite"),
        ("scaling_factor", INFINITY, ValueError, "finite"),
        ("scaling_factor", True, TypeError, "must be a number"),
        ("scaling_factor", "1", TypeError, "must be a number"),
        ("num_groups", 0, ValueError, "at least 1"),
        ("num_groups", True, TypeError, "must be an integer"),
        ("topk_groups", 0, ValueError, "at least 1"),
        ("topk_groups", 1.0, TypeError, "must be an integer"),
        ("topk_groups", 2, ValueError, "must not exceed router.num_groups = 1"),
        ("bias_update_rate", -1e-3, ValueError, ">= 0"),
        ("bias_update_rate", NAN, ValueError, "finite"),
        ("aux_loss_coef", -0.1, ValueError, ">= 0"),
        ("aux_loss_coef", None, TypeError, "must be a number"),
        ("z_loss_coef", -0.1, ValueError, ">= 0"),
        ("z_loss_coef", INFINITY, ValueError, "finite"),
    ],
)
def test_router_rules(name, value, kind, rule):
    with fails(kind, f"router.{name}", value, rule):
        RouterConfig(**{name: value})


def test_groups_divide_the_experts():
    with fails(ValueError, "router.num_groups", 3, "must divide num_experts = 8"):
        layer(router=RouterConfig(num_groups=3))
    # More groups than experts never divide.
    with fails(ValueError, "router.num_groups", 16, "must divide num_experts = 8"):
        layer(router=RouterConfig(num_groups=16))


def test_top_k_fits_into_the_groups_of_a_token():
    router = RouterConfig(num_groups=4, topk_groups=2)
    assert layer(top_k=4, router=router).top_k == 4
    with fails(ValueError, "top_k", 5, "must not exceed the 4 experts of 2 of 4 groups"):
        layer(top_k=5, router=router)


def test_sum_top2_needs_two_experts_in_a_group():
    with fails(ValueError, "router.group_score", "sum_top2", "needs at least 2 experts per group, has 1"):
        layer(router=RouterConfig(num_groups=8, topk_groups=4, group_score="sum_top2"))
    # Without groups the score of a group is never taken.
    MoEConfig(hidden_size=1, intermediate_size=1, num_experts=1, top_k=1, router=RouterConfig(group_score="sum_top2"))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(dict(num_experts=1, top_k=1), id="one_expert"),
        pytest.param(dict(top_k=8), id="all_experts"),
        pytest.param(dict(num_experts=6, router=RouterConfig(num_groups=3, topk_groups=3)), id="no_power_of_two"),
        pytest.param(dict(num_experts=512, top_k=10), id="ids_above_255"),
        pytest.param(dict(hidden_size=2880, intermediate_size=2880), id="sizes_off_128"),
        pytest.param(dict(init_std=0), id="zero_init"),
    ],
)
def test_edge_values_are_legal(changes):
    config = layer(**changes)
    assert all(getattr(config, name) == value for name, value in changes.items())


# ---------------------------------------------------------------- dicts


@st.composite
def layers(draw) -> MoEConfig:
    """Any valid config."""
    groups = draw(st.integers(1, 4))
    per_group = draw(st.integers(2, 5))
    topk_groups = draw(st.integers(1, groups))
    positive = st.floats(1e-6, 1e6)
    router = RouterConfig(
        score=draw(st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"])),
        renormalize=draw(st.booleans()),
        scaling_factor=draw(positive),
        num_groups=groups,
        topk_groups=topk_groups,
        group_score=draw(st.sampled_from(["max", "sum_top2"])),
        expert_bias=draw(st.booleans()),
        bias_update_rate=draw(positive),
        linear_bias=draw(st.booleans()),
        aux_loss_coef=draw(positive),
        z_loss_coef=draw(positive),
    )
    activation = draw(st.sampled_from(["swiglu", "swiglu_oai", "geglu", "geglu_tanh", "relu2"]))
    shared = draw(st.integers(0, 64))
    return MoEConfig(
        hidden_size=draw(st.integers(1, 8192)),
        intermediate_size=draw(st.integers(1, 8192)),
        num_experts=groups * per_group,
        top_k=draw(st.integers(1, topk_groups * per_group)),
        router=router,
        activation=activation,
        activation_clamp=None if activation == "relu2" else draw(st.none() | positive),
        bias=draw(st.booleans()),
        shared_intermediate_size=shared,
        shared_gate=bool(shared) and draw(st.booleans()),
        fuse_shared_experts=bool(shared) and draw(st.booleans()),
        precision=draw(st.sampled_from(["bf16", "fp8"])),
        recompute=draw(st.sampled_from(["none", "activation"])),
        max_tokens_per_rank=draw(st.none() | st.integers(1, 10**6)),
        pool_bytes=draw(st.none() | st.integers(1, 10**12)),
        init_std=draw(st.none() | positive),
    )


@given(layers())
def test_round_trip_through_json(config):
    assert MoEConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_round_trip_keeps_every_field():
    # Each field of EVERYTHING differs from its default, so that none can be lost unnoticed.
    default = layer().to_dict()
    changed = EVERYTHING.to_dict()
    assert all(changed[name] != default[name] for name in changed if name not in SIZES and name != "router")
    assert all(changed["router"][name] != default["router"][name] for name in changed["router"])
    assert MoEConfig.from_dict(json.loads(json.dumps(changed))) == EVERYTHING


def test_dicts_share_nothing_with_the_config():
    values = EVERYTHING.to_dict()
    config = MoEConfig.from_dict(values)
    assert isinstance(values["router"], dict), "from_dict changed its argument"
    values["router"]["score"] = "softmax"
    values["top_k"] = 1
    assert config == EVERYTHING and EVERYTHING.router.score == "sigmoid"


def test_from_dict_fills_defaults():
    assert MoEConfig.from_dict(SIZES) == layer()
    assert MoEConfig.from_dict({**SIZES, "router": {"score": "sigmoid"}}).router == RouterConfig(score="sigmoid")


@pytest.mark.parametrize("key", ["topk", "Top_k", "num_expert"])
def test_unknown_keys(key):
    with fails(ValueError, "MoEConfig key", key, "is not one of hidden_size, "):
        MoEConfig.from_dict({**SIZES, key: 2})
    with fails(ValueError, "RouterConfig key", key, "is not one of score, "):
        MoEConfig.from_dict({**SIZES, "router": {key: 2}})


@pytest.mark.parametrize("name", list(SIZES))
def test_missing_keys(name):
    values = {key: value for key, value in SIZES.items() if key != name}
    with fails(ValueError, "MoEConfig keys", sorted(values), f"must contain {name!r}"):
        MoEConfig.from_dict(values)


def test_from_dict_validates():
    with fails(ValueError, "top_k", 9, "must not exceed num_experts"):
        MoEConfig.from_dict({**SIZES, "top_k": 9})
    with fails(TypeError, "RouterConfig", None, "must be a dict"):
        MoEConfig.from_dict({**SIZES, "router": None})


@pytest.mark.parametrize("values", [None, 5, "swiglu", [1, 2]])
def test_from_dict_needs_a_dict(values):
    with fails(TypeError, "MoEConfig", values, "must be a dict"):
        MoEConfig.from_dict(values)
