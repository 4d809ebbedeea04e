"""``grouped_mlp`` in FP8, forward and backward, against a straightforward FP8 pipeline, expert by expert."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from megamoe.kernels.layout import layout_pairs
from megamoe.kernels.mlp_options import MlpOptions
from megamoe.kernels.reference import grouped_gemm_nt_fp8, quantize
from megamoe.types import Routing
from tests.kernels.test_mlp import NAMES, leaves, moe
from tests.support.generators import ROUTING_KINDS, ExpertWeights, random_expert_weights, random_routing
from tests.support.metrics import assert_close, relative_error
from tests.support.plain_fp8 import fake_quantize, without_ties
from tests.support.plain_moe import ACTIVATIONS, plain_activation

ROW, TILE, COLUMN = (1, 128), (128, 128), (128, 1)


def halves_quantized(x: torch.Tensor, halves: int, dim: int, block: tuple[int, int]) -> torch.Tensor:
    """Gate and up on their own, so that no block spans both."""
    return torch.cat([fake_quantize(part.contiguous(), block) for part in x.chunk(halves, dim=dim)], dim=dim)


@dataclass
class PlainFp8Expert:
    """One expert's FP8 forward and backward pass in fp64 between the casts; results that lie in memory in ``dtype``.

    Operands are dequantised before each product: exact in fp64, the sum over blocks of (codes @ codes) * scales.
    """

    up_proj: torch.Tensor
    down_proj: torch.Tensor
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    options: MlpOptions
    dtype: torch.dtype = torch.float64
    grads: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self):
        self.up_codes = halves_quantized(self.up_proj, self.options.halves, 0, TILE)
        self.down_codes = fake_quantize(self.down_proj, TILE)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self.x, self.weight = fake_quantize(x, ROW), weight.double().unsqueeze(1)
        pre = self.x @ self.up_codes.t()
        if self.up_bias is not None:
            pre = pre + self.up_bias.double()
        # What lies in memory is for the backward pass.
        self.pre = pre.to(self.dtype).double()
        act, self.act = (plain_activation(x, self.options.activation, self.options.clamp) for x in (pre, self.pre))
        if self.down_bias is None:
            return fake_quantize(act * self.weight, ROW) @ self.down_codes.t()
        return (fake_quantize(act, ROW) @ self.down_codes.t() + self.down_bias.double()) * self.weight

    def backward(self, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the rows and of their routing weights; those of the parameters go to ``grads``."""
        grad, act = grad.double(), self.act
        # Wherever the routing weight multiplies, before or after GEMM 2, these sums are the same.
        unweighted = (fake_quantize(grad, ROW) @ self.down_codes).to(self.dtype).double()
        grad_weight = (unweighted * act).sum(dim=1)
        grad_act, act = unweighted * self.weight, act * self.weight
        if self.down_bias is not None:
            grad_weight = grad_weight + (grad * self.down_bias.double()).sum(dim=1)
            self.grads["down_bias"] = (grad * self.weight).sum(dim=0)
        leaf = self.pre.detach().requires_grad_()
        value = plain_activation(leaf, self.options.activation, self.options.clamp)
        (grad_pre,) = torch.autograd.grad(value, leaf, grad_act)
        self.grads["up_bias"] = grad_pre.sum(dim=0)
        self.grads["down_proj"] = fake_quantize(grad, COLUMN).t() @ fake_quantize(act, TILE)
        self.grads["up_proj"] = fake_quantize(grad_pre, COLUMN).t() @ fake_quantize(self.x, TILE)
        return halves_quantized(grad_pre, self.options.halves, 1, ROW) @ self.up_codes, grad_weight


