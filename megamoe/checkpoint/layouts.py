"""How one expert's matrix or bias is stored, and the way to megamoe's layout and back. All are bit-exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megamoe.errors import fail_value
from megamoe.kernels.formats import decode_e2m1, pack_fp4, unpack_fp4

MX_GROUP = 32
_NOT_E2M1 = 255


@dataclass(frozen=True)
class Layout:
    """How a matrix ``[M, N]`` (or bias ``[M]``) is stored. The default is megamoe's own layout: gate rows, then up.

    Attributes:
        interleaved: gate and up rows in turn: gate 0, up 0, gate 1, ...
        transposed: ``[N, M]``.
        split: gate and up on an axis of their own, ``[2, M / 2, ...]``.
        mxfp4: e2m1 codes, two per byte, in groups of 32: uint8 ``[M, N / 32, 16]``. megamoe has them as e4m3 codes
            ``[M, N]`` with the same values.
    """

    interleaved: bool = False
    transposed: bool = False
    split: bool = False
    mxfp4: bool = False

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The stored shape of a matrix or bias of ``shape``."""
        rows, *rest = shape
        if self.mxfp4:
            return rows, rest[0] // MX_GROUP, MX_GROUP // 2
        if self.split:
            return 2, rows // 2, *rest
        return tuple(reversed(shape)) if self.transposed else tuple(shape)

    def load(self, stored: torch.Tensor) -> torch.Tensor:
        """megamoe's matrix; may be a view of ``stored``."""
        x = _e4m3_from_e2m1(stored) if self.mxfp4 else stored
        x = x.t() if self.transposed else x
        x = x.flatten(0, 1) if self.split else x
        return join_rows([x[0::2], x[1::2]]) if self.interleaved else x

    def store(self, x: torch.Tensor, name: str = "codes") -> torch.Tensor:
        """The inverse of ``load``: contiguous.

        Args:
            name: of the tensor in error messages.

        Raises:
            MegaMoEError: ``mxfp4`` and a code that e2m1 does not have.
        """
        if self.interleaved:
            gate, up = x.chunk(2)
            turns = torch.stack([as_bytes(gate), as_bytes(up)], dim=1).flatten(0, 1)
            x = turns.view(x.dtype) if x.element_size() == 1 else turns
        x = x.unflatten(0, (2, -1)) if self.split else x
        x = x.t() if self.transposed else x
        return (_e2m1_from_e4m3(x, name) if self.mxfp4 else x).contiguous()


PLAIN = Layout()


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """8-bit floats as uint8, which every operator takes; other dtypes as they are."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def join_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts one below the other."""
    if len(parts) == 1:
        return parts[0]
    joined = torch.cat([as_bytes(part) for part in parts])
    return joined.view(parts[0].dtype) if joined.element_size() == 1 else joined


def _tables() -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 code of each e2m1 code, and the inverse with ``_NOT_E2M1`` for the others."""
    e4m3 = decode_e2m1(torch.arange(16, dtype=torch.uint8)).to(torch.float8_e4m3fn).view(torch.uint8)
    e2m1 = torch.full((256,), _NOT_E2M1, dtype=torch.uint8)
    e2m1[e4m3.long()] = torch.arange(16, dtype=torch.uint8)
    return e4m3, e2m1


def _e4m3_from_e2m1(blocks: torch.Tensor) -> torch.Tensor:
    codes = unpack_fp4(blocks.flatten(-2))
    return _tables()[0][codes.int()].view(torch.float8_e4m3fn)


def _e2m1_from_e4m3(codes: torch.Tensor, name: str) -> torch.Tensor:
    e2m1 = _tables()[1][codes.contiguous().view(torch.uint8).int()]
    if (e2m1 == _NOT_E2M1).any():
        value = codes.float()[e2m1 == _NOT_E2M1][0].item()
        fail_value(name, value, "is not a value of e2m1 (MXFP4)", "Dequantise instead of writing MXFP4.")
    return pack_fp4(e2m1).unflatten(-1, (-1, MX_GROUP // 2))
