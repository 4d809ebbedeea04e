"""Gradients of weights and biases on a Hopper GPU: no wait for the device, ``main_grad`` written in place."""

from __future__ import annotations

import contextlib

import pytest
import torch

from megamoe.kernels import gemm_k, pool_gemm
from tests.kernels.test_mlp import NAMES
from tests.kernels.test_mlp_fp8_gpu import Pool
from tests.kernels.test_mlp_fp8_training import Case
from tests.support.metrics import assert_close
from tests.support.plain_moe import ACTIVATIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

BF16, FP32 = torch.bfloat16, torch.float32
BOTH = pytest.mark.parametrize("precision", ["bf16", "fp8"])
SIZES = pytest.mark.parametrize("sizes", [(512, 256), (720, 360)], ids=["whole blocks", "padded in FP8"])


@contextlib.contextmanager
def no_waits():
    """Raises where torch would make the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def add_main_grads(pool: Pool) -> list[torch.Tensor]:
    for tensor in pool.weights.tensors():
        tensor.main_grad = torch.zeros(tensor.shape, device="cuda")
    return pool.weights.tensors()


@BOTH
@SIZES
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
def test_no_wait_in_a_step(activation, bias, sizes, precision, seed):
    case = Case(activation, bias, hidden=sizes[0], width=sizes[1])
    pool = Pool(case, "cuda", precision)
    pool.step()
    with no_waits():
        got = pool.step()
    expected = Pool(case, "cpu", precision).step()
    for name, want in expected.items():
        assert_close(got[name].cpu(), want, 2e-2, name)


@BOTH
@pytest.mark.parametrize("recompute", ["none", "activation"])
def test_no_wide_temporaries(recompute, precision, seed):
    """The backward pass needs its operands and results, in their dtypes: no matrix of the rows in fp32."""
    hidden, width = 256, 2048
    pool = Pool(Case(hidden=hidden, width=width, tokens=4096, experts=4, dtype=BF16), "cuda", precision)
    inputs, num_rows = [pool.rows, pool.row_weights, *pool.weights.tensors()], pool.rows.shape[0]
    for _ in range(2):
        out = pool.forward(recompute)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(out, inputs, pool.grad)
        peak = torch.cuda.max_memory_allocated() - before
    # Gradients of the activation and of the pre-activations, the activation; in FP8 both casts of the latter two. Then
    # what comes in, and pre-activations with the activation beside them.
    between = 2 + (4 + 2 if precision == "bf16" else 2 + 2 + 1)
    again = 4 + 2 if recompute == "activation" else 0
    allowed = num_rows * (width * (between + again) + 8 * hidden) + sum(grad.nbytes for grad in grads)
    assert peak < 1.1 * allowed


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("recompute", ["none", "activation"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bf16_gradients(activation, recompute, bias, seed):
    """Every parameter of every expert against the CPU, whose pre-activations are not rounded, and against fp64."""
    case = Case(activation, bias, hidden=512, width=256, tokens=600, experts=5)
    actual, expected = Pool(case, "cuda", "bf16").step(recompute), Pool(case, "cpu", "bf16").step(recompute)
    exact = Pool(case, "cpu", "bf16")
    exact.rows, exact.row_weights = (x.detach().double().requires_grad_() for x in (exact.rows, exact.row_weights))
    exact.weights, exact.grad = exact.weights.to(torch.float64).requires_grad_(), exact.grad.double()
    exact = exact.step()
    for name, want in expected.items():
        got = actual[name].cpu()
        parts = zip(got, want, exact[name], strict=True) if name in NAMES[2:] else [(got, want, exact[name])]
        for mine, theirs, double in parts:
            assert_close(mine, theirs, 1e-2, name)
            assert_close(mine, double, 1e-2, name)


@BOTH
def test_products_of_the_kernels(precision, monkeypatch, seed):
    """Two a backward pass, rounded to the parameters' dtype by the kernel."""
    function = f"k_grouped_{precision}_gemm_tn"
    dtypes, real = [], getattr(gemm_k, function)
    monkeypatch.setattr(gemm_k, function, lambda *a, **k: (dtypes.append(k["out_dtype"]), real(*a, **k))[1])
    for dtype in (BF16, FP32) if precision == "fp8" else (BF16,):
        dtypes.clear()
        Pool(Case(dtype=dtype), "cuda", precision).step()
        assert dtypes == [dtype] * 2


