"""``MoEConfig.from_hf``: the expected fields are written out by hand, from the models' published configurations."""

from __future__ import annotations

import pytest

from megamoe import MoEConfig, RouterConfig
from tests.support.errors import fails

SOFTMAX_TOPK = RouterConfig(score="softmax", renormalize=False)
SOFTMAX_TOPK_NORM = RouterConfig(score="softmax", renormalize=True)


def sizes(hidden_size: int, intermediate_size: int, num_experts: int, top_k: int) -> dict:
    return dict(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        activation="swiglu",
        init_std=0.02,
    )


def deepseek_v3_router(**changes) -> RouterConfig:
    fields = dict(score="sigmoid", renormalize=True, scaling_factor=2.5, num_groups=8, topk_groups=4)
    return RouterConfig(**{**fields, "group_score": "sum_top2", "expert_bias": True, **changes})


GPT_OSS = dict(
    **{**sizes(2880, 2880, 128, 4), "activation": "swiglu_oai"},
    activation_clamp=7.0,
    bias=True,
    router=RouterConfig(renormalize=True, linear_bias=True),
)

# Class of transformers, its arguments (none = the class's defaults, which are a published shape), expected layer.
DEFAULTS = {
    "mixtral": ("MixtralConfig", {}, MoEConfig(**sizes(4096, 14336, 8, 2), router=SOFTMAX_TOPK_NORM)),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {},
        MoEConfig(**sizes(2048, 1408, 60, 4), router=SOFTMAX_TOPK, shared_intermediate_size=5632, shared_gate=True),
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {}, MoEConfig(**sizes(2048, 768, 128, 8), router=SOFTMAX_TOPK)),
    "qwen3_moe_norm": (
        "Qwen3MoeConfig",
        dict(norm_topk_prob=True),
        MoEConfig(**sizes(2048, 768, 128, 8), router=SOFTMAX_TOPK_NORM),
    ),
    "olmoe": ("OlmoeConfig", {}, MoEConfig(**sizes(2048, 2048, 64, 8), router=SOFTMAX_TOPK)),
    # The class's default for num_experts_per_tok is None: nothing to route to.
    "deepseek_v2": (
        "DeepseekV2Config",
        dict(num_experts_per_tok=6),
        MoEConfig(**sizes(4096, 1407, 64, 6), router=SOFTMAX_TOPK, shared_intermediate_size=2 * 1407),
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {},
        MoEConfig(**sizes(7168, 2048, 256, 8), router=deepseek_v3_router(), shared_intermediate_size=2048),
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {},
        MoEConfig(
            **sizes(4096, 1408, 128, 8),
            router=deepseek_v3_router(scaling_factor=1.0, num_groups=1, topk_groups=1),
            shared_intermediate_size=1408,
        ),
    ),
    "gpt_oss": ("GptOssConfig", {}, MoEConfig(**GPT_OSS)),
}

