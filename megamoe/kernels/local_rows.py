"""Rows that stay on their device: the layout of a routing and the movements of rows, by device.

On GPUs one or two launches of ``triton_local`` each, elsewhere ``layout`` and ``reference``: the same results, but that
pools on CPUs have just the rows they need. Nothing here waits for a GPU.
"""

from __future__ import annotations

import torch

from megamoe.kernels import reference
from megamoe.kernels.layout import ALIGN, invert_rows, layout_pairs, max_pool_rows
from megamoe.kernels.scales import to_mn_major
from megamoe.types import ExpertLayout, Fp8Tensor

MOST_EXPERTS = 1024
"""For how many the layout has kernels: their tables of counts lie in registers."""


def layout_both_ways(expert_ids: torch.Tensor, num_experts: int) -> tuple[ExpertLayout, torch.Tensor, torch.Tensor]:
    """``layout_pairs`` and ``invert_rows``: the layout, the row of each pair and the pair of each row.

    Args:
        expert_ids: int32 or int64 ``[N]``; ids outside ``[0, num_experts)`` get no row.
    """
    if not expert_ids.is_cuda or num_experts > MOST_EXPERTS:
        layout, pair_to_row = layout_pairs(expert_ids, num_experts)
        return layout, pair_to_row, invert_rows(pair_to_row, layout.num_rows)
    from megamoe.kernels import triton_local

    num_rows = max_pool_rows(expert_ids.numel(), num_experts)
    counts, starts, *maps = triton_local.layout_pairs(expert_ids.contiguous(), num_experts, num_rows)
    return ExpertLayout(counts, starts, num_rows), *maps


def group_ends(layout: ExpertLayout, padded: bool) -> torch.Tensor:
    """int32 ``[e]``: one past each expert's last row, or with ``padded`` past its padding."""
    counts, starts = layout.counts, layout.starts
    if not counts.is_cuda:
        rows = (counts + ALIGN - 1) // ALIGN * ALIGN if padded else counts
        return (starts + rows).to(torch.int32)
    from megamoe.kernels import triton_local

    return triton_local.group_ends(counts.contiguous(), starts.contiguous(), padded)


def send_rows(tokens: torch.Tensor, slot_to_row: torch.Tensor, row_to_slot: torch.Tensor) -> torch.Tensor:
    """``[P, H]``: each token of ``[T, H]`` in all its rows; padding rows are zero.

    Args:
        slot_to_row: int64 ``[T, K]``, -1 = no row.
        row_to_slot: int64 ``[P]``, t * K + k, -1 = padding; the inverse.
    """
    if not tokens.is_cuda:
        # Floor division keeps -1 at -1.
        return reference.permute(tokens, row_to_slot.div(slot_to_row.shape[1], rounding_mode="floor"))
    from megamoe.kernels import triton_local

    return triton_local.send_rows(_with_dense_rows(tokens), slot_to_row.contiguous(), row_to_slot.contiguous())


def send_codes(tokens: Fp8Tensor, slot_to_row: torch.Tensor, row_to_slot: torch.Tensor) -> Fp8Tensor:
    """``send_rows`` of codes and their scales, which become MN-major; padding rows have code and scale zero.

    Args:
        tokens: ``[T, H]`` in 1x128 blocks.
    """
    # As bytes: torch does not index e4m3.
    codes = send_rows(tokens.codes.view(torch.uint8), slot_to_row, row_to_slot).view(torch.float8_e4m3fn)
    if not tokens.codes.is_cuda:
        token = row_to_slot.div(slot_to_row.shape[1], rounding_mode="floor")
        return Fp8Tensor(codes, to_mn_major(reference.permute(tokens.scales, token)), tokens.block)
    from megamoe.kernels import triton_local

    scales = triton_local.send_scales(tokens.scales.contiguous(), row_to_slot.contiguous(), slot_to_row.shape[1])
    return Fp8Tensor(codes, scales, tokens.block)


def permute(values: torch.Tensor, row_to_source: torch.Tensor) -> torch.Tensor:
    """``reference.permute`` of ``values`` ``[N]`` or ``[N, H]``."""
    if not values.is_cuda:
        return reference.permute(values, row_to_source)
    from megamoe.kernels import triton_local

    if values.dim() == 1:
        return triton_local.gather_values(values.contiguous(), row_to_source.contiguous())
    return triton_local.gather_rows(_with_dense_rows(values), row_to_source.contiguous())


def combine_slots(rows: torch.Tensor, slot_to_row: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """``reference.combine_slots``."""
    if not rows.is_cuda:
        return reference.combine_slots(rows, slot_to_row, out_dtype)
    from megamoe.kernels import triton_local

    return triton_local.sum_slots(_with_dense_rows(rows), slot_to_row.contiguous(), out_dtype)


def _with_dense_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
