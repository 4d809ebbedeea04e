"""Shared experts that are computed with the routed ones: against layers of plain routed experts, on every path."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megamoe import DecodeRunner, ExpertPlacement, Experts, MoE, MoEConfig, RouterConfig, rebalance
from megamoe.comm.exchange import LocalExchange
from megamoe.kernels import weight_cache
from megamoe.kernels.mlp_joined import SharedWeights
from megamoe.layers.parallel import local_tensor
from tests.support.errors import fails
from tests.support.metrics import assert_close
from tests.support.processes import run_ranks

BF16, FP32 = torch.bfloat16, torch.float32
HIDDEN, EXPERTS, TOP_K = 256, 4, 2


def config_of(width: int = 100, shared: int = 2, **changes) -> MoEConfig:
    fields = dict(
        router=RouterConfig(score="sigmoid"),
        precision="fp8",
        shared_intermediate_size=shared * width,
        fuse_shared_experts=True,
        max_tokens_per_rank=16,
    )
    return MoEConfig(HIDDEN, width, EXPERTS, TOP_K, **{**fields, **changes})


def make_layer(config: MoEConfig, dtype: torch.dtype = FP32) -> MoE:
    """In which the shared experts' share is as large as all others'."""
    moe = MoE(config, dtype=dtype).eval()
    with torch.no_grad():
        moe.shared_experts.down_proj.mul_(2)
    return moe


def as_routed(moe: MoE, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The layer on one rank, whose shared experts are routed ones that all tokens choose last."""
    config = moe.config
    count = config.shared_intermediate_size // config.intermediate_size
    sizes = dict(num_experts=EXPERTS + count, top_k=TOP_K + count, shared_intermediate_size=0)
    plain = dict(shared_gate=False, fuse_shared_experts=False)
    experts = Experts(replace(config, **sizes, **plain), dtype=moe.experts.down_proj.dtype).eval()
    halves = moe.shared_experts.gate_up_proj.chunk(2)
    ups = [torch.cat(parts) for parts in zip(*(half.chunk(count) for half in halves), strict=True)]
    downs = moe.shared_experts.down_proj.chunk(count, dim=1)
    with torch.no_grad():
        experts.gate_up_proj.copy_(torch.cat([moe.experts.gate_up_proj, torch.stack(ups)]))
        experts.down_proj.copy_(torch.cat([moe.experts.down_proj, torch.stack(downs)]))
        routing = moe.router(x, mask)
        last = torch.arange(EXPERTS, EXPERTS + count).expand(len(x), -1)
        weights = torch.ones(last.shape)
        if moe.shared_experts.shared_gate is not None:
            weights *= (x.float() @ moe.shared_experts.shared_gate.float().t()).sigmoid()
        return experts(x, torch.cat([routing.topk_index, last], 1), torch.cat([routing.topk_weights, weights], 1))


MASKS = {
    "all": torch.ones(9, dtype=torch.bool),
    "some": torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1]).bool(),
    "none": torch.zeros(9, dtype=torch.bool),
}
FORMS = pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        (dict(), FP32),
        (dict(width=128, shared=1, activation="swiglu_oai", shared_gate=True), BF16),
        (dict(width=20, shared=3, activation="geglu", activation_clamp=0.5, shared_gate=True), FP32),
    ],
    ids=["2 padded", "1 with gate", "3 with gate"],
)


# ---------------------------------------------------------------- one rank


@FORMS
@pytest.mark.parametrize("path", ["collective", "staged"])
def test_bits_of_routed_experts(changes, dtype, path, seed):
    """The order of sums too. Masked tokens get the shared experts' share; statistics count routed rows alone."""
    torch.manual_seed(seed)
    moe = make_layer(config_of(**changes), dtype)
    there = MoE(moe.config, path=path, dtype=dtype).eval()
    there.load_state_dict(moe.state_dict())
    x = torch.randn(9, HIDDEN).to(dtype)
    for mask in MASKS.values():
        there.experts.slots.rows_received.zero_()
        with torch.no_grad():
            out = there(x, mask)
        assert torch.equal(out, as_routed(moe, x, mask)) and out.any(dim=1).all()
        assert there.experts.slots.rows_received.sum() == TOP_K * mask.sum()
    with torch.no_grad():
        assert there(x[:0]).shape == (0, HIDDEN)


