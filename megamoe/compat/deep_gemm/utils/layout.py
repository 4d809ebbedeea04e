"""Row alignment of grouped layouts, and layouts of scales."""

from __future__ import annotations

import torch

from megamoe.compat.deep_gemm.utils.math import align, ceil_div
from megamoe.errors import check_choice, fail_value
from megamoe.kernels import scales
from megamoe.kernels.layout import ALIGN

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


def arch_of(tensor: torch.Tensor) -> int:
    """Major compute capability of the tensor's device; a CPU counts as Hopper, 9."""
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
        arch_of(sf),
        num_groups,
        keep_fp32=disable_ue8m0_cast,
        group_ends=psum_layout,
        group_alignment=ALIGN,
    )
