"""The public K-grouped GEMMs on a CPU: every case and random ones against fp64 products, wild ends, torch.compile."""

from __future__ import annotations

import random

import pytest
import torch

from megamoe.kernels import gemm_k, quant, reference_gemm
from megamoe.kernels.row_groups import RowGroups
from megamoe.kernels.tiles import (
    K_FORMS,
    RESERVED,
    SHARED_MEMORY,
    Tile,
    is_legal_k,
    k_form,
    k_stage_bytes,
    k_step_rows,
    legal_k_tiles,
    store_columns,
)
from megamoe.types import Fp8Tensor
from tests.support.errors import fails
from tests.support.k_gemm_cases import KCase, KInstance, compute, operands_of, standard_cases

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
CASES = standard_cases()
FUNCTIONS = {False: gemm_k.k_grouped_bf16_gemm_tn, True: gemm_k.k_grouped_fp8_gemm_tn}


def ends_of(values) -> RowGroups:
    return RowGroups.psum(torch.tensor(values, dtype=INT32))


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("name", CASES)
def test_cases(name, seed):
    instance = KInstance(CASES[name], seed)
    out = instance.poisoned()
    assert compute(instance, out) is out
    instance.check(out)


@pytest.mark.parametrize("form", K_FORMS)
def test_random_cases(form, seed):
    choose = random.Random(seed)
    for _ in range(6):
        counts = tuple(choose.choice((0, 1, choose.randint(1, 300), 64, 128)) for _ in range(choose.randint(1, 5)))
        case = KCase(
            counts,
            8 * choose.randint(1, 20),
            8 * choose.randint(1, 20),
            128 * choose.randint(0, 1),
            form != "bf16",
            choose.random() < 0.5,
            choose.choice((FP32, BF16)),
            form == "fp8-blocks",
        )
        instance = KInstance(case, seed)
        if instance.num_rows:
            out = instance.poisoned()
            compute(instance, out)
            instance.check(out)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("fp8", [False, True])
def test_new_results(fp8, dtype, seed):
    instance = KInstance(KCase((5, 0, 130), 64, 96, fp8=fp8, out_dtype=dtype), seed)
    options = {} if dtype == FP32 else dict(out_dtype=dtype)
    out = FUNCTIONS[fp8](instance.a, instance.b, instance.rows, **options)
    assert out.dtype == dtype and out.is_contiguous() and not out.requires_grad
    instance.check(out)


@pytest.mark.parametrize("fp8", [False, True])
def test_addend_elsewhere(fp8, seed):
    instance = KInstance(KCase((5, 0, 130), 64, 96, fp8=fp8, add=True), seed)
    c = instance.old.clone()
    for out in (None, torch.full_like(c, float("nan"))):
        result = FUNCTIONS[fp8](instance.a, instance.b, instance.rows, out=out, c=c)
        instance.check(result)
        assert torch.equal(c, instance.old)


def test_accumulator_of_an_empty_expert_keeps_its_bits():
    instance = KInstance(KCase((0, 3), 8, 8, add=True))
    out = torch.full((2, 8, 8), -0.0)
    compute(instance, out)
    assert torch.signbit(out[0]).all()


@pytest.mark.parametrize("quantize_b", [quant.quantize_columnwise, quant.quantize_blockwise])
def test_codes_in_either_order(quantize_b, seed):
    """As the casts make them, and dense along the rows: the same bits."""
    x, y = torch.randn(256, 64), torch.randn(256, 96)
    a, b = quant.quantize_columnwise(x), quantize_b(y)
    turned = [Fp8Tensor(z.codes.t().contiguous().t(), z.scales, z.block) for z in (a, b)]
    rows = ends_of([100, 200])
    expected = gemm_k.k_grouped_fp8_gemm_tn(a, b, rows)
    assert torch.equal(gemm_k.k_grouped_fp8_gemm_tn(*turned, rows), expected)
    assert torch.equal(gemm_k.k_grouped_fp8_gemm_tn(a, turned[1], rows), expected)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_nothing_to_sum_or_to_store(fp8, add):
    def operand(rows, columns):
        x = torch.zeros(rows, columns)
        return quant.quantize_columnwise(x) if fp8 else x.to(BF16)

    # No rows at all.
    out = torch.full((2, 8, 16), 3.0)
    FUNCTIONS[fp8](operand(0, 8), operand(0, 16), ends_of([0, 0]), out=out, c=out if add else None)
    assert torch.equal(out, torch.full_like(out, 3.0 if add else 0.0))
    # No experts, and no columns.
    assert FUNCTIONS[fp8](operand(128, 8), operand(128, 16), ends_of([])).shape == (0, 8, 16)
    assert FUNCTIONS[fp8](operand(128, 0), operand(128, 16), ends_of([9])).shape == (1, 0, 16)


