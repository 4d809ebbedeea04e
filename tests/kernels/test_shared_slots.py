"""Slots for shared experts: torch's operators and the kernel, executed on the CPU, against plain loops."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

from megamoe.kernels import shared_slots
from megamoe.kernels.shared_slots import add_shared_slots
from megamoe.types import Routing

SIZES = [
    # Tokens, slots, H, experts, ranks, shared ones.
    (9, 2, 40, 4, 1, 1),
    (40, 8, 300, 24, 2, 2),
    (1, 3, 16, 6, 3, 13),
    (5, 1, 8200, 8, 8, 3),
    (0, 4, 64, 8, 2, 1),
]


def make_routing(tokens: int, top_k: int, experts: int, dtype: torch.dtype = torch.float32) -> Routing:
    """Also with ids that name no expert."""
    index = torch.randint(-2, experts + 2, (tokens, top_k))
    return Routing(index, torch.rand(tokens, top_k).to(dtype))


def plain(
    routing: Routing, x: torch.Tensor, gate: torch.Tensor | None, rank, num_experts, num_local, shared
) -> Routing:
    """Token by token, in fp64."""
    index, weights = [], []
    for ids, old, row in zip(routing.topk_index.tolist(), routing.topk_weights.tolist(), x.double(), strict=True):
        held = [-1 if not 0 <= i < num_experts else i // num_local * (num_local + shared) + i % num_local for i in ids]
        mine = rank * (num_local + shared) + num_local
        index.append(held + list(range(mine, mine + shared)))
        factor = 1.0 if gate is None else 1 / (1 + math.exp(-float(row @ gate[0].double())))
        weights.append(old + [factor] * shared)
    columns = routing.topk_index.shape[1] + shared
    return Routing(torch.tensor(index).long().view(-1, columns), torch.tensor(weights).view(-1, columns))


def check(compute, sizes, gated: bool, dtype: torch.dtype, device: str = "cpu") -> None:
    tokens, top_k, hidden, experts, ranks, shared = sizes
    x = torch.randn(tokens, hidden).to(dtype)
    gate = (torch.randn(1, hidden) * hidden**-0.5).to(dtype) if gated else None
    routing = make_routing(tokens, top_k, experts)
    for rank in range(ranks):
        options = dict(rank=rank, num_experts=experts, num_local=experts // ranks, shared=shared)
        wanted = plain(routing, x, gate, **options)
        there = Routing(routing.topk_index.to(device), routing.topk_weights.to(device))
        got = compute(there, x.to(device), None if gate is None else gate.to(device), **options)
        assert got.topk_index.dtype == torch.int64 and got.topk_weights.dtype == torch.float32
        assert torch.equal(got.topk_index.cpu(), wanted.topk_index)
        assert torch.equal(got.topk_weights[:, :top_k].cpu(), routing.topk_weights)
        torch.testing.assert_close(got.topk_weights.cpu(), wanted.topk_weights, rtol=1e-5, atol=1e-6)


CASES = pytest.mark.parametrize("sizes", SIZES, ids=str)
GATED = pytest.mark.parametrize("gated", [False, True], ids=["no gate", "gate"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@CASES
@GATED
@DTYPES
def test_by_operators(sizes, gated, dtype, seed):
    check(add_shared_slots, sizes, gated, dtype)


@CASES
@GATED
@DTYPES
def test_compiled(sizes, gated, dtype, seed):
    torch._dynamo.reset()
    check(torch.compile(add_shared_slots, fullgraph=True, backend="aot_eager"), sizes, gated, dtype)
    torch._dynamo.reset()


@contextlib.contextmanager
def simulated(seed: int):
    """GPUs' launches, on the CPU."""
    pytest.importorskip("triton")
    pytest.importorskip("greenlet")
    from megamoe.kernels import triton_shared_slots
    from tests.support.gluon_sim import simulated_launches

    with pytest.MonkeyPatch.context() as patch, simulated_launches(triton_shared_slots, seed=seed) as done:
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(shared_slots, "runs_triton", lambda *tensors: True)
        yield done


@CASES
@GATED
@DTYPES
def test_by_the_kernel(sizes, gated, dtype, seed):
    with simulated(seed) as done:
        check(add_shared_slots, sizes, gated, dtype)
    assert len(done) == (sizes[4] if sizes[0] else 0), "one launch each"


def test_rows_that_are_not_dense_and_weights_in_bf16(seed):
    x, gate = torch.randn(64, 7).t(), torch.randn(64, 1).t()
    routing = make_routing(7, 3, 8, torch.bfloat16)
    strided = Routing(routing.topk_index.t().contiguous().t(), routing.topk_weights.t().contiguous().t())
    options = dict(rank=1, num_experts=8, num_local=4, shared=2)
    wanted = plain(routing, x, gate, **options)
    with simulated(seed):
        got = add_shared_slots(strided, x, gate, **options)
    assert torch.equal(got.topk_index, wanted.topk_index)
    torch.testing.assert_close(got.topk_weights, wanted.topk_weights, rtol=1e-5, atol=1e-6)


def test_a_token_has_the_same_bits_in_any_batch(seed):
    x, gate, routing = torch.randn(40, 300), torch.randn(1, 300), make_routing(40, 4, 8)
    options = dict(rank=0, num_experts=8, num_local=8, shared=1)
    with simulated(seed):
        whole = add_shared_slots(routing, x, gate, **options).topk_weights
        for part in (slice(0, 1), slice(3, 11), slice(39, 40)):
            some = Routing(routing.topk_index[part], routing.topk_weights[part])
            assert torch.equal(add_shared_slots(some, x[part], gate, **options).topk_weights, whole[part])


def test_a_token_that_is_nan_spoils_no_other(seed):
    x, gate, routing = torch.randn(5, 64), torch.randn(1, 64), make_routing(5, 2, 4)
    options = dict(rank=0, num_experts=4, num_local=4, shared=1)
    with simulated(seed):
        before = add_shared_slots(routing, x, gate, **options).topk_weights
        x[2] = float("nan")
        after = add_shared_slots(routing, x, gate, **options).topk_weights
    assert after[2, 2].isnan() and torch.equal(after[2, :2], before[2, :2])
    assert torch.equal(after[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


@pytest.mark.gpu
@CASES
@GATED
@DTYPES
def test_on_a_gpu(sizes, gated, dtype, seed):
    check(add_shared_slots, sizes, gated, dtype, "cuda")
