"""The grouped GEMMs by device: the CPU's fall-back, the choice, torch's grouped GEMM run on a CPU, and on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from megamoe import MoE, MoEConfig
from megamoe.kernels import gemm_k, pool_gemm
from megamoe.kernels.layout import ALIGN, layout_pairs
from megamoe.types import ExpertLayout
from tests.support.generators import ROUTING_KINDS, random_expert_weights, random_routing
from tests.support.metrics import assert_close
from tests.support.plain_moe import ACTIVATIONS, plain_activation

COUNTS = [
    pytest.param([3, 1, 2], id="few rows"),
    pytest.param([0, 5, 0, 0, 7, 0], id="empty first, middle and last"),
    pytest.param([0, 260, 0, 0, 0], id="all to one expert"),
    pytest.param([127, 128, 129, 255, 256, 257], id="around tile borders"),
    pytest.param([200], id="one local expert"),
    pytest.param([0, 0, 0], id="no rows at all, in a pool that has some"),
]
# bf16 operands are exact in fp64; the result is rounded to bf16 (0.17 % rms) or stays fp32.
BF16 = 3e-3


def layout_of(counts: list[int], spare: int = 0) -> ExpertLayout:
    """The layout of ``counts``, with ``spare`` more rows at the end as in the pools of GPUs."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    layout, _ = layout_pairs(ids, len(counts))
    return ExpertLayout(layout.counts, layout.starts, layout.num_rows + spare)


