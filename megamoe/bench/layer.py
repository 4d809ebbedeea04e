"""One MoE layer beside the same layer in plain torch: times, TFLOP/s, and what is kept for the backward pass.

Run: python -m megamoe bench layer, or torchrun --standalone --nproc-per-node 2 -m megamoe bench layer: the experts are
then spread over the ranks, and the baseline is the layer whose rows travel by torch.distributed. Routing is given, the
same to all. Outputs and all gradients are compared before anything is timed. Calls are eager: graphs would hold the
memory of all contenders at once. Ratios are baseline's time / our time.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megamoe.bench import ranks, tables
from megamoe.bench.gemm import geometric_mean
from megamoe.bench.timing import check_gpu
from megamoe.config import PRECISIONS, RECOMPUTES, MoEConfig
from megamoe.kernels import weight_cache
from megamoe.layers.moe import MoE
from megamoe.layers.parallel import local_tensor
from megamoe.types import Routing

PATHS = ("collective", "staged")
"""Between ranks, in training."""

SEED = 0
"""Of weights, tokens and routing."""

LIMITS = {"bf16": 0.02, "fp8": 0.08}
"""Relative Frobenius error of outputs and gradients against BF16's, which are 0.4 % off themselves."""

PART_FACTOR = 2.0
"""So many times the error may be in a token's row or an expert's gradient: in the norm of all it does not show."""

CHUNK = 1 << 26
"""Elements compared at once."""

FLUSH_BYTES = 256 << 20

PASSES = ("inference", "forward", "forward_backward", "new_weights")
"""Without gradients; with them, the backward pass not run; both passes; the same with new FP8 copies of the weights."""

# Under its private name in torch 2.9.
_grouped_mm = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm


@dataclass(frozen=True)
class LayerCase:
    """Tokens of each rank and the layer's sizes."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int

    @property
    def label(self) -> str:
        return f"T={self.tokens} H={self.hidden} I={self.intermediate} E={self.experts} K={self.top_k}"

    def flops(self, name: str) -> float:
        """Of a rank's tokens in one of ``PASSES``; what ``recompute`` computes again does not count."""
        forward = 6.0 * self.tokens * self.top_k * self.hidden * self.intermediate
        return forward if name in ("inference", "forward") else 3 * forward


CASES = (
    LayerCase(32768, 4096, 1024, 128, 8),
    LayerCase(16384, 4096, 2048, 64, 8),
    LayerCase(8192, 7168, 2048, 32, 8),
)


@dataclass(frozen=True)
class Contender:
    """A way to compute the layer.

    Attributes:
        layer: "torch" or "megamoe".
        path: between ranks, as ``MoE`` takes it; "local" on one.
    """

    layer: str
    precision: str
    recompute: str
    path: str

    @property
    def label(self) -> str:
        return f"{self.layer} {self.precision} recompute={self.recompute} {self.path}"

    @property
    def baseline(self) -> Contender:
        """Who it is measured against."""
        return TORCH if self.path == "local" else replace(self, path="collective")


TORCH = Contender("torch", "bf16", "none", "local")


def contenders(paths: Sequence[str] = ()) -> list[Contender]:
    """Those of one rank, or with ``paths`` those of several; the first one is what results are compared with."""
    found = [] if paths else [TORCH]
    for path, precision, recompute in itertools.product(paths or ["local"], PRECISIONS, RECOMPUTES):
        found.append(Contender("megamoe", precision, recompute, path))
    return found


