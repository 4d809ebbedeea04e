"""Serving a transformers model with launch/generate.py: the texts of transformers' own experts, and clear errors."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import types
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from launch.generate import app
from launch.serving import ServeSettings, count_experts, load_served, serve
from launch.throughput import Throughput
from tests.integrations.families import FAMILIES, VOCABULARY, build, robust_seed
from tests.launch.commands import check_command

transformers = pytest.importorskip("transformers", minversion="5.0")
tokenizers = pytest.importorskip("tokenizers")

PROMPTS = ["the quick brown fox", "a", "moe", "jumps over the lazy dog", "tokens"]
TOKENS = 24


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def letters() -> transformers.PreTrainedTokenizerFast:
    """One token per character, of prompts "a" to "z" and space; the model may write others."""
    characters = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz "]
    vocabulary = {token: index for index, token in enumerate(characters)}
    vocabulary |= {chr(0x100 + index): index for index in range(len(vocabulary), VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    # As sentencepiece's: the first space of a text is not its own.
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", left=1, right=0)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )


@dataclasses.dataclass
class Served:
    """A saved model, and the texts that transformers' own experts write."""

    folder: Path
    continuations: list[str]
    num_tokens: int


def make_served(folder: Path, seed: int) -> Served:
    tokenizer = letters()
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    assert [len(tokens) for tokens in ids] == [len(prompt) for prompt in PROMPTS]
    seed = robust_seed("mixtral", seed, [([tokens], TOKENS) for tokens in ids])
    model = build("mixtral", seed, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    texts, count = [], 0
    for tokens in ids:
        out = model.generate(torch.tensor([tokens]), max_new_tokens=TOKENS, do_sample=False)[0, len(tokens) :]
        texts.append(
            "".join(token for token in tokenizer.convert_ids_to_tokens(out) if token not in ("<pad>", "<eos>"))
        )
        count += len(out)
    return Served(folder, texts, count)


@pytest.fixture
def served(tmp_path, seed) -> Served:
    return make_served(tmp_path / "model", seed)


def texts(shown: str) -> list[str]:
    return shown.removesuffix("\n").split("\n---\n")


@pytest.mark.timeout(240)
def test_two_processes_write_what_one_writes(served, tmp_path):
    file, output = tmp_path / "prompts.txt", tmp_path / "texts.txt"
    file.write_text("\n".join([*PROMPTS[2:], "  ", ""]))
    arguments = ["--model", str(served.folder), "--prompt", PROMPTS[0], "--prompt", PROMPTS[1]]
    arguments += ["--prompts-file", str(file), "--tokens", str(TOKENS), "--temperature", "0", "--device", "cpu"]
    expected = [prompt + text for prompt, text in zip(PROMPTS, served.continuations, strict=True)]
    shown = check_command("launch/generate.py", *arguments, "--batch-size", "2", "--output", output, processes=2)
    assert texts(shown) == expected
    assert texts(output.read_text()) == expected
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert texts(done.stdout) == expected
    assert "5/5 prompts" in done.stderr and f"{served.num_tokens} tokens in" in done.stderr


def test_settings(served, single):
    model, tokenizer = load_served(str(served.folder), single)
    settings = ServeSettings(TOKENS, batch_size=3)
    assert serve(model, tokenizer, PROMPTS, single, settings, show=False) == served.continuations
    warm = dataclasses.replace(settings, temperature=5.0, seed=1)
    first = serve(model, tokenizer, PROMPTS, single, warm, show=False)
    assert first != served.continuations
    assert serve(model, tokenizer, PROMPTS, single, warm, show=False) == first
    assert serve(model, tokenizer, PROMPTS, single, dataclasses.replace(warm, seed=2), show=False) != first
    only_best = dataclasses.replace(warm, top_k=1)
    assert serve(model, tokenizer, PROMPTS, single, only_best, show=False) == served.continuations
    half, _ = load_served(str(served.folder), single, "bfloat16")
    assert half.dtype == torch.bfloat16 and model.dtype == torch.float32


def test_spaces_and_ends(single, monkeypatch):
    """A continuation keeps its first space, and nothing after its end."""
    tokenizer = letters()
    new = torch.tensor([tokenizer(" b")["input_ids"] + [tokenizer.eos_token_id] + tokenizer("cc")["input_ids"]])
    model = types.SimpleNamespace(
        config=types.SimpleNamespace(get_text_config=lambda: None),
        generation_config=types.SimpleNamespace(eos_token_id=[7, tokenizer.eos_token_id]),
        device=torch.device("cpu"),
        generate=lambda inputs, **_: torch.cat([inputs, new.expand(len(inputs), -1)], dim=1),
    )
    monkeypatch.setattr("launch.serving.join", lambda _: contextlib.nullcontext())
    assert serve(model, tokenizer, ["a", "the"], single, ServeSettings(), show=False) == [" b", " b"]


def test_live_throughput(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(
        "launch.throughput.Console", lambda **_: Console(file=shown, force_terminal=True, width=120, color_system=None)
    )
    with Throughput(True, 3, " on rank 0 of 2") as throughput:
        throughput.add_tokens(5)
        throughput.add_prompts(2)
    assert throughput.tokens == 5
    assert "2/3" in shown.getvalue() and "tokens/s on rank 0 of 2" in shown.getvalue()
    silent = io.StringIO()
    monkeypatch.setattr("launch.throughput.Console", lambda **_: Console(file=silent))
    with Throughput(False, 3) as throughput:
        throughput.add_tokens(5)
        throughput.add_prompts(3)
        throughput.show("done")
    assert silent.getvalue() == ""


# ---------------------------------------------------------------- errors


def refused(*arguments: object) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments), "--device", "cpu"])
    assert done.exit_code == 2 and done.stdout == "", done.output
    return done.stderr


