"""``CollectiveExchange`` on 2 to 4 gloo ranks: the same bits as one rank for any routing; no hang when a rank fails."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megamoe import ExchangeError, Experts, MegaMoEError, MoE, MoEConfig, RouterConfig, Routing
from megamoe.comm.collective import CollectiveExchange
from tests.support.metrics import assert_close
from tests.support.processes import RankFailed, run_ranks

HIDDEN = 32


def config(**changes) -> MoEConfig:
    fields = dict(hidden_size=HIDDEN, intermediate_size=48, num_experts=12, top_k=3)
    return MoEConfig(**{**fields, **changes})


def make_routing(kind: str, num_tokens: int, num_experts: int, top_k: int, generator: torch.Generator) -> torch.Tensor:
    """int64 ``[T, K]`` of one of the routings that have broken exchanges elsewhere."""
    if kind == "uniform":
        scores = torch.rand(num_tokens, num_experts, generator=generator)
    elif kind == "zipf":
        scores = torch.rand(num_tokens, num_experts, generator=generator).log() * torch.arange(1, num_experts + 1)
    elif kind == "last_expert":
        return torch.full((num_tokens, top_k), num_experts - 1)
    elif kind == "first_rank":
        return torch.randint(0, 2, (num_tokens, top_k), generator=generator)
    elif kind == "none":
        return torch.full((num_tokens, top_k), -1)
    else:
        assert kind == "holes"
        index = torch.randint(-1, num_experts, (num_tokens, top_k), generator=generator)
        index[::3, 0] = num_experts + 7
        return index
    return scores.topk(top_k).indices


ROUTINGS = ("uniform", "zipf", "last_expert", "first_rank", "none", "holes")
# Tokens per rank; the last sends all tokens from one rank.
TOKENS = {2: ((9, 9), (0, 17), (0, 0)), 3: ((5, 0, 12),), 4: ((8, 8, 8, 8), (0, 0, 130, 0))}


def whole_batch(kind: str, tokens: tuple[int, ...], layer: MoEConfig, seed: int):
    generator = torch.Generator().manual_seed(seed)
    total = sum(tokens)
    hidden_states = torch.randn(total, HIDDEN, generator=generator)
    index = make_routing(kind, total, layer.num_experts, layer.top_k, generator)
    weights = torch.rand(total, layer.top_k, generator=generator)
    grad = torch.randn(total, HIDDEN, generator=generator)
    return hidden_states, index, weights, grad


def forward_backward(experts: Experts, hidden_states, index, weights, grad):
    hidden_states, weights = hidden_states.clone().requires_grad_(), weights.clone().requires_grad_()
    out = experts(hidden_states, index, weights)
    out.backward(grad)
    return out.detach(), hidden_states.grad, weights.grad


def same_bits_as_one_rank(rank: int, world_size: int, changes: dict, seed: int, dtype: torch.dtype) -> None:
    layer = config(**changes)
    torch.manual_seed(seed)
    single = Experts(layer, dtype=dtype)
    torch.manual_seed(seed)
    experts = Experts(layer, dist.group.WORLD, dtype=dtype)
    local = layer.num_experts // world_size
    mine = slice(rank * local, (rank + 1) * local)
    for tokens in TOKENS[world_size]:
        start = sum(tokens[:rank])
        part = slice(start, start + tokens[rank])
        for kind in ROUTINGS:
            batch = whole_batch(kind, tokens, layer, seed)
            single.zero_grad()
            experts.zero_grad()
            expected = forward_backward(single, *batch)
            actual = forward_backward(experts, *(tensor[part] for tensor in batch))
            case = f"{kind}, tokens {tokens}"
            for name, theirs, ours in zip(("output", "input grad", "weight grad"), expected, actual, strict=True):
                assert torch.equal(ours, theirs[part]), f"{case}: {name}"
            for name, parameter in single.named_parameters():
                ours = getattr(experts, name).grad.to_local() * world_size
                # The same rows in the same order; only the mean over ranks rounds.
                torch.testing.assert_close(
                    ours, parameter.grad[mine], rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0
                )


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_same_bits_as_one_rank(world_size, seed):
    run_ranks(same_bits_as_one_rank, world_size, dict(bias=True), seed, torch.float32)


def test_same_bits_with_one_expert_per_rank(seed):
    run_ranks(same_bits_as_one_rank, 4, dict(num_experts=4, top_k=2), seed, torch.float32)


def test_same_bits_in_bf16(seed):
    run_ranks(same_bits_as_one_rank, 2, {}, seed, torch.bfloat16)


def test_same_bits_in_fp8(seed):
    run_ranks(same_bits_as_one_rank, 2, dict(precision="fp8", num_experts=4, top_k=2), seed, torch.float32)


def rows_are_sorted_and_travel_once(rank: int, world_size: int, seed: int) -> None:
    exchange = CollectiveExchange(6, dist.group.WORLD)
    counts = [5, 0, 7][:world_size]
    generator = torch.Generator().manual_seed(seed)
    indices = [torch.randint(-1, 6, (count, 3), generator=generator) for count in counts]
    # Every row says where it comes from.
    index = indices[rank]
    tokens = torch.stack([torch.full((counts[rank],), float(rank)), torch.arange(counts[rank]).float()], dim=1)
    weights = (rank * 100 + torch.arange(counts[rank] * 3)).float().view(-1, 3)
    dispatched = exchange.dispatch(tokens, Routing(index, weights), torch.float32)

    local = 6 // world_size
    layout = dispatched.layout
    for expert, (start, end) in enumerate(layout.spans()):
        wanted = [
            (float(source), float(token), float(source * 100 + token * 3 + slot))
            for source in range(world_size)
            for token in range(counts[source])
            for slot in range(3)
            if indices[source][token, slot] == rank * local + expert
        ]
        actual = [
            (*row, weight)
            for row, weight in zip(
                dispatched.rows[start:end].tolist(), dispatched.row_weights[start:end].tolist(), strict=True
            )
        ]
        assert actual == wanted
    assert layout.counts.sum() == sum((i // local == rank).sum() for i in indices)
    padding = torch.ones(layout.num_rows, dtype=torch.bool)
    for start, end in layout.spans():
        padding[start:end] = False
    assert dispatched.rows[padding].eq(0).all() and dispatched.row_weights[padding].eq(0).all()

    needed = {(token, int(e) // local) for token, row in enumerate(index.tolist()) for e in row if e >= 0}
    assert sum(dispatched.handle.token_splits[0]) == len(needed)


@pytest.mark.parametrize("world_size", [2, 3])
def test_rows_are_sorted_and_travel_once(world_size, seed):
    run_ranks(rows_are_sorted_and_travel_once, world_size, seed)


def handles_are_independent(rank: int, world_size: int) -> None:
    """Two forward passes before two backward passes, in either order; gradients accumulate."""
    torch.manual_seed(0)
    moe = MoE(config(), dist.group.WORLD)
    torch.manual_seed(rank)
    batches = [torch.randn(6 + rank, HIDDEN), torch.randn(3, HIDDEN)]

    def gradients(order, together):
        moe.zero_grad()
        inputs = [batch.clone().requires_grad_() for batch in batches]
        if together:
            outputs = [moe(x) for x in inputs]
            for i in order:
                outputs[i].square().sum().backward(retain_graph=True)
        else:
            for i in order:
                moe(inputs[i]).square().sum().backward()
        return [x.grad for x in inputs] + [moe.experts.down_proj.grad.to_local().clone(), moe.router.weight.grad]

    one_by_one = gradients((0, 1), together=False)
    for order in ((0, 1), (1, 0)):
        for ours, theirs in zip(gradients(order, together=True), one_by_one, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_handles_are_independent():
    run_ranks(handles_are_independent, 2)


def checkpointing_recomputes(rank: int, world_size: int, use_reentrant: bool) -> None:
    torch.manual_seed(0)
    moe = MoE(config(), dist.group.WORLD)
    torch.manual_seed(rank)
    batch = torch.randn(5 * rank, HIDDEN)

    def run(call):
        moe.zero_grad()
        moe.router.tokens_per_expert.zero_()
        x = batch.clone().requires_grad_()
        y = call(x)
        y.square().sum().backward()
        return y.detach(), x.grad, moe.experts.down_proj.grad.to_local().clone(), moe.router.tokens_per_expert.clone()

    plain = run(moe)
    recomputed = run(lambda x: torch.utils.checkpoint.checkpoint(moe, x, use_reentrant=use_reentrant))
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))
    assert plain[3].sum() == batch.shape[0] * moe.config.top_k


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_recomputes(use_reentrant):
    run_ranks(checkpointing_recomputes, 2, use_reentrant)


def every_kind_of_group(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    torch.manual_seed(0)
    single = MoE(config())
    for group in (mesh["expert"], mesh.get_group("expert")):
        torch.manual_seed(0)
        moe = MoE(config(), group)
        assert moe.experts.expert_parallel_size == 2
        assert moe.experts.down_proj.shape == (12, HIDDEN, 48)
        assert moe.experts.down_proj.to_local().shape == (6, HIDDEN, 48)
        assert f"experts {6 * (rank % 2)}-" in repr(moe)
        torch.manual_seed(rank)
        x = torch.randn(4, HIDDEN)
        # Another rank's rows in the same GEMM may change the rounding of ours.
        assert_close(moe(x), single(x), 1e-6)
    with pytest.raises(MegaMoEError, match=r"must be one dimension, has 2.*mesh\[\"expert\"\]"):
        MoE(config(), mesh)
    with pytest.raises(MegaMoEError, match="must be a ProcessGroup"):
        MoE(config(), "expert")


def test_every_kind_of_group():
    run_ranks(every_kind_of_group, 4)


def construction_is_checked(rank: int, world_size: int) -> None:
    with pytest.raises(MegaMoEError, match="num_experts = 13.*multiple of.*2 ranks"):
        MoE(config(num_experts=13), dist.group.WORLD)
    with pytest.raises(MegaMoEError, match=r"'max_tokens_per_rank': \[64, 128\].*equal on all ranks"):
        MoE(config(max_tokens_per_rank=64 * (rank + 1)), dist.group.WORLD)
    with pytest.raises(MegaMoEError, match=r"'dtype': \['torch.float32', 'torch.bfloat16'\]"):
        MoE(config(), dist.group.WORLD, dtype=(torch.float32, torch.bfloat16)[rank])


def test_construction_is_checked_on_all_ranks():
    run_ranks(construction_is_checked, 2)


def one_rank_raises(rank: int, world_size: int, done_file: str, router: RouterConfig, where: str) -> float:
    moe = MoE(config(max_tokens_per_rank=8, router=router), dist.group.WORLD)
    start = time.monotonic()
    if rank == 1:
        with pytest.raises(MegaMoEError, match=r"= 9: exceeds max_tokens_per_rank = 8.*Raise max_tokens_per_rank"):
            moe.eval()(torch.randn(9, HIDDEN))
        # Alive, but never comes: the other rank's wait is bounded by the group's timeout.
        while not os.path.exists(done_file) and time.monotonic() < start + 60:
            time.sleep(0.05)
    else:
        with pytest.raises(ExchangeError, match=rf"{where}.*rank 0 of 2.*timeout"):
            moe(torch.randn(8, HIDDEN))
        open(done_file, "w").close()
    return time.monotonic() - start


@pytest.mark.parametrize(
    ("router", "where"),
    [(RouterConfig(), "phase 'sizes'"), (RouterConfig(aux_loss_coef=0.1), "load-balancing loss")],
    ids=["exchange", "balance"],
)
def test_one_rank_raises(tmp_path, router, where):
    seconds = run_ranks(one_rank_raises, 2, str(tmp_path / "done"), router, where, collective_timeout=4.0)
    assert 3.0 < seconds[0] < 30.0


def one_rank_dies(rank: int, world_size: int) -> str:
    moe = MoE(config(), dist.group.WORLD)
    x = torch.randn(4, HIDDEN, requires_grad=True)
    y = moe(x)
    if rank == 1:
        os._exit(17)
    with pytest.raises(ExchangeError, match="phase 'dispatch'"):
        y.sum().backward()
    return "raised"


def test_one_rank_dies_before_backward():
    with pytest.raises(RankFailed, match=r"exit code") as failure:
        run_ranks(one_rank_dies, 2, collective_timeout=5.0)
    assert "rank 0" not in str(failure.value)
