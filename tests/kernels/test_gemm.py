"""The public GEMMs on a CPU: every case and random ones against fp64 products, empty sizes, torch.compile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.kernels import gemm, gemm_checks, gemm_swiglu
from megamoe.kernels.quant import dequantize, quantize_blockwise, quantize_rowwise
from megamoe.kernels.row_groups import RowGroups
from megamoe.kernels.tiles import Tile
from megamoe.types import Fp8Tensor
from tests.support.errors import fails
from tests.support.gemm_cases import Case, Instance, compute, standard_cases

CASES = standard_cases()


@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    instance = Instance(CASES[name], seed=1)
    out = instance.poisoned()
    assert compute(instance, out, instance.rows) is not None
    instance.check(out)


@st.composite
def random_cases(draw) -> Case:
    kind = draw(st.sampled_from(["dense", "contiguous", "psum", "masked"]))
    counts = draw(st.lists(st.integers(0, 270), min_size=1, max_size=1 if kind == "dense" else 4))
    fp8 = draw(st.booleans())
    activation = draw(st.sampled_from([None, None, "swiglu", "swiglu_oai", "geglu", "geglu_tanh"]))
    options = dict(
        kind=kind,
        fp8=fp8,
        max_rows=max(max(counts), 1) + draw(st.integers(0, 3)) if kind == "masked" else 0,
        bias=draw(st.booleans()),
    )
    n = 8 * draw(st.integers(1, 34))
    if activation is not None:
        n = draw(st.sampled_from([256, 512])) if fp8 else 2 * n
        options.update(
            activation=activation,
            clamp=draw(st.sampled_from([None, 0.5, 7.0])),
            weighted=draw(st.booleans()),
            fp8_out=fp8 and draw(st.booleans()),
        )
    else:
        options.update(
            nn=not fp8 and draw(st.booleans()),
            out_dtype=draw(st.sampled_from([torch.bfloat16, torch.float32])),
        )
        if not options["bias"] and (not fp8 or options["out_dtype"] == torch.float32):
            options.update(accumulate=draw(st.booleans()))
    return Case(tuple(counts), n, 16 * draw(st.integers(1, 25)), **options)


@settings(max_examples=150)
@given(case=random_cases(), seed=st.integers(0, 2**31 - 1))
def test_random_cases(case, seed):
    instance = Instance(case, seed)
    out = instance.poisoned()
    compute(instance, out, instance.rows)
    instance.check(out)


# ---------------------------------------------------------------- results that the function makes


def without_out(case: Case) -> tuple[Instance, torch.Tensor | Fp8Tensor]:
    instance = Instance(case, 4)
    options = dict(bias=instance.bias)
    if case.activation:
        options.update(row_weights=instance.row_weights, activation=case.activation, clamp=case.clamp)
        if case.fp8:
            options["quantize"] = case.fp8_out
            return instance, gemm_swiglu.grouped_fp8_gemm_swiglu_nt(instance.a, instance.b, instance.rows, **options)
        return instance, gemm_swiglu.grouped_bf16_gemm_swiglu_nt(instance.a, instance.b, instance.rows, **options)
    options.update(c=instance.c, out_dtype=case.out_dtype)
    function = gemm.grouped_fp8_gemm_nt if case.fp8 else gemm.grouped_bf16_gemm_nt
    return instance, function(instance.a, instance.b, instance.rows, **options)


@pytest.mark.parametrize(
    "name",
    [
        "contiguous",
        "masked",
        "bias",
        "swiglu",
        "swiglu to fp8",
        "swiglu to fp8, clamp, masked",
        "bf16, masked",
        "bf16, psum, fp32 + C",
        "bf16, swiglu",
    ],
)
def test_new_result(name):
    instance, out = without_out(CASES[name])
    case = instance.case
    columns = case.n // 2 if case.activation else case.n
    shape = (len(case.counts), case.max_rows, columns) if case.kind == "masked" else (instance.num_rows, columns)
    if case.fp8_out:
        assert isinstance(out, Fp8Tensor) and out.block == (1, 128)
        assert out.codes.shape == shape and out.codes.dtype == torch.float8_e4m3fn
        assert out.scales.shape == (*shape[:-1], columns // 128)
        assert out.scales.stride(-2) == 1, "scales are MN-major"
        # Ready to be the next GEMM's operand.
        gemm_checks.check_mn_major("out", out.scales)
        out = Fp8Tensor(out.codes.view(-1, columns), out.scales.reshape(-1, columns // 128), (1, 128))
        values = dequantize(out)
    else:
        assert out.shape == shape and out.is_contiguous()
        assert out.dtype == (torch.bfloat16 if case.activation else case.out_dtype)
        values = out.reshape(-1, columns).float()
    for start, end in instance.written:
        torch.testing.assert_close(
            values[start:end], instance.expected[start:end], rtol=0.07 if case.fp8_out else 0.01, atol=0.05
        )


def test_c_that_is_not_the_result_stays():
    instance = Instance(Case((100, 0, 20), 64, 128, accumulate=True, out_dtype=torch.float32, fp8=False), 2)
    before, out = instance.c.clone(), torch.full_like(instance.c, float("nan"))
    result = gemm.grouped_bf16_gemm_nt(instance.a, instance.b, instance.rows, out=out, c=instance.c)
    assert result is out and torch.equal(instance.c, before)
    for start, end in instance.written:
        torch.testing.assert_close(out[start:end], instance.expected[start:end], rtol=1e-3, atol=1e-3)


def test_c_of_grouped_fp8_is_the_result():
    instance = Instance(Case((100, 0, 20), 64, 128, accumulate=True, out_dtype=torch.float32), 2)
    for out in (None, torch.empty_like(instance.c)):
        with fails(ValueError, "c", "another tensor than out", "must be out"):
            gemm.grouped_fp8_gemm_nt(
                instance.a, instance.b, instance.rows, out=out, out_dtype=torch.float32, c=instance.c
            )


def test_rows_of_other_experts_do_not_matter():
    """Bitwise, whatever they hold."""
    for fp8 in (True, False):
        first = Instance(Case((100, 70), 64, 256, fp8=fp8), 1)
        out = first.poisoned()
        compute(first, out, first.rows)
        again = first.poisoned()
        values = first.a.codes.view(torch.uint8) if fp8 else first.a
        values[128:] = 0x7F
        compute(first, again, first.rows)
        assert torch.equal(out[:100], again[:100]) and not torch.equal(out[128:198], again[128:198])


# ---------------------------------------------------------------- empty sizes


def weights(experts: int, n: int, k: int, fp8: bool):
    b = torch.randn(experts, n, k)
    return quantize_blockwise(b) if fp8 else b.bfloat16()


def activations(rows: int, k: int, fp8: bool):
    a = torch.randn(rows, k)
    return quantize_rowwise(a, mn_major=True) if fp8 else a.bfloat16()


def empty_fp8(*shape: int, block: tuple[int, int]) -> Fp8Tensor:
    """Of shapes that the casts refuse."""
    *groups, rows, k = shape
    scales = torch.zeros(*groups, -(-rows // block[0]), -(-k // block[1]))
    return Fp8Tensor(torch.zeros(shape).to(torch.float8_e4m3fn), scales, block)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("fp8", [True, False])
def test_no_rows(fp8):
    a = empty_fp8(0, 128, block=(1, 128)) if fp8 else torch.zeros(0, 128, dtype=torch.bfloat16)
    b = weights(2, 256, 128, fp8)
    function = gemm.grouped_fp8_gemm_nt if fp8 else gemm.grouped_bf16_gemm_nt
    swiglu = gemm_swiglu.grouped_fp8_gemm_swiglu_nt if fp8 else gemm_swiglu.grouped_bf16_gemm_swiglu_nt
    for rows in (RowGroups.psum(int32(0, 0)), RowGroups.contiguous(int32())):
        assert function(a, b, rows).shape == (0, 256)
        out = torch.zeros(0, 256)
        assert function(a, b, rows, out=out, c=out).dtype == torch.float32
        result = swiglu(a, b, rows)
        assert (result.codes if fp8 else result).shape == (0, 128)
        if fp8:
            assert result.scales.shape == (0, 1)
    one = Fp8Tensor(b.codes[0], b.scales[0], b.block) if fp8 else b[0]
    dense = gemm.fp8_gemm_nt if fp8 else gemm.bf16_gemm_nt
    assert dense(a, one).shape == (0, 256)
    if fp8:
        masked = empty_fp8(2, 0, 128, block=(1, 128))
    else:
        masked = a.view(2, 0, 128)
        assert gemm.bf16_gemm_nn(a, one.t().contiguous()).shape == (0, 256)
    assert function(masked, b, RowGroups.masked(int32(0, 0))).shape == (2, 0, 256)


@pytest.mark.parametrize("fp8", [True, False])
def test_no_experts(fp8):
    """No row belongs to any: the result stays as it was."""
    a = activations(128, 128, fp8)
    b = empty_fp8(0, 256, 128, block=(128, 128)) if fp8 else torch.zeros(0, 256, 128, dtype=torch.bfloat16)
    function = gemm.grouped_fp8_gemm_nt if fp8 else gemm.grouped_bf16_gemm_nt
    swiglu = gemm_swiglu.grouped_fp8_gemm_swiglu_nt if fp8 else gemm_swiglu.grouped_bf16_gemm_swiglu_nt
    for rows in (RowGroups.psum(int32()), RowGroups.contiguous(torch.full((128,), -1, dtype=torch.int32))):
        out = torch.full((128, 256), 3.0)
        assert torch.equal(function(a, b, rows, out=out), torch.full((128, 256), 3.0))
        result = swiglu(a, b, rows)
        assert (result.codes if fp8 else result).shape == (128, 128)
    empty = empty_fp8(0, 128, 128, block=(1, 128)) if fp8 else a.view(1, 128, 128)[:0]
    assert function(empty, b, RowGroups.masked(int32())).shape == (0, 128, 256)


@pytest.mark.parametrize("fp8", [True, False])
def test_sums_of_nothing(fp8):
    """K = 0: the bias, C or zeros, in rows of experts only."""
    a = empty_fp8(256, 0, block=(1, 128)) if fp8 else torch.zeros(256, 0, dtype=torch.bfloat16)
    b = empty_fp8(2, 256, 0, block=(128, 128)) if fp8 else torch.zeros(2, 256, 0, dtype=torch.bfloat16)
    function = gemm.grouped_fp8_gemm_nt if fp8 else gemm.grouped_bf16_gemm_nt
    rows, written = RowGroups.psum(int32(100, 130)), [slice(0, 100), slice(128, 130)]
    bias, c = torch.randn(2, 256), torch.randn(256, 256)
    for options, expected in (
        ({}, torch.zeros(256, 256)),
        ({"c": c}, c),
        ({"bias": bias}, bias.repeat_interleave(128, 0)),
    ):
        before = options["c"].clone() if "c" in options else torch.full((256, 256), 3.0)
        out = before.clone()
        options = {**options, "c": out} if "c" in options else options
        function(a, b, rows, out=out, **options)
        for span in written:
            assert torch.equal(out[span], expected[span])
            out[span] = before[span]
        assert torch.equal(out, before), "rows of no expert were written"
    dense = gemm.fp8_gemm_nt if fp8 else gemm.bf16_gemm_nt
    one = empty_fp8(256, 0, block=(128, 128)) if fp8 else b[0]
    assert torch.equal(dense(a, one, out_dtype=torch.float32), torch.zeros(256, 256))
    assert torch.equal(dense(a, one, out_dtype=torch.float32, c=c), c)
    swiglu = gemm_swiglu.grouped_fp8_gemm_swiglu_nt if fp8 else gemm_swiglu.grouped_bf16_gemm_swiglu_nt
    out = torch.full((256, 128), 3.0, dtype=torch.bfloat16)
    swiglu(a, b, rows, bias=bias, out=out, **({"quantize": False} if fp8 else {}))
    gate, up = bias[1].chunk(2)
    torch.testing.assert_close(out[128].float(), torch.nn.functional.silu(gate) * up, rtol=0.01, atol=0.01)
    assert (out[130:] == 3.0).all()


# ---------------------------------------------------------------- torch.compile


def flat(function, instance: Instance, options: dict):
    """The call as a function of tensors only, and these tensors."""
    a, b, rows = instance.a, instance.b, instance.rows
    tensors = [*((a.codes, a.scales, b.codes, b.scales) if instance.case.fp8 else (a, b))]
    tensors += [] if rows is None else [rows.index]
    names = [name for name, value in options.items() if isinstance(value, torch.Tensor)]
    fixed = {name: value for name, value in options.items() if name not in names}
    tensors += [options[name] for name in names]

    def call(*given):
        given = list(given)
        extra = dict(zip(names, given[len(given) - len(names) :], strict=True))
        if instance.case.fp8:
            operands = [Fp8Tensor(given[0], given[1], (1, 128)), Fp8Tensor(given[2], given[3], (128, 128))]
            if rows is None:
                operands[1] = Fp8Tensor(given[2][0], given[3][0], (128, 128))
        else:
            operands = [given[0], given[1] if rows is not None else given[1][0]]
        if rows is not None:
            operands.append(RowGroups(rows.kind, given[4 if instance.case.fp8 else 2], rows.expected))
        result = function(*operands, **extra, **fixed)
        return (result.codes.float(), result.scales * 1) if isinstance(result, Fp8Tensor) else result * 1

    return call, tensors


COUNTS = (100, 0, 28)
F32 = torch.float32
COMPILED = {
    "fp8_gemm_nt": (gemm.fp8_gemm_nt, Case((70,), 136, 144, "dense"), {}),
    "fp8_gemm_nt, fp32 + C": (gemm.fp8_gemm_nt, Case((70,), 136, 144, "dense"), {"out_dtype": F32, "c": (70, 136)}),
    "bf16_gemm_nt": (gemm.bf16_gemm_nt, Case((70,), 136, 144, "dense", fp8=False), {"bias": (1, 136)}),
    "bf16_gemm_nn": (gemm.bf16_gemm_nn, Case((70,), 136, 144, "dense", fp8=False, nn=True), {"out_dtype": F32}),
    "grouped_fp8_gemm_nt, contiguous": (
        gemm.grouped_fp8_gemm_nt,
        Case((128, 0, 128), 64, 128, "contiguous"),
        {"tile": Tile(128, 256, 3)},
    ),
    "grouped_fp8_gemm_nt, masked": (gemm.grouped_fp8_gemm_nt, Case(COUNTS, 64, 128, "masked", 100), {}),
    "grouped_bf16_gemm_nt": (
        gemm.grouped_bf16_gemm_nt,
        Case(COUNTS, 64, 128, fp8=False),
        {"out_dtype": F32, "c": (256, 64)},
    ),
    "grouped_bf16_gemm_nn": (gemm.grouped_bf16_gemm_nn, Case(COUNTS, 64, 128, fp8=False, nn=True), {"bias": (3, 64)}),
    "grouped_fp8_gemm_swiglu_nt": (
        gemm_swiglu.grouped_fp8_gemm_swiglu_nt,
        Case(COUNTS, 256, 128),
        {"row_weights": (256,), "clamp": 0.5, "bias": (3, 256)},
    ),
    "grouped_fp8_gemm_swiglu_nt to bf16": (
        gemm_swiglu.grouped_fp8_gemm_swiglu_nt,
        Case(COUNTS, 256, 128),
        {"quantize": False, "activation": "swiglu_oai"},
    ),
    "grouped_bf16_gemm_swiglu_nt": (
        gemm_swiglu.grouped_bf16_gemm_swiglu_nt,
        Case(COUNTS, 64, 128, fp8=False),
        {"activation": "geglu"},
    ),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_as_one_graph_equals_eager(name, backend):
    function, case, options = COMPILED[name]
    instance = Instance(case, 6)
    options = {key: torch.randn(value) if isinstance(value, tuple) else value for key, value in options.items()}
    call, tensors = flat(function, instance, options)
    before = [tensor.clone() for tensor in tensors]
    torch._dynamo.reset()
    results = torch.compile(call, fullgraph=True, backend=backend)(*tensors)
    expected = call(*tensors)
    if isinstance(results, torch.Tensor):
        results, expected = (results,), (expected,)
    for result, wanted in zip(results, expected, strict=True):
        assert (result.shape, result.dtype, result.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
        for start, end in instance.written:
            rows = [x.reshape(-1, x.shape[-1])[start:end] for x in (result, wanted)]
            assert torch.equal(*rows)
    for tensor, copy in zip(tensors, before, strict=True):
        same = [x.view(torch.uint8) if x.element_size() == 1 else x for x in (tensor, copy)]
        torch.testing.assert_close(*same, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fp8", [True, False])
def test_compiled_with_pre_activations(fp8, backend):
    """The caller's tensor is written."""
    instance = Instance(Case(COUNTS, 256, 128, fp8=fp8, activation="swiglu", pre=True), 6)
    function = gemm_swiglu.grouped_fp8_gemm_swiglu_nt if fp8 else gemm_swiglu.grouped_bf16_gemm_swiglu_nt

    def call(pre, *given):
        a, b = given[:2]
        if fp8:
            a, b = Fp8Tensor(given[0], given[2], (1, 128)), Fp8Tensor(given[1], given[3], (128, 128))
        result = function(a, b, RowGroups.psum(given[-1]), pre=pre)
        return result.codes.float() if fp8 else result

    a, b = instance.a, instance.b
    tensors = (a.codes, b.codes, a.scales, b.scales) if fp8 else (a, b)
    pre = instance.poisoned_pre()
    torch._dynamo.reset()
    torch.compile(call, fullgraph=True, backend=backend)(pre, *tensors, instance.rows.index)
    instance.check_pre(pre)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fp8", [True, False])
