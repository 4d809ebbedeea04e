"""DeepGEMM's names on megamoe's kernels, as of DeepGEMM 2.6.1 on Hopper: GEMMs, casts, scale layouts, mega-MoE.

``import megamoe.compat.deep_gemm as deep_gemm``, or ``python -m megamoe.compat.deep_gemm SCRIPT ...`` for a script that
has ``import deep_gemm``. Casts and layouts have the same bits, shapes and strides for finite inputs. GEMMs write into
their argument ``d`` in place; kernels run on Hopper GPUs, plain torch elsewhere. Tensors on a CPU are treated as for
Hopper (architecture 9). Bad arguments raise ``MegaMoEError``, and so does the call of a function that megamoe does not
have.
"""

from __future__ import annotations

from collections.abc import Callable

from megamoe.compat.deep_gemm import legacy, mega, testing, utils
from megamoe.compat.deep_gemm.cublas import cublaslt_gemm_nn, cublaslt_gemm_nt, cublaslt_gemm_tn, cublaslt_gemm_tt
from megamoe.compat.deep_gemm.dense import (
    bf16_gemm_nn,
    bf16_gemm_nt,
    bf16_gemm_tn,
    bf16_gemm_tt,
    fp8_fp4_gemm_nn,
    fp8_fp4_gemm_nt,
    fp8_fp4_gemm_tn,
    fp8_fp4_gemm_tt,
)
from megamoe.compat.deep_gemm.grouped import (
    m_grouped_bf16_gemm_nn_contiguous,
    m_grouped_bf16_gemm_nt_contiguous,
    m_grouped_bf16_gemm_nt_masked,
    m_grouped_fp8_fp4_gemm_nn_contiguous,
    m_grouped_fp8_fp4_gemm_nt_contiguous,
    m_grouped_fp8_fp4_gemm_nt_masked,
)
from megamoe.compat.deep_gemm.k_grouped import k_grouped_bf16_gemm_tn_contiguous, k_grouped_fp8_gemm_nt_contiguous
from megamoe.compat.deep_gemm.mega import (
    SM90SymmBuffer,
    SymmBuffer,
    bf16_mega_moe,
    fp8_mega_moe,
    get_symm_buffer_for_mega_moe,
    get_symm_buffer_for_sm90_mega_moe,
    mega_moe_pre_dispatch_sm90,
    transform_weights_for_mega_moe,
    transform_weights_for_mega_moe_sm90,
)
from megamoe.compat.deep_gemm.missing import GEMMS, MEGA, missing
from megamoe.compat.deep_gemm.runtime import (
    get_num_sms,
    get_pdl,
    get_tc_util,
    set_block_size_multiple_of,
    set_ignore_compile_dims,
    set_num_sms,
    set_pdl,
    set_tc_util,
)
from megamoe.compat.deep_gemm.utils import (
    align,
    cast_back_from_fp4,
    ceil_div,
    ceil_to_ue8m0,
    get_k_alignment_for_contiguous_layout,
    get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_m_alignment_for_contiguous_layout,
    get_mk_alignment_for_contiguous_layout,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_tensor,
    get_theoretical_mk_alignment_for_contiguous_layout,
    get_tma_aligned_size,
    init_dist,
    pack_ue8m0_to_int,
    per_block_cast_to_fp8,
    per_channel_cast_to_fp8,
    per_custom_dims_cast_to_fp8,
    per_token_cast_to_fp4,
    per_token_cast_to_fp8,
    set_mk_alignment_for_contiguous_layout,
    transpose_packed_fp4,
    uneven_all_gather,
    unpack_ue8m0_from_int,
)
from megamoe.compat.deep_gemm.utils.layout import transform_sf_into_required_layout

# Older and other names of the same functions.
fp8_gemm_nt, fp8_gemm_nn, fp8_gemm_tn, fp8_gemm_tt = fp8_fp4_gemm_nt, fp8_fp4_gemm_nn, fp8_fp4_gemm_tn, fp8_fp4_gemm_tt
m_grouped_fp8_gemm_nt_contiguous = m_grouped_fp8_fp4_gemm_nt_contiguous
m_grouped_fp8_gemm_nn_contiguous = m_grouped_fp8_fp4_gemm_nn_contiguous
m_grouped_fp8_gemm_nt_masked = fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_fp4_gemm_nt_masked
bf16_m_grouped_gemm_nt_masked = m_grouped_bf16_gemm_nt_masked

__all__ = [
    "SM90SymmBuffer",
    "SymmBuffer",
    "align",
    "bf16_gemm_nn",
    "bf16_gemm_nt",
    "bf16_gemm_tn",
    "bf16_gemm_tt",
    "bf16_m_grouped_gemm_nt_masked",
    "bf16_mega_moe",
    "cast_back_from_fp4",
    "ceil_div",
    "ceil_to_ue8m0",
    "cublaslt_gemm_nn",
    "cublaslt_gemm_nt",
    "cublaslt_gemm_tn",
    "cublaslt_gemm_tt",
    "fp8_fp4_gemm_nn",
    "fp8_fp4_gemm_nt",
    "fp8_fp4_gemm_tn",
    "fp8_fp4_gemm_tt",
    "fp8_gemm_nn",
    "fp8_gemm_nt",
    "fp8_gemm_tn",
    "fp8_gemm_tt",
    "fp8_m_grouped_gemm_nt_masked",
    "fp8_mega_moe",
    "get_k_alignment_for_contiguous_layout",
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mn_major_tma_aligned_tensor",
    "get_num_sms",
    "get_pdl",
    "get_symm_buffer_for_mega_moe",
    "get_symm_buffer_for_sm90_mega_moe",
    "get_tc_util",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "init_dist",
    "k_grouped_bf16_gemm_tn_contiguous",
    "k_grouped_fp8_gemm_nt_contiguous",
    "legacy",
    "m_grouped_bf16_gemm_nn_contiguous",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_fp8_fp4_gemm_nn_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_masked",
    "m_grouped_fp8_gemm_nn_contiguous",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "mega",
    "mega_moe_pre_dispatch_sm90",
    "pack_ue8m0_to_int",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_custom_dims_cast_to_fp8",
    "per_token_cast_to_fp4",
    "per_token_cast_to_fp8",
    "set_block_size_multiple_of",
    "set_ignore_compile_dims",
    "set_mk_alignment_for_contiguous_layout",
    "set_num_sms",
    "set_pdl",
    "set_tc_util",
    "testing",
    "transform_sf_into_required_layout",
    "transform_weights_for_mega_moe",
    "transform_weights_for_mega_moe_sm90",
    "transpose_packed_fp4",
    "uneven_all_gather",
    "unpack_ue8m0_from_int",
    "utils",
]


def __getattr__(name: str) -> Callable:
    return missing(name, GEMMS + MEGA, __name__)
