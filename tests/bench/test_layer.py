"""The layer's benchmark without a GPU: figures, the baseline, what is refused; small layers on a CPU."""

from __future__ import annotations

import csv
import math

import pytest
import torch
import torch.distributed as dist

from megamoe.bench import layer
from megamoe.bench.layer import TORCH, Contender, LayerCase, LayerProblem, Side
from megamoe.kernels import weight_cache
from megamoe.kernels.layout import align_up
from megamoe.layers.moe import MoE
from megamoe.types import Routing
from tests.support.errors import fails
from tests.support.generators import ExpertWeights
from tests.support.metrics import assert_close
from tests.support.plain_moe import plain_moe
from tests.support.processes import run_ranks
from tests.test_cli import invoke

CPU = torch.device("cpu")
SMALL = LayerCase(128, 256, 128, 4, 2)
BF16, BF16_AGAIN, FP8, FP8_AGAIN = layer.contenders()[1:]


@pytest.fixture(scope="module")
def problem():
    return LayerProblem(SMALL, layer.contenders(), CPU, None)


# ---------------------------------------------------------------- figures


def test_cases_and_flops():
    case = layer.CASES[0]
    assert case.label == "T=32768 H=4096 I=1024 E=128 K=8"
    # Three products of H by I for each of the 8 rows of a token, a multiplication and an addition.
    assert case.flops("forward") == case.flops("inference") == 32768 * 8 * 3 * 4096 * 1024 * 2
    assert case.flops("forward_backward") == case.flops("new_weights") == 3 * case.flops("forward")
    assert len({case.label for case in layer.CASES}) == 3


def test_contenders():
    assert layer.contenders()[0] == TORCH == TORCH.baseline
    assert [c.label for c in layer.contenders()[1:]] == [
        f"megamoe {precision} recompute={recompute} local"
        for precision in ("bf16", "fp8")
        for recompute in ("none", "activation")
    ]
    assert all(contender.baseline == TORCH for contender in layer.contenders())
    spread = layer.contenders(["collective", "staged"])
    assert len(set(spread)) == 8 and spread[0] == Contender("megamoe", "bf16", "none", "collective")
    for contender in spread:
        assert contender.baseline.path == "collective" and contender.baseline in spread
        assert (contender.baseline == contender) == (contender.path == "collective")
        assert (contender.baseline.precision, contender.baseline.recompute) == (
            contender.precision,
            contender.recompute,
        )


def test_row():
    case = LayerCase(1000, 100, 10, 4, 2)
    times = {(TORCH, "inference"): 30.0, (TORCH, "forward"): 36.0, (TORCH, "forward_backward"): 90.0}
    times |= {(FP8, "inference"): 10.0, (FP8, "forward"): 12.0, (FP8, "forward_backward"): 40.0}
    times[FP8, "new_weights"] = 45.0
    kept = {(TORCH, "saved"): 4000.0, (FP8, "saved"): 1000.0, (TORCH, "held"): 5000.0, (FP8, "held"): 1250.0}
    errors = {"out_error": 0.0123456, "grad_error": 0.05}
    row = layer.row_of(case, FP8, errors, times, kept)
    assert row == {
        "case": case.label,
        "layer": "megamoe",
        "precision": "fp8",
        "recompute": "none",
        "path": "local",
        "out_error": 0.0123,
        "grad_error": 0.05,
        "inference_ms": 0.01,
        "inference_tflops": 1.2,
        "x_inference": 3.0,
        "forward_ms": 0.012,
        "forward_tflops": 1.0,
        "x_forward": 3.0,
        "forward_backward_ms": 0.04,
        "forward_backward_tflops": 0.9,
        "x_forward_backward": 2.25,
        # Torch has no copies to cast: against its plain passes.
        "new_weights_ms": 0.045,
        "new_weights_tflops": 0.8,
        "x_new_weights": 2.0,
        "saved_bytes": 1000,
        "saved_of_baseline": 0.25,
        "held_bytes": 1250,
        "held_of_baseline": 0.25,
    }
    base = layer.row_of(case, TORCH, errors, times, {(TORCH, "saved"): 4000.0})
    assert base["x_forward"] == base["saved_of_baseline"] == 1.0
    assert "x_new_weights" not in base and "held_bytes" not in base