# The fields of published config.json files that matter here, and some that must not: dense width, Hub-only names.
PUBLISHED = {
    "Mixtral-8x7B": (
        dict(
            model_type="mixtral",
            hidden_act="silu",
            hidden_size=4096,
            initializer_range=0.02,
            intermediate_size=14336,
            num_experts_per_tok=2,
            num_local_experts=8,
            output_router_logits=False,
            router_aux_loss_coef=0.02,
        ),
        MoEConfig(**sizes(4096, 14336, 8, 2), router=SOFTMAX_TOPK_NORM),
    ),
    "Qwen2-57B-A14B": (
        dict(
            model_type="qwen2_moe",
            hidden_act="silu",
            hidden_size=3584,
            initializer_range=0.02,
            intermediate_size=18944,
            moe_intermediate_size=2560,
            norm_topk_prob=False,
            num_experts=64,
            num_experts_per_tok=8,
            router_aux_loss_coef=0.001,
            shared_expert_intermediate_size=20480,
        ),
        MoEConfig(**sizes(3584, 2560, 64, 8), router=SOFTMAX_TOPK, shared_intermediate_size=20480, shared_gate=True),
    ),
    "Qwen3-30B-A3B": (
        dict(
            model_type="qwen3_moe",
            hidden_act="silu",
            hidden_size=2048,
            initializer_range=0.02,
            intermediate_size=6144,
            moe_intermediate_size=768,
            norm_topk_prob=True,
            num_experts=128,
            num_experts_per_tok=8,
        ),
        MoEConfig(**sizes(2048, 768, 128, 8), router=SOFTMAX_TOPK_NORM),
    ),
    "OLMoE-1B-7B": (
        dict(
            model_type="olmoe",
            hidden_act="silu",
            hidden_size=2048,
            initializer_range=0.02,
            intermediate_size=1024,
            norm_topk_prob=False,
            num_experts=64,
            num_experts_per_tok=8,
        ),
        MoEConfig(**sizes(2048, 1024, 64, 8), router=SOFTMAX_TOPK),
    ),
    "DeepSeek-V2-Lite": (
        dict(
            model_type="deepseek_v2",
            hidden_act="silu",
            hidden_size=2048,
            initializer_range=0.02,
            intermediate_size=10944,
            moe_intermediate_size=1408,
            n_group=1,
            n_routed_experts=64,
            n_shared_experts=2,
            norm_topk_prob=False,
            num_experts_per_tok=6,
            routed_scaling_factor=1.0,
            scoring_func="softmax",
            topk_group=1,
            topk_method="greedy",
        ),
        MoEConfig(**sizes(2048, 1408, 64, 6), router=SOFTMAX_TOPK, shared_intermediate_size=2816),
    ),
    "DeepSeek-V2": (
        dict(
            model_type="deepseek_v2",
            hidden_act="silu",
            hidden_size=5120,
            initializer_range=0.02,
            intermediate_size=12288,
            moe_intermediate_size=1536,
            n_group=8,
            n_routed_experts=160,
            n_shared_experts=2,
            norm_topk_prob=False,
            num_experts_per_tok=6,
            routed_scaling_factor=16.0,
            topk_group=3,
            topk_method="group_limited_greedy",
        ),
        MoEConfig(
            **sizes(5120, 1536, 160, 6),
            router=RouterConfig(renormalize=False, scaling_factor=16.0, num_groups=8, topk_groups=3, group_score="max"),
            shared_intermediate_size=3072,
        ),
    ),
    "DeepSeek-V3": (
        dict(
            model_type="deepseek_v3",
            hidden_act="silu",
            hidden_size=7168,
            initializer_range=0.02,
            intermediate_size=18432,
            moe_intermediate_size=2048,
            n_group=8,
            n_routed_experts=256,
            n_shared_experts=1,
            norm_topk_prob=True,
            num_experts_per_tok=8,
            routed_scaling_factor=2.5,
            scoring_func="sigmoid",
            topk_group=4,
            topk_method="noaux_tc",
        ),
        MoEConfig(**sizes(7168, 2048, 256, 8), router=deepseek_v3_router(), shared_intermediate_size=2048),
    ),
    "GLM-4.5": (
        dict(
            model_type="glm4_moe",
            hidden_act="silu",
            hidden_size=5120,
            initializer_range=0.02,
            intermediate_size=12288,
            moe_intermediate_size=1536,
            n_group=1,
            n_routed_experts=160,
            n_shared_experts=1,
            norm_topk_prob=True,
            num_experts_per_tok=8,
            routed_scaling_factor=2.5,
            topk_group=1,
        ),
        MoEConfig(
            **sizes(5120, 1536, 160, 8),
            router=deepseek_v3_router(num_groups=1, topk_groups=1),
            shared_intermediate_size=1536,
        ),
    ),
    "gpt-oss-20b": (
        dict(
            model_type="gpt_oss",
            experts_per_token=4,
            hidden_act="silu",
            hidden_size=2880,
            initializer_range=0.02,
            intermediate_size=2880,
            num_experts_per_tok=4,
            num_local_experts=32,
            router_aux_loss_coef=0.9,
            swiglu_limit=7.0,
        ),
        MoEConfig(**{**GPT_OSS, "num_experts": 32}),
    ),
}