def test_compiled_in_place(fp8, backend):
    """``out`` and ``c`` are one tensor, which the caller sees changed."""
    instance = Instance(Case(COUNTS, 64, 128, fp8=fp8, accumulate=True, out_dtype=F32), 6)
    function = gemm.grouped_fp8_gemm_nt if fp8 else gemm.grouped_bf16_gemm_nt

    def call(out, *given):
        a, b = given[:2]
        if fp8:
            a, b = Fp8Tensor(given[0], given[2], (1, 128)), Fp8Tensor(given[1], given[3], (128, 128))
        function(a, b, RowGroups.psum(given[-1]), out=out, c=out)

    a, b = instance.a, instance.b
    tensors = (a.codes, b.codes, a.scales, b.scales) if fp8 else (a, b)
    out = instance.poisoned()
    torch._dynamo.reset()
    torch.compile(call, fullgraph=True, backend=backend)(out, *tensors, instance.rows.index)
    instance.check(out)


@pytest.mark.parametrize("fp8", [True, False])
def test_operator_is_well_formed(fp8):
    """Its fake and its declared mutations, by torch's own checks."""
    from megamoe.kernels.gemm_ops import _operator

    # Whole groups: no poison, for the checks compare values.
    instance = Instance(Case((128, 0, 128), 64, 128, fp8=fp8), 6)
    a, b = instance.a, instance.b
    operands = (a.codes, a.scales, b.codes, b.scales) if fp8 else (a, None, b, None)
    tile = [128, 256, 3, 8, 1, 1, 0, 0, 0]
    # The check of mutations adds tensors, which torch cannot for FP8.
    tests = ("test_faketensor", "test_aot_dispatch_dynamic") + (() if fp8 else ("test_schema",))
    torch.library.opcheck(
        _operator,
        (*operands, "psum", instance.rows.index, None, torch.zeros(256, 64), *(None,) * 4, tile, False, *(None,) * 3),
        test_utils=tests,
    )
