"""The training loop: from settings to a trained model, metrics, checkpoints, a summary and plots in a run folder."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launch.checkpointing import Checkpoints
from launch.config import LaunchError, ModelConfig, TrainConfig, check_resumable, read_config, write_config
from launch.data import Corpus, RankSlice, batch_starts, load_corpus, windows
from launch.distributed import World
from launch.evaluation import validate
from launch.metrics import MetricsLog, MetricsWindow, late_expert_load_entropy, read_metrics
from launch.model import LanguageModel, autocast, count_parameters, next_byte_loss
from launch.optim import build_optimizer, learning_rate, set_learning_rate
from launch.progress import Progress
from megamoe import average_gradients, clip_grad_norm_, set_aux_loss_scale, update_expert_biases

# What a finished run leaves beside its metrics and checkpoints.
RESULT_FILES = ("summary.json", "loss.png", "expert_load.png", "throughput.png")


@dataclass(frozen=True)
class StepResult:
    """One optimizer step as every rank sees it."""

    step: int
    loss: float
    grad_norm: float


class Trainer:
    """Owns model, optimizer and data of one run. Construct it on every rank, inside `open_world`, and call `run` once.

    resume: continue from the run folder's latest checkpoint if it has one; otherwise the folder's old run is removed.
    stop_after: leave after this step with a checkpoint, as a job with a time limit must; `resume` continues it later.
    on_step: called on every rank after every optimizer step. It makes each step wait for the device.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        config: TrainConfig,
        run_dir: Path,
        world: World,
        *,
        resume: bool = False,
        stop_after: int | None = None,
        plots: bool = True,
        on_step: Callable[[StepResult], None] | None = None,
    ) -> None:
        if stop_after is not None and not 1 <= stop_after <= config.steps:
            raise LaunchError(f"stop_after={stop_after} must lie in 1 .. steps={config.steps}")
        self.model_config, self.config, self.run_dir, self.world = model_config, config, run_dir, world
        self.last_step = stop_after or config.steps
        self.plots, self.on_step = plots, on_step
        self.corpus: Corpus = load_corpus(config.data, model_config.context_length)
        self.slice = RankSlice(world.rank, world.size)
        self.slice.of(torch.empty(config.batch_size // config.accumulation))
        torch.manual_seed(config.seed)
        self.model = LanguageModel(model_config, world.expert_group, world.group, world.device)
        # The main loss of each pass is divided so too.
        set_aux_loss_scale(self.model, 1 / config.accumulation)
        self.optimizer = build_optimizer(self.model, config)
        self.window = MetricsWindow(model_config.num_layers, model_config.moe.num_experts, world.device)
        self.step = torch.zeros((), dtype=torch.int64)
        self.seconds = torch.zeros((), dtype=torch.float64)
        self.checkpoints = Checkpoints(run_dir, config.keep_checkpoints)
        self._open_run_dir(resume)

    @property
    def progress_state(self) -> dict[str, Tensor]:
        return {"step": self.step, "seconds": self.seconds} | self.window.tensors()

    def _open_run_dir(self, resume: bool) -> None:
        """Load the latest checkpoint or start the folder anew. Rank 0 alone changes the folder."""
        description = (self.model_config, self.config, self.corpus.describe())
        path = self.checkpoints.latest() if resume else None
        if path is not None:
            check_resumable(read_config(self.run_dir / "config.json"), description)
            self.checkpoints.load(path, self.model, self.optimizer, self.progress_state)
            if self.step > self.last_step:
                raise LaunchError(
                    f"the checkpoint is at step {self.step}, past the requested {self.last_step}: give larger --steps"
                )
        # No rank may still be reading when rank 0 starts to write.
        self.world.barrier()
        if self.world.is_main:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if path is None:
                self.checkpoints.clear()
                for name in RESULT_FILES:
                    (self.run_dir / name).unlink(missing_ok=True)
            write_config(self.run_dir / "config.json", *description)
        self.log = MetricsLog(self.run_dir / "metrics.jsonl", int(self.step)) if self.world.is_main else None

    def run(self) -> dict[str, Any] | None:
        """Train to the last step. Returns the summary on the main rank, None on the others."""
        config, started = self.config, time.perf_counter() - float(self.seconds)
        self.window.opened_at = time.perf_counter()
        self.model.train()
        with Progress(self.world.is_main, config.steps, int(self.step)) as progress:
            for step in range(int(self.step) + 1, self.last_step + 1):
                loss, grad_norm, counts_LE, rate = self._train_step(step)
                self.window.add(loss, counts_LE)
                self.step.fill_(step)
                if self.on_step is not None:
                    self.on_step(StepResult(step, loss.item(), grad_norm.item()))
                if step == 1 or step % config.log_every == 0 or step == config.steps:
                    progress.train(step, self._log_step(step, rate, grad_norm, time.perf_counter() - started))
                if step % config.validate_every == 0 or step == config.steps:
                    progress.validation(step, self._validate(step, time.perf_counter() - started))
                if step % config.checkpoint_every == 0 or step == self.last_step:
                    self.seconds.fill_(time.perf_counter() - started)
                    pause = time.perf_counter()
                    self.checkpoints.save(step, self.model, self.optimizer, self.progress_state, self.world)
                    self.window.opened_at += time.perf_counter() - pause
        if self.log is not None:
            self.log.close()
        return self._finish() if self.world.is_main else None

    def _train_step(self, step: int) -> tuple[Tensor, Tensor, Tensor, float]:
        """One optimizer step. Returns (loss over the global batch, grad norm, expert counts [L, E], learning rate)."""
        config, world = self.config, self.world
        context_length = self.model_config.context_length
        starts = batch_starts(self.corpus.train.numel(), context_length + 1, config.batch_size, config.seed, step)
        total = torch.zeros((), dtype=torch.float64, device=world.device)
        self.optimizer.zero_grad(set_to_none=True)
        for part in starts.chunk(config.accumulation):
            inputs, targets = windows(self.corpus.train, self.slice.of(part), context_length, world.device)
            with autocast(config.dtype, world.device):
                logits = self.model(inputs)
            loss = next_byte_loss(logits, targets).mean() / config.accumulation
            loss.backward()
            total += loss.detach()
        average_gradients(self.model, world.mesh)
        grad_norm = clip_grad_norm_(self.model, config.max_grad_norm)
        rate = learning_rate(step, config)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        counts_LE = update_expert_biases(self.model)
        return world.mean(total), grad_norm, counts_LE, rate

    def _log_step(self, step: int, rate: float, grad_norm: Tensor, seconds: float) -> dict[str, Any]:
        tokens_per_step = self.config.batch_size * self.model_config.context_length
        values = self.window.record(tokens_per_step)
        values |= {"learning_rate": rate, "grad_norm": grad_norm.item(), "seconds": seconds}
        values |= {"aux_loss": self._mean_over_layers("aux_loss"), "z_loss": self._mean_over_layers("z_loss")}
        if not math.isfinite(values["loss_bits_per_byte"]) or not math.isfinite(values["grad_norm"]):
            raise LaunchError(
                f"the loss or the gradient is not finite at step {step} (loss {values['loss_bits_per_byte']}, "
                f"gradient norm {values['grad_norm']}): resume from an earlier checkpoint, --learning-rate smaller"
            )
        if self.log is not None:
            self.log.write("train", step, values)
        self.window.reset()
        return values

    def _mean_over_layers(self, name: str) -> float | None:
        """Mean over layers and ranks of a router's loss term; None if the routers compute none."""
        values = [getattr(layer.router, name) for layer in self.model.moe_layers()]
        if any(value is None for value in values):
            return None
        return self.world.mean(torch.stack([value.detach().float() for value in values]).mean()).item()

    def _validate(self, step: int, seconds: float) -> float:
        config, pause = self.config, time.perf_counter()
        per_pass = config.batch_size // config.accumulation // self.world.size
        bits_per_byte = validate(
            self.model, self.corpus.validation, config.validation_windows, per_pass, config.dtype, self.world
        )
        if self.log is not None:
            self.log.write("validation", step, {"val_bits_per_byte": bits_per_byte, "seconds": seconds})
        # Speed in the metrics is the speed of training alone.
        self.window.opened_at += time.perf_counter() - pause
        return bits_per_byte

    def _finish(self) -> dict[str, Any] | None:
        records = read_metrics(self.run_dir / "metrics.jsonl")
        if int(self.step) < self.config.steps:
            return None
        train = [record for record in records if record["kind"] == "train"]
        validation = [record for record in records if record["kind"] == "validation"]
        total, active = count_parameters(self.model_config)
        steady = [record["tokens_per_second"] for record in train[1:]] or [train[0]["tokens_per_second"]]
        summary = {
            "val_bits_per_byte": validation[-1]["val_bits_per_byte"],
            "expert_load_entropy": late_expert_load_entropy(train),
            "tokens_per_second": sorted(steady)[len(steady) // 2],
            "seconds": float(self.seconds),
            "steps": self.config.steps,
            "tokens": self.config.steps * self.config.batch_size * self.model_config.context_length,
            "parameters": total,
            "active_parameters": active,
            "world_size": self.world.size,
            "expert_parallel_size": self.world.expert_parallel,
            "device": self.world.device.type,
        }
        temporary = self.run_dir / "summary.json.tmp"
        temporary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, self.run_dir / "summary.json")
        if self.plots:
            # Imported late: training itself does not need matplotlib.
            from launch.plots import write_plots

            write_plots(records, self.run_dir)
        return summary
