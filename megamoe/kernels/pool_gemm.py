"""Grouped GEMMs and sums of the expert-sorted pool, by device: Hopper's kernels, torch's grouped GEMM or the reference.

Same results (up to the rounding of the output's dtype) as in ``megamoe.kernels.reference``. Only the reference waits
for the device.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from megamoe.kernels import gemm, gemm_k, gemm_ops, gemm_swiglu, main_grad, reference
from megamoe.kernels.layout import row_expert_ids
from megamoe.kernels.local_rows import group_ends
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


def fuses_activation(rows: torch.Tensor, up_proj: torch.Tensor, activation: str) -> bool:
    """Whether ``gemm_swiglu`` runs GEMM 1 of ``rows [P, H]`` and ``up_proj [e, 2 I, H]`` on the device."""
    fits = activation in gemm_swiglu.ACTIVATIONS and rows.dtype == torch.bfloat16 and gemm_ops.runs_kernels(rows)
    return fits and rows.shape[1] % 8 == 0 and up_proj.shape[1] % 16 == 0


def _k_kernels_have_it(a: torch.Tensor, b: torch.Tensor) -> bool:
    dtypes_fit = a.dtype == b.dtype == torch.bfloat16
    return dtypes_fit and gemm_ops.runs_kernels(a) and a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0


def rounds_results(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ``grouped_gemm_nt`` and ``_nn`` round to the operands' dtype; the reference leaves its results wide."""
    return _torch_has_it(a, b)


def grouped_gemm_nt(
    a: torch.Tensor, b: torch.Tensor, layout: ExpertLayout, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``[P, N]``: row p of expert j is ``a[p] @ b[j]^T``; ``a [P, K]``, ``b [e, N, K]``.

    Padding rows of ``a`` inside a group must be zero; those of the result hold zeros or, past the last group, anything.

    With ``bias [e, N]`` the result is fp32 (fp64 where ``a`` is), and its padding rows may hold anything finite.
    """
    if bias is not None:
        return _grouped_gemm_nt_with_bias(a, b, layout, bias)
    if _kernels_have_it(a, b):
        return gemm.grouped_bf16_gemm_nt(a.contiguous(), b.contiguous(), RowGroups.padded(layout))
    if _torch_has_it(a, b):
        return F.grouped_mm(a, b.transpose(1, 2), offs=group_ends(layout, padded=True))
    return reference.grouped_gemm_nt(a, b, layout)


def _grouped_gemm_nt_with_bias(
    a: torch.Tensor, b: torch.Tensor, layout: ExpertLayout, bias: torch.Tensor
) -> torch.Tensor:
    if _kernels_have_it(a, b):
        bias = (bias if bias.dtype == torch.bfloat16 else bias.float()).contiguous()
        operands = a.contiguous(), b.contiguous(), RowGroups.padded(layout)
        return gemm.grouped_bf16_gemm_nt(*operands, out_dtype=torch.float32, bias=bias)
    out = grouped_gemm_nt(a, b, layout)
    dtype = reference.accumulation_dtype(a)
    return out.to(dtype) + reference.permute(bias.to(dtype), row_expert_ids(layout))


def grouped_gemm_nn(a: torch.Tensor, b: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """``[P, N]``: row p of expert j is ``a[p] @ b[j]``; ``a [P, K]``, ``b [e, K, N]``. Padding as above."""
    if _kernels_have_it(a, b):
        return gemm.grouped_bf16_gemm_nn(a.contiguous(), b.contiguous(), RowGroups.padded(layout))
    if _torch_has_it(a, b):
        return F.grouped_mm(a, b, offs=group_ends(layout, padded=True))
    return reference.grouped_gemm_nn(a, b, layout)


def row_ends(layout: ExpertLayout) -> RowGroups:
    """Each expert's rows without padding."""
    return RowGroups.psum(group_ends(layout, padded=False))


def grouped_gemm_k(
    a: torch.Tensor, b: torch.Tensor, layout: ExpertLayout, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``[e, M, N]``: ``a[rows of j]^T @ b[rows of j]``; ``a [P, M]``, ``b [P, N]``. Zero where j has no rows.

    ``out_dtype``: None for that of the sums, whichever it is.
    """
    if _k_kernels_have_it(a, b):
        dtype = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
        out = gemm_k.k_grouped_bf16_gemm_tn(a.contiguous(), b.contiguous(), row_ends(layout), out_dtype=dtype)
    elif _torch_has_it(a, b):
        out = F.grouped_mm(a.t(), b, offs=group_ends(layout, padded=True))
        # Not every architecture writes the slab of an empty group.
        out.masked_fill_((layout.counts == 0).view(-1, 1, 1), 0)
    else:
        out = reference.grouped_gemm_k(a, b, layout)
    return out if out_dtype is None else out.to(out_dtype)


def add_grouped_gemm_k(
    total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, layout: ExpertLayout, scale: float
) -> None:
    """Adds ``scale`` x ``grouped_gemm_k`` to the fp32 ``total [e, M, N]``, without a temporary where a kernel can."""
    # A power of two costs no bit of an operand.
    scalable = math.frexp(scale)[0] == 0.5
    if scalable and _k_kernels_have_it(a, b) and main_grad.can_be_written(total):
        b = b.contiguous() if scale == 1 else (b * scale).contiguous()
        gemm_k.k_grouped_bf16_gemm_tn(a.contiguous(), b, row_ends(layout), out=total, c=total)
    else:
        total.add_(grouped_gemm_k(a, b, layout), alpha=scale)


def segment_sum(rows: torch.Tensor, layout: ExpertLayout, weights: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 ``[e, N]``: the sum of each expert's rows of ``rows [P, N]`` (x ``weights [P]``), in fp64 where they are.

    Rows of no expert may hold anything.
    """
    if not rows.is_cuda:
        if weights is not None:
            dtype = reference.accumulation_dtype(rows, weights)
            rows = rows.to(dtype) * weights.to(dtype).unsqueeze(1)
        return reference.segment_sum(rows, layout)
    from megamoe.kernels import triton_segments

    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    dtype = reference.accumulation_dtype(rows)
    return triton_segments.segment_sums(rows, layout.starts, layout.counts, dtype, weights)


def row_dots(rows: torch.Tensor, vectors: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """fp32 ``[P]``: each row of ``rows [P, N]`` times its expert's of ``vectors [e, N]``, in fp64 where rows are.

    Rows of no expert get anything.
    """
    ids, dtype = row_expert_ids(layout), reference.accumulation_dtype(rows)
    if not rows.is_cuda:
        return (rows.to(dtype) * reference.permute(vectors.to(dtype), ids)).sum(dim=1)
    from megamoe.kernels import triton_segments

    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    return triton_segments.row_dots(rows, vectors.contiguous(), ids, dtype)
