"""DeepGEMM's mega-MoE for Hopper: calls by the simulator beside ``mega_moe``'s, contracts of inputs, refusals."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

import torch  # noqa: E402

import megamoe.compat.deep_gemm as deep_gemm  # noqa: E402
from megamoe import Routing, mega_moe  # noqa: E402
from megamoe.comm.symm import SymmetricBuffer  # noqa: E402
from megamoe.compat.deep_gemm import mega  # noqa: E402
from megamoe.kernels.quant import quantize_rowwise  # noqa: E402
from megamoe.kernels.weights import interleave_gate_up  # noqa: E402
from megamoe.layers import fused  # noqa: E402
from tests.support.errors import fails  # noqa: E402
from tests.support.exchange_sim import make_tokens, poisoned  # noqa: E402
from tests.support.mega_sim import SETTINGS, MegaSizes, weights_of  # noqa: E402
from tests.support.peer_world import run_peers  # noqa: E402

BF16, FP32, E4M3, INT32 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32
TWO = MegaSizes(tokens=128, intermediate=128)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """The simulator runs the kernel; in place of a group comes an exchange, or None."""
    monkeypatch.setattr(fused, "device_obstacle", lambda device, fp8: "")
    monkeypatch.setattr(mega, "fused_experts", partial(fused.fused_experts, settings=SETTINGS))
    monkeypatch.setattr(mega.dist, "get_world_size", lambda exchange: exchange.memory_plan.ep_size)

    def make(plan, exchange):
        return SymmetricBuffer(plan, device=torch.device("cpu")) if exchange is None else exchange.buffer

    monkeypatch.setattr(mega, "SymmetricBuffer", make)


def weights(rank: int, local: int = 2, width: int = 128):
    return weights_of(rank, local, 256, width)


def pairs(*sizes: int):
    return deep_gemm.transform_weights_for_mega_moe_sm90(*((each.codes, each.scales) for each in weights(*sizes)))


def interleaved(codes: torch.Tensor) -> torch.Tensor:
    return interleave_gate_up(codes.view(torch.uint8)).view(E4M3)


def fill(buffer: mega.SymmBuffer, mine, factor: float) -> None:
    views = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
    count = len(mine.x)
    deep_gemm.mega_moe_pre_dispatch_sm90(
        mine.x, mine.index.int(), mine.weights, *views, count, routed_scaling_factor=factor
    )


def has_experts(index: torch.Tensor) -> bool:
    return bool(((index >= 0) & (index < 4)).any())


@pytest.mark.parametrize("one_launch", [True, False])
def test_bits_of_mega_moe(one_launch, monkeypatch, seed):
    """Codes that the caller has cast give what the kernel's own cast gives, one call after another."""
    plan_mega = fused.plan_mega
    monkeypatch.setattr(fused, "plan_mega", lambda *sizes: replace(plan_mega(*sizes), fused=one_launch))
    calls = [make_tokens(TWO, [5, 0]), make_tokens(TWO, [2, 7], "holes")]

    def run(rank: int, exchange):
        buffer = deep_gemm.get_symm_buffer_for_mega_moe(exchange, 4, 100, 2, 256, 128)
        assert buffer.num_max_tokens_per_rank == 128
        l1, l2 = pairs(rank)
        mixed = interleaved(l1[0]), l1[1]
        stats = torch.ones(2, dtype=INT32)
        for turn, tokens in enumerate(calls):
            mine = tokens[rank]
            fill(buffer, mine, 2.0)
            y = poisoned(len(mine.x), 256, dtype=BF16)
            options = dict(interleaved=turn == 1, num_tokens_bound=7, activation_clamp=0.5)
            assert deep_gemm.fp8_mega_moe(y, mixed if turn else l1, l2, buffer, stats, **options) is None
            routing = Routing(mine.index, mine.weights * 2)
            ours = mega_moe(mine.x, routing, *weights(rank), exchange.buffer, settings=SETTINGS, clamp=0.5)
            assert torch.equal(y, ours) and bool(y.any()) == has_experts(mine.index)
        return stats

    for rank, stats in enumerate(run_peers(TWO, run)):
        index = torch.cat([mine.index.flatten() for tokens in calls for mine in tokens])
        assert stats.tolist() == [1 + int((index == 2 * rank + expert).sum()) for expert in range(2)]


