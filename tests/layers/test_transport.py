"""The layer over NVLink's exchange, whose kernels the simulator runs, and what ``path`` refuses."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import torch  # noqa: E402
from torch import nn  # noqa: E402

from megamoe import MoE, MoEConfig, RouterConfig  # noqa: E402
from megamoe.comm.peer import PeerExchange  # noqa: E402
from megamoe.layers import transport  # noqa: E402
from megamoe.layers.replicas import ExpertSlots  # noqa: E402
from megamoe.layers.transport import Transport  # noqa: E402
from megamoe.placement import ExpertPlacement  # noqa: E402
from tests.support.errors import fails  # noqa: E402
from tests.support.exchange_sim import Sizes  # noqa: E402
from tests.support.metrics import relative_error  # noqa: E402
from tests.support.peer_world import run_peers  # noqa: E402

CPU = torch.device("cpu")


def on_rank(full: MoE, rank: int, exchange: PeerExchange) -> MoE:
    """The layer of a rank: its part of the experts, and their exchange."""
    moe = copy.deepcopy(full)
    local = exchange.num_local_experts
    for name, parameter in list(moe.experts.named_parameters(recurse=False)):
        setattr(moe.experts, name, nn.Parameter(parameter.detach()[rank * local : (rank + 1) * local].clone()))
    moe.experts.exchange = exchange
    moe.experts.slots = ExpertSlots(ExpertPlacement.even(exchange.num_experts, exchange.memory_plan.ep_size), rank, CPU)
    return moe


@pytest.mark.parametrize("training", [True, False])
def test_layer_over_simulated_nvlink_equals_one_rank(training, seed):
    sizes = Sizes(ranks=2, tokens=24, top_k=2, experts=4, hidden=160)
    config = MoEConfig(160, 64, 4, 2, router=RouterConfig(score="sigmoid"))
    full = MoE(config, dtype=torch.bfloat16).train(training)
    counts = [24, 7]
    x = torch.randn(sum(counts), 160).bfloat16()
    grad = torch.randn_like(x)
    parts, grads = x.split(counts), grad.split(counts)

    def run(rank: int, exchange: PeerExchange):
        moe = on_rank(full, rank, exchange)
        mine = parts[rank].clone().requires_grad_(training)
        with torch.set_grad_enabled(training):
            out = moe(mine)
        if training:
            out.backward(grads[rank])
        return out.detach(), mine.grad, moe

    theirs = x.clone().requires_grad_(training)
    with torch.set_grad_enabled(training):
        expected = full(theirs)
    results = run_peers(sizes, run)
    assert torch.equal(torch.cat([out for out, _, _ in results]), expected.detach())
    if not training:
        return
    expected.backward(grad)
    assert relative_error(torch.cat([mine for _, mine, _ in results]), theirs.grad) < 1e-2
    for rank, (_, _, moe) in enumerate(results):
        for name, parameter in moe.experts.named_parameters(recurse=False):
            whole = getattr(full.experts, name).grad
            assert relative_error(parameter.grad, whole[rank * 2 : rank * 2 + 2]) < 1e-2, name
    router = sum(moe.router.weight.grad for _, _, moe in results)
    assert relative_error(router, full.router.weight.grad) < 1e-2


# ---------------------------------------------------------------- paths

CONFIG = MoEConfig(32, 16, 4, 2, max_tokens_per_rank=8)


def test_unknown_path():
    with fails(ValueError, "path", "fast", "must be one of 'collective', 'staged'"):
        MoE(CONFIG, path="fast")


def test_one_rank_needs_no_memory():
    moe = MoE(CONFIG, path="staged")
    assert moe(torch.randn(3, 32)).shape == (3, 32)
    moe.close()


class _Group:
    """Stands for a group of two ranks."""

    group_name = "two"


@pytest.fixture
def buffers(monkeypatch):
    """Calls of acquire and release, in order."""
    calls = []
    monkeypatch.setattr(transport.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(transport.torch.cuda, "current_device", lambda: 1)

    def acquire(plan, group, device):
        calls.append(("acquire", plan.num_local_experts, str(device)))
        return f"buffer {len(calls)}"

    monkeypatch.setattr(transport, "acquire_buffer", acquire)
    monkeypatch.setattr(transport, "release_buffer", lambda buffer: calls.append(("release", buffer)))
    monkeypatch.setattr(transport, "PeerExchange", lambda experts, buffer, plan: (experts, buffer))
    return calls


def test_memory_is_acquired_before_the_old_is_released(buffers):
    made = Transport(CONFIG, _Group(), "staged", torch.device("cuda"))
    assert made.make(4) == (4, "buffer 1")
    assert made.make(6) == (6, "buffer 2")
    made.close()
    made.close()
    assert buffers == [
        ("acquire", 2, "cuda:1"),
        ("acquire", 3, "cuda:1"),
        ("release", "buffer 1"),
        ("release", "buffer 2"),
    ]


def test_a_device_that_is_named_is_taken(buffers):
    Transport(CONFIG, _Group(), "staged", torch.device("cuda", 3)).make(4)
    assert buffers == [("acquire", 2, "cuda:3")]


def test_staged_needs_gpus_and_a_bound(buffers):
    with fails(ValueError, "device", "cpu", "must be a GPU"):
        Transport(CONFIG, _Group(), "staged", CPU)
    unbounded = MoEConfig(32, 16, 4, 2)
    with fails(ValueError, "max_tokens_per_rank", None, "must be set"):
        Transport(unbounded, _Group(), "staged", torch.device("cuda"))
