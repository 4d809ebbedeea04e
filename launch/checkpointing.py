"""Checkpoints of a run: sharded files that load at any number of ranks and any expert-parallel size.

A run folder holds `config.json` and `checkpoints/`, which holds one folder per saved step and the file `latest`, which
names the last complete one. `latest` is replaced only after a save is complete, so an interrupted save is never loaded.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from launch.config import LaunchError
from launch.distributed import World


class Checkpoints:
    """The checkpoints of one run folder. All methods that save or load are collective over all ranks."""

    def __init__(self, run_dir: Path, keep: int = 2) -> None:
        self.folder = run_dir / "checkpoints"
        self.keep = keep

    def latest(self) -> Path | None:
        """Folder of the last complete checkpoint, or None."""
        marker = self.folder / "latest"
        if not marker.is_file():
            return None
        path = self.folder / marker.read_text(encoding="utf-8").strip()
        if not path.is_dir():
            raise LaunchError(f"{marker} names {path.name}, which does not exist: write a step's folder name into it")
        return path

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Tensor], world: World
    ) -> None:
        """Write model, optimizer and `progress` (tensors that are the same on every rank), then drop the oldest."""
        name = f"step_{step:08d}"
        unfinished = self.folder / f"{name}.unfinished"
        if world.is_main:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        world.barrier()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "progress": progress}
        with _quiet():
            dcp.save(state, checkpoint_id=unfinished, no_dist=not dist.is_initialized())
        if world.is_main:
            shutil.rmtree(self.folder / name, ignore_errors=True)
            unfinished.rename(self.folder / name)
            marker = self.folder / "latest.unfinished"
            marker.write_text(name + "\n", encoding="utf-8")
            os.replace(marker, self.folder / "latest")
            self._drop_oldest(just_saved=name)
        world.barrier()

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Tensor]) -> None:
        """Fill model, optimizer and the tensors of `progress` in place."""
        model_state, optimizer_state = get_state_dict(model, optimizer)
        _load({"model": model_state, "optimizer": optimizer_state, "progress": progress}, path)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)

    def load_model(self, path: Path, model: nn.Module) -> None:
        """Fill the model alone, in place."""
        state = get_model_state_dict(model)
        _load({"model": state}, path)
        set_model_state_dict(model, state)

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _drop_oldest(self, just_saved: str) -> None:
        saved = sorted(path for path in self.folder.glob("step_*") if path.name[5:].isdigit())
        for path in saved[: -self.keep]:
            if path.name != just_saved:
                shutil.rmtree(path, ignore_errors=True)


def _load(state: dict, path: Path) -> None:
    with _quiet():
        dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())


@contextmanager
def _quiet() -> Iterator[None]:
    # A single process without a process group is a supported case, not one to warn about.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
