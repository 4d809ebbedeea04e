"""Hopper's K-grouped kernels on a GPU: what they expect of TMA, every case and tile, repeatability, graphs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megamoe.kernels import gemm, gemm_k, quant
from megamoe.kernels.row_groups import RowGroups
from megamoe.kernels.tiles import K_FORMS, Tile, legal_k_tiles
from megamoe.types import Fp8Tensor
from tests.support.k_gemm_cases import KCase, KInstance, compute, operands_of, standard_cases
from tests.support.metrics import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

CASES = standard_cases()
BF16, INT32 = torch.bfloat16, torch.int32
FORM = pytest.mark.parametrize("form", K_FORMS)


def function_of(form: str):
    return gemm_k.k_grouped_bf16_gemm_tn if form == "bf16" else gemm_k.k_grouped_fp8_gemm_tn


def casts_of(form: str) -> tuple:
    """What makes either operand from fp32."""
    if form == "bf16":
        return (torch.Tensor.bfloat16,) * 2
    return quant.quantize_columnwise, quant.quantize_blockwise if form == "fp8-blocks" else quant.quantize_columnwise


def run(case: KCase, seed: int = 0, tile: Tile | None = None) -> torch.Tensor:
    instance = KInstance(case, seed, "cuda")
    out = instance.poisoned()
    compute(instance, out, tile)
    torch.cuda.synchronize()
    instance.check(out)
    return out


# ---------------------------------------------------------------- one assumption about TMA at a time


@FORM
def test_whole_steps(form):
    """Boxes inside of the matrix: operands' orders, steps, results' boxes."""
    run(KCase((128,), 128, 256, **operands_of(form)))
    run(KCase((384, 128), 256, 512, **operands_of(form)))


@FORM
@pytest.mark.parametrize("count", [112, 1, 127])
def test_boxes_that_start_before_the_tensor(form, count):
    """The rest of a step is zeros; in FP8 the loader clears some of it, but for 112 rows."""
    run(KCase((count,), 128, 256, **operands_of(form)))


@FORM
def test_boxes_outside_of_the_tensor(form):
    """Their bytes are counted too: an expert without rows, columns past the operands'."""
    run(KCase((0, 128), 128, 256, **operands_of(form)))
    run(KCase((128,), 64, 128, **operands_of(form)))