def test_means():
    rows = []
    for ratio, saved in ((2.0, 0.5), (8.0, 0.125)):
        for contender in (TORCH, BF16):
            kept = {(TORCH, "saved"): 1000.0, (contender, "saved"): 1000.0 * (saved if contender == BF16 else 1)}
            times = {(TORCH, "forward_backward"): 16.0, (contender, "forward_backward"): 16.0}
            if contender == BF16:
                times[BF16, "forward_backward"] = 16.0 / ratio
            rows.append(layer.row_of(SMALL, contender, {}, times, kept))
    (line,) = layer.means(rows)
    assert line.startswith("megamoe bf16 recompute=none local: ")
    assert "x_forward_backward 4.000 (2.000 to 8.000), saved_of_baseline 0.250 (0.125 to 0.500)" in line


# ---------------------------------------------------------------- comparisons


def test_relative_errors(seed):
    expected = torch.randn(50, 4, 8)
    whole, part = layer.relative_errors(1.5 * expected, expected)
    assert whole == pytest.approx(0.5, rel=1e-6) and part == pytest.approx(0.5, rel=1e-6)
    actual = expected.clone()
    actual[17] *= 1.5
    whole, part = layer.relative_errors(actual, expected)
    assert part == pytest.approx(0.5, rel=1e-6)
    assert whole == pytest.approx(float(0.5 * expected[17].norm() / expected.norm()), rel=1e-5)
    assert layer.relative_errors(expected[:-1], expected) == (math.inf, math.inf)
    actual[17, 0, 0] = float("nan")
    assert all(map(math.isnan, layer.relative_errors(actual, expected)))


def test_slices_without_values(seed):
    expected = torch.randn(5, 8)
    expected[2] = 0
    assert layer.relative_errors(expected.clone(), expected) == (0.0, 0.0)
    actual = expected.clone()
    actual[2, 3] = 1e-6
    assert layer.relative_errors(actual, expected)[1] == math.inf


def test_large_tensors_are_compared_in_pieces(monkeypatch, seed):
    expected = torch.randn(23, 7)
    actual = expected + 0.1 * torch.randn(23, 7)
    at_once = layer.relative_errors(actual, expected)
    monkeypatch.setattr(layer, "CHUNK", 21)
    assert layer.relative_errors(actual, expected) == pytest.approx(at_once, rel=1e-12)


# ---------------------------------------------------------------- the sides


def test_baseline_is_the_layer(seed):
    tokens, experts, hidden, width = 40, 5, 32, 16
    gate_up = (torch.randn(experts, 2 * width, hidden) * hidden**-0.5).bfloat16().requires_grad_()
    down = (torch.randn(experts, hidden, width) * width**-0.5).bfloat16().requires_grad_()
    x = torch.randn(tokens, hidden).bfloat16().requires_grad_()
    # The last expert gets no rows.
    index = torch.rand(tokens, experts - 1).topk(2).indices
    weights = torch.rand(tokens, 2).requires_grad_()
    grad = torch.randn(tokens, hidden).bfloat16()
    out = layer.plain_layer(x, Routing(index, weights), gate_up, down)
    grads = torch.autograd.grad(out, [x, weights, gate_up, down], grad)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weights, gate_up, down)]
    expected = plain_moe(exact[0], index, exact[1], ExpertWeights(exact[2], exact[3], None, None))
    assert_close(out, expected, 0.02)
    for got, want in zip(grads, torch.autograd.grad(expected, exact, grad.double()), strict=True):
        assert_close(got, want, 0.02)
    assert not grads[2][-1].any() and not grads[3][-1].any()


