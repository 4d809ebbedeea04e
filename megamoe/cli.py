"""The command line: ``python -m megamoe``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megamoe.errors import MegaMoEError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Mixture-of-experts layers: checkpoints, measurements."
)
bench = typer.Typer(no_args_is_help=True, help="Speed beside the installed peers, on this machine's GPU.")
app.add_typer(bench, name="bench")


@app.callback()
def _main() -> None:
    pass


@app.command("convert")
def convert_checkpoint(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of the checkpoint: safetensors shards.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="New folder.")],
    to: Annotated[str, typer.Option(help="megamoe: fused experts; hf: back to the names it was converted from.")],
    dequantize: Annotated[bool, typer.Option("--dequantize", help="Write BF16 for FP8 and MXFP4.")] = False,
    max_shard_size: Annotated[str, typer.Option(help="Size of a shard, such as 5GB.")] = "5GB",
    verify: Annotated[bool, typer.Option(help="Convert back and compare the checksum of every tensor.")] = True,
) -> None:
    """Converts a checkpoint's MoE layers; the same command goes on after an interruption."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from megamoe.checkpoint import convert

    columns = TextColumn("{task.description:>6}"), BarColumn(), DownloadColumn()
    with Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn()) as bar:
        tasks = {}

        def show(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total)
            bar.update(tasks[phase], completed=done)

        try:
            options = dict(dequantize=dequantize, max_shard_size=max_shard_size, verify=verify, progress=show)
            convert(src, dst, to, **options)
        except MegaMoEError as error:
            bar.stop()
            # Not as BadParameter: its frame would break the names in a list of tensors.
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(2) from None
    typer.echo(f"{dst} is complete{' and verified' if verify else ''}.")


def _numbers(option: str, text: str, example: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"{option} = {text!r}: must be numbers with commas between them. Pass {example}, say.")
    return [int(part) for part in parts]


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
def bench_quant(
    only: Annotated[str, typer.Option(help="Part of the names of the cases to measure; all by default.")] = "",
) -> None:
    """FP8 casts as a fraction of a device copy of as many bytes."""
    from megamoe.bench import quant, timing

    try:
        timing.check_gpu()
        quant.main(only)
    except MegaMoEError as error:
        raise typer.BadParameter(str(error)) from None


@bench.command("sustained")
def bench_sustained(
    out: Annotated[Path, typer.Option(help="Folder for the CSV.")] = Path("bench_results"),
) -> None:
    """BF16 GEMMs back to back, ours and torch's: what a GPU at its power limit leaves of their rates."""
    from megamoe.bench import sustained

    try:
        sustained.run(out)
    except MegaMoEError as error:
        raise typer.BadParameter(str(error)) from None


@bench.command("exchange")
def bench_exchange(
    out: Annotated[Path, typer.Option(help="Folder for the CSV.")] = Path("bench_results"),
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; the median counts.")] = 9,
    allocator: Annotated[str, typer.Option(help="Of the symmetric memory: torch or nvshmem.")] = "torch",
    sms: Annotated[str, typer.Option(help="Comma-separated numbers of SMs that move rows.")] = "32,64",
) -> None:
    """The exchange over NVLink against NCCL: start it with torchrun, one process per GPU."""
    from megamoe.bench import exchange

    counts = _numbers("sms", sms, "32,64")
    try:
        exchange.run(out, rounds, allocator, counts)
    except MegaMoEError as error:
        raise typer.BadParameter(str(error)) from None


@bench.command("layer")
def bench_layer(
    out: Annotated[Path, typer.Option(help="Folder for the CSV.")] = Path("bench_results"),
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; the median counts.")] = 9,
) -> None:
    """A layer's forward and backward pass against plain torch; started with torchrun, its paths between ranks."""
    from megamoe.bench import layer

    try:
        layer.run(out, rounds)
    except MegaMoEError as error:
        raise typer.BadParameter(str(error)) from None


