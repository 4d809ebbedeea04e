"""The commands as a user runs them: torchrun and plain python, and what they say about wrong arguments."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from launch.metrics import read_metrics
from tests.launch.commands import REPOSITORY, check_command, run_command

SMALL = ["--context-length", "32", "--batch-size", "4", "--validation-windows", "4", "--no-plots", "--device", "cpu"]


@pytest.mark.timeout(240)
def test_train_resume_and_generate(text_file, tmp_path):
    run_dir = tmp_path / "run"
    arguments = [
        "launch/train.py",
        "--data",
        text_file,
        "--run-dir",
        run_dir,
        "--steps",
        "6",
        "--log-every",
        "1",
        *SMALL,
    ]
    check_command(*arguments, "--stop-after", "3", processes=2)
    shown = check_command(*arguments, "--resume", processes=2)
    assert "step 6/6" in shown and "step 3/6" not in shown
    assert "expert_parallel_size  2" in shown
    train = [record["step"] for record in read_metrics(run_dir / "metrics.jsonl") if record["kind"] == "train"]
    assert train == [1, 2, 3, 4, 5, 6]
    sample = tmp_path / "sample.txt"
    generator = ["launch/generate.py", "--run-dir", run_dir, "--bytes", "20", "--prompt", "def ", "--device", "cpu"]
    shown = check_command(*generator, "--output", sample)
    assert shown.startswith("def ") and sample.read_text() == shown
    assert check_command(*generator, processes=2) == shown


@pytest.mark.timeout(240)
def test_wrong_arguments_are_explained(text_file, tmp_path):
    run_dir = ["--run-dir", tmp_path / "run"]
    cases = [
        (["launch/train.py", *run_dir, "--data", tmp_path / "absent"], "neither a file nor a folder"),
        (["launch/train.py", *run_dir, "--preset", "huge"], "preset='huge' must be one of tiny, small, base"),
        (["launch/generate.py", *run_dir], "config.json"),
    ]
    for arguments, message in cases:
        done = run_command(*arguments, timeout=60)
        assert done.returncode == 2
        assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.timeout(240)
def test_every_rank_reports_a_batch_that_does_not_divide(text_file, tmp_path):
    arguments = ["launch/train.py", "--data", text_file, "--run-dir", tmp_path, "--steps", "2", *SMALL]
    done = run_command(*arguments, "--batch-size", "3", processes=2)
    assert done.returncode != 0
    assert done.stderr.count("3 sequences per forward pass") == 2


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
class TestScripts:
    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", *arguments], cwd=REPOSITORY, timeout=30, capture_output=True, text=True)

    @pytest.mark.parametrize(
        "script", sorted([".ci/run", *(f"launch/{path.name}" for path in (REPOSITORY / "launch").glob("*.sh"))])
    )
    def test_syntax(self, script):
        assert self.run("-n", script).returncode == 0

    def test_help(self):
        done = self.run("launch/quickstart.sh", "--help")
        assert done.returncode == 0 and "--smoke" in done.stdout

    def test_unknown_argument(self):
        done = self.run("launch/quickstart.sh", "--fast")
        assert done.returncode == 2 and "--fast" in done.stderr

    def test_python_that_is_missing_is_explained(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PYTHON", "no-such-python")
        monkeypatch.setenv("VENV", str(tmp_path / "venv"))
        done = self.run("launch/quickstart.sh", "--smoke")
        assert done.returncode == 1 and "must be Python 3.10 or newer" in done.stderr
