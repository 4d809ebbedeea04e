"""K-grouped GEMMs under DeepGEMM's names, against fp64 products group by group."""

from __future__ import annotations

import pytest
import torch

import megamoe.compat.deep_gemm as deep_gemm
from megamoe.kernels.quant import dequantize, quantize_columnwise
from tests.support.errors import fails
from tests.support.metrics import assert_close

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KS = [
    pytest.param([128, 256], id="two groups"),
    pytest.param([0, 128, 0, 384, 0], id="empty first, middle and last"),
    pytest.param([256], id="one group"),
    pytest.param([0, 0], id="nothing"),
]
M, N = 128, 192


def layout_of(ks: list[int], device: str) -> torch.Tensor:
    return torch.tensor(ks, dtype=INT32, device=device)


def spans_of(ks: list[int]) -> list[tuple[int, int]]:
    ends = torch.tensor(ks).cumsum(0).tolist()
    return [(end - k, end) for k, end in zip(ks, ends, strict=True)]


def rows_of(ks: list[int], columns: int, device: str) -> torch.Tensor:
    return torch.randn(sum(ks), columns, device=device).to(BF16)


def k_major(x: torch.Tensor, ks: list[int]):
    """DeepGEMM's FP8 operand of ``x [K, columns]``, and its values."""
    cast = quantize_columnwise(x)
    codes = [cast.codes[start:end].t().flatten() for start, end in spans_of(ks)]
    joined = torch.cat([code.view(torch.uint8) for code in codes]).view(torch.float8_e4m3fn)
    return (joined, cast.scales.t()), dequantize(cast)


def check(d: torch.Tensor, before: torch.Tensor | None, a, b, ks: list[int], tolerance: float) -> None:
    for group, (start, end) in enumerate(spans_of(ks)):
        expected = a[start:end].double().t() @ b[start:end].double()
        if before is not None:
            expected = expected + before[group].double()
        if start == end:
            assert torch.equal(d[group].double(), expected), f"group {group} has no rows"
        assert_close(d[group], expected, tolerance, f"group {group}")


def accumulator(how: str, groups: int, dtype: torch.dtype, device: str):
    """``d``, ``c`` and what ``d`` starts from."""
    old = torch.randn(groups, M, N, device=device).to(dtype)
    if how == "none":
        return torch.full_like(old, float("nan")), None, None
    if how == "in place":
        return (d := old.clone()), d, old
    if how == "strided, in place":
        d = torch.full((groups, M, 2 * N), 7.0, dtype=dtype, device=device)[..., :N]
        return d.copy_(old), d, old
    return torch.full_like(old, float("nan")), old.clone(), old


HOW = ["none", "in place", "elsewhere", "strided, in place"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ks", KS)
def test_bf16(ks, dtype, how, device, seed):
    a, b = rows_of(ks, M, device), rows_of(ks, N, device)
    d, c, old = accumulator(how, len(ks), dtype, device)
    assert deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, ks, layout_of(ks, device), c) is None
    check(d, old, a, b, ks, 1e-5 if dtype == FP32 else 4e-3)
    if c is not None and c is not d:
        assert torch.equal(c, old)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("ks", KS)
def test_fp8(ks, how, device, seed):
    (a, a_values), (b, b_values) = (k_major(rows_of(ks, columns, device), ks) for columns in (M, N))
    d, c, old = accumulator(how, len(ks), FP32, device)
    assert deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks, layout_of(ks, device), c) is None
    check(d, old, a_values, b_values, ks, 3e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ks_cpu", [None, []])
def test_bf16_without_ks_on_the_host(ks_cpu, device, seed):
    ks = [128, 0, 256]
    a, b = rows_of(ks, M, device), rows_of(ks, N, device)
    d = torch.zeros(3, M, N, device=device)
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, ks_cpu, layout_of(ks, device), d)
    check(d, None, a, b, ks, 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ks_cpu", [None, [128, 0, 256]])
def test_bf16_psum_layout(ks_cpu, device, seed):
    """Groups end anywhere, the next starts at a multiple of 128; rows between them hold anything."""
    ends = [100, 100, 128 + 131]
    spans = [(0, 100), (128, 128), (128, 128 + 131)]
    a, b = rows_of([384], M, device), rows_of([384], N, device)
    for x in (a, b):
        x[100:128] = float("nan")
        x[259:] = float("nan")
    d = torch.full((3, M, N), float("nan"), device=device)
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, ks_cpu, layout_of(ends, device), use_psum_layout=True)
    for group, (start, end) in enumerate(spans):
        assert_close(d[group], a[start:end].double().t() @ b[start:end].double(), 1e-5, f"group {group}")


