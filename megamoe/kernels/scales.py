"""Layouts of block scales as the GEMM kernels read them, on any device.

MN-major and TMA-aligned: ``[..., mn, k]`` with stride 1 along mn and ``align(mn, 16 bytes)`` along k. Packed: int32
with the UE8M0 codes of four consecutive K groups, the first in the lowest byte; codes past the last group and rows past
mn are 0. mn is M for activations' scales and N for weights'.
"""

from __future__ import annotations

import torch

from megamoe.errors import check_tensor, fail_type, fail_value
from megamoe.kernels.formats import decode_ue8m0
from megamoe.kernels.layout import align_up

TMA_ALIGNMENT = 16
"""Bytes to which the stride of the K axis is padded."""

CODES_PER_WORD = 4


def tma_aligned_size(size: int, element_size: int) -> int:
    """``size`` elements of ``element_size`` bytes, rounded up to 16 bytes; in elements."""
    return align_up(size, TMA_ALIGNMENT // element_size)


def _check_scales(scales: torch.Tensor, *dtypes: torch.dtype) -> None:
    if not isinstance(scales, torch.Tensor) or scales.dim() not in (2, 3):
        shape = list(scales.shape) if isinstance(scales, torch.Tensor) else type(scales).__name__
        fail_value("scales.shape", shape, "must be [mn, k] or [groups, mn, k]", "Add or merge dimensions.")
    if scales.dtype not in dtypes:
        names = " or ".join(str(dtype) for dtype in dtypes)
        fail_type("scales.dtype", scales.dtype, f"must be {names}", "Cast them first.")


def empty_mn_major(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros of ``shape [..., mn, k]``, MN-major and TMA-aligned; the alignment's padding is zero too."""
    *groups, mn, k = shape
    storage = torch.zeros(*groups, k, tma_aligned_size(mn, dtype.itemsize), dtype=dtype, device=device)
    return storage.transpose(-1, -2)[..., :mn, :]


def is_mn_major(scales: torch.Tensor) -> bool:
    """Whether ``scales [..., mn, k]`` already are MN-major, TMA-aligned and dense from group to group."""
    if not scales.numel():
        return True
    mn, k = scales.shape[-2:]
    aligned = tma_aligned_size(mn, scales.element_size())
    dense = scales.dim() == 2 or scales.stride(0) == aligned * k
    # Also where an axis has one element only: TMA descriptors hold every stride.
    return (scales.stride(-2) == 1 or mn == 1) and scales.stride(-1) == aligned and dense


def to_mn_major(scales: torch.Tensor) -> torch.Tensor:
    """MN-major, TMA-aligned fp32 copy of ``scales [(groups,) mn, k]``; itself where it is that already.

    Raises:
        MegaMoEError: another dtype than fp32, or another number of dimensions.
    """
    _check_scales(scales, torch.float32)
    if is_mn_major(scales):
        return scales
    return empty_mn_major(scales.shape, torch.float32, scales.device).copy_(scales)


def check_powers_of_two(scales: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    """Every scale (of ``rows``, a mask along mn) is a positive power of two or NaN; waits for the device."""
    bits = scales.view(torch.int32)
    # 2^-127, code 0, is the one power of two among the subnormal numbers that UE8M0 has.
    fits = (bits & 0x7FFFFF == 0) & (scales > 0) & ~scales.isinf() | scales.isnan() | (bits == 1 << 22)
    wrong = ~fits
    if rows is not None:
        wrong &= rows.unsqueeze(-1)
    if wrong.any():
        index = wrong.nonzero()[0].tolist()
        fail_value(
            f"scales{index}",
            float(scales[tuple(index)]),
            "must be a positive power of two",
            "Quantise with power_of_two=True, or keep FP32 scales where the kernel takes them.",
        )


def pack_ue8m0(
    scales: torch.Tensor, group_ends: torch.Tensor | None = None, group_alignment: int = 128, *, check: bool = True
) -> torch.Tensor:
    """Packs power-of-two fp32 scales ``[(groups,) mn, k]``, MN-major and TMA-aligned.

    Args:
        scales: powers of two (NaN packs to code 255).
        group_ends: int32 or int64 ``[G]``, for ``[mn, k]`` scales of rows in the psum form: group g has the rows from
            ``align(group_ends[g - 1], group_alignment)`` to ``group_ends[g]``. Rows in the gaps are packed as 0, and
            what ``scales`` holds there is never used.
        check: refuse other values; False saves the wait for the device.

    Returns:
        int32 ``[(groups,) mn, ceil(k / 4)]``.

    Raises:
        MegaMoEError: wrong shape or dtype, or a scale that is not a power of two, with its index and value.
    """
    _check_scales(scales, torch.float32)
    rows = None
    if group_ends is not None:
        check_tensor("group_ends", group_ends, (None,), (torch.int32, torch.int64), scales.device)
        if scales.dim() != 2:
            fail_value("scales.shape", list(scales.shape), "must be [mn, k] with group_ends", "Pass one matrix.")
        rows = _rows_of_groups(group_ends, group_alignment, scales.shape[0])
    scales = scales.contiguous()
    if check:
        check_powers_of_two(scales, rows)
    codes = scales.view(torch.int32) >> 23 & 0xFF
    if rows is not None:
        codes = codes.masked_fill(~rows.unsqueeze(-1), 0)
    words = _words(codes)
    return empty_mn_major(words.shape, torch.int32, scales.device).copy_(words)


def _rows_of_groups(group_ends: torch.Tensor, alignment: int, mn: int) -> torch.Tensor:
    """bool ``[mn]``: the rows that belong to a group of the psum form."""
    ends = group_ends.long()
    starts = torch.cat([ends.new_zeros(1), (ends[:-1] + alignment - 1) // alignment * alignment])
    row = torch.arange(mn, device=ends.device).unsqueeze(1)
    return ((row >= starts) & (row < ends)).any(dim=1)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """int32 ``[..., ceil(k / 4)]`` of codes (int32, 0 to 255) ``[..., k]``, the first of four in the lowest byte."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % CODES_PER_WORD)).unflatten(-1, (-1, CODES_PER_WORD))
    low = padded[..., 0] | padded[..., 1] << 8 | padded[..., 2] << 16
    return low | padded[..., 3] << 24


def unpack_ue8m0(packed: torch.Tensor, k: int | None = None) -> torch.Tensor:
    """fp32 ``[(groups,) mn, k]`` of packed scales ``[(groups,) mn, k / 4]``; the inverse of ``pack_ue8m0``.

    Args:
        k: number of scales; default: four per word.

    Raises:
        MegaMoEError: wrong shape or dtype, or ``k`` does not fit the number of words.
    """
    _check_scales(packed, torch.int32)
    words = packed.shape[-1]
    k = words * CODES_PER_WORD if k is None else k
    if -(-k // CODES_PER_WORD) != words:
        fail_value("k", k, f"must need {words} words of {CODES_PER_WORD} codes", "Pass the k of the packed scales.")
    shifts = torch.arange(0, 32, 8, device=packed.device)
    codes = (packed.unsqueeze(-1) >> shifts & 0xFF).flatten(-2)[..., :k]
    return decode_ue8m0(codes.to(torch.uint8))


def pack_ue8m0_k_grouped(scales: torch.Tensor, groups: list[int], *, check: bool = True) -> torch.Tensor:
    """Packs the scales of a K-grouped operand: each group's K groups alone, its last word filled with zeros.

    Args:
        scales: fp32 ``[sum of groups, mn]`` powers of two, K groups of all expert groups after one another.
        groups: K groups of each expert group; may be 0.

    Returns:
        int32 ``[sum of ceil(groups / 4), mn]``, contiguous.

    Raises:
        MegaMoEError: wrong shape or dtype, sizes that do not add up, mn % 4 != 0, or a scale that is no power of two.
    """
    check_tensor("scales", scales, (None, None), (torch.float32,))
    if any(size < 0 for size in groups) or sum(groups) != scales.shape[0]:
        fail_value(
            "groups", groups, f"must be >= 0 and add up to scales.shape[0] = {scales.shape[0]}", "Check the sizes."
        )
    if scales.shape[1] % 4:
        fail_value("scales.shape", list(scales.shape), "must have mn % 4 == 0", "Pad mn.")
    scales = scales.contiguous()
    if check:
        check_powers_of_two(scales)
    sizes = torch.tensor(groups, dtype=torch.int64, device=scales.device)
    return pack_rows(scales, sizes, sum(-(-size // CODES_PER_WORD) for size in groups))


def pack_rows(scales: torch.Tensor, sizes: torch.Tensor, num_words: int) -> torch.Tensor:
    """Packs rows of contiguous ``scales [sum of sizes, mn]`` by groups of ``sizes`` (int64 ``[G]``, on their device).

    Returns:
        int32 ``[num_words, mn]``: ceil(size / 4) words of each group; words past the last group are 0. Nothing waits
        for the device.
    """
    words = (sizes + CODES_PER_WORD - 1) // CODES_PER_WORD
    word_ends, row_ends = words.cumsum(0), sizes.cumsum(0)
    word = torch.arange(num_words, device=scales.device)
    group = torch.searchsorted(word_ends, word, right=True).clamp(max=max(sizes.numel() - 1, 0))
    if not num_words or not sizes.numel():
        return torch.zeros(num_words, scales.shape[1], dtype=torch.int32, device=scales.device)
    inside = CODES_PER_WORD * (word - word_ends[group] + words[group])
    first = row_ends[group] - sizes[group] + inside
    count = (sizes[group] - inside).clamp(0, CODES_PER_WORD)
    packed = torch.empty(num_words, scales.shape[1], dtype=torch.int32, device=scales.device)
    if scales.is_cuda:
        from megamoe.kernels import triton_quant

        triton_quant.pack_ue8m0_rows(scales, packed, first, count)
        return packed
    packed.zero_()
    for code in range(CODES_PER_WORD):
        rows = scales.view(torch.int32)[(first + code).clamp(max=max(scales.shape[0] - 1, 0))]
        packed |= (rows >> 23 & 0xFF).masked_fill((count <= code).unsqueeze(1), 0) << 8 * code
    return packed


def broadcast_rows(scales: torch.Tensor, mn: int, gran_mn: int) -> torch.Tensor:
    """``[..., mn, k]`` of scales ``[..., ceil(mn / gran_mn), k]`` that ``gran_mn`` rows share."""
    return scales if gran_mn == 1 else scales.repeat_interleave(gran_mn, dim=-2)[..., :mn, :]


def check_layout(
    scales: torch.Tensor, mn: int, k: int, gran_mn: int, gran_k: int, num_groups: int | None = None
) -> torch.Tensor:
    """``scales`` has the shape that ``mn`` rows and ``k`` columns in blocks of ``gran_mn`` x ``gran_k`` need.

    Args:
        scales: fp32, or packed int32, which holds four K groups per word; ``[(num_groups,) ., .]``.

    Raises:
        MegaMoEError: another dtype or shape.
    """
    _check_scales(scales, torch.float32, torch.int32)
    per_word = CODES_PER_WORD if scales.dtype == torch.int32 else 1
    groups = () if num_groups is None else (num_groups,)
    shape = (*groups, -(-mn // gran_mn), -(-k // (gran_k * per_word)))
    check_tensor("scales", scales, shape)
    return scales


def to_required_layout(
    scales: torch.Tensor,
    mn: int,
    k: int,
    granularity: tuple[int, int],
    arch: int,
    num_groups: int | None = None,
    *,
    keep_fp32: bool = False,
    group_ends: torch.Tensor | None = None,
    group_alignment: int = 128,
) -> torch.Tensor:
    """The scales as the block-scaled GEMM kernels of an architecture take them.

    ========  ==============  ================  ==============================================================
    dtype     granularity     architecture      result
    ========  ==============  ================  ==============================================================
    fp32      1 x 128         9, or keep_fp32   MN-major, TMA-aligned fp32
    fp32      128 x 128       9, or keep_fp32   as it is: dense rows, or dense after a transpose, is required
    fp32      any x 32, 128   10                rows repeated, packed as UE8M0, MN-major, TMA-aligned
    int32     1 x 32, 128     10                as it is: MN-major, TMA-aligned is required
    ========  ==============  ================  ==============================================================

    Args:
        scales: ``[(num_groups,) ceil(mn / gran_mn), ceil(k / gran_k)]``; a quarter of the columns if int32.
        granularity: rows and columns that share a scale.
        arch: major compute capability, 9 (Hopper) or 10 (Blackwell).
        keep_fp32: do not turn fp32 scales into UE8M0.
        group_ends, group_alignment: as for ``pack_ue8m0``.

    Raises:
        MegaMoEError: shape, strides or dtype do not fit, a scale is no power of two where UE8M0 is required, or no
            kernel takes this combination.
    """
    gran_mn, gran_k = granularity
    check_layout(scales, mn, k, gran_mn, gran_k, num_groups)
    fp32 = scales.dtype == torch.float32
    if fp32 and gran_k == 128 and gran_mn in (1, 128) and (arch == 9 or keep_fp32):
        return to_mn_major(scales) if gran_mn == 1 else _check_dense(scales)
    if fp32 and gran_k in (32, 128) and arch == 10 and not keep_fp32:
        return pack_ue8m0(broadcast_rows(scales, mn, gran_mn), group_ends, group_alignment)
    if not fp32 and gran_mn == 1 and gran_k in (32, 128) and arch == 10:
        if not is_mn_major(scales):
            aligned = tma_aligned_size(mn, 4)
            fail_value(
                "scales.stride()", scales.stride(), f"must be MN-major with a K stride of {aligned}", "Use pack_ue8m0."
            )
        return scales
    fail_value(
        "granularity",
        granularity,
        f"has no kernel for {scales.dtype} scales on architecture {arch}"
        + (" without the cast to UE8M0" if keep_fp32 else ""),
        "See the table of to_required_layout.",
    )


def _check_dense(scales: torch.Tensor) -> torch.Tensor:
    """``scales`` are dense, as they are or with their last two dimensions swapped, also from group to group."""
    rows, cols = scales.shape[-2:]
    fits = scales.stride()[-2:] in ((cols, 1), (1, rows))
    if not fits or (scales.dim() == 3 and scales.stride(0) != rows * cols):
        fail_value(
            "scales.stride()", scales.stride(), f"must be dense for {list(scales.shape)}", "Call .contiguous() on them."
        )
    return scales
