"""The MoE layers of a checkpoint: which form each has, whether it is complete, and its tensors in megamoe's layout."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from megamoe.checkpoint.dims import FP8_BLOCK, MXFP4_BLOCK, Dims, halves, infer, is_routed, scales_shape
from megamoe.checkpoint.files import DTYPE_NAMES, Checkpoint, TensorSpec
from megamoe.checkpoint.layouts import join_rows
from megamoe.checkpoint.problems import EXPERT_ID, Problems
from megamoe.checkpoint.recipes import EXPERT, Form, Stored
from megamoe.errors import FLOATING, fail_value
from megamoe.kernels.quant import dequantize
from megamoe.types import Fp8Tensor

SCALES = "_scales"
_LAYER = re.compile(r"^((?:.*?\.)?layers\.\d+\.)(.+)$")

Blocks = Mapping[str, tuple[int, int]]
"""Of each quantised tensor: the rows and columns that share a scale."""


class LayerSource(Protocol):
    """A layer in megamoe's layout, one expert at a time.

    Attributes:
        dims: its sizes.
        blocks: of its quantised tensors.
        specs: of all its tensors; those of the routed experts are ``[E, ...]``. The scales of a quantised tensor
            ``name`` are ``name_scales``.
    """

    dims: Dims
    blocks: Blocks
    specs: dict[str, TensorSpec]

    def read(self, target: str, expert: int | None) -> torch.Tensor:
        """One expert's part of a routed tensor; another tensor as a whole, with ``expert`` None."""


@dataclass(frozen=True)
class Entry:
    """One tensor on disk.

    Attributes:
        name: on disk.
        target: megamoe's tensor that it belongs to.
        stored: which part of it, in which layout.
        expert: whose; None where it holds all experts, or none.
        shape: on disk.
    """

    name: str
    target: str
    stored: Stored
    expert: int | None
    shape: tuple[int, ...]


def entries(form: Form, stem: str, dims: Dims, blocks: Blocks) -> Iterator[Entry]:
    """The tensors on disk of a layer of these sizes.

    Args:
        stem: what stands before the form's names, up to the layer's number and the dot.

    Raises:
        MegaMoEError: the form has no place for one of the layer's tensors.
    """
    for target, shape in dims.shapes().items():
        if target not in form.tensors:
            fail_value("form", form.name, f"has no place for {target}", "Convert to another family.")
        for stored in form.tensors[target]:
            yield from _entries(stored, target, shape, stem, dims)
            if target in blocks:
                if stored.scales is None:
                    fail_value("form", form.name, f"cannot hold {target} quantised", "Dequantise it.")
                scales = scales_shape(shape, blocks[target], halves(target))
                yield from _entries(stored.stored_scales, target + SCALES, scales, stem, dims)


