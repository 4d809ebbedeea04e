"""``Experts``: the call of transformers, ids of every kind, strides, NaN, dtypes, initial values, state."""

from __future__ import annotations

import itertools

import pytest
import torch

from megamoe import Experts, MoEConfig
from tests.support.errors import fails
from tests.support.generators import ExpertWeights, random_routing
from tests.support.metrics import assert_close, relative_error
from tests.support.plain_moe import ACTIVATIONS, plain_moe

HIDDEN, WIDTH, NUM_EXPERTS, TOP_K = 24, 20, 6, 3
CLAMPED = [name for name in ACTIVATIONS if name != "relu2"]


def layer(**changes) -> MoEConfig:
    fields = dict(hidden_size=HIDDEN, intermediate_size=WIDTH, num_experts=NUM_EXPERTS, top_k=TOP_K)
    return MoEConfig(**{**fields, **changes})


def build(dtype: torch.dtype = torch.float32, **changes) -> Experts:
    """Experts whose biases are not zero, so that every term matters."""
    experts = Experts(layer(**changes)).to(dtype)
    with torch.no_grad():
        for name, parameter in experts.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return experts


def weights_of(experts: Experts, dtype: torch.dtype = torch.float64) -> ExpertWeights:
    parameters = {name.replace("gate_up", "up"): p.detach().to(dtype) for name, p in experts.named_parameters()}
    names = ("up_proj", "down_proj", "up_proj_bias", "down_proj_bias")
    return ExpertWeights(*(parameters.get(name) for name in names))


# ---------------------------------------------------------------- against the formulas


@pytest.mark.parametrize(("activation", "clamp"), [*((a, None) for a in ACTIVATIONS), *((a, 0.5) for a in CLAMPED)])
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_outputs_and_gradients(activation, clamp, bias, seed):
    experts = build(torch.float64, activation=activation, bias=bias, activation_clamp=clamp)
    routing = random_routing("dropped", 25, NUM_EXPERTS, TOP_K, torch.float64)
    x = torch.randn(25, HIDDEN, dtype=torch.float64, requires_grad=True)
    topk_weights = routing.topk_weights.requires_grad_()
    grad = torch.randn_like(x)

    weights = weights_of(experts).requires_grad_()
    expected = plain_moe(x, routing.topk_index, topk_weights, weights, activation, experts.config.clamp)
    expected_grads = torch.autograd.grad(expected, [x, topk_weights, *weights.tensors()], grad)
    actual = experts(x, routing.topk_index, topk_weights)
    parameters = [p for name in ("proj", "proj_bias") for p in by_suffix(experts, name)]
    actual_grads = torch.autograd.grad(actual, [x, topk_weights, *parameters], grad)
    assert_close(actual, expected, 1e-12, "output")
    names = ("x", "weights", "up", "down", "up_bias", "down_bias")[: len(expected_grads)]
    for name, got, wanted in zip(names, actual_grads, expected_grads, strict=True):
        assert_close(got, wanted, 1e-12, f"gradient of {name}")


def by_suffix(experts: Experts, suffix: str) -> list[torch.nn.Parameter]:
    """GEMM 1's parameter, then GEMM 2's, as ``ExpertWeights`` has them."""
    return [parameter for name, parameter in experts.named_parameters() if name.endswith(suffix)]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("num_tokens", [0, 1, 127, 128, 129, 257])
def test_sizes_around_the_row_alignment(precision, num_tokens, seed):
    """All tokens to one of three experts, in slots of different weight: groups of exactly ``num_tokens`` rows."""
    experts = build(num_experts=3, top_k=1, precision=precision)
    x = torch.randn(num_tokens, HIDDEN)
    index, weights = torch.ones(num_tokens, 1, dtype=torch.int64), torch.rand(num_tokens, 1) + 0.5
    expected = plain_moe(x.double(), index, weights.double(), weights_of(experts))
    out = experts(x, index, weights)
    assert out.shape == x.shape and out.dtype == x.dtype
    # A single row of FP8 results scatters; a wrong row or expert would be off by more than 1.
    fp8_tolerance = 0.12 if num_tokens > 100 else 0.5
    assert_close(out, expected, 1e-5 if precision == "bf16" else fp8_tolerance)


