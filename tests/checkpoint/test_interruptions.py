"""Conversions that are killed, run out of disk or write a wrong bit: nothing incomplete gets its final name."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from megamoe import MegaMoEError
from megamoe.checkpoint import Checkpoint, CheckpointError, conversion, convert, writing
from tests.checkpoint.test_conversion import SMALL, assert_same_checkpoint
from tests.checkpoint.tiny import MXFP4_CONFIG, mxfp4_tensors, write_checkpoint
from tests.support.errors import fails

# ---------------------------------------------------------------- interruptions


def is_shard(file) -> bool:
    return file.name.endswith(".safetensors.tmp")


def convert_and_die(source: Path, dst: Path) -> None:
    """Converts; half way through the first shard that it writes the process is killed."""
    plain, pieces = writing.write, []

    def write(file, data) -> None:
        if is_shard(file):
            pieces.append(data)
            if len(pieces) == 2:
                plain(file, data[: len(data) // 2])
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        plain(file, data)

    writing.write = write
    convert(source, dst, "megamoe", max_shard_size=2 * SMALL)


def run_killed(*args: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "megamoe"])
    process = context.Process(target=convert_and_die, args=args)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def test_resume_after_a_kill_at_every_shard(saved, tmp_path, monkeypatch):
    """The same destination is killed at one shard after another: every run completes one more."""
    source, dst, whole = saved.folder("mixtral"), tmp_path / "x", tmp_path / "whole"
    convert(source, whole, "megamoe", max_shard_size=2 * SMALL)
    shards = sorted(path.name for path in whole.glob("*.safetensors"))
    assert len(shards) > 4
    partial = tmp_path / "x.partial"
    for number in range(len(shards)):
        run_killed(source, dst)
        assert not dst.exists()
        done = json.loads((partial / "conversion.json").read_text())["done"]
        assert done == shards[:number]
        assert sorted(path.name for path in partial.glob("*.safetensors")) == shards[:number]
        with pytest.raises(MegaMoEError, match="is an unfinished conversion"):
            Checkpoint(partial)
        advance_one_shard(source, dst, monkeypatch, 2 * SMALL)
    convert(source, dst, "megamoe", max_shard_size=2 * SMALL)
    assert not partial.exists()
    assert_same_checkpoint(dst, whole)


class Stop(Exception):
    pass


def advance_one_shard(source: Path, dst: Path, monkeypatch, size: int = SMALL) -> None:
    """Converts until one more shard is complete; an exception then stops it, as Ctrl-C would."""
    plain, names = writing.write, set()

    def write(file, data) -> None:
        if is_shard(file):
            names.add(file.name)
            if len(names) > 1:
                raise Stop
        plain(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write", write)
        patch.setattr(conversion, "write_index", lambda *args: (_ for _ in ()).throw(Stop()))
        with pytest.raises(Stop):
            convert(source, dst, "megamoe", max_shard_size=size)
    assert not list(dst.with_name(dst.name + ".partial").glob("*.tmp"))


def test_completed_shards_are_not_written_again(saved, tmp_path, monkeypatch):
    source, dst = saved.folder("mixtral"), tmp_path / "x"
    for _ in range(3):
        advance_one_shard(source, dst, monkeypatch)
    partial = tmp_path / "x.partial"
    done = {path.name: path.stat().st_mtime_ns for path in partial.glob("*.safetensors")}
    assert len(done) == 3
    # A shard of another size than it should have is written again.
    damaged = sorted(done)[1]
    (partial / damaged).write_bytes(b"half")
    calls = []
    convert(source, dst, "megamoe", max_shard_size=SMALL, progress=lambda *call: calls.append(call))
    after = {name: (dst / name).stat().st_mtime_ns for name in done}
    assert {name for name in done if after[name] != done[name]} == {damaged}
    writes = [(done, total) for phase, done, total in calls if phase == "write"]
    assert writes[0][0] > 0 and writes[-1][0] == writes[-1][1]
    convert(dst, tmp_path / "back", "hf")
    assert_same_checkpoint(tmp_path / "back", source)


def test_unfinished_conversion_of_something_else(saved, tmp_path, monkeypatch):
    source, dst = tmp_path / "source", tmp_path / "x"
    shutil.copytree(saved.folder("mixtral"), source)
    advance_one_shard(source, dst, monkeypatch)
    rule = "holds an unfinished conversion of another source or other options"
    with fails(ValueError, "folder", str(tmp_path / "x.partial"), rule):
        convert(source, dst, "megamoe", max_shard_size=2 * SMALL)
    with fails(ValueError, "folder", str(tmp_path / "x.partial"), rule):
        convert(saved.folder("olmoe"), dst, "megamoe", max_shard_size=SMALL)
    shard = sorted(source.glob("*.safetensors"))[0]
    os.utime(shard, ns=(1, 1))
    with fails(ValueError, "folder", str(tmp_path / "x.partial"), rule):
        convert(source, dst, "megamoe", max_shard_size=SMALL)


def test_killed_just_before_the_folder_gets_its_name(saved, tmp_path, monkeypatch):
    source, dst = saved.folder("mixtral"), tmp_path / "x"
    with monkeypatch.context() as patch:
        patch.setattr(conversion.os, "rename", lambda *args: (_ for _ in ()).throw(Stop()))
        with pytest.raises(Stop):
            convert(source, dst, "megamoe", max_shard_size=SMALL)
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "x.partial").glob("*.safetensors")}
    convert(source, dst, "megamoe", max_shard_size=SMALL)
    assert times == {path.name: path.stat().st_mtime_ns for path in dst.glob("*.safetensors")}
    assert not (dst / "conversion.json").exists()


# ---------------------------------------------------------------- disk


def test_disk_that_is_full_from_any_byte_on(saved, tmp_path, seed, monkeypatch):
    source, dst, partial = saved.folder("mixtral"), tmp_path / "x", tmp_path / "x.partial"
    plain, counted = writing.write, []

    def count(file, data) -> None:
        counted.append(len(data))
        plain(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write", count)
        convert(source, tmp_path / "whole", "megamoe", max_shard_size=SMALL)
    total, failures = sum(counted), 0
    for room in sorted({0, 1, 100, total - 1, *torch.randint(total, (25,)).tolist()}):
        left = room

        def write(file, data) -> None:
            nonlocal left
            fits = min(left, len(data))
            plain(file, data[:fits])
            left -= fits
            if fits < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        shutil.rmtree(partial, ignore_errors=True)
        with monkeypatch.context() as patch:
            patch.setattr(writing, "write", write)
            with pytest.raises(CheckpointError, match="No space left on device") as caught:
                convert(source, dst, "megamoe", max_shard_size=SMALL)
        assert isinstance(caught.value, OSError) and "make room" in str(caught.value)
        failures += 1
        # Whatever has its final name is complete.
        assert not dst.exists() and not list(partial.glob("*.tmp"))
        for path in partial.iterdir():
            if path.name != "conversion.json":
                assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes(), path.name
    assert failures > 10
    # With room again, the last attempt goes on.
    convert(source, dst, "megamoe", max_shard_size=SMALL)
    assert_same_checkpoint(dst, tmp_path / "whole")


def test_too_little_room_is_seen_before_writing(saved, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match="the disk has 1000 bytes free, the shards still to be written need"):
        convert(saved.folder("mixtral"), tmp_path / "x", "megamoe")
    assert not list((tmp_path / "x.partial").iterdir())


def test_folder_that_cannot_be_made(saved, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be created"):
        convert(saved.folder("mixtral"), tmp_path / "file" / "x", "megamoe")


# ---------------------------------------------------------------- verification


@pytest.mark.parametrize("dequantize", [False, True])
def test_verification_sees_one_wrong_bit(dequantize, tmp_path, seed, monkeypatch):
    source = write_checkpoint(tmp_path / "source", mxfp4_tensors(MXFP4_CONFIG), MXFP4_CONFIG)
    dst = tmp_path / "x"
    options = dict(dequantize=dequantize, max_shard_size=SMALL)
    plain = conversion.copy_files

    def damage(src: Path, folder: Path, **kwargs) -> None:
        plain(src, folder, **kwargs)
        shard = Checkpoint(folder, unfinished=True).weight_map["model.layers.0.moe.experts.down_proj"]
        # Its last byte: the tensor is too large for company.
        data = bytearray((folder / shard).read_bytes())
        data[-1] ^= 1
        (folder / shard).write_bytes(data)

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "copy_files", damage)
        with pytest.raises(CheckpointError, match="1 tensors differ from the source after the round trip") as caught:
            convert(source, dst, "megamoe", **options)
        assert "down_proj" in str(caught.value) and not dst.exists()
        convert(source, tmp_path / "unverified", "megamoe", verify=False, **options)
    # The next run writes all shards again.
    convert(source, dst, "megamoe", **options)
