"""Checkpoint folders: which tensors there are, in which shard, and reading them piece by piece."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megamoe.errors import MegaMoEError, fail_value

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
RECORD = "megamoe.json"
"""Names what a folder in megamoe's format was converted from."""
MANIFEST = "conversion.json"
"""Present in a folder whose conversion is not finished."""

CHUNK = 64 * 2**20
"""Bytes of a tensor that are in memory at a time where it is only copied."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointError(MegaMoEError, OSError):
    """A checkpoint could not be written or read for a reason outside of it, such as a full disk."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{DTYPE_NAMES[self.dtype]} {list(self.shape)}"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        MegaMoEError: it cannot be read, or holds no JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fail_value("file", str(path), f"must be a readable JSON file: {error}", "Copy it again.")
    if not isinstance(values, dict):
        fail_value("file", str(path), "must hold a JSON object", "Copy it again.")
    return values


class Checkpoint:
    """A folder of safetensors shards with an index, or without: then all its ``*.safetensors`` files count.

    Shards are opened when a tensor in them is asked for, and stay open: this is read only. Tensors in a shard that the
    index does not name are not there, as for transformers.

    Args:
        unfinished: open the folder of an unfinished conversion too.

    Attributes:
        weight_map: tensor -> shard.
        index_metadata: of the index; None without one.
        config: of ``config.json``; None without one.
        record: of ``megamoe.json``; None without one.

    Raises:
        MegaMoEError: no such folder, no shards, an index that names missing shards, or an unfinished conversion.
    """

    def __init__(self, folder: str | Path, *, unfinished: bool = False):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            fail_value("checkpoint", str(folder), "must be an existing folder", "Pass the folder of the shards.")
        manifest = self.folder / MANIFEST
        if manifest.exists() and not unfinished and not read_json(manifest).get("complete"):
            fail_value("checkpoint", str(folder), "is an unfinished conversion", "Run the same convert command again.")
        self._open: dict[str, Any] = {}
        self.index_metadata: dict[str, Any] | None = None
        self.config = read_json(self.folder / "config.json") if (self.folder / "config.json").is_file() else None
        self.record = read_json(self.folder / RECORD) if (self.folder / RECORD).is_file() else None
        self.weight_map = self._find_tensors()

    def _find_tensors(self) -> dict[str, str]:
        if (self.folder / INDEX).is_file():
            return self._read_index()
        shards = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if SINGLE in shards:
            shards = [SINGLE]
        if not shards:
            fail_value("checkpoint", str(self.folder), "has no *.safetensors file", "Pass the folder of the shards.")
        found: dict[str, str] = {}
        for shard in shards:
            for name in self._shard(shard).keys():
                if name in found:
                    both = f"{found[name]} and {shard}"
                    fail_value("checkpoint", str(self.folder), f"has {name} in {both}", f"Add a {INDEX}.")
                found[name] = shard
        return found

    def _read_index(self) -> dict[str, str]:
        index = read_json(self.folder / INDEX)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            fail_value("index", str(self.folder / INDEX), "must have a weight_map", "Copy it again.")
        for shard in weight_map.values():
            if not isinstance(shard, str) or Path(shard).name != shard:
                rule = f"names {shard!r}, which is no file name in the folder"
                fail_value("index", str(self.folder / INDEX), rule, "Copy it again.")
        missing = sorted(shard for shard in set(weight_map.values()) if not (self.folder / shard).is_file())
        if missing:
            rule = f"names {len(missing)} missing shards: {', '.join(missing)}"
            fail_value("index", str(self.folder / INDEX), rule, "Copy the shards, or all of the checkpoint, again.")
        self.index_metadata = index.get("metadata") or {}
        return weight_map

    def _shard(self, shard: str) -> Any:
        if shard not in self._open:
            path = self.folder / shard
            try:
                self._open[shard] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                size = path.stat().st_size if path.exists() else 0
                rule = f"is truncated or no safetensors file ({size} bytes): {error}"
                fail_value("shard", str(path), rule, "Copy it again.")
        return self._open[shard]

    def check_shards(self) -> None:
        """Opens every shard.

        Raises:
            MegaMoEError: names all that are truncated or corrupt, and all tensors that are not where the index says.
        """
        problems = []
        for shard in sorted(set(self.weight_map.values())):
            try:
                present = set(self._shard(shard).keys())
            except MegaMoEError as error:
                problems.append(str(error))
                continue
            named = {name for name, place in self.weight_map.items() if place == shard}
            problems += [f"{name} is not in {shard}, where the index has it" for name in sorted(named - present)]
            unnamed = sorted(present - self.weight_map.keys())
            problems += [f"{name} is in {shard}, but not in the index" for name in unnamed]
        if problems:
            listed = "".join(f"\n  {problem}" for problem in problems)
            fail_value("checkpoint", str(self.folder), f"has damaged shards:{listed}\n", "Copy these shards again.")

    def __contains__(self, name: str) -> bool:
        return name in self.weight_map

    def metadata(self) -> dict[str, str]:
        """The metadata in the header of the first shard."""
        return self._shard(min(self.weight_map.values())).metadata() or {}

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype of a tensor, from the header of its shard.

        Raises:
            MegaMoEError: the shard is damaged or does not hold the tensor, or a dtype that megamoe does not know.
        """
        part = self._slice(name)
        if part.get_dtype() not in DTYPES:
            fail_value(f"{name}.dtype", part.get_dtype(), f"must be one of {', '.join(DTYPES)}", "Convert it first.")
        return TensorSpec(tuple(part.get_shape()), DTYPES[part.get_dtype()])

    def _slice(self, name: str) -> Any:
        shard = self.weight_map[name]
        try:
            return self._shard(shard).get_slice(name)
        except SafetensorError as error:
            rule = f"does not hold {name}, which the index has there: {error}"
            fail_value("shard", str(self.folder / shard), rule, "Copy it again.")

    def read(self, name: str, index: int | slice | None = None) -> torch.Tensor:
        """A tensor, or only what ``index`` selects on its first axis; nothing else is read."""
        return self._slice(name)[... if index is None else index]

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """A tensor in pieces of some ``CHUNK`` bytes, along its first axis."""
        spec = self.spec(name)
        if not spec.shape or spec.nbytes <= CHUNK:
            yield self.read(name)
            return
        rows = max(1, CHUNK * spec.shape[0] // spec.nbytes)
        for start in range(0, spec.shape[0], rows):
            yield self.read(name, slice(start, start + rows))
