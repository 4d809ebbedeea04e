"""GEMMs whose rows belong to experts: ``d``'s rows of expert j are ``a``'s times ``b[j]^T``.

Contiguous: ``a [P, K]``, ``d [P, N]``, and a layout that names the rows: the expert of each row, int32 ``[P]``, the
same in each block of 128 rows, -1 for padding at its end, which is multiplied like the block's other rows (blocks of
padding only are left out); or with ``use_psum_layout`` the end of each expert's rows, int32 ``[G]``, whose successor
starts at the next multiple of 128. Masked: ``a [G, M, K]``, ``d [G, M, N]`` and the number of rows of each expert,
int32 ``[G]``. Rows between psum groups and past the masked ones are neither read nor written. Operands and results that
are not dense are copied. ``compiled_dims`` and ``disable_ue8m0_cast`` change nothing.
"""

from __future__ import annotations

import torch

from megamoe.compat.deep_gemm.operands import (
    BF16,
    E4M3,
    FP32,
    INT32,
    WEIGHT_BLOCK,
    Recipe,
    Scaled,
    SideRecipe,
    check_k_major,
    check_matrices,
    check_output,
    check_pair,
    check_same_k,
    dense_result,
    is_k_major,
    nothing_to_multiply,
    scaled_operand,
    side_recipes,
)
from megamoe.errors import check_int, check_tensor, fail_value
from megamoe.kernels import gemm
from megamoe.kernels.row_groups import RowGroups
from megamoe.types import Fp8Tensor

# ---------------------------------------------------------------- arguments


def _check_index(argument: str, index: torch.Tensor, size: int, device: torch.device) -> None:
    check_tensor(argument, index, (size,), (INT32,), device)
    if not index.is_contiguous():
        fail_value(f"{argument}.stride()", index.stride(), "must be dense", "Call .contiguous().")


def _contiguous_rows(
    grouped_layout: torch.Tensor, a: torch.Tensor, num_groups: int, psum: bool, expected_m: int | None
) -> RowGroups:
    if expected_m is not None:
        if not psum:
            fail_value("expected_m_for_psum_layout", expected_m, "needs use_psum_layout", "Set both, or drop it.")
        check_int("expected_m_for_psum_layout", expected_m, 1)
    _check_index("grouped_layout", grouped_layout, num_groups if psum else a.shape[0], a.device)
    return RowGroups.psum(grouped_layout, expected_m) if psum else RowGroups.contiguous(grouped_layout)


def _masked_rows(masked_m: torch.Tensor, num_groups: int, expected_m: int, device: torch.device) -> RowGroups:
    check_int("expected_m", expected_m, 1)
    _check_index("masked_m", masked_m, num_groups, device)
    return RowGroups.masked(masked_m, expected_m)


