"""``convert``: a whole checkpoint to megamoe's format or back, resumable, verified before it gets its name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megamoe.checkpoint.dims import Dims
from megamoe.checkpoint.files import MANIFEST, RECORD, Checkpoint, CheckpointError, read_json
from megamoe.checkpoint.layer import DequantizedLayer, LayerSource, StoredLayer, names_by_layer
from megamoe.checkpoint.loading import find_layers, layer_number
from megamoe.checkpoint.outputs import SCALE_SUFFIX, Output, copied, dequantized, digest, layer_outputs
from megamoe.checkpoint.problems import Problems
from megamoe.checkpoint.recipes import CANONICAL, FORMS, Form, expected_layers, forms_for
from megamoe.checkpoint.writing import (
    TEMPORARY,
    by_weight_map,
    copy_files,
    parse_size,
    plan_shards,
    shard_size,
    write_index,
    write_json,
    write_shard,
)
from megamoe.config import MoEConfig
from megamoe.errors import MegaMoEError, check_choice, fail_value

FORMATS = ("hf", "megamoe")
_VERSION = 1

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class _Plan:
    """What to write.

    Attributes:
        layers: stem -> the layer as stored in the source, and the form that it gets.
        shards: shard -> its tensors.
        index: the metadata of the index; None = an index only if there are several shards.
        record: of ``megamoe.json``; None without one.
        exact: every tensor of the source can be had back from the result.
    """

    source: Checkpoint
    layers: dict[str, tuple[StoredLayer, Form]]
    shards: dict[str, list[Output]]
    metadata: dict[str, str]
    index: dict[str, Any] | None
    record: dict[str, Any] | None
    exact: bool

    @property
    def total(self) -> int:
        return sum(output.spec.nbytes for outputs in self.shards.values() for output in outputs)

    def fingerprint(self) -> str:
        """Changes where the source, the options or this format do."""
        folder = self.source.folder
        stats = {shard: (folder / shard).stat() for shard in sorted(set(self.source.weight_map.values()))}
        return hashlib.sha256(
            json.dumps(
                [
                    _VERSION,
                    [(shard, stat.st_size, stat.st_mtime_ns) for shard, stat in stats.items()],
                    [(shard, [(o.name, str(o.spec)) for o in outputs]) for shard, outputs in self.shards.items()],
                ]
            ).encode()
        ).hexdigest()


def convert(
    src: str | Path,
    dst: str | Path,
    to: str,
    *,
    dequantize: bool = False,
    max_shard_size: str | int = "5GB",
    verify: bool = True,
    progress: Progress = lambda phase, done, total: None,
) -> None:
    """Converts the MoE layers of a checkpoint; all other tensors and files are copied as they are.

    The work is done in ``dst`` + ".partial", which becomes ``dst`` at the end. After an interruption the same call goes
    on after the last complete shard.

    Args:
        src: the folder of the checkpoint.
        dst: the new folder; must not exist.
        to: "megamoe" for megamoe's layout, "hf" back to the names, shards and formats that ``megamoe.json`` records, or
            where there is none, to those usual for the model type in ``config.json``.
        dequantize: write BF16 for FP8 and MXFP4, in all of the checkpoint; ``config.json`` loses its
            ``quantization_config``. Without, codes and scales are kept, MXFP4 as e4m3 with the same values.
        max_shard_size: bytes, or such as "5GB"; a larger tensor has a shard of its own. Not used where ``megamoe.json``
            records the shards.
        verify: read the result again, convert it back and compare the SHA-256 of every tensor with the source's (with
            ``dequantize``: of every tensor with what was to be written).
        progress: is called with the phase ("write", "verify"), the bytes done and all bytes.

    Raises:
        MegaMoEError: the checkpoint is damaged, or does not match its ``config.json``; ``dst`` exists.
        CheckpointError: the disk is full, or the verification failed.
    """
    check_choice("to", to, FORMATS)
    dst = Path(dst)
    if dst.exists():
        fail_value("dst", str(dst), "must not exist", "Choose another folder, or delete this one.")
    source = Checkpoint(src)
    source.check_shards()
    plan = _make_plan(source, to, dequantize, parse_size(max_shard_size))
    partial = dst.with_name(dst.name + ".partial")
    _write_shards(plan, partial, progress)
    write_index(partial, plan.shards, plan.index)
    copy_files(source.folder, partial, quantized=not dequantize)
    if plan.record is not None:
        write_json(partial / RECORD, plan.record)
    if verify:
        _verify(plan, partial, progress)
    write_json(partial / MANIFEST, {"plan": plan.fingerprint(), "complete": True})
    os.rename(partial, dst)
    (dst / MANIFEST).unlink()


# ---------------------------------------------------------------- plan


def _open_source(source: Checkpoint, to: str) -> dict[str, StoredLayer]:
    found = find_layers(source)
    is_ours = any(form is CANONICAL for form, _ in found.values())
    model_type = (source.config or {}).get("model_type")
    if not found:
        rule = f"has no MoE layers of a known format (model_type {model_type!r})"
        fail_value("src", str(source.folder), rule, "Convert MoE models only.")
    if is_ours == (to == "megamoe"):
        rule = "is in megamoe's format already" if is_ours else "is not in megamoe's format"
        fail_value("src", str(source.folder), rule, f"Pass --to {'hf' if is_ours else 'megamoe'}.")
    dims = None if model_type is None else Dims.of(MoEConfig.from_hf(source.config))
    problems = Problems()
    layers = {stem: StoredLayer(source, form, stem, names, dims, problems) for stem, (form, names) in found.items()}
    for number in sorted(expected_layers(source.config or {}) - {layer_number(stem) for stem in found}):
        problems.add("missing", f"layer {number}", "which is an MoE layer by config.json")
    problems.raise_any(source.folder)
    return layers


def _make_plan(source: Checkpoint, to: str, dequantize: bool, max_bytes: int) -> _Plan:
    stored = _open_source(source, to)
    layers: dict[str, tuple[StoredLayer, Form]] = {}
    outputs: list[Output] = []
    taken: set[str] = set()
    for stem, layer in stored.items():
        shown: LayerSource = DequantizedLayer(layer) if dequantize else layer
        form = CANONICAL if to == "megamoe" else _form_back(source, stem, shown)
        layers[stem] = layer, form
        outputs += layer_outputs(shown, form, stem)
        taken.update(entry.name for entry in layer.entries)
    outputs += _other_outputs(source, taken, dequantize)
    twice = [name for name, count in Counter(output.name for output in outputs).items() if count > 1]
    if twice:
        rule = f"has tensors of the names that the MoE layers get: {', '.join(twice)}"
        fail_value("src", str(source.folder), rule, "Rename these tensors.")
    exact = not dequantize
    record = _read_record(source)
    weight_map = record.get("weight_map")
    if to == "hf" and exact and weight_map and weight_map.keys() == {output.name for output in outputs}:
        shards, index = by_weight_map(outputs, weight_map), record.get("index")
    else:
        shards, index = plan_shards(outputs, max_bytes), None
    return _Plan(
        source=source,
        layers=layers,
        shards=shards,
        metadata={str(key): str(value) for key, value in source.metadata().items()},
        index=index,
        record=_record(source, stored, exact) if to == "megamoe" else None,
        exact=exact,
    )


def _other_outputs(source: Checkpoint, taken: set[str], dequantize: bool) -> Iterator[Output]:
    for name in source.weight_map:
        if name in taken:
            continue
        if dequantize and name + SCALE_SUFFIX in source and source.spec(name).dtype == torch.float8_e4m3fn:
            yield dequantized(source, name)
        elif not (dequantize and name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in source):
            yield copied(source, name)


def _read_record(source: Checkpoint) -> dict[str, Any]:
    """What ``megamoe.json`` holds; nothing without one."""
    record = source.record or {}
    layers, weight_map = record.get("layers", {}), record.get("weight_map", {})
    valid = isinstance(layers, dict) and isinstance(weight_map, dict)
    for value in layers.values() if valid else ():
        if value not in FORMS:
            fail_value("megamoe.json", value, f"must be one of {', '.join(FORMS)}", "Convert the source again.")
    # Shards are written where it says: never outside of the folder.
    for value in weight_map.values() if valid else ():
        valid = valid and isinstance(value, str) and Path(value).name == value and value.endswith(".safetensors")
    if not valid:
        rule = "must have an object of forms and one of shard names"
        fail_value("file", str(source.folder / RECORD), rule, "Convert the source again, or delete the file.")
    return record


def _record(source: Checkpoint, layers: dict[str, StoredLayer], exact: bool) -> dict[str, Any]:
    """How to write the source again: ``megamoe.json``."""
    record: dict[str, Any] = {"version": _VERSION, "layers": {stem: layer.form.name for stem, layer in layers.items()}}
    if exact:
        record.update(weight_map=source.weight_map, index=source.index_metadata)
    return record


def _form_back(source: Checkpoint, stem: str, layer: LayerSource) -> Form:
    """The form that a layer in megamoe's format gets in a Hugging Face checkpoint."""
    recorded = _read_record(source).get("layers", {}).get(stem)
    if recorded is None:
        model_type = (source.config or {}).get("model_type")
        if model_type is None:
            fail_value("src", str(source.folder), "has neither megamoe.json nor config.json", "Add one of them.")
        form = forms_for(model_type)[0]
        mxfp4 = [f for f in forms_for(model_type) if f.dequantized == form.name]
        return mxfp4[0] if mxfp4 and layer.blocks else form
    form = FORMS[recorded]
    return FORMS[form.dequantized] if form.dequantized and not layer.blocks else form