def test_model_without_tokenizer(seed, tmp_path):
    for family in ("mixtral", "qwen3_moe"):
        build(family, seed).save_pretrained(tmp_path / family)
        message = refused("--model", tmp_path / family, "--prompt", "a")
        assert "has no tokenizer that transformers can load" in message or "has no vocabulary: put its" in message


def test_models_that_cannot_be_served(tmp_path):
    assert "has no configuration that transformers can load" in refused("--model", tmp_path, "--prompt", "a")
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    transformers.AutoConfig.for_model("llama", **sizes).save_pretrained(tmp_path)
    letters().save_pretrained(tmp_path)
    assert "is a llama, which has no experts" in refused("--model", tmp_path, "--prompt", "a")
    transformers.AutoConfig.for_model("mixtral", **sizes).save_pretrained(tmp_path)
    assert "has no weights that transformers can load" in refused("--model", tmp_path, "--prompt", "a")


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_counted(family, seed, tmp_path):
    build(family, seed).config.save_pretrained(tmp_path)
    assert count_experts(str(tmp_path)) == 8


def test_wrong_arguments(served, tmp_path):
    model = ["--model", served.folder]
    assert "exclude each other" in refused(*model, "--run-dir", tmp_path, "--prompt", "a")
    assert "there is no prompt" in refused(*model)
    assert "absent cannot be read" in refused(*model, "--prompts-file", tmp_path / "absent")
    assert "dtype='int8' must be one of auto" in refused(*model, "--prompt", "a", "--dtype", "int8")
    assert "tokens=0 must be at least 1" in refused(*model, "--prompt", "a", "--tokens", 0)
    assert "batch_size=0 must be at least 1" in refused(*model, "--prompt", "a", "--batch-size", 0)
    assert "temperature=-1.0 must be at least 0" in refused(*model, "--prompt", "a", "--temperature", -1)
    assert "prompt 2 is empty" in refused(*model, "--prompt", "a", "--prompt", "", "--tokens", 7)
    long = refused(*model, "--prompt", "a" * 250, "--tokens", 7)
    assert "prompt 1 has 250 tokens: with 7 new ones that is more than the model's 256 positions" in long
