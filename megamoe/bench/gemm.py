"""Speed of the GEMMs on a GPU beside every installed peer, in one interleaved run, after correctness on the same data.

Run: python -m megamoe bench gemm [--groups fp8,masked] [--sweep]. Ratios are peer's time / our time.
"""

from __future__ import annotations

import csv
import importlib
import math
from dataclasses import astuple, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from megamoe.bench import gemm_cases, wgrad_cases
from megamoe.bench.gemm_cases import GemmCase, Problem
from megamoe.bench.timing import check_gpu, host_microseconds, interleaved
from megamoe.bench.wgrad_cases import WgradCase, WgradProblem
from megamoe.errors import check_choice

GROUPS = (*gemm_cases.GROUPS, *wgrad_cases.GROUPS)

Case = GemmCase | WgradCase

DENSE_TFLOPS = {"fp8": 1979.0, "bf16": 989.0}
DRAM_BYTES_PER_US = 4.3e6
"""What a large copy reaches on an H200."""

ERROR_LIMIT = 5e-3
FUSED_ERROR_LIMIT = 3e-2
"""Of a row. A code that rounds the other way moves by a step of e4m3."""


def cases(groups: list[str]) -> list[Case]:
    """The benchmark's problems by group name."""
    return [*gemm_cases.cases(groups), *wgrad_cases.cases(groups)]


def _problem(case: Case, peer: object | None) -> Problem | WgradProblem:
    return WgradProblem(case, peer) if isinstance(case, WgradCase) else Problem(case, peer)


def deep_gemm() -> object | None:
    """The installed DeepGEMM, or None."""
    try:
        return importlib.import_module("deep_gemm")
    except ImportError:
        return None


def _checked(name: str, problem: Problem | WgradProblem, calls: list, out: torch.Tensor | None) -> None:
    """Runs the first call, into ``out`` poisoned, or where it returns a new result."""
    if out is not None:
        problem.poison(out)
    result = calls[0]()
    torch.cuda.synchronize()
    _require(name, problem, problem.check(result if out is None else out), ERROR_LIMIT)


def _checked_swiglu(problem: Problem) -> list:
    calls, out = problem.swiglu()
    out.codes.view(torch.uint8).fill_(0x7F)
    out.scales.fill_(float("nan"))
    calls[0]()
    torch.cuda.synchronize()
    _require("fused", problem, problem.check_swiglu(out), FUSED_ERROR_LIMIT)
    return calls


def _require(name: str, problem: Problem | WgradProblem, error: float, limit: float) -> None:
    if not error < limit:
        raise RuntimeError(f"{problem.case.label}: {name} has relative error {error}")


def measure(case: Case, peer: object | None, rounds: int) -> dict[str, float]:
    """Median microseconds by contender."""
    problem = _problem(case, peer)
    candidates = {"megamoe": problem.ours()}
    _checked("megamoe", problem, candidates["megamoe"], problem.outs[0])
    if case.family == "swiglu":
        candidates["fused"] = _checked_swiglu(problem)
    if case.family.startswith("wgrad fp8"):
        bf16 = WgradProblem(replace(case, family="wgrad fp32" if case.adds else "wgrad"), None)
        candidates["bf16"] = bf16.ours()
        _checked("bf16", bf16, candidates["bf16"], bf16.outs[0])
    # DeepGEMM adds weight gradients to fp32, torch stores them in BF16.
    if peer is not None and case.family not in ("wgrad", "wgrad fp8 blocks"):
        candidates["deep_gemm"] = problem.deep_gemm()
        _checked("deep_gemm", problem, candidates["deep_gemm"], problem.outs[1])
    if case.family in ("bf16", "bf16 nn", "wgrad") and hasattr(torch.nn.functional, "grouped_mm"):
        candidates["grouped_mm"] = problem.grouped_mm()
        _checked("grouped_mm", problem, candidates["grouped_mm"], None)
    return interleaved(candidates, rounds)


def sweep(case: Case, rounds: int) -> dict[str, float]:
    """Median microseconds of every legal tile, the chosen one under "chosen"."""
    problem = _problem(case, None)
    chosen, tiles = problem.tiles()
    candidates = {}
    for tile in tiles:
        name = "x".join(str(int(field)) for field in astuple(tile))
        candidates["chosen" if tile == chosen else name] = problem.ours(tile)
        _checked(name, problem, problem.ours(tile), problem.outs[0])
    return interleaved(candidates, rounds)


def roofline_us(case: Case) -> float:
    """Microseconds of the bound, arithmetic or memory."""
    return max(case.flops / (DENSE_TFLOPS[case.dtype] * 1e6), case.bytes / DRAM_BYTES_PER_US)


