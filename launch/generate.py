"""Write text with a model that launch/train.py trained, or with a mixture-of-experts model of transformers.

    python launch/generate.py --run-dir runs/train --prompt "def "                       one process
    torchrun --standalone --nproc-per-node 2 launch/generate.py --run-dir runs/train     experts spread over two
    torchrun --standalone --nproc-per-node 2 launch/generate.py --model FOLDER --prompts-file prompts.txt

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
from launch.serving import ServeSettings, count_experts, load_served, serve
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


def read_prompts(prompts: list[str], file: Path | None) -> list[str]:
    """`prompts`, then the lines of `file` that are not empty. Raises LaunchError where that is nothing."""
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(f"prompts file {file} cannot be read: {error}") from error
        prompts = prompts + [line for line in lines if line.strip()]
    if not prompts:
        raise LaunchError("there is no prompt: pass --prompt TEXT, or a --prompts-file with one prompt a line")
    return prompts


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    run_dir: Annotated[Path | None, typer.Option(help="Folder of a training run (default: runs/train).")] = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub name of a transformers model instead.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; may be repeated.")] = None,
    prompts_file: Annotated[Path | None, typer.Option(help="More of them, one a line.")] = None,
    length: Annotated[int, typer.Option("--bytes", "--tokens", help="Bytes (--model: tokens) to write.")] = 500,
    temperature: Annotated[float, typer.Option(help="Randomness; 0 = always the likeliest.")] = 0.7,
    top_k: Annotated[int, typer.Option(help="Choose among that many likeliest; 0 = all.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of the choices.")] = 0,
    batch_size: Annotated[int, typer.Option(help="--model: prompts that a process runs at a time.")] = 8,
    dtype: Annotated[str, typer.Option(help="--model: auto (the checkpoint's), float32, float16, bfloat16.")] = "auto",
    ep: Annotated[int | None, typer.Option(help="Ranks that share one copy of the experts (default: all).")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    output: Annotated[Path | None, typer.Option(help="Also write the text to this file.")] = None,
    timeout_seconds: Annotated[float, typer.Option(help="Longest wait for another rank.")] = 300.0,
) -> None:
    """Write text with a trained model or a transformers model; run it by python or by torchrun."""
    try:
        if run_dir is not None and model is not None:
            raise LaunchError(f"--run-dir {run_dir} and --model {model} exclude each other: pass one of them")
        default = ["def "] if model is None and prompts_file is None else []
        prompts = read_prompts(prompt if prompt is not None else default, prompts_file)
        if model is not None:
            settings = ServeSettings(length, batch_size, temperature, top_k, seed)
            with open_world(count_experts(model), ep, device, timeout_seconds) as world:
                continuations = serve(*load_served(model, world, dtype), prompts, world, settings)
        else:
            folder = run_dir or Path("runs/train")
            config, training, _ = read_config(folder / "config.json")
            with open_world(config.moe.num_experts, ep, device, timeout_seconds) as world:
                trained = load_model(folder, world)
                options = {"temperature": temperature, "top_k": top_k, "seed": seed, "dtype": training.dtype}
                written = [generate(trained, text.encode(), length, world, **options) for text in prompts]
                continuations = [text.decode(errors="replace") for text in written]
    except (LaunchError, MegaMoEError) as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    if world.is_main:
        texts = [text + continuation for text, continuation in zip(prompts, continuations, strict=True)]
        shown = "\n---\n".join(texts)
        print(shown)
        if output is not None:
            output.write_text(shown + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
