"""Number formats in plain torch, exact on every device: e4m3, e2m1, power-of-two and UE8M0 scales, block casts.

e4m3: 8-bit floats up to 448 (``torch.float8_e4m3fn``). e2m1 ("FP4"): 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives,
two codes per byte, the even column in the low half. UE8M0: the 8-bit exponent of a power of two, 2^(code - 127); code
255 is NaN. e2m1 and UE8M0 are those of the OCP Microscaling (MX) specification 1.0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

FP8_MAX = 448.0
FP4_MAX = 6.0
MIN_AMAX = 1e-10
"""Smallest amax that a scale is made from: keeps the scales of all-zero blocks positive and normal."""

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


# ---------------------------------------------------------------- scales


def round_up_to_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two not below ``x`` (fp32, >= 0), within [2^-126, 2^127]; NaN for NaN and Inf."""
    bits = x.contiguous().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    power = (exponent.clamp(1, 254) << 23).view(torch.float32)
    return power.masked_fill(~x.isfinite(), float("nan"))


def encode_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """uint8 codes of fp32 powers of two in [2^-127, 2^127], and of NaN. Other values are cut to the power below."""
    return (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """fp32 ``2^(code - 127)`` of uint8 codes; exact, also 2^-127 (subnormal); NaN for code 255."""
    bits = codes.to(torch.int32) << 23
    # Code 0 is 2^-127, below the normal numbers: half of 2^-126. Code 255 alone would be Inf.
    bits = bits.masked_fill(codes == 0, 1 << 22).masked_fill(codes == 255, 0x7FC00000)
    return bits.view(torch.float32)


def block_scales(amax: torch.Tensor, largest: float, power_of_two: bool, min_amax: float = MIN_AMAX) -> torch.Tensor:
    """fp32 scales ``max(amax, min_amax) / largest``, rounded up to powers of two on request.

    A block with NaN has scale NaN; one with Inf has scale Inf, or NaN as a power of two: it decodes to NaN throughout.
    """
    amax = amax.float().clamp(min=min_amax)
    # By a tensor: by a number, CUDA multiplies with the reciprocal, and the last bit would depend on the device.
    scales = amax / torch.full_like(amax, largest)
    return round_up_to_power_of_two(scales) if power_of_two else scales


# ---------------------------------------------------------------- blocks


def split_blocks(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """``x [..., M, N]`` zero-padded to whole blocks and viewed as ``[..., M', block[0], N', block[1]]``."""
    rows, cols = x.shape[-2:]
    pad = (0, -cols % block[1], 0, -rows % block[0])
    x = F.pad(x, pad) if any(pad) else x
    return x.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))


def join_blocks(blocks: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The inverse of ``split_blocks`` for an ``x`` of ``rows`` by ``cols``."""
    return blocks.flatten(-4, -3).flatten(-2, -1)[..., :rows, :cols]


def quantize_blocks(
    x: torch.Tensor, block: tuple[int, int], largest: float, power_of_two: bool, min_amax: float = MIN_AMAX
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales each block of ``x [..., M, N]`` into [-largest, largest].

    Returns:
        fp32 ``[..., M, N]``, x times the reciprocal of its block's scale, saturated; and the fp32 scales
        ``[..., ceil(M / block[0]), ceil(N / block[1])]``. A short last block counts as padded with zeros.
    """
    blocks = split_blocks(x.float(), block)
    # A reduction over nothing has no maximum: such an x has no blocks either, or only empty ones.
    amax = blocks.abs().amax(dim=(-3, -1)) if blocks.numel() else blocks.sum(dim=(-3, -1))
    scales = block_scales(amax, largest, power_of_two, min_amax)
    scaled = (blocks * scales.reciprocal()[..., :, None, :, None]).clamp(-largest, largest)
    return join_blocks(scaled, *x.shape[-2:]), scales


def multiply_blocks(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """fp32 ``[..., M, N]``: each of ``values [..., M, N]`` times the scale of its block."""
    blocks = split_blocks(values.float(), block) * scales[..., :, None, :, None]
    return join_blocks(blocks, *values.shape[-2:])


# ---------------------------------------------------------------- e2m1


def encode_e2m1(x: torch.Tensor, ties_to_even: bool = True) -> torch.Tensor:
    """uint8 codes (sign in bit 3) of ``x``, to the nearest value, saturating; NaN becomes 6.

    Ties go to the even code, or towards zero without ``ties_to_even``.
    """
    magnitude = x.abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for lower, midpoint in enumerate(_FP4_MIDPOINTS):
        # From an odd code a tie to even goes up, from an even one it stays.
        goes_up = ties_to_even and lower % 2
        reached = magnitude >= midpoint if goes_up else magnitude > midpoint
        code += (reached | magnitude.isnan()).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of 4-bit codes in uint8."""
    table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], device=codes.device)
    return table[codes.long()]


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """uint8 ``[..., N / 2]`` of 4-bit codes ``[..., N]``: column 2j in the low half of byte j, 2j + 1 in the high."""
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack_fp4``."""
    packed = packed.view(torch.uint8)
    return torch.stack([packed & 0x0F, packed >> 4], dim=-1).flatten(-2)
