"""The placement simulation: its traffic, its figures, its files, and the balance that it is there to show."""

from __future__ import annotations

import csv

import pytest
import torch

from megamoe import ExpertPlacement
from megamoe.bench import placement
from megamoe.bench.placement import (
    POLICIES,
    Simulation,
    Traffic,
    greedy_placement,
    received,
    simulate,
    summary,
    tables_of,
)
from tests.support.command_line import invoke
from tests.support.errors import fails

SMALL = dict(experts=32, ranks=4, top_k=4, steps=9, period=3, tokens=128)


def test_load_falls_below_the_limit_with_a_tenth_of_replicas(seed):
    """Zipf's law with s = 1 and 8 ranks; the first period is as bad for all."""
    simulation = Simulation(experts=128, steps=12, period=4, tokens=256, seed=seed)
    assert simulation.num_redundant == 12 and simulation.num_slots == 18
    records = simulate(simulation)
    rows = {row["policy"]: row for row in summary(simulation, records)}
    assert rows["even"]["mean step"] > placement.LIMIT
    for policy in ("greedy", "balanced"):
        assert rows[policy]["imbalance"] < 1.05 and rows[policy]["mean step"] < placement.LIMIT
        first = [record["rows"] for record in records if record["policy"] == policy][:4]
        assert first == [record["rows"] for record in records if record["policy"] == "even"][:4]
    assert rows["balanced"]["first moves"] < 0.5 * rows["greedy"]["first moves"]
    assert rows["balanced"]["later moves"] < 0.2 * rows["greedy"]["later moves"]
    assert rows["even"]["first moves"] == rows["even"]["later moves"] == 0


def test_traffic(seed):
    simulation = Simulation(**{**SMALL, "tokens": 4000}, seed=seed)
    traffic = Traffic(simulation)
    popularity = traffic.log_popularity.exp()
    assert sorted((1 / popularity).round().int().tolist()) == list(range(1, 33))
    index = traffic.step()
    assert index.shape == (4, 4000, 4) and index.min() >= 0 and index.max() < 32
    assert all(len(set(token)) == 4 for token in index[0, :200].tolist()), "a token's experts differ"
    # Without drift the law stays; the popular are chosen more often.
    assert torch.equal(traffic.log_popularity.exp(), popularity)
    uses = index.flatten().bincount(minlength=32).double()
    assert uses[popularity.topk(8).indices].min() > uses[popularity.topk(8, largest=False).indices].max()
    # One slot per token follows the law itself.
    first = Traffic(Simulation(**{**SMALL, "tokens": 4000, "top_k": 1}, seed=seed))
    share = first.step().flatten().bincount(minlength=32) / 16000
    expected = first.log_popularity.exp() / first.log_popularity.exp().sum()
    # Six standard deviations.
    assert ((share - expected).abs() < 6 * (expected / 16000).sqrt()).all()


def test_drift_exchanges_popularity(seed):
    traffic = Traffic(Simulation(**SMALL, drift=1.0, seed=seed))
    before = traffic.log_popularity.clone()
    traffic.step()
    assert torch.equal(traffic.log_popularity.sort().values, before.sort().values)
    assert not torch.equal(traffic.log_popularity, before)


def test_the_same_seed_gives_the_same_numbers(seed):
    simulation = Simulation(**SMALL, drift=0.05, seed=seed)
    assert simulate(simulation) == simulate(simulation)
    assert simulate(simulation) != simulate(Simulation(**SMALL, drift=0.05, seed=seed + 1))


def test_received_counts_rows_where_they_arrive():
    tables = tables_of(ExpertPlacement.from_lists([[0, 1], [0, 2]]))
    index = torch.tensor([[[0, 1], [0, 2]], [[0, 2], [1, 2]]])
    # Expert 0: rank 0 sends to itself, then to rank 1; rank 1 to itself.
    assert received(tables, index).tolist() == [1 + 2, 2 + 3]


def test_greedy_placement():
    assert greedy_placement([4, 3, 2, 1], 2, 2, 0).experts_by_rank == ((0, 3), (1, 2))
    assert greedy_placement([9, 1, 1], 2, 2, 1).replicas[0] == (0, 2)


def test_summary():
    simulation = Simulation(**{**SMALL, "ranks": 2, "steps": 3, "period": 1})
    rows = [[90, 10], [60, 20], [40, 40]]
    records = [
        {"step": step, "policy": policy, "rows": rows[step], "moved": 4 * step, "imbalance": max(rows[step]) / 40}
        for step in range(3)
        for policy in POLICIES
    ]
    first = summary(simulation, records)[0]
    assert first == {
        "policy": "even",
        "imbalance": 1.25,
        "mean step": 1.25,
        "worst step": 1.5,
        "first moves": 4,
        "later moves": 8.0,
        "load per rank": [1.25, 0.75],
    }


def test_command(tmp_path):
    folder = tmp_path / "new" / "folder"
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    result, text = invoke("bench", "placement", *options, "--seed", "3", "--drift", "0.01", "--out", str(folder))
    assert result.exit_code == 0, text
    assert "32 experts on 4 ranks, top-4, Zipf 1.0, 3 replicas more in 9 slots a rank, drift 0.01" in text
    assert all(policy in text for policy in POLICIES) and "(wanted: below 1.1" in text
    records = simulate(Simulation(**SMALL, seed=3, drift=0.01))
    with open(folder / "placement.csv", newline="") as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(records) == 9 * len(POLICIES)
    for row, record in zip(written, records, strict=True):
        assert [row["step"], row["policy"], row["moved"]] == [str(record[key]) for key in ("step", "policy", "moved")]
        assert [int(row[f"rows_rank_{rank}"]) for rank in range(4)] == record["rows"]
        assert float(row["imbalance"]) == pytest.approx(record["imbalance"], abs=1e-5)
        assert sum(record["rows"]) == 4 * 128 * 4


def test_plot(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib").use("Agg")
    placement.run(Simulation(**SMALL), tmp_path)
    assert (tmp_path / "placement.png").stat().st_size > 5000
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    placement.run(Simulation(**SMALL), tmp_path / "other")
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["placement.csv"]


def test_command_refuses(tmp_path):
    result, text = invoke("bench", "placement", "--top-k", "9", "--experts", "8", "--out", str(tmp_path))
    assert result.exit_code == 2 and "top_k = 9: must not exceed experts = 8" in text
    assert "Traceback" not in text and not list(tmp_path.iterdir())
    result, text = invoke("bench", "placement", "--help")
    assert result.exit_code == 0
    assert all(f"--{name}" in text for name in ("redundant", "zipf", "drift", "top-k", "seed", "out"))


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("experts", 0, "must be at least 1"),
        ("ranks", 0, "must be at least 1"),
        ("tokens", 0, "must be at least 1"),
        ("steps", 3, "must be at least 4"),
        ("seed", -1, "must be at least 0"),
        ("redundant", -0.1, "must be finite and >= 0"),
        ("zipf", float("inf"), "must be finite and >= 0"),
        ("drift", -1.0, "must be finite and >= 0"),
        ("top_k", 33, "must not exceed experts = 32"),
    ],
)
def test_bad_sizes(field, value, rule):
    with fails(ValueError, field, value, rule):
        Simulation(**{**SMALL, field: value})
