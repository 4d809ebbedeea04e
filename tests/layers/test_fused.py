"""``mega_moe`` and layers that use it: whole calls by the simulator, and what is refused before any launch."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

import torch  # noqa: E402

from megamoe import MoE, MoEConfig, RouterConfig, Routing, mega_moe  # noqa: E402
from megamoe.comm.peer import PeerExchange  # noqa: E402
from megamoe.comm.symm import SymmetricBuffer  # noqa: E402
from megamoe.kernels import mega, mlp_fp8, weight_cache  # noqa: E402
from megamoe.kernels.mega_plan import MegaSettings  # noqa: E402
from megamoe.kernels.mlp_options import MlpOptions  # noqa: E402
from megamoe.layers import fused  # noqa: E402
from megamoe.layers.fused import fused_experts  # noqa: E402
from megamoe.plan import plan_memory  # noqa: E402
from megamoe.types import Fp8Tensor  # noqa: E402
from tests.support.errors import fails  # noqa: E402
from tests.support.exchange_sim import Tokens, make_tokens, poisoned  # noqa: E402
from tests.support.mega_sim import (  # noqa: E402
    SETTINGS,
    MegaSizes,
    Weights,
    check_close,
    expected_outputs,
    weights_of,
)
from tests.support.peer_world import on_rank, run_peers  # noqa: E402

TWO = MegaSizes(tokens=8, intermediate=128)
ONE = replace(TWO, ranks=1)
PRECISIONS = pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def any_device(monkeypatch):
    """The simulator runs the kernel on the CPU."""
    monkeypatch.setattr(fused, "device_obstacle", lambda device, fp8: "")


def weights(rank: int, sizes: MegaSizes) -> Weights:
    return weights_of(rank, sizes.local, sizes.hidden, sizes.intermediate, sizes.fp8)


def routing_of(mine: Tokens) -> Routing:
    return Routing(mine.index, mine.weights)


def call(rank: int, exchange: PeerExchange, mine: Tokens, sizes: MegaSizes, **options) -> torch.Tensor:
    options = {"settings": SETTINGS, **options}
    return mega_moe(mine.x, routing_of(mine), *weights(rank, sizes), exchange.buffer, **options)


# ---------------------------------------------------------------- the function


@PRECISIONS
def test_outputs_and_counts(fp8, seed):
    """Also of strided tokens with int32 ids and weights in BF16, into a strided tensor of another dtype."""
    sizes = replace(TWO, fp8=fp8)
    tokens = make_tokens(sizes, [8, 3], "holes")
    for mine in tokens:
        mine.weights = mine.weights.bfloat16().float()

    def run(rank: int, exchange: PeerExchange):
        mine = tokens[rank]
        counts = torch.full((TWO.local,), 5, dtype=torch.int32)
        out = call(rank, exchange, mine, sizes, expert_counts=counts)
        assert call(rank, exchange, mine, sizes, out=out, expert_counts=counts) is out
        odd = replace(
            mine,
            x=mine.x.t().contiguous().t(),
            index=mine.index.int().t().contiguous().t(),
            weights=mine.weights.bfloat16(),
        )
        wide = poisoned(len(out), 2 * TWO.hidden, dtype=FP32)
        # In a pool of two blocks.
        pool = 2 * 128 * (TWO.hidden + TWO.intermediate) * 2
        call(rank, exchange, odd, sizes, out=wide[:, : TWO.hidden], tokens_bound=8, pool_bytes=pool)
        assert torch.equal(wide[:, : TWO.hidden].bfloat16(), out) and wide[:, TWO.hidden :].isnan().all()
        # All of these calls share their memory.
        assert len(exchange.buffer.attached["scratch"]) == 1
        return out, counts

    results = run_peers(sizes, run)
    index = torch.cat([mine.index for mine in tokens]).flatten()
    for rank, (out, counts) in enumerate(results):
        check_close(rank, out, expected_outputs(sizes, [weights(r, sizes) for r in range(2)], tokens)[rank], fp8)
        wanted = [5 + 2 * int((index == rank * TWO.local + expert).sum()) for expert in range(TWO.local)]
        assert counts.tolist() == wanted


@PRECISIONS
def test_compiled(fp8, seed):
    """One graph, with the bits of eager calls, in the order of the code."""
    sizes = replace(ONE, fp8=fp8)
    tokens = make_tokens(sizes, [8])[0]
    torch._dynamo.reset()

    up, down = weights(0, sizes)
    biases = dict(gate_up_bias=torch.randn(4, 256), down_bias=torch.randn(256, 4).t().bfloat16()) if fp8 else {}

    def run(rank: int, exchange: PeerExchange):
        def twice(x, index, topk_weights, counts, out):
            options = dict(settings=SETTINGS, expert_counts=counts, clamp=0.5, **biases)
            for turn in range(2):
                routing = Routing(index, topk_weights)
                result = mega_moe(x, routing, up, down, exchange.buffer, out=(None, out)[turn], **options)
                x = 2 * result.bfloat16()
            return x

        results = []
        for function in (twice, torch.compile(twice, fullgraph=True, backend="aot_eager")):
            counts, out = torch.zeros(ONE.local, dtype=torch.int64), torch.empty(8, ONE.hidden)
            results.append((function(tokens.x, tokens.index, tokens.weights, counts, out), counts, out))
        for eager, compiled in zip(*results, strict=True):
            assert torch.equal(eager, compiled) and eager.any()

    run_peers(sizes, run)
    torch._dynamo.reset()


def test_scratch_is_shared_by_size_and_goes_with_the_buffer():
    plan = plan_memory(ONE.config, 1, 8)
    with SymmetricBuffer(plan, device=torch.device("cpu")) as buffer:
        small = fused_experts(buffer, plan, 128, settings=SETTINGS)
        assert fused_experts(buffer, plan, 128, settings=replace(SETTINGS)) is small
        assert not buffer.attached.get("scratch")
        small.scratch()
        large = fused_experts(buffer, plan, 256, settings=SETTINGS)
        large.scratch()
        middle = fused_experts(buffer, plan, 256, settings=SETTINGS, num_rows=512)
        pooled = fused_experts(buffer, plan, 256, settings=SETTINGS, pool_bytes=1 << 18)
        assert middle is not large and pooled is not large and pooled.plan.pool_bytes <= 1 << 18 < large.plan.pool_bytes
        # As much as the config says.
        bounded = plan_memory(replace(ONE.config, pool_bytes=1 << 18), 1, 8)
        assert fused_experts(buffer, bounded, 256, settings=SETTINGS).plan.regions == pooled.plan.regions
        addresses = [each.scratch()["counts"].data_ptr() for each in (small, large, middle)]
        assert addresses[0] != addresses[1] == addresses[2]
        assert [piece.numel() for piece in buffer.attached["scratch"]] == [small.plan.total, large.plan.total]
    assert not buffer.attached
    with fails(ValueError, "SymmetricBuffer", "closed", "must be open"):
        fused_experts(buffer, plan, 128, settings=SETTINGS)


# ---------------------------------------------------------------- the layer

CONFIG = MoEConfig(
    256, 100, 4, 2, router=RouterConfig(score="sigmoid"), precision="fp8", activation="swiglu_oai",
    shared_intermediate_size=64, max_tokens_per_rank=8,
)  # fmt: skip


def use_kernel(moe: MoE, exchange: PeerExchange) -> MoE:
    buffer, plan = exchange.buffer, exchange.memory_plan
    moe.experts._transport._fused = fused_experts(buffer, plan, 128, settings=SETTINGS)
    return moe


@pytest.fixture
def kernel_calls(monkeypatch):
    """Sizes of the mega-kernel's calls."""
    calls = []
    run = fused.FusedExperts.run

    def counted(self, x, *arguments):
        calls.append(len(x))
        return run(self, x, *arguments)

    monkeypatch.setattr(fused.FusedExperts, "run", counted)
    return calls