# ---------------------------------------------------------------- write


def _write_shards(plan: _Plan, partial: Path, progress: Progress) -> None:
    fingerprint = plan.fingerprint()
    sizes = {shard: shard_size(outputs, plan.metadata) for shard, outputs in plan.shards.items()}
    done = _resume(partial, fingerprint)
    done = [shard for shard in done if shard in sizes and _size(partial / shard) == sizes[shard]]
    missing = sum(size for shard, size in sizes.items() if shard not in done)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        for path in partial.glob(f"*{TEMPORARY}"):
            path.unlink()
        free = shutil.disk_usage(partial).free
    except OSError as error:
        raise CheckpointError(f"dst = {str(partial)!r}: cannot be created: {error}. Choose another folder.") from error
    if free < missing:
        raise CheckpointError(
            f"dst = {str(partial)!r}: the disk has {free} bytes free, the shards still to be written need {missing}. "
            "Make room and run the same command again."
        )
    written, total = 0, plan.total

    def advance(count: int) -> None:
        nonlocal written
        written += count
        progress("write", written, total)

    write_json(partial / MANIFEST, {"plan": fingerprint, "done": done})
    for shard, outputs in plan.shards.items():
        if shard in done:
            advance(sum(output.spec.nbytes for output in outputs))
            continue
        write_shard(partial / shard, outputs, plan.metadata, advance)
        done.append(shard)
        write_json(partial / MANIFEST, {"plan": fingerprint, "done": done})