@pytest.mark.parametrize("kind", ["uniform", "zipf", "one_expert", "empty_experts", "dropped", "duplicates", "none"])
@pytest.mark.parametrize("num_experts", [1, 5, 300])
def test_routings(kind, num_experts, seed):
    experts = build(num_experts=num_experts, top_k=1)
    routing = random_routing(kind, 40, num_experts, min(TOP_K, num_experts))
    x = torch.randn(40, HIDDEN)
    expected = plain_moe(x.double(), routing.topk_index, routing.topk_weights.double(), weights_of(experts))
    out = experts(x, routing.topk_index, routing.topk_weights)
    assert_close(out, expected, 1e-5)
    # Rows without any expert are exactly zero.
    nowhere = ((routing.topk_index < 0) | (routing.topk_index >= num_experts)).all(dim=1)
    assert not out[nowhere].any()


def test_repeated_experts_add_up(seed):
    experts = build()
    x, one = torch.randn(9, HIDDEN), torch.randint(NUM_EXPERTS, (9, 1))
    weights = torch.rand(9, 3)
    thrice = experts(x, one.expand(9, 3), weights)
    assert_close(thrice, experts(x, one, weights.sum(1, keepdim=True)), 1e-6)


def test_ids_outside_are_ignored_with_whatever_weight(seed):
    experts = build(bias=True)
    routing = random_routing("uniform", 30, NUM_EXPERTS, TOP_K)
    x = torch.randn(30, HIDDEN, requires_grad=True)
    index, weights = routing.topk_index.clone(), routing.topk_weights.clone()
    index[:, 1] = torch.tensor([-1, NUM_EXPERTS, -(2**40), 2**40, NUM_EXPERTS + 128]).repeat(6)
    weights[:, 1] = float("nan")
    weights.requires_grad_()
    out = experts(x, index, weights)
    assert_close(out, experts(x, index[:, ::2], weights[:, ::2]), 1e-6)
    out.sum().backward()
    assert not weights.grad[:, 1].any() and weights.grad[:, ::2].all()
    assert x.grad.isfinite().all()


def test_int32_index_gives_the_same_bits(seed):
    experts = build()
    routing = random_routing("dropped", 30, NUM_EXPERTS, TOP_K)
    x = torch.randn(30, HIDDEN)
    index, weights = routing.topk_index, routing.topk_weights
    assert torch.equal(experts(x, index.int(), weights), experts(x, index, weights))


def test_same_bits_every_time_and_in_any_company(seed):
    """No atomics, and a token's result does not depend on the tokens around it."""
    experts = build()
    routing = random_routing("uniform", 60, NUM_EXPERTS, TOP_K)
    x = torch.randn(60, HIDDEN)
    first = experts(x, routing.topk_index, routing.topk_weights)
    for _ in range(5):
        assert torch.equal(experts(x, routing.topk_index, routing.topk_weights), first)
    part = experts(x[20:41], routing.topk_index[20:41], routing.topk_weights[20:41])
    assert_close(part, first[20:41], 1e-6)


