"""Text as bytes, split into training and validation, and batches that are a pure function of (seed, step)."""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from launch.config import LaunchError

STDLIB = "stdlib"
VALIDATION_FRACTION = 0.05
# One byte between documents. Text does not contain it, so it also tells the model that a document begins.
DOCUMENT_SEPARATOR = b"\0"

# Folders of the standard library that hold no hand-written sources of its own: installed packages, tests, tables.
_SKIPPED_FOLDERS = frozenset(
    [
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "lib2to3",
        "pydoc_data",
        "encodings",
        "__pycache__",
    ]
)


@dataclass(frozen=True)
class Corpus:
    """Training and validation text, each a uint8 tensor [number of bytes]."""

    train: Tensor
    validation: Tensor
    num_train_files: int
    num_validation_files: int

    def describe(self) -> dict[str, int | str]:
        """Sizes, and a digest that tells whether two machines train on the same bytes."""
        return {
            "train_bytes": self.train.numel(),
            "validation_bytes": self.validation.numel(),
            "train_files": self.num_train_files,
            "validation_files": self.num_validation_files,
            "digest": hashlib.sha256(self.train.numpy().data).hexdigest()[:16],
        }


def load_corpus(source: str, context_length: int) -> Corpus:
    """Load "stdlib" or the file or folder at path `source`.

    A folder is split by file, a single file by its tail. Raises LaunchError if there is nothing to read or if either
    part is shorter than one window of context_length + 1 bytes.
    """
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        corpus = _split_by_file(root, _stdlib_files(root), f"the Python standard library at {root}")
    else:
        path = Path(source)
        if path.is_file():
            corpus = _split_by_tail(path)
        elif path.is_dir():
            corpus = _split_by_file(path, _text_files(path), f"folder {path}")
        else:
            raise LaunchError(f"data={source!r} is neither a file nor a folder: give --data an existing path")
    for name, part in (("training", corpus.train), ("validation", corpus.validation)):
        if part.numel() < context_length + 1:
            raise LaunchError(
                f"data={source!r} has {part.numel()} {name} bytes, fewer than one window of context_length + 1 = "
                f"{context_length + 1}: give more text or a smaller --context-length"
            )
    return corpus


def is_validation(relative_path: str) -> bool:
    """Whether a file belongs to the validation part. Depends on nothing but its path relative to the data folder."""
    return _hash_fraction(relative_path) < VALIDATION_FRACTION


def _hash_fraction(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def _stdlib_files(root: Path) -> Iterable[Path]:
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _SKIPPED_FOLDERS]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _text_files(root: Path) -> Iterable[Path]:
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if not name.startswith(".")]
        yield from (Path(folder, name) for name in files if not name.startswith("."))


def _split_by_file(root: Path, paths: Iterable[Path], what: str) -> Corpus:
    files: dict[str, bytes] = {}
    for path in paths:
        if path.is_file():
            content = path.read_bytes()
            # A zero byte marks a binary file; it would also be taken for the end of a document.
            if content and DOCUMENT_SEPARATOR not in content:
                files[path.relative_to(root).as_posix()] = content
    if len(files) < 2:
        raise LaunchError(
            f"{what} has {len(files)} text files, but a split by file needs at least 2: "
            f"give --data a folder with more files, or a single file, which is split by its tail"
        )
    validation = {name for name in files if is_validation(name)} or {min(files, key=_hash_fraction)}
    if len(validation) == len(files):
        validation.remove(max(validation, key=_hash_fraction))
    parts = {True: bytearray(), False: bytearray()}
    for name in sorted(files):
        parts[name in validation] += DOCUMENT_SEPARATOR + files[name]
    return Corpus(_to_tensor(parts[False]), _to_tensor(parts[True]), len(files) - len(validation), len(validation))


def _split_by_tail(path: Path) -> Corpus:
    content = bytearray(path.read_bytes())
    cut = len(content) - int(len(content) * VALIDATION_FRACTION)
    return Corpus(_to_tensor(content[:cut]), _to_tensor(content[cut:]), 1, 1)


def _to_tensor(content: bytearray) -> Tensor:
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class RankSlice:
    """The contiguous share of a rank in a global batch of `size` sequences."""

    rank: int
    world_size: int

    def of(self, rows: Tensor) -> Tensor:
        """This rank's rows of [size, ...]. Raises LaunchError if the rows do not divide evenly."""
        if rows.shape[0] % self.world_size:
            raise LaunchError(
                f"{rows.shape[0]} sequences per forward pass (batch_size / accumulation) must be divisible by the "
                f"world size {self.world_size}: change --batch-size, --accumulation or the number of processes"
            )
        share = rows.shape[0] // self.world_size
        return rows[self.rank * share : (self.rank + 1) * share]


def batch_starts(num_bytes: int, window: int, batch_size: int, seed: int, step: int) -> Tensor:
    """Where the windows of a step's global batch begin: int64 [batch_size], a pure function of the arguments."""
    generator = random.Random(f"{seed}/{step}")
    return torch.tensor([generator.randrange(num_bytes - window + 1) for _ in range(batch_size)])


def validation_starts(num_bytes: int, window: int, count: int) -> Tensor:
    """Where `count` validation windows begin: int64 [count], spread evenly from the first byte to the last window."""
    last = num_bytes - window
    return torch.tensor([index * last // max(1, count - 1) for index in range(count)])


def windows(text: Tensor, starts: Tensor, context_length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets (the inputs shifted by one byte), each int64 [len(starts), context_length], on `device`."""
    index = starts[:, None] + torch.arange(context_length + 1)
    block = text[index].to(device, torch.int64)
    return block[:, :-1], block[:, 1:]
