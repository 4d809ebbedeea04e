"""AdamW parameter groups and the learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim import AdamW

from launch.config import TrainConfig
from launch.model import LanguageModel


def learning_rate(step: int, config: TrainConfig) -> float:
    """Rate of step `step` in 1 .. config.steps: linear warm-up, then a cosine that ends at the minimum rate."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    minimum = config.learning_rate * config.min_learning_rate_ratio
    return minimum + (config.learning_rate - minimum) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def build_optimizer(model: LanguageModel, config: TrainConfig) -> AdamW:
    """AdamW that decays matrices only. Expert parameters have groups of their own, because they may be DTensors."""
    experts = {id(p) for layer in model.moe_layers() for p in layer.experts.parameters()}
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decayed = parameter.ndim >= 2 and not name.endswith("bias")
        groups.setdefault((id(parameter) in experts, decayed), []).append(parameter)
    return AdamW(
        [
            {"params": parameters, "weight_decay": config.weight_decay if decayed else 0.0}
            for (_, decayed), parameters in sorted(groups.items(), key=lambda item: item[0])
        ],
        lr=config.learning_rate,
        betas=config.betas,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
