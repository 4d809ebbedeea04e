"""FP8 copies of weights, and padded copies of biases: made when first needed, and anew, in the same memory, once the
weights have changed. Biases are weights here too.

A copy is trusted while the weight lies in the same memory with the same version, and no optimizer has stepped since:
fused optimizers write without a new version. It dies with the weight's memory. Writes that leave no trace must be told
by ``mark_changed``: those through ``.data`` outside optimizers, and by graphs that hold nothing but an optimizer.

A cast inside a CUDA graph is recorded, not run: from then on replays write the copy, and nothing else trusts it.
"""

from __future__ import annotations

import math
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
    """Zeros that make a weight ``[e, M, N]`` an operand: each of ``halves`` of M, and N, up to a multiple.

    A weight whose halves do not lie side by side is ``[e, halves, M / halves, N]``.
    """

    halves: int
    rows: int
    columns: int

    def shape(self, weight: torch.Tensor) -> tuple[int, int, int]:
        """The padded shape of ``weight``."""
        experts, *rows, columns = weight.shape
        return (
            experts,
            self.halves * align_up(math.prod(rows) // self.halves, self.rows),
            align_up(columns, self.columns),
        )

    def pad(self, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` padded, ``[e, M, N]``; itself where it fits."""
        shape = self.shape(weight)
        if shape == weight.shape:
            return weight
        split = weight if weight.dim() == 4 else weight.unflatten(1, (self.halves, -1))
        added = shape[1] // self.halves - split.shape[2], shape[2] - split.shape[3]
        return (F.pad(split, (0, added[1], 0, added[0])) if any(added) else split).flatten(1, 2)

    def pad_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """A bias ``[e, M]`` of the weight's results, padded as its rows; itself where it fits."""
        rows = Padding(self.halves, self.rows, 1)
        return rows.pad(bias.unsqueeze(2)).squeeze(2)

    def unpad(self, padded: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """The inverse of ``pad`` for a weight of ``rows`` by ``columns``."""
        if (rows, columns) == padded.shape[1:]:
            return padded
        halves = padded.unflatten(1, (self.halves, -1))
        return halves[:, :, : rows // self.halves, :columns].flatten(1, 2)


@dataclass(kw_only=True)
class _Copy:
    """What is known of the state of a copy."""

    _stamp: tuple | None = None
    _recorded: bool = False
    _stream: torch.cuda.Stream | None = None

    def is_current(self, weight: torch.Tensor, stamp: tuple | None, phase: Phase) -> bool:
        """Whether a use from now on finds what ``weight`` holds; see ``fp8_copy``."""
        capturing = _is_capturing(weight)
        if weight.is_cuda and not capturing:
            # A capture begins when the device is idle, and may not wait for what lies outside.
            _use_on_current_stream(self, weight.device)
        is_current = self._stamp is not None and self._stamp == stamp
        if capturing:
            return phase == "backward" if self._recorded else is_current and phase != "training"
        return is_current

    def mark_written(self, weight: torch.Tensor, stamp: tuple | None) -> None:
        self._recorded |= _is_capturing(weight)
        self._stamp = None if self._recorded else stamp


@dataclass
class PaddedBias(_Copy):
    """A bias with zeros for the rows that pad its weight."""

    values: torch.Tensor


@dataclass
class Fp8Copy(_Copy):
    """A weight in 128x128 blocks.

    Attributes:
        plain: ``[e, M', N']``, the padded weight.
        transposed: ``[e, N', M']``, the same codes; None where no backward pass has asked for it.
        rest: ``[room, M', N']``, what follows ``plain``, for the copy of another weight; whole: both as one.
    """

    plain: Fp8Tensor
    transposed: Fp8Tensor | None = None
    rest: Fp8Tensor | None = None
    whole: Fp8Tensor | None = None


@dataclass
class _Memory:
    """What is known of the memory that holds a weight: copies by their form, and the DTensor parameter around it.

    Weak references are to the storage: a tensor that has any cannot be swapped with another.

    Attributes:
        room: experts for which copies that are made from now on have room after their own.
    """

    storage: weakref.ref
    room: int = 0
    copies: dict[tuple, Fp8Copy | PaddedBias] = field(default_factory=dict)
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
        module, name = memory.parameter[0](), memory.parameter[1]
        # Faster than the attribute, which a weight that is computed instead is.
        parameter = None if module is None else module._parameters.get(name)
        if parameter is None:
            parameter = getattr(module, name, None)
        # Optimizers and load_state_dict count their writes to a DTensor there, not in its local part.
        outer = getattr(parameter, "_version", None)
    return weight._version, outer, _optimizer_steps


def _empty(shape: tuple[int, int, int], device: torch.device) -> Fp8Tensor:
    experts, rows, columns = shape
    scales = torch.empty(experts, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK), device=device)
    codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    return Fp8Tensor(codes, scales, (FP8_BLOCK, FP8_BLOCK))


def _new_copy(shape: tuple[int, int, int], room: int, device: torch.device) -> Fp8Copy:
    experts, rows, columns = shape
    whole = _empty((experts + room, rows, columns), device)
    codes, scales = (tensor.split((experts, room)) for tensor in (whole.codes, whole.scales))
    plain, rest = (Fp8Tensor(*part, whole.block) for part in zip(codes, scales, strict=True))
    return Fp8Copy(plain, rest=rest, whole=whole)


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


def _use_on_current_stream(copy: _Copy, device: torch.device) -> None:
    """What other streams have queued with the copy comes first."""
    stream = torch.cuda.current_stream(device)
    if copy._stream is not None and copy._stream != stream:
        stream.wait_stream(copy._stream)
    copy._stream = stream


# Buffers made in inference mode could not be written outside it.
@torch.inference_mode(False)
@torch.no_grad()
def fp8_copy(
    weight: torch.Tensor,
    padding: Padding,
    phase: Phase,
    *,
    room: int | None = None,
    into: Fp8Tensor | None = None,
) -> Fp8Copy:
    """The copy of ``weight [e, M, N]`` in its present state; use it before the weight changes again.

    Args:
        phase: ``training`` and ``backward`` ask for the transposed codes too; they are kept from then on. Inside a
            capture ``training`` always casts: who replays it will have changed the weight. ``backward`` takes what that
            cast wrote.
        room: experts for which the copy has room; default: as ``reserve`` was told.
        into: the memory for it, until another is named.
    """
    memory = _find_or_add(weight)
    room = memory.room if room is None else room
    key = *_form(weight, padding), room
    copy = memory.copies.get(key)
    if copy is None or (into is not None and copy.plain is not into):
        _watch_optimizers()
        copy = _new_copy(padding.shape(weight), room, weight.device) if into is None else Fp8Copy(into)
        memory.copies[key] = copy
    stamp = _stamp(weight, memory)
    is_current = copy.is_current(weight, stamp, phase)
    lacks_transposed = phase != "inference" and copy.transposed is None
    if is_current and not lacks_transposed:
        return copy
    if lacks_transposed:
        experts, rows, columns = copy.plain.codes.shape
        copy.transposed = _empty((experts, columns, rows), weight.device)
    _cast(weight, padding, copy)
    copy.mark_written(weight, stamp)
    return copy


def joined_copies(weight: torch.Tensor, other: torch.Tensor, padding: Padding) -> Fp8Tensor:
    """Both weights, ``[e, M, N]`` and ``[s, M, N]``, in their present state as one operand ``[e + s, M', N']``.

    For inference. Each is cast anew, in place, when it has changed, as by ``fp8_copy``.
    """
    copy = fp8_copy(weight, padding, "inference", room=len(other))
    fp8_copy(other, padding, "inference", into=copy.rest)
    return copy.whole


@torch.inference_mode(False)
@torch.no_grad()
def padded_bias(bias: torch.Tensor, padding: Padding) -> torch.Tensor:
    """``bias [e, M]`` in its present state, BF16 or fp32, with zeros where ``padding`` has added rows to its weight.

    For inference; as lasting as an FP8 copy.
    """
    memory = _find_or_add(bias)
    key = *_form(bias, padding), 0
    copy = memory.copies.get(key)
    if copy is None:
        _watch_optimizers()
        experts, rows, _ = padding.shape(bias.unsqueeze(2))
        dtype = bias.dtype if bias.dtype == torch.bfloat16 else torch.float32
        copy = memory.copies[key] = PaddedBias(torch.empty(experts, rows, dtype=dtype, device=bias.device))
    stamp = _stamp(bias, memory)
    if not copy.is_current(bias, stamp, "inference"):
        copy.values.copy_(padding.pad_bias(bias))
        copy.mark_written(bias, stamp)
    return copy.values


def _form(weight: torch.Tensor, padding: Padding) -> tuple:
    return padding, weight.storage_offset(), weight.shape, weight.stride(), weight.dtype


def _watch_optimizers() -> None:
    """From the first copy on."""
    global _counts_steps
    if not _counts_steps:
        register_optimizer_step_post_hook(_count_step)
        _counts_steps = True


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
    for (padding, offset, shape, stride, _, room), copy in list(memory.copies.items()):
        used = None if copy._stream is None else copy._stream.cuda_stream
        if stamp is None or copy._stamp != stamp or used != stream:
            part = weight.detach().as_strided(shape, stride, offset)
            if isinstance(copy, Fp8Copy):
                fp8_copy(part, padding, "inference", room=room)
            else:
                padded_bias(part, padding)


def watch(module: torch.nn.Module, name: str) -> None:
    """From now on writes to the DTensor parameter ``name`` count as writes to its local part; others need no call."""
    parameter = getattr(module, name)
    if hasattr(parameter, "_local_tensor"):
        _find_or_add(_local(parameter)).parameter = weakref.ref(module), name


def reserve(weight: torch.Tensor, experts: int) -> None:
    """Copies of ``weight`` that are made from now on can be joined with those of so many other experts."""
    _find_or_add(_local(weight)).room = experts


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
