"""What the public GEMMs refuse: messages name the argument, its value, the rule and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megamoe.kernels import gemm, gemm_swiglu
from megamoe.kernels.quant import quantize_blockwise, quantize_rowwise
from megamoe.kernels.row_groups import RowGroups
from megamoe.kernels.scales import to_mn_major
from megamoe.types import Fp8Tensor
from tests.support.errors import fails

EXPERTS, ROWS, N, K = 2, 256, 256, 256
I64, F32, BF16 = torch.int64, torch.float32, torch.bfloat16
FP8_CODES = torch.float8_e4m3fn


def ids(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.arange(count, dtype=dtype)


def arguments(name: str) -> dict[str, Any]:
    """Valid ones of the public function."""
    fp8, dense = "fp8" in name, "grouped" not in name
    a = torch.randn(ROWS, K)
    b = torch.randn(EXPERTS, K, N) if name.endswith("nn") else torch.randn(EXPERTS, N, K)
    found = dict(
        a=quantize_rowwise(a, mn_major=True) if fp8 else a.bfloat16(),
        b=quantize_blockwise(b) if fp8 else b.bfloat16(),
    )
    if dense:
        b = found["b"]
        found["b"] = Fp8Tensor(b.codes[0], b.scales[0], b.block) if fp8 else b[0]
    else:
        found["rows"] = RowGroups.psum(torch.tensor([100, 256], dtype=torch.int32))
    return found


FUNCTIONS = {
    function.__name__: function
    for function in (
        gemm.fp8_gemm_nt,
        gemm.bf16_gemm_nt,
        gemm.bf16_gemm_nn,
        gemm.grouped_fp8_gemm_nt,
        gemm.grouped_bf16_gemm_nt,
        gemm.grouped_bf16_gemm_nn,
        gemm_swiglu.grouped_fp8_gemm_swiglu_nt,
        gemm_swiglu.grouped_bf16_gemm_swiglu_nt,
    )
}
FP8 = [name for name in FUNCTIONS if "fp8" in name]
BFLOAT = [name for name in FUNCTIONS if "bf16" in name]
GROUPED = [name for name in FUNCTIONS if "grouped" in name]
PLAIN = [name for name in FUNCTIONS if "swiglu" not in name]
SWIGLU = [name for name in FUNCTIONS if "swiglu" in name]


def refused(name: str, change: Callable, kind: type[Exception], argument: str, value: Any, rule: str) -> None:
    """``change(valid arguments)`` returns those to replace."""
    given = arguments(name)
    FUNCTIONS[name](**given)
    given.update(change(given))
    with fails(kind, argument, value, rule):
        FUNCTIONS[name](**given)


def shifted(tensor: torch.Tensor, elements: int = 1) -> torch.Tensor:
    """The same values, ``elements`` elements past a multiple of 16 bytes."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    flat = torch.zeros(size + 16, dtype=tensor.dtype)
    start = elements + (-flat.data_ptr() % 16) // tensor.element_size()
    moved = flat.as_strided(tensor.shape, tensor.stride(), start)
    assert moved.data_ptr() % 16
    return moved.copy_(tensor)