def plain_fp8_moe(x, routing: Routing, weights: ExpertWeights, options: MlpOptions, grad) -> dict[str, torch.Tensor]:
    """Output ("out") and all gradients, by the names of ``NAMES``."""
    num_experts = weights.up_proj.shape[0]
    out, grad_x = torch.zeros(x.shape, dtype=torch.float64), torch.zeros(x.shape, dtype=torch.float64)
    grad_topk = torch.zeros(routing.topk_weights.shape, dtype=torch.float64)
    experts = []
    for j in range(num_experts):
        biases = (None, None) if weights.up_bias is None else (weights.up_bias[j], weights.down_bias[j])
        dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float64
        expert = PlainFp8Expert(weights.up_proj[j], weights.down_proj[j], *biases, options, dtype)
        experts.append(expert)
        tokens, slots = (routing.topk_index == j).nonzero(as_tuple=True)
        out.index_add_(0, tokens, expert.forward(x[tokens], routing.topk_weights[tokens, slots]))
        rows, row_weights = expert.backward(grad[tokens])
        grad_x.index_add_(0, tokens, rows)
        grad_topk[tokens, slots] = row_weights
    result = {"out": out, "x": grad_x, "topk_weights": grad_topk}
    for name in NAMES[2:] if weights.up_bias is not None else NAMES[2:4]:
        result[name] = torch.stack([expert.grads[name] for expert in experts])
    return result


def run(x, routing: Routing, weights: ExpertWeights, options: MlpOptions, grad) -> dict[str, torch.Tensor]:
    leaf, topk_weights = x.clone().requires_grad_(), routing.topk_weights.clone().requires_grad_()
    trained = weights.to(weights.up_proj.dtype).requires_grad_()
    out = moe(leaf, routing.topk_index, topk_weights, trained, options)
    inputs = leaves(leaf, topk_weights, trained)
    grads = torch.autograd.grad(out, inputs, grad)
    return {"out": out, **dict(zip(NAMES, grads, strict=False))}


def assert_same_pipeline(actual: torch.Tensor, expected: torch.Tensor, what: str, least: float = 0.0) -> None:
    """Equal to fp32 rounding, but where that moved an intermediate value to the neighbouring e4m3 code.

    Such a value changes one row or column by up to 6 % of one of its terms: 19 of 20 elements still agree to 1e-5.

    Args:
        least: usual size of an element, for few of them, whose terms may cancel.
    """
    actual = actual.detach().double()
    assert_close(actual, expected, 5e-3, what)
    if expected.numel():
        error = float((actual - expected).abs().flatten().quantile(0.95))
        assert error <= 1e-5 * max(expected.square().mean().sqrt(), least), (
            f"{what}: one element in 20 is off by {error:.1e} or more"
        )


def check(x, routing: Routing, weights: ExpertWeights, options: MlpOptions, compare=assert_same_pipeline):
    """Output and every gradient; those of parameters expert by expert, exactly zero where an expert has no rows."""
    x = without_ties(x, ROW)
    grad = without_ties(torch.randn_like(x), ROW, COLUMN)
    halves = [
        torch.cat([without_ties(half, TILE) for half in w.chunk(options.halves)]) for w in weights.up_proj.unbind()
    ]
    weights.up_proj = torch.stack(halves)
    weights.down_proj = torch.stack([without_ties(w, TILE) for w in weights.down_proj])
    actual = run(x, routing, weights, options, grad)
    expected = plain_fp8_moe(x, routing, weights, options, grad)
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        if name == "topk_weights":
            # Products of two vectors of H elements.
            size = float(grad.norm(dim=1).double() @ expected["out"].norm(dim=1)) / max(want.numel(), 1)
            compare(actual[name], want, name, size * grad.shape[1] ** -0.5)
        elif name in ("out", "x"):
            compare(actual[name], want, name)
        else:
            for expert in range(want.shape[0]):
                compare(actual[name][expert], want[expert], f"{name}[{expert}]")
    return actual


