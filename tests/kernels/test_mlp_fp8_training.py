"""``grouped_mlp`` in FP8 as training uses it: errors of gradients, what is kept, recomputation, weights that change."""

from __future__ import annotations

import pytest
import torch

from megamoe.comm.exchange import LocalExchange
from megamoe.kernels import gemm_k, mlp_fp8, mlp_quant, reference, weight_cache
from megamoe.kernels.mlp import grouped_mlp
from megamoe.kernels.mlp_options import MlpOptions
from megamoe.types import ExpertLayout, Fp8Tensor
from tests.kernels.test_mlp import NAMES, leaves, moe
from tests.support.errors import fails
from tests.support.generators import ExpertWeights, random_expert_weights, random_routing
from tests.support.metrics import assert_close, relative_error
from tests.support.plain_moe import ACTIVATIONS, plain_moe

BF16, FP32 = torch.bfloat16, torch.float32


class Case:
    """One layer's rows, weights and gradient of the output."""

    def __init__(self, activation="swiglu", bias=False, dtype=BF16, hidden=256, width=128, tokens=150, experts=3):
        self.routing = random_routing("dropped", tokens, experts, 2)
        self.weights = random_expert_weights(experts, hidden, width, activation, bias, dtype).requires_grad_()
        self.x = torch.randn(tokens, hidden).to(dtype)
        self.grad = torch.randn(tokens, hidden).to(dtype)
        self.activation = activation

    def options(self, recompute="none", precision="fp8") -> MlpOptions:
        return MlpOptions(self.activation, None, precision, recompute=recompute)

    def step(self, recompute="none") -> dict[str, torch.Tensor]:
        """Output and all gradients."""
        x, topk_weights = self.x.clone().requires_grad_(), self.routing.topk_weights.clone().requires_grad_()
        out = moe(x, self.routing.topk_index, topk_weights, self.weights, self.options(recompute))
        inputs = leaves(x, topk_weights, self.weights)
        return {"out": out, **dict(zip(NAMES, torch.autograd.grad(out, inputs, self.grad), strict=False))}

    def exact(self) -> dict[str, torch.Tensor]:
        """The same in fp64."""
        x, topk = self.x.double().requires_grad_(), self.routing.topk_weights.double().requires_grad_()
        weights = self.weights.to(torch.float64).requires_grad_()
        out = plain_moe(x, self.routing.topk_index, topk, weights, self.activation)
        grads = torch.autograd.grad(out, leaves(x, topk, weights), self.grad.double(), materialize_grads=True)
        return {"out": out, **dict(zip(NAMES, grads, strict=False))}


