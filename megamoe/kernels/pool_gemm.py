"""Grouped GEMMs of the expert-sorted pool, by device: Hopper's kernels, torch's grouped GEMM or the reference.

Same signatures and results (up to the rounding of the output's dtype) as in ``megamoe.kernels.reference``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megamoe.kernels import gemm, gemm_ops, reference
from megamoe.kernels.layout import ALIGN
from megamoe.kernels.row_groups import RowGroups
from megamoe.types import ExpertLayout


def _torch_has_it(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ``torch.nn.functional.grouped_mm`` runs on the device: BF16, CUDA, rows of a multiple of 16 bytes."""
    # On a CPU it is a loop over experts too, without the skipping of padding rows.
    if a.device.type != "cuda" or not hasattr(F, "grouped_mm"):
        return False
    dtypes_fit = a.dtype == torch.bfloat16 and b.dtype == torch.bfloat16
    return dtypes_fit and all(size % 8 == 0 for size in (a.shape[-1], *b.shape[-2:]))


def _kernels_have_it(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype == torch.bfloat16 and gemm_ops.runs_kernels(a) and _torch_has_it(a, b)


def rounds_results(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ``grouped_gemm_nt`` and ``_nn`` round to the operands' dtype; the reference leaves its results wide."""
    return _torch_has_it(a, b)


def _group_ends(layout: ExpertLayout) -> torch.Tensor:
    return (layout.starts + (layout.counts + ALIGN - 1) // ALIGN * ALIGN).to(torch.int32)


def grouped_gemm_nt(a: torch.Tensor, b: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """``[P, N]``: row p of expert j is ``a[p] @ b[j]^T``; ``a [P, K]``, ``b [e, N, K]``.

    Padding rows of ``a`` inside a group must be zero; those of the result hold zeros or, past the last group, anything.
    """
    if _kernels_have_it(a, b):
        return gemm.grouped_bf16_gemm_nt(a.contiguous(), b.contiguous(), RowGroups.padded(layout))
    if _torch_has_it(a, b):
        return F.grouped_mm(a, b.transpose(1, 2), offs=_group_ends(layout))
    return reference.grouped_gemm_nt(a, b, layout)


def grouped_gemm_nn(a: torch.Tensor, b: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """``[P, N]``: row p of expert j is ``a[p] @ b[j]``; ``a [P, K]``, ``b [e, K, N]``. Padding as above."""
    if _kernels_have_it(a, b):
        return gemm.grouped_bf16_gemm_nn(a.contiguous(), b.contiguous(), RowGroups.padded(layout))
    if _torch_has_it(a, b):
        return F.grouped_mm(a, b, offs=_group_ends(layout))
    return reference.grouped_gemm_nn(a, b, layout)


def grouped_gemm_k(a: torch.Tensor, b: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """``[e, M, N]``: ``a[rows of j]^T @ b[rows of j]``; ``a [P, M]``, ``b [P, N]``. Zero where j has no rows."""
    if _torch_has_it(a, b):
        out = F.grouped_mm(a.t(), b, offs=_group_ends(layout))
        # Not every architecture writes the slab of an empty group.
        return out.masked_fill_((layout.counts == 0).view(-1, 1, 1), 0)
    return reference.grouped_gemm_k(a, b, layout)
