"""Text, split and batches: deterministic, disjoint, independent of the number of ranks."""

from __future__ import annotations

import pytest
import torch

from launch.config import LaunchError
from launch.data import (
    DOCUMENT_SEPARATOR,
    RankSlice,
    batch_starts,
    is_validation,
    load_corpus,
    validation_starts,
    windows,
)

CPU = torch.device("cpu")


def text_of(part: torch.Tensor) -> bytes:
    return bytes(part.tolist())


@pytest.fixture
def folder(tmp_path):
    for index in range(60):
        path = tmp_path / f"part_{index % 3}" / f"file_{index:02d}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"<{index:02d}>" * 20, encoding="utf-8")
    return tmp_path


def test_folder_is_split_by_file(folder):
    corpus = load_corpus(str(folder), context_length=16)
    train, validation = text_of(corpus.train), text_of(corpus.validation)
    for index in range(60):
        mark, name = f"<{index:02d}>".encode(), f"part_{index % 3}/file_{index:02d}.txt"
        assert (mark in validation) == is_validation(name)
        assert (mark in train) != (mark in validation)
    assert corpus.num_train_files + corpus.num_validation_files == 60
    assert train.count(DOCUMENT_SEPARATOR) == corpus.num_train_files


def test_split_of_a_file_does_not_depend_on_the_others(folder):
    before = text_of(load_corpus(str(folder), 16).validation)
    (folder / "part_0" / "one_more.txt").write_text("x" * 100, encoding="utf-8")
    after = text_of(load_corpus(str(folder), 16).validation)
    assert before in after or before == after


def test_binary_hidden_and_empty_files_are_left_out(folder):
    before = load_corpus(str(folder), 16).describe()
    (folder / "image.bin").write_bytes(b"ab\0cd" * 50)
    (folder / ".hidden").write_text("secret" * 50, encoding="utf-8")
    (folder / "empty.txt").touch()
    assert load_corpus(str(folder), 16).describe() == before


def test_few_files_still_give_both_parts(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name * 100, encoding="utf-8")
    corpus = load_corpus(str(tmp_path), 16)
    assert corpus.num_train_files == corpus.num_validation_files == 1


def test_single_file_is_split_by_its_tail(tmp_path):
    path = tmp_path / "text.txt"
    content = bytes(32 + index % 90 for index in range(4000))
    path.write_bytes(content)
    corpus = load_corpus(str(path), 16)
    assert text_of(corpus.train) + text_of(corpus.validation) == content
    assert corpus.validation.numel() == 200


def test_standard_library_is_there_and_deterministic():
    corpus = load_corpus("stdlib", 256)
    assert corpus.train.numel() > 1_000_000
    assert 0.01 < corpus.validation.numel() / corpus.train.numel() < 0.2
    assert corpus.describe() == load_corpus("stdlib", 256).describe()
    assert b"import " in text_of(corpus.validation[:20_000])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda path: path / "absent", "neither a file nor a folder"),
        (lambda path: path, "0 text files"),
        (lambda path: (path / "short.txt", (path / "short.txt").write_text("x" * 100))[0], "validation bytes"),
    ],
    ids=["absent", "empty_folder", "short_file"],
)
def test_bad_data_is_explained(tmp_path, make, message):
    with pytest.raises(LaunchError, match=message):
        load_corpus(str(make(tmp_path)), 16)


def test_batches_depend_on_seed_and_step_alone():
    first = batch_starts(1000, 17, 64, seed=3, step=5)
    assert torch.equal(first, batch_starts(1000, 17, 64, seed=3, step=5))
    assert not torch.equal(first, batch_starts(1000, 17, 64, seed=3, step=6))
    assert not torch.equal(first, batch_starts(1000, 17, 64, seed=4, step=5))
    assert 0 <= first.min() and first.max() <= 1000 - 17


def test_last_window_can_be_drawn():
    assert batch_starts(17, 17, 4, seed=0, step=1).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_partition_the_global_batch(world_size):
    starts = batch_starts(1000, 17, 8, seed=0, step=1)
    parts = [RankSlice(rank, world_size).of(starts) for rank in range(world_size)]
    assert torch.equal(torch.cat(parts), starts)


def test_indivisible_batch_is_explained():
    with pytest.raises(LaunchError, match="8 sequences .* world size 3"):
        RankSlice(0, 3).of(torch.zeros(8))


def test_validation_windows_cover_the_text():
    starts = validation_starts(1000, 17, 5)
    assert starts[0] == 0 and starts[-1] == 1000 - 17
    assert torch.equal(starts, starts.sort().values)
    assert validation_starts(1000, 17, 1).tolist() == [0]


def test_targets_are_the_next_bytes():
    text = torch.arange(100, dtype=torch.uint8)
    inputs, targets = windows(text, torch.tensor([0, 50]), 8, CPU)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs + 1, targets)
    assert inputs[1, 0] == 50
