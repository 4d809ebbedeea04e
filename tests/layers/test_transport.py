"""The layer over NVLink's exchange, whose kernels the simulator runs, and what ``path`` refuses."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("greenlet")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megamoe import MoE, MoEConfig, RouterConfig  # noqa: E402
from megamoe.comm.collective import CollectiveExchange  # noqa: E402
from megamoe.comm.exchange import LocalExchange  # noqa: E402
from megamoe.comm.peer import PeerExchange  # noqa: E402
from megamoe.errors import MegaMoEValueError  # noqa: E402
from megamoe.layers import transport  # noqa: E402
from megamoe.layers.transport import Transport  # noqa: E402
from tests.support.errors import fails  # noqa: E402
from tests.support.exchange_sim import Sizes  # noqa: E402
from tests.support.metrics import relative_error  # noqa: E402
from tests.support.peer_world import on_rank, run_peers  # noqa: E402
from tests.support.processes import run_ranks  # noqa: E402

CPU, CUDA, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16


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


@dataclass
class Calls:
    """Stands for ``FusedExperts``; ``buffer`` also has the device of one."""

    buffer: Any
    plan: Any
    width: int


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
    monkeypatch.setattr(transport, "device_obstacle", lambda device, fp8: "" if device.type == "cuda" else "no GPU")
    monkeypatch.setattr(transport, "fused_experts", lambda buffer, plan, width: Calls(buffer, plan, width))
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


FP8 = replace(CONFIG, hidden_size=128, intermediate_size=100, precision="fp8")


def path_of(made: Transport) -> tuple[str, str]:
    return made.choices["inference"].path, made.choices["training"].path


@pytest.mark.parametrize("path", ["fused", "auto"])
def test_the_mega_kernel_serves_inference(path, buffers, caplog):
    caplog.set_level(logging.INFO, "megamoe")
    made = Transport(FP8, _Group(), path, CUDA)
    assert made.make(4) == (4, "buffer 1")
    assert path_of(made) == ("fused", "staged")
    assert (made._fused.buffer, made._fused.width) == ("buffer 1", 128)
    # Once, also if more slots come.
    assert made.make(6) == (6, "buffer 2") and made._fused.plan.num_local_experts == 3
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert f'MoE(path="{path}"): inference  fused: ' in caplog.text and "training   staged: grad" in caplog.text
    made.close()
    assert made._fused is None and buffers[-1] == ("release", "buffer 2")


def test_the_mega_kernel_takes_bf16_weights_as_they_are(buffers):
    config = replace(FP8, precision="bf16", intermediate_size=256)
    made = Transport(config, _Group(), "fused", CUDA)
    made.make(4)
    assert path_of(made) == ("fused", "staged") and made._fused.width == 256
    made = Transport(replace(config, intermediate_size=100), _Group(), "fused", CUDA)
    made.make(4)
    assert path_of(made) == ("staged", "staged") and "intermediate_size = 100" in made.explain()


def test_what_the_mega_kernel_cannot_do_is_staged_and_told(buffers, caplog):
    made = Transport(replace(FP8, activation="relu2"), _Group(), "fused", CUDA)
    assert made.make(4) == (4, "buffer 1")
    assert path_of(made) == ("staged", "staged") and made._fused is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    reason = "inference  staged: the mega-kernel has no activation without gate (relu2)"
    assert reason in caplog.text and made.explain().splitlines()[0] == reason


SHARED = replace(FP8, shared_intermediate_size=200, fuse_shared_experts=True)


def test_shared_experts_have_an_exchange_of_their_own(buffers, caplog):
    """In the same memory, which is large enough for both."""
    made = Transport(SHARED, _Group(), "fused", CUDA)
    assert made.make(4) == (4, "buffer 1") and made.exchange_with_shared == (8, "buffer 1")
    assert buffers == [("acquire", 4, "cuda:1")] and made.shared_experts == 2
    plan = made._fused.plan
    assert (plan.top_k, plan.num_local_experts, plan.shared_experts) == (4, 4, 2)
    made._fused.buffer = x = torch.zeros(3, 128)
    assert made.fused_for(x, BF16, False, True) is made._fused
    assert made.fused_for(x, BF16, False) is None, "a call without shared experts"
    assert made.fused_for(x, torch.float16, False, True) is None
    made.close()
    assert made.exchange_with_shared is None and made._fused is None and not made.shared_experts


@pytest.mark.parametrize("path", ["collective", "staged", "fused", "auto"])
def test_shared_experts_on_every_path(path, buffers, monkeypatch):
    """Numerics depend on the config alone."""
    monkeypatch.setattr(transport, "CollectiveExchange", lambda experts, group: (experts, "collective"))
    made = Transport(SHARED, _Group(), path, CUDA)
    assert made.make(4)[0] == 4 and made.exchange_with_shared[0] == 8
    assert (made.exchange_with_shared[1] == "collective") == (path == "collective")
    assert made.explain().splitlines()[2].startswith("shared     fused: ")
    # Slots on a rank that leave no room for more, and then do.
    made.make(510)
    assert made.exchange_with_shared is None
    assert "shared     dense: 255 experts of a rank and 2 more are beyond" in made.explain()
    made.make(6)
    assert made.exchange_with_shared[0] == 10 and made.shared_experts == 2


def test_a_call_that_does_not_fit_the_mega_kernel_is_staged(buffers):
    made = Transport(FP8, _Group(), "fused", CUDA)
    made.make(4)
    made._fused.buffer = x = torch.zeros(3, 128)
    assert made.fused_for(x, BF16, False) is made._fused
    assert made.fused_for(x, BF16, True) is None
    assert made.fused_for(x, torch.float16, False) is None
    assert made.fused_for(x.to("meta"), BF16, False) is None
    made._fused = None
    assert made.fused_for(x, BF16, False) is None


def test_auto_without_shared_memory_is_collective(buffers, monkeypatch, caplog):
    """All ranks raise, so all fall back."""

    def refuse(plan, group, device):
        raise MegaMoEValueError("spans several machines")

    monkeypatch.setattr(transport, "acquire_buffer", refuse)
    monkeypatch.setattr(transport, "CollectiveExchange", lambda experts, group: ("collective", experts))
    made = Transport(FP8, _Group(), "auto", CUDA)
    caplog.set_level(logging.INFO, "megamoe")
    assert made.make(4) == ("collective", 4)
    assert path_of(made) == ("collective", "collective") and made._fused is None
    assert "ranks cannot share memory (spans several machines)" in caplog.text
    for path in ("staged", "fused"):
        with pytest.raises(MegaMoEValueError, match="spans several"):
            Transport(FP8, _Group(), path, CUDA).make(4)


def test_auto_takes_what_there_is(buffers):
    """No GPU, no bound on tokens, rows of 32 bits: collectives, which take anything."""
    cases = (
        (FP8, CPU, BF16, "the device is cpu"),
        (replace(FP8, max_tokens_per_rank=None), CUDA, BF16, "max_tokens_per_rank is not set"),
        (FP8, CUDA, torch.float32, "parameters are torch.float32"),
    )
    for config, device, dtype, reason in cases:
        made = Transport(config, _Group(), "auto", device, dtype)
        assert isinstance(made.make(4), CollectiveExchange)
        assert path_of(made) == ("collective", "collective") and reason in made.explain()
    assert not buffers


def test_one_rank(buffers):
    """Memory only where the mega-kernel serves: separate kernels need none."""
    many = replace(FP8, max_tokens_per_rank=8192)
    for config, path, expected in ((many, "auto", "staged"), (FP8, "auto", "fused"), (many, "fused", "fused")):
        made = Transport(config, None, path, CUDA)
        assert isinstance(made.make(4), LocalExchange)
        assert path_of(made) == (expected, "staged")
        made.close()
    assert [each[0] for each in buffers if each[0] == "acquire"] == ["acquire"] * 2
    moe = MoE(replace(FP8, max_tokens_per_rank=None), path="fused", device="cpu")
    assert moe(torch.randn(3, 128)).shape == (3, 128)
    assert moe.explain().splitlines()[0] == "inference  staged: no GPU"


def auto_on_cpus(rank: int, ranks: int, seed: int) -> str:
    group = dist.group.WORLD
    torch.manual_seed(seed)
    auto = MoE(CONFIG, group, path="auto").eval()
    torch.manual_seed(seed)
    collective = MoE(CONFIG, group).eval()
    x = torch.randn(3 + rank, 32)
    with torch.no_grad():
        assert torch.equal(auto(x), collective(x))
    with fails(ValueError, "device", "cpu", 'must be a GPU for path="fused"'):
        MoE(CONFIG, group, path="fused")
    auto.close()
    return auto.explain()


def test_auto_on_cpus(seed):
    for text in run_ranks(auto_on_cpus, 2, seed):
        assert text.splitlines()[0] == "inference  collective: NVLink joins GPUs, and the device is cpu"
