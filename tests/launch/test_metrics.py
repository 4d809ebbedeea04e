"""Metrics: entropy, windows, the log file and the plots drawn from it."""

from __future__ import annotations

import math

import pytest
import torch

from launch.metrics import MetricsLog, MetricsWindow, late_expert_load_entropy, normalised_entropy, read_metrics

CPU = torch.device("cpu")


def test_entropy_of_known_loads():
    assert normalised_entropy([5, 5, 5, 5]) == pytest.approx(1.0)
    assert normalised_entropy([7, 0, 0, 0]) == 0.0
    assert normalised_entropy([1, 1, 0, 0]) == pytest.approx(0.5)
    assert normalised_entropy([3]) == 1.0


def test_window_means_over_its_steps():
    window = MetricsWindow(num_layers=1, num_experts=2, device=CPU)
    window.add(torch.tensor(math.log(2.0)), torch.tensor([[3, 1]]))
    window.add(torch.tensor(3 * math.log(2.0)), torch.tensor([[1, 3]]))
    record = window.record(tokens_per_step=4)
    assert record["loss_bits_per_byte"] == pytest.approx(2.0)
    assert record["expert_load"] == [[0.5, 0.5]]
    assert record["expert_load_entropy"] == [pytest.approx(1.0)]
    window.reset()
    assert not any(tensor.any() for tensor in window.tensors().values())


def test_log_keeps_full_precision_and_drops_lines_past_the_resumed_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2, 3, 4):
        log.write("train", step, {"loss_bits_per_byte": step / 3})
    log.close()
    with path.open("a") as file:
        file.write('{"kind": "train", "step": 5, "lo')
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4]
    log = MetricsLog(path, resume_after_step=2)
    log.write("train", 3, {"loss_bits_per_byte": 0.1})
    log.close()
    assert [record["loss_bits_per_byte"] for record in read_metrics(path)] == [1 / 3, 2 / 3, 0.1]
    MetricsLog(path).close()
    assert read_metrics(path) == []


def test_late_entropy_leaves_the_beginning_out():
    records = [{"step": step, "expert_load": [[1.0, 0.0]]} for step in range(1, 8)]
    records += [{"step": step, "expert_load": [[0.5, 0.5]]} for step in range(8, 11)]
    assert late_expert_load_entropy(records) == pytest.approx(1.0)


@pytest.mark.parametrize("num_layers, num_experts, lines", [(1, 2, 1), (4, 8, 30), (16, 64, 5)])
def test_plots_are_written(tmp_path, num_layers, num_experts, lines):
    plots = pytest.importorskip("launch.plots")
    fractions = [[1 / num_experts] * num_experts] * num_layers
    records = [
        {
            "kind": "train",
            "step": 10 * line,
            "loss_bits_per_byte": 8 / line,
            "tokens_per_second": 1000.0,
            "expert_load": fractions,
            "expert_load_entropy": [1.0] * num_layers,
        }
        for line in range(1, lines + 1)
    ]
    if lines > 1:
        records.append({"kind": "validation", "step": 10, "val_bits_per_byte": 3.0})
    paths = plots.write_plots(records, tmp_path)
    assert sorted(path.name for path in paths) == ["expert_load.png", "loss.png", "throughput.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