def test_all_sides_have_the_same_values(problem):
    first = problem.sides[TORCH].leaves
    for side in problem.sides.values():
        assert side.leaves["x"] is first["x"] and side.leaves["topk_weights"] is first["topk_weights"]
        for name in ("gate_up_proj", "down_proj"):
            assert torch.equal(side.leaves[name], first[name])
            assert side.leaves[name] is not first[name] or side is problem.sides[TORCH]
    index, weights = problem.routing.topk_index, problem.routing.topk_weights
    assert torch.allclose(weights.sum(1), torch.ones(SMALL.tokens))
    assert all(len(set(row)) == SMALL.top_k for row in index.tolist())


@pytest.mark.parametrize("contender", [TORCH, BF16, FP8], ids=lambda contender: contender.label)
def test_gradients_are_not_added_up(contender, problem):
    side = problem.sides[contender]
    first = side.results(problem.grad)
    assert first.keys() == {"out", "x", "topk_weights", "gate_up_proj", "down_proj"}
    assert all(leaf.grad is None for leaf in side.leaves.values())
    side.train(problem.grad)
    side.train_new_weights(problem.grad)
    for name, leaf in side.leaves.items():
        assert torch.equal(leaf.grad, first[name]), name
    side.drop_gradients()


def test_new_weights_are_cast(problem, monkeypatch):
    casts, real = [], weight_cache._cast
    monkeypatch.setattr(weight_cache, "_cast", lambda *arguments: casts.append(real(*arguments)))
    side, passes = problem.sides[FP8], problem.passes(FP8)
    side.train(problem.grad)
    casts.clear()
    passes["forward_backward"]()
    assert not casts
    passes["new_weights"]()
    assert len(casts) == 2
    side.drop_gradients()
    assert "new_weights" not in problem.passes(TORCH) and "new_weights" not in problem.passes(BF16)


def test_passes(problem, monkeypatch):
    modes = []
    real = problem.sides[BF16].forward
    recording = Side(lambda: modes.append(torch.is_grad_enabled()) or real(), problem.sides[BF16].leaves)
    monkeypatch.setitem(problem.sides, BF16, recording)
    passes = problem.passes(BF16)
    assert list(passes) == ["inference", "forward", "forward_backward"]
    for name, with_gradients, trained in (("inference", 0, 0), ("forward", 1, 0), ("forward_backward", 1, 1)):
        modes.clear()
        recording.drop_gradients()
        passes[name]()
        assert modes == [bool(with_gradients)]
        assert all((leaf.grad is not None) == bool(trained) for leaf in recording.leaves.values())
    recording.drop_gradients()


def test_saved_bytes(problem):
    """Each storage once; not the inputs, the parameters and the output."""
    case = SMALL
    pairs = case.tokens * case.top_k
    counts = problem.routing.topk_index.flatten().bincount(minlength=case.experts).tolist()
    rows = sum(map(align_up, counts))
    hidden, width = case.hidden, case.intermediate
    # Of torch: rows before, between and after the GEMMs, and two products.
    wanted = {
        TORCH: pairs * (6 * hidden + 8 * width),
        # On a CPU pre-activations stay in fp32.
        BF16: rows * (2 * hidden + 8 * width),
        BF16_AGAIN: rows * 2 * hidden,
    }
    wanted[FP8_AGAIN] = rows * (hidden + 4 * hidden // 128)
    wanted[FP8] = wanted[FP8_AGAIN] + rows * 4 * width
    for contender, value in wanted.items():
        saved = problem.sides[contender].saved_bytes()
        # Indices and weights besides.
        assert value <= saved <= value + 40 * max(rows, pairs), contender


def test_saved_bytes_of_views_and_outputs():
    x = torch.randn(10, 10, requires_grad=True)

    def forward():
        y = x * 2
        # y is saved twice, as a whole and as a view; exp saves its result.
        return (y * y[:5].repeat(2, 1)).exp()

    assert Side(forward, {"x": x}).saved_bytes() == 2 * 400
    assert Side(lambda: x.exp(), {"x": x}).saved_bytes() == 0
    assert Side(lambda: x * x, {"x": x}).saved_bytes() == 0


def test_held_bytes(monkeypatch):
    x = torch.zeros(10, requires_grad=True)
    x.grad = torch.ones(10)
    readings = iter([1000, 1700])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(readings))
    assert Side(lambda: x * 2, {"x": x}).held_bytes() == 700 - 40
    assert x.grad is None


