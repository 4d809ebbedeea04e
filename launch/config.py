"""What defines a model and a training run, and the presets. Plain frozen dataclasses that round trip through JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamoe import MoEConfig, RouterConfig

VOCAB_SIZE = 256


class LaunchError(ValueError):
    """A setting, a file or the data does not fit. The message says which, its value, the rule and the remedy."""


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the language model. Every layer is attention followed by a mixture of experts."""

    num_layers: int
    hidden_size: int
    num_heads: int
    context_length: int
    moe: MoEConfig
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "context_length"):
            if getattr(self, name) < 1:
                raise LaunchError(f"{name}={getattr(self, name)} must be at least 1")
        if self.hidden_size % (2 * self.num_heads):
            raise LaunchError(
                f"hidden_size={self.hidden_size} must be a multiple of 2 * num_heads={2 * self.num_heads}, "
                f"because rotary embeddings rotate pairs inside each head"
            )
        if self.moe.hidden_size != self.hidden_size:
            raise LaunchError(f"moe.hidden_size={self.moe.hidden_size} must equal hidden_size={self.hidden_size}")

    def to_dict(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"moe": self.moe.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        return cls(**{**values, "moe": MoEConfig.from_dict(values["moe"])})


@dataclass(frozen=True)
class TrainConfig:
    """How a run trains. The global batch of a step is `batch_size` sequences, whatever the number of ranks.

    batch_size: sequences per optimizer step over all ranks and accumulation steps.
    accumulation: forward and backward passes per optimizer step; each takes batch_size / accumulation sequences.
    validation_windows: number of fixed validation sequences, spread evenly over the validation text.
    """

    steps: int
    batch_size: int
    learning_rate: float
    min_learning_rate_ratio: float = 0.05
    warmup_steps: int = 20
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    accumulation: int = 1
    seed: int = 0
    dtype: str = "float32"
    data: str = "stdlib"
    log_every: int = 10
    validate_every: int = 100
    validation_windows: int = 64
    checkpoint_every: int = 200
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulation", "log_every", "validate_every", "validation_windows"):
            _at_least(self, name, 1)
        for name in ("checkpoint_every", "keep_checkpoints"):
            _at_least(self, name, 1)
        for name in ("warmup_steps", "weight_decay", "min_learning_rate_ratio"):
            _at_least(self, name, 0)
        for name in ("learning_rate", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise LaunchError(f"{name}={getattr(self, name)} must be greater than 0")
        if self.batch_size % self.accumulation:
            raise LaunchError(
                f"batch_size={self.batch_size} must be divisible by accumulation={self.accumulation}: "
                f"change --batch-size or --accumulation"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise LaunchError(f"dtype={self.dtype!r} must be 'float32' or 'bfloat16'")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"betas": list(self.betas)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        return cls(**{**values, "betas": tuple(values["betas"])})


def _at_least(config: TrainConfig, name: str, minimum: int) -> None:
    if getattr(config, name) < minimum:
        raise LaunchError(f"{name}={getattr(config, name)} must be at least {minimum}")


@dataclass(frozen=True)
class Preset:
    """A model with settings that train it well."""

    model: ModelConfig
    training: TrainConfig


def _model(
    *,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    context_length: int,
    num_experts: int,
    top_k: int,
    intermediate_size: int,
) -> ModelConfig:
    router = RouterConfig(score="softmax", renormalize=True, aux_loss_coef=1e-2, z_loss_coef=1e-3)
    moe = MoEConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        router=router,
        shared_intermediate_size=intermediate_size,
    )
    return ModelConfig(num_layers, hidden_size, num_heads, context_length, moe)


# tiny: minutes on two CPU cores. small: one GPU. base: several GPUs.
PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        _model(
            num_layers=4,
            hidden_size=128,
            num_heads=4,
            context_length=128,
            num_experts=8,
            top_k=2,
            intermediate_size=128,
        ),
        TrainConfig(steps=1200, batch_size=16, learning_rate=8e-3, validation_windows=256, checkpoint_every=300),
    ),
    "small": Preset(
        _model(
            num_layers=8,
            hidden_size=512,
            num_heads=8,
            context_length=1024,
            num_experts=32,
            top_k=4,
            intermediate_size=512,
        ),
        TrainConfig(steps=4000, batch_size=64, learning_rate=1e-3, warmup_steps=200, dtype="bfloat16"),
    ),
    "base": Preset(
        _model(
            num_layers=16,
            hidden_size=1024,
            num_heads=16,
            context_length=2048,
            num_experts=64,
            top_k=6,
            intermediate_size=768,
        ),
        TrainConfig(steps=20_000, batch_size=128, learning_rate=6e-4, warmup_steps=500, dtype="bfloat16"),
    ),
}


def write_config(path: Path, model: ModelConfig, training: TrainConfig, corpus: dict[str, Any]) -> None:
    """Write everything that defines the run. `corpus` describes the data: sizes and a digest of the training text."""
    text = json.dumps({"model": model.to_dict(), "training": training.to_dict(), "corpus": corpus}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def read_config(path: Path) -> tuple[ModelConfig, TrainConfig, dict[str, Any]]:
    """Read what `write_config` wrote. Raises LaunchError if there is no such file."""
    if not path.is_file():
        raise LaunchError(f"run folder {path.parent} has no {path.name}: give a folder that a training run wrote")
    values = json.loads(path.read_text(encoding="utf-8"))
    return ModelConfig.from_dict(values["model"]), TrainConfig.from_dict(values["training"]), values["corpus"]


# Settings that a resumed run must share with the run it continues, else it would not be the same run.
_FIXED_ON_RESUME = ("batch_size", "accumulation", "seed", "data", "dtype", "validation_windows")


def check_resumable(
    saved: tuple[ModelConfig, TrainConfig, dict[str, Any]], now: tuple[ModelConfig, TrainConfig, dict[str, Any]]
) -> None:
    """Raise LaunchError naming each setting by which a resumed run differs from the saved one where it must not."""
    pairs = [(f"model.{key}", value, now[0].to_dict()[key]) for key, value in saved[0].to_dict().items()]
    pairs += [(name, getattr(saved[1], name), getattr(now[1], name)) for name in _FIXED_ON_RESUME]
    pairs += [("training text digest", saved[2].get("digest"), now[2].get("digest"))]
    changed = [f"{name}: {old!r} in the saved run, {new!r} now" for name, old, new in pairs if old != new]
    if changed:
        raise LaunchError(
            "cannot resume with other settings (" + "; ".join(changed) + "): use the saved ones or another --run-dir"
        )