def worst_error(actual: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """The largest relative error of the rows' gradient and of any expert's part of any parameter's gradient."""
    errors = [relative_error(actual["x"], exact["x"])]
    for name in NAMES[2:]:
        for got, want in zip(actual.get(name, ()), exact.get(name, ()), strict=True):
            errors.append(relative_error(got, want))
    return max(errors)


# ---------------------------------------------------------------- errors of gradients

TOLERANCE = 0.08


@pytest.mark.parametrize("recompute", ["none", "activation"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_against_fp64(activation, bias, recompute, seed):
    """Every parameter of every expert, in a BF16 model; one operand's cast alone costs 2.6 %."""
    case = Case(activation, bias)
    actual, exact = case.step(recompute), case.exact()
    assert 0.02 < worst_error(actual, exact) < TOLERANCE
    assert_close(actual["out"], exact["out"], TOLERANCE)
    assert_close(actual["topk_weights"], exact["topk_weights"], 0.1)


def _plant_other_expert(monkeypatch):
    cast = weight_cache._cast
    monkeypatch.setattr(weight_cache, "_cast", lambda w, padding, copy: cast(w.roll(1, 0), padding, copy))


def _plant_transposed_codes_of_other_weights(monkeypatch):
    def cast(weight, padding, copy, real=weight_cache._cast):
        real(weight, padding, copy)
        if copy.transposed is not None:
            copy.transposed.scales.mul_(1.2)

    monkeypatch.setattr(weight_cache, "_cast", cast)


def _plant_scales_of_other_rows(monkeypatch):
    real = mlp_quant.columns_of_rows

    def shifted(x):
        return real(Fp8Tensor(x.codes, x.scales.roll(1, 0), x.block))

    monkeypatch.setattr(mlp_quant, "columns_of_rows", shifted)


def _plant_unweighted_activation(monkeypatch):
    real = mlp_quant.activation_backward

    def unweighted(grad, pre, weights, *args, **kwargs):
        wrong = real(grad, pre, torch.ones_like(weights), *args, **kwargs)
        return real(grad, pre, weights, *args, **kwargs)._replace(act=wrong.act)

    monkeypatch.setattr(mlp_quant, "activation_backward", unweighted)


def _plant_lost_scale(monkeypatch):
    real = mlp_fp8._weight_gradient
    monkeypatch.setattr(mlp_fp8, "_weight_gradient", lambda a, b, ends, dtype, scale: real(a, b, ends, dtype, 0.9))


@pytest.mark.parametrize(
    "plant",
    [
        _plant_other_expert,
        _plant_transposed_codes_of_other_weights,
        _plant_scales_of_other_rows,
        _plant_unweighted_activation,
        _plant_lost_scale,
    ],
)
def test_planted_errors_are_seen(plant, monkeypatch, seed):
    case = Case()
    # Rows of different size: scales of the wrong row show.
    case.x *= 2.0 ** torch.randint(-2, 3, (case.x.shape[0], 1))
    exact = case.exact()
    clean = worst_error(case.step(), exact)
    plant(monkeypatch)
    with torch.no_grad():
        # The copies of the step before are out of date.
        case.weights.up_proj.mul_(1)
        case.weights.down_proj.mul_(1)
    assert worst_error(case.step(), exact) > 1.25 * clean


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_weight_gradient_is_one_product(dtype, monkeypatch, seed):
    """Rounded by the kernel; over each expert's own rows, codes dense along them where a GPU made them."""
    calls, real = [], gemm_k.k_grouped_fp8_gemm_tn

    def recorded(a, b, rows, **options):
        calls.append((a, b, rows, options["out_dtype"]))
        return real(a, b, rows, **options)

    monkeypatch.setattr(gemm_k, "k_grouped_fp8_gemm_tn", recorded)
    case = Case(dtype=dtype)
    grads = case.step()
    layout = LocalExchange(3).dispatch(case.x, case.routing, dtype).layout
    assert len(calls) == 2
    for name, (a, b, rows, out_dtype) in zip(("down_proj", "up_proj"), calls, strict=True):
        assert out_dtype == dtype and torch.equal(rows.index, layout.ends.int())
        assert torch.equal(grads[name], reference.grouped_gemm_k_fp8(a, b, layout).to(dtype))


def test_rows_outside_whole_blocks_raise():
    """Column-wise scales are those of 128 rows."""
    layout = ExpertLayout(torch.tensor([100]), torch.tensor([0]), 100)
    weights = random_expert_weights(1, 128, 128)
    with fails(ValueError, "rows.shape[0]", 100, "multiple of 128"):
        grouped_mlp(
            torch.zeros(100, 128),
            torch.zeros(100),
            weights.up_proj,
            weights.down_proj,
            layout,
            MlpOptions("swiglu", precision="fp8"),
        )


# ---------------------------------------------------------------- what is kept


def kept_bytes(case: Case, recompute: str, precision: str) -> float:
    """Bytes per row that autograd keeps, without the parameters."""
    sent = LocalExchange(case.weights.up_proj.shape[0]).dispatch(case.x, case.routing, case.x.dtype)
    rows, row_weights = sent.rows.detach().requires_grad_(), sent.row_weights.detach()
    saved: dict[int, int] = {}
    known = {tensor.data_ptr() for tensor in (*case.weights.tensors(), row_weights)}

    def pack(tensor):
        if tensor.dim() == 2 and tensor.data_ptr() not in known:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        grouped_mlp(
            rows,
            row_weights,
            case.weights.up_proj,
            case.weights.down_proj,
            sent.layout,
            case.options(recompute, precision),
            case.weights.up_bias,
            case.weights.down_bias,
        )
    return sum(saved.values()) / rows.shape[0]


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_kept_memory(bias, seed):
    hidden, width = 512, 256
    case = Case(bias=bias, hidden=hidden, width=width)
    scales = 4 * hidden / 128
    assert kept_bytes(case, "activation", "fp8") == hidden + scales
    assert kept_bytes(case, "none", "fp8") == hidden + scales + 4 * width
    assert kept_bytes(case, "activation", "bf16") == 2 * hidden


# ---------------------------------------------------------------- recomputation


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_recomputation_changes_no_gradient(dtype, activation, bias, seed):
    """Nor the result: what the backward pass computes again has the bits of what it would have kept."""
    case = Case(activation, bias, dtype, hidden=200, width=72)
    kept, again = case.step("none"), case.step("activation")
    for name in kept:
        assert torch.equal(kept[name], again[name]), name


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_inference_has_the_bits_of_training(activation, bias, seed):
    case = Case(activation, bias, hidden=200, width=72)
    trained = case.step("none")["out"]
    arguments = case.x, case.routing.topk_index, case.routing.topk_weights, case.weights
    for recompute in ("none", "activation"):
        with torch.no_grad():
            assert torch.equal(moe(*arguments, case.options(recompute)), trained)
        frozen = ExpertWeights(*(None if t is None else t.detach() for t in vars(case.weights).values()))
        assert torch.equal(moe(*arguments[:3], frozen, case.options(recompute)), trained)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_recomputation_without_quantisation(dtype, bias, seed):
    case = Case(bias=bias, dtype=dtype)
    results = []
    for recompute in ("none", "activation"):
        x, topk = case.x.clone().requires_grad_(), case.routing.topk_weights.clone().requires_grad_()
        out = moe(x, case.routing.topk_index, topk, case.weights, case.options(recompute, "bf16"))
        results.append([out, *torch.autograd.grad(out, leaves(x, topk, case.weights), case.grad)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_saved_tensors_may_be_moved(seed):
    """Kept tensors that come back as copies, as with offloading to the host; weights then are other tensors too."""
    case = Case()
    expected = case.step()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        actual = case.step()
    for name, want in expected.items():
        assert torch.equal(actual[name], want), name


# ---------------------------------------------------------------- weights that change


def test_weights_are_cast_once_per_change(monkeypatch, seed):
    casts, real = [], weight_cache._cast
    monkeypatch.setattr(weight_cache, "_cast", lambda *args: (casts.append(1), real(*args)))
    case = Case()
    optimizer = torch.optim.AdamW(case.weights.tensors(), lr=0.1, fused=True)
    for step in range(1, 4):
        for recompute in ("none", "activation"):
            # Two micro-batches, forward and backward.
            case.step(recompute)
        assert len(casts) == 2 * step
        for tensor in case.weights.tensors():
            tensor.grad = torch.ones_like(tensor)
        optimizer.step()
        fresh = Case.__new__(Case)
        fresh.__dict__ = {**vars(case), "weights": case.weights.to(BF16).requires_grad_()}
        before = len(casts)
        expected = fresh.step()
        del casts[before:]
        for name, got in case.step().items():
            assert torch.equal(got, expected[name]), name
    assert len(casts) == 8


def test_weights_changed_before_backward_are_noticed(seed):
    case = Case()
    out = moe(case.x, case.routing.topk_index, case.routing.topk_weights, case.weights, case.options())
    with torch.no_grad():
        case.weights.up_proj.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_other_weights_between_forward_and_backward(seed):
    """A second layer, and a second version of the first, change nothing for a backward pass that is still to come."""
    case, other = Case(), Case()
    expected = case.step()
    x = case.x.clone().requires_grad_()
    out = moe(x, case.routing.topk_index, case.routing.topk_weights, case.weights, case.options())
    other.step()
    twin = case.weights.to(BF16)
    twin.up_proj.mul_(2)
    moe(case.x, case.routing.topk_index, case.routing.topk_weights, twin, case.options())
    assert torch.equal(torch.autograd.grad(out, x, case.grad)[0], expected["x"])
