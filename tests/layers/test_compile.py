"""``torch.compile(moe, fullgraph=True)`` on one rank: the bits, gradients and statistics of eager mode in one graph."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

import megamoe
from megamoe import MegaMoEError, MoE, MoEConfig, RouterConfig, set_aux_loss_scale
from megamoe.kernels import reference, routing
from megamoe.layers import balance, router
from megamoe.types import Routing
from tests.support.compiling import assert_same, graph_breaks, skip_without_cpp_compiler, step

HIDDEN = 24
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def layer(num_experts: int = 6, top_k: int = 2, router: RouterConfig | None = None, **changes) -> MoEConfig:
    fields = dict(hidden_size=HIDDEN, intermediate_size=20, num_experts=num_experts, top_k=top_k)
    return MoEConfig(**{**fields, **changes}, router=router or RouterConfig())


LOSSES = dict(aux_loss_coef=0.1, z_loss_coef=0.01)
GROUPS = dict(num_groups=4, topk_groups=2, group_score="sum_top2")
CONFIGS = {
    "softmax": (layer(), FP32),
    "losses_shared_gate": (
        layer(router=RouterConfig(**LOSSES), shared_intermediate_size=28, shared_gate=True, activation="geglu"),
        FP32,
    ),
    "deepseek_v3": (
        layer(12, 4, RouterConfig(score="sigmoid", expert_bias=True, **GROUPS, **LOSSES), shared_intermediate_size=28),
        BF16,
    ),
    "gpt_oss": (layer(6, 3, RouterConfig(linear_bias=True), activation="swiglu_oai", bias=True), BF16),
    "fp8": (layer(precision="fp8", shared_intermediate_size=28, max_tokens_per_rank=200), FP32),
    "fp8_relu2": (layer(precision="fp8", activation="relu2", router=RouterConfig(score="sqrtsoftplus")), BF16),
}


def build(config: MoEConfig, dtype: torch.dtype = FP32) -> MoE:
    """A layer whose biases are not zero, so that every term matters."""
    moe = MoE(config).to(dtype)
    with torch.no_grad():
        for name, tensor in moe.state_dict().items():
            if name.endswith("bias"):
                tensor.normal_(std=0.3)
    return moe


def compiled(call, backend="aot_eager"):
    return torch.compile(call, backend=backend, fullgraph=True)


# ---------------------------------------------------------------- all layers, all numbers of tokens


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_number_of_compilations(backend, seed):
    config, dtype = CONFIGS["deepseek_v3"]
    moe = build(config, dtype)
    counter = CompileCounterWithBackend(backend)
    call = compiled(moe, counter)

    def compare(num_tokens: int) -> None:
        x = torch.randn(num_tokens, HIDDEN).to(dtype)
        assert_same(step(moe, call, x), step(moe, moe, x), 0, f"T = {num_tokens}")

    for num_tokens in (7, 130, 33, 12):
        compare(num_tokens)
    assert counter.frame_count == 2, "one compilation for the first T, one for any"
    # torch.compile specialises these two.
    for num_tokens in (0, 1):
        compare(num_tokens)
    assert counter.frame_count == 4
    assert not graph_breaks()


def check_backend(backend: str, name: str, tolerance: float, device: str = "cpu") -> None:
    config, dtype = CONFIGS[name]
    moe = build(config, dtype).to(device)
    counter = CompileCounterWithBackend(backend)
    code = compiled(moe, counter)

    def call(x: torch.Tensor) -> torch.Tensor:
        # An error if anything needs to know T.
        torch._dynamo.mark_dynamic(x, 0)
        return code(x)

    for num_tokens in (7, 130):
        x = torch.randn(num_tokens, HIDDEN, device=device).to(dtype)
        assert_same(step(moe, call, x), step(moe, moe, x), tolerance, f"T = {num_tokens}")
    # Inductor itself may tell small reductions from large ones.
    assert counter.frame_count <= (2 if backend == "inductor" else 1)
    assert not graph_breaks()


@pytest.mark.parametrize("name", CONFIGS)
def test_bits_of_eager_mode(name, seed):
    check_backend("aot_eager", name, 0)


# Fused loops round elsewhere than eager kernels, and in BF16 fewer times.
@pytest.mark.parametrize(("name", "tolerance"), [("losses_shared_gate", 1e-5), ("gpt_oss", 2e-2)])
def test_inductor(name, tolerance, seed):
    skip_without_cpp_compiler()
    check_backend("inductor", name, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_inductor_gpu(name, seed):
    check_backend("inductor", name, 5e-2, "cuda")


def test_inference(seed):
    config, dtype = CONFIGS["deepseek_v3"]
    moe = build(config, dtype).eval()
    call, x = compiled(moe), torch.randn(2, 9, HIDDEN).to(dtype)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(call(x), moe(x))
    assert moe.router.tokens_per_expert.sum() == 0 and moe.router.aux_loss is None


def test_the_routers_kernels_are_an_operator(seed, monkeypatch):
    """Where a device has them: here the reference stands for them."""
    routed = []

    def on_cpu(tensors, top_k, config):
        x, weight, bias, expert_bias, mask = tensors
        scores = reference.expert_scores(reference.router_logits(x, weight, bias), config.score)
        choice = scores + expert_bias
        index = reference.select_experts(choice, top_k, config.num_groups, config.topk_groups, config.group_score)
        weights = reference.routing_weights(scores, index, config.renormalize, config.scaling_factor)
        routed.append(x.shape[0])
        return index.masked_fill(~mask.unsqueeze(1), -1), weights.masked_fill(~mask.unsqueeze(1), 0)

    monkeypatch.setattr(routing, "has_kernel", lambda *tensors: True)
    monkeypatch.setattr(routing, "_route", on_cpu)
    config = RouterConfig("sigmoid", False, 2.5, expert_bias=True, linear_bias=True, **GROUPS)
    module = build(layer(12, 4, config)).router.eval()
    call = compiled(module)
    with torch.no_grad():
        for tokens in (5, 1, 40):
            x, mask = torch.randn(tokens, HIDDEN), torch.rand(tokens) < 0.7
            mine, wanted = call(x, mask), module(x, mask)
            assert torch.equal(mine.topk_index, wanted.topk_index)
            assert torch.equal(mine.topk_weights, wanted.topk_weights)
    assert routed == [5, 5, 1, 1, 40, 40]


def test_token_mask_and_leading_dimensions(seed):
    moe = build(layer(router=RouterConfig(**LOSSES), shared_intermediate_size=28))
    call = compiled(moe)
    for shape in ((3, 5), (2, 9)):
        x, mask = torch.randn(*shape, HIDDEN), torch.rand(shape) < 0.6
        assert_same(step(moe, call, x, mask), step(moe, moe, x, mask), 0, str(shape))
    # A masked NaN harms nothing.
    x[0, 0], mask[0, 0] = float("nan"), False
    results = step(moe, call, x, mask)
    assert results["output"][mask].isfinite().all() and results["router.weight"].isfinite().all()


class FixedRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([0.7, 0.3]))

    def forward(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None) -> Routing:
        first = torch.arange(hidden_states.shape[0], device=hidden_states.device) % 6
        index = torch.stack([first, torch.full_like(first, -1)], dim=1).int()
        return Routing(index, self.weights.expand(hidden_states.shape[0], 2))


def test_custom_router(seed):
    moe = MoE(layer(), router=FixedRouter())
    x, results = torch.randn(9, HIDDEN), []
    for call in (moe, compiled(moe)):
        moe.zero_grad()
        out = call(x)
        out.square().sum().backward()
        results.append([out.detach(), *(parameter.grad.clone() for parameter in moe.parameters())])
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("frozen", [("experts",), ("router", "experts.down_proj", "experts.gate_up_proj_bias")])
def test_frozen_parameters(frozen, seed):
    moe = build(layer(bias=True, router=RouterConfig(**LOSSES)))
    for name, parameter in moe.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    x = torch.randn(9, HIDDEN)
    actual, expected = step(moe, compiled(moe), x), step(moe, moe, x)
    assert not any(name.startswith(frozen) for name in expected)
    assert_same(actual, expected, 0, str(frozen))


# ---------------------------------------------------------------- one code for many layers


def test_layers_share_compiled_code(seed):
    """Compiling block by block: were each layer's exchange another constant, each would be compiled anew."""
    counter = CompileCounterWithBackend("aot_eager")
    layers = nn.ModuleList(build(layer(router=RouterConfig(**LOSSES))) for _ in range(10))
    for moe in layers:
        moe.compile(backend=counter, fullgraph=True)
    x = torch.randn(9, HIDDEN)
    for moe in layers:
        twin = copy.deepcopy(moe)
        assert_same(step(moe, moe, x), step(twin, twin.forward, x), 0, "layer")
    assert counter.frame_count == 1
    for scale in (0.5, 0.25, 0.125):
        set_aux_loss_scale(layers, scale)
        assert_same(step(layers[0], layers[0], x), step(layers[0], layers[0].forward, x), 0, f"scale {scale}")
    assert counter.frame_count == 2, "one more for a scale that changes, none for each value"