@pytest.mark.parametrize("columns", [(264, 136), (512, 776), (8, 8)], ids=str)
@pytest.mark.parametrize("out_dtype", [None, BF16, torch.float16], ids=str)
def test_pool_product(out_dtype, columns, seed):
    """``a`` transposed in memory; NaN in rows of no expert."""
    from tests.kernels.test_pool_gemm import layout_of, to

    layout = layout_of([130, 0, 5, 256], spare=256)
    a, b = (torch.full((layout.num_rows, n), float("nan"), dtype=BF16) for n in columns)
    for start, end in layout.spans():
        a[start:end], b[start:end] = (torch.randn(end - start, n).bfloat16() for n in columns)
    there = to(layout, "cuda")
    out = pool_gemm.grouped_gemm_k(a.cuda().t().contiguous().t(), b.cuda(), there, out_dtype)
    assert out.dtype == (out_dtype or FP32)
    total = torch.ones(4, *columns, device="cuda")
    for scale in (1.0, 0.25, 1 / 3):
        pool_gemm.add_grouped_gemm_k(total.fill_(1), a.cuda(), b.cuda(), there, scale)
        for expert, (start, end) in enumerate(layout.spans()):
            exact = a[start:end].double().t() @ b[start:end].double()
            if start == end:
                assert not out[expert].any() and torch.equal(total[expert], torch.ones_like(total[expert]))
            else:
                assert_close(out[expert].cpu(), exact, 1e-5 if out_dtype is None else 3e-3, f"expert {expert}")
                assert_close(total[expert].cpu(), 1 + scale * exact, 1e-5, f"sum of expert {expert}")


# ---------------------------------------------------------------- main_grad


@BOTH
@SIZES
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_three_micro_batches(dtype, bias, sizes, precision, seed):
    """The bits of the fp32 gradients of a model in fp32; without its rounding in one in BF16."""
    case = Case(bias=bias, dtype=dtype, hidden=sizes[0], width=sizes[1])
    plain, adding = Pool(case, "cuda", precision), Pool(case, "cuda", precision)
    tensors = add_main_grads(adding)
    for _ in range(3):
        adding.forward().backward(adding.grad)
        plain.forward().backward(plain.grad)
    for name, mine, theirs in zip(NAMES[2:], tensors, plain.weights.tensors(), strict=False):
        assert mine.grad is None
        if dtype == FP32:
            assert torch.equal(mine.main_grad, theirs.grad), name
        else:
            assert_close(mine.main_grad, theirs.grad, 6e-3, name)
            assert not torch.equal(mine.main_grad, mine.main_grad.bfloat16().float()), name


@BOTH
def test_same_bits_every_time(precision, seed):
    pool = Pool(Case(bias=True, hidden=512, width=256, tokens=700, experts=6), "cuda", precision)
    tensors, sums = add_main_grads(pool), []
    for _ in range(3):
        for tensor in tensors:
            tensor.main_grad.fill_(0.5)
        for _ in range(2):
            pool.forward().backward(pool.grad)
        sums.append([tensor.main_grad.clone() for tensor in tensors])
    for later in sums[1:]:
        for first, again in zip(sums[0], later, strict=True):
            assert torch.equal(first, again)


@BOTH
def test_no_wait_and_no_temporary(precision, seed):
    """With ``main_grad`` the backward pass does not need the memory of the gradients; warm in the second of two."""
    case = Case(hidden=2048, width=1024, tokens=64, experts=8, dtype=BF16)
    peaks = []
    for with_main_grad in (False, True):
        pool = Pool(case, "cuda", precision)
        if with_main_grad:
            add_main_grads(pool)
        for warm in (False, True):
            out = pool.forward()
            for tensor in pool.weights.tensors():
                tensor.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with no_waits() if warm else contextlib.nullcontext():
                out.backward(pool.grad)
            del out
        peaks.append(torch.cuda.max_memory_allocated() - before)
    size = sum(tensor.numel() * tensor.element_size() for tensor in case.weights.tensors())
    assert peaks[0] - peaks[1] > 0.5 * size


@BOTH
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_captured(bias, precision, seed):
    """A graph of forward and backward adds to ``main_grad`` at each replay."""
    pool = Pool(Case(bias=bias, hidden=512, width=256), "cuda", precision)
    tensors = add_main_grads(pool)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            pool.forward().backward(pool.grad)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.forward().backward(pool.grad)
    for tensor in tensors:
        tensor.main_grad.zero_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    replayed = [tensor.main_grad.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.main_grad.zero_()
    for _ in range(3):
        pool.forward().backward(pool.grad)
    for name, got, tensor in zip(NAMES[2:], replayed, tensors, strict=False):
        assert torch.equal(got, tensor.main_grad), name
