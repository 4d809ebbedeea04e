"""Checkpoint folders: what is read, and how damage is reported."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from megamoe import MegaMoEError
from megamoe.checkpoint import Checkpoint, files
from megamoe.checkpoint.problems import Problems
from tests.checkpoint.tiny import write_checkpoint
from tests.support.errors import fails


def some_tensors() -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.randn(6, 3 + i) for i in range(5)}


@pytest.mark.parametrize("shards", [1, 3])
def test_read(shards, tmp_path, seed):
    tensors = {**some_tensors(), "scalar": torch.tensor(3.0), "codes": torch.zeros(2, 2).to(torch.float8_e8m0fnu)}
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "c", tensors, shards=shards))
    checkpoint.check_shards()
    assert checkpoint.weight_map.keys() == tensors.keys()
    assert (checkpoint.index_metadata is None) == (shards == 1)
    assert checkpoint.config is None and checkpoint.record is None and checkpoint.metadata() == {"format": "pt"}
    for name, tensor in tensors.items():
        assert name in checkpoint
        spec = checkpoint.spec(name)
        assert spec.shape == tuple(tensor.shape) and spec.dtype == tensor.dtype and spec.nbytes == tensor.nbytes
        assert torch.equal(checkpoint.read(name).float(), tensor.float())
    assert torch.equal(checkpoint.read("t1", 2), tensors["t1"][2])
    assert torch.equal(checkpoint.read("t1", slice(1, 4)), tensors["t1"][1:4])


def test_shards_without_an_index(tmp_path, seed):
    tensors = some_tensors()
    folder = write_checkpoint(tmp_path / "c", tensors, shards=2)
    (folder / "model.safetensors.index.json").unlink()
    assert Checkpoint(folder).weight_map.keys() == tensors.keys()
    save_file({"t0": torch.zeros(1)}, folder / "more.safetensors")
    with pytest.raises(ValueError, match="has t0 in model-00001-of-00002.safetensors and more.safetensors"):
        Checkpoint(folder)


@pytest.mark.parametrize("chunk", [1, 40, 72, 10**6])
def test_pieces(chunk, tmp_path, seed, monkeypatch):
    tensor = torch.randn(7, 3, 3)
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "c", {"t": tensor, "s": torch.tensor(1.0)}))
    monkeypatch.setattr(files, "CHUNK", chunk)
    pieces = list(checkpoint.pieces("t"))
    assert torch.equal(torch.cat(pieces), tensor)
    assert all(piece.nbytes <= max(chunk, 36) for piece in pieces)
    assert torch.equal(*checkpoint.pieces("s"), torch.tensor(1.0))


def test_no_checkpoint(tmp_path):
    with fails(ValueError, "checkpoint", str(tmp_path / "no"), "must be an existing folder"):
        Checkpoint(tmp_path / "no")
    with fails(ValueError, "checkpoint", str(tmp_path), "has no *"):
        Checkpoint(tmp_path)


def test_unfinished_conversion(tmp_path):
    folder = write_checkpoint(tmp_path / "c", some_tensors())
    (folder / files.MANIFEST).write_text('{"done": []}')
    with fails(ValueError, "checkpoint", str(folder), "is an unfinished conversion"):
        Checkpoint(folder)
    (folder / files.MANIFEST).write_text('{"complete": true}')
    Checkpoint(folder)


def test_every_missing_shard_is_named(tmp_path):
    folder = write_checkpoint(tmp_path / "c", some_tensors(), shards=4)
    for shard in (1, 3):
        (folder / f"model-{shard:05d}-of-00004.safetensors").unlink()
    names = "model-00001-of-00004.safetensors, model-00003-of-00004.safetensors"
    with fails(ValueError, "index", str(folder / files.INDEX), "names 2 missing shards") as _:
        Checkpoint(folder)
    with pytest.raises(MegaMoEError, match=names):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{", "must be a readable JSON file"),
        ("[]", "must hold a JSON object"),
        ("{}", "must have a weight_map"),
        ('{"weight_map": {"t0": "../x.safetensors"}}', "no file name in the folder"),
        ('{"weight_map": {"t0": 3}}', "no file name in the folder"),
    ],
)
def test_bad_index(text, rule, tmp_path):
    folder = write_checkpoint(tmp_path / "c", some_tensors())
    (folder / files.INDEX).write_text(text)
    with pytest.raises(MegaMoEError) as caught:
        Checkpoint(folder)
    assert rule in str(caught.value) and str(folder / files.INDEX) in str(caught.value)


def test_tensors_that_are_not_where_the_index_says(tmp_path):
    folder = write_checkpoint(tmp_path / "c", some_tensors(), shards=2)
    index = json.loads((folder / files.INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))
    index["weight_map"]["t0"] = second
    index["weight_map"]["ghost"] = first
    (folder / files.INDEX).write_text(json.dumps(index))
    checkpoint = Checkpoint(folder)
    with pytest.raises(MegaMoEError) as caught:
        checkpoint.check_shards()
    assert f"ghost is not in {first}" in str(caught.value) and f"t0 is not in {second}" in str(caught.value)
    for name in ("ghost", "t0"):
        with pytest.raises(MegaMoEError, match=f"does not hold {name}"):
            checkpoint.read(name)
    del index["weight_map"]["t0"], index["weight_map"]["ghost"]
    (folder / files.INDEX).write_text(json.dumps(index))
    with pytest.raises(MegaMoEError, match=f"t0 is in {first}, but not in the index"):
        Checkpoint(folder).check_shards()


DAMAGE = {
    "empty": lambda data: b"",
    "half a length": lambda data: data[:5],
    "half a header": lambda data: data[:60],
    "half the data": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "more bytes": lambda data: data + b"\0",
    "no JSON": lambda data: data[:8] + b"x" * (len(data) - 8),
    "huge header": lambda data: struct.pack("<Q", 2**60) + data[8:],
    "text": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_shards(damage, tmp_path):
    folder = write_checkpoint(tmp_path / "c", some_tensors(), shards=3)
    damaged = [folder / f"model-{shard:05d}-of-00003.safetensors" for shard in (1, 3)]
    for path in damaged:
        path.write_bytes(DAMAGE[damage](path.read_bytes()))
    checkpoint = Checkpoint(folder)
    with fails(ValueError, "shard", str(damaged[0]), "is truncated or no safetensors file"):
        checkpoint.read("t0")
    assert checkpoint.read("t1").numel()
    with pytest.raises(MegaMoEError) as caught:
        checkpoint.check_shards()
    assert all(str(path) in str(caught.value) for path in damaged)
    assert f"({damaged[0].stat().st_size} bytes)" in str(caught.value)


def test_unknown_dtype(tmp_path):
    header = json.dumps({"t": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with fails(ValueError, "t.dtype", "C64", "must be one of F64"):
        Checkpoint(tmp_path).spec("t")


def test_problems_of_many_experts_take_one_line():
    problems = Problems()
    problems.raise_any("here")
    for expert in (0, 1, 2, 5, 7, 8):
        problems.add("missing", f"layers.1.experts.{expert}.w1", "[2, 3]")
    problems.add("missing", "layers.1.experts.4.w3", "[2, 3]")
    problems.add("wrong", "layers.1.gate", "is [1], must be [2]")
    with fails(ValueError, "checkpoint", "here", "its tensors do not match the layer"):
        problems.raise_any("here")
    with pytest.raises(MegaMoEError) as caught:
        problems.raise_any("here")
    assert str(caught.value).splitlines()[1:4] == [
        "  missing: layers.1.experts.{0-2,5,7-8}.w1 [2, 3]",
        "  missing: layers.1.experts.4.w3 [2, 3]",
        "  wrong: layers.1.gate is [1], must be [2]",
    ]