def _check_groups(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.dim() == 3 and a.shape[0] != b.shape[0]:
        fail_value("b.shape", list(b.shape), f"must have {a.shape[0]} groups as a", "Pass one matrix per group.")
    check_same_k(a, b)


def _scaled_operands(
    a: Scaled, b: Scaled, d: torch.Tensor, dims: int, recipe: Recipe, recipe_a: SideRecipe, recipe_b: SideRecipe
) -> tuple[Fp8Tensor, Fp8Tensor]:
    """Checked operands; ``a`` of ``dims`` dimensions, ``b`` of 3."""
    (a_codes, a_sf), (b_codes, b_sf) = check_pair("a", a), check_pair("b", b)
    for argument, codes, size in (("a[0]", a_codes, dims), ("b[0]", b_codes, 3)):
        check_matrices(argument, codes, size, (E4M3,), a_codes.device)
        check_k_major(argument, codes)
    _check_groups(a_codes, b_codes)
    check_output(d, (*a_codes.shape[:-1], b_codes.shape[1]), a_codes.device)
    block_a, block_b = side_recipes(recipe, recipe_a, recipe_b)
    if block_b != WEIGHT_BLOCK:
        fail_value("recipe of b", block_b, f"must be {WEIGHT_BLOCK} in grouped GEMMs", "Use per_block_cast_to_fp8.")
    return scaled_operand("a", a_codes, a_sf, block_a), scaled_operand("b", b_codes, b_sf, block_b)


def _check_bf16_operands(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, dims: int) -> None:
    check_matrices("a", a, dims, (BF16,))
    check_k_major("a", a)
    check_matrices("b", b, 3, (BF16,), a.device)
    _check_groups(a, b)
    check_output(d, (*a.shape[:-1], b.shape[1]), a.device)


# ---------------------------------------------------------------- FP8


def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    recipe: Recipe = None,
    recipe_a: SideRecipe = None,
    recipe_b: SideRecipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """Grouped GEMM of e4m3 ``a [P, K]`` and ``b [G, N, K]``, both K-major.

    Args:
        a: codes, fp32 scales ``[P, ceil(K / 128)]``, row-major or MN-major.
        b: codes, fp32 scales ``[G, ceil(N / 128), ceil(K / 128)]``.
        d: ``[P, N]``, bf16 or fp32, written in place.
        grouped_layout: see above.
        recipe, recipe_a, recipe_b: as for ``fp8_fp4_gemm_nt``, with 128x128 blocks of ``b``.
        ensure_zero_padding: changes nothing, as on Hopper there.
        expected_m_for_psum_layout: usual rows per group, a hint.

    Raises:
        MegaMoEError: a shape, dtype, stride, device or recipe does not fit.
    """
    a_operand, b_operand = _scaled_operands(a, b, d, 2, recipe, recipe_a, recipe_b)
    num_groups = b_operand.codes.shape[0]
    rows = _contiguous_rows(grouped_layout, a_operand.codes, num_groups, use_psum_layout, expected_m_for_psum_layout)
    if not nothing_to_multiply(d, a_operand.codes.shape[1], None):
        with dense_result(d) as out:
            gemm.grouped_fp8_gemm_nt(a_operand, b_operand, rows, out=out, out_dtype=d.dtype)


def m_grouped_fp8_fp4_gemm_nn_contiguous(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    recipe: Recipe = None,
    recipe_a: SideRecipe = None,
    recipe_b: SideRecipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
) -> None:
    """As ``m_grouped_fp8_fp4_gemm_nt_contiguous`` with codes and scales of ``b`` transposed, yet dense along K."""
    b_codes, b_sf = check_pair("b", b)
    check_matrices("b[0]", b_codes, 3, (E4M3,))
    check_matrices("b[1]", b_sf, 3, (FP32,))
    m_grouped_fp8_fp4_gemm_nt_contiguous(
        a,
        (b_codes.mT, b_sf.mT),
        d,
        grouped_layout,
        recipe,
        recipe_a,
        recipe_b,
        compiled_dims,
        disable_ue8m0_cast,
        use_psum_layout,
        ensure_zero_padding,
    )


def m_grouped_fp8_fp4_gemm_nt_masked(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: Recipe = None,
    recipe_a: SideRecipe = None,
    recipe_b: SideRecipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """Grouped GEMM of e4m3 ``a [G, M, K]`` and ``b [G, N, K]``, both K-major.

    Args:
        a: codes, fp32 scales ``[G, M, ceil(K / 128)]``, row-major or MN-major.
        b: codes, fp32 scales ``[G, ceil(N / 128), ceil(K / 128)]``.
        d: ``[G, M, N]``, bf16 or fp32; rows below ``masked_m`` are written in place.
        masked_m: int32 ``[G]``, rows of each group.
        expected_m: usual rows per group, a hint.
        recipe, recipe_a, recipe_b: as for ``fp8_fp4_gemm_nt``, with 128x128 blocks of ``b``.

    Raises:
        MegaMoEError: a shape, dtype, stride, device or recipe does not fit.
    """
    a_operand, b_operand = _scaled_operands(a, b, d, 3, recipe, recipe_a, recipe_b)
    rows = _masked_rows(masked_m, b_operand.codes.shape[0], expected_m, b_operand.codes.device)
    if not nothing_to_multiply(d, a_operand.codes.shape[2], None):
        with dense_result(d) as out:
            gemm.grouped_fp8_gemm_nt(a_operand, b_operand, rows, out=out, out_dtype=d.dtype)


# ---------------------------------------------------------------- BF16


def m_grouped_bf16_gemm_nt_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """Grouped GEMM of bf16 ``a [P, K]``, K-major, and ``b [G, N, K]``, dense along either dimension, into ``d [P, N]``.

    Args and errors as for ``m_grouped_fp8_fp4_gemm_nt_contiguous``.
    """
    _check_bf16_operands(a, b, d, 2)
    rows = _contiguous_rows(grouped_layout, a, b.shape[0], use_psum_layout, expected_m_for_psum_layout)
    if nothing_to_multiply(d, a.shape[1], None):
        return
    with dense_result(d) as out:
        if is_k_major(b):
            gemm.grouped_bf16_gemm_nt(a.contiguous(), b.contiguous(), rows, out=out, out_dtype=d.dtype)
        else:
            gemm.grouped_bf16_gemm_nn(a.contiguous(), b.mT.contiguous(), rows, out=out, out_dtype=d.dtype)


def m_grouped_bf16_gemm_nn_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
) -> None:
    """As ``m_grouped_bf16_gemm_nt_contiguous`` with ``b [G, K, N]``."""
    check_matrices("b", b, 3, (BF16,))
    m_grouped_bf16_gemm_nt_contiguous(a, b.mT, d, grouped_layout, compiled_dims, use_psum_layout, ensure_zero_padding)


def m_grouped_bf16_gemm_nt_masked(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    compiled_dims: str = "nk",
) -> None:
    """Grouped GEMM of bf16 ``a [G, M, K]`` and ``b [G, N, K]``, both K-major, into ``d [G, M, N]``.

    Args and errors as for ``m_grouped_fp8_fp4_gemm_nt_masked``.
    """
    _check_bf16_operands(a, b, d, 3)
    check_k_major("b", b)
    rows = _masked_rows(masked_m, b.shape[0], expected_m, a.device)
    if not nothing_to_multiply(d, a.shape[2], None):
        with dense_result(d) as out:
            gemm.grouped_bf16_gemm_nt(a.contiguous(), b.contiguous(), rows, out=out, out_dtype=d.dtype)