# ---------------------------------------------------------------- autograd


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_strides_change_no_bit(precision, bias, seed):
    """Transposed, sliced, strided and expanded inputs, weights and gradients."""
    experts, strided = build(precision=precision, bias=bias), build(precision=precision, bias=bias)
    strided.load_state_dict(experts.state_dict())
    routing = random_routing("dropped", 30, NUM_EXPERTS, TOP_K)
    x, grad = torch.randn(30, HIDDEN), torch.randn(30, HIDDEN)
    index, weights = routing.topk_index, routing.topk_weights
    for name, parameter in list(strided.named_parameters()):
        data = parameter.detach().transpose(0, -1).contiguous().transpose(0, -1)
        assert parameter.dim() < 2 or not data.is_contiguous()
        strided.register_parameter(name, torch.nn.Parameter(data))
    layouts = {
        "columns of a wider tensor": lambda t: torch.cat([t, t], dim=1)[:, : t.shape[1]],
        "transposed": lambda t: t.t().contiguous().t(),
        "every other row and column": lambda t: t.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2],
    }
    results = []
    for layer_, layout in [(experts, lambda t: t), *((strided, layout) for layout in layouts.values())]:
        layer_.zero_grad()
        leaf_x, leaf_weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
        out = layer_(layout(leaf_x), layout(index), layout(leaf_weights))
        out.backward(layout(grad))
        results.append([out, leaf_x.grad, leaf_weights.grad, *(p.grad.clone() for p in layer_.parameters())])
    for name, result in zip(layouts, results[1:], strict=True):
        for got, wanted in zip(result, results[0], strict=True):
            assert_close(got, wanted, 1e-6, name)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_expanded_input_and_zero_stride_gradient(precision, bias, seed):
    experts = build(precision=precision, bias=bias)
    routing = random_routing("uniform", 12, NUM_EXPERTS, TOP_K)
    row = torch.randn(1, HIDDEN)
    results = []
    for expanded in (True, False):
        experts.zero_grad()
        leaf = row.clone().requires_grad_()
        x = leaf.expand(12, HIDDEN) if expanded else leaf.repeat(12, 1)
        out = experts(x, routing.topk_index, routing.topk_weights)
        # The gradient of a sum is one number with strides of zero.
        out.sum().backward() if expanded else out.backward(torch.ones_like(out))
        results.append([leaf.grad, *(p.grad.clone() for p in experts.parameters())])
    for got, wanted in zip(*results, strict=True):
        assert_close(got, wanted, 1e-6)


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("trainable", list(itertools.product([False, True], repeat=4)))
def test_any_part_may_be_frozen(trainable, bias, seed):
    """Each subset of {input, routing weights, GEMM 1, GEMM 2} has the gradients it has when all are trained."""
    experts = build(bias=bias)
    routing = random_routing("uniform", 10, NUM_EXPERTS, TOP_K)
    x = torch.randn(10, HIDDEN)
    grad = torch.randn_like(x)
    groups = [lambda i: [i[0]], lambda i: [i[1]], lambda _: by_name(experts, "up"), lambda _: by_name(experts, "down")]

    def run(flags) -> list[torch.Tensor | None]:
        inputs = x.clone(), routing.topk_weights.clone()
        tensors = [group(inputs) for group in groups]
        for group, flag in zip(tensors, flags, strict=True):
            for tensor in group:
                tensor.requires_grad_(flag).grad = None
        out = experts(inputs[0], routing.topk_index, inputs[1])
        assert out.requires_grad == any(flags)
        if any(flags):
            out.backward(grad)
        return [tensor.grad for group in tensors for tensor in group]

    flags = [flag for flag, n in zip(trainable, (1, 1, 1 + bias, 1 + bias), strict=True) for _ in range(n)]
    for got, wanted, flag in zip(run(trainable), run([True] * 4), flags, strict=True):
        assert (got is not None) == flag
        if flag:
            assert torch.equal(got, wanted)


def by_name(experts: Experts, part: str) -> list[torch.nn.Parameter]:
    return [parameter for name, parameter in experts.named_parameters() if part in name.split("_proj")[0]]


def test_gradients_accumulate_and_forwards_may_overlap(seed):
    experts = build()
    x = torch.randn(2, 15, HIDDEN)
    routings = [random_routing("uniform", 15, NUM_EXPERTS, TOP_K) for _ in range(2)]
    alone = []
    for tokens, routing in zip(x, routings, strict=True):
        experts.zero_grad()
        experts(tokens, routing.topk_index, routing.topk_weights).sum().backward()
        alone.append([p.grad.clone() for p in experts.parameters()])
    experts.zero_grad()
    # Two forward passes, then their backward passes in the other order.
    outs = [experts(tokens, r.topk_index, r.topk_weights) for tokens, r in zip(x, routings, strict=True)]
    for out in reversed(outs):
        out.sum().backward()
    for parameter, first, second in zip(experts.parameters(), *alone, strict=True):
        assert_close(parameter.grad, first + second, 1e-6)


