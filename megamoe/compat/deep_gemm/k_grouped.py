"""GEMMs that sum over the rows of experts, weight gradients: ``d[j] = a_j^T b_j + c[j]`` over the K of expert j.

``d`` is ``[G, M, N]``, fp32 or bf16; ``c`` is like ``d``, may be ``d``, and is zero by default. An expert with K = 0
gives ``c[j]``. ``ks_cpu`` lists each expert's K, a multiple of 128; ``grouped_layout``, int32 ``[G]``, holds the same
on the device, or with ``use_psum_layout`` the end of each expert's K: its successor starts at the next multiple of 128.
Results that are not dense are copied. ``compiled_dims`` changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megamoe.compat.deep_gemm.operands import (
    BF16,
    E4M3,
    FP32,
    INT32,
    Scaled,
    check_addend,
    check_output,
    check_pair,
    dense_result,
)
from megamoe.errors import check_int, check_tensor, fail_value
from megamoe.kernels import gemm_k
from megamoe.kernels.layout import ALIGN
from megamoe.kernels.row_groups import RowGroups
from megamoe.types import Fp8Tensor

K_RECIPE = (1, 1, 128)


def _check_ks(ks_cpu: Sequence[int], num_groups: int, k: int) -> None:
    for index, size in enumerate(ks_cpu):
        check_int(f"ks_cpu[{index}]", size, 0)
        if size % ALIGN:
            fail_value(f"ks_cpu[{index}]", size, f"must be a multiple of {ALIGN}", "Pad the expert's rows with zeros.")
    if len(ks_cpu) != num_groups:
        fail_value("len(ks_cpu)", len(ks_cpu), f"must be {num_groups}, the groups of d", "List the K of each expert.")
    if sum(ks_cpu) != k:
        fail_value("sum(ks_cpu)", sum(ks_cpu), f"must be {k}, the K of a", "List the K of each expert.")


def _rows(
    ks_cpu: Sequence[int] | None,
    grouped_layout: torch.Tensor,
    num_groups: int,
    k: int,
    psum: bool,
    device: torch.device,
) -> RowGroups:
    check_tensor("grouped_layout", grouped_layout, (num_groups,), (INT32,), device)
    if psum:
        return RowGroups.psum(grouped_layout.contiguous())
    # None, or nothing: they are read on the device only.
    if ks_cpu:
        _check_ks(ks_cpu, num_groups, k)
    return RowGroups.psum(grouped_layout.cumsum(0, dtype=INT32))


def _accumulator(c: torch.Tensor | None, d: torch.Tensor, out: torch.Tensor) -> torch.Tensor | None:
    """``c`` dense; ``out``, which holds ``d``'s values, where it is ``d``."""
    if c is None:
        return None
    return out if c.data_ptr() == d.data_ptr() else c.contiguous()


def k_grouped_bf16_gemm_tn_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    ks_cpu: Sequence[int] | None,
    grouped_layout: torch.Tensor,
    c: torch.Tensor | None = None,
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
) -> None:
    """Weight gradients of bf16 ``a [sum of K, M]`` and ``b [sum of K, N]``, both row-major.

    Args:
        ks_cpu: may be None, or empty: the kernel reads ``grouped_layout``.

    Raises:
        MegaMoEError: a shape, dtype, stride, device or K does not fit.
    """
    check_tensor("a", a, (None, None), (BF16,))
    check_tensor("b", b, (a.shape[0], None), (BF16,), a.device)
    check_tensor("d", d, (None, a.shape[1], b.shape[1]))
    check_output(d, d.shape, a.device)
    check_addend(c, d)
    rows = _rows(ks_cpu, grouped_layout, d.shape[0], a.shape[0], use_psum_layout, a.device)
    with dense_result(d) as out:
        addend = _accumulator(c, d, out)
        gemm_k.k_grouped_bf16_gemm_tn(a.contiguous(), b.contiguous(), rows, out=out, c=addend)


def _joined(argument: str, pair: Scaled, columns: int, ks: Sequence[int]) -> Fp8Tensor:
    """``[K, columns]``, dense along K, of the experts' matrices ``[columns, k]`` one after another."""
    codes, sf = pair
    k = sum(ks)
    check_tensor(f"{argument}[0]", codes, (columns * k,), (E4M3,))
    check_tensor(f"{argument}[1]", sf, (columns, k // ALIGN), (FP32,), codes.device)
    parts = codes.contiguous().split([columns * size for size in ks if size])
    matrices = [part.view(columns, -1) for part in parts]
    # One row pitch for all experts: their K differ, and with it the pitch they come with.
    joined = matrices[0] if len(matrices) == 1 else torch.cat([codes.new_empty(columns, 0), *matrices], dim=1)
    return Fp8Tensor(joined.t(), sf.t().contiguous(), (ALIGN, 1))


def k_grouped_fp8_gemm_nt_contiguous(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    ks_cpu: Sequence[int],
    grouped_layout: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: tuple[int, int, int] = K_RECIPE,
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
) -> None:
    """Weight gradients of e4m3 ``a`` and ``b``, dense along K. With several experts both are copied once.

    Args:
        a: codes, one-dimensional: each expert's ``[M, K of expert]`` after the one before; fp32 scales
            ``[M, sum of K / 128]`` with any strides.
        b: the same with N rows.
        ks_cpu: each expert's K on the host.
        recipe: (1, 1, 128).
        use_psum_layout: False.

    Raises:
        MegaMoEError: a shape, dtype, stride, device, K or recipe does not fit.
    """
    a, b = check_pair("a", a), check_pair("b", b)
    check_tensor("d", d, (None, None, None))
    check_output(d, d.shape, a[0].device)
    check_addend(c, d)
    if use_psum_layout:
        fail_value("use_psum_layout", use_psum_layout, "must be False with K-major operands", "Pass each expert's K.")
    if tuple(recipe) != K_RECIPE:
        fail_value("recipe", tuple(recipe), f"must be {K_RECIPE} on Hopper", "Cast with per_channel_cast_to_fp8.")
    if ks_cpu is None:
        fail_value("ks_cpu", ks_cpu, "must list each expert's K with K-major operands", "Pass it beside its tensor.")
    num_groups, m, n = d.shape
    _check_ks(ks_cpu, num_groups, sum(ks_cpu))
    operands = _joined("a", a, m, ks_cpu), _joined("b", b, n, ks_cpu)
    rows = _rows(None, grouped_layout, num_groups, sum(ks_cpu), False, a[0].device)
    with dense_result(d) as out:
        gemm_k.k_grouped_fp8_gemm_tn(*operands, rows, out=out, c=_accumulator(c, d, out))
