"""A decode step of one MoE layer by ``DecodeRunner``, beside eager calls and DeepGEMM's mega MoE in a CUDA graph.

Run: torchrun --standalone --nproc-per-node 2 -m megamoe bench decode; without torchrun on one GPU. Before anything is
timed, replays must give the bits of eager calls, with other tokens and so other routing each time, and results must
agree with the reference. Times are those of calls back to back, router and copy of the input included for everybody,
the slowest rank's. Host times are those of a few calls in a row that find the GPU idle, so that nobody waits for it;
``in_place`` is a replay whose tokens lie in the runner's input.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn

from megamoe.bench.gemm_cases import worst_row
from megamoe.bench.mega import ERROR_LIMIT, PEER_ERROR_LIMIT, expected_sample
from megamoe.bench.mega_cases import BF16, MegaWeights
from megamoe.bench.mega_peer import PeerLayer, PeerWeights, find_peer
from megamoe.bench.ranks import largest, rank_of, size_of, started
from megamoe.bench.tables import columns_of, show, write_csv
from megamoe.bench.timing import check_gpu
from megamoe.config import MoEConfig
from megamoe.errors import check_int, fail_value
from megamoe.kernels.quant import quantize_blockwise
from megamoe.layers.decode import WARM_UP_CALLS, DecodeRunner
from megamoe.layers.moe import MoE
from megamoe.layers.parallel import local_tensor

CALLS = 20
"""Back to back in a sample."""

HOST_SAMPLES, HOST_CALLS = 100, 8
"""Calls of a sample for the host: so few that the GPU's queue, of some thousand launches, does not fill."""


def back_to_back(candidates: Mapping[str, Callable[[], object]], rounds: int, calls: int = CALLS) -> dict[str, float]:
    """Median microseconds of a call, launched one by one; in each round all run, in the same random order on all ranks.

    Unlike graphs that hold many calls, this has what the host and the gaps between launches cost.
    """
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    names, order = list(candidates), random.Random(0)
    for call in candidates.values():
        call()
    for _ in range(rounds):
        for name in order.sample(names, len(names)):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(calls):
                candidates[name]()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) * 1000 / calls)
    return {name: statistics.median(values) for name, values in samples.items()}


def host_us(call: Callable[[], object], samples: int = HOST_SAMPLES, calls: int = HOST_CALLS) -> float:
    """Microseconds of the host for a call: median over samples of some calls in a row, before which the GPU is idle."""
    times = []
    for _ in range(samples):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """Replays a graph of ``call``, which has run before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


class PeerStep:
    """The peer's decode step: the same router, then its call, in a graph; input and output have fixed places."""

    def __init__(self, router: nn.Module, layer: PeerLayer, tokens: int, hidden: int, device: torch.device):
        self._router, self._layer = router, layer
        self._x = torch.zeros(tokens, hidden, dtype=BF16, device=device)
        self._out = torch.full_like(self._x, float("nan"))
        self._replay = captured(self._step)

    def _step(self) -> None:
        routing = self._router(self._x)
        self._layer.run(self._x, routing.topk_index.int().contiguous(), routing.topk_weights, self._out)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._x.copy_(x)
        self._replay()
        return self._out


class DecodeProblem:
    """A layer on one rank, its runner, and a copy of its weights in FP8.

    Args:
        counts: token counts, ascending; each is a bucket.
        group: of the ranks, or None for one.
    """

    def __init__(
        self, config: MoEConfig, counts: Sequence[int], group: dist.ProcessGroup | None, device: torch.device, path: str
    ):
        self.config, self.group, self.device = config, group, device
        # Equally on all ranks: an expert's weights follow from it.
        torch.manual_seed(0)
        self.layer = MoE(config, group, device=device, dtype=BF16, path=path).eval()
        self.runner = DecodeRunner(self.layer, config.hidden_size, counts)
        experts = self.layer.experts
        self.weights = MegaWeights(
            *(quantize_blockwise(local_tensor(w).detach()) for w in (experts.gate_up_proj, experts.down_proj))
        )
        self.generator = torch.Generator(device).manual_seed(1 + rank_of(group))

    def tokens(self, count: int) -> torch.Tensor:
        return torch.randn(count, self.config.hidden_size, device=self.device, generator=self.generator).to(BF16)

    @torch.no_grad()
    def check_replays(self, count: int, replays: int) -> None:
        """Replays have the bits of eager calls. Raises on all ranks if one's do not."""
        wrong = torch.zeros((), dtype=torch.bool, device=self.device)
        for _ in range(replays):
            x = self.tokens(count)
            wrong |= (self.runner(x) != self.layer(x)).any()
        if largest({"wrong": float(wrong)}, self.group, self.device)["wrong"]:
            raise RuntimeError(f"T={count}: replays differ from eager calls")

    def check(self, name: str, out: torch.Tensor, expected: torch.Tensor, limit: float) -> float:
        """Error of the worst token of any rank. Raises on all of them if it is too large."""
        error = largest({"error": float(worst_row(out, expected))}, self.group, self.device)["error"]
        if not error < limit:
            raise RuntimeError(f"T={out.shape[0]}: {name} has relative error {error:.3g}")
        return error


