"""The mega-kernel's whole call beside the same layer in separate kernels, and beside DeepGEMM's mega MoE.

Run: torchrun --standalone --nproc-per-node 2 -m megamoe bench mega [--tokens 1,8,128] [--sweep]; without torchrun on
one GPU. From BF16 tokens and their routing to BF16 results, casts included. Results are compared with a reference and
with each other before anything is timed. Times are those of CUDA-graph replays, interleaved, which all GPUs begin
together; the slowest rank's. Without pause they run at their power limit; --pause lets them rest before each replay.

On one GPU it is also measured beside nothing but both GEMMs, on the same rows.

With --precision bf16 there is no such kernel of DeepGEMM's, but separate kernels over NVLink and over NCCL. The latter
reads counts back, so that no graph holds it: it is timed call by call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from megamoe.bench.gemm_cases import worst_row
from megamoe.bench.mega_cases import BF16, MegaCase, MegaProblem, MegaWeights, cases, random_weights
from megamoe.bench.mega_peer import PeerLayer, PeerWeights, find_peer
from megamoe.bench.ranks import largest, rank_of, size_of, started, starter, world_size
from megamoe.bench.tables import show, write_csv
from megamoe.bench.timing import check_gpu, eager_microseconds, interleaved
from megamoe.errors import check_number, fail_value
from megamoe.kernels import reference
from megamoe.kernels.mega_plan import MegaSettings
from megamoe.types import Routing

SAMPLE = 16
"""Tokens of each rank that are compared with the reference."""

ERROR_LIMIT, PEER_ERROR_LIMIT = 3e-2, 8e-2
"""Of a token of ours: a code that rounds the other way moves by a step of e4m3. The peer's scales cover 64 activations,
so that all its codes round differently (some 4 %), and a few tokens' errors may be larger: of all tokens together."""


# ---------------------------------------------------------------- correctness


def _cast(rows: torch.Tensor, weights: MegaWeights) -> torch.Tensor:
    """fp32 values of ``rows`` in the precision of the weights."""
    return reference.dequantize(reference.quantize(rows, (1, 128))) if weights.fp8 else rows.to(BF16).float()


