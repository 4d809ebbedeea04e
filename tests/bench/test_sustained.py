"""The benchmark of GEMMs back to back: operations, figures, sensors that are missing or odd, its command."""

from __future__ import annotations

import io
import time

import pytest
import torch

from megamoe.bench import sustained
from megamoe.bench.sustained import Sensors, cases, row_of
from tests.support.command_line import invoke, read_csv


def test_cases(seed):
    """Both contenders compute the same, and so many operations."""
    found = cases((2, 128, 64, 32), "cpu")
    assert len(found) == 12 and len({case[:2] for case in found}) == 12
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("torch lacks grouped_mm")
    for ours, theirs in zip(found[::2], found[1::2], strict=True):
        name, _, call, operations = ours
        mine, other = call().double(), theirs[2]().double()
        assert mine.shape == other.shape and operations == theirs[3]
        assert (mine - other).norm() < 1e-2 * other.norm(), name
        if "weights" in name:
            # Sums over an expert's 128 rows.
            assert operations == 2 * mine.numel() * 128
    assert {case[3] for case in found} == {2.0 * 256 * 64 * 32, 4.0 * 256 * 64 * 32}


def test_row():
    case = ("GEMM 1", "torch", lambda: None, 3e12)
    row = dict(gemm="GEMM 1", whose="torch", us=5000.0, tflops=600.0)
    assert row_of(case, 5000.0, None) == row
    assert row_of(case, 5000.0, (1500.0, 590.4)) == {**row, "mhz": 1500, "watts": 590, "tflops_per_ghz": 400.0}


def test_sensors():
    sensors, start = Sensors(), time.perf_counter()
    sensors._read(io.StringIO("1400, 500.5\n[N/A], 300\n1500, 600.5\n1980, 700\n\n"))
    assert [sample[1:] for sample in sensors.samples] == [(1400, 500.5), (1500, 600.5), (1980, 700)]
    assert sensors.between(start, time.perf_counter()) == (1500, 600.5)
    assert sensors.between(start - 2, start - 1) is None


def test_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sustained, "check_gpu", lambda: None)
    monkeypatch.setattr(sustained.shutil, "which", lambda name: None)
    monkeypatch.setattr(sustained, "cases", lambda: [("GEMM 1", "megamoe", lambda: None, 2e12)])
    monkeypatch.setattr(sustained, "sustained", lambda call, seconds: (4000.0, 0.0, 1.0))
    result, text = invoke("bench", "sustained", "--out", str(tmp_path))
    assert result.exit_code == 0 and "500.0" in text
    assert read_csv(tmp_path / "sustained.csv") == [dict(gemm="GEMM 1", whose="megamoe", us="4000.0", tflops="500.0")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_command_without_a_gpu(tmp_path):
    result, text = invoke("bench", "sustained", "--out", str(tmp_path))
    assert result.exit_code == 2 and "must be True" in text
