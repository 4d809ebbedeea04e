"""The command line: help, what it runs, what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import megamoe
from megamoe.bench import gemm
from megamoe.cli import app

ROOT = Path(megamoe.__file__).parent.parent


def plain(text: str) -> str:
    """Without colours, frames and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())


def invoke(*arguments: str):
    result = CliRunner().invoke(app, list(arguments), terminal_width=200)
    return result, plain(result.output)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["bench"]),
        (["bench", "--help"], ["gemm", "peers"]),
        (["bench", "quant", "--help"], ["casts"]),
        (["bench", "gemm", "--help"], ["--groups", "--sweep", "--out", "--rounds", "DeepGEMM"]),
    ],
)
def test_help(arguments, words):
    result, text = invoke(*arguments)
    assert result.exit_code == 0
    assert all(word in text for word in words), text


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_nothing_to_do_shows_the_help(arguments):
    _, text = invoke(*arguments)
    assert "Usage" in text and "bench" in text


@pytest.mark.parametrize("options", [[], ["--sweep"]])
def test_unknown_group(options):
    result, text = invoke("bench", "gemm", "--groups", "fp8,no-such", *options)
    assert result.exit_code == 2
    assert "groups = 'no-such': must be one of 'fp8'" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    "arguments", [["bench", "no-such"], ["bench", "gemm", "--no-such"], ["bench", "gemm", "--rounds", "0"]]
)
def test_bad_usage(arguments):
    result, text = invoke(*arguments)
    assert result.exit_code == 2 and "Error" in text


@pytest.mark.parametrize("arguments", [["gemm", "--groups", "few"], ["quant"]])
def test_without_a_gpu(arguments, monkeypatch):
    monkeypatch.setattr(gemm.torch.cuda, "is_available", lambda: False)
    result, text = invoke("bench", *arguments)
    assert result.exit_code == 2
    assert "must be True. Run this on a machine with an NVIDIA GPU." in text


@pytest.mark.parametrize(("sweep", "function"), [(False, "run"), (True, "run_sweep")])
def test_arguments_arrive(sweep, function, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(gemm, function, lambda *arguments: calls.append(arguments))
    options = ["--sweep"] if sweep else []
    for groups in (["--groups", "fp8, masked"], []):
        result, text = invoke("bench", "gemm", *groups, "--out", str(tmp_path), "--rounds", "3", *options)
        assert result.exit_code == 0, text
    assert calls == [(["fp8", "masked"], tmp_path, 3), (list(gemm.GROUPS), tmp_path, 3)]


def test_as_a_module():
    def python(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "megamoe", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    shown = python("bench", "gemm", "--help")
    assert shown.returncode == 0, shown.stderr
    assert "--groups" in plain(shown.stdout)
    refused = python("bench", "gemm", "--groups", "no-such")
    assert refused.returncode == 2
    assert "groups = 'no-such'" in plain(refused.stderr) and "Traceback" not in refused.stderr