def test_inputs_are_not_changed(seed):
    experts = build(bias=True)
    routing = random_routing("dropped", 10, NUM_EXPERTS, TOP_K)
    x, index, weights = torch.randn(10, HIDDEN), routing.topk_index, routing.topk_weights
    before = [tensor.clone() for tensor in (x, index, weights)]
    experts(x, index, weights).sum().backward()
    assert all(torch.equal(now, then) for now, then in zip((x, index, weights), before, strict=True))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_nan_token_stays_in_its_row(precision, bias, seed):
    experts = build(precision=precision, bias=bias)
    routing = random_routing("uniform", 20, NUM_EXPERTS, TOP_K)
    clean = torch.randn(20, HIDDEN)
    poisoned = clean.clone()
    poisoned[7] = float("nan")
    others = torch.arange(20) != 7
    outs, grads = [], []
    for tokens in (clean, poisoned):
        leaf = tokens.requires_grad_()
        out = experts(leaf, routing.topk_index, routing.topk_weights)
        out.square().sum().backward()
        outs.append(out)
        grads.append(leaf.grad)
    assert outs[1][7].isnan().all()
    assert torch.equal(outs[1][others], outs[0][others])
    assert torch.equal(grads[1][others], grads[0][others])


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_output_has_the_dtype_of_the_input(parameters, inputs, seed):
    """GEMMs run in the dtype of the parameters, and gradients come in the dtype of what they belong to."""
    experts = build(parameters)
    routing = random_routing("uniform", 30, NUM_EXPERTS, TOP_K)
    x = torch.randn(30, HIDDEN).to(inputs).requires_grad_()
    out = experts(x, routing.topk_index, routing.topk_weights)
    assert out.dtype == inputs
    coarsest = max(torch.finfo(dtype).eps for dtype in (parameters, inputs, torch.float32))
    expected = plain_moe(x.double(), routing.topk_index, routing.topk_weights.double(), weights_of(experts))
    assert_close(out, expected, 4 * coarsest)
    if parameters == inputs == torch.bfloat16:
        assert relative_error(out, expected) > 1e-4, "nothing was rounded to BF16"
    out.sum().backward()
    assert x.grad.dtype == inputs and experts.down_proj.grad.dtype == parameters


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_autocast(parameters, precision, seed):
    # What is kept for the backward pass would be rounded to BF16 before the activation.
    experts = build(parameters, precision=precision, recompute="activation")
    routing = random_routing("uniform", 30, NUM_EXPERTS, TOP_K)
    x = torch.randn(30, HIDDEN).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = experts(x, routing.topk_index, routing.topk_weights)
    assert out.dtype == torch.float32
    rounded = x.detach().bfloat16().float()
    if precision == "bf16":
        # The same bits as with parameters cast by hand.
        by_hand = build(torch.bfloat16)
        by_hand.load_state_dict(experts.state_dict())
        assert torch.equal(out, by_hand(rounded, routing.topk_index, routing.topk_weights))
    else:
        # FP8 codes are cast from the parameters themselves; BF16 is how rows travel.
        expected = experts(rounded, routing.topk_index, routing.topk_weights)
        assert_close(out, expected, 4e-3)
    out.sum().backward()
    assert x.grad.dtype == torch.float32 and experts.down_proj.grad.dtype == parameters


def test_dtype_policy_is_documented():
    for text in ("autocast's dtype", "dtype of the input"):
        assert text in " ".join(Experts.__doc__.split())