def _resume(partial: Path, fingerprint: str) -> list[str]:
    """The shards that an interrupted run of the same conversion completed."""
    if not partial.exists() or not any(partial.iterdir()):
        return []
    remedy = "Delete it, or choose another dst."
    if not (partial / MANIFEST).is_file():
        fail_value("folder", str(partial), "is in the way: it holds no unfinished conversion", remedy)
    manifest = read_json(partial / MANIFEST)
    if manifest.get("plan") != fingerprint:
        fail_value("folder", str(partial), "holds an unfinished conversion of another source or other options", remedy)
    if manifest.get("complete"):
        return [path.name for path in partial.glob("*.safetensors")]
    return list(manifest.get("done") or [])


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


# ---------------------------------------------------------------- verify


def _verify(plan: _Plan, partial: Path, progress: Progress) -> None:
    """Compares checksums; all tensors that differ are in one error."""
    result = Checkpoint(partial, unfinished=True)
    result.check_shards()
    pairs = _round_trip(plan, result) if plan.exact else _as_planned(plan, result)
    total = sum(output.spec.nbytes for output, _ in pairs)
    checked, differing = 0, []
    for expected, actual in pairs:
        if actual is None or not _same(expected, actual):
            differing.append(expected.name)
        checked += expected.spec.nbytes
        progress("verify", checked, total)
    if differing:
        # The next run writes every shard anew.
        write_json(partial / MANIFEST, {"plan": plan.fingerprint(), "done": []})
        raise CheckpointError(
            f"dst = {str(partial)!r}: {len(differing)} tensors differ from the source after the round trip: "
            f"{', '.join(differing)}. Run the same command again; if it fails again, check the disk and the memory."
        )


def _same(expected: Output, actual: Output) -> bool:
    if expected.spec != actual.spec:
        return False
    wanted = digest(expected.pieces())
    try:
        return digest(actual.pieces()) == wanted
    except MegaMoEError:
        # A damaged code need not have a place in the source's format.
        return False


def _round_trip(plan: _Plan, result: Checkpoint) -> list[tuple[Output, Output | None]]:
    """Each tensor of the source, and the same made from the result."""
    back: dict[str, Output] = {}
    names = names_by_layer(result)
    problems = Problems()
    taken: set[str] = set()
    for stem, (layer, form) in plan.layers.items():
        written = StoredLayer(result, form, stem, names.get(stem, []), layer.dims, problems)
        problems.raise_any(result.folder)
        back.update((output.name, output) for output in layer_outputs(written, layer.form, stem))
        taken.update(entry.name for entry in written.entries)
    back.update((name, copied(result, name)) for name in result.weight_map if name not in taken)
    return [(copied(plan.source, name), back.get(name)) for name in plan.source.weight_map]


def _as_planned(plan: _Plan, result: Checkpoint) -> list[tuple[Output, Output | None]]:
    """Each tensor that was to be written, and what was."""
    planned = [output for outputs in plan.shards.values() for output in outputs]
    return [(output, copied(result, output.name) if output.name in result else None) for output in planned]
