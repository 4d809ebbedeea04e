"""The GEMM benchmark without a GPU: its problems, figures, tables and files; its calls on small problems on a CPU."""

from __future__ import annotations

import math
import types

import pytest
import torch

from megamoe.bench import gemm, gemm_cases
from megamoe.bench.gemm_cases import GROUPS, GemmCase, Problem, cases, zipf_counts
from megamoe.kernels import gemm_ops, tiles
from tests.support.command_line import read_csv
from tests.support.errors import fails

# ---------------------------------------------------------------- problems


def test_every_group_has_problems():
    for group in GROUPS:
        found = cases([group])
        assert found, group
        assert all(case.n % 8 == 0 and case.k % 128 == 0 and min(case.counts) > 0 for case in found)
    every = cases(list(GROUPS))
    assert len(every) == sum(len(cases([group])) for group in GROUPS)
    assert cases([]) == []


def test_labels_tell_problems_apart():
    every = set(cases(list(GROUPS)))
    assert len({case.label for case in every}) == len(every)
    assert GemmCase("fp8", (8, 8), 64, 128).label == "fp8 E=2 M=8 N=64 K=128"
    assert GemmCase("masked", (8, 1), 64, 128).label == "masked E=2 rows=9 skewed N=64 K=128"


def test_families_have_groups():
    assert {case.family for case in cases(list(GROUPS))} == {"fp8", "swiglu", "bf16", "bf16 nn", "masked", "dense"}


@pytest.mark.parametrize(("experts", "rows"), [(1, 7), (8, 100), (32, 8192), (64, 10)])
def test_zipf_counts(experts, rows):
    counts = zipf_counts(experts, rows)
    assert len(counts) == experts and min(counts) >= 1
    assert list(counts) == sorted(counts, reverse=True)
    # Rounding, and the one row that every expert has.
    assert abs(sum(counts) - rows) <= experts
    if rows >= 50 * experts:
        assert counts[0] / counts[1] == pytest.approx(2, rel=0.02)


def test_flops_and_bytes():
    case = GemmCase("fp8", (3, 0, 2), 64, 128)
    assert case.flops == 2 * 5 * 64 * 128
    # Weights of two experts, 5 rows of A, 5 rows of the result in bf16.
    assert case.bytes == 2 * 64 * 128 + 5 * 128 + 5 * 64 * 2
    assert GemmCase("bf16 nn", (3, 0, 2), 64, 128).bytes == 2 * (2 * 64 * 128 + 5 * 128) + 5 * 64 * 2


# ---------------------------------------------------------------- figures


def test_geometric_mean():
    assert gemm.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert gemm.geometric_mean([0.5, 2.0, 1.0]) == pytest.approx(1.0)
    assert math.isnan(gemm.geometric_mean([]))


def test_roofline():
    compute_bound = GemmCase("fp8", (8192,) * 8, 4096, 7168)
    assert gemm.roofline_us(compute_bound) == pytest.approx(compute_bound.flops / 1979e12 * 1e6)
    memory_bound = GemmCase("fp8", (1,) * 8, 4096, 7168)
    assert gemm.roofline_us(memory_bound) == pytest.approx(memory_bound.bytes / 4.3e12 * 1e6)
    bf16 = GemmCase("bf16", (8192,) * 8, 4096, 7168)
    assert gemm.roofline_us(bf16) == pytest.approx(2 * gemm.roofline_us(compute_bound), rel=2e-3)


def test_row():
    case = GemmCase("swiglu", (1000,) * 2, 1000, 1000)
    row = gemm.row_of(case, {"megamoe": 10.0, "fused": 10.5, "deep_gemm": 12.0})
    assert row["case"] == case.label
    assert (row["megamoe_us"], row["fused_us"], row["deep_gemm_us"]) == (10.0, 10.5, 12.0)
    assert row["fused_cost_percent"] == pytest.approx(5.0)
    assert row["x_deep_gemm"] == pytest.approx(1.2)
    assert row["tflops"] == pytest.approx(4e9 / 10e-6 / 1e12)
    assert row["tb_per_s"] == pytest.approx((2e6 + 2e6 + 4e6) / 10e-6 / 1e12)
    assert row["of_roofline"] == pytest.approx(gemm.roofline_us(case) / 10, abs=1e-3)
    assert "x_fused" not in row


# ---------------------------------------------------------------- tables and files