def _entries(stored: Stored, target: str, shape: tuple[int, ...], stem: str, dims: Dims) -> Iterator[Entry]:
    part = shape if stored.half is None else (shape[0] // 2, *shape[1:])
    on_disk = stored.layout.stored_shape(part)
    if stored.per_expert:
        for expert in range(dims.experts):
            yield Entry(stem + stored.name.replace(EXPERT, str(expert)), target, stored, expert, on_disk)
    else:
        stacked = (dims.experts,) if is_routed(target) else ()
        yield Entry(stem + stored.name, target, stored, None, stacked + on_disk)


class StoredLayer:
    """One MoE layer of a checkpoint: a ``LayerSource``.

    Args:
        stem: of its names, up to the layer's number and the dot.
        names: of all tensors with this stem, without it.
        dims: the sizes that it must have; None: those that its tensors have.
        problems: where everything that is missing, unexpected or of the wrong shape or dtype goes.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        form: Form,
        stem: str,
        names: list[str],
        dims: Dims | None,
        problems: Problems,
    ):
        self.checkpoint, self.form, self.stem = checkpoint, form, stem
        self.dims = self._infer() if dims is None else dims
        self.blocks = {target: block for target in self.dims.shapes() if (block := self._block(target)) is not None}
        self.entries = list(entries(form, stem, self.dims, self.blocks))
        self.specs: dict[str, TensorSpec] = {}
        self._cached: tuple[tuple[str, int | None], torch.Tensor] | None = None
        for entry in self.entries:
            self._check(entry, problems)
        expected = {entry.name for entry in self.entries}
        for name in names:
            if name.startswith(form.prefix) and stem + name not in expected:
                problems.add("unexpected", stem + name, str(checkpoint.spec(stem + name)))

    def _first(self, target: str) -> str | None:
        """The first tensor of ``target`` on disk, of expert 0; None where there is none."""
        for stored in self.form.tensors.get(target, ()):
            name = self.stem + stored.name.replace(EXPERT, "0")
            if name in self.checkpoint:
                return name
        return None

    def _infer(self) -> Dims:
        router = self._first("router.weight")
        shape = () if router is None else self.checkpoint.spec(router).shape
        if len(shape) != 2 or 0 in shape:
            fail_value(
                "checkpoint",
                str(self.checkpoint.folder),
                f"{self.stem}{self.form.tensors['router.weight'][0].name} must be there and [E, H], is {list(shape)}",
                "Without a config.json the sizes of the layer are taken from it.",
            )

        def numel(target: str) -> int | None:
            name = self._first(target)
            if name is None:
                return None
            packed = 2 if self.form.tensors[target][0].layout.mxfp4 else 1
            return packed * torch.Size(self.checkpoint.spec(name).shape).numel()

        return infer(numel, shape, not self.form.tensors["experts.down_proj"][0].per_expert)

    def _block(self, target: str) -> tuple[int, int] | None:
        for stored in self.form.tensors.get(target, ()):
            if stored.layout.mxfp4:
                return MXFP4_BLOCK
            if stored.scales is None:
                continue
            codes, scales = (self.stem + name.replace(EXPERT, "0") for name in (stored.name, stored.scales))
            if scales in self.checkpoint:
                is_mx = self.checkpoint.spec(scales).dtype == torch.uint8
                return MXFP4_BLOCK if is_mx else FP8_BLOCK
            if codes in self.checkpoint and self.checkpoint.spec(codes).dtype == torch.float8_e4m3fn:
                return FP8_BLOCK
        return None

    def _dtypes(self, entry: Entry) -> tuple[torch.dtype, ...]:
        target = entry.target.removesuffix(SCALES)
        block = self.blocks.get(target)
        if block is None:
            return FLOATING
        if entry.target != target:
            return (torch.uint8,) if block == MXFP4_BLOCK else (torch.float32, torch.float8_e8m0fnu)
        return (torch.uint8,) if entry.stored.layout.mxfp4 else (torch.float8_e4m3fn,)

    def _check(self, entry: Entry, problems: Problems) -> None:
        if entry.name not in self.checkpoint:
            problems.add("missing", entry.name, str(list(entry.shape)))
            return
        spec = self.checkpoint.spec(entry.name)
        if spec.shape != entry.shape:
            problems.add("wrong", entry.name, f"is {list(spec.shape)}, must be {list(entry.shape)}")
        allowed = self._dtypes(entry)
        if spec.dtype not in allowed:
            names = ", ".join(DTYPE_NAMES[dtype] for dtype in allowed)
            problems.add("wrong", entry.name, f"is {DTYPE_NAMES[spec.dtype]}, must be one of {names}")
        dtype = torch.float8_e4m3fn if entry.stored.layout.mxfp4 else spec.dtype
        shape = self._shape(entry.target)
        first = self.specs.setdefault(entry.target, TensorSpec(shape, dtype))
        if first.dtype != dtype:
            rule = f"is {DTYPE_NAMES[dtype]}, other parts of {entry.target} are {DTYPE_NAMES[first.dtype]}"
            problems.add("wrong", entry.name, rule)

    def _shape(self, target: str) -> tuple[int, ...]:
        codes = target.removesuffix(SCALES)
        shape = self.dims.shapes()[codes]
        if target != codes:
            shape = scales_shape(shape, self.blocks[codes], halves(codes))
        return (self.dims.experts, *shape) if is_routed(target) else shape

    def read(self, target: str, expert: int | None) -> torch.Tensor:
        # Gate and up of one expert are written one after the other: one read serves both.
        if self._cached is None or self._cached[0] != (target, expert):
            codes = target.removesuffix(SCALES)
            stored = self.form.tensors[codes]
            parts = [part if target == codes else part.stored_scales for part in stored]
            self._cached = (target, expert), join_rows([self._read(part, expert) for part in parts])
        return self._cached[1]

    def _read(self, stored: Stored, expert: int | None) -> torch.Tensor:
        name = self.stem + stored.name.replace(EXPERT, str(expert))
        return stored.layout.load(self.checkpoint.read(name, None if stored.per_expert else expert))


class DequantizedLayer:
    """A layer with its quantised tensors in BF16: a ``LayerSource``."""

    def __init__(self, layer: LayerSource):
        self._layer, self.dims = layer, layer.dims
        self.blocks: Blocks = {}
        self.specs = {
            target: TensorSpec(spec.shape, torch.bfloat16) if target in layer.blocks else spec
            for target, spec in layer.specs.items()
            if target.removesuffix(SCALES) == target or target.removesuffix(SCALES) not in layer.blocks
        }

    def read(self, target: str, expert: int | None) -> torch.Tensor:
        if target not in self._layer.blocks:
            return self._layer.read(target, expert)
        return read_dequantized(self._layer, target, expert).to(torch.bfloat16)


def read_dequantized(layer: LayerSource, target: str, expert: int | None) -> torch.Tensor:
    """fp32: the codes of a quantised tensor times their scales."""
    parts = halves(target)
    codes = layer.read(target, expert).chunk(parts)
    scales = as_fp8_scales(layer.read(target + SCALES, expert)).chunk(parts)
    block = layer.blocks[target]
    return torch.cat([dequantize(Fp8Tensor(c, s, block)) for c, s in zip(codes, scales, strict=True)])


def as_fp8_scales(scales: torch.Tensor) -> torch.Tensor:
    """The scales as ``Fp8Tensor`` has them: UE8M0 as its codes."""
    return scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales


def names_by_layer(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Stem -> the names with it, without it, in the order of the checkpoint."""
    grouped: dict[str, list[str]] = {}
    for name in checkpoint.weight_map:
        if match := _LAYER.match(name):
            grouped.setdefault(match[1], []).append(match[2])
    return grouped


def find_form(names: list[str], forms: tuple[Form, ...]) -> Form | None:
    """The form that has most of a layer's names; None where none has any: the layer is dense."""
    templates = Counter(EXPERT_ID.sub(EXPERT, name, count=1) for name in names)

    def matches(form: Form) -> int:
        stored = [s for parts in form.tensors.values() for s in parts]
        known = {s.name for s in stored} | {s.scales for s in stored}
        return sum(count for template, count in templates.items() if template in known)

    best = max(forms, key=matches)
    return best if matches(best) else None