def hf_config(class_name: str, **fields):
    """A configuration object of the installed transformers."""
    return getattr(pytest.importorskip("transformers"), class_name)(**fields)


@pytest.mark.parametrize("case", DEFAULTS)
@pytest.mark.parametrize("form", ["object", "dict"])
def test_transformers_configs(case, form):
    class_name, fields, expected = DEFAULTS[case]
    config = hf_config(class_name, **fields)
    assert MoEConfig.from_hf(config if form == "object" else config.to_dict()) == expected


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_config_files(case):
    fields, expected = PUBLISHED[case]
    before = dict(fields)
    assert MoEConfig.from_hf(fields) == expected
    assert fields == before, "from_hf changed its argument"


def test_every_supported_model_type_is_covered():
    # One list in the error message of an unknown type is what users see.
    with pytest.raises(ValueError) as caught:
        MoEConfig.from_hf(dict(model_type="llama"))
    expected = "deepseek_v2, deepseek_v3, glm4_moe, gpt_oss, mixtral, olmoe, qwen2_moe, qwen3_moe"
    assert expected in str(caught.value)
    covered = {fields["model_type"] for fields, _ in PUBLISHED.values()}
    assert covered == set(expected.split(", "))


@pytest.mark.parametrize(
    ("case", "coefficient"),
    [("Mixtral-8x7B", 0.02), ("Qwen2-57B-A14B", 0.001), ("gpt-oss-20b", 0.9)],
)
def test_aux_loss_is_on_where_transformers_computes_it(case, coefficient):
    fields = PUBLISHED[case][0]
    assert MoEConfig.from_hf({**fields, "output_router_logits": True}).router.aux_loss_coef == coefficient
    assert MoEConfig.from_hf({**fields, "output_router_logits": False}).router.aux_loss_coef == 0.0
    without = {k: v for k, v in fields.items() if k != "router_aux_loss_coef"}
    assert MoEConfig.from_hf({**without, "output_router_logits": True}).router.aux_loss_coef == 0.0


@pytest.mark.parametrize(
    ("hidden_act", "activation"),
    [("silu", "swiglu"), ("swish", "swiglu"), ("gelu", "geglu"), ("gelu_pytorch_tanh", "geglu_tanh")],
)
def test_activations(hidden_act, activation):
    fields = PUBLISHED["Qwen3-30B-A3B"][0]
    assert MoEConfig.from_hf({**fields, "hidden_act": hidden_act}).activation == activation


@pytest.mark.parametrize(
    ("case", "renormalize"),
    [
        ("Qwen2-57B-A14B", False),
        ("Qwen3-30B-A3B", False),
        ("OLMoE-1B-7B", False),
        ("DeepSeek-V3", True),
        ("GLM-4.5", True),
    ],
)
def test_absent_norm_topk_prob_has_the_default_of_its_class(case, renormalize):
    fields = {key: value for key, value in PUBLISHED[case][0].items() if key != "norm_topk_prob"}
    assert MoEConfig.from_hf(fields).router.renormalize is renormalize
    assert MoEConfig.from_hf({**fields, "norm_topk_prob": not renormalize}).router.renormalize is not renormalize


def test_overrides_replace_fields():
    fields, expected = PUBLISHED["DeepSeek-V3"]
    router = RouterConfig(score="sigmoid")
    config = MoEConfig.from_hf(fields, precision="fp8", max_tokens_per_rank=4096, router=router)
    assert (config.precision, config.max_tokens_per_rank, config.router) == ("fp8", 4096, router)
    assert (config.hidden_size, config.shared_intermediate_size) == (7168, 2048)
    with fails(ValueError, "top_k", 300, "must not exceed num_experts = 256"):
        MoEConfig.from_hf(fields, top_k=300)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("model_type", ["llama", "Mixtral", ""])
