"""DeepGEMM's names: signatures of GEMMs, aliases, functions that are not here, process-wide settings."""

from __future__ import annotations

import inspect

import pytest
import torch

import megamoe.compat.deep_gemm as deep_gemm
from tests.support.errors import fails

DENSE_FP8 = "a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims='{}', disable_ue8m0_cast=False"
DENSE_BF16 = "a, b, d, c=None, compiled_dims='{}'"
GROUPED_FP8 = (
    "a, b, d, grouped_layout, recipe=None, recipe_a=None, recipe_b=None, compiled_dims='nk', disable_ue8m0_cast=False, "
    "use_psum_layout=False, ensure_zero_padding=True"
)
GROUPED_BF16 = "a, b, d, grouped_layout, compiled_dims='nk', use_psum_layout=False, ensure_zero_padding=True"
SIGNATURES = {
    "fp8_fp4_gemm_nt": DENSE_FP8.format("nk"),
    "fp8_fp4_gemm_nn": DENSE_FP8.format("nk"),
    "fp8_fp4_gemm_tn": DENSE_FP8.format("mn"),
    "fp8_fp4_gemm_tt": DENSE_FP8.format("mn"),
    "bf16_gemm_nt": DENSE_BF16.format("nk"),
    "bf16_gemm_nn": DENSE_BF16.format("nk"),
    "bf16_gemm_tn": DENSE_BF16.format("mn"),
    "bf16_gemm_tt": DENSE_BF16.format("mn"),
    "cublaslt_gemm_nt": "a, b, d, c=None",
    "cublaslt_gemm_nn": "a, b, d, c=None",
    "cublaslt_gemm_tn": "a, b, d, c=None",
    "cublaslt_gemm_tt": "a, b, d, c=None",
    "m_grouped_fp8_fp4_gemm_nt_contiguous": f"{GROUPED_FP8}, expected_m_for_psum_layout=None",
    "m_grouped_fp8_fp4_gemm_nn_contiguous": GROUPED_FP8,
    "m_grouped_fp8_fp4_gemm_nt_masked": "a, b, d, masked_m, expected_m, recipe=None, recipe_a=None, recipe_b=None, "
    "compiled_dims='nk', disable_ue8m0_cast=False",
    "m_grouped_bf16_gemm_nt_contiguous": f"{GROUPED_BF16}, expected_m_for_psum_layout=None",
    "m_grouped_bf16_gemm_nn_contiguous": GROUPED_BF16,
    "m_grouped_bf16_gemm_nt_masked": "a, b, d, masked_m, expected_m, compiled_dims='nk'",
    "k_grouped_fp8_gemm_nt_contiguous": "a, b, d, ks_cpu, grouped_layout, c=None, recipe=(1, 1, 128), "
    "compiled_dims='mn', use_psum_layout=False",
    "k_grouped_bf16_gemm_tn_contiguous": "a, b, d, ks_cpu, grouped_layout, c=None, compiled_dims='mn', "
    "use_psum_layout=False",
    "get_symm_buffer_for_mega_moe": "group, num_experts, num_max_tokens_per_rank, num_topk, hidden, "
    "intermediate_hidden, use_fp8_dispatch=None, mma_type='fp8xfp4', activation='swiglu'",
    "get_symm_buffer_for_sm90_mega_moe": "group, num_experts, num_max_tokens_per_rank, num_topk, hidden, "
    "intermediate_hidden, use_fp8_dispatch=True, activation='swiglu'",
    "transform_weights_for_mega_moe_sm90": "l1_weights, l2_weights",
    "mega_moe_pre_dispatch_sm90": "x, topk_idx, topk_weights, buf_x, buf_x_sf, buf_topk_idx, buf_topk_weights, "
    "num_tokens, group_size=128, routed_scaling_factor=1.0",
    "fp8_mega_moe": "y, l1_weights, l2_weights, sym_buffer, cumulative_local_expert_recv_stats=None, "
    "recipe=(128, 128, 128), activation='swiglu', activation_clamp=None, fast_math=True, num_tokens_bound=None, "
    "interleaved=False",
    "bf16_mega_moe": "y, l1_weights, l2_weights, sym_buffer, cumulative_local_expert_recv_stats=None, "
    "activation='swiglu', activation_clamp=None, fast_math=True, num_tokens_bound=None, interleaved=True",
    "set_num_sms": "new_num_sms",
    "get_num_sms": "",
    "set_tc_util": "new_tc_util",
    "get_tc_util": "",
    "set_pdl": "new_enable_pdl",
    "get_pdl": "",
    "set_ignore_compile_dims": "new_value",
    "set_block_size_multiple_of": "new_value",
    "testing.bench": "fn, num_warmups=5, num_tests=10, high_precision=False",
    "testing.bench_kineto": "fn, kernel_names, num_tests=30, suppress_kineto_output=False, trace_path=None, "
    "flush_l2=True, with_multiple_kernels=False, barrier=None",
    "testing.calc_diff": "x, y",
    "testing.assert_bitwise_equal": "x, y, label=''",
    "testing.get_arch_major": "",
    "testing.test_filter": "condition",
    "testing.ignore_env": "name, condition",
    "utils.init_dist": "local_rank, num_local_ranks",
    "utils.uneven_all_gather": "tensor, dim=0, group=None",
    "utils.dist.dist_print": "s='', once_in_node=False",
}