@FORMS
def test_close_to_the_dense_layer(changes, dtype, seed):
    """FP8 instead of the parameters' dtype; without the shared experts the error would be near 1."""
    moe = make_layer(config_of(**changes), dtype)
    dense = MoE(replace(moe.config, fuse_shared_experts=False), dtype=dtype).eval()
    dense.load_state_dict(moe.state_dict())
    x = torch.randn(9, HIDDEN).to(dtype)
    with torch.no_grad():
        for mask in MASKS.values():
            assert_close(moe(x, mask), dense(x, mask), 0.12)
            assert not torch.equal(moe(x, mask), dense(x, mask))


@FORMS
def test_training_keeps_the_dense_layer(changes, dtype, seed):
    """Bits of outputs and gradients, in evaluation mode too. Without recorded gradients the mode does not matter."""
    moe = make_layer(config_of(**changes), dtype)
    dense = MoE(replace(moe.config, fuse_shared_experts=False), dtype=dtype)
    dense.load_state_dict(moe.state_dict())
    x = torch.randn(9, HIDDEN).to(dtype)
    with torch.no_grad():
        fused = moe(x)
    for training in (True, False):
        outs = []
        for each in (moe.train(training), dense.train(training)):
            each.zero_grad()
            outs.append(each(x))
            outs[-1].square().sum().backward()
        assert torch.equal(*outs)
        for (name, mine), theirs in zip(moe.named_parameters(), dense.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad) and mine.grad.any(), name
        with torch.no_grad():
            assert torch.equal(moe(x), fused)
    moe.requires_grad_(False)
    assert torch.equal(moe(x), fused)
    assert torch.equal(moe(x.requires_grad_()), dense(x)), "the token wants a gradient"


def test_one_copy_of_each_weight(seed):
    """Training's copy is part of the joint one, whichever came first."""
    for order in ((True, False), (False, True)):
        moe = make_layer(config_of())
        for trained in order:
            with torch.set_grad_enabled(trained):
                moe(torch.randn(3, HIDDEN))
        for weight in (moe.experts.gate_up_proj, moe.experts.down_proj, *moe.shared_experts.weights):
            assert len(weight_cache._find(weight).copies) == 1
        assert weight_cache._find(moe.shared_experts.weights.up).copies.popitem()[1].transposed is None


def _edit(moe: MoE) -> None:
    with torch.no_grad():
        for parameter in moe.shared_experts.parameters():
            parameter.mul_(-1.5)


def _step(moe: MoE) -> None:
    optimizer = torch.optim.AdamW(moe.parameters(), lr=0.05)
    moe(torch.randn(5, HIDDEN)).square().sum().backward()
    optimizer.step()


def _load(moe: MoE, assign: bool) -> None:
    state = {name: nn.Parameter(1.25 * tensor.clone()) for name, tensor in moe.state_dict().items()}
    moe.load_state_dict(state, assign=assign)


def _replace(moe: MoE) -> None:
    moe.shared_experts.down_proj = nn.Parameter(torch.randn_like(moe.shared_experts.down_proj))


