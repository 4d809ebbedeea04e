"""DeepGEMM's layout and cast utilities under their own names, on megamoe's implementations; on any device.

``import megamoe.compat.deep_gemm as deep_gemm``. Results have the same bits, shapes and strides for finite inputs; bad
arguments raise ``MegaMoEError``. Tensors on a CPU are treated as for Hopper (architecture 9).
"""

from __future__ import annotations

import torch

from megamoe.errors import check_choice, fail_type, fail_value
from megamoe.kernels import formats, quant, scales, weights
from megamoe.kernels.layout import ALIGN, align_up

MIN_AMAX = 1e-4
"""DeepGEMM's lower bound of the amax that scales are made from."""


def ceil_div(x: int, y: int) -> int:
    """``x / y`` rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """``x`` rounded up to a multiple of ``y``."""
    return align_up(x, y)


# ---------------------------------------------------------------- alignment of grouped layouts


def get_mk_alignment_for_contiguous_layout() -> int:
    """Rows to which each group of the contiguous layout is padded."""
    return ALIGN


def set_mk_alignment_for_contiguous_layout(new_value: int) -> None:
    """Accepts the one alignment that Hopper's kernels know, 128."""
    if new_value != ALIGN:
        fail_value("new_value", new_value, f"must be {ALIGN}", "Pad every group to a multiple of it.")


def get_theoretical_mk_alignment_for_contiguous_layout(expected_m: int | None = None) -> int:
    """The alignment that suits ``expected_m`` rows per group best; on Hopper always 128."""
    return ALIGN


get_m_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout
get_k_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout

# ---------------------------------------------------------------- scale layouts


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """``x`` elements rounded up to 16 bytes, in elements."""
    return scales.tma_aligned_size(x, element_size)


def get_mn_major_tma_aligned_tensor(sf: torch.Tensor) -> torch.Tensor:
    """fp32 ``[(groups,) mn, k]``, MN-major with the K stride aligned to 16 bytes."""
    return scales.to_mn_major(sf)


def get_mn_major_tma_aligned_packed_ue8m0_tensor(
    sf: torch.Tensor, psum_layout: torch.Tensor | None = None
) -> torch.Tensor:
    """int32 ``[(groups,) mn, ceil(k / 4)]`` of power-of-two fp32 scales; rows between psum groups are 0."""
    return scales.pack_ue8m0(sf, psum_layout, ALIGN)


def get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
    sf: torch.Tensor,
    grouped_layout: torch.Tensor,
    ks_cpu: list[int] | None,
    gran_k: int,
    k_alignment: int,
    use_psum_layout: bool = False,
) -> torch.Tensor:
    """int32 ``[sum of ceil(k / (4 gran_k)), mn]``: each group's scales ``[ceil(k / gran_k), mn]`` packed alone.

    Args:
        grouped_layout: int32 ``[G]``: k of each group, or with ``use_psum_layout`` the end of each group, whose
            successor starts at the next multiple of ``k_alignment``.
        ks_cpu: the same k on the host; not read with ``use_psum_layout``, which takes them from the device.
    """
    check_choice("gran_k", gran_k, (32, 128))
    if use_psum_layout:
        ends = grouped_layout.tolist()
        starts = [0, *(align(end, k_alignment) for end in ends[:-1])]
        ks = [end - start for start, end in zip(starts, ends, strict=True)]
    elif ks_cpu:
        ks = list(ks_cpu)
    else:
        fail_value("ks_cpu", ks_cpu, "must name the k of each group", "Pass it, or use_psum_layout=True.")
    if len(ks) != grouped_layout.numel():
        fail_value(
            "ks_cpu", ks_cpu, f"must have {grouped_layout.numel()} entries as grouped_layout", "Check the groups."
        )
    sizes = [ceil_div(k, gran_k) for k in ks]
    # The psum form may come with room for more rows than the groups use.
    return scales.pack_ue8m0_k_grouped(sf[: sum(sizes)] if use_psum_layout else sf, sizes)


def _arch_of(tensor: torch.Tensor) -> int:
    return torch.cuda.get_device_capability(tensor.device)[0] if tensor.is_cuda else 9


def transform_sf_into_required_layout(
    sf: torch.Tensor,
    mn: int,
    k: int,
    recipe: tuple[int, ...],
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
    psum_layout: torch.Tensor | None = None,
) -> torch.Tensor:
    """The scales as the GEMMs of ``sf``'s device take them; see ``megamoe.kernels.scales.to_required_layout``.

    Args:
        recipe: (granularity of M, of N, of K) with ``is_sfa``, or (granularity of mn, of K) without.
    """
    if len(recipe) == 3 and is_sfa is not None:
        granularity = (recipe[0] if is_sfa else recipe[1], recipe[2])
    elif len(recipe) == 2 and is_sfa is None:
        granularity = (recipe[0], recipe[1])
    else:
        fail_value("recipe", recipe, "must be 3 numbers with is_sfa or 2 without", "Add or drop is_sfa.")
    return scales.to_required_layout(
        sf,
        mn,
        k,
        granularity,
        _arch_of(sf),
        num_groups,
        keep_fp32=disable_ue8m0_cast,
        group_ends=psum_layout,
        group_alignment=ALIGN,
    )


def transform_weights_for_mega_moe(
    l1_weights: weights.Weight, l2_weights: weights.Weight, activation: str = "swiglu"
) -> tuple[weights.Weight, weights.Weight]:
    """See ``megamoe.kernels.weights.transform_weights_for_mega_moe``; the activation is always SwiGLU."""
    check_choice("activation", activation, ("swiglu",))
    return weights.transform_weights_for_mega_moe(l1_weights, l2_weights)


# ---------------------------------------------------------------- casts


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
