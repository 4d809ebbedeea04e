"""GEMMs of torch, hence cuBLAS on a GPU, under the names of DeepGEMM's baselines. n and t as in ``dense``.

All write ``a b^T + c`` into ``d [M, N]``, bf16 or fp32. Operands are bf16, or e4m3 codes without scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megamoe.compat.deep_gemm.operands import (
    BF16,
    E4M3,
    FP32,
    check_addend,
    check_matrices,
    check_output,
    check_same_k,
    nothing_to_multiply,
)


@contextmanager
def _full_precision_reductions() -> Iterator[None]:
    """Partial sums of split-K stay in fp32."""
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction
    flags.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        flags.allow_bf16_reduced_precision_reduction = before


def _cuda_gemm(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: torch.Tensor | None) -> None:
    b = b.t()
    if a.dtype == E4M3:
        one = torch.ones((), dtype=FP32, device=a.device)
        product = torch._scaled_mm(a, b, one, one, out_dtype=d.dtype)
        d.copy_(product) if c is None else torch.add(product, c, out=d)
    elif c is None:
        torch.mm(a, b, out=d) if d.dtype == BF16 else torch.ops.aten.mm.dtype_out(a, b, FP32, out=d)
    elif d.dtype == BF16:
        torch.addmm(c, a, b, out=d)
    else:
        torch.ops.aten.addmm.dtype_out(c, a, b, FP32, out=d)


def cublaslt_gemm_nt(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: torch.Tensor | None = None) -> None:
    """``d = a b^T + c`` of ``a [M, K]`` and ``b [N, K]``, each dense along either dimension.

    Raises:
        MegaMoEError: a shape, dtype, stride or device does not fit.
    """
    check_matrices("a", a, 2, (BF16, E4M3))
    check_matrices("b", b, 2, (a.dtype,), a.device)
    check_same_k(a, b)
    check_output(d, (a.shape[0], b.shape[0]), a.device)
    check_addend(c, d)
    if nothing_to_multiply(d, a.shape[1], c):
        return
    if a.is_cuda:
        with _full_precision_reductions():
            _cuda_gemm(a, b, d, c)
    else:
        product = a.float() @ b.float().t()
        d.copy_(product if c is None else product + c)


def cublaslt_gemm_nn(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: torch.Tensor | None = None) -> None:
    """As ``cublaslt_gemm_nt`` with ``b [K, N]``."""
    check_matrices("b", b, 2, (BF16, E4M3))
    cublaslt_gemm_nt(a, b.t(), d, c)


def cublaslt_gemm_tn(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: torch.Tensor | None = None) -> None:
    """As ``cublaslt_gemm_nt`` with ``a [K, M]`` and ``b [K, N]``."""
    check_matrices("a", a, 2, (BF16, E4M3))
    check_matrices("b", b, 2, (BF16, E4M3))
    cublaslt_gemm_nt(a.t(), b.t(), d, c)


def cublaslt_gemm_tt(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: torch.Tensor | None = None) -> None:
    """As ``cublaslt_gemm_nt`` with ``a [K, M]``."""
    check_matrices("a", a, 2, (BF16, E4M3))
    cublaslt_gemm_nt(a.t(), b, d, c)