def test_bits_of_mega_moe_in_bf16(seed):
    """Tokens that the caller has copied, and weights as the transform for Blackwell makes them, or plain."""
    sizes = replace(TWO, fp8=False)
    tokens = make_tokens(sizes, [5, 3], "holes")

    def run(rank: int, exchange):
        buffer = deep_gemm.get_symm_buffer_for_mega_moe(exchange, 4, 100, 2, 256, 128, mma_type="bf16xbf16")
        up, down = weights_of(rank, 2, 256, 128, False)
        mixed, same = deep_gemm.transform_weights_for_mega_moe(up, down)
        assert not torch.equal(mixed, up) and torch.equal(same, down)
        mine, stats = tokens[rank], torch.zeros(2, dtype=INT32)
        count = len(mine.x)
        buffer.x[:count].copy_(mine.x)
        buffer.topk_idx[:count].copy_(mine.index)
        buffer.topk_weights[:count].copy_(mine.weights)
        results = []
        for l1, options in ((mixed, {}), (up, dict(interleaved=False))):
            y = poisoned(count, 256, dtype=BF16)
            deep_gemm.bf16_mega_moe(y, l1, down, buffer, stats, activation_clamp=0.5, num_tokens_bound=5, **options)
            results.append(y)
        routing = Routing(mine.index, mine.weights)
        ours = mega_moe(mine.x, routing, up, down, exchange.buffer, settings=SETTINGS, clamp=0.5)
        assert all(torch.equal(y, ours) for y in results) and bool(ours.any()) == has_experts(mine.index)
        return stats

    index = torch.cat([mine.index.flatten() for mine in tokens])
    for rank, stats in enumerate(run_peers(sizes, run)):
        assert stats.tolist() == [2 * int((index == 2 * rank + expert).sum()) for expert in range(2)]


# ---------------------------------------------------------------- inputs


@pytest.fixture
def bf16_buffer():
    made = deep_gemm.get_symm_buffer_for_mega_moe(None, 4, 100, 2, 256, 128, False, "bf16xbf16")
    yield made
    made.destroy()


def test_buffer_in_bf16(bf16_buffer):
    assert bf16_buffer.x.dtype == BF16 and bf16_buffer.x.shape == (128, 256) and bf16_buffer.x.is_contiguous()
    assert bf16_buffer.x_sf is None
    bf16_buffer.x.fill_(1.5)
    assert (bf16_buffer.shared.region("rows", 2 * 128 * 256).view(BF16) == 1.5).all()


def test_precisions_are_not_mixed(buffer, bf16_buffer):
    up, down = weights_of(0, 4, 256, 128, False)
    y = torch.zeros(3, 256, dtype=BF16)
    with fails(TypeError, "sym_buffer.x.dtype", E4M3, f"must be {BF16}"):
        deep_gemm.bf16_mega_moe(y, up, down, buffer)
    with fails(TypeError, "sym_buffer.x.dtype", BF16, f"must be {E4M3}"):
        deep_gemm.fp8_mega_moe(y, *pairs(0, 4), bf16_buffer)
    with fails(TypeError, "l2_weights.dtype", FP32, "must be one of torch.bfloat16"):
        deep_gemm.bf16_mega_moe(y, up, down.float(), bf16_buffer)
    with fails(ValueError, "l2_weights.shape", [4, 256, 256], "must be [4, 256, 128]"):
        deep_gemm.bf16_mega_moe(y, *weights_of(0, 4, 256, 256, False), bf16_buffer)
    with fails(ValueError, "use_fp8_dispatch", True, "must not be True for bf16xbf16"):
        deep_gemm.get_symm_buffer_for_mega_moe(None, 4, 100, 2, 256, 128, True, "bf16xbf16")
    with fails(ValueError, "activation", "situ", "must be one of"):
        deep_gemm.get_symm_buffer_for_mega_moe(None, 4, 100, 2, 256, 128, None, "bf16xbf16", "situ")


@pytest.fixture
def buffer():
    made = deep_gemm.get_symm_buffer_for_sm90_mega_moe(None, 4, 100, 2, 256, 128)
    yield made
    made.destroy()


