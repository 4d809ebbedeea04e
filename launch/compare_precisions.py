"""Train the same model with experts in BF16 and in FP8, from several seeds, and compare the losses of the last steps.

    python -m launch.compare_precisions                  the quickstart's model, 200 steps, 16 seeds
    python -m launch.compare_precisions --preset small --steps 1000 --seeds 2

From a seed both runs start with the same weights and see the same text, and yet they part: early in training, weights
larger by 1e-4 alone move a run's loss by up to 1.5 %. So the mean over the seeds counts: the command fails if it is
further from zero than the tolerance.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from launch.config import LaunchError, ModelConfig, TrainConfig
from launch.distributed import World, open_world
from launch.train import configure
from launch.trainer import Trainer
from megamoe import MegaMoEError

TOLERANCE = 0.005


@dataclasses.dataclass(frozen=True)
class FinalLosses:
    """Mean training losses of the last steps of two runs from one seed, in bits per byte."""

    seed: int
    bf16: float
    fp8: float

    @property
    def difference(self) -> float:
        """By how much FP8's loss is higher, relative to BF16's."""
        return self.fp8 / self.bf16 - 1


def compare(
    model: ModelConfig, training: TrainConfig, run_dir: Path, world: World, *, last: int, seeds: int
) -> Iterator[FinalLosses]:
    """Trains with each precision, for each of so many seeds from `training.seed` on, and yields the seeds' results.

    last: steps at the end whose mean loss counts. The runs leave their files in folders of `run_dir`.
    """
    if not 1 <= last <= training.steps:
        raise LaunchError(f"last={last} must lie in 1 .. steps={training.steps}")
    if seeds < 1:
        raise LaunchError(f"seeds={seeds} must be at least 1")
    for seed in range(training.seed, training.seed + seeds):
        settings = dataclasses.replace(training, seed=seed)
        losses = {}
        for precision in ("bf16", "fp8"):
            moe = dataclasses.replace(model.moe, precision=precision)
            seen: list[float] = []
            Trainer(
                dataclasses.replace(model, moe=moe),
                settings,
                run_dir / f"seed_{seed}_{precision}",
                world,
                plots=False,
                on_step=lambda result, seen=seen: seen.append(result.loss),
            ).run()
            losses[precision] = statistics.fmean(seen[-last:]) / math.log(2)
        yield FinalLosses(seed, **losses)


def mean_difference(results: list[FinalLosses]) -> tuple[float, float]:
    """Mean of the seeds' differences, and its standard error: infinite for one seed."""
    values = [result.difference for result in results]
    spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return statistics.fmean(values), spread


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    preset: Annotated[str, typer.Option(help="Model and training settings: tiny, small or base.")] = "tiny",
    run_dir: Annotated[Path, typer.Option(help="Folder for what the runs write.")] = Path("runs/precisions"),
    data: Annotated[str | None, typer.Option(help="A text file or a folder of them; 'stdlib' = Python's own.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 200,
    last: Annotated[int, typer.Option(help="Steps at the end whose mean loss counts.")] = 50,
    seeds: Annotated[int, typer.Option(help="Pairs of runs, each from a seed of its own.")] = 16,
    seed: Annotated[int | None, typer.Option(help="The first of these seeds.")] = None,
    tolerance: Annotated[float, typer.Option(help="Largest mean of the relative differences.")] = TOLERANCE,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    timeout_seconds: Annotated[float, typer.Option(help="Longest wait for another rank.")] = 300.0,
) -> None:
    """Train the same model with experts in BF16 and in FP8 and compare the losses; by python or by torchrun."""
    results = []
    try:
        model, training = configure(preset, {}, {}, {"data": data, "steps": steps, "seed": seed, "dtype": "bfloat16"})
        with open_world(model.moe.num_experts, None, device, timeout_seconds) as world:
            for result in compare(model, training, run_dir, world, last=last, seeds=seeds):
                results.append(result)
                if world.is_main:
                    print(
                        f"seed {result.seed}, loss of the last {last} of {steps} steps in bits per byte: "
                        f"bf16 {result.bf16:.4f}, fp8 {result.fp8:.4f}, {result.difference:+.2%}",
                        flush=True,
                    )
            mean, spread = mean_difference(results)
            if world.is_main:
                verdict = "within" if abs(mean) <= tolerance else "NOT within"
                print(f"fp8 {mean:+.2%}, standard error {spread:.2%}, {verdict} {tolerance:.2%}")
    except (LaunchError, MegaMoEError) as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    if not abs(mean) <= tolerance:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
