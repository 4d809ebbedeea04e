"""Write text with a trained model.

    python launch/generate.py --run-dir runs/train --prompt "def "                       one process
    torchrun --standalone --nproc-per-node 2 launch/generate.py --run-dir runs/train     experts spread over two

A checkpoint loads at any number of processes, whatever number trained it. All of them compute together; one prints.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import Tensor

from launch.checkpointing import Checkpoints
from launch.config import LaunchError, read_config
from launch.data import DOCUMENT_SEPARATOR
from launch.distributed import World, open_world
from launch.model import LanguageModel, autocast
from megamoe import MegaMoEError


def load_model(run_dir: Path, world: World) -> LanguageModel:
    """The model of a run folder's latest checkpoint, in evaluation mode, spread over `world`. Raises LaunchError."""
    config, _, _ = read_config(run_dir / "config.json")
    checkpoints = Checkpoints(run_dir)
    path = checkpoints.latest()
    if path is None:
        raise LaunchError(f"run folder {run_dir} has no checkpoint yet: train with launch/train.py --run-dir {run_dir}")
    model = LanguageModel(config, world.expert_group, world.group, world.device)
    checkpoints.load_model(path, model)
    return model.eval()


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: bytes,
    num_bytes: int,
    world: World,
    *,
    temperature: float = 0.7,
    top_k: int = 40,
    seed: int = 0,
    dtype: str = "float32",
) -> bytes:
    """Continue `prompt` by at most `num_bytes` bytes; stops early where the model ends the document.

    temperature: divides the logits; 0 takes the likeliest byte each time. top_k: bytes to choose among, 0 = all.
    dtype: see `launch.model.autocast`.
    Collective: every rank calls it with the same arguments and gets the same bytes. Raises LaunchError for bad numbers.
    """
    if num_bytes < 1:
        raise LaunchError(f"bytes={num_bytes} must be at least 1")
    if temperature < 0:
        raise LaunchError(f"temperature={temperature} must not be negative")
    if not 0 <= top_k <= 256:
        raise LaunchError(f"top_k={top_k} must lie in 0 .. 256 (0 = all bytes)")
    generator = torch.Generator().manual_seed(seed)
    context_length = model.config.context_length
    history = list(DOCUMENT_SEPARATOR + prompt)
    start = len(history)
    caches, pending = model.new_caches(), history[-context_length:]
    while len(history) < start + num_bytes:
        if caches[0].length + len(pending) > context_length:
            # The window is full: go on from its later half, read anew.
            caches, pending = model.new_caches(), history[-max(1, context_length // 2) :]
        with autocast(dtype, world.device):
            logits = model(torch.tensor([pending], device=world.device), caches)[0, -1]
        byte = _sample(logits.float().cpu(), temperature, top_k, generator)
        if world.mesh is not None:
            # Ranks may differ in the last bit of a logit; the first one decides.
            choice = torch.tensor([byte], device=world.device)
            dist.broadcast(choice, src=0)
            byte = int(choice)
        if byte == DOCUMENT_SEPARATOR[0]:
            break
        history.append(byte)
        pending = [byte]
    return bytes(history[start:])


def _sample(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        threshold = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    return int(torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    run_dir: Annotated[Path, typer.Option(help="Folder of a training run.")] = Path("runs/train"),
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    num_bytes: Annotated[int, typer.Option("--bytes", help="Bytes to write.")] = 500,
    temperature: Annotated[float, typer.Option(help="Randomness; 0 = always the likeliest byte.")] = 0.7,
    top_k: Annotated[int, typer.Option(help="Choose among that many likeliest bytes; 0 = all.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of the choices.")] = 0,
    ep: Annotated[int | None, typer.Option(help="Ranks that share one copy of the experts (default: all).")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    output: Annotated[Path | None, typer.Option(help="Also write the text to this file.")] = None,
    timeout_seconds: Annotated[float, typer.Option(help="Longest wait for another rank.")] = 300.0,
) -> None:
    """Write text with a trained model; run it by python or by torchrun."""
    try:
        config, training, _ = read_config(run_dir / "config.json")
        with open_world(config.moe.num_experts, ep, device, timeout_seconds) as world:
            model = load_model(run_dir, world)
            settings = {"temperature": temperature, "top_k": top_k, "seed": seed, "dtype": training.dtype}
            continuation = generate(model, prompt.encode(), num_bytes, world, **settings)
    except (LaunchError, MegaMoEError) as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    if world.is_main:
        text = prompt + continuation.decode(errors="replace")
        print(text)
        if output is not None:
            output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
