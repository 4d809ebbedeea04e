"""Integer helpers, casts to FP8 and FP4 and back."""

from __future__ import annotations

import torch

from megamoe.errors import fail_type, fail_value
from megamoe.kernels import formats, quant, scales
from megamoe.kernels.layout import align_up

MIN_AMAX = 1e-4
"""DeepGEMM's lower bound of the amax that scales are made from."""


def ceil_div(x: int, y: int) -> int:
    """``x / y`` rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """``x`` rounded up to a multiple of ``y``."""
    return align_up(x, y)


def ceil_to_ue8m0(x: torch.Tensor) -> torch.Tensor:
    """fp32: |x| rounded up to a power of two."""
    return formats.round_up_to_power_of_two(x.abs().float())


def pack_ue8m0_to_int(x: torch.Tensor) -> torch.Tensor:
    """int32 ``[..., k / 4]`` of fp32 powers of two ``[..., k]``, k % 4 == 0."""
    if x.dtype != torch.float32 or x.shape[-1] % 4:
        fail_type("x", f"{x.dtype} {list(x.shape)}", "must be fp32 with a last dimension of 4 n", "Pad with 1.0.")
    scales.check_powers_of_two(x.contiguous())
    return formats.encode_ue8m0(x).view(torch.int32)


def unpack_ue8m0_from_int(packed_sf: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack_ue8m0_to_int``."""
    return formats.decode_ue8m0(packed_sf.contiguous().view(torch.uint8))


def _check_packed(use_ue8m0: bool, use_packed_ue8m0: bool) -> None:
    if use_packed_ue8m0 and not use_ue8m0:
        fail_value("use_packed_ue8m0", True, "needs use_ue8m0", "Set both.")


def _packed(sf: torch.Tensor, use_packed_ue8m0: bool) -> torch.Tensor:
    return pack_ue8m0_to_int(sf) if use_packed_ue8m0 else sf


def per_token_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 ``[m, n]`` and scales ``[m, ceil(n / gran_k)]``."""
    _check_packed(use_ue8m0, use_packed_ue8m0)
    cast = quant.quantize_rowwise(x, gran_k, power_of_two=use_ue8m0, min_amax=MIN_AMAX)
    return cast.codes, _packed(cast.scales, use_packed_ue8m0)


def per_channel_cast_to_fp8(x: torch.Tensor, use_ue8m0: bool, gran_k: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 ``[m, n]`` and scales ``[m / gran_k, n]``; m % gran_k == 0."""
    if x.shape[0] % gran_k:
        fail_value("x.shape", list(x.shape), f"must have a multiple of gran_k = {gran_k} rows", "Pad the rows.")
    cast = quant.quantize_columnwise(x, group=gran_k, power_of_two=use_ue8m0, min_amax=MIN_AMAX)
    return cast.codes, cast.scales


def per_block_cast_to_fp8(x: torch.Tensor, use_ue8m0: bool, gran_k: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 ``[m, n]`` and scales ``[ceil(m / 128), ceil(n / 128)]``."""
    if gran_k != quant.BLOCK:
        fail_value("gran_k", gran_k, f"must be {quant.BLOCK}", "Other square blocks have no kernel.")
    cast = quant.quantize_blockwise(x, power_of_two=use_ue8m0, min_amax=MIN_AMAX)
    return cast.codes, cast.scales


def per_custom_dims_cast_to_fp8(
    x: torch.Tensor, dims: tuple[int, ...], use_ue8m0: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 of ``x`` and its scales, one per index of the dimensions ``dims``; others share."""
    shared = tuple(dim for dim in range(x.dim()) if dim not in dims)
    amax = x.abs().float().amax(dim=shared, keepdim=True)
    sf = formats.block_scales(amax, formats.FP8_MAX, use_ue8m0, MIN_AMAX)
    return (x * sf.reciprocal()).to(torch.float8_e4m3fn), sf.squeeze()


def per_token_cast_to_fp4(
    x: torch.Tensor, use_ue8m0: bool, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 ``[m, n / 2]`` of two e2m1 codes and scales ``[m, ceil(n / gran_k)]``.

    As DeepGEMM's, and unlike ``quantize_fp4``: ties go towards zero and a negative zero loses its sign.
    """
    _check_packed(use_ue8m0, use_packed_ue8m0)
    if x.dim() != 2 or x.shape[1] % 2:
        fail_value("x.shape", list(x.shape), "must be [m, n] with n even", "Pad n.")
    values, sf = formats.quantize_blocks(x, (1, gran_k), formats.FP4_MAX, use_ue8m0, MIN_AMAX)
    codes = formats.encode_e2m1(values, ties_to_even=False)
    codes = torch.where(codes == 8, 0, codes)
    if use_packed_ue8m0:
        sf = torch.nn.functional.pad(sf, (0, -sf.shape[1] % 4), value=1.0)
    return formats.pack_fp4(codes).view(torch.int8), _packed(sf, use_packed_ue8m0)


def cast_back_from_fp4(
    packed: torch.Tensor, sf: torch.Tensor, gran_k: int = 128, use_packed_ue8m0: bool = False
) -> torch.Tensor:
    """fp32 ``[m, n]`` of what ``per_token_cast_to_fp4`` returned."""
    sf = unpack_ue8m0_from_int(sf) if use_packed_ue8m0 else sf
    # Plus zero: -0.0 decodes to 0.0 there.
    values = formats.decode_e2m1(formats.unpack_fp4(packed)) + 0.0
    return formats.multiply_blocks(values, sf[:, : ceil_div(values.shape[1], gran_k)], (1, gran_k)).contiguous()


def transpose_packed_fp4(a: torch.Tensor) -> torch.Tensor:
    """int8 ``[n, m / 2]``, the transposed matrix of packed e2m1 codes ``[m, n / 2]``; m % 2 == 0."""
    if a.dtype != torch.int8 or a.dim() != 2 or a.shape[0] % 2:
        fail_type("a", f"{a.dtype} {list(a.shape)}", "must be int8 [m, n / 2] with m even", "Pad m.")
    return formats.pack_fp4(formats.unpack_fp4(a).t().contiguous()).view(torch.int8)