def config_of(fp8: bool) -> MoEConfig:
    """FP8 copies pad I, BF16 weights are taken as they are."""
    return CONFIG if fp8 else replace(CONFIG, precision="bf16", intermediate_size=128)


@PRECISIONS
def test_layer(kernel_calls, fp8, seed):
    """Inference by the mega-kernel, training by separate kernels, over the same memory."""
    full = MoE(config_of(fp8), dtype=BF16).eval()
    counts = [7, 0]
    x = torch.randn(7, 256).bfloat16()
    parts = x.split(counts)

    def run(rank: int, exchange: PeerExchange):
        moe = use_kernel(on_rank(full, rank, exchange), exchange)
        with torch.no_grad():
            out = moe(parts[rank])
        theirs = parts[rank].clone().requires_grad_()
        moe(theirs).sum().backward()
        with torch.no_grad():
            wide = moe(parts[rank].float().requires_grad_())
        # One copy of each weight serves both ways.
        for weight in (moe.experts.gate_up_proj, moe.experts.down_proj) if fp8 else ():
            assert len(weight_cache._find(weight).copies) == 1
        return out, wide, theirs.grad, moe.experts.slots.rows_received

    results = run_peers(replace(TWO, hidden=256, experts=4, fp8=fp8), run)
    theirs = x.clone().requires_grad_()
    expected = full(theirs)
    expected.sum().backward()
    received = full.experts.slots.rows_received
    for rank, (out, wide, grad, rows) in enumerate(results):
        assert out.dtype == BF16 and wide.dtype == FP32
        # The shared expert's share is added to a rounded sum.
        check_close(rank, out, expected.split(counts)[rank].float(), fp8)
        check_close(rank, wide.bfloat16(), expected.split(counts)[rank].float())
        check_close(rank, grad, theirs.grad.split(counts)[rank].float())
        # Three calls of theirs, one of ours.
        assert torch.equal(rows[rank * 2 : rank * 2 + 2], 3 * received[rank * 2 : rank * 2 + 2])
    assert sorted(kernel_calls) == [0, 0, 7, 7]


