"""Writing shards: under temporary names until they are complete, tensor by tensor."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from megamoe.checkpoint.files import DTYPE_NAMES, INDEX, MANIFEST, RECORD, SINGLE, CheckpointError, read_json
from megamoe.checkpoint.outputs import Output, feed
from megamoe.errors import fail_type, fail_value

TEMPORARY = ".tmp"
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json", TEMPORARY)
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(text: str | int) -> int:
    """Bytes of a size such as "5GB" or "500MB" (powers of ten).

    Raises:
        MegaMoEError: not a positive size.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        fail_type("max_shard_size", text, "must be an int or a str", 'Pass "5GB", say.')
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)?", str(text).strip().upper())
    size = 0 if match is None else int(float(match[1]) * _UNITS[match[2] or "B"])
    if size < 1:
        fail_value("max_shard_size", text, "must be a positive size", 'Pass "5GB", say.')
    return size


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sorts "layers.10" after "layers.9"."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def plan_shards(outputs: Iterable[Output], max_bytes: int) -> dict[str, list[Output]]:
    """Shard -> its tensors: in natural order, a new shard where the next tensor would exceed ``max_bytes``."""
    shards: list[list[Output]] = []
    filled = 0
    for output in sorted(outputs, key=lambda output: natural_key(output.name)):
        if not shards or filled + output.spec.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(output)
        filled += output.spec.nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def by_weight_map(outputs: Iterable[Output], weight_map: dict[str, str]) -> dict[str, list[Output]]:
    """Shard -> its tensors as ``weight_map`` has them."""
    shards: dict[str, list[Output]] = {}
    for output in outputs:
        shards.setdefault(weight_map[output.name], []).append(output)
    return dict(sorted(shards.items()))


def _header(outputs: list[Output], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for output in outputs:
        end = offset + output.spec.nbytes
        dtype = DTYPE_NAMES[output.spec.dtype]
        header[output.name] = dict(dtype=dtype, shape=list(output.spec.shape), data_offsets=[offset, end])
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def in_order(outputs: list[Output]) -> list[Output]:
    """The tensors of a shard as they lie in it: wide dtypes first, so that every tensor is aligned."""
    return sorted(outputs, key=lambda output: (-output.spec.dtype.itemsize, natural_key(output.name)))


def shard_size(outputs: list[Output], metadata: dict[str, str]) -> int:
    """Bytes of the file that ``write_shard`` writes."""
    return 8 + len(_header(in_order(outputs), metadata)) + sum(output.spec.nbytes for output in outputs)


def write(file: BinaryIO, data: bytes | memoryview) -> None:
    """All bytes that go to a disk go through here."""
    file.write(data)


def write_shard(
    path: Path, outputs: list[Output], metadata: dict[str, str], advance: Callable[[int], None] = lambda _: None
) -> None:
    """Writes a safetensors file; it has its name only when it is complete and on the disk.

    Args:
        advance: is told the bytes of each piece that is written.

    Raises:
        CheckpointError: the disk is full, or cannot be written to. Nothing is left behind.
    """
    outputs = in_order(outputs)
    header = _header(outputs, metadata)

    def fill(file: BinaryIO) -> None:
        write(file, len(header).to_bytes(8, "little") + header)
        for output in outputs:
            for piece in output.pieces():
                advance(feed(lambda data: write(file, data), piece))

    write_atomically(path, fill)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes a JSON file as ``write_shard`` writes shards."""
    write_atomically(path, lambda file: write(file, (json.dumps(values, indent=2) + "\n").encode()))


def write_atomically(path: Path, fill: Callable[[BinaryIO], None]) -> None:
    """A file that ``fill`` writes, under its name once it is complete.

    Raises:
        CheckpointError: for an ``OSError``. Nothing is left behind.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with temporary.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"file = {str(path)!r}: could not be written: {error.strerror or error}. Nothing is left under this name; "
            "make room and run the same command again, it goes on after the last complete shard."
        ) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_index(folder: Path, shards: dict[str, list[Output]], metadata: dict[str, Any] | None) -> None:
    """The index of several shards, or of one where ``metadata``, the index's own, is given."""
    if len(shards) == 1 and metadata is None:
        return
    weight_map = {output.name: shard for shard, outputs in shards.items() for output in outputs}
    total = sum(output.spec.nbytes for outputs in shards.values() for output in outputs)
    metadata = {"total_size": total, **(metadata or {})}
    write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})


def copy_files(source: Path, target: Path, *, quantized: bool = True) -> None:
    """Copies everything at the top of ``source`` that is no weight: configuration, tokenizer, licence.

    Args:
        quantized: keep the ``quantization_config`` in ``config.json``.
    """
    for path in sorted(source.iterdir()):
        if not path.is_file() or path.name in (RECORD, MANIFEST, INDEX) or path.name.endswith(_WEIGHT_FILES):
            continue
        if path.name == "config.json" and not quantized:
            config = {key: value for key, value in read_json(path).items() if key != "quantization_config"}
            write_json(target / path.name, config)
        else:
            data = path.read_bytes()
            write_atomically(target / path.name, lambda file, data=data: write(file, data))
