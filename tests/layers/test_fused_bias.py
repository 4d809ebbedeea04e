"""Layers with biases by the mega-kernel, which the simulator runs: the bits of ``mega_moe``, and who pads biases."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

import torch  # noqa: E402

from megamoe import MoE, mega_moe  # noqa: E402
from megamoe.comm.peer import PeerExchange  # noqa: E402
from megamoe.kernels import weight_cache  # noqa: E402
from megamoe.kernels.quant import quantize_blockwise  # noqa: E402
from megamoe.layers import fused  # noqa: E402
from tests.layers.test_fused import CONFIG, PRECISIONS, TWO, config_of, use_kernel  # noqa: E402
from tests.support.mega_sim import SETTINGS, check_close  # noqa: E402
from tests.support.peer_world import on_rank, run_peers  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def any_device(monkeypatch):
    """The simulator runs the kernel on the CPU."""
    monkeypatch.setattr(fused, "device_obstacle", lambda device, fp8: "")


def padded(bias: torch.Tensor, to: int) -> torch.Tensor:
    """fp32, both halves with zeros up to ``to`` columns."""
    halves = bias.detach().float().chunk(2, dim=1)
    return torch.cat([torch.nn.functional.pad(half, (0, to - half.shape[1])) for half in halves], 1)


@PRECISIONS
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_layer_with_biases(fp8, dtype, seed, monkeypatch):
    """The bits of the function with weights and biases that were padded by hand, also once biases have changed."""
    calls, run_kernel = [], fused.FusedExperts.run
    monkeypatch.setattr(fused.FusedExperts, "run", lambda *operands: (calls.append(1), run_kernel(*operands))[1])
    full = MoE(replace(config_of(fp8), bias=True, shared_intermediate_size=0), dtype=dtype).eval()
    for bias in (full.experts.gate_up_proj_bias, full.experts.down_proj_bias):
        torch.nn.init.normal_(bias)
    counts = [6, 2]
    x = torch.randn(8, 256).bfloat16()

    def call_both(rank: int, exchange: PeerExchange, moe: MoE) -> torch.Tensor:
        experts, mine = moe.experts, x.split(counts)[rank]
        up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
        if fp8:
            up, down = (quantize_blockwise(p.pad(w)) for p, w in ((fused.UP_PADDING, up), (fused.DOWN_PADDING, down)))
        else:
            up, down = up.bfloat16(), down.bfloat16()
        options = dict(activation="swiglu_oai", clamp=7.0, settings=SETTINGS)
        options |= dict(gate_up_bias=padded(experts.gate_up_proj_bias, 128), down_bias=experts.down_proj_bias)
        with torch.no_grad(), torch.autocast("cpu", BF16, enabled=dtype == FP32):
            routing = moe.router(mine)
            wanted = mega_moe(mine, routing, up, down, exchange.buffer, **options)
            assert torch.equal(moe(mine), wanted)
        return wanted

    def run(rank: int, exchange: PeerExchange):
        moe = use_kernel(on_rank(full, rank, exchange), exchange)
        outs = [call_both(rank, exchange, moe)]
        with torch.no_grad():
            moe.experts.gate_up_proj_bias.mul_(-0.5)
            moe.experts.down_proj_bias.add_(1)
        outs.append(call_both(rank, exchange, moe))
        # Only what is padded is copied, once.
        memory = weight_cache._find(moe.experts.gate_up_proj_bias)
        assert (memory is not None and len(memory.copies) == 1) == fp8
        assert weight_cache._find(moe.experts.down_proj_bias) is None
        return outs

    results = run_peers(replace(TWO, hidden=256, experts=4, fp8=fp8), run)
    # Of the function and of the layer.
    assert len(calls) == 8
    for turn in range(2):
        with torch.no_grad(), torch.autocast("cpu", BF16, enabled=dtype == FP32):
            expected = full(x).split(counts)
            full.experts.gate_up_proj_bias.mul_(-0.5)
            full.experts.down_proj_bias.add_(1)
        for rank, outs in enumerate(results):
            check_close(rank, outs[turn], expected[rank].float(), fp8)


def test_refresh_copies_biases_too(seed):
    experts = MoE(replace(CONFIG, bias=True)).experts
    bias = experts.gate_up_proj_bias
    copy = weight_cache.padded_bias(bias, fused.UP_PADDING)
    with torch.no_grad():
        bias.normal_()
    experts.refresh_copies()
    assert torch.equal(copy, padded(bias, 128)) and copy.any()
