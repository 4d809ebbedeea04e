"""transformers models on ``experts_implementation="megamoe"`` in one process, against transformers' own experts."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import types

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import finegrained_fp8
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from megamoe import MegaMoEError
from megamoe.integrations.transformers import enable_expert_parallel, experts, experts_forward, join, register
from tests.integrations.families import (
    FAMILIES,
    batch,
    build,
    experts_modules,
    generate,
    prompts,
    robust_seed,
)
from tests.support.errors import fails
from tests.support.metrics import assert_close, relative_error

TOLERANCE = 1e-5
LENGTHS = [5, 9, 3]


@pytest.fixture(autouse=True, scope="module")
def registered():
    register()


@pytest.fixture
def calls(monkeypatch) -> list[nn.Module]:
    """The experts modules that ran on megamoe."""
    seen, run = [], experts.run_experts
    monkeypatch.setattr(experts, "run_experts", lambda module, *rest: (seen.append(module), run(module, *rest))[1])
    return seen


def logits(model: nn.Module, sequences: list[list[int]]) -> torch.Tensor:
    return model(**batch(sequences)).logits


# ---------------------------------------------------------------- the same results


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family, seed, calls):
    sequences = prompts(seed, LENGTHS)
    seed = robust_seed(family, seed, [(sequences, 1)])
    eager, model = build(family, seed), build(family, seed)
    model.set_experts_implementation("megamoe")
    expected, actual = logits(eager, sequences), logits(model, sequences)
    assert_close(actual, expected, TOLERANCE, "logits")
    grad = torch.randn_like(expected)
    expected.backward(grad)
    actual.backward(grad)
    assert calls == experts_modules(model)
    for (name, parameter), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if other.grad is not None:
            assert_close(parameter.grad, other.grad, TOLERANCE, f"gradient of {name}")


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_from_a_saved_model(family, seed, calls, tmp_path):
    sequences = prompts(seed, LENGTHS)
    eager = build(family, robust_seed(family, seed, [(sequences, 64)]))
    eager.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="megamoe", attn_implementation="eager"
    )
    for name, tensor in eager.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    expected = generate(eager, sequences, 64)
    assert len({token for tokens in expected for token in tokens}) > 10
    assert not calls
    assert generate(model, sequences, 64) == expected
    assert len(calls) == 64 * len(experts_modules(model))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_experts_module_alone(family, dtype, seed):
    # In bfloat16 roundings differ: no token may change its experts for that, and no gradient end at the clamp.
    changes = dict(swiglu_limit=100.0) if family == "gpt_oss" else {}
    model = build(family, seed, **changes).to(dtype)
    module = experts_modules(model)[0]
    x = torch.randn(20, 32, dtype=dtype, requires_grad=True)
    index = torch.rand(20, 8).topk(3).indices
    weights = torch.rand(20, 3, dtype=dtype).requires_grad_()
    expected = module(x, index, weights)
    expected_grads = torch.autograd.grad(expected.sum(), [x, weights])
    model.set_experts_implementation("megamoe")
    actual = module(x, index, weights)
    assert actual.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 0.03
    assert_close(actual, expected, tolerance)
    for grad, expected_grad in zip(torch.autograd.grad(actual.sum(), [x, weights]), expected_grads, strict=True):
        assert grad.dtype == dtype
        assert_close(grad, expected_grad, tolerance)


PLANTED = {
    "wrong activation": dict(options=dict(activation="geglu")),
    "no clamp": dict(options=dict(clamp=None)),
    "gate and up not in order": dict(interleaved=False),
    "no biases": dict(biases=()),
}


@pytest.mark.parametrize("error", PLANTED)
def test_planted_errors_are_seen(error, seed, monkeypatch):
    """What the comparisons above would miss if the models did not exercise it."""
    family = "gpt_oss" if error != "wrong activation" else "mixtral"
    model, sequences = build(family, seed), prompts(seed, LENGTHS)
    module = experts_modules(model)[0]
    inputs = []
    module.register_forward_pre_hook(lambda _, args: inputs.append(args))
    logits(model, sequences)
    recipe, changes = experts.read_recipe(module), dict(PLANTED[error])
    if "options" in changes:
        changes["options"] = dataclasses.replace(recipe.options, **changes["options"])
    wrong = dataclasses.replace(recipe, **changes)
    expected = experts_forward(module, *inputs[0])
    monkeypatch.setattr(experts, "read_recipe", lambda _: wrong)
    assert relative_error(experts_forward(module, *inputs[0]), expected) > 1000 * TOLERANCE


def test_ids_of_other_ranks_add_nothing(seed):
    # transformers' own expert parallelism marks them with the number of local experts and a weight of 0.
    module = experts_modules(build("mixtral", seed))[0]
    x, weights = torch.randn(30, 32), torch.rand(30, 3)
    index = torch.randint(0, 9, (30, 3))
    expected = module(x, index, weights.masked_fill(index == 8, 0.0))
    assert_close(experts_forward(module, x, index, weights), expected, TOLERANCE)


def test_autocast(seed):
    model = build("mixtral", seed)
    module = experts_modules(model)[0]
    x, index, weights = torch.randn(30, 32), torch.rand(30, 8).topk(3).indices, torch.rand(30, 3)
    expected = experts_forward(module.bfloat16(), x.bfloat16(), index, weights)
    module.float()
    with torch.autocast("cpu", torch.bfloat16):
        actual = experts_forward(module, x, index, weights)
    assert actual.dtype == torch.float32
    # Only the last rounding, of the sum over slots, differs.
    assert_close(actual, expected, 0.01)
    assert_close(actual.bfloat16(), expected, 1e-3)


def test_experts_without_a_gate(seed):
    """The other form of the interface: ``up_proj`` and an activation that megamoe has."""
    from transformers.activations import ACT2FN

    @use_experts_implementation(has_gate=False)
    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.up_proj = nn.Parameter(torch.randn(8, 20, 32))
            self.down_proj = nn.Parameter(torch.randn(8, 32, 20))
            self.act_fn = ACT2FN["relu2"]
            self.num_experts = 8

        def forward(self, hidden_states, top_k_index, top_k_weights):
            up = torch.einsum("th,tkih->tki", hidden_states, self.up_proj[top_k_index])
            out = torch.einsum("tki,tkhi->tkh", self.act_fn(up), self.down_proj[top_k_index])
            return (out * top_k_weights.unsqueeze(-1)).sum(dim=1)

    config = build("mixtral", seed).config
    module = Experts(config)
    x, index, weights = torch.randn(30, 32), torch.rand(30, 8).topk(3).indices, torch.rand(30, 3)
    expected = module(x, index, weights)
    config._experts_implementation = "megamoe"
    assert_close(module(x, index, weights), expected, TOLERANCE)


def test_one_rank_needs_no_group(seed):
    sequences = prompts(seed, LENGTHS)
    seed = robust_seed("mixtral", seed, [(sequences, 16)])
    eager, model = build("mixtral", seed), build("mixtral", seed)
    parameters = dict(model.named_parameters())
    enable_expert_parallel(model, None)
    assert model.config._experts_implementation == "megamoe"
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert generate(model, sequences, 16) == generate(eager, sequences, 16)
    with join(model):
        assert_close(logits(model, sequences), logits(eager, sequences), TOLERANCE)


def test_model_without_a_head(seed):
    eager, model = build("mixtral", seed).model, build("mixtral", seed).model
    enable_expert_parallel(model, None)
    inputs = batch(prompts(seed, [4]))
    assert_close(model(**inputs).last_hidden_state, eager(**inputs).last_hidden_state, TOLERANCE)
    assert not hasattr(model, "generate")


# ---------------------------------------------------------------- errors


def test_importing_the_module_does_not_import_transformers():
    code = "import sys, megamoe.integrations.transformers; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


def test_register_is_idempotent_and_needs_transformers(monkeypatch):
    register()
    assert ALL_EXPERTS_FUNCTIONS["megamoe"] is experts_forward
    name = "transformers.integrations.moe"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    missing = f"module {name!r} has no attribute 'ALL_EXPERTS_FUNCTIONS'"
    with fails(ValueError, "transformers", missing, "must be installed"):
        register()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MegaMoEError, match=r"Install megamoe\[hf\]"):
        register()


def test_quantized_experts_are_refused(seed):
    module = experts_modules(build("mixtral", seed))[0]
    quantized = finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS["megamoe"]
    with fails(ValueError, "experts_implementation", "megamoe", "cannot run quantized experts of mixtral"):
        quantized(module, torch.randn(3, 32), torch.zeros(3, 1).long(), torch.ones(3, 1))


def call(module: nn.Module) -> torch.Tensor:
    return experts_forward(module, torch.randn(3, 32), torch.zeros(3, 1).long(), torch.ones(3, 1))


@pytest.mark.parametrize("use", [call, experts.read_recipe], ids=["forward", "recipe"])
class TestUnsupportedExperts:
    def test_activation(self, use, seed):
        module = experts_modules(build("qwen3_moe", seed, hidden_act="relu"))[0]
        with fails(ValueError, "act_fn", "ReLU", "the activation of qwen3_moe must be one of SiLU"):
            use(module)

    def test_gain_of_gpt_oss(self, use, seed):
        module = experts_modules(build("gpt_oss", seed, swiglu_alpha=1.5))[0]
        with fails(ValueError, "swiglu_alpha", 1.5, "must be 1"):
            use(module)

    def test_norm(self, use, seed):
        module = experts_modules(build("glm4_moe", seed))[0]
        module.has_post_expert_norm = True
        with fails(ValueError, "model_type", "glm4_moe", "end in a norm"):
            use(module)

    def test_older_transformers(self, use, seed):
        """Whose experts modules do not say whether they end in a norm."""
        module = experts_modules(build("glm4_moe", seed))[0]
        del module.has_post_expert_norm
        with fails(ValueError, "module", type(module).__name__, "5.24 or newer"):
            use(module)

    def test_gate(self, use, seed, monkeypatch):
        module = experts_modules(build("deepseek_v3", seed))[0]
        monkeypatch.setattr(type(module), "_apply_gate", lambda self, gate_up: gate_up)
        with fails(ValueError, "model_type", "deepseek_v3", "a gate of their own"):
            use(module)


class TestEnable:
    def test_not_a_model(self):
        with fails(TypeError, "model", "Linear", "must be a transformers model"):
            enable_expert_parallel(nn.Linear(2, 2), None)

    def test_no_experts(self):
        sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
        with fails(ValueError, "model_type", "llama", "has no experts"):
            enable_expert_parallel(model, None)

    def test_twice(self, seed):
        model = build("mixtral", seed)
        enable_expert_parallel(model, None)
        with fails(ValueError, "model", "MixtralForCausalLM", "has expert parallelism already"):
            enable_expert_parallel(model, None)

    def test_unsupported_experts(self, seed):
        model = build("qwen3_moe", seed, hidden_act="relu")
        with fails(ValueError, "act_fn", "ReLU", "the activation of qwen3_moe"):
            enable_expert_parallel(model, None)

    def test_meta_device(self, seed):
        model = build("mixtral", seed).to("meta")
        name = "model.layers.0.mlp.experts.gate_up_proj.device"
        with fails(ValueError, name, "meta", "must have values"):
            enable_expert_parallel(model, None)

    def test_quantized(self, seed):
        model = build("deepseek_v3", seed)
        model.hf_quantizer = object()
        with fails(ValueError, "model.hf_quantizer", "object", "quantized deepseek_v3"):
            enable_expert_parallel(model, None)

    def test_gradients(self, seed):
        model = build("mixtral", seed)
        logits(model, prompts(seed, [4])).sum().backward()
        with fails(ValueError, "model.layers.0.mlp.experts.gate_up_proj.grad.shape", [8, 40, 32], "would be lost"):
            enable_expert_parallel(model, None)

    def test_group(self, seed):
        with fails(TypeError, "group", "int", "must be a ProcessGroup"):
            enable_expert_parallel(build("mixtral", seed), 2)

    def test_a_refused_model_is_as_it_was(self, seed):
        model = build("mixtral", seed)
        with pytest.raises(MegaMoEError):
            enable_expert_parallel(model, 2)
        with fails(ValueError, "model", "MixtralForCausalLM", "has no expert parallelism"), join(model):
            pass
        assert model.config._experts_implementation == "eager"
        assert "generate" not in vars(model) and "forward" not in vars(experts_modules(model)[0])

    def test_other_experts_afterwards(self, seed):
        model = build("mixtral", seed)
        enable_expert_parallel(model, None)
        model.set_experts_implementation("eager")
        with fails(ValueError, "experts_implementation", "eager", "cannot run experts that are spread"):
            logits(model, prompts(seed, [4]))

    def test_continuous_batching(self, seed):
        model = build("mixtral", seed)
        enable_expert_parallel(model, None)
        with fails(ValueError, "model", "MixtralForCausalLM", "cannot batch continuously"):
            model.generate_batch(prompts(seed, [4]))
