"""launch/generate.py with a trained model: several prompts, and what it says about wrong arguments."""

from __future__ import annotations

import dataclasses

import pytest
from typer.testing import CliRunner

from launch.config import LaunchError
from launch.generate import app, generate, load_model, read_prompts
from launch.trainer import Trainer


def test_several_prompts(small_model, small_training, single, tmp_path):
    Trainer(small_model, dataclasses.replace(small_training, steps=3), tmp_path, single, plots=False).run()
    model = load_model(tmp_path, single)
    expected = [generate(model, prompt, 12, single, temperature=0.0) for prompt in (b"def ", b"import ")]
    arguments = ["--run-dir", str(tmp_path), "--bytes", "12", "--temperature", "0", "--device", "cpu"]
    done = CliRunner().invoke(app, [*arguments, "--prompt", "def ", "--prompt", "import "])
    assert done.exit_code == 0, done.output
    texts = ["def " + expected[0].decode(errors="replace"), "import " + expected[1].decode(errors="replace")]
    assert done.stdout == "\n---\n".join(texts) + "\n"
    # Without --prompt there is one.
    assert CliRunner().invoke(app, arguments).stdout == texts[0] + "\n"


def test_prompts(tmp_path):
    file = tmp_path / "prompts"
    file.write_text("b\n\n c \n")
    assert read_prompts(["a"], file) == ["a", "b", " c "]
    assert read_prompts(["a"], None) == ["a"]
    file.write_bytes(b"\xff")
    with pytest.raises(LaunchError, match="cannot be read"):
        read_prompts([], file)
    with pytest.raises(LaunchError, match="there is no prompt"):
        read_prompts([], None)