@pytest.mark.parametrize("kind", ROUTING_KINDS)
def test_routings(seed, kind):
    routing, weights = random_routing(kind, 70, 5, 3), random_expert_weights(5, 256, 128)
    check(torch.randn(70, 256), routing, weights, MlpOptions("swiglu", precision="fp8"))


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [
        pytest.param(0, 3, 2, id="no tokens"),
        pytest.param(1, 3, 1, id="one token, K = 1"),
        pytest.param(40, 4, 4, id="K = E"),
        pytest.param(130, 1, 1, id="one local expert, two blocks of rows"),
    ],
)
def test_shapes_of_routing(seed, num_tokens, num_experts, top_k):
    routing = random_routing("uniform", num_tokens, num_experts, top_k)
    weights = random_expert_weights(num_experts, 256, 128)
    check(torch.randn(num_tokens, 256), routing, weights, MlpOptions("swiglu", precision="fp8"))


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    ("activation", "clamp"), [*((activation, None) for activation in ACTIVATIONS), ("swiglu", 0.7), ("swiglu_oai", 7.0)]
)
def test_activations(seed, activation, clamp, bias):
    routing, weights = random_routing("zipf", 50, 4, 2), random_expert_weights(4, 256, 128, activation, bias)
    check(torch.randn(50, 256), routing, weights, MlpOptions(activation, clamp, "fp8"))


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize(
    ("hidden_size", "intermediate_size"),
    [
        pytest.param(256, 96, id="I below a block: one block of [2I, H] would span gate and up"),
        pytest.param(256, 192, id="I ends inside a block"),
        pytest.param(256, 130, id="I just over a block"),
        pytest.param(72, 128, id="H below a block"),
        pytest.param(200, 130, id="neither a multiple"),
    ],
)
def test_sizes_that_do_not_fill_blocks(seed, hidden_size, intermediate_size, activation):
    routing = random_routing("dropped", 50, 4, 2)
    weights = random_expert_weights(4, hidden_size, intermediate_size, activation)
    # Gate far larger than up: a scale shared by both would cost up most of its bits.
    if activation == "swiglu":
        weights.up_proj[:, intermediate_size:] /= 64
    check(torch.randn(50, hidden_size), routing, weights, MlpOptions(activation, precision="fp8"))


def test_uneven_magnitudes(seed):
    """Rows, experts and stripes of weights of very different size: only their own scales fit."""
    routing, weights = random_routing("uniform", 150, 3, 2), random_expert_weights(3, 384, 256)
    weights.up_proj *= 2.0 ** torch.randint(-6, 7, (3, 1, 384))
    weights.down_proj *= 2.0 ** torch.randint(-6, 7, (3, 384, 1))
    x = torch.randn(150, 384) * 2.0 ** torch.randint(-6, 7, (150, 1))
    check(x, routing, weights, MlpOptions("swiglu", precision="fp8"))


def test_bf16_model(seed):
    """bf16 parameters and activations: the same, rounded to bf16 at the ends.

    Ratios of bf16 values lie on exact ties more often, above all when the rows' codes are cast again by columns: what
    such a tie changes is 1 % of single columns of up_proj's gradient.
    """
    routing = random_routing("uniform", 50, 4, 2)
    weights = random_expert_weights(4, 256, 128, bias=True).to(torch.bfloat16)
    x = torch.randn(50, 256).bfloat16()

    def assert_same_in_bf16(actual, expected, what, least=0.0):
        assert_close(actual, expected, 2e-2, what)
        error = float((actual.detach().double() - expected).abs().flatten().quantile(0.9))
        size = max(expected.square().mean().sqrt(), least)
        assert error <= 6e-3 * size, f"{what}: one element in 10 is off by {error / size:.1e} or more"

    actual = check(x, routing, weights, MlpOptions("swiglu", precision="fp8"), assert_same_in_bf16)
    for name in ("out", "x", "up_proj", "down_proj", "up_bias", "down_bias"):
        assert actual[name].dtype == torch.bfloat16
    assert actual["topk_weights"].dtype == torch.float32


BANDS = {
    "out": (0.058, 0.07),
    "x": (0.058, 0.072),
    "topk_weights": (0.05, 0.085),
    "up_proj": (0.063, 0.076),
    "down_proj": (0.056, 0.07),
}