@torch.no_grad()
def measure(
    problem: DecodeProblem,
    peer: PeerWeights | None,
    world: dist.ProcessGroup | None,
    count: int,
    rounds: int,
    replays: int,
) -> dict[str, object]:
    """The row of a token count: microseconds, of the host too, and ratios. A collective."""
    problem.check_replays(count, replays)
    config, x = problem.config, problem.tokens(count)
    out = problem.layer(x)
    chosen, sample = expected_sample(problem.weights, x, problem.layer.router(x), problem.group)
    error = problem.check("the layer", out[chosen], sample, ERROR_LIMIT)
    figures: dict[str, object] = {"replays_checked": replays, "error": f"{error:.1e}"}
    candidates: dict[str, Callable[[], object]] = {
        "replay": lambda: problem.runner(x),
        "eager": lambda: problem.layer(x),
    }
    peer_layer = None
    try:
        if peer is not None:
            sizes = dict(hidden=config.hidden_size, intermediate=config.intermediate_size)
            sizes |= dict(experts=config.num_experts, top_k=config.top_k)
            peer_layer = PeerLayer(peer, world, tokens=count, **sizes)
            step = PeerStep(problem.layer.router, peer_layer, count, config.hidden_size, problem.device)
            error = problem.check("deep_gemm", step(x), out, PEER_ERROR_LIMIT)
            figures["deep_gemm_error"] = f"{error:.1e}"
            candidates["deep_gemm"] = lambda: step(x)
        times = largest(back_to_back(candidates, rounds), problem.group, problem.device)
        calls = {**candidates, "in_place": lambda: problem.runner(problem.runner.input(count))}
        hosts = {name: host_us(calls[name]) for name in ("replay", "in_place", "eager")}
        hosts = largest(hosts, problem.group, problem.device)
        return {**row_of(count, times, hosts), **figures}
    finally:
        if peer_layer is not None:
            peer_layer.close()


def row_of(count: int, times: Mapping[str, float], hosts: Mapping[str, float]) -> dict[str, object]:
    """Times of a call, others' over the replay's, and what the host spends."""
    row: dict[str, object] = {"tokens": count, **{f"{name}_us": round(value, 1) for name, value in times.items()}}
    row |= {f"x_{name}": round(value / times["replay"], 3) for name, value in times.items() if name != "replay"}
    return {**row, **{f"{name}_host_us": round(value, 1) for name, value in hosts.items()}}


def run(
    shape: Sequence[int], tokens: Sequence[int], folder: Path, rounds: int, replays: int, path: str, peer: bool = True
) -> list[dict[str, object]]:
    """Measures, and prints and writes ``decode.csv`` into ``folder`` from rank 0.

    Args:
        shape: H, I, E, K.
        tokens: of each rank.
        replays: that are compared with eager calls, over all token counts.
        path: of ``MoE``.

    Raises:
        MegaMoEError: an argument breaks a rule, or no graph can hold the path.
        RuntimeError: somebody's results are wrong.
    """
    counts = sorted(set(tokens))
    for count in counts:
        check_int("tokens", count, 1)
    if len(shape) != 4:
        fail_value("shape", list(shape), "must be H, I, E and K", "Pass 7168,2048,64,8, say.")
    config = MoEConfig(*shape, precision="fp8", max_tokens_per_rank=counts[-1])
    check_gpu()
    with started() as world:
        module, why = find_peer() if peer else (None, "")
        rank, device = rank_of(world), torch.device("cuda", torch.cuda.current_device())
        problem = DecodeProblem(config, counts, world if size_of(world) > 1 else None, device, path)
        if rank == 0:
            print("\n".join(filter(None, (why, problem.layer.explain()))), flush=True)
        rows = _run(problem, module, world, counts, folder, rounds, -(-replays // len(counts)))
        problem.layer.close()
    if rank == 0:
        show(rows, columns_of(rows))
    return rows


def _run(
    problem: DecodeProblem,
    module: ModuleType | None,
    world: dist.ProcessGroup | None,
    counts: Sequence[int],
    folder: Path,
    rounds: int,
    replays: int,
) -> list[dict[str, object]]:
    weights = None if module is None else PeerWeights(module, problem.weights.up, problem.weights.down)
    rows: list[dict[str, object]] = []
    for count in counts:
        rows.append(measure(problem, weights, world, count, rounds, replays))
        if rank_of(problem.group) == 0:
            print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
            write_csv(rows, folder / "decode.csv")
    return rows