CHANGES = {
    "edit": _edit,
    "optimizer": _step,
    "load_state_dict": lambda moe: _load(moe, False),
    "assigned": lambda moe: _load(moe, True),
    "another parameter": _replace,
    "reset_parameters": lambda moe: moe.reset_parameters(),
    "another dtype": lambda moe: moe.bfloat16(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_are_seen(change, seed):
    moe = make_layer(config_of(shared_gate=True))
    for each in (moe, copy.deepcopy(moe)):
        for _ in range(2):
            x = torch.randn(9, HIDDEN).to(each.experts.down_proj.dtype)
            with torch.no_grad():
                before = each(x)
            CHANGES[change](each)
            x = x.to(each.experts.down_proj.dtype)
            with torch.no_grad():
                after = each(x)
            assert torch.equal(after, as_routed(each, x))
            assert change == "another dtype" or not torch.equal(after, before)


def test_decode_runner(seed):
    """Copies are current when a graph is replayed; padding has no effect."""
    moe = make_layer(config_of(), BF16)
    runner = DecodeRunner(moe, HIDDEN, (4, 16))
    for tokens in (3, 0, 16, 4):
        x = torch.randn(tokens, HIDDEN).to(BF16)
        assert torch.equal(runner(x), as_routed(moe, x))
    bucket = runner._buckets[4]
    bucket.graph, bucket.out = SimpleNamespace(replay=lambda: None), bucket.hidden_states
    runner._steps.clear()
    experts = moe.experts
    joined = weight_cache.joined_copies(
        experts.down_proj, moe.shared_experts.weights.experts(100)[1], weight_cache.Padding(1, 16, 128)
    )
    for weight in (moe.shared_experts.down_proj, experts.down_proj):
        old = joined.codes.clone()
        with torch.no_grad():
            weight.neg_()
        runner(torch.randn(2, HIDDEN).to(BF16))
        changed = (joined.codes.view(torch.uint8) != old.view(torch.uint8)).flatten(1).any(1).tolist()
        assert changed == [weight is experts.down_proj] * EXPERTS + [weight is not experts.down_proj] * 2


def test_compiled(seed):
    """One graph, with the bits of eager calls; copies follow their weights."""
    moe = make_layer(config_of(shared_gate=True), BF16)
    torch._dynamo.reset()
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for tokens in (5, 9, 5):
            x = torch.randn(tokens, HIDDEN).bfloat16()
            mask = torch.rand(tokens) < 0.7
            assert torch.equal(compiled(x, mask), moe(x, mask))
            moe.shared_experts.gate_up_proj.neg_()
            moe.experts.down_proj.mul_(2)
    torch._dynamo.reset()


def test_experts_alone(seed):
    """Whoever calls them without the shared ones gets the routed ones."""
    moe = make_layer(config_of())
    plain = Experts(replace(moe.config, fuse_shared_experts=False)).eval()
    plain.load_state_dict(moe.experts.state_dict())
    x, index, weights = torch.randn(5, HIDDEN), torch.randint(-1, 4, (5, 2)), torch.rand(5, 2)
    with torch.no_grad():
        assert torch.equal(moe.experts(x, index, weights), plain(x, index, weights))


def test_shared_experts_that_cannot_be_fused_are_refused(seed):
    """Instead of results without gradients."""
    moe, dense = make_layer(config_of()), MoE(config_of(fuse_shared_experts=False))
    call = torch.randn(5, HIDDEN), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    for layer, recorded in ((moe, True), (dense, False)):
        with torch.set_grad_enabled(recorded), fails(ValueError, "shared", "SharedExperts", "cannot be fused"):
            layer.experts(*call, layer.shared_experts)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(precision="bf16"), "BF16 weights are not copied"),
        (dict(activation="relu2"), "the mega-kernel has no activation without gate (relu2)"),
        (dict(bias=True), "the routed experts have biases, and the shared one has none"),
        (dict(shared_intermediate_size=150), "its width 150 is no multiple of intermediate_size = 100"),
        (dict(shared_intermediate_size=1500), "top_k = 2 and 15 more slots are beyond the mega-kernel's 16"),
    ],
)
def test_what_cannot_be_fused_stays_dense(changes, reason, caplog, seed):
    with caplog.at_level(logging.WARNING, "megamoe"):
        moe = MoE(config_of(**changes)).eval()
    assert f"shared     dense: {reason}" in caplog.text and reason in moe.explain().splitlines()[2]
    dense = MoE(replace(moe.config, fuse_shared_experts=False)).eval()
    dense.load_state_dict(moe.state_dict())
    x = torch.randn(5, HIDDEN)
    with torch.no_grad():
        assert torch.equal(moe(x), dense(x))
    assert len(dense.explain().splitlines()) == 2


