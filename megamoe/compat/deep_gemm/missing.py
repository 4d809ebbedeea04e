"""DeepGEMM's public functions that megamoe has no kernel for: importable, and an error that names them when called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from megamoe.errors import fail_value

GEMMS = (
    "einsum",
    "fp8_einsum",
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_gemm_nt_skip_head_mid",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
    "k_grouped_fp8_gemm_tn_contiguous",
    "tf32_hc_prenorm_gemm",
)
MEGA = (
    "fp8_fp4_mega_moe",
    "mega_moe_pre_dispatch",
)
LEGACY = (
    "a_fused_k_grouped_bf16_gemm_tn_contiguous_tl",
    "a_fused_m_grouped_bf16_gemm_nn_contiguous_tl",
    "a_fused_m_grouped_bf16_gemm_nt_contiguous_tl",
    "b_fused_k_grouped_bf16_gemm_tn_contiguous_tl",
    "m_grouped_bf16_gemm_nn_contiguous_tl",
    "m_grouped_bf16_gemm_nt_contiguous_tl",
)


def missing(name: str, known: tuple[str, ...], module: str) -> Callable[..., NoReturn]:
    """What a module's ``__getattr__`` returns for ``name``.

    Raises:
        AttributeError: ``name`` is not one of ``known``.
    """
    if name not in known:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        fail_value("function", name, "has no kernel in megamoe", "Use DeepGEMM's own, or compute it with torch.")

    call.__name__ = call.__qualname__ = name
    return call
