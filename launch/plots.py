"""PNG plots of a run: loss, expert load over time, throughput."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend must be chosen first)
import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.colors import TwoSlopeNorm  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

_STYLE = {
    "figure.dpi": 120,
    "savefig.dpi": 150,
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
}
_TRAIN, _VALIDATION = "#7aa6d8", "#c44e2b"
# A load of this many times the uniform one, or more, gets the darkest colour.
_LOAD_LIMIT = 2.0


def write_plots(records: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw the records of a metrics file into loss.png, expert_load.png and throughput.png of `folder`.

    Returns the files written. `records` must hold at least one "train" record.
    """
    train = [record for record in records if record["kind"] == "train"]
    validation = [record for record in records if record["kind"] == "validation"]
    with plt.rc_context(_STYLE):
        figures = {
            "loss.png": _loss(train, validation),
            "expert_load.png": _expert_load(train),
            "throughput.png": _throughput(train),
        }
        for name, figure in figures.items():
            figure.savefig(folder / name)
            plt.close(figure)
    return [folder / name for name in figures]


def _loss(train: list[dict[str, Any]], validation: list[dict[str, Any]]) -> Figure:
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(*_columns(train, "loss_bits_per_byte"), color=_TRAIN, linewidth=1.6, label="training")
    if validation:
        steps, losses = _columns(validation, "val_bits_per_byte")
        axes.plot(steps, losses, color=_VALIDATION, linewidth=1.8, marker="o", markersize=4, label="validation")
        axes.annotate(
            f"{losses[-1]:.2f}",
            (steps[-1], losses[-1]),
            textcoords="offset points",
            xytext=(0, 8),
            ha="center",
            color=_VALIDATION,
            fontweight="bold",
        )
    axes.set(title="Loss", xlabel="optimizer step", ylabel="loss (bits per byte)")
    axes.set_xlim(0, 1.02 * train[-1]["step"])
    axes.legend()
    return figure


def _expert_load(train: list[dict[str, Any]]) -> Figure:
    load_TLE = np.array([record["expert_load"] for record in train])
    num_layers, num_experts = load_TLE.shape[1:]
    edges = np.array([0, *(record["step"] for record in train)], dtype=float)
    columns = min(2, num_layers) if num_layers <= 8 else 4
    rows = math.ceil(num_layers / columns)
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(5.2 * columns, 1.2 + rows * max(1.8, min(4.0, 0.16 * num_experts + 1.2))),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    norm = TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=_LOAD_LIMIT)
    image = None
    for layer, axes in enumerate(grid.flat):
        if layer >= num_layers:
            axes.set_visible(False)
            continue
        relative = load_TLE[:, layer].T * num_experts
        image = axes.pcolormesh(edges, np.arange(num_experts + 1), relative, cmap="RdBu_r", norm=norm, rasterized=True)
        entropy = np.mean([record["expert_load_entropy"][layer] for record in train[-max(1, len(train) // 5) :]])
        axes.set_title(f"layer {layer + 1}   (entropy {entropy:.3f} of uniform)", fontsize=10)
        _label_experts(axes, num_experts)
        axes.grid(False)
    figure.suptitle("Expert load over training", fontweight="bold")
    figure.supxlabel("optimizer step", fontsize=10)
    figure.supylabel("expert", fontsize=10)
    bar = figure.colorbar(image, ax=grid, shrink=0.9, pad=0.02, extend="max")
    bar.set_label("tokens received, relative to uniform (1.0)")
    bar.set_ticks([0.0, 0.5, 1.0, 1.5, 2.0])
    return figure


def _label_experts(axes: Axes, num_experts: int) -> None:
    shown = np.arange(0, num_experts, max(1, num_experts // 8))
    axes.set_yticks(shown + 0.5, [str(expert) for expert in shown])
    axes.tick_params(axis="y", length=0)


def _throughput(train: list[dict[str, Any]]) -> Figure:
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    steps, speed = _columns(train, "tokens_per_second")
    axes.plot(steps, speed, color=_TRAIN, linewidth=1.6)
    median = float(np.median(speed[1:] if len(speed) > 1 else speed))
    axes.axhline(median, color=_VALIDATION, linewidth=1.2, linestyle="--", label=f"median {median:,.0f} tokens/s")
    axes.set(title="Training throughput", xlabel="optimizer step", ylabel="tokens per second (all ranks)")
    axes.set_xlim(0, steps[-1])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(loc="best")
    return figure


def _columns(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    return [record["step"] for record in records], [record[name] for record in records]