def test_explain():
    assert make_layer(config_of()).explain().splitlines() == [
        "inference  collective: as asked for",
        "training   collective: as asked for",
        "shared     fused: with the routed experts, in FP8, where no gradients are recorded",
    ]


# ---------------------------------------------------------------- several ranks


def two_ranks(rank: int, ranks: int, seed: int) -> None:
    torch.manual_seed(seed)
    full = make_layer(config_of(shared_gate=True))
    moe = MoE(full.config, dist.group.WORLD).eval()
    here = slice(rank * 2, rank * 2 + 2)
    with torch.no_grad():
        for name, parameter in moe.named_parameters():
            whole = full.get_parameter(name)
            local_tensor(parameter).copy_(whole[here] if name.startswith("experts.") else whole)

    def check(tokens: list[int], what: str) -> None:
        x, mask = torch.randn(sum(tokens), HIDDEN), torch.rand(sum(tokens)) < 0.8
        with torch.no_grad():
            out = moe(x.split(tokens)[rank], mask.split(tokens)[rank])
            # A GEMM with other rows beside it may round another way.
            assert_close(out, full(x, mask).split(tokens)[rank], 0.01, what)

    for tokens in ([9, 3], [0, 7], [5, 0], [0, 0]):
        check(tokens, str(tokens))
    assert moe.experts.slots.rows_received.sum() > 0
    # Each rank's shared experts, not the first one's.
    with torch.no_grad():
        for each in (moe, full):
            each.shared_experts.down_proj.mul_(1 + rank)
    check([6, 6], "shared experts that differ")
    with torch.no_grad():
        for each in (moe, full):
            each.shared_experts.down_proj.div_(1 + rank)
    # In place, with replicas (more slots), and back.
    even = ExpertPlacement.even(EXPERTS, ranks)
    for placement in (
        ExpertPlacement(EXPERTS, ((3, 0), (2, 1))),
        ExpertPlacement(EXPERTS, ((3, 0, 1), (2, 1, 3))),
        even,
    ):
        rebalance(moe, placement)
        check([9, 4], str(placement.experts_by_rank))
        check([0, 4], str(placement.experts_by_rank))
    moe.train()
    out = moe(torch.randn(3 + rank, HIDDEN))
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in moe.parameters())
    runner = DecodeRunner(moe.eval(), HIDDEN, (1, 8), dtype=FP32)
    x = torch.randn(11, HIDDEN)
    with torch.no_grad():
        assert_close(runner(x.split([8, 3])[rank]), full(x).split([8, 3])[rank], 0.01)


def test_two_ranks(seed):
    run_ranks(two_ranks, 2, seed)


# ---------------------------------------------------------------- the mega-kernel


@pytest.fixture
def any_device(monkeypatch):
    """The simulator runs the kernel on the CPU."""
    pytest.importorskip("triton.experimental.gluon")
    pytest.importorskip("greenlet")
    from megamoe.layers import fused

    monkeypatch.setattr(fused, "device_obstacle", lambda device, fp8: "")


def on_rank(full: MoE, rank: int, exchange, fused: bool) -> MoE:
    """The layer of a rank; ``exchange``: between all its experts, shared ones included."""
    from megamoe.layers.fused import fused_experts
    from megamoe.layers.replicas import ExpertSlots
    from tests.support.mega_sim import SETTINGS

    moe = copy.deepcopy(full)
    ranks = exchange.memory_plan.ep_size
    local = EXPERTS // ranks
    for name, parameter in list(moe.experts.named_parameters(recurse=False)):
        setattr(moe.experts, name, nn.Parameter(parameter.detach()[rank * local : (rank + 1) * local].clone()))
    # Asked for its sizes alone.
    moe.experts.exchange = LocalExchange(EXPERTS)
    moe.experts.exchange.num_local_experts = local
    moe.experts.slots = ExpertSlots(ExpertPlacement.even(EXPERTS, ranks), rank, torch.device("cpu"))
    transport = moe.experts._transport
    transport.exchange_with_shared = exchange
    if fused:
        plan = exchange.memory_plan
        transport._fused = fused_experts(exchange.buffer, plan, 128, settings=SETTINGS)
    return moe