def test_error_against_full_precision(seed):
    """Every quantised operand costs 2.6 %; a result outside the band is quantised too little or wrong."""
    routing, weights = random_routing("uniform", 200, 4, 2), random_expert_weights(4, 512, 256)
    x, grad = torch.randn(200, 512), torch.randn(200, 512)
    actual = run(x, routing, weights, MlpOptions("swiglu", precision="fp8"), grad)
    exact = run(x, routing, weights, MlpOptions("swiglu"), grad)
    errors = {name: relative_error(actual[name], exact[name]) for name in exact}
    for name, error in errors.items():
        low, high = BANDS[name]
        assert low < error < high, errors


@pytest.mark.parametrize("kind", ["uniform", "zipf"])
def test_error_of_each_experts_weight_gradients(kind, seed):
    """One scale for 128 x 128 rows and activations costs little more than one for each column: 8 % are not reached."""
    for _ in range(5):
        routing, weights = random_routing(kind, 200, 4, 2), random_expert_weights(4, 384, 256)
        x, grad = torch.randn(200, 384), torch.randn(200, 384)
        actual = run(x, routing, weights, MlpOptions("swiglu", precision="fp8"), grad)
        exact = run(x.double(), routing, weights.to(torch.float64), MlpOptions("swiglu"), grad.double())
        for name in ("up_proj", "down_proj"):
            for expert in routing.topk_index.unique().tolist():
                error = relative_error(actual[name][expert], exact[name][expert])
                assert error < 0.08, f"{name}[{expert}]: {error:.4f}"


def test_layer_of_deepseek_v3_size(seed):
    """H = 7168, I = 2048 on unit-scale data: GEMM 1 alone is off by 3.7 %, the layer's output by 6.3 %."""
    num_experts, num_tokens, hidden_size, intermediate_size = 2, 12, 7168, 2048
    routing = random_routing("uniform", num_tokens, num_experts, 2)
    weights = random_expert_weights(num_experts, hidden_size, intermediate_size)
    # One value that two implementations round to different codes changes further codes in its row or column.
    x = without_ties(torch.randn(num_tokens, hidden_size), ROW)
    for j in range(num_experts):
        # The halves of up_proj are whole blocks.
        weights.up_proj[j] = without_ties(weights.up_proj[j], TILE)
        weights.down_proj[j] = without_ties(weights.down_proj[j], TILE)

    layout, _ = layout_pairs(torch.zeros(num_tokens, dtype=torch.int64), 1)
    rows = torch.zeros(layout.num_rows, hidden_size)
    rows[:num_tokens] = x
    pre = grouped_gemm_nt_fp8(quantize(rows, ROW), quantize(weights.up_proj[:1], TILE), layout)[:num_tokens]
    assert 0.03 < relative_error(pre, x @ weights.up_proj[0].t()) < 0.045

    options = MlpOptions("swiglu", precision="fp8")
    out = moe(x, routing.topk_index, routing.topk_weights, weights, options)
    straightforward, exact = torch.zeros(x.shape, dtype=torch.float64), torch.zeros_like(x)
    for j in range(num_experts):
        tokens, slots = (routing.topk_index == j).nonzero(as_tuple=True)
        row_weights = routing.topk_weights[tokens, slots]
        expert = PlainFp8Expert(weights.up_proj[j], weights.down_proj[j], None, None, options)
        straightforward.index_add_(0, tokens, expert.forward(x[tokens], row_weights))
        act = plain_activation(x[tokens] @ weights.up_proj[j].t(), "swiglu")
        exact.index_add_(0, tokens, (act @ weights.down_proj[j].t()) * row_weights.unsqueeze(1))
    # A value that fp32 rounding sends to the neighbouring code changes few of so many products.
    assert_close(out, straightforward, 5e-3)
    assert 0.05 < relative_error(out, exact) < 0.07