def test_unknown_model_type(model_type):
    with fails(ValueError, "hf_config.model_type", model_type, "is not one of deepseek_v2, "):
        MoEConfig.from_hf(dict(model_type=model_type))


@pytest.mark.parametrize("value", [None, {}, 3, "mixtral"])
def test_not_a_config(value):
    with fails(TypeError, "hf_config", type(value).__name__, "has no model_type"):
        MoEConfig.from_hf(value)


REQUIRED = [
    ("Mixtral-8x7B", "hidden_size"),
    ("Mixtral-8x7B", "intermediate_size"),
    ("Mixtral-8x7B", "num_local_experts"),
    ("Mixtral-8x7B", "num_experts_per_tok"),
    # The dense width of the same name must not stand in.
    ("Qwen2-57B-A14B", "moe_intermediate_size"),
    ("Qwen2-57B-A14B", "shared_expert_intermediate_size"),
    ("Qwen3-30B-A3B", "moe_intermediate_size"),
    ("Qwen3-30B-A3B", "num_experts"),
    ("OLMoE-1B-7B", "intermediate_size"),
    ("DeepSeek-V2", "n_routed_experts"),
    ("DeepSeek-V2", "n_group"),
    ("DeepSeek-V2", "topk_group"),
    ("DeepSeek-V3", "moe_intermediate_size"),
    ("GLM-4.5", "num_experts_per_tok"),
    ("gpt-oss-20b", "intermediate_size"),
]


@pytest.mark.parametrize(("case", "field"), REQUIRED)
@pytest.mark.parametrize("absent", ["missing", "null"])
def test_missing_field(case, field, absent):
    fields = dict(PUBLISHED[case][0])
    fields[field] = None
    if absent == "missing":
        del fields[field]
    # The rule names the field: "has no field num_experts / ...".
    with fails(ValueError, "hf_config", fields["model_type"], field):
        MoEConfig.from_hf(fields)


@pytest.mark.parametrize("hidden_act", ["relu", "gelu_new", "quick_gelu"])
@pytest.mark.parametrize("case", PUBLISHED)
def test_unknown_activation(case, hidden_act):
    with fails(ValueError, "hf_config.hidden_act", hidden_act, "must be one of silu, swish, gelu, gelu_pytorch_tanh"):
        MoEConfig.from_hf({**PUBLISHED[case][0], "hidden_act": hidden_act})


@pytest.mark.parametrize(
    ("case", "field", "value", "rule"),
    [
        ("DeepSeek-V2", "topk_method", "noaux_tc", "must be greedy or group_limited_greedy"),
        # Old code renormalises and then skips the scaling, transformers ignores the field: no guess.
        ("DeepSeek-V2", "norm_topk_prob", True, "no agreed meaning"),
        ("gpt-oss-20b", "swiglu_alpha", 1.5, "must be 1.702"),
    ],
)
def test_variants_that_megamoe_does_not_have(case, field, value, rule):
    with fails(ValueError, f"hf_config.{field}", value, rule):
        MoEConfig.from_hf({**PUBLISHED[case][0], field: value})


def test_unknown_override():
    # A typo such as top_k_experts must not look like a bug of megamoe.
    with fails(ValueError, "MoEConfig key", "top_k_experts", "is not one of"):
        MoEConfig.from_hf(PUBLISHED["DeepSeek-V3"][0], top_k_experts=4)


@pytest.mark.parametrize("field", ["model_type", "hidden_act"])
def test_fields_of_another_type(field):
    with fails(ValueError, f"hf_config.{field}", ["x"], "must be one of" if field == "hidden_act" else "is not one of"):
        MoEConfig.from_hf({**PUBLISHED["DeepSeek-V3"][0], field: ["x"]})
