"""The choice of tiles: what is legal fits and divides the problem, what is chosen is legal and sensible."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamoe.kernels import gemm, gemm_ops, reference_gemm, tiles
from megamoe.kernels.row_groups import KINDS, RowGroups
from megamoe.kernels.tiles import Problem, Tile, choose_tile, cost, legal_tiles
from tests.support.gemm_cases import Case, Instance, compute

HOPPER_SHARED_MEMORY = 227 * 1024
SIZES = st.sampled_from([8, 16, 64, 128, 136, 264, 576, 2048, 2112, 4096, 7168, 32768])
PROBLEMS = st.builds(
    Problem,
    rows=st.one_of(st.integers(0, 300), st.integers(0, 200_000)),
    groups=st.one_of(st.just(1), st.integers(1, 256)),
    n=SIZES,
    k=st.one_of(st.just(16), st.just(208), SIZES),
    kind=st.sampled_from(("dense", *KINDS)),
    sms=st.integers(1, 132),
    wide_only=st.booleans(),
    out_bytes=st.sampled_from([2, 4]),
)
DTYPES = st.sampled_from(["fp8", "bf16"])

DECODE = Problem(16, 32, 4096, 7168, "masked", 132)
PREFILL = Problem(4096, 8, 4096, 7168, "psum", 132)


def shared_bytes(tile: Tile, dtype: str) -> int:
    """Shared memory of the stages and of the result's way out, counted anew; the most that any epilogue needs."""
    if dtype == "bf16":
        stage = (tile.block_m + tile.block_n) * 64 * 2
        result = 2 * 64 * (256 if tile.stages <= 3 else 128) * 2
    elif tile.is_wide:
        stage = (tile.block_m + tile.block_n) * 128 + tile.block_m * 4 + 2 * 4
        # A tile of either consumer for each of the two widths.
        result = 2 * 64 * (128 if tile.block_n == 256 else 192) * 2
    else:
        stage = tile.k_blocks * ((tile.block_m + tile.block_n) * 128 + max(tile.block_m, 32) * 4) + 8 * 4
        # With SWAP both consumers transpose what they have, with a bias in fp32.
        columns = tile.block_m if tile.block_n == 128 else tile.block_m // 2
        result = 2 * 64 * columns * 4 if tile.swap else 0
    note_and_barriers = 4 * 4 + 2 * 8
    return tile.stages * (stage + note_and_barriers) + result + 8


@given(problem=PROBLEMS, dtype=DTYPES)
def test_legal_tiles_fit(problem, dtype):
    legal = legal_tiles(problem, dtype)
    assert legal
    for tile in legal:
        assert shared_bytes(tile, dtype) <= HOPPER_SHARED_MEMORY, tile