def pool(layout: ExpertLayout, width: int) -> torch.Tensor:
    """Random bf16 rows; padding inside groups is zero, after the last group NaN: those rows must not matter."""
    rows = torch.zeros(layout.num_rows, width)
    for start, end in layout.spans():
        rows[start:end] = torch.randn(end - start, width)
        last = -(-end // ALIGN) * ALIGN
    rows[last:] = float("nan")
    return rows.bfloat16()


def to(layout: ExpertLayout, device: str) -> ExpertLayout:
    return ExpertLayout(layout.counts.to(device), layout.starts.to(device), layout.num_rows)


def check_gemms(counts: list[int], device: str, spare: int) -> None:
    """NT, NN and K in bf16 against fp64 products, expert by expert."""
    layout, num_experts = layout_of(counts, spare), len(counts)
    there = to(layout, device)
    a, b = pool(layout, 64), pool(layout, 96)
    weight = (torch.randn(num_experts, 64, 96) / 8).bfloat16()
    transposed = weight.transpose(1, 2).contiguous()
    products = {
        "NN": pool_gemm.grouped_gemm_nn(a.to(device), weight.to(device), there),
        "NT": pool_gemm.grouped_gemm_nt(a.to(device), transposed.to(device), there),
    }
    for name, out in products.items():
        assert out.shape == (layout.num_rows, 96)
        for expert, (start, end) in enumerate(layout.spans()):
            expected = a[start:end].double() @ weight[expert].double()
            assert_close(out[start:end].cpu(), expected, BF16, f"{name}, expert {expert}")
            # Padding inside a group is read again by the next GEMM over K.
            padding = out[end : -(-end // ALIGN) * ALIGN]
            assert torch.equal(padding, torch.zeros_like(padding)), f"{name}, padding of expert {expert}"

    poison = [torch.full((num_experts, 64, 96), float("nan"), dtype=a.dtype, device=device) for _ in range(8)]
    del poison
    out = pool_gemm.grouped_gemm_k(a.to(device), b.to(device), there)
    assert out.shape == (num_experts, 64, 96)
    for expert, (start, end) in enumerate(layout.spans()):
        expected = a[start:end].double().t() @ b[start:end].double()
        assert_close(out[expert].cpu(), expected, BF16, f"K, expert {expert}")
        if start == end:
            assert torch.equal(out[expert], torch.zeros_like(out[expert])), f"K, expert {expert} is empty"


@pytest.mark.parametrize("counts", COUNTS)
def test_cpu(seed, counts):
    check_gemms(counts, "cpu", spare=0)


@pytest.mark.parametrize("kernels", [False, True], ids=["added", "inside the product"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_bias(dtype, kernels, monkeypatch, seed):
    """The result is not rounded."""
    monkeypatch.setattr(pool_gemm, "_kernels_have_it", lambda a, b: kernels)
    layout = layout_of([127, 0, 130], spare=0)
    a, weight, bias = pool(layout, 64), torch.randn(3, 96, 64).bfloat16(), torch.randn(3, 96).to(dtype)
    out = pool_gemm.grouped_gemm_nt(a, weight, layout, bias)
    assert out.dtype == torch.float32 and out.isfinite().all()
    for expert, (start, end) in enumerate(layout.spans()):
        expected = a[start:end].double() @ weight[expert].double().t() + bias[expert].double()
        assert_close(out[start:end], expected, 1e-5, f"expert {expert}")


@pytest.mark.parametrize("counts", COUNTS)
def test_torch_grouped_mm_on_a_cpu(seed, counts, monkeypatch):
    """The branch for GPUs, on torch's CPU implementation: operand order, transpositions and group ends."""
    if not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    calls = []

    def grouped_mm(a, b, offs):
        calls.append((a, b))
        out = original(a, b, offs=offs)
        # GPUs leave unwritten what no group covers.
        if b.dim() == 2:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = float("nan")
        else:
            out[int(offs[-1]) :] = float("nan")
        return out

    original = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", grouped_mm)
    monkeypatch.setattr(pool_gemm, "_torch_has_it", lambda a, b: True)
    check_gemms(counts, "cpu", spare=256)
    assert len(calls) == 3


def test_choice_of_torch_grouped_mm():
    """Only what it takes: on a GPU, BF16, rows of whole 16 bytes. Fake tensors stand in for those of a GPU."""
    if not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")

    def chosen(a_shape=(256, 64), b_shape=(2, 96, 64), dtypes=(torch.bfloat16, torch.bfloat16), device="cuda"):
        with FakeTensorMode():
            return pool_gemm._torch_has_it(
                torch.empty(a_shape, dtype=dtypes[0], device=device),
                torch.empty(b_shape, dtype=dtypes[1], device=device),
            )

    assert chosen()
    assert not chosen(device="cpu")
    assert not chosen(dtypes=(torch.float32, torch.float32))
    assert not chosen(dtypes=(torch.bfloat16, torch.float32))
    assert not chosen(dtypes=(torch.float16, torch.float16))
    assert not chosen((256, 60), (2, 96, 60))
    assert not chosen((256, 64), (2, 92, 64))


def test_choice_of_the_k_grouped_kernels(monkeypatch):
    """On a Hopper GPU, BF16, columns of whole 16 bytes, whatever the number of rows."""
    monkeypatch.setattr(pool_gemm.gemm_ops, "runs_kernels", lambda x: x.device.type == "cuda")

    def chosen(m=64, n=96, rows=256, dtypes=(torch.bfloat16, torch.bfloat16), device="cuda"):
        with FakeTensorMode():
            return pool_gemm._k_kernels_have_it(
                torch.empty(rows, m, dtype=dtypes[0], device=device),
                torch.empty(rows, n, dtype=dtypes[1], device=device),
            )

    assert chosen() and chosen(rows=0) and chosen(8, 24)
    assert not chosen(device="cpu")
    assert not chosen(dtypes=(torch.float32, torch.float32))
    assert not chosen(dtypes=(torch.bfloat16, torch.float32))
    assert not chosen(m=60)
    assert not chosen(n=92)


@pytest.mark.parametrize("counts", COUNTS)
def test_k_grouped_kernels_branch_on_a_cpu(seed, counts, monkeypatch):
    """Each expert's own rows and no padding, rounded once; the kernel's function runs the reference here."""
    calls, real = [], gemm_k.k_grouped_bf16_gemm_tn
    monkeypatch.setattr(gemm_k, "k_grouped_bf16_gemm_tn", lambda *a, **k: (calls.append(k), real(*a, **k))[1])
    monkeypatch.setattr(pool_gemm, "_k_kernels_have_it", lambda a, b: True)
    layout = layout_of(counts, spare=256)
    a, b = torch.randn(layout.num_rows, 64), torch.randn(layout.num_rows, 96)
    owned = torch.zeros(layout.num_rows, 1, dtype=torch.bool)
    for start, end in layout.spans():
        owned[start:end] = True
    a = torch.where(owned, torch.randn(a.shape), float("nan")).bfloat16()
    b = torch.where(owned, b, float("nan")).bfloat16()
    wide = pool_gemm.grouped_gemm_k(a, b, layout)
    assert wide.dtype == torch.float32
    for expert, (start, end) in enumerate(layout.spans()):
        expected = a[start:end].double().t() @ b[start:end].double()
        assert torch.equal(wide[expert], torch.zeros(64, 96)) if start == end else True
        assert_close(wide[expert] + 1, expected + 1, 1e-5, f"expert {expert}")
    rounded = pool_gemm.grouped_gemm_k(a.t().contiguous().t(), b, layout, torch.bfloat16)
    assert torch.equal(rounded, wide.bfloat16())
    assert [options["out_dtype"] for options in calls] == [torch.float32, torch.bfloat16]
    assert torch.equal(pool_gemm.grouped_gemm_k(a, b, layout, torch.float16), wide.half())

    total = torch.ones_like(wide)
    pool_gemm.add_grouped_gemm_k(total, a, b, layout, 0.5)
    assert torch.equal(total, 1 + wide / 2)
    assert calls[-1]["out"] is calls[-1]["c"] is total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_other_dtypes_on_a_cpu(seed, dtype):
    layout = layout_of([5, 0, 130])
    a, weight = torch.randn(layout.num_rows, 20).to(dtype), torch.randn(3, 20, 12).to(dtype)
    out = pool_gemm.grouped_gemm_nn(a, weight, layout)
    for expert, (start, end) in enumerate(layout.spans()):
        assert_close(out[start:end], a[start:end].double() @ weight[expert].double(), 1e-6, f"expert {expert}")


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("counts", COUNTS)
def test_gpu(seed, counts):
    check_gemms(counts, "cuda", spare=256)


@pytest.mark.gpu
def test_gpu_without_rows():
    """T = 0: a pool of no rows at all."""
    empty = to(ExpertLayout(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 0), "cuda")
    a, weight = (
        torch.zeros(0, 64, dtype=torch.bfloat16, device="cuda"),
        torch.randn(3, 64, 96, device="cuda").bfloat16(),
    )
    assert pool_gemm.grouped_gemm_nn(a, weight, empty).shape == (0, 96)
    assert pool_gemm.grouped_gemm_nt(a, weight.transpose(1, 2).contiguous(), empty).shape == (0, 96)
    out = pool_gemm.grouped_gemm_k(a, a, empty)
    assert out.shape == (3, 64, 64) and not out.any()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(60, 96), (64, 92)], ids=["K = 60", "N = 92"])
def test_gpu_falls_back_for_rows_of_odd_size(seed, shape):
    layout = layout_of([5, 0, 130])
    a, weight = pool(layout, shape[0]), torch.randn(3, *shape).bfloat16()
    out = pool_gemm.grouped_gemm_nn(a.cuda(), weight.cuda(), to(layout, "cuda"))
    for expert, (start, end) in enumerate(layout.spans()):
        assert_close(out[start:end].cpu(), a[start:end].double() @ weight[expert].double(), BF16, f"expert {expert}")


def plain_layer(x, topk_index, topk_weights, layer_weights, activation, clamp) -> torch.Tensor:
    """Expert by expert in plain torch; differentiable, for more tokens than a loop over them takes."""
    out = torch.zeros_like(x)
    for expert in range(layer_weights[0].shape[0]):
        up_proj, down_proj, *biases = (weight[expert] for weight in layer_weights)
        tokens, slots = (topk_index == expert).nonzero(as_tuple=True)
        pre = x[tokens] @ up_proj.t()
        rows = plain_activation(pre + biases[0] if biases else pre, activation, clamp) @ down_proj.t()
        rows = rows + biases[1] if biases else rows
        out = out.index_add(0, tokens, rows * topk_weights[tokens, slots].unsqueeze(1))
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROUTING_KINDS)
def test_experts_on_a_gpu(seed, kind):
    """Every kind of routing through dispatch, grouped_mlp and combine in bf16, forward and backward."""
    config = MoEConfig(hidden_size=256, intermediate_size=192, num_experts=6, top_k=3)
    layer = MoE(config, device="cuda", dtype=torch.bfloat16).experts
    routing = random_routing(kind, 300, 6, 3)
    x, grad = torch.randn(300, 256).bfloat16(), torch.randn(300, 256).bfloat16()

    leaf, topk_weights = x.cuda().requires_grad_(), routing.topk_weights.cuda().requires_grad_()
    out = layer(leaf, routing.topk_index.cuda(), topk_weights)
    actual = torch.autograd.grad(out, (leaf, topk_weights, layer.gate_up_proj, layer.down_proj), grad.cuda())

    exact_x, exact_topk = x.float().requires_grad_(), routing.topk_weights.clone().requires_grad_()
    exact_weights = [w.detach().float().cpu().requires_grad_() for w in (layer.gate_up_proj, layer.down_proj)]
    expected = plain_layer(exact_x, routing.topk_index, exact_topk, exact_weights, "swiglu", None)
    assert_close(out.cpu(), expected, 6e-3, "output")
    wanted = torch.autograd.grad(expected, (exact_x, exact_topk, *exact_weights), grad.float())
    for name, got, want in zip(("x", "topk_weights"), actual, wanted, strict=False):
        assert_close(got.cpu(), want, 1e-2, f"gradient of {name}")
    for name, got, want in zip(("gate_up_proj", "down_proj"), actual[2:], wanted[2:], strict=True):
        for expert in range(6):
            assert_close(got[expert].cpu(), want[expert], 1e-2, f"gradient of {name}[{expert}]")


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_whole_layer_on_a_gpu(seed, activation, bias):
    """Router, experts and all gradients in bf16 on a GPU against fp32 on the CPU.

    The comparison takes the GPU's choice of experts, since a near-tie of scores may fall either way; what it chose must
    be best up to fp32 rounding.
    """
    config = MoEConfig(256, 192, num_experts=6, top_k=2, activation=activation, bias=bias)
    layer = MoE(config, device="cuda", dtype=torch.bfloat16)
    names = ["gate_up_proj" if config.gated else "up_proj", "down_proj"]
    names += [f"{name}_bias" for name in names] if bias else []
    with torch.no_grad():
        for name, tensor in zip(names, random_expert_weights(6, 256, 192, activation, bias).tensors(), strict=True):
            getattr(layer.experts, name).copy_(tensor)
    x, grad = torch.randn(300, 256).bfloat16(), torch.randn(300, 256).bfloat16()

    chosen = []
    handle = layer.router.register_forward_hook(lambda module, args, routing: chosen.append(routing.topk_index.cpu()))
    leaf = x.cuda().requires_grad_()
    out = layer(leaf)
    handle.remove()
    parameters = [layer.router.weight, *(getattr(layer.experts, name) for name in names)]
    actual = torch.autograd.grad(out, (leaf, *parameters), grad.cuda())

    exact_x = x.float().requires_grad_()
    router, *weights = exact = [p.detach().float().cpu().requires_grad_() for p in parameters]
    scores = (exact_x @ router.t()).softmax(dim=1)
    selected = scores.gather(1, chosen[0])
    assert (selected.sum(dim=1) >= scores.topk(2, dim=1).values.sum(dim=1) - 1e-5).all()
    topk_weights = selected / selected.sum(dim=1, keepdim=True)
    expected = plain_layer(exact_x, chosen[0], topk_weights, weights, activation, config.clamp)
    assert_close(out.cpu(), expected, 8e-3, "output")
    wanted = torch.autograd.grad(expected, (exact_x, *exact), grad.float())
    for name, got, want in zip(("x", "router", *names), actual, wanted, strict=True):
        assert_close(got.cpu(), want, 2e-2, f"gradient of {name}")


@pytest.mark.gpu
def test_gpu_and_cpu_layers_agree(seed):
    """The same module moved to the CPU: the same function, up to bf16 rounding."""
    config = MoEConfig(256, 192, num_experts=6, top_k=2)
    layer = MoE(config, dtype=torch.bfloat16).experts
    routing, x = random_routing("dropped", 300, 6, 2), torch.randn(300, 256).bfloat16()
    expected = layer(x, routing.topk_index, routing.topk_weights)
    on_gpu = copy.deepcopy(layer).cuda()
    out = on_gpu(x.cuda(), routing.topk_index.cuda(), routing.topk_weights.cuda())
    assert_close(out.cpu(), expected, 6e-3)