def test_weight_gradients_are_summed_in_fp32(seed):
    """256 + 1 = 256 in BF16: 300 equal rows must sum to 300, not stop at 256."""
    experts = build(torch.bfloat16, bias=True, num_experts=1, top_k=1)
    x = torch.randn(300, HIDDEN, dtype=torch.bfloat16)
    out = experts(x, torch.zeros(300, 1, dtype=torch.int64), torch.ones(300, 1))
    out.backward(torch.ones_like(out))
    assert torch.equal(experts.down_proj_bias.grad, torch.full((1, HIDDEN), 300, dtype=torch.bfloat16))


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("changes", "shapes"),
    [
        (dict(), {"gate_up_proj": (6, 40, 24), "down_proj": (6, 24, 20)}),
        (dict(activation="relu2"), {"up_proj": (6, 20, 24), "down_proj": (6, 24, 20)}),
        (
            dict(bias=True),
            {
                "gate_up_proj": (6, 40, 24),
                "down_proj": (6, 24, 20),
                "gate_up_proj_bias": (6, 40),
                "down_proj_bias": (6, 24),
            },
        ),
        (
            dict(bias=True, activation="relu2"),
            {"up_proj": (6, 20, 24), "down_proj": (6, 24, 20), "up_proj_bias": (6, 20), "down_proj_bias": (6, 24)},
        ),
    ],
)
def test_state_dict_is_the_canonical_layout(changes, shapes, seed):
    experts = Experts(layer(**changes))
    state = experts.state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == shapes
    assert all(isinstance(getattr(experts, name), torch.nn.Parameter) for name in shapes)
    if not changes.get("bias"):
        assert experts.down_proj_bias is None


@pytest.mark.parametrize("init_std", [None, 0.02])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_values(init_std, dtype, seed):
    config = MoEConfig(hidden_size=256, intermediate_size=64, num_experts=5, top_k=1, init_std=init_std, bias=True)
    experts = Experts(config, dtype=dtype)
    assert all(parameter.dtype == dtype for parameter in experts.parameters())
    for name, fan_in in (("gate_up_proj", 256), ("down_proj", 64)):
        std = fan_in**-0.5 if init_std is None else init_std
        weight = experts.get_parameter(name).detach().float()
        for expert in weight:
            assert abs(float(expert.std()) / std - 1) < 0.05
            assert abs(float(expert.mean())) < 0.05 * std
        for a, b in itertools.combinations(weight, 2):
            # Independent draws: not equal, and not correlated either.
            assert abs(float((a * b).mean())) < 0.1 * std**2
    assert not experts.gate_up_proj_bias.any() and not experts.down_proj_bias.any()


def test_values_follow_from_the_seed_and_the_expert(seed):
    def draw(value: int, **changes) -> Experts:
        torch.manual_seed(value)
        return Experts(layer(**changes))

    first, again, other, more = draw(1), draw(1), draw(2), draw(1, num_experts=9)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
        assert not torch.equal(parameter, other.get_parameter(name))
        # The id alone counts, not how many experts there are.
        assert torch.equal(parameter, more.get_parameter(name)[:NUM_EXPERTS])
    torch.manual_seed(1)
    other.reset_parameters()
    assert torch.equal(first.down_proj, other.down_proj)
    # The next layer draws anew.
    other.reset_parameters()
    assert not torch.equal(first.down_proj, other.down_proj)


def test_meta_device_then_materialise(seed):
    torch.manual_seed(1)
    expected = Experts(layer(bias=True))
    experts = Experts(layer(bias=True), device="meta")
    assert all(parameter.is_meta for parameter in experts.parameters())
    experts.to_empty(device="cpu")
    torch.manual_seed(1)
    experts.reset_parameters()
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, experts.get_parameter(name))


def test_device_context(seed):
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in Experts(layer()).parameters())


def test_repr():
    text = f"Experts(hidden_size={HIDDEN}, intermediate_size={WIDTH}, num_experts=6, activation=relu2, precision=fp8)"
    assert repr(Experts(layer(activation="relu2", precision="fp8"))) == text