# ---------------------------------------------------------------- times


def test_turns_and_medians(monkeypatch):
    ran, clock = [], {"a": iter([5, 1, 100, 3, 4]), "b": iter([20, 10, 30, 50, 40])}

    def start(call, device, group):
        name = call()

        def wait():
            assert len(ran) % 2 == 0, "all of a round have started"
            return float(next(clock[name]))

        return wait

    monkeypatch.setattr(layer, "_start", start)
    calls = {("side", name): (lambda name=name: ran.append(name) or name) for name in "ab"}
    times = layer.interleaved(calls, 5, CPU, None)
    assert times == {("side", "a"): 4.0, ("side", "b"): 30.0}
    assert ran[:2] == ["a", "b"], "each once before"
    rounds = ["".join(ran[start : start + 2]) for start in range(2, 12, 2)]
    assert {"ab", "ba"} == set(rounds)


def test_time_of_a_call(monkeypatch):
    clock = iter([10.0, 10.25])
    monkeypatch.setattr(layer.time, "perf_counter", lambda: next(clock))
    assert layer._start(lambda: None, CPU, None)() == 250_000


# ---------------------------------------------------------------- measurements


def test_measure():
    rows = layer.measure(SMALL, CPU, 1)
    assert [row["precision"] for row in rows] == ["bf16"] * 3 + ["fp8"] * 2
    assert [row["layer"] for row in rows] == ["torch"] + ["megamoe"] * 4
    for row in rows:
        assert row["path"] == "local" and row["forward_backward_ms"] > 0 and row["saved_bytes"] > 0
        assert ("new_weights_ms" in row) == (row["precision"] == "fp8")
        assert "held_bytes" not in row
    for row in rows[1:]:
        assert 0 < row["out_error"] < layer.LIMITS[row["precision"]]
        assert 0 < row["grad_error"] < layer.LIMITS[row["precision"]]
    assert rows[0]["out_error"] == rows[0]["grad_error"] == 0
    assert rows[2]["saved_of_baseline"] < 0.5 and rows[4]["saved_of_baseline"] < 0.3


def _no_timing(*arguments):
    pytest.fail("a wrong result was timed")


def _spoil(found: dict, fault: str) -> None:
    name, _, kind = fault.partition(" ")
    if kind == "scaled":
        found[name] *= 1.3
    elif kind == "slice":
        found[name][1] *= 1.3
    elif kind == "value":
        found[name].flatten()[5] = float("nan")
    elif kind == "missing":
        found[name] = None
    else:
        found[name] = found[name][1:]


@pytest.mark.parametrize("number", [1, 3], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    "fault",
    [
        "out scaled",
        "out slice",
        "x scaled",
        "x slice",
        "topk_weights scaled",
        "topk_weights value",
        "gate_up_proj slice",
        "down_proj slice",
        "down_proj value",
        "x missing",
        "down_proj missing",
        "gate_up_proj shape",
    ],
)
def test_wrong_results_are_not_timed(fault, number, monkeypatch):
    real, calls = Side.results, []

    def results(self, grad):
        found = real(self, grad)
        calls.append(self)
        if len(calls) == number + 1:
            _spoil(found, fault)
        return found

    monkeypatch.setattr(Side, "results", results)
    monkeypatch.setattr(layer, "interleaved", _no_timing)
    label = layer.contenders()[number].label
    with pytest.raises(RuntimeError, match=f"{label}: {fault.split()[0]} has relative errors"):
        layer.measure(SMALL, CPU, 1)