def test_compiled_around_the_mega_kernel(any_device, seed):
    """Counts of routed experts alone leave the operator."""
    from tests.support.mega_sim import MegaSizes
    from tests.support.peer_world import run_peers

    full = make_layer(config_of(shared_gate=True), BF16)

    def run(rank: int, exchange):
        moe = on_rank(full, rank, exchange, True)
        torch._dynamo.reset()
        compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
        x, mask = torch.randn(5, HIDDEN).to(BF16), torch.tensor([1, 1, 0, 1, 1]).bool()
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(compiled(x, mask), moe(x, mask))
                moe.shared_experts.down_proj.neg_()
        assert moe.experts.slots.rows_received.sum() == 4 * 4 * TOP_K

    run_peers(MegaSizes(1, 9, TOP_K + 2, EXPERTS + 2, HIDDEN, intermediate=128), run)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("ranks", "calls"),
    [(1, [(9,), (0,)]), (2, [(7, 2), (0, 3), (0, 0)]), (4, [(1, 0, 2, 3)])],
    ids=["1 rank", "2 ranks", "4 ranks"],
)
@pytest.mark.parametrize("gate", [False, True], ids=["no gate", "gate"])
def test_by_the_mega_kernel(ranks, calls, gate, any_device, seed):
    """And by the exchange's kernels between separate GEMMs."""
    from tests.support.mega_sim import MegaSizes, Tokens, check_close, expected_outputs
    from tests.support.peer_world import run_peers

    shared, width = (2, 100) if gate else (1, 128)
    full = make_layer(config_of(width, shared, shared_gate=gate), BF16)
    local = EXPERTS // ranks + shared
    sizes = MegaSizes(ranks, 9, TOP_K + shared, local * ranks, HIDDEN, intermediate=128)
    inputs = [[(torch.randn(n, HIDDEN).to(BF16), torch.rand(n) < 0.7) for n in tokens] for tokens in calls]
    seen: list[dict[int, Tokens]] = [{} for _ in calls]

    def run(rank: int, exchange):
        outs = []
        for fused in (True, False):
            moe = on_rank(full, rank, exchange, fused)
            for place, call in enumerate(inputs):
                x, mask = call[rank]
                with torch.no_grad():
                    outs.append(moe(x, mask))
                    routing = moe.experts._with_shared_slots(moe.router(x, mask), x, moe.shared_experts)
                seen[place][rank] = Tokens(x, routing.topk_index, routing.topk_weights)
            received = moe.experts.slots.rows_received[rank * (local - shared) : (rank + 1) * (local - shared)]
            outs.append(received)
        return outs

    results = run_peers(sizes, run)
    weights = full.experts.gate_up_proj.detach(), full.experts.down_proj.detach()
    weights = [
        [weight[rank * (local - shared) : (rank + 1) * (local - shared)] for weight in weights] for rank in range(ranks)
    ]
    more = SharedWeights(*full.shared_experts.weights).experts(width)
    paddings = weight_cache.Padding(2, 128, 16), weight_cache.Padding(1, 16, 128)
    experts = [
        tuple(weight_cache.joined_copies(*each) for each in zip(mine, more, paddings, strict=True)) for mine in weights
    ]
    for place in range(len(calls)):
        tokens = [seen[place][rank] for rank in range(ranks)]
        wanted = expected_outputs(sizes, experts, tokens)
        for rank in range(ranks):
            by_kernel, by_exchange = (results[rank][place + turn * (len(calls) + 1)] for turn in (0, 1))
            check_close(rank, by_kernel, wanted[rank])
            check_close(rank, by_exchange, wanted[rank])
            assert by_kernel.any(dim=1).all()
    index = torch.cat([tokens.index[:, :TOP_K] for each in seen for tokens in each.values()])
    assert sum(int(outs[len(calls)].sum()) for outs in results) == int((index >= 0).sum())