@PRECISIONS
def test_compiled_layer(kernel_calls, fp8, seed):
    """Weights are cast, and biases padded, inside the operator: the copies follow them."""
    moe = MoE(replace(config_of(fp8), bias=True), dtype=BF16).eval()
    torch.nn.init.normal_(moe.experts.gate_up_proj_bias)
    x = torch.randn(5, 256).bfloat16()
    torch._dynamo.reset()

    def run(rank: int, exchange: PeerExchange):
        use_kernel(moe, exchange)
        compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(compiled(x), moe(x))
                moe.experts.down_proj.mul_(-0.5)
                moe.experts.gate_up_proj_bias.mul_(-2)
        assert kernel_calls == [5] * 4

    run_peers(replace(ONE, hidden=256, experts=4, fp8=fp8), run)
    torch._dynamo.reset()


def test_bf16_copies_of_wider_weights(seed):
    """Autocast leaves parameters in fp32."""
    mine = make_tokens(ONE, [5])[0]
    up, down = weights(0, replace(ONE, fp8=False))
    exact = [weight.float() for weight in (up, down)]
    strided = [weight.mT.contiguous().mT for weight in exact]

    def run(rank: int, exchange: PeerExchange):
        calls = fused_experts(exchange.buffer, exchange.memory_plan, 128, settings=SETTINGS)
        options = dict(activation="swiglu", clamp=None)
        results = [calls(mine.x, routing_of(mine), *pair, **options)[0] for pair in ((up, down), exact, strided)]
        assert results[0].any() and all(torch.equal(results[0], other) for other in results[1:])

    run_peers(replace(ONE, fp8=False), run)