def row_of(case: Case, times: dict[str, float]) -> dict[str, object]:
    """One row of the table: times, ratios and rates."""
    ours = times["megamoe"]
    row: dict[str, object] = {"case": case.label, "megamoe_us": round(ours, 2)}
    for name, value in times.items():
        if name == "fused":
            row["fused_us"] = round(value, 2)
            row["fused_cost_percent"] = round(100 * (value / ours - 1), 2)
        elif name != "megamoe":
            row[f"{name}_us"] = round(value, 2)
            row[f"x_{name}"] = round(value / ours, 3)
    row["tflops"] = round(case.flops / ours / 1e6, 1)
    row["tb_per_s"] = round(case.bytes / ours / 1e6, 2)
    row["of_roofline"] = round(roofline_us(case) / ours, 3)
    return row


def host_overhead(peer: object | None) -> str:
    """Microseconds of the host per eager call of a small grouped GEMM, its arguments as in an earlier call."""
    problem = Problem(GemmCase("masked", (4,) * 8, 512, 512), peer)
    contenders = {"megamoe": problem.ours()[0]}
    if peer is not None:
        contenders["deep_gemm"] = problem.deep_gemm()[0]
    return ", ".join(f"{name} {host_microseconds(call):.1f} us" for name, call in contenders.items())


def geometric_mean(values: list[float]) -> float:
    """Of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def _print(rows: list[dict[str, object]], columns: list[str]) -> None:
    table = Table(*columns)
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    Console(width=180).print(table)


def _write(rows: list[dict[str, object]], columns: list[str], folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def _plot(rows: list[dict[str, object]], folder: Path) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        print("no plot: matplotlib is not installed (pip install 'megamoe[plot]')")
        return
    ratios = [column for column in ("x_deep_gemm", "x_grouped_mm") if any(column in row for row in rows)]
    if not ratios:
        return
    figure, axes = pyplot.subplots(figsize=(9, 0.2 * len(rows) + 1.5))
    for offset, column in enumerate(ratios):
        places = [index + 0.35 * offset for index, row in enumerate(rows) if column in row]
        axes.barh(places, [row[column] for row in rows if column in row], height=0.35, label=column[2:])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [str(row["case"]) for row in rows], fontsize=6)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel("peer's time / megamoe's time")
    axes.legend()
    figure.tight_layout()
    figure.savefig(folder / "gemm.png", dpi=110)
    pyplot.close(figure)


def _check(groups: list[str]) -> None:
    for group in groups:
        check_choice("groups", group, GROUPS)
    check_gpu()


def run(groups: list[str], folder: Path, rounds: int) -> list[dict[str, object]]:
    """Measures, prints and writes ``gemm.csv`` and ``gemm.png`` into ``folder``."""
    _check(groups)
    peer = deep_gemm()
    if peer is None:
        print("DeepGEMM is not installed: no column for it")
    rows = []
    for group, case in [(name, case) for name in groups for case in cases([name])]:
        rows.append({"group": group, **row_of(case, measure(case, peer, rounds))})
        print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
        torch.cuda.empty_cache()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    _print(rows, columns)
    for column in (column for column in columns if column.startswith("x_")):
        for group in groups:
            ratios = [float(row[column]) for row in rows if column in row and row["group"] == group]
            if ratios:
                print(f"{group}, {column[2:]}: geometric mean {geometric_mean(ratios):.3f}, least {min(ratios):.3f}")
    print(f"host: {host_overhead(peer)}")
    _write(rows, columns, folder, "gemm")
    _plot(rows, folder)
    return rows


def run_sweep(groups: list[str], folder: Path, rounds: int) -> list[dict[str, object]]:
    """Times every legal tile; prints the regret of the chosen one and writes ``gemm_sweep.csv``."""
    _check(groups)
    rows = []
    for case in cases(groups):
        times = sweep(case, rounds)
        best = min(times, key=times.get)
        regret = times["chosen"] / times[best] - 1
        ranking = " ".join(f"{name}={value:.2f}" for name, value in sorted(times.items(), key=lambda x: x[1])[:5])
        rows.append(
            {
                "case": case.label,
                "chosen_us": round(times["chosen"], 2),
                "best": best,
                "best_us": round(times[best], 2),
                "regret_percent": round(100 * regret, 1),
                "first": ranking,
            }
        )
        print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
        torch.cuda.empty_cache()
    columns = ["case", "chosen_us", "best", "best_us", "regret_percent", "first"]
    _print(rows, columns[:-1])
    _write(rows, columns, folder, "gemm_sweep")
    return rows
