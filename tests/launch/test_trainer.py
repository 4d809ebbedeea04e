"""The training loop in one process: results, exact resume, checkpoints, generation."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from launch.checkpointing import Checkpoints
from launch.config import LaunchError
from launch.distributed import choose_expert_parallel, open_world
from launch.generate import generate, load_model
from launch.metrics import read_metrics
from launch.trainer import Trainer

TIMINGS = ("seconds", "tokens_per_second")


def records_without_timings(run_dir) -> list[dict]:
    return [
        {name: value for name, value in record.items() if name not in TIMINGS}
        for record in read_metrics(run_dir / "metrics.jsonl")
    ]


def test_a_run_learns_and_leaves_its_results(small_model, small_training, single, tmp_path):
    config = dataclasses.replace(small_training, steps=40, validate_every=20, checkpoint_every=20)
    summary = Trainer(small_model, config, tmp_path, single).run()
    records = read_metrics(tmp_path / "metrics.jsonl")
    train = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in train] == [1, 5, 10, 15, 20, 25, 30, 35, 40]
    assert train[0]["loss_bits_per_byte"] == pytest.approx(8.0, abs=1e-5)
    assert train[-1]["loss_bits_per_byte"] < 6.0
    assert all(sum(layer) == pytest.approx(1.0) for record in train for layer in record["expert_load"])
    validation = [record["val_bits_per_byte"] for record in records if record["kind"] == "validation"]
    assert len(validation) == 2 and validation[1] < validation[0]
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert summary["val_bits_per_byte"] == validation[-1]
    assert 0.5 < summary["expert_load_entropy"] <= 1.0
    assert summary["seconds"] > 0 and summary["tokens_per_second"] > 0
    for name in ("loss.png", "expert_load.png", "throughput.png"):
        assert (tmp_path / name).stat().st_size > 1000


@pytest.mark.parametrize("stop_after", [3, 7])
def test_resume_is_exact(small_model, small_training, single, tmp_path, stop_after):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    reference = Trainer(small_model, small_training, whole, single, plots=False)
    reference.run()
    Trainer(small_model, small_training, parts, single, stop_after=stop_after, plots=False).run()
    assert not (parts / "summary.json").exists()
    resumed = Trainer(small_model, small_training, parts, single, resume=True, plots=False)
    assert int(resumed.step) == stop_after
    resumed.run()
    assert records_without_timings(parts) == records_without_timings(whole)
    for name, value in reference.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_resume_after_a_crash_between_checkpoints(small_model, small_training, single, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    Trainer(small_model, small_training, whole, single, plots=False).run()

    def crash(result):
        if result.step == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trainer(small_model, small_training, parts, single, plots=False, on_step=crash).run()
    # A save that was interrupted leaves a folder that no one may load.
    (parts / "checkpoints" / "step_00000011.unfinished").mkdir()
    assert read_metrics(parts / "metrics.jsonl")[-1]["step"] == 10
    Trainer(small_model, small_training, parts, single, resume=True, plots=False).run()
    assert records_without_timings(parts) == records_without_timings(whole)


def test_resume_of_a_finished_run_changes_nothing(small_model, small_training, single, tmp_path):
    Trainer(small_model, small_training, tmp_path, single, plots=False).run()
    before = read_metrics(tmp_path / "metrics.jsonl")
    Trainer(small_model, small_training, tmp_path, single, resume=True, plots=False).run()
    assert read_metrics(tmp_path / "metrics.jsonl") == before


def test_a_new_run_removes_the_old_one(small_model, small_training, single, tmp_path):
    Trainer(small_model, small_training, tmp_path, single, plots=False).run()
    shorter = dataclasses.replace(small_training, steps=2)
    Trainer(small_model, shorter, tmp_path, single, plots=False).run()
    assert max(record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")) == 2
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_00000002"]


def test_checkpoints_keep_the_latest(small_model, small_training, single, tmp_path):
    Trainer(small_model, small_training, tmp_path, single, plots=False).run()
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert names == ["step_00000009", "step_00000012"]
    assert Checkpoints(tmp_path).latest().name == "step_00000012"


def test_resume_with_other_settings_is_explained(small_model, small_training, single, tmp_path):
    Trainer(small_model, small_training, tmp_path, single, stop_after=3, plots=False).run()
    other = dataclasses.replace(small_training, seed=1)
    with pytest.raises(LaunchError, match="seed: 0 in the saved run, 1 now"):
        Trainer(small_model, other, tmp_path, single, resume=True)
    with pytest.raises(LaunchError, match="model.num_layers: 2 in the saved run, 3 now"):
        Trainer(dataclasses.replace(small_model, num_layers=3), small_training, tmp_path, single, resume=True)
    with pytest.raises(LaunchError, match="past the requested 2"):
        Trainer(small_model, small_training, tmp_path, single, resume=True, stop_after=2)


def test_accumulation_gives_the_same_gradient(small_model, small_training, single, tmp_path):
    # The load-balancing loss looks at one forward pass at a time and would tell the two apart; the z-loss is a mean.
    router = dataclasses.replace(small_model.moe.router, aux_loss_coef=0.0, z_loss_coef=1.0)
    model = dataclasses.replace(small_model, moe=dataclasses.replace(small_model.moe, router=router))
    norms = {}
    for accumulation in (1, 4):
        config = dataclasses.replace(small_training, accumulation=accumulation)
        results = []
        Trainer(model, config, tmp_path / str(accumulation), single, plots=False, on_step=results.append).run()
        norms[accumulation] = torch.tensor([[result.loss, result.grad_norm] for result in results])
    torch.testing.assert_close(norms[1], norms[4], rtol=1e-4, atol=1e-6)


def test_a_loss_that_is_not_finite_stops_the_run(small_model, small_training, single, tmp_path):
    trainer = Trainer(small_model, small_training, tmp_path, single, plots=False)
    torch.nn.init.constant_(trainer.model.head.weight, float("nan"))
    with pytest.raises(LaunchError, match="not finite at step 1"):
        trainer.run()


def test_generate(small_model, small_training, single, tmp_path):
    with pytest.raises(LaunchError, match="config.json"):
        load_model(tmp_path, single)
    Trainer(small_model, small_training, tmp_path, single, plots=False).run()
    model = load_model(tmp_path, single)
    first = generate(model, b"import ", 80, single, seed=1)
    assert len(first) <= 80
    assert first == generate(model, b"import ", 80, single, seed=1)
    # The window slides: far more bytes than the model has positions, from a prompt longer than them, too.
    assert generate(model, b"x" * 100, 5, single, temperature=0.0) == generate(model, b"x" * 100, 5, single, top_k=1)
    for settings in ({"num_bytes": 0}, {"temperature": -1.0}, {"top_k": 257}):
        with pytest.raises(LaunchError, match=next(iter(settings)).replace("num_", "")):
            generate(model, b"x", **{"num_bytes": 5, "world": single, **settings})


@pytest.mark.parametrize("world_size, chosen", [(1, 1), (2, 2), (4, 4), (6, 2), (3, 1), (16, 8)])
def test_default_expert_parallel_size(world_size, chosen):
    assert choose_expert_parallel(world_size, 8, None) == chosen


@pytest.mark.parametrize("expert_parallel", [0, 3, 8])
def test_bad_expert_parallel_size_is_explained(expert_parallel):
    with pytest.raises(LaunchError, match=f"ep={expert_parallel} must divide .* try --ep 4"):
        choose_expert_parallel(4, 8, expert_parallel)


@pytest.mark.parametrize(
    "arguments, message", [((8, None, "tpu", 10.0), "device='tpu'"), ((8, None, "cpu", 0.0), "0.0")]
)
def test_bad_world_is_explained(arguments, message, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(LaunchError, match=message), open_world(*arguments):
        pass
