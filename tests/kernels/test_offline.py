"""Every device kernel compiles for Hopper on a machine without a GPU, without spills and within shared memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs triton")


def test_every_kernel_compiles_and_fits(tmp_path):
    # A process of its own: the compiler's stand-in for a driver must not stay in this one.
    command = [sys.executable, "-m", "megamoe.kernels.offline", "--arch", "sm_90a"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("rowwise") for line in lines) == 24
    assert sum(line.startswith("columnwise") for line in lines) == 12
    assert sum(line.startswith("blockwise") for line in lines) == 12
    assert sum(line.startswith("swiglu") for line in lines) == 24
    assert sum(line.startswith("pack") for line in lines) == 1


def test_a_variant_that_does_not_fit_is_reported():
    from megamoe.kernels.offline import Report

    assert Report("fine", 255, 0, 227 * 1024).fits
    assert not Report("spills", 255, 8, 0).fits
    assert not Report("too large", 32, 0, 227 * 1024 + 1).fits