# ---------------------------------------------------------------- what does not fit


def bf16_call(**changes):
    fields = dict(
        a=torch.zeros(384, M, dtype=BF16),
        b=torch.zeros(384, N, dtype=BF16),
        d=torch.zeros(2, M, N),
        ks_cpu=[128, 256],
        grouped_layout=layout_of([128, 256], "cpu"),
    )
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(**{**fields, **changes})


def fp8_call(**changes):
    def operand(columns):
        return torch.zeros(384 * columns).to(torch.float8_e4m3fn), torch.ones(columns, 3)

    fields = dict(
        a=operand(M),
        b=operand(N),
        d=torch.zeros(2, M, N),
        ks_cpu=[128, 256],
        grouped_layout=layout_of([128, 256], "cpu"),
    )
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(**{**fields, **changes})


@pytest.mark.parametrize("call", [bf16_call, fp8_call])
def test_what_both_refuse(call):
    call()
    with fails(ValueError, "ks_cpu[1]", 255, "must be a multiple of 128"):
        call(ks_cpu=[128, 255])
    with fails(ValueError, "ks_cpu[0]", -128, "must be at least 0"):
        call(ks_cpu=[-128, 512])
    with fails(ValueError, "len(ks_cpu)", 3, "must be 2, the groups of d"):
        call(ks_cpu=[128, 128, 128])
    with fails(ValueError, "grouped_layout.shape", [3], "must be [2]"):
        call(grouped_layout=layout_of([128, 128, 128], "cpu"))
    with fails(TypeError, "grouped_layout.dtype", torch.int64, "must be one of torch.int32"):
        call(grouped_layout=torch.tensor([128, 256]))
    with fails(ValueError, "c.shape", [2, M, 8], f"must be [2, {M}, {N}]"):
        call(c=torch.zeros(2, M, 8))
    with fails(TypeError, "c.dtype", BF16, "must be one of torch.float32"):
        call(c=torch.zeros(2, M, N, dtype=BF16))
    with fails(ValueError, "d.stride()", (M * N, 1, M), "must be 1 along N"):
        call(d=torch.zeros(2, N, M).mT)


def test_what_bf16_refuses():
    with fails(ValueError, "sum(ks_cpu)", 256, "must be 384, the K of a"):
        bf16_call(ks_cpu=[128, 128])
    with fails(ValueError, "b.shape", [256, N], "must be [384, any]"):
        bf16_call(b=torch.zeros(256, N, dtype=BF16))
    with fails(TypeError, "a.dtype", FP32, "must be one of torch.bfloat16"):
        bf16_call(a=torch.zeros(384, M))
    with fails(ValueError, "d.shape", [2, M, M], f"must be [any, {M}, {N}]"):
        bf16_call(d=torch.zeros(2, M, M))


def test_what_fp8_refuses():
    codes, sf = torch.zeros(384 * M).to(torch.float8_e4m3fn), torch.ones(M, 3)
    with fails(ValueError, "a[0].shape", [384 * M], f"must be [{256 * M}]"):
        fp8_call(ks_cpu=[128, 128])
    with fails(ValueError, "a[1].shape", [M, 2], f"must be [{M}, 3]"):
        fp8_call(a=(codes, sf[:, :2]))
    with fails(TypeError, "a[0].dtype", torch.uint8, "must be one of torch.float8_e4m3fn"):
        fp8_call(a=(codes.view(torch.uint8), sf))
    with fails(TypeError, "a", "Tensor", "must be a pair (codes, scales)"):
        fp8_call(a=codes)
    with fails(ValueError, "recipe", (1, 128, 128), "must be (1, 1, 128)"):
        fp8_call(recipe=(1, 128, 128))
    with fails(ValueError, "use_psum_layout", True, "must be False"):
        fp8_call(use_psum_layout=True)
    with fails(ValueError, "ks_cpu", None, "must list each expert's K"):
        fp8_call(ks_cpu=None)
