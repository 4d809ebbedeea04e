"""Hopper's GEMM kernels on a GPU: every case, every legal tile, bounded indices, repeatability, graphs."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from megamoe.errors import MegaMoEError
from megamoe.kernels import gemm, gemm_ops, gemm_swiglu, tiles
from megamoe.kernels.gluon import tile_counters
from megamoe.kernels.row_groups import RowGroups
from megamoe.types import Fp8Tensor
from tests.support.gemm_cases import Case, Instance, compute, standard_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

CASES = standard_cases()


def run(case: Case, seed: int = 0, tile=None) -> torch.Tensor:
    instance = Instance(case, seed, "cuda")
    out = instance.poisoned()
    compute(instance, out, instance.rows, tile)
    torch.cuda.synchronize()
    instance.check(out)
    return out


@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    run(CASES[name])


def tile_name(tile: tiles.Tile) -> str:
    return "x".join(str(int(field)) for field in dataclasses.astuple(tile))


def all_tiles(kind: str, rows: int, out_bytes: int = 2) -> list[tiles.Tile]:
    return tiles.legal_tiles(tiles.Problem(rows, 3, 528, 1024, kind, 132, out_bytes=out_bytes))


@pytest.mark.parametrize("tile", all_tiles("masked", 64), ids=tile_name)
def test_every_tile_masked(tile):
    # More rows than a tile has, none, one, and as many; columns that end inside a tile.
    counts = (tile.block_m + 3, 0, 1, tile.block_m)
    run(Case(counts, 528, 1024, "masked", tile.block_m + 5), tile=tile)


ACTIVATED = tiles.legal_tiles(tiles.Problem(64, 4, 512, 512, "psum", 132, wide_only=True))


@pytest.mark.parametrize("kind", ["contiguous", "psum", "masked"])
@pytest.mark.parametrize("tile", ACTIVATED, ids=tile_name)
def test_every_tile_with_an_activation(tile, kind):
    counts = (100, 0, 64, 1, 129)
    run(Case(counts, 512, 512, kind, 130, activation="swiglu", weighted=True, fp8_out=True), tile=tile)


@pytest.mark.parametrize("tile", all_tiles("dense", 64), ids=tile_name)
def test_every_tile_dense(tile):
    run(Case((70,), 264, 512, "dense"), tile=tile)


@pytest.mark.parametrize("tile", all_tiles("dense", 64, 4)[::3], ids=tile_name)
def test_fp32_results(tile):
    run(Case((130,), 264, 512, "dense", out_dtype=torch.float32, accumulate=True), tile=tile)
    run(Case((70,), 264, 512, "dense", bias=True), tile=tile)


def codes_of(out) -> torch.Tensor:
    return out.codes.view(torch.uint8) if isinstance(out, Fp8Tensor) else out


@pytest.mark.parametrize("name", ["contiguous", "masked", "swiglu to fp8", "bf16, psum", "bf16 nn, masked"])
def test_same_bits_every_time(name):
    first = codes_of(run(CASES[name], 3))
    for _ in range(3):
        assert torch.equal(first.nan_to_num(), codes_of(run(CASES[name], 3)).nan_to_num())


@pytest.mark.parametrize("fp8", [True, False])
def test_rows_do_not_depend_on_the_rest(fp8):
    """Expert 1's rows give the same bits beside other rows, other counts, in every layout, whatever M_max is."""
    counts, n, k = (100, 70, 0, 33), 512, 1024
    instance = Instance(Case(counts, n, k, "masked", 128, fp8=fp8), 5, "cuda")
    start, end = instance.written[1]
    base = instance.poisoned()
    compute(instance, base, instance.rows)
    rows = base.reshape(-1, n)[start:end]

    def share(case: Case) -> torch.Tensor:
        other = Instance(case, 6, "cuda")
        first, last = other.written[1]
        if fp8:
            source = instance.a
            view = other.a.codes.view(torch.uint8).view(-1, k)
            view[first:last] = source.codes.view(torch.uint8).view(-1, k)[start:end]
            scales = source.scales.reshape(-1, k // 128)[start:end]
            if case.kind == "masked":
                other.a.scales[1, : last - first] = scales
            else:
                other.a.scales[first:last] = scales
            other.b.codes.view(torch.uint8)[1] = instance.b.codes.view(torch.uint8)[1]
            other.b.scales[1] = instance.b.scales[1]
        else:
            other.a.view(-1, k)[first:last] = instance.a.view(-1, k)[start:end]
            other.b[1] = instance.b[1]
        out = other.poisoned()
        compute(other, out, other.rows)
        return out.reshape(-1, n)[first:last]

    for case in (
        Case((3, 70, 128, 1), n, k, "masked", 128, fp8=fp8),
        Case((3, 70, 500, 1), n, k, "masked", 512, fp8=fp8),
        Case((3, 70, 0, 1), n, k, "masked", 71, fp8=fp8),
        Case((300, 70, 0, 1), n, k, "contiguous", fp8=fp8),
        Case((0, 70, 10, 600), n, k, "psum", fp8=fp8),
    ):
        assert torch.equal(rows, share(case)), case


@pytest.mark.parametrize("kind", ["contiguous", "psum", "masked"])
@pytest.mark.parametrize("fp8", [True, False])
def test_wild_indices_write_nothing_outside(kind, fp8):
    """Ids, ends and counts out of range: cut or left out; memory around the result stays as it was."""
    case = Case((128, 128, 128), 256, 256, kind, 128, fp8=fp8)
    instance = Instance(case, 7, "cuda")
    wild = {
        "contiguous": [3, -7, 2**30],
        "psum": [-5, 10**9, 64],
        "masked": [10**9, -3, 129],
    }[kind]
    index = torch.tensor(wild, dtype=torch.int32, device="cuda")
    if kind == "contiguous":
        index = index.repeat_interleave(128)
    memory = torch.full((3 * 384 * 256,), float("nan"), dtype=torch.bfloat16, device="cuda")
    out = memory[384 * 256 : 2 * 384 * 256].view(384, 256)
    out = out.view(3, 128, 256) if kind == "masked" else out
    compute(instance, out, dataclasses.replace(instance.rows, index=index))
    torch.cuda.synchronize()
    assert memory[: 384 * 256].isnan().all() and memory[2 * 384 * 256 :].isnan().all()
    written = {"contiguous": 0, "psum": 384, "masked": 256}[kind]
    assert int((~out.reshape(-1, 256).isnan()).any(1).sum()) == written


def test_offsets_past_two_to_the_31():
    # Weights of 2.4e9 elements; the result beyond 2^31 too.
    experts, n, k, rows = 5, 65536, 7424, 8192
    b = torch.randint(0, 120, (experts, n, k), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    b_scales = torch.rand(experts, n // 128, k // 128, device="cuda") / 64
    a = torch.randint(0, 120, (experts * rows, k), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    a_scales = torch.rand(k // 128, experts * rows, device="cuda").t()
    ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * rows
    out = gemm.grouped_fp8_gemm_nt(
        Fp8Tensor(a, a_scales, (1, 128)), Fp8Tensor(b, b_scales, (128, 128)), RowGroups.psum(ends)
    )
    assert out.numel() > 2**31 and b.numel() > 2**31
    last = slice(experts * rows - 64, experts * rows)
    values = a[last].float() * a_scales[last].repeat_interleave(128, 1)
    weights = b[-1, -64:].float() * b_scales[-1, -1].repeat_interleave(128)
    expected = values.double() @ weights.double().t()
    assert (out[last, -64:].double() - expected).norm() / expected.norm() < 3e-3


def test_in_a_graph():
    instance = Instance(Case((100, 0, 200), 512, 512), 8, "cuda")
    out = instance.poisoned()
    compute(instance, out, instance.rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute(instance, out, instance.rows)
    poison = instance.poisoned()
    out.copy_(poison)
    graph.replay()
    torch.cuda.synchronize()
    instance.check(out)
    # The counts are read by the kernel: another number of rows, the same graph.
    instance.rows.index.copy_(torch.tensor([40, 128, 257], dtype=torch.int32))
    out.copy_(poison)
    graph.replay()
    torch.cuda.synchronize()
    changed = (out.view(torch.int16) != poison.view(torch.int16)).any(1).nonzero().flatten().tolist()
    assert changed == [*range(40), *range(128, 257)]


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_calls_at_the_same_time(fp8, seed):
    """Results large enough for counters of tiles: streams, and graphs replayed beside them, keep their own."""
    generator = random.Random(seed)
    calls, expected = [], []
    for number in range(4):
        counts = tuple(generator.choice((0, 1, 64, 129, 500, 1100)) for _ in range(6)) + (700,)
        instance = Instance(Case(counts, 1536, 256, fp8=fp8), seed + number, "cuda")
        out = instance.poisoned()
        assert out.nbytes >= tile_counters.SPAN
        compute(instance, out, instance.rows)
        torch.cuda.synchronize()
        instance.check(out)
        calls.append((instance, out))
        expected.append(out.clone())
    graphs = []
    for instance, out in calls[:2]:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            compute(instance, out, instance.rows)
    streams = [torch.cuda.Stream() for _ in calls]
    for turn in range(60):
        for instance, out in calls:
            out.copy_(instance.poisoned())
        torch.cuda.synchronize()
        for number in generator.sample(range(4), 4):
            with torch.cuda.stream(streams[(number + turn) % 4]):
                for _ in range(3):
                    if number < 2 and turn % 3:
                        graphs[number].replay()
                    else:
                        compute(*calls[number], calls[number][0].rows)
        torch.cuda.synchronize()
        for (_, out), wanted in zip(calls, expected, strict=True):
            assert torch.equal(out.view(torch.int16), wanted.view(torch.int16)), turn
        counters = [tile_counters.counter_of(out) for _, out in calls]
        assert len({counter.data_ptr() for counter in counters}) == 4
        assert not any(counter.item() for counter in counters)


def test_fewer_sms():
    try:
        gemm.set_num_sms(7)
        assert gemm.get_num_sms() == 7
        run(CASES["psum"])
        run(CASES["bf16, masked"])
    finally:
        gemm.set_num_sms(None)
    assert gemm.get_num_sms() == gemm_ops._sm_count(torch.cuda.current_device())


def test_compiles_with_torch_compile():
    instance = Instance(CASES["psum"], 9, "cuda")

    @torch.compile(fullgraph=True)
    def function(codes, scales, b_codes, b_scales, ends):
        a, b = Fp8Tensor(codes, scales, (1, 128)), Fp8Tensor(b_codes, b_scales, (128, 128))
        return gemm.grouped_fp8_gemm_nt(a, b, RowGroups("psum", ends)) + 1

    a, b = instance.a, instance.b
    result = function(a.codes, a.scales, b.codes, b.scales, instance.rows.index)
    start, end = instance.written[2]
    expected = instance.expected[start:end] + 1
    assert (result[start:end].float() - expected).norm() / expected.norm() < 5e-3


def test_known_calls_are_launched_again():
    """The short way of a repeated call: new data in the same tensors, new tensors, other shapes, errors."""
    instance = Instance(CASES["masked"], 11, "cuda")
    out = instance.poisoned()
    for _ in range(3):
        out.copy_(instance.poisoned())
        compute(instance, out, instance.rows)
        instance.check(out)
    # Other values where the old ones lay.
    other = Instance(CASES["masked"], 12, "cuda")
    instance.a.codes.copy_(other.a.codes)
    instance.a.scales.copy_(other.a.scales)
    instance.b.codes.copy_(other.b.codes)
    instance.b.scales.copy_(other.b.scales)
    out.copy_(other.poisoned())
    compute(instance, out, instance.rows)
    other.check(out)
    # A view of the same memory with another shape is another call.
    with pytest.raises(MegaMoEError):
        gemm.grouped_fp8_gemm_nt(instance.a, instance.b, instance.rows, out=out[:, :-1])
    compute(instance, out, instance.rows)
    other.check(out)


def test_new_results_of_known_calls():
    instance = Instance(CASES["contiguous"], 13, "cuda")
    results = [gemm.grouped_fp8_gemm_nt(instance.a, instance.b, instance.rows) for _ in range(4)]
    torch.cuda.synchronize()
    assert len({result.data_ptr() for result in results}) == 4
    for start, end in instance.written:
        for result in results:
            assert torch.equal(result[start:end], results[0][start:end])
            if end > start:
                expected = instance.expected[start:end]
                assert (result[start:end].float() - expected).norm() / expected.norm() < 3e-3


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_pre_activations(bias, fp8):
    """They change nothing in the result, have the bits of the plain GEMM, and go where each call says."""
    case = Case(
        (300, 0, 1000, 128), 1024, 768, fp8=fp8, activation="swiglu", weighted=True, bias=bias, fp8_out=fp8, pre=True
    )
    instance = Instance(case, 15, "cuda")
    function = gemm_swiglu.grouped_fp8_gemm_swiglu_nt if fp8 else gemm_swiglu.grouped_bf16_gemm_swiglu_nt
    plain = gemm.grouped_fp8_gemm_nt if fp8 else gemm.grouped_bf16_gemm_nt
    operands = instance.a, instance.b, instance.rows
    options = dict(row_weights=instance.row_weights, bias=instance.bias)
    wanted = plain(*operands, bias=instance.bias)
    without = function(*operands, **options)
    for _ in range(3):
        pre = instance.poisoned_pre()
        result = function(*operands, pre=pre, **options)
        instance.check_pre(pre)
        for start, end in instance.written:
            assert torch.equal(pre[start:end], wanted[start:end])
            for field in ("codes", "scales") if fp8 else ("data",):
                got, same = (getattr(x, field)[start:end] for x in (result, without))
                assert torch.equal(got.float(), same.float())


def test_kept_launches_hold_no_memory():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    instance = Instance(Case((128,) * 4, 4096, 4096, "contiguous"), 14, "cuda")
    gemm.grouped_fp8_gemm_nt(instance.a, instance.b, instance.rows)
    del instance
    assert torch.cuda.memory_allocated() - before < 1 << 20