def plain_layer(x: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The layer as one writes it in torch: ``[T, H]`` of ``x [T, H]``, weights as in ``Experts``."""
    experts, order = routing.topk_index.flatten().sort(stable=True)
    ids = torch.arange(gate_up.shape[0], device=x.device)
    ends = torch.searchsorted(experts, ids, right=True, out_int32=True)
    token = order // routing.topk_index.shape[1]
    rows = x.index_select(0, token)
    gate, up = _grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    rows = _grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    weights = routing.topk_weights.flatten()[order].to(rows.dtype)
    return torch.zeros_like(x).index_add_(0, token, rows * weights.unsqueeze(1))


class _Given(nn.Module):
    """A router that knows the answer."""

    def __init__(self, routing: Routing):
        super().__init__()
        self.routing = routing

    def forward(self, tokens: torch.Tensor, token_mask: torch.Tensor | None) -> Routing:
        return self.routing


@dataclass(frozen=True)
class Side:
    """A contender at work.

    Attributes:
        forward: makes the output.
        leaves: what gets gradients: ``x``, ``topk_weights``, ``gate_up_proj``, ``down_proj``.
    """

    forward: Callable[[], torch.Tensor]
    leaves: dict[str, torch.Tensor]

    @torch.no_grad()
    def infer(self) -> None:
        """Without gradients."""
        self.forward()

    def train(self, grad: torch.Tensor) -> torch.Tensor:
        """Both passes; gradients are written, not added. Returns the output."""
        self.drop_gradients()
        out = self.forward()
        out.backward(grad)
        return out.detach()

    def train_new_weights(self, grad: torch.Tensor) -> None:
        """Both passes as after an optimizer step: FP8 copies of the weights are cast again."""
        for name in ("gate_up_proj", "down_proj"):
            weight_cache.mark_changed(self.leaves[name])
        self.train(grad)

    def drop_gradients(self) -> None:
        for leaf in self.leaves.values():
            leaf.grad = None

    def results(self, grad: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """Output and gradients, of parameters this rank's part."""
        found = {"out": self.train(grad)}
        for name, leaf in self.leaves.items():
            found[name] = None if leaf.grad is None else local_tensor(leaf.grad)
        self.drop_gradients()
        return found

    def saved_bytes(self) -> int:
        """Bytes of the distinct storages that autograd keeps from the forward pass, inputs and output not counted."""
        storages = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = local_tensor(tensor).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = self.forward()
        for tensor in (out, *self.leaves.values()):
            storages.pop(local_tensor(tensor.detach()).untyped_storage().data_ptr(), None)
        return sum(storages.values())

    def held_bytes(self) -> int:
        """What the forward pass leaves allocated on the GPU, its output not counted. Not in its first call."""
        self.drop_gradients()
        before = torch.cuda.memory_allocated()
        out = self.forward()
        return torch.cuda.memory_allocated() - before - out.nbytes


class LayerProblem:
    """A case's inputs, and the contenders' layers: each has weights of its own, all with the same values."""

    def __init__(
        self, case: LayerCase, chosen: Sequence[Contender], device: torch.device, group: dist.ProcessGroup | None
    ):
        self.case, self.device = case, device
        generator = torch.Generator(device).manual_seed(SEED + ranks.rank_of(group))
        options = dict(device=device, generator=generator)
        self.x = torch.randn(case.tokens, case.hidden, **options).bfloat16().requires_grad_()
        self.grad = torch.randn(case.tokens, case.hidden, **options).bfloat16()
        scores = torch.rand(case.tokens, case.experts, **options)
        weights, index = scores.topk(case.top_k)
        self.routing = Routing(index, (weights / weights.sum(1, keepdim=True)).requires_grad_())
        self.layers: list[MoE] = []
        self.sides = {contender: self._side(contender, group) for contender in chosen}

    def _side(self, contender: Contender, group: dist.ProcessGroup | None) -> Side:
        case, x = self.case, self.x
        sizes = case.hidden, case.intermediate, case.experts, case.top_k
        options = dict(precision=contender.precision, recompute=contender.recompute, max_tokens_per_rank=case.tokens)
        path = "collective" if contender.path == "local" else contender.path
        torch.manual_seed(SEED)
        layer = MoE(
            MoEConfig(*sizes, **options),
            group,
            router=_Given(self.routing),
            device=self.device,
            dtype=torch.bfloat16,
            path=path,
        )
        self.layers.append(layer)
        gate_up, down = layer.experts.gate_up_proj, layer.experts.down_proj
        leaves = dict(x=x, topk_weights=self.routing.topk_weights, gate_up_proj=gate_up, down_proj=down)
        if contender.layer == "torch":
            return Side(lambda: plain_layer(x, self.routing, gate_up, down), leaves)
        return Side(lambda: layer(x), leaves)

    def close(self) -> None:
        """Gives back the memory that ranks share."""
        for layer in self.layers:
            layer.close()

    def passes(self, contender: Contender) -> dict[str, Callable[[], object]]:
        """What is timed, by name."""
        side = self.sides[contender]
        found = dict(
            inference=side.infer,
            forward=side.forward,
            forward_backward=lambda: side.train(self.grad),
            new_weights=lambda: side.train_new_weights(self.grad),
        )
        if contender.precision != "fp8":
            del found["new_weights"]
        return found


# ---------------------------------------------------------------- results


def relative_errors(actual: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Relative Frobenius error of all, and of the worst slice of the first dimension; NaN if a value is."""
    if actual.shape != expected.shape:
        return math.inf, math.inf
    difference, norm = [], []
    step = max(1, CHUNK // max(1, math.prod(expected.shape[1:])))
    for got, want in zip(actual.split(step), expected.split(step), strict=True):
        got, want = got.flatten(1).double(), want.flatten(1).double()
        difference.append((got - want).square().sum(1))
        norm.append(want.square().sum(1))
    difference, norm = torch.cat(difference), torch.cat(norm)
    # An expert without rows has zero gradients on both sides.
    parts = torch.where((difference == 0) & (norm == 0), 0.0, difference / norm)
    return (difference.sum() / norm.sum()).sqrt().item(), parts.max().sqrt().item()


def check(problem: LayerProblem, group: dist.ProcessGroup | None) -> dict[Contender, dict[str, float]]:
    """Errors of every contender's output, and the largest of its gradients.

    Raises:
        RuntimeError: on all ranks, if a result is wrong on one.
    """
    names = iter(problem.sides.items())
    first, side = next(names)
    expected = side.results(problem.grad)
    found = {first: {"out_error": 0.0, "grad_error": 0.0}}
    for contender, side in names:
        actual, limit = side.results(problem.grad), LIMITS[contender.precision]
        errors = {}
        for name, want in expected.items():
            got = actual[name]
            whole, part = (math.inf, math.inf) if got is None or want is None else relative_errors(got, want)
            # A token's few weights may all have small gradients.
            part = 0.0 if name == "topk_weights" else part
            worst = ranks.largest({"all": whole, "part": part}, group, problem.device)
            if worst["all"] > limit or worst["part"] > PART_FACTOR * limit:
                raise RuntimeError(f"{problem.case.label}: {contender.label}: {name} has relative errors {worst}")
            errors[name] = worst["all"]
        found[contender] = {"out_error": errors.pop("out"), "grad_error": max(errors.values())}
        del actual
    return found


# ---------------------------------------------------------------- times


def _start(call: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None) -> Callable[[], float]:
    """Runs ``call``; the result waits for the device, and says how many microseconds it took."""
    if group is not None:
        dist.barrier(group)
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        microseconds = (time.perf_counter() - start) * 1e6
        return lambda: microseconds
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # Empties the L2 cache.
    torch.zeros(FLUSH_BYTES, dtype=torch.int8, device=device)
    start.record()
    call()
    end.record()

    def microseconds() -> float:
        end.synchronize()
        return start.elapsed_time(end) * 1000

    return microseconds


def interleaved(
    calls: dict[tuple, Callable[[], object]], rounds: int, device: torch.device, group: dist.ProcessGroup | None
) -> dict[tuple, float]:
    """Median microseconds of each call, the slowest rank's; all run in each round, in random order, alike on all ranks.

    Each runs once before. Within a round nothing waits for the device but the ranks, where they meet before each call:
    on one rank the host is ahead, as in training.
    """
    for call in calls.values():
        call()
    samples: dict[tuple, list[float]] = {key: [] for key in calls}
    order = random.Random(SEED)
    for _ in range(rounds):
        started = {key: _start(calls[key], device, group) for key in order.sample(list(calls), len(calls))}
        for key, microseconds in started.items():
            samples[key].append(microseconds())
    return ranks.largest({key: statistics.median(values) for key, values in samples.items()}, group, device)


def row_of(
    case: LayerCase,
    contender: Contender,
    errors: dict[str, float],
    times: dict[tuple, float],
    kept: dict[tuple, float],
) -> dict[str, object]:
    """A row of the table.

    Args:
        times: microseconds by (contender, pass), the baseline's too.
        kept: bytes by (contender, "saved" or "held").
    """
    base = contender.baseline
    row: dict[str, object] = {"case": case.label, **asdict(contender)}
    row.update({name: float(f"{value:.2e}") for name, value in errors.items()})
    for name in PASSES:
        value = times.get((contender, name))
        if value is not None:
            # BF16 keeps no copies.
            of_base = times.get((base, name), times[base, "forward_backward"])
            row[f"{name}_ms"] = round(value / 1000, 3)
            row[f"{name}_tflops"] = round(case.flops(name) / value / 1e6, 1)
            row[f"x_{name}"] = round(of_base / value, 3)
    for name in ("saved", "held"):
        value = kept.get((contender, name))
        if value is not None:
            row[f"{name}_bytes"] = round(value)
            row[f"{name}_of_baseline"] = round(value / kept[base, name], 3)
    return row


def measure(
    case: LayerCase,
    device: torch.device,
    rounds: int,
    group: dist.ProcessGroup | None = None,
    paths: Sequence[str] = (),
) -> list[dict[str, object]]:
    """A row for each contender.

    Args:
        group, paths: of the ranks, and how rows travel between them; left out on one.

    Raises:
        RuntimeError: a result is wrong.
    """
    problem = LayerProblem(case, contenders(paths), device, group)
    try:
        errors = check(problem, group)
        calls = {(side, name): call for side in problem.sides for name, call in problem.passes(side).items()}
        times = interleaved(calls, rounds, device, group)
        kept = {(contender, "saved"): side.saved_bytes() for contender, side in problem.sides.items()}
        if device.type == "cuda":
            kept.update({(contender, "held"): side.held_bytes() for contender, side in problem.sides.items()})
        kept = ranks.largest(kept, group, device)
        return [row_of(case, contender, errors[contender], times, kept) for contender in problem.sides]
    finally:
        problem.close()


# ---------------------------------------------------------------- the table


def _is_ratio(column: str) -> bool:
    return column.startswith("x_") or column.endswith("_of_baseline")


def means(rows: list[dict[str, object]]) -> list[str]:
    """Lines with the geometric mean of each ratio over all cases, by contender."""
    lines = []
    columns = [field.name for field in fields(Contender)]
    for contender in dict.fromkeys(Contender(*(row[column] for column in columns)) for row in rows):
        if contender == contender.baseline:
            continue
        mine = [row for row in rows if asdict(contender).items() <= row.items()]
        parts = []
        for column in filter(_is_ratio, mine[0]):
            values = [float(row[column]) for row in mine]
            parts.append(f"{column} {geometric_mean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        lines.append(f"{contender.label}: geometric mean (least to most) of {', '.join(parts)}")
    return lines


def run(folder: Path, rounds: int) -> None:
    """Measures, prints, and writes ``layer.csv`` into ``folder``, under torchrun from rank 0."""
    check_gpu()
    if ranks.world_size() == 1:
        _run(folder, rounds, None, ())
    else:
        with ranks.started() as group:
            _run(folder, rounds, group, PATHS)


def _run(folder: Path, rounds: int, group: dist.ProcessGroup | None, paths: Sequence[str]) -> None:
    rows = []
    for case in CASES:
        found = measure(case, torch.device("cuda", torch.cuda.current_device()), rounds, group, paths)
        torch.cuda.empty_cache()
        rows += found
        if ranks.rank_of(group) == 0:
            for row in found:
                print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if ranks.rank_of(group) == 0:
        names = [field.name for field in fields(Contender)]
        tables.show(rows, ["case", *names, *(column for column in tables.columns_of(rows) if _is_ratio(column))])
        print(*means(rows), sep="\n")
        tables.write_csv(rows, folder / "layer.csv")
