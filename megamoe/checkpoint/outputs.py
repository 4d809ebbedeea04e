"""Tensors to be written, as streams of pieces: never more than one expert of a layer, or one chunk, in memory."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from megamoe.checkpoint.dims import BLOCK, FP8_BLOCK, is_routed, scales_shape
from megamoe.checkpoint.files import CHUNK, Checkpoint, TensorSpec
from megamoe.checkpoint.layer import Entry, LayerSource, as_fp8_scales, entries
from megamoe.checkpoint.recipes import Form
from megamoe.errors import fail_value
from megamoe.kernels.quant import dequantize
from megamoe.types import Fp8Tensor

SCALE_SUFFIX = "_scale_inv"


@dataclass(frozen=True)
class Output:
    """A tensor to be written: ``pieces()`` are its values in order, flattened and cut anywhere."""

    name: str
    spec: TensorSpec
    pieces: Callable[[], Iterable[torch.Tensor]]


def feed(sink: Callable[[memoryview], object], tensor: torch.Tensor) -> int:
    """Passes the bytes of a CPU tensor to ``sink``, without a copy where it is contiguous; returns their number."""
    tensor = tensor.contiguous()
    if tensor.nbytes:
        sink(memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B"))
    return tensor.nbytes


def digest(pieces: Iterable[torch.Tensor]) -> str:
    """SHA-256 of a tensor's bytes."""
    state = hashlib.sha256()
    for piece in pieces:
        feed(state.update, piece)
    return state.hexdigest()


def layer_outputs(layer: LayerSource, form: Form, stem: str) -> list[Output]:
    """The tensors on disk of a layer in another form.

    Raises:
        MegaMoEError: the form has no place for one of the layer's tensors.
    """
    return [_layer_output(layer, entry) for entry in entries(form, stem, layer.dims, layer.blocks)]


def _layer_output(layer: LayerSource, entry: Entry) -> Output:
    stored, target = entry.stored, entry.target
    stacked = entry.expert is None and is_routed(target)

    def pieces() -> Iterator[torch.Tensor]:
        for expert in range(layer.dims.experts) if stacked else (entry.expert,):
            x = layer.read(target, expert)
            yield stored.layout.store(x if stored.half is None else x.chunk(2)[stored.half], entry.name)

    dtype = torch.uint8 if stored.layout.mxfp4 else layer.specs[target].dtype
    return Output(entry.name, TensorSpec(entry.shape, dtype), pieces)


def copied(checkpoint: Checkpoint, name: str) -> Output:
    """A tensor of ``checkpoint`` as it is."""
    return Output(name, checkpoint.spec(name), lambda: checkpoint.pieces(name))


def dequantized(checkpoint: Checkpoint, name: str) -> Output:
    """An FP8 weight outside the MoE layers in BF16.

    Raises:
        MegaMoEError: its scales are not those of 128x128 blocks.
    """
    codes, scales = checkpoint.spec(name), checkpoint.spec(name + SCALE_SUFFIX)
    if len(codes.shape) != 2 or scales.shape != scales_shape(codes.shape, FP8_BLOCK):
        rule = f"must be one scale per {BLOCK}x{BLOCK} block of {name} {list(codes.shape)}"
        fail_value(f"{name}{SCALE_SUFFIX}.shape", list(scales.shape), rule, "Convert without dequantising.")
    blocks = max(1, CHUNK // (BLOCK * codes.shape[1]))

    def pieces() -> Iterator[torch.Tensor]:
        for first in range(0, scales.shape[0], blocks):
            rows = checkpoint.read(name, slice(first * BLOCK, (first + blocks) * BLOCK))
            part = as_fp8_scales(checkpoint.read(name + SCALE_SUFFIX, slice(first, first + blocks)))
            yield dequantize(Fp8Tensor(rows, part, FP8_BLOCK)).to(torch.bfloat16)

    return Output(name, TensorSpec(codes.shape, torch.bfloat16), pieces)