def lookup(path: str):
    value = deep_gemm
    for name in path.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    parameters = inspect.signature(lookup(name)).parameters.values()
    plain = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert ", ".join(plain) == SIGNATURES[name]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        *((f"fp8_gemm_{form}", f"fp8_fp4_gemm_{form}") for form in ("nt", "nn", "tn", "tt")),
        ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous"),
        ("m_grouped_fp8_gemm_nn_contiguous", "m_grouped_fp8_fp4_gemm_nn_contiguous"),
        ("m_grouped_fp8_gemm_nt_masked", "m_grouped_fp8_fp4_gemm_nt_masked"),
        ("fp8_m_grouped_gemm_nt_masked", "m_grouped_fp8_fp4_gemm_nt_masked"),
        ("bf16_m_grouped_gemm_nt_masked", "m_grouped_bf16_gemm_nt_masked"),
        ("SM90SymmBuffer", "SymmBuffer"),
    ],
)
def test_alias(alias, name):
    assert getattr(deep_gemm, alias) is getattr(deep_gemm, name)


def test_all_names_exist():
    for module in (deep_gemm, deep_gemm.testing, deep_gemm.utils):
        assert module.__all__ == sorted(set(module.__all__))
        assert all(hasattr(module, name) for name in module.__all__)
    # What scripts get by "from deep_gemm.utils import *" they also find in the package.
    assert set(deep_gemm.utils.__all__) - {"dist", "layout", "math"} <= set(deep_gemm.__all__)


# ---------------------------------------------------------------- what is not here


@pytest.mark.parametrize(
    "name",
    [
        "einsum",
        "fp8_einsum",
        "k_grouped_fp8_gemm_tn_contiguous",
        "fp8_gemm_nt_skip_head_mid",
        "fp8_mqa_logits",
        "fp8_paged_mqa_logits",
        "fp8_fp4_mqa_logits",
        "fp8_fp4_paged_mqa_logits",
        "get_paged_mqa_logits_metadata",
        "tf32_hc_prenorm_gemm",
        "fp8_fp4_mega_moe",
        "mega_moe_pre_dispatch",
        "mega.fp8_fp4_mega_moe",
        "legacy.m_grouped_bf16_gemm_nt_contiguous_tl",
    ],
)
def test_missing_functions_say_so_when_called(name):
    function = lookup(name)
    plain = name.rpartition(".")[2]
    assert function.__name__ == plain
    with fails(ValueError, "function", plain, "has no kernel in megamoe"):
        function(1, two=2)


@pytest.mark.parametrize("module", ["deep_gemm", "mega", "legacy"])
def test_unknown_names_are_attribute_errors(module):
    holder = deep_gemm if module == "deep_gemm" else getattr(deep_gemm, module)
    with pytest.raises(AttributeError, match=f"{module}' has no attribute 'fp7_gemm'"):
        holder.fp7_gemm  # noqa: B018


# ---------------------------------------------------------------- settings


@pytest.fixture
def restored():
    yield
    deep_gemm.set_num_sms(0)
    deep_gemm.set_tc_util(0)
    deep_gemm.set_pdl(False)
    deep_gemm.set_block_size_multiple_of(1)
    deep_gemm.set_ignore_compile_dims(False)


def test_num_sms(restored):
    everything = deep_gemm.get_num_sms()
    assert everything == (torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 0)
    deep_gemm.set_num_sms(3)
    assert deep_gemm.get_num_sms() == 3
    deep_gemm.set_num_sms(0)
    assert deep_gemm.get_num_sms() == everything
    with fails(ValueError, "new_num_sms", -1, "must be at least 0"):
        deep_gemm.set_num_sms(-1)


@pytest.mark.gpu
def test_more_sms_than_the_device_has():
    available = torch.cuda.get_device_properties().multi_processor_count
    with fails(ValueError, "new_num_sms", available + 1, f"must be at most {available}"):
        deep_gemm.set_num_sms(available + 1)


def test_kept_settings(restored):
    assert deep_gemm.get_tc_util() == 100
    deep_gemm.set_tc_util(60)
    assert deep_gemm.get_tc_util() == 60
    assert deep_gemm.get_pdl() is False
    deep_gemm.set_pdl(True)
    assert deep_gemm.get_pdl() is True
    deep_gemm.set_ignore_compile_dims(True)
    deep_gemm.set_block_size_multiple_of((2, 4))
    with fails(ValueError, "new_tc_util", 101, "must be at most 100"):
        deep_gemm.set_tc_util(101)
    with fails(TypeError, "new_enable_pdl", 1, "must be a bool"):
        deep_gemm.set_pdl(1)
    with fails(ValueError, "new_value", (1, 2, 3), "must be an int or two"):
        deep_gemm.set_block_size_multiple_of((1, 2, 3))
    with fails(ValueError, "new_value", 0, "must be at least 1"):
        deep_gemm.set_block_size_multiple_of(0)
