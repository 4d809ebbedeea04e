"""Serve a mixture-of-experts model of transformers: prompts in, texts out, its experts spread over the ranks.

Each rank takes every n-th prompt, in batches; one that is done early helps with the others' experts until all are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launch.config import LaunchError
from launch.distributed import World
from launch.throughput import Throughput
from megamoe.integrations.transformers import enable_expert_parallel, join, register

DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ServeSettings:
    """How prompts are continued.

    tokens: at most so many new ones of each prompt. batch_size: prompts that a rank runs at a time. temperature: 0 =
    the likeliest token each time. top_k: tokens to choose among, 0 = all. seed: of the choices, which depend on the
    number of ranks too. Raises LaunchError for numbers that are too small.
    """

    tokens: int = 64
    batch_size: int = 8
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("batch_size", 1), ("temperature", 0), ("top_k", 0)):
            if getattr(self, name) < least:
                raise LaunchError(f"{name}={getattr(self, name)} must be at least {least}")


def count_experts(name: str) -> int:
    """Number of experts per layer of the model `name` (a folder, or a name on the hub). Raises LaunchError."""
    register()
    from transformers import AutoConfig

    config = _load(AutoConfig, name).get_text_config()
    for field in ("num_local_experts", "num_experts", "n_routed_experts"):
        if getattr(config, field, None):
            return getattr(config, field)
    raise LaunchError(f"model {name} is a {config.model_type}, which has no experts: choose a mixture of experts")


def load_served(name: str, world: World, dtype: str = "auto") -> tuple[Any, Any]:
    """The model in evaluation mode, its experts spread over `world`'s expert group, and its tokenizer.

    Every rank reads the whole model into its host memory and keeps its part.
    dtype: one of DTYPES; "auto" = the checkpoint's. Raises LaunchError.
    """
    if dtype not in DTYPES:
        raise LaunchError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}")
    register()
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if not world.is_main:
        logging.disable_progress_bar()
    tokenizer = _load(AutoTokenizer, name)
    # Of a folder without tokenizer files some model types get an empty tokenizer.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise LaunchError(
            f"model {name} has no vocabulary: put its tokenizer's files (tokenizer.json, tokenizer_config.json) into it"
        )
    model = _load(AutoModelForCausalLM, name, experts_implementation="megamoe", dtype=dtype)
    enable_expert_parallel(model, world.expert_group)
    return model.to(world.device).eval(), tokenizer


def _load(kind: Any, name: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(name, **options)
    except Exception as error:
        # Whatever transformers and its readers of files raise: what was asked for, and why it failed.
        what = {"AutoConfig": "configuration", "AutoTokenizer": "tokenizer"}.get(kind.__name__, "weights")
        raise LaunchError(f"model {name} has no {what} that transformers can load: {error}") from error


def serve(
    model: Any, tokenizer: Any, prompts: list[str], world: World, settings: ServeSettings, show: bool = True
) -> list[str] | None:
    """The continuations of `prompts` on the main rank, None on the others. Collective: all pass the same prompts.

    show: the main rank shows its progress, and at the end the tokens per second of all ranks. Raises LaunchError for
    prompts that are empty or too long.
    """
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    _check_lengths(ids, settings.tokens, getattr(model.config.get_text_config(), "max_position_embeddings", None))
    own = list(range(world.rank, len(prompts), world.size))
    # Prompts of like length together: less padding.
    own.sort(key=lambda index: len(ids[index]))
    torch.manual_seed(settings.seed + world.rank)
    texts: dict[int, str] = {}
    of = f" on rank {world.rank} of {world.size}" if world.size > 1 else ""
    with Throughput(show and world.is_main, len(own), of) as throughput, join(model):
        for start in range(0, len(own), settings.batch_size):
            chunk = own[start : start + settings.batch_size]
            new = _generate(model, tokenizer, [ids[index] for index in chunk], settings, throughput)
            for index, tokens in zip(chunk, new, strict=True):
                # Decoded together: many tokenizers drop a space at the start.
                before, whole = tokenizer.batch_decode([ids[index], ids[index] + tokens], skip_special_tokens=True)
                texts[index] = whole[len(before) :]
            throughput.add_prompts(len(chunk))
    total, seconds = int(world.sum(torch.tensor(throughput.tokens, device=world.device))), throughput.seconds
    throughput.show(f"{total:,} tokens in {seconds:.1f} s: {total / seconds:,.1f} tokens/s")
    if world.mesh is not None:
        gathered: list[Any] = [None] * world.size
        dist.all_gather_object(gathered, texts)
        texts = {index: text for theirs in gathered for index, text in theirs.items()}
    return [texts[index] for index in range(len(prompts))] if world.is_main else None


def _check_lengths(ids: list[list[int]], new_tokens: int, positions: int | None) -> None:
    for number, tokens in enumerate(ids, start=1):
        if not tokens:
            raise LaunchError(f"prompt {number} is empty, and the tokenizer adds no first token: write some text")
        if positions is not None and len(tokens) + new_tokens > positions:
            raise LaunchError(
                f"prompt {number} has {len(tokens)} tokens: with {new_tokens} new ones that is more than the model's "
                f"{positions} positions; shorten it or ask for fewer tokens"
            )


def _generate(
    model: Any, tokenizer: Any, ids: list[list[int]], settings: ServeSettings, throughput: Throughput
) -> list[list[int]]:
    """The new tokens of each prompt, without the one that ends it."""
    from transformers import GenerationConfig

    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    # Padding is masked, and cut off after the end: any token will do.
    pad = tokenizer.pad_token_id or 0
    length = max(map(len, ids))
    padding = [length - len(tokens) for tokens in ids]
    inputs = torch.tensor([[pad] * count + tokens for count, tokens in zip(padding, ids, strict=True)])
    mask = torch.tensor([[0] * count + [1] * (length - count) for count in padding])
    choice = dict(do_sample=True, temperature=settings.temperature, top_k=settings.top_k)
    out = model.generate(
        inputs.to(model.device),
        attention_mask=mask.to(model.device),
        generation_config=GenerationConfig(
            max_new_tokens=settings.tokens,
            eos_token_id=ends or None,
            pad_token_id=pad,
            **(choice if settings.temperature else dict(do_sample=False)),
        ),
        streamer=_TokenCounter(throughput, ends),
    )
    rows = out[:, length:].tolist()
    return [row[: next((place for place, token in enumerate(row) if token in ends), len(row))] for row in rows]


class _TokenCounter:
    """The streamer of a batch: counts the tokens of texts that have not ended."""

    def __init__(self, throughput: Throughput, ends: list[int]) -> None:
        self._throughput = throughput
        self._ends = torch.tensor(ends, dtype=torch.int64)
        self._running: Tensor | None = None

    def put(self, tokens: Tensor) -> None:
        """First the prompts, then one new token of each."""
        if self._running is None:
            self._running = torch.ones(tokens.shape[0], dtype=torch.bool)
            return
        self._throughput.add_tokens(int(self._running.sum()))
        self._running &= ~torch.isin(tokens, self._ends)

    def end(self) -> None:
        """Nothing is held back."""
