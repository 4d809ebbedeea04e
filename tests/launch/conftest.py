"""A small model, its training settings and text for the launch tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from launch.config import PRESETS, ModelConfig, TrainConfig
from launch.distributed import World
from tests.launch.commands import REPOSITORY


@pytest.fixture(scope="session")
def small_model() -> ModelConfig:
    """Two layers, 32 positions: the tiny preset's structure at a size that trains in milliseconds."""
    tiny = PRESETS["tiny"].model
    moe = dataclasses.replace(tiny.moe, hidden_size=32, intermediate_size=32, shared_intermediate_size=32)
    return dataclasses.replace(tiny, num_layers=2, hidden_size=32, num_heads=2, context_length=32, moe=moe)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """Some 60 KB of Python source."""
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_bytes(b"".join(file.read_bytes() for file in sorted((REPOSITORY / "launch").glob("*.py"))))
    return path


@pytest.fixture
def small_training(text_file) -> TrainConfig:
    """Twelve steps; metrics, validation and checkpoints at steps that do not divide each other."""
    return TrainConfig(
        steps=12,
        batch_size=4,
        learning_rate=1e-2,
        warmup_steps=3,
        data=str(text_file),
        log_every=5,
        validate_every=4,
        validation_windows=6,
        checkpoint_every=3,
    )


@pytest.fixture(scope="session")
def single() -> World:
    """One process on the CPU."""
    return World(rank=0, size=1, expert_parallel=1, device=torch.device("cpu"), mesh=None)