def test_buffer(buffer):
    shapes = {"x": (E4M3, 256), "x_sf": (FP32, 2), "topk_idx": (torch.int64, 2), "topk_weights": (FP32, 2)}
    for name, (dtype, columns) in shapes.items():
        view = getattr(buffer, name)
        assert view.dtype == dtype and view.shape == (128, columns) and view.is_contiguous()
    assert (buffer.topk_idx == -1).all() and not buffer.topk_weights.any()
    # The first two are what peers read.
    buffer.x.view(torch.uint8).fill_(3)
    buffer.x_sf.fill_(4)
    assert (buffer.shared.region("rows", 128 * 256) == 3).all()
    assert (buffer.shared.region("scales").view(FP32) == 4).all()
    buffer.destroy()
    with fails(ValueError, "SymmetricBuffer", "closed", "must be open"):
        deep_gemm.fp8_mega_moe(torch.zeros(3, 256, dtype=BF16), *pairs(0, 4), buffer)


def test_pre_dispatch(buffer, seed):
    """Rows beyond ``num_tokens`` are padding, also where there was something before."""
    mine = make_tokens(replace(TWO, ranks=1), [9], "holes")[0]
    fill(buffer, mine, 1.0)
    mine = make_tokens(replace(TWO, ranks=1), [9], "holes")[0]
    views = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
    deep_gemm.mega_moe_pre_dispatch_sm90(mine.x, mine.index, mine.weights, *views, 4, 128, 0.25)
    cast = quantize_rowwise(mine.x[:4])
    assert torch.equal(buffer.x[:4].view(torch.uint8), cast.codes.view(torch.uint8))
    assert torch.equal(buffer.x_sf[:4], cast.scales)
    assert torch.equal(buffer.topk_idx[:4], mine.index[:4]) and (buffer.topk_idx[4:] == -1).all()
    assert torch.equal(buffer.topk_weights[:4], mine.weights[:4] * 0.25) and not buffer.topk_weights[4:].any()


def test_weights_are_taken_as_they_are():
    l1, l2 = [(each.codes, each.scales) for each in weights(0)]
    assert all(a is b for a, b in zip(pairs(0)[0] + pairs(0)[1], l1 + l2, strict=True))
    with fails(TypeError, "l2_weights", "Tensor", "must be a pair (codes, scales)"):
        deep_gemm.transform_weights_for_mega_moe_sm90(l1, l2[0])


def test_plain_copies_follow_and_go_with_the_weights(seed):
    codes = torch.randint(0, 100, (2, 32, 16), dtype=torch.uint8)
    mixed = interleaved(codes.view(E4M3))
    plain = mega._plain_codes(mixed)
    assert torch.equal(plain.view(torch.uint8), codes)
    assert mega._plain_codes(mixed[:]) is plain
    # Written again into the same memory, which graphs know.
    mixed.copy_(interleaved((codes + 1).view(E4M3)))
    assert mega._plain_codes(mixed) is plain and torch.equal(plain.view(torch.uint8), codes + 1)
    assert torch.equal(mega._plain_codes(mixed[1:]).view(torch.uint8), codes[1:] + 1)
    gc.collect()
    before = len(mega._plain)
    del mixed
    gc.collect()
    assert len(mega._plain) == before - 2


# ---------------------------------------------------------------- what is refused

Y = torch.zeros(3, 256, dtype=BF16)