def test_updated_weights_are_used(seed):
    """Nothing computed from the weights may outlive a change of them in place."""
    for precision in ("bf16", "fp8"):
        experts, x = build(precision=precision), torch.randn(8, HIDDEN)
        routing = random_routing("uniform", 8, NUM_EXPERTS, TOP_K)
        before = experts(x, routing.topk_index, routing.topk_weights)
        with torch.no_grad():
            experts.down_proj.mul_(2)
        assert_close(experts(x, routing.topk_index, routing.topk_weights), 2 * before, 1e-6)


# ---------------------------------------------------------------- errors

X, INDEX, WEIGHTS = torch.ones(4, HIDDEN), torch.zeros(4, TOP_K, dtype=torch.int64), torch.ones(4, TOP_K)


@pytest.mark.parametrize(
    ("arguments", "argument", "value", "kind", "rule"),
    [
        ((X[0], INDEX, WEIGHTS), "hidden_states.shape", [HIDDEN], ValueError, f"must be [any, {HIDDEN}]"),
        ((X[:, 1:], INDEX, WEIGHTS), "hidden_states.shape", [4, HIDDEN - 1], ValueError, f"must be [any, {HIDDEN}]"),
        ((X[None], INDEX, WEIGHTS), "hidden_states.shape", [1, 4, HIDDEN], ValueError, f"must be [any, {HIDDEN}]"),
        ((X.long(), INDEX, WEIGHTS), "hidden_states.dtype", torch.int64, TypeError, "must be one of torch.bfloat16"),
        ((X.to("meta"), INDEX, WEIGHTS), "hidden_states.device", "meta", ValueError, "must be cpu"),
        ((X.tolist(), INDEX, WEIGHTS), "hidden_states", "list", TypeError, "must be a torch.Tensor"),
        ((X, INDEX[:3], WEIGHTS), "top_k_index.shape", [3, TOP_K], ValueError, "must be [4, any]"),
        ((X, INDEX[:, 0], WEIGHTS), "top_k_index.shape", [4], ValueError, "must be [4, any]"),
        ((X, INDEX[:, :0], WEIGHTS[:, :0]), "top_k_index.shape", [4, 0], ValueError, "must have K >= 1"),
        ((X, INDEX.float(), WEIGHTS), "top_k_index.dtype", torch.float32, TypeError, "torch.int64, torch.int32"),
        ((X, INDEX.to(torch.uint8), WEIGHTS), "top_k_index.dtype", torch.uint8, TypeError, "torch.int64, torch.int32"),
        ((X, INDEX.to("meta"), WEIGHTS), "top_k_index.device", "meta", ValueError, "must be cpu"),
        ((X, INDEX, WEIGHTS[:, :2]), "top_k_weights.shape", [4, 2], ValueError, "must be [4, 3]"),
        ((X, INDEX, WEIGHTS.long()), "top_k_weights.dtype", torch.int64, TypeError, "must be one of torch.bfloat16"),
        ((X, INDEX, WEIGHTS.to("meta")), "top_k_weights.device", "meta", ValueError, "must be cpu"),
        ((X, INDEX, None), "top_k_weights", "NoneType", TypeError, "must be a torch.Tensor"),
    ],
)
def test_bad_input(arguments, argument, value, kind, rule):
    with fails(kind, argument, value, rule):
        Experts(layer())(*arguments)


def test_capacity():
    experts = Experts(layer(max_tokens_per_rank=4))
    experts(X, INDEX, WEIGHTS)
    with fails(ValueError, "hidden_states.shape[0]", 5, "exceeds max_tokens_per_rank = 4"):
        experts(torch.ones(5, HIDDEN), INDEX[:1].expand(5, -1), WEIGHTS[:1].expand(5, -1))


def test_config_must_be_a_config():
    with fails(TypeError, "config", "NoneType", "must be a MoEConfig"):
        Experts(None)


@pytest.mark.parametrize("group", [3, "expert", [0, 1]])
def test_group_must_be_a_group(group):
    with fails(TypeError, "group", type(group).__name__, "must be a ProcessGroup, a 1-D DeviceMesh or None"):
        Experts(layer(), group)
