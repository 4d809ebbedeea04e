"""FP8 beside BF16: the comparison itself, some steps on a CPU, and 200 steps of the quickstart's model on a GPU."""

from __future__ import annotations

import dataclasses
import math

import pytest
from typer.testing import CliRunner

from launch import compare_precisions
from launch.compare_precisions import TOLERANCE, FinalLosses, app, compare, mean_difference
from launch.config import PRESETS, read_config
from launch.distributed import open_world
from launch.metrics import read_metrics
from launch.trainer import StepResult


def test_both_precisions_train_from_the_same_start(small_model, small_training, single, tmp_path):
    training = dataclasses.replace(small_training, seed=3, dtype="bfloat16", log_every=1, validate_every=100)
    (result,) = compare(small_model, training, tmp_path, single, last=4, seeds=1)
    assert result.seed == 3
    records = {}
    for precision in ("bf16", "fp8"):
        folder = tmp_path / f"seed_3_{precision}"
        model, config, _ = read_config(folder / "config.json")
        assert model == dataclasses.replace(small_model, moe=dataclasses.replace(small_model.moe, precision=precision))
        assert config == training
        lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"]
        records[precision] = [line["loss_bits_per_byte"] for line in lines]
        assert getattr(result, precision) == pytest.approx(sum(records[precision][-4:]) / 4, rel=1e-6)
    # The head starts at zero.
    assert records["bf16"][0] == pytest.approx(8.0, abs=1e-5) and records["fp8"][0] == pytest.approx(8.0, abs=1e-5)
    assert result.fp8 != result.bf16, "both runs had the same precision"
    assert abs(result.difference) < 0.02


def test_mean_difference():
    pairs = [FinalLosses(0, 2.0, 2.02), FinalLosses(1, 4.0, 4.0), FinalLosses(2, 1.0, 1.02)]
    assert [pair.difference for pair in pairs] == pytest.approx([0.01, 0.0, 0.02])
    # The standard deviation of 0.01 by the root of 3.
    assert mean_difference(pairs) == pytest.approx((0.01, 0.01 / math.sqrt(3)))
    assert mean_difference(pairs[:1]) == (pytest.approx(0.01), math.inf)


@pytest.fixture
def losses_by_step(monkeypatch):
    """What pretended runs report, by seed and precision: change it."""
    values = {(seed, precision): [9.0 + seed, 2.0, 4.0] for seed in (0, 1) for precision in ("bf16", "fp8")}

    class Trainer:
        def __init__(self, model, training, run_dir, world, *, plots, on_step):
            assert run_dir.name == f"seed_{training.seed}_{model.moe.precision}" and not plots
            assert training.dtype == "bfloat16" and training.steps == 3
            self.losses, self.on_step = values[training.seed, model.moe.precision], on_step

        def run(self):
            for step, loss in enumerate(self.losses, 1):
                self.on_step(StepResult(step, loss * math.log(2), 1.0))

    monkeypatch.setattr(compare_precisions, "Trainer", Trainer)
    return values


def run(*options: str):
    return CliRunner().invoke(app, ["--steps", "3", "--last", "2", "--seeds", "2", "--device", "cpu", *options])


def test_command(losses_by_step):
    losses_by_step[0, "fp8"] = [9.0, 2.06, 4.0]
    losses_by_step[1, "fp8"] = [1.0, 2.0, 3.94]
    result = run()
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    start = "loss of the last 2 of 3 steps in bits per byte: bf16 3.0000"
    assert lines[:2] == [f"seed 0, {start}, fp8 3.0300, +1.00%", f"seed 1, {start}, fp8 2.9700, -1.00%"]
    assert lines[2].endswith("standard error 1.00%, within 0.50%")


def test_first_seed(losses_by_step):
    lines = run("--seed", "1", "--seeds", "1", "--tolerance", "1").output.splitlines()
    assert lines[0].startswith("seed 1, ") and len(lines) == 2


@pytest.mark.parametrize(("loss", "code", "text"), [(4.05, 0, "+0.42%"), (4.07, 1, "+0.58%"), (3.93, 1, "-0.58%")])
def test_tolerance(losses_by_step, loss, code, text):
    losses_by_step[1, "fp8"][2] = loss
    result = run()
    assert result.exit_code == code
    assert f"fp8 {text}, " in result.output and ("NOT within 0.50%" in result.output) == bool(code)
    assert run("--tolerance", "0.01").exit_code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--last", "0"], "last=0 must lie in 1 .. steps=3"),
        (["--last", "4"], "last=4 must lie in 1 .. steps=3"),
        (["--seeds", "0"], "seeds=0 must be at least 1"),
        (["--preset", "huge"], "preset='huge' must be one of"),
    ],
)
def test_wrong_options_are_explained(losses_by_step, options, message):
    result = run(*options)
    assert result.exit_code == 2 and message in result.output


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_quickstart_on_a_gpu(tmp_path):
    preset = PRESETS["tiny"]
    training = dataclasses.replace(preset.training, steps=200, dtype="bfloat16")
    with open_world(preset.model.moe.num_experts, 1, "cuda", 60.0) as world:
        results = list(compare(preset.model, training, tmp_path, world, last=50, seeds=8))
    assert all(result.bf16 < 3.5 and result.bf16 != result.fp8 for result in results), results
    mean, spread = mean_difference(results)
    # Seeds differ by more than the tolerance: only what two standard errors do not explain is FP8's.
    assert spread < 0.01 and abs(mean) <= TOLERANCE + 2 * spread, (mean, spread, results)
