"""The values that pass between router, exchange and experts. All are frozen; tensors in them are not copied.

Symbols: T tokens of this call on this rank, K top_k, E experts, R expert-parallel ranks, e = E/R local experts,
H hidden_size, I intermediate_size, P rows of the expert-sorted pool (each expert padded to a multiple of ALIGN rows).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class Routing:
    """Which experts each token uses.

    Attributes:
        topk_index: int64 ``[T, K]``, expert ids. An id outside ``[0, E)`` (by convention -1) means "no expert": it is
            not sent, not counted and adds nothing. The same id twice in a row adds that expert twice.
        topk_weights: floating ``[T, K]``, differentiable.
    """

    topk_index: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True)
class ExpertLayout:
    """Where each local expert's rows lie in the pool.

    Attributes:
        counts: int64 ``[e]``, rows of each expert.
        starts: int64 ``[e]``, first row of each expert, a multiple of ALIGN. Rows between an expert's last row and the
            next expert's start, and after the last expert, are padding: zero in dispatched rows, not read in results.
        num_rows: P, rows of the pool.
    """

    counts: torch.Tensor
    starts: torch.Tensor
    num_rows: int

    @property
    def ends(self) -> torch.Tensor:
        """int64 ``[e]``: one past the last row of each expert (the "psum" form)."""
        return self.starts + self.counts

    def spans(self) -> list[tuple[int, int]]:
        """``(start, end)`` of each expert on the host; waits for the device that holds the layout."""
        return list(zip(self.starts.tolist(), self.ends.tolist(), strict=True))


@dataclass(frozen=True)
class DispatchHandle(ABC):
    """What ``combine`` and the backward pass need to send rows back; opaque outside its exchange.

    All fields are tensors, so that autograd can save them: a recomputed forward pass replaces them all together.
    """

    @property
    @abstractmethod
    def layout(self) -> ExpertLayout:
        """The layout of the dispatched rows."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The fields, in the order in which the constructor takes them."""
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class DispatchedRows:
    """The result of ``Exchange.dispatch``.

    Attributes:
        rows: ``[P, H]``, this rank's rows, ordered by (expert, source rank, token, slot); padding is zero.
        row_weights: ``[P]``, the routing weight of each row; padding is zero.
        handle: pass it to ``Exchange.combine``.
        codes: the rows in 1x128 blocks, scales MN-major, or None. With them ``rows`` only stands for the rows in
            autograd: it has their shape, dtype and gradient, and no memory.
    """

    rows: torch.Tensor
    row_weights: torch.Tensor
    handle: DispatchHandle
    codes: Fp8Tensor | None = None

    @property
    def layout(self) -> ExpertLayout:
        return self.handle.layout


@dataclass(frozen=True)
class Fp8Tensor:
    """An e4m3 tensor with one scale per block: value = code * scale of its block.

    Attributes:
        codes: float8_e4m3fn ``[..., M, N]``.
        scales: ``[..., ceil(M / block[0]), ceil(N / block[1])]``, float32, or uint8 UE8M0 codes (MXFP8).
        block: rows and columns that share a scale: (1, 128), (1, 32), (128, 128) or (128, 1).
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]


@dataclass(frozen=True)
class Fp4Tensor:
    """An e2m1 tensor, two codes per byte, with one UE8M0 scale per row and 32 columns.

    Attributes:
        packed: uint8 ``[..., M, N / 2]``, the even column in the low half of each byte.
        scales: uint8 ``[..., M, ceil(N / 32)]``, UE8M0 codes.
    """

    packed: torch.Tensor
    scales: torch.Tensor