@pytest.fixture
def timed(monkeypatch):
    """Makes up the times of a run: ours 10, 20, 40 ... microseconds, DeepGEMM's twice as long."""
    seen = []

    def measure(case, peer, rounds):
        seen.append((case, peer, rounds))
        ours = 10.0 * 2 ** (len(seen) % 3)
        times = {"megamoe": ours, "deep_gemm": 2 * ours}
        return {**times, "fused": 1.01 * ours} if case.family == "swiglu" else times

    monkeypatch.setattr(gemm, "host_overhead", lambda peer: "megamoe 1.0 us")
    monkeypatch.setattr(gemm, "measure", measure)
    monkeypatch.setattr(gemm, "deep_gemm", lambda: "peer")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return seen


def test_run_writes_what_it_measures(timed, tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    rows = gemm.run(["swiglu", "few"], folder, 5)
    wanted = cases(["few", "swiglu"])
    assert sorted(row["case"] for row in rows) == sorted(case.label for case in wanted)
    assert {(peer, rounds) for _, peer, rounds in timed} == {("peer", 5)}
    written = read_csv(folder / "gemm.csv")
    assert [row["case"] for row in written] == [row["case"] for row in rows]
    for row, fields in zip(rows, written, strict=True):
        assert {key: value for key, value in fields.items() if value} == {k: str(v) for k, v in row.items()}
        assert float(fields["x_deep_gemm"]) == 2.0
        assert bool(fields["fused_us"]) == row["case"].startswith("swiglu")
    output = capsys.readouterr().out
    assert "deep_gemm: geometric mean 2.000, least 2.000" in output
    assert all(case.label in output for case in wanted)


def test_run_without_a_peer(timed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gemm, "deep_gemm", lambda: None)
    monkeypatch.setattr(gemm, "measure", lambda case, peer, rounds: {"megamoe": 3.0})
    rows = gemm.run(["few"], tmp_path, 1)
    assert all("x_deep_gemm" not in row for row in rows)
    output = capsys.readouterr().out
    assert "DeepGEMM is not installed" in output and "geometric mean" not in output
    assert not (tmp_path / "gemm.png").exists()


def test_sweep_writes_the_regret(timed, tmp_path, monkeypatch):
    monkeypatch.setattr(gemm, "sweep", lambda case, rounds: {"chosen": 11.0, "16x64": 10.0, "64x16": 12.5})
    rows = gemm.run_sweep(["few"], tmp_path, 2)
    written = read_csv(tmp_path / "gemm_sweep.csv")
    assert len(rows) == len(written) == len(cases(["few"]))
    assert written[0]["best"] == "16x64" and float(written[0]["regret_percent"]) == 10.0
    assert written[0]["first"] == "16x64=10.00 chosen=11.00 64x16=12.50"


def test_plot_if_possible(timed, tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    gemm.run(["few"], tmp_path, 1)
    assert (tmp_path / "gemm.png").stat().st_size > 1000


@pytest.mark.parametrize("run", [gemm.run, gemm.run_sweep])
def test_refused(run, tmp_path, monkeypatch):
    with fails(ValueError, "groups", "no-such", "must be one of 'fp8'"):
        run(["few", "no-such"], tmp_path, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with fails(ValueError, "torch.cuda.is_available()", False, "must be True"):
        run(["few"], tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_peer_is_optional(monkeypatch):
    missing = types.ModuleType("deep_gemm")
    monkeypatch.setitem(__import__("sys").modules, "deep_gemm", None)
    assert gemm.deep_gemm() is None
    monkeypatch.setitem(__import__("sys").modules, "deep_gemm", missing)
    assert gemm.deep_gemm() is missing


# ---------------------------------------------------------------- calls, on a CPU

SMALL = {
    "fp8": GemmCase("fp8", (3, 130), 64, 256),
    "swiglu": GemmCase("swiglu", (3, 130), 256, 128),
    "bf16": GemmCase("bf16", (3, 130), 64, 128),
    "bf16 nn": GemmCase("bf16 nn", (3, 130), 64, 128),
    "masked": GemmCase("masked", (3, 1), 64, 128),
    "dense": GemmCase("dense", (5,), 64, 128),
}


@pytest.fixture
def on_cpu(monkeypatch, seed):
    monkeypatch.setattr(gemm_cases, "DEVICE", "cpu")
    monkeypatch.setattr(gemm_cases, "CACHE_BYTES", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gemm_ops, "get_num_sms", lambda device=None: 132)

    def once(candidates, rounds):
        for calls in candidates.values():
            for call in calls:
                call()
        return {name: float(rounds) for name in candidates}

    monkeypatch.setattr(gemm, "interleaved", once)


class Peer:
    """Has DeepGEMM's names and our results."""

    def __init__(self):
        self.called = []

    def __getattr__(self, name):
        if not name.startswith(("m_grouped_", "fp8_gemm")):
            raise AttributeError(name)

        def call(a, b, out, *rest):
            self.called.append(name)
            out.copy_(self.result)

        return call


@pytest.mark.parametrize("family", SMALL)
def test_calls(family, on_cpu):
    case, peer = SMALL[family], Peer()
    problem = Problem(case, peer)
    problem.ours()[0]()
    error = problem.check(problem.outs[0])
    assert error < gemm.ERROR_LIMIT
    # A wrong result is seen in whatever row it is.
    start = problem.spans[-1][0]
    problem.outs[0].reshape(-1, case.n)[start] += 1
    assert not problem.check(problem.outs[0]) < gemm.ERROR_LIMIT
    problem.deep_gemm()[0]
    assert len(problem.ours()) == problem.sets == 1


@pytest.mark.parametrize("what", ["code", "scale", "nothing written"])
def test_wrong_fused_results_are_not_timed(what, on_cpu, monkeypatch):
    true_swiglu = Problem.swiglu

    def swiglu(self):
        calls, out = true_swiglu(self)
        row = self.spans[-1][1] - 1
        # Next to nothing in the norm of the whole.
        self.row_weights[row] = 1e-3

        def call():
            if what != "nothing written":
                calls[0]()
            if what == "code":
                out.codes.view(torch.uint8)[row] ^= 0x08
            elif what == "scale":
                out.scales[row] *= 2

        return [call], out

    monkeypatch.setattr(Problem, "swiglu", swiglu)
    with pytest.raises(RuntimeError, match="fused has relative error"):
        gemm.measure(SMALL["swiglu"], None, 1)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="needs torch's grouped GEMM")
def test_wrong_results_of_torch_are_not_timed(on_cpu, monkeypatch):
    monkeypatch.setattr(Problem, "grouped_mm", lambda self: [lambda: 1.01 * self.outs[0]])
    with pytest.raises(RuntimeError, match="grouped_mm has relative error"):
        gemm.measure(SMALL["bf16"], None, 1)


@pytest.mark.parametrize("family", SMALL)
def test_measure(family, on_cpu, monkeypatch):
    case, peer = SMALL[family], Peer()
    made = []

    class Recorded(Problem):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

        def ours(self, tile=None):
            calls = super().ours(tile)
            calls[0]()
            peer.result = self.outs[0].clone()
            return calls

        def grouped_mm(self):
            return [lambda: peer.result]

    monkeypatch.setattr(gemm, "Problem", Recorded)
    times = gemm.measure(case, peer, 4)
    expected = {"megamoe", "deep_gemm"}
    expected |= {"fused"} if family == "swiglu" else set()
    if family.startswith("bf16") and hasattr(torch.nn.functional, "grouped_mm"):
        expected |= {"grouped_mm"}
    assert set(times) == expected and set(times.values()) == {4.0}
    assert len(set(peer.called)) == 1
    assert peer.called[0].startswith("fp8_gemm_nt" if family == "dense" else "m_grouped_")
    assert ("masked" in peer.called[0]) == (family == "masked")
    assert ("bf16" in peer.called[0]) == family.startswith("bf16")
    assert set(gemm.measure(case, None, 1)) == expected - {"deep_gemm"}


def test_wrong_results_stop_the_run(on_cpu, monkeypatch):
    peer = Peer()
    peer.result = torch.tensor(1.0)
    with pytest.raises(RuntimeError, match=r"fp8 E=2.*deep_gemm has relative error"):
        gemm.measure(SMALL["fp8"], peer, 1)


@pytest.mark.parametrize("family", ["fp8", "masked", "bf16"])
def test_sweep_times_every_legal_tile(family, on_cpu):
    case = SMALL[family]
    times = gemm.sweep(case, 1)
    problem = Problem(case, None)
    a = problem.a if problem.is_bf16 else problem.a.codes
    sizes = gemm_ops.problem_of(problem.rows, a, len(case.counts), case.n, False)
    legal = tiles.legal_tiles(sizes, "bf16" if problem.is_bf16 else "fp8")
    assert "chosen" in times and len(times) == len(legal)
