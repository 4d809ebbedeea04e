"""FP8 copies of weights: cast when first needed, and again, into the same memory, once the weights have changed.

A copy is trusted while the weight lies in the same memory with the same version, and no optimizer has stepped since:
fused optimizers write without a new version. It dies with the weight's memory. Writes that leave no trace must be told
by ``mark_changed``: those through ``.data`` outside optimizers, and by graphs that hold nothing but an optimizer.

A cast inside a CUDA graph is recorded, not run: from then on replays write the copy, and nothing else trusts it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from megamoe.kernels.formats import FP8_MAX, MIN_AMAX
from megamoe.kernels.layout import align_up
from megamoe.kernels.quant import quantize_blockwise_both
from megamoe.kernels.reference import FP8_BLOCK
from megamoe.types import Fp8Tensor

Phase = Literal["inference", "training", "backward"]

K_MULTIPLE = 16
"""Columns of e4m3 operands, which TMA reads in units of 16 bytes."""


@dataclass(frozen=True)
class Padding:
    """Zeros that make a weight ``[e, M, N]`` an operand: each of ``halves`` of M, and N, up to a multiple."""

    halves: int
    rows: int
    columns: int

    def shape(self, weight: torch.Tensor) -> tuple[int, int, int]:
        """The padded shape of ``weight``."""
        experts, rows, columns = weight.shape
        return experts, self.halves * align_up(rows // self.halves, self.rows), align_up(columns, self.columns)

    def pad(self, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` padded; itself where it fits."""
        experts, rows, columns = self.shape(weight)
        if (rows, columns) == weight.shape[1:]:
            return weight
        split = weight.unflatten(1, (self.halves, -1))
        return F.pad(split, (0, columns - split.shape[3], 0, rows // self.halves - split.shape[2])).flatten(1, 2)

    def unpad(self, padded: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """The inverse of ``pad`` for a weight of ``rows`` by ``columns``."""
        if (rows, columns) == padded.shape[1:]:
            return padded
        halves = padded.unflatten(1, (self.halves, -1))
        return halves[:, :, : rows // self.halves, :columns].flatten(1, 2)


@dataclass
class Fp8Copy:
    """A weight in 128x128 blocks.

    Attributes:
        plain: ``[e, M', N']``, the padded weight.
        transposed: ``[e, N', M']``, the same codes; None where no backward pass has asked for it.
    """

    plain: Fp8Tensor
    transposed: Fp8Tensor | None = None
    _stamp: tuple | None = None
    _recorded: bool = False
    _stream: torch.cuda.Stream | None = None


@dataclass
class _Memory:
    """What is known of the memory that holds a weight: the FP8 copies by its form, and the DTensor parameter around it.

    Weak references are to the storage: a tensor that has any cannot be swapped with another.
    """

    storage: weakref.ref
    copies: dict[tuple, Fp8Copy] = field(default_factory=dict)
    parameter: tuple[weakref.ref, str] | None = None


_memories: dict[int, _Memory] = {}
_optimizer_steps = 0
_counts_steps = False


def _count_step(*_) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


def _local(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, the very tensor that it holds."""
    return getattr(weight, "_local_tensor", weight)


def _find(weight: torch.Tensor) -> _Memory | None:
    storage = weight.untyped_storage()
    memory = _memories.get(id(storage))
    return memory if memory is not None and memory.storage() is storage else None


def _find_or_add(weight: torch.Tensor) -> _Memory:
    memory = _find(weight)
    if memory is None:
        storage = weight.untyped_storage()
        key = id(storage)
        memory = _memories[key] = _Memory(weakref.ref(storage, lambda dead: _remove(key, dead)))
    return memory


def _remove(key: int, dead: weakref.ref) -> None:
    # By now the id may be that of another storage.
    memory = _memories.get(key)
    if memory is not None and memory.storage is dead:
        del _memories[key]


def _stamp(weight: torch.Tensor, memory: _Memory) -> tuple | None:
    """Changes whenever the weight may have; None where nothing tells."""
    if weight.is_inference():
        return None
    outer = None
    if memory.parameter is not None:
        module, name = memory.parameter
        # Optimizers and load_state_dict count their writes to a DTensor there, not in its local part.
        outer = getattr(getattr(module(), name, None), "_version", None)
    return weight._version, outer, _optimizer_steps


def _empty(shape: tuple[int, int, int], device: torch.device) -> Fp8Tensor:
    experts, rows, columns = shape
    scales = torch.empty(experts, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK), device=device)
    codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    return Fp8Tensor(codes, scales, (FP8_BLOCK, FP8_BLOCK))


def _cast(weight: torch.Tensor, padding: Padding, copy: Fp8Copy) -> None:
    """Writes the codes and scales of ``weight`` into ``copy``."""
    padded = padding.pad(weight.detach())
    if padded.is_cuda and padded.dtype != torch.float64:
        from megamoe.kernels import triton_quant

        padded = padded if padded.stride(-1) == 1 else padded.contiguous()
        transposed = None if copy.transposed is None else (copy.transposed.codes, copy.transposed.scales)
        outputs = copy.plain.codes, copy.plain.scales, transposed
        triton_quant.blockwise(padded, *outputs, FP8_BLOCK, FP8_MAX, False, MIN_AMAX)
        return
    for mine, new in zip((copy.plain, copy.transposed), quantize_blockwise_both(padded), strict=True):
        if mine is not None:
            mine.codes.copy_(new.codes)
            mine.scales.copy_(new.scales)


def _is_capturing(weight: torch.Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _use_on_current_stream(copy: Fp8Copy, device: torch.device) -> None:
    """What other streams have queued with the copy comes first."""
    stream = torch.cuda.current_stream(device)
    if copy._stream is not None and copy._stream != stream:
        stream.wait_stream(copy._stream)
    copy._stream = stream


# Buffers made in inference mode could not be written outside it.
@torch.inference_mode(False)
@torch.no_grad()
def fp8_copy(weight: torch.Tensor, padding: Padding, phase: Phase) -> Fp8Copy:
    """The copy of ``weight [e, M, N]`` in its present state; use it before the weight changes again.

    Args:
        phase: ``training`` and ``backward`` ask for the transposed codes too; they are kept from then on. Inside a
            capture ``training`` always casts: who replays it will have changed the weight. ``backward`` takes what that
            cast wrote.
    """
    global _counts_steps
    memory = _find_or_add(weight)
    key = (padding, weight.storage_offset(), weight.shape, weight.stride(), weight.dtype)
    copy = memory.copies.get(key)
    if copy is None:
        if not _counts_steps:
            register_optimizer_step_post_hook(_count_step)
            _counts_steps = True
        copy = memory.copies[key] = Fp8Copy(_empty(padding.shape(weight), weight.device))
    capturing = _is_capturing(weight)
    if weight.is_cuda and not capturing:
        # A capture begins when the device is idle, and may not wait for what lies outside.
        _use_on_current_stream(copy, weight.device)
    stamp = _stamp(weight, memory)
    is_current = copy._stamp is not None and copy._stamp == stamp
    if capturing:
        is_current = phase == "backward" if copy._recorded else is_current and phase != "training"
    lacks_transposed = phase != "inference" and copy.transposed is None
    if is_current and not lacks_transposed:
        return copy
    if lacks_transposed:
        experts, rows, columns = copy.plain.codes.shape
        copy.transposed = _empty((experts, columns, rows), weight.device)
    _cast(weight, padding, copy)
    copy._recorded |= capturing
    copy._stamp = None if copy._recorded else stamp
    return copy


def refresh(weight: torch.Tensor) -> None:
    """Casts those copies of ``weight`` again that are out of date: captured graphs read them where they lie.

    Where none is, it costs the host a few microseconds, and on another stream than the last one's a wait of the device.
    """
    weight = _local(weight)
    memory = _find(weight)
    if memory is None:
        return
    stamp = _stamp(weight, memory)
    # The stream's number, since an object for it takes longer to make than all else.
    stream = torch._C._cuda_getCurrentRawStream(weight.get_device()) if weight.is_cuda else None
    for (padding, offset, shape, stride, _), copy in list(memory.copies.items()):
        used = None if copy._stream is None else copy._stream.cuda_stream
        if stamp is None or copy._stamp != stamp or used != stream:
            fp8_copy(weight.detach().as_strided(shape, stride, offset), padding, "inference")


def watch(module: torch.nn.Module, name: str) -> None:
    """From now on writes to the DTensor parameter ``name`` count as writes to its local part; others need no call."""
    parameter = getattr(module, name)
    if hasattr(parameter, "_local_tensor"):
        _find_or_add(_local(parameter)).parameter = weakref.ref(module), name


def mark_changed(weight: torch.Tensor) -> None:
    """``weight`` was written without a trace: its copies are cast again when they are needed next."""
    memory = _find(_local(weight))
    for copy in () if memory is None else memory.copies.values():
        copy._stamp = None


def forget(weight: torch.Tensor) -> None:
    """Gives back the memory of all copies of ``weight``, which is out of use. No captured graph may need them."""
    memory = _find(_local(weight))
    if memory is not None:
        memory.copies = {}