def wider(tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The same shape as part of a larger tensor."""
    return torch.cat([tensor.float()] * 2, dim).to(tensor.dtype).narrow(dim, 0, tensor.shape[dim])


def with_codes(x: Fp8Tensor, codes: torch.Tensor) -> Fp8Tensor:
    return replace(x, codes=codes)


# (change, exception, argument, value, part of the rule)
FP8_OPERANDS = {
    "a without scales": (lambda g: {"a": g["a"].codes}, TypeError, "a", "Tensor", "must be an Fp8Tensor"),
    "b without scales": (lambda g: {"b": g["b"].codes}, TypeError, "b", "Tensor", "must be an Fp8Tensor"),
    "a in blocks of 32": (lambda g: {"a": replace(g["a"], block=(1, 32))}, ValueError, "a.block", (1, 32), "(1, 128)"),
    "b by row": (lambda g: {"b": replace(g["b"], block=(1, 128))}, ValueError, "b.block", (1, 128), "(128, 128)"),
    "codes of another dtype": (
        lambda g: {"a": with_codes(g["a"], g["a"].codes.to(torch.float8_e5m2))},
        TypeError,
        "a.codes.dtype",
        torch.float8_e5m2,
        "torch.float8_e4m3fn",
    ),
    "one scale too few": (
        lambda g: {"a": replace(g["a"], scales=g["a"].scales[:, :1])},
        ValueError,
        "a.scales.shape",
        [ROWS, 1],
        "must be [256, 2]",
    ),
    "scales in bfloat16": (
        lambda g: {"a": replace(g["a"], scales=g["a"].scales.bfloat16())},
        TypeError,
        "a.scales.dtype",
        BF16,
        "torch.float32",
    ),
    "scales by row": (
        lambda g: {"a": replace(g["a"], scales=g["a"].scales.contiguous())},
        ValueError,
        "a.scales.stride()",
        (2, 1),
        "must be MN-major",
    ),
    "scales off 16 bytes": (
        lambda g: {"a": replace(g["a"], scales=shifted(g["a"].scales))},
        ValueError,
        "a.scales.data_ptr() % 16",
        4,
        "must be 0 for TMA",
    ),
    "scales elsewhere": (
        lambda g: {"a": replace(g["a"], scales=g["a"].scales.to("meta"))},
        ValueError,
        "a.scales.device",
        "meta",
        "must be cpu",
    ),
    "scales of b, strided": (
        lambda g: {"b": replace(g["b"], scales=wider(g["b"].scales))},
        ValueError,
        "b.scales.stride()",
        None,
        "must be contiguous",
    ),
    "codes of a off 16 bytes": (
        lambda g: {"a": with_codes(g["a"], shifted(g["a"].codes.view(torch.uint8)).view(FP8_CODES))},
        ValueError,
        "a.codes.data_ptr() % 16",
        1,
        "must be 0 for TMA",
    ),
    "codes of a, strided": (
        lambda g: {"a": with_codes(g["a"], wider(g["a"].codes))},
        ValueError,
        "a.codes.stride()",
        (2 * K, 1),
        "must be contiguous",
    ),
    "codes of b, strided": (
        lambda g: {"b": with_codes(g["b"], wider(g["b"].codes))},
        ValueError,
        "b.codes.stride()",
        None,
        "must be contiguous",
    ),
    "b elsewhere": (
        lambda g: {"b": Fp8Tensor(g["b"].codes.to("meta"), g["b"].scales.to("meta"), (128, 128))},
        ValueError,
        "a.codes.device",
        "cpu",
        "must be meta",
    ),
    "another K": (
        lambda g: {"a": quantize_rowwise(torch.randn(ROWS, K + 128), mn_major=True)},
        ValueError,
        "a.codes.shape",
        [ROWS, K + 128],
        f"must be [{ROWS}, {K}]",
    ),
    "a of one dimension": (
        lambda g: {"a": Fp8Tensor(g["a"].codes[0], g["a"].scales[0], (1, 128))},
        ValueError,
        "a.codes.shape",
        [K],
        "must be [any, any]",
    ),
}


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("change", FP8_OPERANDS)
def test_fp8_operands(name, change):
    make, kind, argument, value, rule = FP8_OPERANDS[change]
    if value is None:
        b = make(arguments(name))["b"]
        tensor = b.scales if "scales" in argument else b.codes
        # The weights of a dense GEMM are those of one expert.
        value = (tensor if tensor.dim() == 3 else tensor[None]).stride()
    refused(name, make, kind, argument, value, rule)


BF16_OPERANDS = {
    "a in float32": (lambda g: {"a": g["a"].float()}, TypeError, "a.dtype", F32, "torch.bfloat16"),
    "b in float16": (lambda g: {"b": g["b"].half()}, TypeError, "b.dtype", torch.float16, "torch.bfloat16"),
    "a no tensor": (lambda g: {"a": [1.0]}, TypeError, "a", "list", "must be a torch.Tensor"),
    "b no tensor": (lambda g: {"b": None}, TypeError, "b", "NoneType", "must be a torch.Tensor"),
    "b elsewhere": (lambda g: {"b": g["b"].to("meta")}, ValueError, "b.device", "meta", "must be cpu"),
    "another K": (
        lambda g: {"a": torch.zeros(ROWS, K + 8, dtype=BF16)},
        ValueError,
        "a.shape",
        [ROWS, K + 8],
        f"must be [{ROWS}, {K}]",
    ),
    "a, strided": (
        lambda g: {"a": wider(g["a"])},
        ValueError,
        "a.stride()",
        (2 * K, 1),
        "must be contiguous",
    ),
    "a transposed": (lambda g: {"a": g["a"].t()}, ValueError, "a.stride()", (1, K), "must be contiguous"),
    "a off 16 bytes": (
        lambda g: {"a": shifted(g["a"])},
        ValueError,
        "a.data_ptr() % 16",
        2,
        "must be 0 for TMA",
    ),
}


@pytest.mark.parametrize("name", BFLOAT)
@pytest.mark.parametrize("change", BF16_OPERANDS)
def test_bf16_operands(name, change):
    refused(name, *BF16_OPERANDS[change])


def test_bf16_weights_off_16_bytes():
    for name in ("grouped_bf16_gemm_nt", "grouped_bf16_gemm_nn", "grouped_bf16_gemm_swiglu_nt"):
        refused(name, lambda g: {"b": shifted(g["b"])}, ValueError, "b.data_ptr() % 16", 2, "must be 0 for TMA")


# ---------------------------------------------------------------- sizes


def fp8_of(rows: int, n: int, k: int) -> dict[str, Any]:
    return dict(
        a=quantize_rowwise(torch.randn(rows, k), mn_major=True), b=quantize_blockwise(torch.randn(EXPERTS, n, k))
    )


def test_n_and_k():
    name = "grouped_fp8_gemm_nt"
    refused(name, lambda g: fp8_of(ROWS, 252, K), ValueError, "N", 252, "must be a multiple of 8")
    refused(name, lambda g: fp8_of(ROWS, N, 200), ValueError, "K", 200, "must be a multiple of 16")
    for name in ("grouped_bf16_gemm_nt", "grouped_bf16_gemm_nn", "grouped_bf16_gemm_swiglu_nt"):

        def sizes(n: int, k: int, name: str = name) -> Callable:
            shape = (EXPERTS, k, n) if name.endswith("nn") else (EXPERTS, n, k)
            return lambda g: dict(a=torch.zeros(ROWS, k, dtype=BF16), b=torch.zeros(shape, dtype=BF16))

        refused(name, sizes(252, K), ValueError, "N", 252, "must be a multiple of 8")
        refused(name, sizes(N, 204), ValueError, "K", 204, "must be a multiple of 8")


def test_swiglu_sizes():
    name = "grouped_fp8_gemm_swiglu_nt"
    refused(name, lambda g: fp8_of(ROWS, 384, K), ValueError, "b.shape[1]", 384, "two times a multiple of 128")
    name = "grouped_bf16_gemm_swiglu_nt"
    change = {"b": torch.zeros(EXPERTS, 24, K, dtype=BF16)}
    refused(name, lambda g: change, ValueError, "b.shape[1]", 24, "two times a multiple of 8")


# ---------------------------------------------------------------- rows


def by_expert(a: Any) -> Any:
    """[EXPERTS, ROWS, K]: the masked form."""
    if isinstance(a, torch.Tensor):
        return torch.stack([a] * EXPERTS)
    scales = to_mn_major(torch.stack([a.scales] * EXPERTS).contiguous())
    return Fp8Tensor(torch.stack([a.codes.view(torch.uint8)] * EXPERTS).view(FP8_CODES), scales, a.block)


@pytest.mark.parametrize("name", GROUPED)
def test_rows(name):
    codes = "a.codes" if name in FP8 else "a"
    refused(name, lambda g: {"rows": ids(2)}, TypeError, "rows", "Tensor", "must be a RowGroups")
    refused(name, lambda g: {"rows": None}, TypeError, "rows", "NoneType", "must be a RowGroups")
    refused(
        name, lambda g: {"rows": RowGroups.psum(ids(3))}, ValueError, "rows.index.shape", [3], f"must be [{EXPERTS}]"
    )
    refused(
        name, lambda g: {"rows": RowGroups.contiguous(ids(ROWS - 1))}, ValueError, "rows.index.shape", [ROWS - 1], "256"
    )
    refused(
        name,
        lambda g: {"rows": RowGroups.psum(ids(EXPERTS).to("meta"))},
        ValueError,
        "rows.index.device",
        "meta",
        "must be cpu",
    )
    # Rows of the form that another layout takes.
    counts = RowGroups.masked(ids(EXPERTS))
    refused(name, lambda g: {"rows": counts}, ValueError, f"{codes}.shape", [ROWS, K], "must be [any, any, any]")
    shape = [EXPERTS, ROWS, K]
    refused(name, lambda g: {"a": by_expert(g["a"])}, ValueError, f"{codes}.shape", shape, "must be [any, any]")


@pytest.mark.parametrize("name", GROUPED)
def test_contiguous_rows_come_in_whole_blocks(name):
    def change(given):
        a = torch.randn(200, K)
        a = quantize_rowwise(a, mn_major=True) if name in FP8 else a.bfloat16()
        return {"a": a, "rows": RowGroups.contiguous(torch.zeros(200, dtype=torch.int32))}

    refused(name, change, ValueError, "a.shape[0]", 200, "must be a multiple of 128")


@pytest.mark.parametrize("name", GROUPED)
def test_masked_rows_have_as_many_experts_as_the_weights(name):
    given = arguments(name)
    given["a"] = by_expert(given["a"])
    given["rows"] = RowGroups.masked(ids(EXPERTS))
    FUNCTIONS[name](**given)
    b = given["b"]
    three = torch.cat([(b.codes if name in FP8 else b).float()] * 2)[:3]
    given["b"] = quantize_blockwise(three) if name in FP8 else three.bfloat16()
    given["rows"] = RowGroups.masked(ids(3))
    with fails(ValueError, "a.shape", [EXPERTS, ROWS, K], "must have 3 experts"):
        FUNCTIONS[name](**given)


@pytest.mark.parametrize("name", [name for name in GROUPED if name in FP8])
def test_masked_scales_are_dense_from_expert_to_expert(name):
    given = arguments(name)
    given["rows"] = RowGroups.masked(ids(EXPERTS))
    given["a"] = by_expert(given["a"])
    scales = to_mn_major(torch.rand(2 * EXPERTS, ROWS, K // 128))[::2]
    given["a"] = replace(given["a"], scales=scales)
    with fails(ValueError, "a.scales.stride()", tuple(scales.stride()), "must be MN-major"):
        FUNCTIONS[name](**given)


# ---------------------------------------------------------------- results, C, bias


@pytest.mark.parametrize("name", PLAIN)
def test_out(name):
    def out(*shape, dtype=BF16, device="cpu"):
        return lambda g: {"out": torch.zeros(shape, dtype=dtype, device=device)}

    refused(name, out(ROWS, N + 8), ValueError, "out.shape", [ROWS, N + 8], f"must be [{ROWS}, {N}]")
    refused(name, out(ROWS), ValueError, "out.shape", [ROWS], f"must be [{ROWS}, {N}]")
    refused(name, out(ROWS, N, device="meta"), ValueError, "out.device", "meta", "must be cpu")
    refused(name, out(ROWS, N, dtype=torch.float16), ValueError, "out_dtype", torch.float16, "torch.bfloat16")
    refused(name, lambda g: {"out_dtype": torch.float64}, ValueError, "out_dtype", torch.float64, "torch.float32")
    strided = torch.zeros(ROWS, 2 * N, dtype=BF16)[:, :N]
    refused(name, lambda g: {"out": strided}, ValueError, "out.stride()", (2 * N, 1), "must be contiguous")
    odd = shifted(torch.zeros(ROWS, N, dtype=BF16))
    refused(name, lambda g: {"out": odd}, ValueError, "out.data_ptr() % 16", 2, "must be 0 for TMA")


@pytest.mark.parametrize("name", PLAIN)
def test_c(name):
    def c(tensor, **rest):
        return lambda g: {"c": tensor, "out_dtype": F32, **rest}

    refused(name, c(torch.zeros(ROWS, N + 8)), ValueError, "c.shape", [ROWS, N + 8], f"must be [{ROWS}, {N}]")
    refused(name, c(torch.zeros(ROWS, N).double()), TypeError, "c.dtype", torch.float64, "torch.float32")
    refused(name, c(torch.zeros(ROWS, N, device="meta")), ValueError, "c.device", "meta", "must be cpu")
    refused(name, c(torch.zeros(N, ROWS).t()), ValueError, "c.stride()", (1, ROWS), "must be contiguous")
    bias = torch.zeros(1 if "grouped" not in name else EXPERTS, N)
    refused(name, c(torch.zeros(ROWS, N), bias=bias), ValueError, "bias", "a tensor", "must be None together with c")
    if name in FP8:
        change = {"c": torch.zeros(ROWS, N, dtype=BF16)}
        refused(name, lambda g: change, ValueError, "out_dtype", BF16, "must be torch.float32 with c")
    else:
        change = {"c": torch.zeros(ROWS, N)}
        refused(name, lambda g: change, TypeError, "c.dtype", F32, "must be one of torch.bfloat16")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bias(name):
    experts = EXPERTS if "grouped" in name else 1

    def bias(tensor):
        return lambda g: {"bias": tensor}

    wanted = f"must be [{experts}, {N}]"
    refused(name, bias(torch.zeros(experts, N // 2)), ValueError, "bias.shape", [experts, N // 2], wanted)
    refused(name, bias(torch.zeros(N)), ValueError, "bias.shape", [N], wanted)
    refused(name, bias(torch.zeros(experts, N).double()), TypeError, "bias.dtype", torch.float64, "torch.float32")
    refused(name, bias(torch.zeros(experts, N, device="meta")), ValueError, "bias.device", "meta", "must be cpu")
    strided = torch.zeros(experts, 2 * N)[:, ::2]
    refused(name, bias(strided), ValueError, "bias.stride()", tuple(strided.stride()), "must be contiguous")


# ---------------------------------------------------------------- fused activation


@pytest.mark.parametrize("name", SWIGLU)
def test_options_of_the_activation(name):
    refused(name, lambda g: {"activation": "relu2"}, ValueError, "activation", "relu2", "'swiglu'")
    refused(name, lambda g: {"clamp": 0.0}, ValueError, "clamp", 0.0, "must be finite and > 0")
    refused(name, lambda g: {"clamp": -1.0}, ValueError, "clamp", -1.0, "must be finite and > 0")
    refused(name, lambda g: {"clamp": float("nan")}, ValueError, "clamp", float("nan"), "must be finite")
    refused(name, lambda g: {"clamp": "7"}, TypeError, "clamp", "7", "must be a number")

    def weights(tensor):
        return lambda g: {"row_weights": tensor}

    refused(name, weights(torch.zeros(ROWS - 1)), ValueError, "row_weights.shape", [ROWS - 1], f"must be [{ROWS}]")
    refused(name, weights(torch.zeros(ROWS).bfloat16()), TypeError, "row_weights.dtype", BF16, "torch.float32")
    refused(name, weights(torch.zeros(ROWS, device="meta")), ValueError, "row_weights.device", "meta", "must be cpu")
    refused(name, weights(torch.zeros(2 * ROWS)[::2]), ValueError, "row_weights.stride()", (2,), "must be contiguous")


@pytest.mark.parametrize("name", SWIGLU)
def test_pre_activations(name):
    good = torch.zeros(ROWS, N, dtype=BF16)

    def pre(tensor, **rest):
        return lambda g: {"pre": tensor, **rest}

    refused(name, pre(good[:, : N // 2]), ValueError, "pre.shape", [ROWS, N // 2], f"must be [{ROWS}, {N}]")
    refused(name, pre(good.float()), TypeError, "pre.dtype", F32, "torch.bfloat16")
    refused(name, pre(good.to("meta")), ValueError, "pre.device", "meta", "must be cpu")
    refused(name, pre(wider(good)), ValueError, "pre.stride()", (2 * N, 1), "must be contiguous")
    refused(name, pre(shifted(good)), ValueError, "pre.data_ptr() % 16", 2, "must be 0")

    def masked(g):
        a = torch.zeros(EXPERTS, ROWS // EXPERTS, K)
        a = quantize_rowwise(a) if "fp8" in name else a.bfloat16()
        a = replace(a, scales=to_mn_major(a.scales)) if "fp8" in name else a
        return {"a": a, "rows": RowGroups.masked(torch.ones(EXPERTS, dtype=torch.int32)), "pre": good}

    refused(name, masked, ValueError, "rows.kind", "masked", "must not be 'masked' with pre")


def test_results_of_the_activation():
    name, shape = "grouped_fp8_gemm_swiglu_nt", (ROWS, N // 2)
    codes = torch.zeros(shape).to(FP8_CODES)
    scales = torch.zeros(1, ROWS).t()

    def out(value, **rest):
        return lambda g: {"out": value, **rest}

    good = Fp8Tensor(codes, scales, (1, 128))
    refused(name, out(torch.zeros(shape, dtype=BF16)), TypeError, "out", "Tensor", "must be an Fp8Tensor")
    refused(name, out(replace(good, block=(1, 32))), ValueError, "out.block", (1, 32), "must be (1, 128)")
    refused(name, out(good, quantize=False), TypeError, "out", "Fp8Tensor", "must be a torch.Tensor")
    short = Fp8Tensor(codes[1:], scales[1:], (1, 128))
    refused(name, out(short), ValueError, "out.shape", [ROWS - 1, N // 2], f"must be [{ROWS}, {N // 2}]")
    wide = torch.zeros(ROWS, 3)[:, :1]
    refused(name, out(replace(good, scales=wide)), ValueError, "out.scales.stride()", (3, 1), "must be MN-major")
    bf16 = torch.zeros(ROWS, N, dtype=BF16)
    for function, rest in ((name, {"quantize": False}), ("grouped_bf16_gemm_swiglu_nt", {})):
        refused(function, out(bf16, **rest), ValueError, "out.shape", [ROWS, N], f"must be [{ROWS}, {N // 2}]")
        refused(function, out(bf16[:, : N // 2].float(), **rest), TypeError, "out.dtype", F32, "torch.bfloat16")
        refused(function, out(bf16[:, : N // 2], **rest), ValueError, "out.stride()", (N, 1), "must be contiguous")


# ---------------------------------------------------------------- multiprocessors


def test_number_of_multiprocessors():
    with fails(ValueError, "count", 0, "must be at least 1"):
        gemm.set_num_sms(0)
    with fails(TypeError, "count", 2.5, "must be an integer"):
        gemm.set_num_sms(2.5)
    with fails(TypeError, "count", True, "must be an integer"):
        gemm.set_num_sms(True)
