"""How far two tensors are apart, and how large tensors are."""

from __future__ import annotations

from typing import Any

import torch


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | float:
    """``sum((x - y)^2) / sum(x^2 + y^2)`` in fp64: half the squared relative error for close tensors.

    0.0 where both are zero everywhere; NaN where either has a NaN or an infinity.
    """
    x, y = x.double(), y.double()
    size = (x * x + y * y).sum()
    return 0.0 if size == 0 else (x - y).square().sum() / size


def count_bytes(*tensors: Any) -> int:
    """Bytes of all elements of tensors, of tuples and lists of them, and of ``None`` (0)."""
    total = 0
    for item in tensors:
        if isinstance(item, (tuple, list)):
            total += count_bytes(*item)
        elif item is not None:
            total += item.numel() * item.element_size()
    return total


def assert_bitwise_equal(x: torch.Tensor, y: torch.Tensor, label: str = "") -> None:
    """Shape, dtype and every bit agree; an AssertionError tells how many bytes do not, and the first."""
    where = f" of {label}" if label else ""
    if x.shape != y.shape or x.dtype != y.dtype:
        raise AssertionError(f"tensors{where} differ: {x.dtype} {list(x.shape)}, {y.dtype} {list(y.shape)}")
    bytes_x, bytes_y = (t.contiguous().flatten().view(torch.uint8) for t in (x, y))
    wrong = (bytes_x != bytes_y).nonzero().flatten()
    if wrong.numel():
        first = int(wrong[0]) // x.element_size()
        index = [int(i) for i in torch.unravel_index(torch.tensor(first), x.shape)]
        values = x.flatten()[first].item(), y.flatten()[first].item()
        raise AssertionError(
            f"{wrong.numel()} of {bytes_x.numel()} bytes{where} differ, first in {index}: {values[0]}, {values[1]}"
        )