def test_whole_model_in_one_graph(seed):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(HIDDEN, HIDDEN)
            self.layers = nn.ModuleList(build(layer(router=RouterConfig(**LOSSES))) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            for moe in self.layers:
                # The second layer twice: its counters add up.
                x = x + moe(x)
            return x + self.layers[1](x.flip(0))

    model, counter = Model(), CompileCounterWithBackend("aot_eager")
    x, results = torch.randn(9, HIDDEN), []
    for call in (model, compiled(model, counter)):
        model.zero_grad()
        for moe in model.layers:
            moe.router.tokens_per_expert.zero_()
        call(x).square().sum().backward()
        results.append([p.grad.clone() for p in model.parameters()])
        results[-1] += [moe.router.tokens_per_expert.clone() for moe in model.layers]
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)
    assert counter.frame_count == 1 and results[0][-1].sum() == 2 * results[0][-2].sum() == 36


# ---------------------------------------------------------------- training modes

CHECKPOINTING = {
    "non_reentrant": dict(use_reentrant=False),
    "save_routing": dict(use_reentrant=False, context_fn=megamoe.save_routing),
}


@pytest.mark.parametrize("mode", CHECKPOINTING)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_checkpointing(where, mode, seed):
    """Around compiled code and compiled: nothing changes, and every token counts once."""
    config, dtype = CONFIGS["deepseek_v3"]
    moe = build(config, dtype)
    x = torch.randn(9, HIDDEN).to(dtype)
    expected = step(moe, moe, x)
    inner = compiled(moe) if where == "outside" else moe

    def block(hidden_states: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, hidden_states, **CHECKPOINTING[mode])

    assert_same(step(moe, compiled(block) if where == "inside" else block, x), expected, 0, mode)


