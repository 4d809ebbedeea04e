"""How tests compare tensors: scale-free, so that small values cannot hide a wrong result."""

from __future__ import annotations

import torch


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius error ||actual - expected|| / ||expected||, in fp64; NaN anywhere gives NaN.

    Two zero tensors have error 0.
    """
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} != {tuple(expected.shape)}"
    difference = torch.linalg.vector_norm(actual - expected)
    norm = torch.linalg.vector_norm(expected)
    if norm == 0:
        return float("nan") if difference.isnan() else float("inf") if difference > 0 else 0.0
    return float(difference / norm)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str = "result") -> None:
    """``relative_error`` is at most ``tolerance`` (NaN fails)."""
    error = relative_error(actual, expected)
    assert error <= tolerance, f"{what}: relative Frobenius error {error:.3e} > {tolerance:.1e}"
