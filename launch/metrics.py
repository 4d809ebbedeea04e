"""What a run records: JSON lines, one per logged step or validation, and the figures derived from them."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def normalised_entropy(load: Iterable[float]) -> float:
    """Entropy of a load divided by that of a uniform one: 1 = all experts equally busy, 0 = one expert does everything.

    load: counts or fractions per expert, at least one of them positive.
    """
    values = [float(value) for value in load]
    total = sum(values)
    entropy = -sum(value / total * math.log(value / total) for value in values if value > 0)
    return entropy / math.log(len(values)) if len(values) > 1 else 1.0


class MetricsWindow:
    """Sums since the last logged step. Its tensors are part of a checkpoint, so that a resumed run logs the same lines.

    All sums are over all ranks already, so every rank holds the same values.
    """

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.steps = torch.zeros((), dtype=torch.int64)
        self.load_LE = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        self.reset()

    def reset(self) -> None:
        self.loss_sum.zero_()
        self.steps.zero_()
        self.load_LE.zero_()
        self.opened_at = time.perf_counter()

    def add(self, loss: Tensor, counts_LE: Tensor) -> None:
        """loss: mean over the global batch, nats per byte. counts_LE: tokens that each layer sent to each expert."""
        self.loss_sum += loss
        self.steps += 1
        self.load_LE += counts_LE

    def tensors(self) -> dict[str, Tensor]:
        return {"loss_sum": self.loss_sum, "steps": self.steps, "load": self.load_LE}

    def record(self, tokens_per_step: int) -> dict[str, Any]:
        """Means over the window: loss in bits per byte, load per layer, speed."""
        load = self.load_LE.double().cpu()
        fractions = (load / load.sum(dim=1, keepdim=True).clamp_min(1)).tolist()
        steps = int(self.steps)
        return {
            "loss_bits_per_byte": self.loss_sum.item() / steps / math.log(2),
            "tokens_per_second": steps * tokens_per_step / max(1e-9, time.perf_counter() - self.opened_at),
            "expert_load_entropy": [normalised_entropy(layer) if sum(layer) else 0.0 for layer in fractions],
            "expert_load": fractions,
        }


class MetricsLog:
    """Appends JSON lines to a file; floats keep every digit. Only the main rank should hold one."""

    def __init__(self, path: Path, resume_after_step: int = 0) -> None:
        """Keep the lines up to `resume_after_step` (none when it is 0) and append after them."""
        kept = [line for line in read_metrics(path) if line["step"] <= resume_after_step] if resume_after_step else []
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        self._file.write(json.dumps({"kind": kind, "step": step} | values) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, in order. A last line cut short by a crash is left out."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def late_expert_load_entropy(train_records: list[dict[str, Any]], part: float = 0.2) -> float:
    """Mean over layers of the normalised entropy of the load over the last `part` of the run."""
    first_step = train_records[-1]["step"] * (1 - part)
    late = [record["expert_load"] for record in train_records if record["step"] >= first_step]
    load_LE = torch.tensor(late, dtype=torch.float64).mean(dim=0)
    return sum(normalised_entropy(layer) for layer in load_LE.tolist()) / load_LE.shape[0]