def test_a_wrong_layer_is_not_timed(monkeypatch):
    real, closed = MoE.forward, []

    def forward(self, hidden_states, token_mask=None):
        out = real(self, hidden_states, token_mask)
        return torch.cat([out[:-1], 1.1 * out[-1:]])

    monkeypatch.setattr(MoE, "forward", forward)
    monkeypatch.setattr(MoE, "close", lambda self: closed.append(self))
    monkeypatch.setattr(layer, "interleaved", _no_timing)
    with pytest.raises(RuntimeError, match="out has relative errors {'all': 0.0.*, 'part': 0.1"):
        layer.measure(SMALL, CPU, 1)
    assert len(closed) == 5


def _measure_on_ranks(rank: int, world: int):
    group = dist.group.WORLD
    rows = layer.measure(SMALL, CPU, 1, group, ["collective"])
    # One rank's result is wrong: no rank may go on.
    real, calls = Side.results, []

    def results(self, grad):
        found = real(self, grad)
        if rank == 1:
            found["x"][0] *= 2 ** len(calls)
        calls.append(self)
        return found

    Side.results = results
    try:
        layer.measure(SMALL, CPU, 1, group, ["collective"])
    except RuntimeError as error:
        return rows, str(error)
    return rows, ""


def test_ranks():
    results = run_ranks(_measure_on_ranks, 2)
    for rows, _ in results:
        assert rows == results[0][0], "the slowest rank's, on all"
        assert [row["path"] for row in rows] == ["collective"] * 4
        assert all(row["x_forward_backward"] == row["saved_of_baseline"] == 1.0 for row in rows)
        assert 0 < rows[2]["grad_error"] < 0.08
    assert all("x has relative errors" in error for _, error in results)


def test_run_writes_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(layer, "check_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(layer, "CASES", layer.CASES[:2])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    times = {(side, name): 10.0 for side in (TORCH, FP8) for name in layer.PASSES[: 3 + (side == FP8)]}
    kept = {(TORCH, "saved"): 4.0, (FP8, "saved"): 1.0}

    def measure(case, device, rounds, group, paths):
        assert (device, rounds, group, paths) == (torch.device("cuda", 0), 3, None, ())
        return [layer.row_of(case, side, {"out_error": 0.0, "grad_error": 0.0}, times, kept) for side in (TORCH, FP8)]

    monkeypatch.setattr(layer, "measure", measure)
    result, text = invoke("bench", "layer", "--out", str(tmp_path / "new"), "--rounds", "3")
    assert result.exit_code == 0, text
    assert "saved_of_baseline 0.250" in text
    with open(tmp_path / "new" / "layer.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["case"], row["layer"]) for row in rows] == [
        (case.label, name) for case in layer.CASES for name in ("torch", "megamoe")
    ]
    assert rows[0]["x_new_weights"] == "" and rows[1]["x_new_weights"] == "1.0"


def test_needs_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with fails(ValueError, "torch.cuda.is_available()", False, "must be True"):
        layer.run(tmp_path, 1)
    result, text = invoke("bench", "layer")
    assert result.exit_code == 2 and "Run this on a machine with an NVIDIA GPU." in text


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_on_a_gpu():
    """What the allocator holds is what autograd saves, up to its rounding."""
    rows = layer.measure(LayerCase(4096, 1024, 512, 8, 2), torch.device("cuda", 0), 2)
    for row in rows:
        assert row["saved_bytes"] <= row["held_bytes"] * 1.01 and row["held_bytes"] <= row["saved_bytes"] * 1.05, row
        assert row["forward_ms"] < row["forward_backward_ms"]
