"""Validation loss over a fixed set of windows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from launch.data import validation_starts, windows
from launch.distributed import World
from launch.model import LanguageModel, autocast, next_byte_loss


@torch.no_grad()
def validate(
    model: LanguageModel, text: Tensor, num_windows: int, windows_per_pass: int, dtype: str, world: World
) -> float:
    """Mean bits per byte over `num_windows` windows of `text` spread evenly; the same on every rank and for any split.

    windows_per_pass: windows that one rank puts through the model at once.
    dtype: see `launch.model.autocast`.
    """
    context_length = model.config.context_length
    starts = validation_starts(text.numel(), context_length + 1, num_windows)
    nats = torch.zeros((), dtype=torch.float64, device=world.device)
    was_training = model.training
    model.eval()
    per_pass = windows_per_pass * world.size
    for first in range(0, num_windows, per_pass):
        # Every rank takes part in every pass with equally many windows; those past the end weigh 0.
        index = first + world.rank * windows_per_pass + torch.arange(windows_per_pass)
        weight = (index < num_windows).to(world.device)
        inputs, targets = windows(text, starts[index.where(index < num_windows, 0)], context_length, world.device)
        with autocast(dtype, world.device):
            logits = model(inputs)
        nats += (next_byte_loss(logits, targets).double().mean(dim=1) * weight).sum()
    model.train(was_training)
    return (world.sum(nats) / num_windows).item() / math.log(2)
