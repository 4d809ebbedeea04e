"""Weight gradients in the GEMM benchmark without a GPU: problems, figures; calls on small problems on a CPU."""

from __future__ import annotations

import pytest
import torch

import megamoe.compat.deep_gemm as compat
from megamoe.bench import gemm, gemm_cases, wgrad_cases
from megamoe.bench.wgrad_cases import GROUPS, WgradCase, WgradProblem
from megamoe.kernels import gemm_ops
from megamoe.kernels.tiles import legal_k_tiles

FAMILIES = ("wgrad", "wgrad fp32", "wgrad fp8", "wgrad fp8 blocks")
SMALL = {family: WgradCase(family, (3, 130), 64, 136) for family in FAMILIES}
needs_grouped_mm = pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="needs torch's")


# ---------------------------------------------------------------- problems and figures


def test_groups():
    found = wgrad_cases.cases(list(GROUPS))
    assert {case.family for case in found} == set(SMALL)
    assert len(found) == sum(len(wgrad_cases.cases([group])) for group in GROUPS)
    assert all(case.m % 128 == case.n % 128 == 0 and min(case.counts) > 0 for case in found)
    assert wgrad_cases.cases(["fp8"]) == []
    assert set(gemm.GROUPS) == {*gemm_cases.GROUPS, *GROUPS}
    assert gemm.cases(["few", "wgrad"]) == gemm_cases.cases(["few"]) + wgrad_cases.cases(["wgrad"])
    labels = [case.label for case in gemm.cases(list(gemm.GROUPS))]
    assert len(set(labels)) == len(labels)
    assert "wgrad fp8 E=8 rows=1024 M=4096 N=7168" in labels


def test_flops_and_bytes():
    sizes = (3, 0, 2), 64, 128
    assert WgradCase("wgrad", *sizes).flops == 2 * 5 * 64 * 128
    # Operands; results of all experts in bf16, or read and written in fp32.
    assert WgradCase("wgrad", *sizes).bytes == 5 * (64 + 128) * 2 + 3 * 64 * 128 * 2
    assert WgradCase("wgrad fp32", *sizes).bytes == 5 * (64 + 128) * 2 + 3 * 64 * 128 * 8
    assert WgradCase("wgrad fp8", *sizes).bytes == 5 * (64 + 128) + 3 * 64 * 128 * 8
    assert WgradCase("wgrad fp8 blocks", *sizes).bytes == 5 * (64 + 128) + 3 * 64 * 128 * 2


def test_roofline_and_row():
    case = WgradCase("wgrad fp8", (65536,) * 2, 1024, 1024)
    assert gemm.roofline_us(case) == pytest.approx(case.flops / 1979e12 * 1e6)
    row = gemm.row_of(case, {"megamoe": 10.0, "bf16": 15.0, "deep_gemm": 11.0})
    assert (row["x_bf16"], row["x_deep_gemm"], row["bf16_us"]) == (1.5, 1.1, 15.0)
    assert gemm.roofline_us(WgradCase("wgrad fp32", (65536,) * 2, 1024, 1024)) == pytest.approx(
        case.flops / 989e12 * 1e6
    )


# ---------------------------------------------------------------- calls, on a CPU


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


@pytest.mark.parametrize("family", SMALL)
def test_wrong_results_are_seen_in_any_row(family, on_cpu):
    case = SMALL[family]
    problem = WgradProblem(case, None)
    out = problem.outs[0]
    problem.poison(out)
    problem.ours()[0]()
    assert problem.check(out) < gemm.ERROR_LIMIT
    for expert, row in ((0, 0), (1, case.m - 1)):
        kept = out[expert, row].clone()
        out[expert, row] *= 1.02
        assert not problem.check(out) < gemm.ERROR_LIMIT
        out[expert, row] = kept
    if case.adds:
        # What was there is not lost.
        out -= wgrad_cases.START
        assert not problem.check(out) < gemm.ERROR_LIMIT
    out.fill_(float("nan"))
    assert not problem.check(out) < gemm.ERROR_LIMIT


def test_sets_of_small_operands(on_cpu, monkeypatch):
    monkeypatch.setattr(gemm_cases, "CACHE_BYTES", 4 * 384 * (64 + 136) * 2)
    problem = WgradProblem(SMALL["wgrad"], None)
    assert problem.sets == len(problem.operands) == len(problem.ours()) == len(problem.grouped_mm()) == 4
    assert len({a.data_ptr() for a, _ in problem.operands}) == 4


@needs_grouped_mm
@pytest.mark.parametrize("family", SMALL)
def test_measure(family, on_cpu):
    """Peers compute the same: torch's grouped GEMM, and DeepGEMM's contracts by the functions of its names."""
    expected = {
        "wgrad": {"megamoe", "grouped_mm"},
        "wgrad fp32": {"megamoe", "deep_gemm"},
        "wgrad fp8": {"megamoe", "bf16", "deep_gemm"},
        "wgrad fp8 blocks": {"megamoe", "bf16"},
    }[family]
    times = gemm.measure(SMALL[family], compat, 4)
    assert times == dict.fromkeys(expected, 4.0)
    assert set(gemm.measure(SMALL[family], None, 1)) == expected - {"deep_gemm"}


@pytest.mark.parametrize("family", ["wgrad fp32", "wgrad fp8"])
def test_wrong_results_of_a_peer_stop_the_run(family, on_cpu):
    class Peer:
        def __getattr__(self, name):
            # Overwrites instead of adding.
            return lambda a, b, d, ks, layout, c: getattr(compat, name)(a, b, d, ks, layout)

    with pytest.raises(RuntimeError, match=f"{family} E=2.*deep_gemm has relative error"):
        gemm.measure(SMALL[family], Peer(), 1)


@pytest.mark.parametrize("family", SMALL)
def test_sweep_times_every_legal_tile(family, on_cpu):
    times = gemm.sweep(SMALL[family], 1)
    assert "chosen" in times and len(times) == len(legal_k_tiles(SMALL[family].form))
