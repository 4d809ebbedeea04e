"""The same training on any split of the ranks into data and expert dimensions; checkpoints move between splits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from launch.config import ModelConfig, TrainConfig
from launch.distributed import open_world
from launch.generate import generate, load_model
from launch.metrics import read_metrics
from launch.train import configure
from launch.trainer import Trainer
from tests.support.processes import run_ranks

STEPS = 20


def settings(text_file: Path) -> tuple[ModelConfig, TrainConfig]:
    """The tiny preset with shorter and fewer sequences, in fp32."""
    return configure(
        "tiny",
        {"context_length": 32},
        {},
        {"data": str(text_file), "steps": STEPS, "batch_size": 8, "log_every": 1, "validation_windows": 6},
    )


def train(rank, world_size, model, config, folder, expert_parallel, options=None) -> list[tuple[float, float]]:
    """Trains on this rank; returns the loss and the gradient norm of each step as it saw them."""
    results = []
    with open_world(model.moe.num_experts, expert_parallel, "cpu", 30.0) as world:
        assert (world.rank, world.size) == (rank, world_size)
        Trainer(model, config, folder, world, plots=False, on_step=results.append, **(options or {})).run()
    return [(result.loss, result.grad_norm) for result in results]


def losses(folder: Path) -> torch.Tensor:
    records = read_metrics(folder / "metrics.jsonl")
    train = [record["loss_bits_per_byte"] for record in records if record["kind"] == "train"]
    validation = [record["val_bits_per_byte"] for record in records if record["kind"] == "validation"]
    return torch.tensor(train + validation, dtype=torch.float64)


@pytest.fixture(scope="module")
def reference(text_file, tmp_path_factory, single) -> tuple[Path, torch.Tensor]:
    """Run folder and (loss, gradient norm) per step of the run in one process."""
    folder, results = tmp_path_factory.mktemp("reference"), []
    Trainer(*settings(text_file), folder, single, plots=False, on_step=results.append).run()
    return folder, torch.tensor([(result.loss, result.grad_norm) for result in results], dtype=torch.float64)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size, expert_parallel", [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_loss_curve_and_grad_norm_do_not_depend_on_the_split(
    world_size, expert_parallel, reference, text_file, tmp_path
):
    reference_folder, expected = reference
    ranks = run_ranks(train, world_size, *settings(text_file), tmp_path, expert_parallel)
    assert all(seen == ranks[0] for seen in ranks), "ranks saw different losses or gradient norms"
    seen = torch.tensor(ranks[0], dtype=torch.float64)
    torch.testing.assert_close(seen[:, 0], expected[:, 0], rtol=1e-5, atol=0)
    # Rounding moves a norm of gradients more than it moves the loss.
    torch.testing.assert_close(seen[:, 1], expected[:, 1], rtol=1e-4, atol=0)
    torch.testing.assert_close(losses(tmp_path), losses(reference_folder), rtol=1e-5, atol=0)
    assert expected[-1, 0] < expected[0, 0] - 1.0


@pytest.mark.timeout(120)
def test_resume_is_exact_and_moves_to_another_split(small_model, small_training, tmp_path):
    whole, parts, moved = (tmp_path / name for name in ("whole", "parts", "moved"))
    expected = run_ranks(train, 2, small_model, small_training, whole, 2)
    for folder in (parts, moved):
        run_ranks(train, 2, small_model, small_training, folder, 2, {"stop_after": 7})
    resumed = run_ranks(train, 2, small_model, small_training, parts, 2, {"resume": True})
    assert resumed[0] == expected[0][7:]
    assert torch.equal(losses(parts), losses(whole))
    elsewhere = run_ranks(train, 4, small_model, small_training, moved, 4, {"resume": True})
    torch.testing.assert_close(torch.tensor(elsewhere[0]), torch.tensor(expected[0][7:]), rtol=1e-4, atol=0)


def generate_text(rank, world_size, folder, expert_parallel) -> bytes:
    with open_world(8, expert_parallel, "cpu", 30.0) as world:
        return generate(load_model(folder, world), b"import ", 24, world, temperature=0.0)


@pytest.mark.timeout(120)
def test_generate_at_another_split(small_model, small_training, single, tmp_path):
    config = dataclasses.replace(small_training, steps=40)
    run_ranks(train, 2, small_model, config, tmp_path, 2)
    expected = generate(load_model(tmp_path, single), b"import ", 24, single, temperature=0.0)
    assert len(expected) == 24
    for world_size, expert_parallel in ((2, 2), (2, 1), (4, 4)):
        assert set(run_ranks(generate_text, world_size, tmp_path, expert_parallel)) == {expected}
