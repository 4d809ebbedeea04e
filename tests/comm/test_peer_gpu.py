"""``PeerExchange`` on 2 GPUs: bits, graphs, waits that end, and both allocators."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from megamoe import ExchangeError, MegaMoEError, MoEConfig
from megamoe.comm.collective import CollectiveExchange
from megamoe.comm.peer import PeerExchange
from megamoe.comm.symm import SymmetricBuffer, acquire_buffer, release_buffer
from megamoe.kernels.quant import quantize_rowwise
from megamoe.plan import plan_memory
from megamoe.types import Routing
from tests.support.processes import RankFailed, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
EXPERTS, TOP_K, HIDDEN = 16, 4, 1024


def buffer_of(tokens: int, hidden: int = HIDDEN, timeout: float = 20.0, allocator: str = "torch") -> SymmetricBuffer:
    config = MoEConfig(hidden, 128, EXPERTS, TOP_K, precision="fp8")
    plan = plan_memory(config, dist.get_world_size(), tokens)
    return SymmetricBuffer(plan, dist.group.WORLD, timeout=timeout, allocator=allocator)


def make(tokens: int, generator: torch.Generator, routing: str = "random", hidden: int = HIDDEN):
    x = torch.randn(tokens, hidden, generator=generator, device="cuda").bfloat16()
    index = torch.rand(tokens, EXPERTS, generator=generator, device="cuda").topk(TOP_K).indices
    if routing == "one":
        index = torch.full_like(index, -1)
        index[:, 1] = EXPERTS - 1
    elif routing == "none":
        index = torch.full_like(index, -1)
    elif routing == "holes":
        index = torch.where(torch.rand(index.shape, generator=generator, device="cuda") < 0.3, -1, index)
    return x, Routing(index, torch.rand(tokens, TOP_K, generator=generator, device="cuda"))


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Bit for bit, padding too."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    differing = (actual != expected).flatten(1).any(1) if actual.dim() > 1 else actual != expected
    assert not differing.any(), f"{what}: {int(differing.sum())} of {len(differing)} differ, {differing.nonzero()[:5]}"


def assert_same_rows(rows, handle, expected, theirs) -> None:
    spans = handle.layout.spans()
    assert spans == theirs.layout.spans()
    for start, end in spans:
        assert torch.equal(rows[start:end], expected[start:end])


def bits_of_nccl(rank: int, ranks: int, seed: int, allocator: str) -> None:
    collective = CollectiveExchange(EXPERTS, dist.group.WORLD)
    for tokens_max in (128, 4096):
        with buffer_of(tokens_max, allocator=allocator) as buffer:
            peer = PeerExchange(EXPERTS, buffer)
            generator = torch.Generator("cuda").manual_seed(seed + rank)
            for counts in ((tokens_max, tokens_max), (tokens_max, 37), (0, 5), (5, 0), (0, 0)):
                for routing in ("random", "holes", "one", "none"):
                    x, routed = make(counts[rank], generator, routing)
                    theirs = collective.plan(routed)
                    expected = collective.send_rows(x, theirs)
                    handle = peer.plan(routed)
                    rows = peer.send_rows(x, handle)
                    # Of NCCL's pool, which has room for any routing, these rows are in use.
                    used = rows.shape[0]
                    assert_equal(rows, expected[:used], f"rows, {counts}, {routing}, {handle.layout.spans()}")
                    assert_equal(
                        handle.row_weights, collective.send_weights(routed.topk_weights, theirs)[:used], "row weights"
                    )
                    results = torch.randn_like(expected)
                    total = peer.return_rows(results[:used], handle, torch.float32)
                    assert_equal(total, collective.return_rows(results, theirs, torch.float32), "sums")
                    weights = torch.rand(expected.shape[0], device="cuda")
                    sent = peer.return_weights(weights[:used], handle)
                    assert_equal(sent, collective.return_weights(weights, theirs), "returned weights")
                    once, handle = peer.dispatch_once(x, routed, BF16)
                    assert_same_rows(once, handle, expected, theirs)
                    codes, handle = peer.dispatch_once(x, routed, FP8)
                    for start, end in handle.layout.spans():
                        cast = quantize_rowwise(expected[start:end])
                        assert torch.equal(codes.codes[start:end].view(torch.uint8), cast.codes.view(torch.uint8))
                        assert torch.equal(codes.scales[start:end], cast.scales)
            buffer.check()


def test_bits_of_nccl(seed):
    run_ranks(bits_of_nccl, 2, seed, "torch", backend="nccl", timeout=200)


def test_bits_of_nccl_in_nvshmem_memory(seed):
    pytest.importorskip("nvshmem")
    run_ranks(bits_of_nccl, 2, seed, "nvshmem", backend="nccl", timeout=200)


class Captured:
    """A dispatch, a stand-in for the experts and a combine in one graph, with inputs that can be changed."""

    def __init__(self, peer: PeerExchange, tokens: int):
        self.x = torch.zeros(tokens, HIDDEN, dtype=BF16, device="cuda")
        self.index = torch.full((tokens, TOP_K), -1, dtype=torch.int64, device="cuda")
        self.weights = torch.zeros(tokens, TOP_K, device="cuda")
        self._peer = peer
        self.call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.call()

    def call(self) -> torch.Tensor:
        with torch.no_grad():
            rows, handle = self._peer.dispatch_once(self.x, Routing(self.index, self.weights), BF16)
            return self._peer.return_rows(rows * handle.row_weights[:, None].to(BF16), handle, BF16)

    def load(self, x: torch.Tensor, routing: Routing) -> None:
        self.x.copy_(x)
        self.index.copy_(routing.topk_index)
        self.weights.copy_(routing.topk_weights)


def graphs(rank: int, ranks: int, seed: int, replays: int) -> None:
    with buffer_of(64) as buffer:
        peer = PeerExchange(EXPERTS, buffer)
        generator = torch.Generator("cuda").manual_seed(seed + rank)
        captured = [Captured(peer, 64), Captured(peer, 9)]
        kinds = ("random", "holes", "one", "none")
        # Of both graphs in turn, so that their calls interleave; and eagerly in between.
        inputs = [make(9 if i % 3 == 0 else 64, generator, kinds[i % 4]) for i in range(24)]
        graph_of = [captured[1] if i % 3 == 0 else captured[0] for i in range(24)]
        expected = []
        for graph, (x, routing) in zip(graph_of, inputs, strict=True):
            graph.load(x, routing)
            expected.append(graph.call().clone())
        for replay in range(replays):
            i = replay % 24
            graph_of[i].load(*inputs[i])
            graph_of[i].graph.replay()
            assert torch.equal(graph_of[i].out, expected[i]), replay
        buffer.check()


def test_replays_with_changing_routing_equal_eager_calls(seed):
    run_ranks(graphs, 2, seed, 2000, backend="nccl", timeout=200)


def busy_stream(rank: int, ranks: int, seed: int) -> None:
    """Another kernel holds SMs for as long as all the calls take: they still end."""
    from tests.support.spin_kernel import spin_until

    with buffer_of(64) as buffer:
        peer = PeerExchange(EXPERTS, buffer)
        generator = torch.Generator("cuda").manual_seed(seed + rank)
        x, routing = make(64, generator)
        rows, handle = peer.dispatch_once(x, routing, BF16)
        expected = peer.return_rows(rows, handle, BF16)
        flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            spin_until[(8,)](flag)
        for _ in range(50):
            rows, handle = peer.dispatch_once(x, routing, BF16)
            out = peer.return_rows(rows, handle, BF16)
        done = torch.cuda.Event()
        done.record()
        limit = time.monotonic() + 20
        while not done.query():
            assert time.monotonic() < limit, "the calls do not end while another kernel holds 8 SMs"
        third = torch.cuda.Stream()
        with torch.cuda.stream(third):
            flag.fill_(1)
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        buffer.check()


def test_a_busy_stream_does_not_stop_the_exchange(seed):
    run_ranks(busy_stream, 2, seed, backend="nccl", timeout=120)


def second_stream(rank: int, ranks: int, seed: int) -> None:
    """A change of streams orders itself."""
    with buffer_of(64) as buffer:
        peer = PeerExchange(EXPERTS, buffer)
        generator = torch.Generator("cuda").manual_seed(seed + rank)
        x, routing = make(64, generator)
        outs = []
        for _ in range(20):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                rows, handle = peer.dispatch_once(x, routing, BF16)
                outs.append(peer.return_rows(rows, handle, BF16))
        torch.cuda.synchronize()
        assert all(torch.equal(out, outs[0]) for out in outs)
        buffer.check()


def test_streams_that_take_turns(seed):
    run_ranks(second_stream, 2, seed, backend="nccl", timeout=120)


def missing_rank(rank: int, ranks: int, absent: int) -> str:
    with buffer_of(64, timeout=2.0) as buffer:
        peer = PeerExchange(EXPERTS, buffer)
        generator = torch.Generator("cuda").manual_seed(rank)
        x, routing = make(64, generator)
        for _ in range(3):
            peer.dispatch_once(x, routing, BF16)
        buffer.check()
        dist.barrier()
        text = ""
        if rank != absent:
            peer.dispatch_once(x, routing, BF16)
            try:
                buffer.check()
            except ExchangeError as error:
                text = str(error)
        dist.barrier()
        # Both start anew, and it works again.
        buffer.reset()
        rows, handle = peer.dispatch_once(x, routing, BF16)
        peer.return_rows(rows, handle, BF16)
        buffer.check()
        return text


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_call_is_named(absent):
    texts = run_ranks(missing_rank, 2, absent, backend="nccl", timeout=120)
    assert f"waited 2.0 s for rank {absent} to come to its next call after dispatch 3" in texts[1 - absent]


def killed_rank(rank: int, ranks: int) -> None:
    with buffer_of(64, timeout=2.0) as buffer:
        peer = PeerExchange(EXPERTS, buffer)
        x, routing = make(64, torch.Generator("cuda").manual_seed(rank))
        for call in range(200):
            if rank == 1 and call == 100:
                os.kill(os.getpid(), signal.SIGKILL)
            peer.dispatch_once(x, routing, BF16)
            buffer.check()


def test_a_killed_rank_is_named():
    with pytest.raises(RankFailed, match="ExchangeError: rank 0 waited 2.0 s for rank 1"):
        run_ranks(killed_rank, 2, backend="nccl", timeout=120)


def overflow(rank: int, ranks: int) -> str:
    with buffer_of(256) as buffer:
        peer = PeerExchange(EXPERTS, buffer, capacity=128)
        x, routing = make(256, torch.Generator("cuda").manual_seed(rank))
        peer.dispatch_once(x, routing, BF16)
        with pytest.raises(ExchangeError) as caught:
            buffer.check()
        return str(caught.value)


def test_a_pool_that_is_too_small():
    for text in run_ranks(overflow, 2, backend="nccl", timeout=120):
        assert "rows were routed to its experts, the pool has 128" in text


def buffers(rank: int, ranks: int) -> None:
    """Sharing, capture, and ranks that disagree."""
    config = MoEConfig(HIDDEN, 128, EXPERTS, TOP_K, precision="fp8")
    large = acquire_buffer(plan_memory(config, 2, 128), dist.group.WORLD)
    assert large.nbytes == plan_memory(config, 2, 128).total
    small_plan = plan_memory(config, 2, 16)
    assert acquire_buffer(small_plan, dist.group.WORLD) is large
    generator = torch.Generator("cuda").manual_seed(rank)
    exchanges = [PeerExchange(EXPERTS, large), PeerExchange(EXPERTS, large, small_plan)]
    expected = {}
    for turn in range(20):
        exchange = exchanges[turn % 2]
        x, routing = make(16, torch.Generator("cuda").manual_seed(rank))
        rows, handle = exchange.dispatch_once(x, routing, BF16)
        out = exchange.return_rows(rows, handle, BF16)
        assert torch.equal(out, expected.setdefault(0, out))
    large.check()
    release_buffer(large)
    release_buffer(large)
    assert large.closed
    with pytest.raises(MegaMoEError, match="must be open"):
        exchanges[0].dispatch_once(*make(16, generator), BF16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(MegaMoEError, match="must exist before"):
            SymmetricBuffer(small_plan, dist.group.WORLD)
    with pytest.raises(MegaMoEError, match="settings = .*max_tokens"):
        SymmetricBuffer(plan_memory(config, 2, 16 + rank), dist.group.WORLD)


def test_buffers():
    run_ranks(buffers, 2, backend="nccl", timeout=120)