@bench.command("mega")
def bench_mega(
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="H,I,E,K", help="Hidden, intermediate size, experts, top-k; may be repeated; or all."),
    ] = None,
    tokens: Annotated[str, typer.Option(help="Comma-separated tokens of each rank.")] = "1,8,32,128,512,2048,8192",
    routing: Annotated[str, typer.Option(help="Comma-separated: uniform, zipf, one-hot.")] = "uniform",
    precision: Annotated[str, typer.Option(help="Comma-separated: fp8, bf16.")] = "fp8",
    sweep: Annotated[bool, typer.Option(help="Time other settings and print the regret of the chosen ones.")] = False,
    peer: Annotated[bool, typer.Option(help="A column for DeepGEMM's mega MoE (FP8), if it is installed.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for the CSV.")] = Path("bench_results"),
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; the median counts.")] = 7,
    pause: Annotated[float, typer.Option(help="Seconds of rest before each replay: off the GPU's power limit.")] = 0.0,
) -> None:
    """The mega-kernel against separate kernels and DeepGEMM's mega MoE: with torchrun, a process per GPU; or on one."""
    from megamoe.bench import mega, mega_cases

    texts = shape or ["7168,2048,64,8"]
    shapes = mega_cases.SHAPES if texts == ["all"] else [_numbers("shape", text, "7168,2048,64,8") for text in texts]
    counts, routings = _numbers("tokens", tokens, "1,8,128"), [name.strip() for name in routing.split(",")]
    precisions = [name.strip() for name in precision.split(",")]
    try:
        mega.run(shapes, counts, routings, out, rounds, sweeps=sweep, peer=peer, precisions=precisions, pause=pause)
    except MegaMoEError as error:
        raise typer.BadParameter(str(error)) from None


@bench.command("decode")
def bench_decode(
    shape: Annotated[str, typer.Option(help="H,I,E,K: hidden, intermediate size, experts, top-k.")] = "7168,2048,64,8",
    tokens: Annotated[str, typer.Option(help="Comma-separated tokens of each rank.")] = "1,8,32,128",
    path: Annotated[str, typer.Option(help="Of the layer: auto, fused or staged.")] = "auto",
    replays: Annotated[int, typer.Option(min=1, help="Replays that are compared with eager calls, in all.")] = 1000,
    peer: Annotated[bool, typer.Option(help="A column for DeepGEMM's mega MoE, if it is installed.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for the CSV.")] = Path("bench_results"),
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; the median counts.")] = 9,
) -> None:
    """A decode step in a CUDA graph against eager calls and DeepGEMM: with torchrun, a process per GPU; or on one."""
    from megamoe.bench import decode

    sizes, counts = _numbers("shape", shape, "7168,2048,64,8"), _numbers("tokens", tokens, "1,8,32")
    try:
        decode.run(sizes, counts, out, rounds, replays, path, peer=peer)
    except MegaMoEError as error:
        raise typer.BadParameter(str(error)) from None


@bench.command("placement")
def bench_placement(
    experts: Annotated[int, typer.Option(help="E, experts of the layer.")] = 256,
    ranks: Annotated[int, typer.Option(help="R, simulated ranks.")] = 8,
    top_k: Annotated[int, typer.Option(help="K, experts per token.")] = 8,
    redundant: Annotated[float, typer.Option(help="Replicas beyond one per expert, as a share of E.")] = 0.1,
    zipf: Annotated[float, typer.Option(help="Popularity of the n-th expert is n^-zipf.")] = 1.0,
    drift: Annotated[float, typer.Option(help="Share of experts that change popularity at each step.")] = 0.0,
    steps: Annotated[int, typer.Option(help="Steps in all.")] = 60,
    period: Annotated[int, typer.Option(help="Steps between two placements.")] = 10,
    tokens: Annotated[int, typer.Option(help="Tokens per rank and step.")] = 512,
    seed: Annotated[int, typer.Option(help="Of all random numbers.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the CSV and the plot.")] = Path("bench_results"),
) -> None:
    """Load of the ranks before and after placing experts by their load: a simulation, without a GPU."""
    from megamoe.bench import placement

    try:
        simulation = placement.Simulation(experts, ranks, top_k, redundant, zipf, drift, steps, period, tokens, seed)
        placement.run(simulation, out)
    except MegaMoEError as error:
        raise typer.BadParameter(str(error)) from None