@FORM
@pytest.mark.parametrize("out_dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_additions(form, out_dtype):
    run(KCase((128,), 128, 256, **operands_of(form), add=True, out_dtype=out_dtype))


# ---------------------------------------------------------------- cases


@pytest.mark.parametrize("name", CASES)
def test_cases(name, seed):
    run(CASES[name], seed)


def tile_name(x: Tile | str) -> str:
    return x if isinstance(x, str) else "x".join(str(int(field)) for field in dataclasses.astuple(x))


TILES = [(form, tile) for form in K_FORMS for tile in (*legal_k_tiles(form), Tile(128, 256, 2, group_m=1))]


@pytest.mark.parametrize("out_dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("add", [False, True], ids=["stored", "added"])
@pytest.mark.parametrize(("form", "tile"), TILES, ids=tile_name)
def test_every_tile(form, tile, add, out_dtype, seed):
    counts = (1, 0, 320, 600, 2000, 64)
    run(KCase(counts, 1152, 776, 128, add=add, out_dtype=out_dtype, **operands_of(form)), seed, tile)


@FORM
def test_many_experts(form, seed):
    counts = tuple(torch.randint(0, 300, (200,), generator=torch.Generator().manual_seed(seed)).tolist())
    run(KCase(counts, 384, 264, **operands_of(form)), seed)
    run(KCase(counts, 136, 512, **operands_of(form), add=True, out_dtype=BF16), seed)


@FORM
@pytest.mark.parametrize("columns", [768, 1408, 192])
def test_columns_that_no_tile_divides(form, columns, seed):
    run(KCase((128, 256, 0, 384), columns, columns, **operands_of(form)), seed)


# ---------------------------------------------------------------- the same bits


@FORM
@pytest.mark.parametrize("add", [False, True], ids=["stored", "added"])
def test_same_bits_every_time(form, add):
    case = KCase((300, 1000, 0, 33), 512, 776, **operands_of(form), add=add)
    first = run(case, 3)
    for _ in range(3):
        assert torch.equal(first, run(case, 3))
    try:
        gemm.set_num_sms(7)
        assert torch.equal(first, run(case, 3))
    finally:
        gemm.set_num_sms(None)


@FORM
def test_an_expert_does_not_depend_on_the_rest(form, seed):
    count, columns = 170, (256, 264)
    generator = torch.Generator("cuda").manual_seed(seed)
    x, y = (torch.randn(256, n, generator=generator, device="cuda") for n in columns)
    x[count:] = y[count:] = 0
    results = []
    for before, after in ((0, 0), (300, 40), (0, 999)):
        starts = [0, -(-before // 128) * 128]
        ends = [before, starts[1] + count, starts[1] + 256 + after]
        operands = []
        for own in (x, y):
            whole = torch.randn(-(-ends[-1] // 128) * 128, own.shape[1], generator=generator, device="cuda")
            whole[starts[1] : starts[1] + 256] = own
            operands.append(whole)
        operands = [cast(whole) for cast, whole in zip(casts_of(form), operands, strict=True)]
        rows = RowGroups.psum(torch.tensor(ends, dtype=INT32, device="cuda"))
        results.append(function_of(form)(*operands, rows)[1])
    assert all(torch.equal(results[0], result) for result in results[1:])


# ---------------------------------------------------------------- bounds


@FORM
@pytest.mark.parametrize("ends", [(2**31 - 1,) * 3, (300, 50, 420), (-(2**31), 1, -1)], ids=str)
def test_wild_ends_write_nothing_outside(form, ends):
    instance = KInstance(KCase((128, 128, 112), 256, 264, spare=-16, **operands_of(form)), 7, "cuda")
    rows = RowGroups.psum(torch.tensor(ends, dtype=INT32, device="cuda"))
    size = instance.old.numel()
    memory = torch.full((3 * size,), float("nan"), device="cuda")
    out = memory[size : 2 * size].view(instance.old.shape)
    compute(instance, out, rows=rows)
    torch.cuda.synchronize()
    assert memory[:size].isnan().all() and memory[2 * size :].isnan().all()
    on_cpu = KInstance(instance.case, 7)
    for mine, theirs in ((on_cpu.a, instance.a), (on_cpu.b, instance.b)):
        for field in () if form == "bf16" else ("codes", "scales"):
            getattr(mine, field).copy_(getattr(theirs, field))
        if form == "bf16":
            mine.copy_(theirs)
    expected = torch.empty_like(out, device="cpu")
    compute(on_cpu, expected, rows=RowGroups.psum(torch.tensor(ends, dtype=INT32)))
    for expert in range(3):
        assert_close(out[expert].cpu(), expected[expert], 3e-4, f"expert {expert}")


def test_offsets_past_two_to_the_31():
    """A result of 2.4e9 elements, and operands of 2.2e9."""
    experts, m, n = 41, 8192, 7168
    rows, columns = 300_000, 7424
    a = torch.zeros(experts * 128, m, dtype=BF16, device="cuda").normal_()
    b = torch.zeros(experts * 128, n, dtype=BF16, device="cuda").normal_()
    ends = torch.arange(1, experts + 1, device="cuda", dtype=INT32) * 128
    out = gemm_k.k_grouped_bf16_gemm_tn(a, b, RowGroups.psum(ends), out_dtype=BF16)
    assert out.numel() > 2**31
    expected = a[-128:, -256:].double().t() @ b[-128:, -256:].double()
    assert_close(out[-1, -256:, -256:], expected, 3e-3)
    del a, b, out
    a = torch.zeros(rows, columns, dtype=BF16, device="cuda").normal_()
    assert a.numel() > 2**31
    ends = torch.tensor([rows - 200, rows - 1], device="cuda", dtype=INT32)
    out = gemm_k.k_grouped_bf16_gemm_tn(a, a[:, :64].contiguous(), RowGroups.psum(ends))
    start = -(-(rows - 200) // 128) * 128
    expected = a[start : rows - 1, -64:].double().t() @ a[start : rows - 1, :64].double()
    assert_close(out[1, -64:], expected, 1e-5)


# ---------------------------------------------------------------- calls


@FORM
def test_in_a_graph(form):
    case = KCase((100, 0, 200), 256, 264, **operands_of(form))
    instance = KInstance(case, 8, "cuda")
    out = instance.poisoned()
    compute(instance, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute(instance, out)
    out.copy_(instance.poisoned())
    graph.replay()
    torch.cuda.synchronize()
    instance.check(out)
    # The ends are read by the kernel: other numbers of rows, the same graph.
    instance.rows.index.copy_(torch.tensor([40, 128, 257], dtype=INT32))
    graph.replay()
    torch.cuda.synchronize()
    a, b = ((x if form == "bf16" else quant.dequantize(x)).double() for x in (instance.a, instance.b))
    for expert, (start, end) in enumerate([(0, 40), (128, 128), (128, 257)]):
        assert_close(out[expert], a[start:end].t() @ b[start:end], 3e-4, f"expert {expert}")


@FORM
def test_known_calls_are_launched_again(form):
    """The short way of a repeated call, overwriting and accumulating, with new data in the same tensors."""
    instance = KInstance(KCase((128, 256), 256, 264, **operands_of(form), add=True), 11, "cuda")
    out = instance.poisoned()
    for repeat in range(1, 4):
        compute(instance, out)
        assert_close(out, instance.old + repeat * instance.sums, 3e-4)
    function = function_of(form)
    for _ in range(3):
        out.fill_(float("nan"))
        function(instance.a, instance.b, instance.rows, out=out)
        assert_close(out, instance.sums, 3e-4)
    instance.rows.index.copy_(torch.tensor([0, 0], dtype=INT32))
    function(instance.a, instance.b, instance.rows, out=out)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("form", ["fp8", "fp8-blocks"])
def test_codes_in_either_order(form, seed):
    x, y = torch.randn(256, 128, device="cuda"), torch.randn(256, 264, device="cuda")
    a, b = (cast(z) for cast, z in zip(casts_of(form), (x, y), strict=True))
    turned = [Fp8Tensor(z.codes.t().contiguous().t(), z.scales, z.block) for z in (a, b)]
    rows = RowGroups.psum(torch.tensor([100, 200], dtype=INT32, device="cuda"))
    expected = gemm_k.k_grouped_fp8_gemm_tn(*turned, rows)
    assert torch.equal(gemm_k.k_grouped_fp8_gemm_tn(a, b, rows), expected)


@FORM
def test_compiles_with_torch_compile(form):
    instance = KInstance(KCase((100, 0, 200), 256, 264, **operands_of(form)), 9, "cuda")
    a, b = instance.a, instance.b

    @torch.compile(fullgraph=True)
    def function(ends, *given):
        if form == "bf16":
            return gemm_k.k_grouped_bf16_gemm_tn(*given, RowGroups.psum(ends)) + 1
        operands = Fp8Tensor(*given[:2], a.block), Fp8Tensor(*given[2:], b.block)
        return gemm_k.k_grouped_fp8_gemm_tn(*operands, RowGroups.psum(ends)) + 1

    tensors = (a, b) if form == "bf16" else (a.codes, a.scales, b.codes, b.scales)
    instance.check(function(instance.rows.index, *tensors) - 1)
