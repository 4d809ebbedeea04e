"""GEMMs of two matrices. In a name, n and t say how a and b are stored: nt is ``a [M, K]``, ``b [N, K]``.

All write ``a b^T + c`` into ``d [M, N]``, bf16 or fp32, with fp32 accumulation; ``c`` is like ``d``, may be ``d``, and
is zero by default. M = 0 writes nothing, K = 0 writes ``c``. Operands and results that are not dense are copied.
``compiled_dims`` and ``disable_ue8m0_cast`` change nothing.
"""

from __future__ import annotations

import torch

from megamoe.compat.deep_gemm.operands import (
    BF16,
    E4M3,
    FP32,
    WEIGHT_BLOCK,
    Recipe,
    Scaled,
    SideRecipe,
    check_addend,
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
from megamoe.errors import fail_type
from megamoe.kernels import gemm
from megamoe.kernels.quant import dequantize

# ---------------------------------------------------------------- FP8


def fp8_fp4_gemm_nt(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: SideRecipe = None,
    recipe_b: SideRecipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """``d = a b^T + c`` of e4m3 matrices ``a [M, K]`` and ``b [N, K]``, both K-major.

    Args:
        a: codes, fp32 scales ``[M, ceil(K / 128)]``, row-major or MN-major.
        b: codes, fp32 scales ``[ceil(N / 128), ceil(K / 128)]``, or ``[N, ceil(K / 128)]`` with a recipe of 1x128.
        c: with an fp32 ``d`` only.
        recipe: (1, 128, 128) by default, or (1, 1, 128).
        recipe_a, recipe_b: the same by sides: (1, 128), and (128, 128) or (1, 128).

    Raises:
        MegaMoEError: a shape, dtype, stride, device or recipe does not fit.
    """
    (a_codes, a_sf), (b_codes, b_sf) = check_pair("a", a), check_pair("b", b)
    for argument, codes in (("a[0]", a_codes), ("b[0]", b_codes)):
        check_matrices(argument, codes, 2, (E4M3,), a_codes.device)
        check_k_major(argument, codes)
    check_same_k(a_codes, b_codes)
    check_output(d, (a_codes.shape[0], b_codes.shape[0]), a_codes.device)
    check_addend(c, d)
    if c is not None and d.dtype != FP32:
        fail_type("d.dtype", d.dtype, f"must be {FP32} together with c in FP8 GEMMs", "Pass an fp32 d and c.")
    block_a, block_b = side_recipes(recipe, recipe_a, recipe_b)
    if nothing_to_multiply(d, a_codes.shape[1], c):
        return
    a_operand = scaled_operand("a", a_codes, a_sf, block_a)
    b_operand = scaled_operand("b", b_codes, b_sf, block_b)
    c = None if c is None else c.contiguous()
    with dense_result(d) as out:
        if block_b == WEIGHT_BLOCK:
            gemm.fp8_gemm_nt(a_operand, b_operand, out=out, out_dtype=d.dtype, c=c)
        else:
            # No FP8 kernel scales both sides by rows. BF16 keeps 5 bits more than the codes have.
            a_bf16, b_bf16 = dequantize(a_operand).to(BF16), dequantize(b_operand).to(BF16)
            gemm.bf16_gemm_nt(a_bf16, b_bf16, out=out, out_dtype=d.dtype, c=c)


def _transposed(argument: str, pair: Scaled) -> Scaled:
    codes, sf = check_pair(argument, pair)
    check_matrices(f"{argument}[0]", codes, 2, (E4M3,))
    check_matrices(f"{argument}[1]", sf, 2, (FP32,))
    return codes.t(), sf.t()


def fp8_fp4_gemm_nn(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: SideRecipe = None,
    recipe_b: SideRecipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """As ``fp8_fp4_gemm_nt`` with codes and scales of ``b`` transposed: ``[K, N]``, yet dense along K."""
    fp8_fp4_gemm_nt(a, _transposed("b", b), d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)


def fp8_fp4_gemm_tn(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: SideRecipe = None,
    recipe_b: SideRecipe = None,
    compiled_dims: str = "mn",
    disable_ue8m0_cast: bool = False,
) -> None:
    """As ``fp8_fp4_gemm_nt`` with ``a [K, M]`` and ``b [K, N]``, their scales alike, yet dense along K."""
    a, b = _transposed("a", a), _transposed("b", b)
    fp8_fp4_gemm_nt(a, b, d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)


def fp8_fp4_gemm_tt(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: SideRecipe = None,
    recipe_b: SideRecipe = None,
    compiled_dims: str = "mn",
    disable_ue8m0_cast: bool = False,
) -> None:
    """As ``fp8_fp4_gemm_nt`` with codes and scales of ``a`` transposed: ``[K, M]``, yet dense along K."""
    fp8_fp4_gemm_nt(_transposed("a", a), b, d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)


# ---------------------------------------------------------------- BF16


def bf16_gemm_nt(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: torch.Tensor | None = None, compiled_dims: str = "nk"
) -> None:
    """``d = a b^T + c`` of bf16 matrices ``a [M, K]`` and ``b [N, K]``, each dense along either dimension.

    Raises:
        MegaMoEError: a shape, dtype, stride or device does not fit.
    """
    check_matrices("a", a, 2, (BF16,))
    check_matrices("b", b, 2, (BF16,), a.device)
    check_same_k(a, b)
    check_output(d, (a.shape[0], b.shape[0]), a.device)
    check_addend(c, d)
    if nothing_to_multiply(d, a.shape[1], c):
        return
    c = None if c is None else c.contiguous()
    with dense_result(d) as out:
        # The kernels read a along K only.
        if is_k_major(b):
            gemm.bf16_gemm_nt(a.contiguous(), b.contiguous(), out=out, out_dtype=d.dtype, c=c)
        else:
            gemm.bf16_gemm_nn(a.contiguous(), b.t().contiguous(), out=out, out_dtype=d.dtype, c=c)


def bf16_gemm_nn(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: torch.Tensor | None = None, compiled_dims: str = "nk"
) -> None:
    """As ``bf16_gemm_nt`` with ``b [K, N]``."""
    check_matrices("b", b, 2, (BF16,))
    bf16_gemm_nt(a, b.t(), d, c, compiled_dims)


def bf16_gemm_tn(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: torch.Tensor | None = None, compiled_dims: str = "mn"
) -> None:
    """As ``bf16_gemm_nt`` with ``a [K, M]`` and ``b [K, N]``."""
    check_matrices("a", a, 2, (BF16,))
    check_matrices("b", b, 2, (BF16,))
    bf16_gemm_nt(a.t(), b.t(), d, c, compiled_dims)


def bf16_gemm_tt(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: torch.Tensor | None = None, compiled_dims: str = "mn"
) -> None:
    """As ``bf16_gemm_nt`` with ``a [K, M]``."""
    check_matrices("a", a, 2, (BF16,))
    bf16_gemm_nt(a.t(), b, d, c, compiled_dims)
