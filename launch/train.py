"""Train a byte-level mixture-of-experts language model.

    python launch/train.py --preset tiny                                     one process
    torchrun --standalone --nproc-per-node 2 launch/train.py --preset tiny   two processes, experts spread over both

The same command uses GPUs through NCCL where there are any, and CPUs through gloo elsewhere. The run folder receives
config.json, metrics.jsonl, checkpoints/, and at the end summary.json, loss.png, expert_load.png and throughput.png.
Where several machines train together, all of them must see that folder.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer
from rich.console import Console

from launch.config import PRESETS, LaunchError, ModelConfig, TrainConfig
from launch.distributed import open_world
from launch.trainer import Trainer
from megamoe import MegaMoEError


def configure(
    preset: str, model_changes: dict[str, Any], moe_changes: dict[str, Any], training_changes: dict[str, Any]
) -> tuple[ModelConfig, TrainConfig]:
    """The preset with each value that is not None put in place of its own. Raises LaunchError, MegaMoEError."""
    if preset not in PRESETS:
        raise LaunchError(f"preset={preset!r} must be one of {', '.join(PRESETS)}")
    chosen = PRESETS[preset]
    moe = dataclasses.replace(chosen.model.moe, **_given(moe_changes))
    model = dataclasses.replace(chosen.model, moe=moe, **_given(model_changes))
    return model, dataclasses.replace(chosen.training, **_given(training_changes))


def _given(changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if value is not None}


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    preset: Annotated[str, typer.Option(help="Model and training settings: tiny, small or base.")] = "tiny",
    run_dir: Annotated[Path, typer.Option(help="Folder for everything that the run writes.")] = Path("runs/train"),
    data: Annotated[str | None, typer.Option(help="A text file or a folder of them; 'stdlib' = Python's own.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences per step over all ranks.")] = None,
    accumulation: Annotated[int | None, typer.Option(help="Forward and backward passes per step.")] = None,
    context_length: Annotated[int | None, typer.Option(help="Bytes per sequence.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Highest learning rate.")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps of linear warm-up.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the weights and of the batches.")] = None,
    ep: Annotated[int | None, typer.Option(help="Ranks that share one copy of the experts (default: all).")] = None,
    precision: Annotated[str | None, typer.Option(help="Expert GEMMs: bf16 (not quantised) or fp8.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, or bfloat16 for automatic mixed precision.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    log_every: Annotated[int | None, typer.Option(help="Steps between lines of metrics.")] = None,
    validate_every: Annotated[int | None, typer.Option(help="Steps between validations.")] = None,
    validation_windows: Annotated[int | None, typer.Option(help="Sequences in a validation.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    keep_checkpoints: Annotated[int | None, typer.Option(help="Checkpoints to keep.")] = None,
    resume: Annotated[bool, typer.Option(help="Continue from the latest checkpoint if there is one.")] = False,
    stop_after: Annotated[int | None, typer.Option(help="Save and leave after this step, to be resumed later.")] = None,
    plots: Annotated[bool, typer.Option(help="Draw the PNG plots at the end (needs matplotlib).")] = True,
    timeout_seconds: Annotated[float, typer.Option(help="Longest wait for another rank.")] = 300.0,
) -> None:
    """Train a byte-level mixture-of-experts language model; run it by python or by torchrun."""
    training_changes = {
        "data": data,
        "steps": steps,
        "batch_size": batch_size,
        "accumulation": accumulation,
        "learning_rate": learning_rate,
        "warmup_steps": warmup_steps,
        "seed": seed,
        "dtype": dtype,
        "log_every": log_every,
        "validate_every": validate_every,
        "validation_windows": validation_windows,
        "checkpoint_every": checkpoint_every,
        "keep_checkpoints": keep_checkpoints,
    }
    try:
        model, training = configure(
            preset, {"context_length": context_length}, {"precision": precision}, training_changes
        )
        with open_world(model.moe.num_experts, ep, device, timeout_seconds) as world:
            trainer = Trainer(model, training, run_dir, world, resume=resume, stop_after=stop_after, plots=plots)
            summary = trainer.run()
    except (LaunchError, MegaMoEError) as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    if summary is not None:
        for name, value in summary.items():
            print(f"{name:>22}  {value:.4g}" if isinstance(value, float) else f"{name:>22}  {value}")
        print(f"run folder: {run_dir}")


if __name__ == "__main__":
    app()
