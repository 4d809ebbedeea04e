"""Random block-scaled e4m3 operands and what they stand for in fp64; nothing here comes from ``megamoe``."""

from __future__ import annotations

import torch


def random_scaled(
    shape: tuple[int, ...], block: tuple[int, int], device: str = "cpu"
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Codes and fp32 scales of ``[..., M, K]`` on ``device``, no two scales alike, and the fp64 values on the CPU."""
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    *groups, rows, cols = shape
    scales = torch.rand(*groups, -(-rows // block[0]), -(-cols // block[1])) + 0.25
    spread = scales.double().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., :rows, :cols]
    return (codes.to(device), scales.to(device)), codes.double() * spread


def random_bf16(shape: tuple[int, ...], device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """A bf16 tensor on ``device``, and its fp64 values on the CPU."""
    x = torch.randn(shape).bfloat16()
    return x.to(device), x.double()


def other_major(x: torch.Tensor) -> torch.Tensor:
    """The same matrices, stored with the other dimension dense."""
    return x.mT.contiguous().mT