# ---------------------------------------------------------------- rows


def test_rows_of_ascending_ends_are_those_of_the_psum_layout(seed):
    choose = random.Random(seed)
    for _ in range(50):
        ends, position = [], 0
        for _ in range(choose.randint(1, 6)):
            position = -(-position // 128) * 128
            position += choose.choice((0, choose.randint(0, 300)))
            ends.append(position)
        rows, num_rows = ends_of(ends), max(position + choose.randint(-200, 100), 0)
        layout = reference_gemm.k_layout(rows, num_rows)
        wanted = [(start, end) for start, end in rows.spans(num_rows) if end > start]
        assert [(start, end) for start, end in layout.spans() if end > start] == wanted


HUGE = 2**31 - 1


@pytest.mark.parametrize(
    ("ends", "spans"),
    [
        ((HUGE, HUGE), [(0, 384), (384, 384)]),
        ((-5, 130), [(0, 0), (0, 130)]),
        ((300, 50, 384), [(0, 300), (384, 384), (128, 384)]),
        ((-(2**31), 1, -1), [(0, 0), (0, 1), (128, 128)]),
    ],
    ids=str,
)
def test_wild_ends_are_cut_to_the_matrix(ends, spans, seed):
    layout = reference_gemm.k_layout(ends_of(ends), 384)
    assert layout.spans() == spans
    a, b = torch.randn(384, 8).to(BF16), torch.randn(384, 16).to(BF16)
    out = gemm_k.k_grouped_bf16_gemm_tn(a, b, ends_of(ends))
    for expert, (start, end) in enumerate(spans):
        expected = a[start:end].double().t() @ b[start:end].double()
        torch.testing.assert_close(out[expert].double(), expected, rtol=1e-5, atol=1e-4)


# ---------------------------------------------------------------- tiles


@pytest.mark.parametrize("form", K_FORMS)
@pytest.mark.parametrize("out_bytes", [2, 4])
def test_tiles(form, out_bytes):
    tiles = legal_k_tiles(form)
    assert len(set(tiles)) == len(tiles) >= 4
    for tile in tiles:
        assert is_legal_k(tile, form, out_bytes)
        columns = store_columns(tile.stages, form, out_bytes)
        # What is stored at once or a part of it, of which two take turns.
        assert columns & (columns - 1) == 0 and 64 <= columns * out_bytes and columns <= (256 if form == "bf16" else 64)
        buffers = 4 if form != "bf16" else 1 if columns == 256 else 2
        memory = tile.stages * k_stage_bytes(tile.stages, form) + buffers * 64 * columns * out_bytes
        assert memory <= SHARED_MEMORY - RESERVED
        row_bytes = 384 * (2 if form == "bf16" else 1)
        assert k_step_rows(tile.stages, form) * row_bytes <= k_stage_bytes(tile.stages, form)
    first = tiles[0]
    for other in (
        Tile(128, 192, first.stages),
        Tile(128, 256, 10),
        Tile(128, 256, 1),
        Tile(128, 256, 3, group_m=0),
        Tile(128, 256, 3, together=2),
        Tile(128, 256, 3, skew=3),
        Tile(128, 256, 3, halved=True),
    ):
        assert not is_legal_k(other, form, out_bytes), other
    assert is_legal_k(Tile(128, 256, 2), form, out_bytes)
    assert is_legal_k(Tile(128, 256, 3, skew=1), form, out_bytes) == (form == "bf16")
    assert is_legal_k(Tile(128, 256, 6), form, out_bytes) == (form == "bf16")


def test_forms():
    assert k_form(256, None) == "bf16"
    for columns in (8, 128, 136):
        assert k_form(columns, columns) == "fp8"
        assert k_form(columns, -(-columns // 128)) == "fp8-blocks"


# ---------------------------------------------------------------- torch.compile


def flat(instance: KInstance):
    """The call as a function of plain tensors, and these."""
    case = instance.case

    def call(out, ends, *given):
        a, b = given[:2]
        if case.fp8:
            blocks = instance.a.block, instance.b.block
            a, b = (Fp8Tensor(*parts) for parts in zip(given[:2], given[2:], blocks, strict=True))
        return FUNCTIONS[case.fp8](a, b, RowGroups.psum(ends), out=out, c=out if case.add else None)

    a, b = instance.a, instance.b
    return call, (a.codes, b.codes, a.scales, b.scales) if case.fp8 else (a, b)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("form", K_FORMS)
def test_compiled_as_one_graph_equals_eager(form, add, backend):
    instance = KInstance(KCase((5, 0, 130), 64, 136, add=add, **operands_of(form)), 3)
    call, tensors = flat(instance)
    outs = [instance.poisoned(), instance.poisoned()]
    torch._dynamo.reset()
    torch.compile(call, fullgraph=True, backend=backend)(outs[0], instance.rows.index, *tensors)
    call(outs[1], instance.rows.index, *tensors)
    instance.check(outs[0])
    assert torch.equal(*outs)


@pytest.mark.parametrize("fp8", [False, True])
def test_compiled_new_result(fp8):
    instance = KInstance(KCase((5, 0, 130), 64, 96, fp8=fp8), 3)
    call, tensors = flat(instance)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: call(None, *given) + 1, fullgraph=True, backend="aot_eager")
    result = compiled(instance.rows.index, *tensors)
    assert result.dtype == FP32
    instance.check(result - 1)


@pytest.mark.parametrize("fp8", [False, True])
def test_operator_is_well_formed(fp8):
    """Its fake and its declared mutations, by torch's own checks."""
    from megamoe.kernels.gemm_k_ops import _operator

    # Whole groups: no poison, for the checks compare values.
    instance = KInstance(KCase((128, 128), 64, 96, fp8=fp8))
    a, b = instance.a, instance.b
    operands = (a.codes, a.scales, b.codes, b.scales) if fp8 else (a, None, b, None)
    # The check of mutations adds tensors, which torch cannot for FP8.
    tests = ("test_faketensor", "test_aot_dispatch_dynamic") + (() if fp8 else ("test_schema",))
    tile = [128, 256, 3, 8, 1, 1, 0, 0, 0]
    out = torch.zeros(2, 64, 96)
    torch.library.opcheck(_operator, (*operands, instance.rows.index, out, True, tile), test_utils=tests)


# ---------------------------------------------------------------- errors

P, M, N = 256, 64, 96


def operand(fp8: bool, rows: int = P, columns: int = M):
    x = torch.zeros(rows, columns)
    return quant.quantize_columnwise(x) if fp8 else x.to(BF16)


def call(fp8: bool, **changes):
    fields = dict(a=operand(fp8), b=operand(fp8, columns=N), rows=ends_of([100, 256]))
    fields.update(changes)
    return FUNCTIONS[fp8](fields.pop("a"), fields.pop("b"), fields.pop("rows"), **fields)


@pytest.mark.parametrize("fp8", [False, True])
def test_what_both_refuse(fp8):
    call(fp8)
    with fails(TypeError, "rows", "list", "must be a RowGroups"):
        call(fp8, rows=[100, 256])
    with fails(ValueError, "rows.kind", "masked", "must be 'psum'"):
        call(fp8, rows=RowGroups.masked(torch.ones(2, dtype=INT32)))
    with fails(ValueError, "rows.index.device", "meta", "must be cpu"):
        call(fp8, rows=RowGroups.psum(torch.ones(2, dtype=INT32, device="meta")))
    for options in (dict(out_dtype=torch.float16), dict(out=torch.zeros(2, M, N, dtype=torch.float16))):
        with fails(ValueError, "out_dtype", torch.float16, "must be torch.bfloat16 or torch.float32"):
            call(fp8, **options)
    with fails(ValueError, "out.shape", [2, N, M], f"must be [2, {M}, {N}]"):
        call(fp8, out=torch.zeros(2, N, M))
    with fails(ValueError, "out.stride()", (M * N, 1, M), "must be contiguous"):
        call(fp8, out=torch.zeros(2, N, M).mT)
    with fails(ValueError, "out.data_ptr() % 16", 4, "must be 0"):
        call(fp8, out=torch.zeros(2 * M * N + 1)[1:].view(2, M, N))
    with fails(TypeError, "c.dtype", BF16, "must be one of torch.float32"):
        call(fp8, c=torch.zeros(2, M, N, dtype=BF16))
    with fails(ValueError, "c.shape", [1, M, N], f"must be [2, {M}, {N}]"):
        call(fp8, c=torch.zeros(1, M, N))


def test_what_bf16_refuses():
    with fails(TypeError, "a", "Fp8Tensor", "must be a torch.Tensor"):
        call(False, a=operand(True))
    with fails(TypeError, "b.dtype", FP32, "must be one of torch.bfloat16"):
        call(False, b=torch.zeros(P, N))
    with fails(ValueError, "b.shape", [P + 128, N], f"must be [{P}, any]"):
        call(False, b=operand(False, P + 128, N))
    with fails(ValueError, "a.shape[1]", 60, "must be a multiple of 8"):
        call(False, a=operand(False, columns=60))
    with fails(ValueError, "b.shape[1]", 92, "must be a multiple of 8"):
        call(False, b=operand(False, columns=92))
    with fails(ValueError, "a.stride()", (1, P), "must be contiguous"):
        call(False, a=operand(False, M, P).t())
    with fails(ValueError, "b.data_ptr() % 16", 2, "must be 0"):
        call(False, b=torch.zeros(P * N + 1, dtype=BF16)[1:].view(P, N))


def test_what_fp8_refuses():
    a = operand(True)
    with fails(TypeError, "a", "Tensor", "must be an Fp8Tensor"):
        call(True, a=operand(False))
    with fails(ValueError, "b.block", (1, 128), "must be (128, 1) or (128, 128)"):
        call(True, b=quant.quantize_rowwise(torch.zeros(P, N)))
    with fails(ValueError, "a.block", (128, 128), "must be (128, 1)"):
        call(True, a=quant.quantize_blockwise(torch.zeros(P, M)))
    in_blocks = quant.quantize_blockwise(torch.zeros(P, 136))
    call(True, b=in_blocks)
    with fails(ValueError, "b.scales.shape", [2, 1], "must be [2, 2]"):
        call(True, b=Fp8Tensor(in_blocks.codes, in_blocks.scales[:, :1], in_blocks.block))
    with fails(ValueError, "b.scales.stride()", (1, 2), "must be contiguous"):
        call(True, b=Fp8Tensor(in_blocks.codes, in_blocks.scales.t().contiguous().t(), in_blocks.block))
    with fails(ValueError, "b.codes.shape", [P + 128, N], f"must be [{P}, any]"):
        call(True, b=operand(True, P + 128, N))
    with fails(ValueError, "a.codes.shape[0]", 136, "must be a multiple of 16"):
        call(True, a=operand(True, 136), b=operand(True, 136, N))
    with fails(ValueError, "a.codes.shape[1]", 60, "must be a multiple of 8"):
        call(True, a=operand(True, columns=60))
    wide = Fp8Tensor(torch.zeros(P, 2 * M, dtype=torch.float8_e4m3fn)[:, :M], a.scales, a.block)
    with fails(ValueError, "a.codes.stride()", (2 * M, 1), "must be dense along rows or columns"):
        call(True, a=wide)
    with fails(ValueError, "a.scales.stride()", (1, 2), "must be contiguous"):
        call(True, a=Fp8Tensor(a.codes, a.scales.t().contiguous().t(), a.block))
    with fails(ValueError, "a.scales.shape", [1, M], f"must be [2, {M}]"):
        call(True, a=Fp8Tensor(a.codes, a.scales[:1], a.block))