@pytest.mark.parametrize(
    ("changes", "kind", "argument", "value", "rule"),
    [
        (dict(sym_buffer=1), TypeError, "sym_buffer", "int", "must be a SymmBuffer"),
        (dict(y=Y.float()), TypeError, "y.dtype", FP32, "must be one of torch.bfloat16"),
        (dict(y=Y[:, :128]), ValueError, "y.shape", [3, 128], "must be [any, 256]"),
        (dict(y=Y.repeat(1, 2)[:, ::2]), ValueError, "y.stride()", (512, 2), "must be 1 along H"),
        (dict(y=Y.repeat(43, 1)), ValueError, "y.shape[0]", 129, "must not exceed the buffer's 128 tokens"),
        (dict(num_tokens_bound=2), ValueError, "num_tokens_bound", 2, "must be within y's 3 rows"),
        (dict(num_tokens_bound=129), ValueError, "num_tokens_bound", 129, "must be within y's 3 rows"),
        (dict(recipe=(1, 1, 32)), ValueError, "recipe", (1, 1, 32), "must be (128, 128, 128)"),
        (dict(activation="situ"), ValueError, "activation", "situ", "must be one of 'swiglu'"),
        (dict(activation_clamp=-1.0), ValueError, "activation_clamp", -1.0, "must be finite and >= 0.0"),
        (dict(l1_weights=pairs(0, 4)[0][0]), TypeError, "l1_weights", "Tensor", "must be a pair"),
        (dict(l2_weights=pairs(0, 2)[1]), ValueError, "l1_weights.codes.shape", [4, 256, 256], "must be [2, 256, 256]"),
        (
            dict(zip(("l1_weights", "l2_weights"), pairs(0, 4, 256), strict=True)),
            ValueError, "l2_weights.codes.shape", [4, 256, 256], "must be [4, 256, 128]",
        ),
        (
            dict(cumulative_local_expert_recv_stats=torch.zeros(4)),
            TypeError, "cumulative_local_expert_recv_stats.dtype", FP32, "must be one of torch.int32",
        ),
    ],
)  # fmt: skip
def test_refused(changes, kind, argument, value, rule, buffer, monkeypatch):
    monkeypatch.setattr(SymmetricBuffer, "run", lambda self, launches: pytest.fail("launched"))
    l1, l2 = pairs(0, 4)
    with fails(kind, argument, value, rule):
        deep_gemm.fp8_mega_moe(**{**dict(y=Y, l1_weights=l1, l2_weights=l2, sym_buffer=buffer), **changes})


@pytest.mark.parametrize(
    ("changes", "kind", "argument", "value", "rule"),
    [
        (dict(mma_type="mxf4xmxf4"), ValueError, "mma_type", "mxf4xmxf4", "must be one of 'fp8xfp4'"),
        (dict(use_fp8_dispatch=False), ValueError, "use_fp8_dispatch", False, "must be True"),
        (dict(activation="situ"), ValueError, "activation", "situ", "must be one of 'swiglu'"),
        (dict(num_max_tokens_per_rank=0), ValueError, "num_max_tokens_per_rank", 0, "must be at least 1"),
        (dict(hidden=192), ValueError, "hidden_size", 192, "must be a multiple of 128"),
        (dict(num_topk=17, num_experts=32), ValueError, "top_k", 17, "must be at most 16"),
    ],
)
def test_refused_buffers(changes, kind, argument, value, rule):
    sizes = dict(num_experts=4, num_max_tokens_per_rank=100, num_topk=2, hidden=256, intermediate_hidden=128)
    with fails(kind, argument, value, rule):
        deep_gemm.get_symm_buffer_for_mega_moe(None, **{**sizes, **changes})


@pytest.mark.parametrize(
    ("changes", "kind", "argument", "value", "rule"),
    [
        (dict(x=torch.zeros(3, 256)), TypeError, "x.dtype", FP32, "must be one of torch.bfloat16"),
        (dict(x=torch.zeros(3, 128).bfloat16()), ValueError, "buf_x.shape", [128, 256], "must be [any, 128]"),
        (dict(topk_idx=torch.zeros(3, 3, dtype=INT32)), ValueError, "topk_weights.shape", [3, 2], "must be [3, 3]"),
        (dict(num_tokens=4), ValueError, "num_tokens", 4, "must not exceed x's 3 rows"),
        (dict(group_size=32), ValueError, "group_size", 32, "must be 128"),
    ],
)
def test_refused_inputs(changes, kind, argument, value, rule, buffer):
    arguments = dict(
        x=Y, topk_idx=torch.zeros(3, 2, dtype=INT32), topk_weights=torch.zeros(3, 2), buf_x=buffer.x,
        buf_x_sf=buffer.x_sf, buf_topk_idx=buffer.topk_idx, buf_topk_weights=buffer.topk_weights, num_tokens=3,
    )  # fmt: skip
    with fails(kind, argument, value, rule):
        deep_gemm.mega_moe_pre_dispatch_sm90(**{**arguments, **changes})