@given(problem=PROBLEMS, dtype=DTYPES)
def test_legal_tiles_are_well_formed(problem, dtype):
    num_k = -(-problem.k // 128)
    legal = legal_tiles(problem, dtype)
    assert len(set(legal)) == len(legal)
    for tile in legal:
        assert tile.stages >= 2 and tile.group_m >= 1
        # A loader waits for as many free stages as it requests together, while consumers hold one or two.
        assert tile.together in (1, 2) and 2 * tile.together <= tile.stages
        assert num_k % tile.k_blocks == 0, "a stage would hold K blocks of the next tile"
        assert tile.k_blocks in (1, 2, 4)
        # Each of the two consumers has 64 rows of the tensor cores' operand, or both share them.
        assert (tile.block_n if tile.swap else tile.block_m) in (64, 128)
        assert 0 <= tile.skew < tile.stages
        if not tile.is_wide:
            assert dtype == "fp8" and not problem.wide_only and tile.skew == 0
        else:
            assert tile.k_blocks == 1 and not tile.swap
        if problem.kind == "contiguous":
            assert tile.block_m == 128, "blocks of 128 rows share an expert"
        # Groups start at multiples of 128.
        assert 128 % tile.block_m == 0


@given(problem=PROBLEMS, dtype=DTYPES)
def test_choice(problem, dtype):
    chosen, legal = choose_tile(problem, dtype), legal_tiles(problem, dtype)
    assert chosen in legal
    assert chosen == choose_tile(replace(problem), dtype)
    costs = [cost(tile, problem) for tile in legal]
    assert cost(chosen, problem) == min(costs)
    assert all(0 < value < float("inf") for value in costs)


@given(problem=PROBLEMS, dtype=DTYPES)
def test_more_work_never_costs_less(problem, dtype):
    tile = choose_tile(problem, dtype)
    more = [
        replace(problem, n=problem.n * 2),
        replace(problem, k=problem.k * 2),
        replace(problem, groups=problem.groups * 2),
    ]
    if problem.groups * problem.n // tile.block_n >= problem.sms:
        # Else further blocks of rows may put idle multiprocessors to work.
        more.append(replace(problem, rows=problem.rows * 16))
    for larger in more:
        assert cost(tile, larger) >= cost(tile, problem), larger


@given(problem=PROBLEMS)
def test_more_multiprocessors_never_cost_more(problem):
    tile = choose_tile(problem)
    # As many tiles per wave as bandwidth allows: whole multiples, or waves would be cut differently.
    assert cost(tile, replace(problem, sms=2 * problem.sms)) <= cost(tile, problem) + 1e-9


@pytest.mark.parametrize(
    ("rows", "k", "dtype", "bands"),
    [
        (1, 7168, "fp8", 1), (128, 7168, "fp8", 1), (600, 7168, "fp8", 4), (1024, 7168, "fp8", 8),
        (4096, 7168, "fp8", 16), (4096, 4096, "fp8", 32), (4096, 4096, "bf16", 16), (4096, 2048, "bf16", 32),
        (3900, 2048, "bf16", 16),
    ],
)  # fmt: skip
def test_bands_are_as_wide_as_a_group_and_l2_allow(rows, k, dtype, bands):
    assert legal_tiles(Problem(rows, 8, 7168, k, "psum", 132), dtype)[0].group_m == bands


def test_half_tiles_where_whole_ones_leave_multiprocessors_idle():
    """64 tiles of 128 rows for 132 multiprocessors, but not 128 of them; and with an activation only."""
    few = Problem(128, 8, 2048, 4096, "contiguous", 132, True, 1, 8)
    assert choose_tile(few).halved
    assert not choose_tile(replace(few, n=4096)).halved
    assert not any(tile.halved for tile in legal_tiles(replace(few, wide_only=False)))
    assert not any(tile.halved for tile in legal_tiles(few, "bf16"))
    half = Tile(128, 256, 3, halved=True)
    assert tiles.is_legal(half, few) and not tiles.is_legal(half, replace(few, wide_only=False))


def test_blocks_that_are_known_count():
    """77 blocks of skewed experts, where the usual rows of an expert would make 96."""
    usual = Problem(308, 32, 1536, 4096, "contiguous", 132)
    assert choose_tile(usual).block_n == 192 and choose_tile(replace(usual, blocks=77)).block_n == 256


def test_few_rows_take_narrow_tiles_and_many_the_wide_one():
    assert not choose_tile(DECODE).is_wide
    assert choose_tile(PREFILL).is_wide
    assert choose_tile(replace(DECODE, rows=1)).block_m <= 32
    blocks = [choose_tile(replace(DECODE, rows=rows)).block_m for rows in (1, 16, 64, 4096)]
    assert blocks == sorted(blocks), f"more rows, smaller tiles: {blocks}"
    assert choose_tile(replace(PREFILL, rows=1), "bf16").is_wide


def test_a_fused_activation_takes_the_wide_tile():
    assert all(tile.is_wide for tile in legal_tiles(replace(DECODE, wide_only=True)))


def test_order_of_the_fields_that_the_operator_passes_on():
    assert astuple(Tile(16, 64, 5, 3, 2, 4, True, 1, False)) == (16, 64, 5, 3, 2, 4, True, 1, False)


# ---------------------------------------------------------------- from calls to problems


@pytest.fixture
def problems(monkeypatch):
    """The problems and tiles of the calls that follow; results come from the reference."""
    from megamoe.kernels.gluon import launch

    seen = []

    def gemm_of(kind, x, tile, sms, *, activation, clamp, transposed_b):
        seen.append((kind, tile, sms))
        out = x.out
        rows = None if kind == "dense" else RowGroups(kind, x.index)
        assert kind in ("dense", "psum"), "the operands of the other kinds are reshaped"
        scales = None if x.a_scales is None else x.a_scales.t()
        reference_gemm.gemm(
            x.a, scales, x.b, x.b_scales, rows, out, None, x.c, x.bias, x.row_weights, transposed_b, activation, clamp
        )

    monkeypatch.setattr(launch, "gemm", gemm_of)
    monkeypatch.setattr(gemm_ops, "runs_kernels", lambda tensor: True)
    monkeypatch.setattr(gemm_ops, "_sm_count", lambda index: 132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return seen


pytest.importorskip("triton.experimental.gluon")


def test_tile_can_be_given(problems):
    instance = Instance(Case((40, 0, 9), 256, 512))
    given_tile = Tile(64, 16, 3)
    for tile in (None, given_tile):
        out = instance.poisoned()
        compute(instance, out, instance.rows, tile)
        instance.check(out)
    (kind, chosen, sms), (_, used, _) = problems
    assert (kind, sms) == ("psum", 132)
    assert used is given_tile and chosen != given_tile
    assert chosen == choose_tile(Problem(-(-instance.num_rows // 3), 3, 256, 512, "psum", 132))


def test_expected_rows_decide_on_the_tile_only(problems):
    instance = Instance(Case((40, 0, 9), 256, 512))
    for expected in (1, 100_000):
        out = instance.poisoned()
        compute(instance, out, instance.with_rows(expected=expected))
        instance.check(out)
    (_, few, _), (_, many, _) = problems
    sizes = Problem(1, 3, 256, 512, "psum", 132)
    assert few == choose_tile(sizes)
    # No more rows than the matrix has.
    assert many == choose_tile(replace(sizes, rows=instance.num_rows))


def test_fewer_multiprocessors(problems):
    instance = Instance(Case((150,), 256, 256, "dense"))
    try:
        for count, used in ((None, 132), (20, 20), (500, 132)):
            gemm.set_num_sms(count)
            assert gemm.get_num_sms() == used
            out = instance.poisoned()
            compute(instance, out, None)
            kind, tile, sms = problems[-1]
            assert (kind, sms) == ("dense", used)
            assert tile == choose_tile(Problem(150, 1, 256, 256, "dense", used))
    finally:
        gemm.set_num_sms(None)


def test_kinds_of_problem():
    a, masked = torch.empty(256, 512), torch.empty(4, 96, 512)
    index = torch.zeros(4, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm_ops, "get_num_sms", lambda device=None: 7)

        def problem(rows, operand, wide_only=False):
            return gemm_ops.problem_of(rows, operand, 4, 64, wide_only)

        assert problem(None, a) == Problem(256, 4, 64, 512, "dense", 7)
        assert problem(RowGroups.psum(index), a, True) == Problem(64, 4, 64, 512, "psum", 7, True)
        assert problem(RowGroups.masked(index), masked) == Problem(96, 4, 64, 512, "masked", 7)
        assert problem(RowGroups.masked(index, 12), masked) == Problem(12, 4, 64, 512, "masked", 7)
        assert problem(RowGroups.masked(index, 97), masked) == Problem(96, 4, 64, 512, "masked", 7)
        ids = torch.zeros(256, dtype=torch.int32)
        assert problem(RowGroups.contiguous(ids, 0), a) == Problem(0, 4, 64, 512, "contiguous", 7, blocks=2)


def test_constants():
    assert tiles.SHARED_MEMORY == HOPPER_SHARED_MEMORY
    assert 0 < tiles.RESERVED < 8192
