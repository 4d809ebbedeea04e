"""The command line: help, what it runs, what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import megamoe
from megamoe.bench import gemm
from tests.support.command_line import invoke, plain

ROOT = Path(megamoe.__file__).parent.parent


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["bench", "convert"]),
        (["convert", "--help"], ["SRC", "DST", "--to", "--dequantize", "--max-shard-size", "--no-verify"]),
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


def write_mixtral(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint of one Mixtral layer with two experts."""
    block = "model.layers.0.block_sparse_moe."
    shapes = {"w1": (6, 8), "w2": (8, 6), "w3": (6, 8)}
    tensors = {f"{block}experts.{e}.{w}.weight": torch.randn(s) for e in range(2) for w, s in shapes.items()}
    tensors[f"{block}gate.weight"] = torch.randn(2, 8)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return tensors


def test_convert(tmp_path, seed):
    tensors = write_mixtral(tmp_path / "src")
    src, dst, back = (str(tmp_path / name) for name in ("src", "dst", "back"))
    result, text = invoke("convert", src, dst, "--to", "megamoe", "--max-shard-size", "500B")
    assert result.exit_code == 0 and f"{dst} is complete and verified." in result.output.replace("\n", "")
    assert "write" in text and "verify" in text and len(list(Path(dst).glob("*.safetensors"))) > 1
    result, text = invoke("convert", dst, back, "--to", "hf", "--no-verify")
    assert result.exit_code == 0 and "is complete." in text and "verify" not in text
    loaded = load_file(Path(back) / "model.safetensors")
    assert loaded.keys() == tensors.keys() and all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_convert_refuses(tmp_path, seed):
    tensors = write_mixtral(tmp_path / "src")
    src, dst = str(tmp_path / "src"), str(tmp_path / "dst")
    for arguments, words in (
        (["--to", "onnx"], "to = 'onnx': must be one of 'hf', 'megamoe'"),
        (["--to", "hf"], "is not in megamoe's format"),
        (["--to", "megamoe", "--max-shard-size", "big"], "max_shard_size = 'big': must be a positive size"),
    ):
        result, text = invoke("convert", src, dst, *arguments)
        assert result.exit_code == 2 and words in text and "Traceback" not in text, text
    result, _ = invoke("convert", src, dst)
    assert result.exit_code == 2
    missing = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    del tensors[missing]
    save_file(tensors, tmp_path / "src" / "model.safetensors")
    result, text = invoke("convert", src, dst, "--to", "megamoe")
    # Names are not broken by a frame.
    assert result.exit_code == 2 and f"missing: {missing} [8, 6]" in result.output
    assert not Path(dst).exists()


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