@pytest.mark.parametrize(("mode", "routed_again"), [("non_reentrant", 1), ("save_routing", 0)])
def test_save_routing_is_obeyed_inside_compiled_code(mode, routed_again, seed):
    moe = build(layer())
    calls = []

    def count_calls(graph, inputs):
        targets = [node.target for node in graph.graph.nodes]
        calls.append(targets.count(torch.ops.megamoe.select_experts.default))
        return make_boxed_func(graph.forward)

    def backend(graph, inputs):
        return aot_module_simplified(
            graph,
            inputs,
            fw_compiler=count_calls,
            bw_compiler=count_calls,
            partition_fn=min_cut_rematerialization_partition,
        )

    call = compiled(lambda x: checkpoint(moe, x, **CHECKPOINTING[mode]), backend)
    call(torch.randn(9, HIDDEN, requires_grad=True)).sum().backward()
    assert calls == [1, routed_again]


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_autocast(where, seed):
    """The router stays in fp32 in both directions, also where autocast is in force around the compiled code."""
    moe = build(layer(router=RouterConfig(linear_bias=True, **LOSSES), shared_intermediate_size=28))
    x = torch.randn(9, HIDDEN)

    def under_autocast(call):
        def forward(hidden_states: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=BF16):
                return call(hidden_states)

        return forward

    call = compiled(under_autocast(moe)) if where == "inside" else under_autocast(compiled(moe))
    expected = step(moe, under_autocast(moe), x)
    assert_same(step(moe, call, x), expected, 0, where)
    assert not torch.equal(expected["output"], step(moe, moe, x)["output"]), "autocast did nothing"


def test_graph_walked_twice_and_forwards_that_overlap(seed):
    moe = build(layer(router=RouterConfig(**LOSSES)))
    batches, results = (torch.randn(9, HIDDEN), torch.randn(4, HIDDEN)), []
    # By default compiled code frees what it can in the first walk and refuses the second.
    with torch._functorch.config.patch(donated_buffer=False):
        for call in (moe, compiled(moe)):
            moe.zero_grad()
            outputs = [call(x).square().sum() for x in batches]
            outputs[0].backward(retain_graph=True)
            outputs[1].backward()
            outputs[0].backward()
            results.append([parameter.grad.clone() for parameter in moe.parameters()])
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("x", "rule"),
    [
        (torch.ones(3, HIDDEN + 1), r"must end in hidden_size = 24"),
        (torch.ones(3, HIDDEN, dtype=torch.int64), r"hidden_states.dtype = torch.int64: must be one of"),
        (torch.ones(9, HIDDEN), r"hidden_states.shape\[0\] = 9: exceeds max_tokens_per_rank = 8"),
    ],
    ids=["shape", "dtype", "capacity"],
)
def test_bad_input(x, rule):
    moe = MoE(layer(max_tokens_per_rank=8))
    with pytest.raises(MegaMoEError, match=rule):
        torch.compile(moe, backend="eager")(x)
    # With fullgraph=True torch.compile raises its own error, with ours as the cause.
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported) as failure:
        compiled(moe, "eager")(x)
    assert failure.match("Observed exception")
    assert re.search(rule, str(failure.value.__cause__))


# ---------------------------------------------------------------- operators


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("bias", [False, True])
def test_router_logits(dtype, bias, seed):
    x = torch.randn(9, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(6, HIDDEN, requires_grad=True)
    offset = torch.randn(6, requires_grad=True) if bias else None
    torch.library.opcheck(router._logits, (x, weight, offset))
    torch.library.opcheck(router._logits, (x.detach(), weight, offset))


def test_router_operators(seed):
    counts = torch.randint(9, (6,))
    torch.library.opcheck(router._count_tokens, (counts, counts + 1))
    for num_groups, group_score in ((1, "max"), (3, "sum_top2")):
        torch.library.opcheck(router._select_experts, (torch.randn(9, 6), 2, num_groups, 1, group_score))
    values, loss = torch.randn(2, 9, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    torch.library.opcheck(balance._attach_operator, (values, loss))
    torch.library.opcheck(balance._attach_operator, (values.t(), loss))