def contributions(weights: MegaWeights, first: int, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """fp32 ``[T, H]``: what experts ``first`` to ``first + e - 1`` add to each token, by the reference's arithmetic."""
    rows = _cast(x, weights)
    total = torch.zeros_like(rows)
    for expert in range(weights.experts):
        token, slot = (routing.topk_index == first + expert).nonzero(as_tuple=True)
        if not token.numel():
            continue
        up, down = weights.expert(expert)
        act = reference.activate(rows[token] @ up.t(), "swiglu", None) * routing.topk_weights[token, slot, None]
        act = _cast(act, weights)
        total.index_add_(0, token, (act @ down.t()).to(BF16).float())
    return total


def expected_sample(
    weights: MegaWeights, x: torch.Tensor, routing: Routing, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some of this rank's tokens, and their results by the reference. A collective: as many tokens on all ranks."""
    ranks, rank, local = size_of(group), rank_of(group), weights.experts
    chosen = torch.linspace(0, x.shape[0] - 1, min(SAMPLE, x.shape[0]), device=x.device).round().long()
    parts = [x[chosen], routing.topk_index[chosen], routing.topk_weights[chosen]]
    if group is not None:
        gathered = [part.new_empty(ranks * part.shape[0], part.shape[1]) for part in parts]
        for whole, part in zip(gathered, parts, strict=True):
            dist.all_gather_into_tensor(whole, part, group)
        parts = gathered
    total = contributions(weights, rank * local, parts[0], Routing(*parts[1:]))
    if group is not None:
        dist.all_reduce(total, group=group)
    return chosen, total.view(ranks, chosen.numel(), -1)[rank]


def _whole(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    norm = torch.linalg.vector_norm
    return norm(actual.double() - expected.double()) / norm(expected.double()).clamp_min(1e-300)


class Checker:
    """Compares results with a sample by the reference, and with the staged path's in full."""

    def __init__(self, problem: MegaProblem, x: torch.Tensor, routing: Routing):
        self._problem = problem
        self._chosen, self._sample = expected_sample(problem.weights, x, routing, problem.group)
        self.expected = problem.staged(x, routing)
        problem.finish()
        self("staged", self.expected, ERROR_LIMIT)

    def __call__(self, name: str, out: torch.Tensor, limit: float) -> tuple[float, bool]:
        """(relative error, whether the bits are the staged path's on all ranks).

        The error is that of the worst rank: of our worst token, or of all tokens of the peer's.

        Raises:
            RuntimeError: on all ranks, if one's results are wrong.
        """
        error_of = worst_row if limit == ERROR_LIMIT else _whole
        errors = {
            "reference": float(error_of(out[self._chosen], self._sample)),
            "staged": float(error_of(out, self.expected)),
            "bits": float(not torch.equal(out, self.expected)),
        }
        errors = largest(errors, self._problem.group, out.device)
        error = max(errors["reference"], errors["staged"])
        if not error < limit:
            raise RuntimeError(f"{self._problem.case.label}: {name} has relative error {error:.3g}")
        return error, not errors["bits"]


# ---------------------------------------------------------------- measurements


def variants(chosen: MegaSettings, sweep: bool, fp8: bool = True) -> Iterator[tuple[str, MegaSettings]]:
    """Settings to be measured, by name; the chosen ones first."""
    yield "mega", chosen
    if sweep:
        group, lag = chosen.group, chosen.lag
        others = [(group // 2, lag), (2 * group, lag), (group, lag // 2), (group, lag * 3 // 2), (group, 2 * lag)]
        # All of a large expert together.
        others += [(3 * group, lag * 3 // 2)]
        for group, lag in dict.fromkeys((max(1, group), max(1, lag)) for group, lag in others):
            if (group, lag) != (chosen.group, chosen.lag):
                yield f"mega {group},{lag}", replace(chosen, group=group, lag=lag)
        for skew in () if fp8 else (1, 2, 3):
            if skew != chosen.skew:
                yield f"mega skew {skew}", replace(chosen, skew=skew)
        yield "mega chunk 1024", replace(chosen, chunk=1024)
        for early in (0, 1, 4):
            if early != chosen.early:
                yield f"mega early {early}", replace(chosen, early=early)


@dataclass(frozen=True)
class Ranks:
    """Who measures.

    Attributes:
        world: all ranks; there is one also without torchrun, for the peer.
        rank: in it.
        group: for calls of megamoe: None where a rank is alone.
        pause: seconds of rest before each replay.
    """

    world: dist.ProcessGroup | None
    group: dist.ProcessGroup | None
    rank: int
    pause: float = 0.0


def _timed(
    problem: MegaProblem, candidates: dict[str, Callable[[], object]], ranks: Ranks, rounds: int
) -> dict[str, float]:
    calls = problem.case.calls(size_of(ranks.group))
    start = starter(ranks.group, problem.device, ranks.pause)
    times = interleaved({name: [call] for name, call in candidates.items()}, rounds, calls, start)
    problem.finish()
    return largest(times, ranks.group, problem.device)


@torch.no_grad()
def measure(
    case: MegaCase, weights: MegaWeights, peer: PeerWeights | None, ranks: Ranks, rounds: int
) -> dict[str, object]:
    """The row of a case: microseconds, errors, ratios. A collective."""
    problem = MegaProblem(case, ranks.group, weights=weights)
    layer = None
    try:
        x, routing = problem.tokens()
        check = Checker(problem, x, routing)
        out = torch.full_like(x, float("nan"))
        candidates = {
            "mega": problem.fused(x, routing, out, problem.settings()),
            "staged": lambda: problem.staged(x, routing),
        }
        candidates["mega"]()
        problem.finish()
        error, same_bits = check("mega", out, ERROR_LIMIT)
        figures: dict[str, object] = {"same_bits": same_bits, "error": f"{error:.1e}"}
        if peer is not None:
            sizes = dict(zip(("hidden", "intermediate", "experts", "top_k"), case.shape, strict=True))
            layer = PeerLayer(peer, ranks.world, tokens=case.tokens, **sizes)
            peer_out = torch.full_like(x, float("nan"))
            candidates["deep_gemm"] = layer.call(x, routing, peer_out)
            candidates["deep_gemm"]()
            problem.finish()
            figures["deep_gemm_error"] = f"{check('deep_gemm', peer_out, PEER_ERROR_LIMIT)[0]:.1e}"
        if ranks.group is None:
            # How much of their rate is left, where no rows travel.
            candidates["gemms"] = problem.gemms(x, routing)
        times = _timed(problem, candidates, ranks, rounds)
        if problem.collective is not None and not case.fp8:
            check("nccl", problem.over_nccl(x, routing), ERROR_LIMIT)
            alone = {"nccl": eager_microseconds(lambda: problem.over_nccl(x, routing), rounds)}
            times |= largest(alone, ranks.group, problem.device)
        return {**row_of(case, times), **figures}
    finally:
        # What the graphs held is free: _timed has returned.
        problem.buffer.close()
        if layer is not None:
            layer.close()


@torch.no_grad()
def sweep(case: MegaCase, weights: MegaWeights, ranks: Ranks, rounds: int) -> dict[str, float]:
    """Microseconds of every setting, the chosen one under ``mega``. A collective."""
    problem = MegaProblem(case, ranks.group, weights=weights)
    try:
        x, routing = problem.tokens()
        check = Checker(problem, x, routing)
        candidates = {}
        for name, settings in variants(problem.settings(), sweep=True, fp8=case.fp8):
            out = torch.full_like(x, float("nan"))
            candidates[name] = problem.fused(x, routing, out, settings)
            candidates[name]()
            problem.finish()
            check(name, out, ERROR_LIMIT)
        return _timed(problem, candidates, ranks, rounds)
    finally:
        problem.buffer.close()


def row_of(case: MegaCase, times: dict[str, float]) -> dict[str, object]:
    """Times of a call, others' over the mega-kernel's, and TFLOPS of a GPU in the mean."""
    row: dict[str, object] = {"shape": ",".join(map(str, case.shape)), "precision": case.precision}
    row |= {"routing": case.routing, "tokens": case.tokens}
    ours = times["mega"]
    row |= {f"{name}_us": round(value, 1) for name, value in times.items()}
    row |= {f"x_{name}": round(value / ours, 3) for name, value in times.items() if name != "mega"}
    return {**row, "tflops": round(case.flops / ours / 1e6, 1)}


def regret_of(case: MegaCase, times: dict[str, float]) -> dict[str, object]:
    """What the chosen settings lose against the best."""
    ranking = sorted(times.items(), key=lambda item: item[1])
    best, best_us = ranking[0]
    return {
        "shape": ",".join(map(str, case.shape)),
        "precision": case.precision,
        "routing": case.routing,
        "tokens": case.tokens,
        "chosen_us": round(times["mega"], 1),
        "best": best,
        "best_us": round(best_us, 1),
        "regret_percent": round(100 * (times["mega"] / best_us - 1), 1),
        "ranking": " ".join(f"{name.replace(' ', '_')}={value:.1f}" for name, value in ranking),
    }


# ---------------------------------------------------------------- the command

COLUMNS = (
    *("shape", "precision", "routing", "tokens", "mega_us", "staged_us", "nccl_us", "deep_gemm_us", "gemms_us"),
    *("x_staged", "x_nccl", "x_deep_gemm", "x_gemms", "tflops"),
    *("same_bits", "error", "deep_gemm_error", "chosen_us", "best", "best_us", "regret_percent"),
)


def run(
    shapes: Sequence[Sequence[int]],
    tokens: Sequence[int],
    routings: Sequence[str],
    folder: Path,
    rounds: int,
    sweeps: bool,
    peer: bool = True,
    precisions: Sequence[str] = ("fp8",),
    pause: float = 0.0,
) -> list[dict[str, object]]:
    """Measures, and prints and writes ``mega.csv``, or ``mega_sweep.csv``, into ``folder`` from rank 0.

    Raises:
        MegaMoEError: an argument breaks a rule, or this machine cannot run the kernel.
        RuntimeError: somebody's results are wrong.
    """
    wanted = cases(shapes, tokens, routings, world_size(), precisions)
    check_number("pause", pause, 0.0)
    check_gpu()
    from megamoe.kernels import mega

    if "fp8" in precisions and not mega.FP8_SUPPORTED:
        fail_value("triton", "3.8 or later", "must be 3.6 or 3.7 for the mega-kernel in FP8", "Install triton 3.6.")
    begin = time.perf_counter()
    with started() as world:
        ranks = Ranks(world, world if size_of(world) > 1 else None, rank_of(world), pause)
        module, why = find_peer() if peer and not sweeps else (None, "")
        if why and ranks.rank == 0:
            print(why, flush=True)
        rows = _run(wanted, module, ranks, folder, rounds, sweeps)
    if ranks.rank == 0:
        print(f"{world_size()} GPUs, {time.perf_counter() - begin:.0f} s", flush=True)
        show(rows, COLUMNS)
    return rows


def _run(
    wanted: Sequence[MegaCase], module: ModuleType | None, ranks: Ranks, folder: Path, rounds: int, sweeps: bool
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    layer, weights, peer = None, None, None
    for case in wanted:
        if (case.shape, case.precision) != layer:
            # The old ones first: two layers' weights need not fit.
            weights = peer = None
            torch.cuda.empty_cache()
            generator = torch.Generator(torch.device("cuda", torch.cuda.current_device())).manual_seed(1 + ranks.rank)
            layer, weights = (case.shape, case.precision), random_weights(case, size_of(ranks.group), generator)
            # It has no such kernel in BF16.
            peer = PeerWeights(module, weights.up, weights.down) if module is not None and case.fp8 else None
        if sweeps:
            rows.append(regret_of(case, sweep(case, weights, ranks, rounds)))
        else:
            rows.append(measure(case, weights, peer, ranks, rounds))
        torch.cuda.empty_cache()
        if ranks.rank == 0:
            print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
            # After each case: a run that is stopped leaves what it has measured.
            write_csv(rows, folder / ("mega_sweep.csv" if sweeps else "mega.csv"))
    return rows