def test_copies_have_the_form_of_the_separate_kernels():
    assert mlp_fp8._paddings(MlpOptions("swiglu")) == (fused.UP_PADDING, fused.DOWN_PADDING)


# ---------------------------------------------------------------- what is refused


@pytest.fixture(scope="module")
def plain_buffer():
    with SymmetricBuffer(plan_memory(ONE.config, 1, 8), device=torch.device("cpu")) as buffer:
        yield buffer


def refused(buffer, /, **changes):
    """A call whose arguments are those of a good one, but for ``changes``."""
    mine = make_tokens(ONE, [3])[0]
    up, down = weights(0, ONE)
    arguments = dict(
        x=mine.x, routing=routing_of(mine), gate_up_proj=up, down_proj=down, buffer=buffer, settings=SETTINGS
    )
    mega_moe(**{**arguments, **changes})


def changed(weight: Fp8Tensor, **changes) -> Fp8Tensor:
    return replace(weight, **changes)


UP, DOWN = weights_of(0, 4, 256, 128)
INDEX, WEIGHTS = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
CASES = {
    "x is no tensor": (dict(x=1), TypeError, "x", "int", "must be a torch.Tensor"),
    "x dtype": (dict(x=torch.zeros(3, 256)), TypeError, "x.dtype", FP32, "must be one of torch.bfloat16"),
    "x width": (dict(x=torch.zeros(3, 128).bfloat16()), ValueError, "x.shape", [3, 128], "must be [any, 256]"),
    "routing": (dict(routing=(INDEX, WEIGHTS)), TypeError, "routing", "tuple", "must be a Routing"),
    "slots": (
        dict(routing=Routing(INDEX[:, :1], WEIGHTS[:, :1])),
        ValueError, "routing.topk_index.shape", [3, 1], "must be [3, 2]",
    ),
    "ids": (
        dict(routing=Routing(INDEX.float(), WEIGHTS)),
        TypeError, "routing.topk_index.dtype", FP32, "must be one of torch.int64",
    ),
    "routing weights": (
        dict(routing=Routing(INDEX, WEIGHTS.int())),
        TypeError, "routing.topk_weights.dtype", torch.int32, "must be one of",
    ),
    "too many tokens": (
        dict(x=torch.zeros(9, 256).bfloat16(), routing=Routing(INDEX.repeat(3, 1), WEIGHTS.repeat(3, 1))),
        ValueError, "tokens", 9, "must not exceed the 8",
    ),
    "plain weights": (dict(down_proj=DOWN.codes), TypeError, "down_proj", "Tensor", "must be an Fp8Tensor"),
    "blocks": (
        dict(down_proj=changed(DOWN, block=(1, 128))), ValueError, "down_proj.block", (1, 128), "must be (128, 128)"
    ),
    "strides": (
        dict(gate_up_proj=changed(UP, codes=UP.codes.mT.contiguous().mT)),
        ValueError, "gate_up_proj.codes.stride()", (65536, 1, 256), "must be contiguous",
    ),
    "unlike weights": (
        dict(gate_up_proj=changed(UP, codes=UP.codes[:, :128].contiguous(), scales=UP.scales[:, :1].contiguous())),
        ValueError, "gate_up_proj.codes.shape", [4, 128, 256], "must be [4, 256, 256]",
    ),
    "another layer's buffer": (
        dict(
            gate_up_proj=changed(UP, codes=UP.codes[:2], scales=UP.scales[:2]),
            down_proj=changed(DOWN, codes=DOWN.codes[:2], scales=DOWN.scales[:2]),
        ),
        ValueError, "down_proj.codes.shape", [2, 256, 128], "must be [4, 256, I] for the memory of this config",
    ),
    "no buffer": (dict(buffer="mine"), TypeError, "buffer", "str", "must be a SymmetricBuffer"),
    "no plan": (dict(plan=8), TypeError, "plan", "int", "must be a MemoryPlan"),
    "activation": (dict(activation="relu2"), ValueError, "activation", "relu2", "must be one of 'swiglu'"),
    "clamp": (dict(clamp=0.0), ValueError, "clamp", 0.0, "must be finite and > 0"),
    "out shape": (dict(out=torch.zeros(2, 256).bfloat16()), ValueError, "out.shape", [2, 256], "must be [3, 256]"),
    "out dtype": (
        dict(out=torch.zeros(3, 256, dtype=torch.float64)), TypeError, "out.dtype", torch.float64, "must be one of"
    ),
    "out strides": (
        dict(out=torch.zeros(256, 3).bfloat16().t()), ValueError, "out.stride()", (1, 3), "must be 1 along H"
    ),
    "counts": (
        dict(expert_counts=torch.zeros(3, dtype=torch.int64)), ValueError, "expert_counts.shape", [3], "must be [4]"
    ),
    "bound": (dict(tokens_bound=2), ValueError, "tokens_bound", 2, "must not be below this rank's 3 tokens"),
    "one bias": (dict(gate_up_bias=torch.zeros(4, 256)), ValueError, "down_bias", None, "must not be None"),
    "bias shape": (
        dict(gate_up_bias=torch.zeros(4, 256), down_bias=torch.zeros(4, 128)),
        ValueError, "down_bias.shape", [4, 128], "must be [4, 256]",
    ),
    "bias gradients": (
        dict(gate_up_bias=torch.zeros(4, 256), down_bias=torch.zeros(4, 256).requires_grad_()),
        ValueError, "down_bias", "requires_grad", "gets no gradient",
    ),
    "rows": (dict(num_rows=100), ValueError, "num_rows", 100, "must be at least 128"),
    "pool": (
        dict(pool_bytes=128 * 396), ValueError, "pool_bytes", 128 * 396, "must hold lag + group = 2 blocks"
    ),
    "settings": (dict(settings=4), TypeError, "settings", "int", "must be a MegaSettings"),
    "skew": (
        dict(settings=MegaSettings(2, 1, 1, skew=4)), ValueError, "settings.skew", 4, "must be below stages = 4"
    ),
    "early": (dict(settings=MegaSettings(2, 1, 1, early=-1)), ValueError, "settings.early", -1, "must be at least 0"),
    "gradients": (
        dict(x=torch.zeros(3, 256).bfloat16().requires_grad_()), ValueError, "x", "requires_grad", "gets no gradient"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_refused(case, plain_buffer, monkeypatch):
    monkeypatch.setattr(SymmetricBuffer, "run", lambda self, launches: pytest.fail("launched"))
    changes, kind, argument, value, rule = CASES[case]
    with fails(kind, argument, value, rule):
        refused(plain_buffer, **changes)


def test_chosen_settings_fit_a_small_pool(plain_buffer, monkeypatch):
    """Settings that are passed are taken as they are, and refused."""
    monkeypatch.setattr(fused, "_all_sms", lambda device, settings, fp8: 132)
    plan = plain_buffer.plan
    block = 128 * (plan.hidden_size + 128 + (plan.hidden_size + 128) // 128 * 4)
    for blocks, group, lag in ((2, 1, 1), (5, 2, 3), (20, 8, 12), (50, 8, 32)):
        experts = fused_experts(plain_buffer, plan, 128, num_rows=128 * 64, pool_bytes=blocks * block)
        assert experts.plan.pool_blocks == blocks
        assert (experts.settings.group, experts.settings.lag) == (group, lag)
    with fails(ValueError, "pool_bytes", 2 * block, "must hold lag + group = 3 blocks"):
        settings = replace(SETTINGS, group=2, lag=1)
        fused_experts(plain_buffer, plan, 128, num_rows=128 * 64, pool_bytes=2 * block, settings=settings)


def test_plans_beyond_the_buffer(plain_buffer):
    """A smaller plan runs, a larger one does not fit."""
    with pytest.raises(ValueError, match="must not need more in any region"):
        refused(plain_buffer, plan=plan_memory(ONE.config, 1, 9))
    assert (
        fused_experts(plain_buffer, plan_memory(ONE.config, 1, 4), 128, settings=SETTINGS).plan.memory.max_tokens == 4
    )


BF16_UP, BF16_DOWN = weights_of(0, 4, 256, 128, False)
BF16_CASES = {
    "codes": (dict(gate_up_proj=UP), TypeError, "gate_up_proj", "Fp8Tensor", "must be a torch.Tensor"),
    "dtype": (
        dict(down_proj=BF16_DOWN.float()), TypeError, "down_proj.dtype", FP32, "must be one of torch.bfloat16"
    ),
    "strides": (
        dict(gate_up_proj=BF16_UP.mT.contiguous().mT),
        ValueError, "gate_up_proj.stride()", (65536, 1, 256), "must be contiguous",
    ),
    "unlike weights": (
        dict(gate_up_proj=BF16_UP[:, :128].contiguous()),
        ValueError, "gate_up_proj.shape", [4, 128, 256], "must be [4, 256, 256]",
    ),
    "another layer's buffer": (
        dict(gate_up_proj=BF16_UP[:2], down_proj=BF16_DOWN[:2]),
        ValueError, "down_proj.shape", [2, 256, 128], "must be [4, 256, I] for the memory of this config",
    ),
    "address": (
        dict(down_proj=torch.zeros(BF16_DOWN.numel() + 1, dtype=BF16)[1:].view(BF16_DOWN.shape)),
        ValueError, "down_proj.data_ptr() % 16", 2, "must be 0 for TMA",
    ),
    "width": (
        dict(gate_up_proj=BF16_UP[:, :128].contiguous(), down_proj=BF16_DOWN[:, :, :64].contiguous()),
        ValueError, "intermediate_size", 64, "must be a multiple of 128",
    ),
    "gradients": (
        dict(down_proj=BF16_DOWN.clone().requires_grad_()),
        ValueError, "down_proj", "requires_grad", "gets no gradient",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def bf16_buffer():
    config = replace(ONE.config, precision="bf16")
    with SymmetricBuffer(plan_memory(config, 1, 8), device=torch.device("cpu")) as buffer:
        yield buffer


@pytest.mark.parametrize("case", BF16_CASES, ids=str)
def test_refused_in_bf16(case, bf16_buffer, monkeypatch):
    monkeypatch.setattr(SymmetricBuffer, "run", lambda self, launches: pytest.fail("launched"))
    changes, kind, argument, value, rule = BF16_CASES[case]
    with fails(kind, argument, value, rule):
        refused(bf16_buffer, **{"gate_up_proj": BF16_UP, "down_proj": BF16_DOWN, **changes})


def test_other_devices_are_named(plain_buffer, monkeypatch):
    monkeypatch.undo()
    with fails(ValueError, "buffer.device", "cpu", "the mega-kernel runs on Hopper GPUs, not on cpu"):
        refused(plain_buffer)


def test_a_compiler_that_spoils_the_fp8_kernel(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for supported, wanted in ((True, ""), (False, "the mega-kernel needs triton 3.6 or 3.7 for FP8")):
        monkeypatch.setattr(mega, "FP8_SUPPORTED", supported)
        assert fused.device_obstacle(torch.device("cuda"), True) == wanted
        assert fused.device_obstacle(torch.device("cuda"), False) == ""


def test_the_first_call_in_a_capture(plain_buffer, monkeypatch):
    """Its memory would be the graph's."""
    plan = plain_buffer.plan
    experts = fused_experts(plain_buffer, plan, 384, settings=SETTINGS)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(plain_buffer, "device", torch.device("cuda"))
    monkeypatch.setitem(plain_buffer.attached, "scratch", [])
    with fails(ValueError, "mega_moe", "a CUDA graph is being captured", "needs its scratch memory before"):
        experts.scratch()
