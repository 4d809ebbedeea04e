"""The command line: ``python -m megamoe``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megamoe.errors import MegaMoEError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Mixture-of-experts layers: measurements.")
bench = typer.Typer(no_args_is_help=True, help="Speed beside the installed peers, on this machine's GPU.")
app.add_typer(bench, name="bench")


@app.callback()
def _main() -> None:
    pass


@bench.command("gemm")
def bench_gemm(
    groups: Annotated[str, typer.Option(help="Comma-separated groups of problems; all by default.")] = "",
    sweep: Annotated[bool, typer.Option(help="Time every legal tile and print the regret of the chosen one.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the CSV and the plot.")] = Path("bench_results"),
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; the median counts.")] = 9,
) -> None:
    """Dense and grouped GEMMs against DeepGEMM and torch's grouped GEMM."""
    from megamoe.bench import gemm

    chosen = [group.strip() for group in groups.split(",")] if groups else list(gemm.GROUPS)
    try:
        (gemm.run_sweep if sweep else gemm.run)(chosen, out, rounds)
    except MegaMoEError as error:
        raise typer.BadParameter(str(error)) from None


@bench.command("quant")
def bench_quant() -> None:
    """FP8 casts as a fraction of a device copy of as many bytes."""
    from megamoe.bench import quant, timing

    try:
        timing.check_gpu()
    except MegaMoEError as error:
        raise typer.BadParameter(str(error)) from None
    quant.main()
