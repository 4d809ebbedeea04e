"""``grouped_mlp`` in FP8 on a GPU: against the CPU, the same bits where they are promised, in CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from megamoe.comm.exchange import LocalExchange
from megamoe.kernels import weight_cache
from megamoe.kernels.mlp import grouped_mlp
from megamoe.types import ExpertLayout
from tests.kernels.test_mlp import NAMES
from tests.kernels.test_mlp_fp8_training import Case
from tests.support.metrics import assert_close
from tests.support.plain_moe import ACTIVATIONS

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


class Pool:
    """The rows of a ``Case``, its parameters and a gradient of the pool, on one device."""

    def __init__(self, case: Case, device: str, precision: str = "fp8"):
        sent = LocalExchange(case.weights.up_proj.shape[0]).dispatch(case.x, case.routing, case.x.dtype)
        self.layout = ExpertLayout(sent.layout.counts.to(device), sent.layout.starts.to(device), sent.layout.num_rows)
        self.valid = (sent.handle.row_to_slot >= 0).to(device)
        generator = torch.Generator().manual_seed(1)
        grad = torch.randn(sent.rows.shape, generator=generator).to(case.x.dtype)
        self.grad = grad.to(device) * self.valid.unsqueeze(1)
        self.weights = case.weights.to(device).requires_grad_()
        self.rows = sent.rows.detach().to(device).requires_grad_()
        self.row_weights = sent.row_weights.detach().to(device).requires_grad_()
        self.case, self.precision = case, precision

    def forward(self, recompute="none") -> torch.Tensor:
        weights = self.weights
        operands = self.rows, self.row_weights, weights.up_proj, weights.down_proj
        options = self.case.options(recompute, self.precision)
        out = grouped_mlp(*operands, self.layout, options, weights.up_bias, weights.down_bias)
        return out.masked_fill(~self.valid.unsqueeze(1), 0)

    def step(self, recompute="none") -> dict[str, torch.Tensor]:
        """Output and gradients; those of padding rows are undefined, and zero here."""
        out = self.forward(recompute)
        inputs = [self.rows, self.row_weights, *self.weights.tensors()]
        grads = dict(zip(NAMES, torch.autograd.grad(out, inputs, self.grad), strict=False))
        grads["x"] = grads["x"].masked_fill(~self.valid.unsqueeze(1), 0)
        grads["topk_weights"] = grads["topk_weights"].masked_fill(~self.valid, 0)
        return {"out": out.detach(), **grads}


SIZES = [
    pytest.param(256, 128, 150, 3, id="whole blocks"),
    pytest.param(720, 360, 150, 4, id="neither a multiple of 128"),
    pytest.param(1024, 512, 700, 8, id="larger"),
    pytest.param(256, 128, 3, 8, id="empty experts"),
    pytest.param(256, 128, 0, 3, id="no tokens"),
]


@pytest.mark.parametrize(("hidden", "width", "tokens", "experts"), SIZES)
@pytest.mark.parametrize("recompute", ["none", "activation"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_against_the_cpu(dtype, recompute, hidden, width, tokens, experts, seed):
    case = Case(dtype=dtype, hidden=hidden, width=width, tokens=tokens, experts=experts)
    actual, expected = Pool(case, "cuda").step(recompute), Pool(case, "cpu").step(recompute)
    for name, want in expected.items():
        # The sigmoid's last bits and the order of sums send some values to the neighbouring code.
        for got, part in (
            zip(actual[name].cpu(), want, strict=True) if name in NAMES[2:] else [(actual[name].cpu(), want)]
        ):
            assert_close(got, part, 2e-2, name)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, bias, seed):
    case = Case(activation, bias)
    actual, expected = Pool(case, "cuda").step(), Pool(case, "cpu").step()
    for name, want in expected.items():
        assert_close(actual[name].cpu(), want, 2e-2, name)


@pytest.mark.parametrize("sizes", [(512, 256), (720, 360)], ids=["whole blocks", "neither a multiple of 128"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "relu2"])
def test_promised_bits(activation, precision, bias, sizes, seed):
    """From call to call, with and without recomputation, in training and inference."""
    case = Case(activation, bias, hidden=sizes[0], width=sizes[1], tokens=500, experts=6)
    pool = Pool(case, "cuda", precision)
    first, second, again = pool.step(), pool.step(), pool.step("activation")
    for name, want in first.items():
        assert torch.equal(second[name], want), name
        assert torch.equal(again[name], want), name
    with torch.no_grad():
        for recompute in ("none", "activation"):
            assert torch.equal(pool.forward(recompute), first["out"])


def test_captured_inference_sees_new_weights(seed):
    pool = Pool(Case(), "cuda")
    with torch.no_grad():
        expected = pool.forward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = pool.forward()
        graph.replay()
        assert torch.equal(out, expected)
        pool.weights.up_proj.mul_(1.5)
        pool.weights.down_proj.neg_()
        for weight in (pool.weights.up_proj, pool.weights.down_proj):
            weight_cache.refresh(weight)
        graph.replay()
        fresh = pool.forward()
        assert torch.equal(out, fresh) and not torch.equal(out, expected)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_captured_training_steps(precision, bias, seed):
    """Forward, backward and optimizer in one graph: each replay casts the weights that the one before has left."""
    case = Case(bias=bias)
    pools = [Pool(case, "cuda", precision) for _ in range(2)]
    # Gradients are sums over many rows.
    optimizers = [torch.optim.SGD(pool.weights.tensors(), lr=3e-4) for pool in pools]

    def step(pool, optimizer):
        optimizer.zero_grad(set_to_none=False)
        out = pool.forward()
        out.backward(pool.grad)
        optimizer.step()
        return out.detach()

    outputs = [[], []]
    for pool, optimizer, got in zip(pools, optimizers, outputs, strict=True):
        for tensor in pool.weights.tensors():
            tensor.grad = torch.zeros_like(tensor)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got.extend(step(pool, optimizer).clone() for _ in range(2))
        torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    allocated = len(weight_cache._memories)
    with torch.cuda.graph(graph):
        captured = step(pools[1], optimizers[1])
    assert len(weight_cache._memories) == allocated
    for _ in range(4):
        outputs[0].append(step(pools[0], optimizers[0]))
        graph.replay()
        outputs[1].append(captured.clone())
    for number, (eager, replayed) in enumerate(zip(*outputs, strict=True)):
        assert torch.equal(eager, replayed), number
        assert eager.isfinite().all() and (number == 0 or not torch.equal(eager, outputs[0][number - 1])), number
    # Eager calls after replays do not trust what these have left in the copies.
    with torch.no_grad():
        assert torch.equal(pools[0].forward(), pools[1].forward())


def test_streams(seed):
    """A copy that one stream casts is complete before another reads it."""
    pool = Pool(Case(hidden=2048, width=1024, tokens=64), "cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    with torch.no_grad():
        for number in range(20):
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream())
            outputs = []
            for stream in streams:
                with torch.cuda.stream(stream):
                    outputs.append(pool.forward())
            torch.cuda.synchronize()
            assert torch.equal(*outputs), number
            pool.weights.up_proj.mul_(-1.1)
            pool.weights.down_proj.mul_(0.9)
