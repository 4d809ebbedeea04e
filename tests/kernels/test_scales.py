"""Scale layouts: every word and stride by index arithmetic on storage, exponents by ``math.frexp``, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.kernels.scales import (
    is_mn_major,
    pack_ue8m0,
    pack_ue8m0_k_grouped,
    tma_aligned_size,
    to_mn_major,
    unpack_ue8m0,
)
from tests.support.errors import fails
from tests.support.plain_scales import (
    align,
    expected_words,
    mn_major_copy,
    psum_rows,
    random_scales,
    storage_of,
    word_of,
)

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("size", "element_size", "expected"),
    [(0, 4, 0), (1, 4, 4), (4, 4, 4), (5, 4, 8), (16, 1, 16), (17, 1, 32), (9, 2, 16), (7, 8, 8)],
)
def test_tma_aligned_size_rounds_up_to_16_bytes(size, element_size, expected):
    assert tma_aligned_size(size, element_size) == expected


# ---------------------------------------------------------------- MN-major

SHAPES = [
    pytest.param((8, 3), id="mn-aligned"),
    pytest.param((7, 3), id="mn-padded"),
    pytest.param((1, 5), id="one-row"),
    pytest.param((129, 1), id="one-column"),
    pytest.param((4, 1), id="row-major-and-mn-major-look-alike"),
    pytest.param((3, 6, 5), id="groups"),
    pytest.param((1, 4, 2), id="one-group"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_mn_major_places_each_scale_at_its_offset(shape, seed):
    x = torch.randn(shape)
    result = to_mn_major(x)
    *groups, mn, k = shape
    padded = align(mn, 4)
    assert result.shape == x.shape
    assert result.stride()[-2:] == (1, padded)
    assert not groups or result.stride(0) == padded * k
    assert result.data_ptr() % 16 == 0
    memory = storage_of(result).flatten().tolist()
    expected = [0.0] * len(memory)
    for group, matrix in enumerate(x.reshape(-1, mn, k).tolist()):
        for i in range(mn):
            for j in range(k):
                expected[group * k * padded + j * padded + i] = matrix[i][j]
    assert memory == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_mn_major_scales_are_returned_themselves(shape, seed):
    x = mn_major_copy(torch.randn(shape))
    assert is_mn_major(x)
    assert to_mn_major(x) is x


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.randn(6, 8).t(), id="transpose-of-dense-is-aligned"),
        pytest.param(lambda: torch.randn(6, 7).t(), id="transpose-of-dense-is-unaligned"),
        pytest.param(lambda: torch.randn(2, 6, 7).transpose(1, 2), id="groups-transposed"),
        pytest.param(lambda: torch.randn(14, 12)[::2, ::3], id="every-other-row"),
        pytest.param(lambda: torch.randn(1, 6).expand(8, 6), id="zero-stride"),
        # Each matrix is right, the distance between them is not.
        pytest.param(lambda: torch.randn(2, 6, 8).transpose(1, 2)[:, :, :5], id="groups-with-gaps"),
    ],
)
def test_mn_major_of_views_keeps_values(make, seed):
    x = make()
    result = to_mn_major(x)
    assert result.tolist() == x.tolist()
    assert result.stride()[-2:] == (1, align(x.shape[-2], 4))
    assert (result is x) == (x.stride()[-2:] == (1, 8) and x.dim() == 2)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (2, 0, 4), (2, 4, 0), (0, 4, 4)])
def test_empty_scales_have_empty_layouts(shape):
    x = torch.empty(shape)
    words = (*shape[:-1], -(-shape[-1] // 4))
    assert to_mn_major(x).shape == shape
    packed = pack_ue8m0(x)
    assert packed.shape == words
    assert packed.dtype == torch.int32
    assert unpack_ue8m0(packed, shape[-1]).shape == shape


def test_mn_major_refuses_other_tensors():
    with fails(TypeError, "scales.dtype", torch.float64, "must be torch.float32"):
        to_mn_major(torch.ones(2, 2, dtype=torch.float64))
    with fails(ValueError, "scales.shape", [4], "must be [mn, k] or [groups, mn, k]"):
        to_mn_major(torch.ones(4))
    with fails(ValueError, "scales.shape", [1, 1, 1, 1], "must be [mn, k] or [groups, mn, k]"):
        to_mn_major(torch.ones(1, 1, 1, 1))


# ---------------------------------------------------------------- packed UE8M0


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((8, 8), id="whole-words"),
        pytest.param((8, 5), id="k-one-past-a-word"),
        pytest.param((5, 7), id="k-one-short-of-a-word-and-mn-padded"),
        pytest.param((1, 1), id="one-scale"),
        pytest.param((130, 3), id="less-than-a-word"),
        pytest.param((3, 6, 6), id="groups"),
    ],
)
def test_packed_words_and_all_padding(shape, seed):
    scales = random_scales(*shape)
    packed = pack_ue8m0(scales)
    *groups, mn, k = shape
    words, padded = -(-k // 4), align(mn, 4)
    assert packed.dtype == torch.int32
    assert packed.shape == (*groups, mn, words)
    assert packed.stride()[-2:] == (1, padded)
    memory = storage_of(packed).tolist()
    for group, matrix in enumerate(scales.reshape(-1, mn, k)):
        columns = list(zip(*expected_words(matrix), strict=True))
        assert memory[group] == [[*column, *[0] * (padded - mn)] for column in columns]


def test_packing_does_not_depend_on_strides(seed):
    scales = random_scales(2, 10, 7)
    assert pack_ue8m0(scales.transpose(1, 2).contiguous().transpose(1, 2)).tolist() == pack_ue8m0(scales).tolist()


def test_packing_of_the_extreme_codes():
    """Smallest normal, largest and NaN: codes 1, 254 (sign bit of the word set) and 255."""
    scales = torch.tensor([[2.0**-126, 1.0, NAN, 2.0**127]])
    assert pack_ue8m0(scales).tolist() == [[int.from_bytes(bytes([1, 127, 255, 254]), "little", signed=True)]]
    assert pack_ue8m0(-scales.masked_fill(~scales.isnan(), -1.0)).tolist() == [[word_of([1.0, 1.0, NAN, 1.0])]]


def test_packing_of_code_zero():
    """2^-127 is subnormal in fp32 but a power of two, and what code 0 unpacks to."""
    assert pack_ue8m0(torch.tensor([[2.0**-127, 1.0]])).tolist() == [[127 << 8]]


@pytest.mark.parametrize("bad", [3.0, 1.0 + 2**-23, 0.0, -0.0, -2.0, INF, -INF, 1e-40], ids=lambda value: f"{value!r}")
@pytest.mark.parametrize("index", [(0, 0), (2, 4), (4, 6)], ids=["first", "middle", "last"])
def test_packing_refuses_and_names_what_is_no_power_of_two(bad, index):
    scales = torch.full((5, 7), 0.5)
    scales[index] = bad
    with fails(ValueError, f"scales{list(index)}", float(scales[index]), "must be a positive power of two"):
        pack_ue8m0(scales)
    grouped = scales.t().contiguous()[:, [*range(5), 0, 0, 0]]
    at = [[i, j] for i in range(7) for j in range(8) if grouped[i, j] == grouped.new_tensor(bad)][0]
    with fails(ValueError, f"scales{at}", float(scales[index]), "must be a positive power of two"):
        pack_ue8m0_k_grouped(grouped, [3, 4])


def test_the_first_of_several_wrong_scales_is_named():
    scales = torch.ones(2, 3, 4)
    scales[1, 0, 2], scales[1, 2, 0] = 5.0, 7.0
    with fails(ValueError, "scales[1, 0, 2]", 5.0, "must be a positive power of two"):
        pack_ue8m0(scales)


def test_unchecked_packing_gives_the_same_words(seed):
    scales = random_scales(6, 7)
    assert pack_ue8m0(scales, check=False).tolist() == expected_words(scales)


# ---------------------------------------------------------------- psum form

PSUM = [
    # mn, group ends, alignment
    pytest.param(384, [100, 130, 300], 128, id="gaps-after-each-group"),
    pytest.param(256, [128, 256], 128, id="no-gaps"),
    pytest.param(300, [127, 257], 128, id="rows-after-the-last-group"),
    pytest.param(256, [0, 5, 128], 128, id="first-is-empty"),
    pytest.param(256, [5, 128, 200], 128, id="middle-is-empty"),
    pytest.param(256, [129, 256], 128, id="last-is-empty"),
    pytest.param(9, [0, 0, 0], 128, id="all-are-empty"),
    pytest.param(37, [3, 5, 9, 17], 4, id="other-alignment"),
    pytest.param(5, [], 128, id="no-groups"),
]


@pytest.mark.parametrize(("mn", "ends", "alignment"), PSUM)
@pytest.mark.parametrize("poison", [NAN, 3.0, 0.0, INF], ids=["nan", "no-power", "zero", "inf"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_psum_gaps_are_zero_and_never_read(mn, ends, alignment, poison, dtype, seed):
    scales = random_scales(mn, 5)
    rows = psum_rows(ends, alignment)
    gaps = [i for i in range(mn) if i not in rows]
    poisoned = scales.clone()
    poisoned[gaps] = poison
    packed = pack_ue8m0(poisoned, torch.tensor(ends, dtype=dtype), alignment)
    assert packed.tolist() == expected_words(scales, rows)
    assert packed.stride() == (1, align(mn, 4))
    assert not storage_of(packed)[..., mn:].any()


def test_psum_still_refuses_scales_of_its_groups():
    scales = torch.ones(256, 4)
    scales[10:128], scales[130, 2] = 3.0, 3.0
    with fails(ValueError, "scales[130, 2]", 3.0, "must be a positive power of two"):
        pack_ue8m0(scales, torch.tensor([10, 140]))


def test_psum_refuses_wrong_arguments():
    with fails(ValueError, "scales.shape", [1, 4, 4], "must be [mn, k] with group_ends"):
        pack_ue8m0(torch.ones(1, 4, 4), torch.tensor([4]))
    with fails(TypeError, "group_ends.dtype", torch.float32, "must be one of"):
        pack_ue8m0(torch.ones(4, 4), torch.tensor([4.0]))
    with fails(ValueError, "group_ends.shape", [1, 1], "must be [any]"):
        pack_ue8m0(torch.ones(4, 4), torch.tensor([[4]]))
    with fails(TypeError, "scales.dtype", torch.int32, "must be torch.float32"):
        pack_ue8m0(torch.ones(4, 4, dtype=torch.int32))


# ---------------------------------------------------------------- unpacking


def test_unpacking_every_code():
    packed = torch.tensor([[int.from_bytes(bytes(range(c, c + 4)), "little", signed=True)] for c in range(0, 256, 4)])
    values = unpack_ue8m0(packed.int()).flatten().tolist()
    assert values[:255] == [math.ldexp(1.0, code - 127) for code in range(255)]
    assert math.isnan(values[255])


def test_unpacking_refuses_wrong_arguments():
    packed = torch.ones(4, 2, dtype=torch.int32)
    for k in (4, 9):
        with fails(ValueError, "k", k, "must need 2 words of 4 codes"):
            unpack_ue8m0(packed, k)
    with fails(TypeError, "scales.dtype", torch.float32, "must be torch.int32"):
        unpack_ue8m0(packed.float())


# ---------------------------------------------------------------- K-grouped


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param([4, 8], id="whole-words"),
        pytest.param([1, 2, 3, 5], id="ragged"),
        pytest.param([0, 3, 0, 6, 0], id="empty-first-middle-last"),
        pytest.param([0, 0], id="all-empty"),
        pytest.param([], id="no-groups"),
        pytest.param([7], id="one-group"),
    ],
)
@pytest.mark.parametrize("mn", [4, 12])
def test_k_grouped_packs_each_group_alone(groups, mn, seed):
    scales = random_scales(sum(groups), mn)
    packed = pack_ue8m0_k_grouped(scales, groups)
    expected, start = [], 0
    for size in groups:
        for first in range(start, start + size, 4):
            last = min(first + 4, start + size)
            expected.append([word_of([float(scales[j, i]) for j in range(first, last)]) for i in range(mn)])
        start += size
    assert packed.dtype == torch.int32
    assert packed.shape == (len(expected), mn)
    assert packed.is_contiguous()
    assert packed.tolist() == expected
    strided = scales.t().contiguous().t()
    assert pack_ue8m0_k_grouped(strided, groups).tolist() == expected


def test_k_grouped_refuses_wrong_arguments():
    scales = torch.ones(5, 8)
    for groups in ([2, 2], [3, 3], [6, -1], []):
        with fails(ValueError, "groups", groups, "must be >= 0 and add up to scales.shape[0] = 5"):
            pack_ue8m0_k_grouped(scales, groups)
    with fails(ValueError, "scales.shape", [5, 6], "must have mn % 4 == 0"):
        pack_ue8m0_k_grouped(torch.ones(5, 6), [5])
    with fails(TypeError, "scales.dtype", torch.float64, "must be one of"):
        pack_ue8m0_k_grouped(scales.double(), [5])
    with fails(ValueError, "scales.shape", [1, 5, 8], "must be [any, any]"):
        pack_ue8m0_k_grouped(scales[None], [5])


# ---------------------------------------------------------------- round trips


@st.composite
def shapes(draw) -> tuple[tuple[int, ...], int]:
    """A shape ``[(groups,) mn, k]`` and a seed."""
    groups = draw(st.sampled_from([(), (), (1,), (3,)]))
    return (*groups, draw(st.integers(0, 21)), draw(st.integers(0, 11))), draw(st.integers(0, 2**31))


@settings(max_examples=1500)
@given(shapes())
def test_unpacking_inverts_packing(case):
    shape, seed = case
    scales = random_scales(*shape, generator=torch.Generator().manual_seed(seed))
    packed = pack_ue8m0(scales)
    assert is_mn_major(packed) or not packed.numel()
    assert torch.equal(unpack_ue8m0(packed, shape[-1]), scales)


@settings(max_examples=1500)
@given(shapes())
def test_packing_inverts_unpacking(case):
    """For all codes, 0 and 255 too."""
    shape, seed = case
    codes = torch.randint(256, (*shape, 4), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = codes.view(torch.int32).squeeze(-1)
    assert torch.equal(pack_ue8m0(unpack_ue8m0(packed)), packed)


@settings(max_examples=1500)
@given(st.lists(st.integers(0, 9), max_size=5), st.integers(0, 2), st.integers(0, 2**31))
def test_k_grouped_is_each_group_packed_by_itself(groups, quads, seed):
    scales = random_scales(sum(groups), 4 * quads, generator=torch.Generator().manual_seed(seed))
    packed = pack_ue8m0_k_grouped(scales, groups)
    words = packed.split([-(-size // 4) for size in groups])
    for part, word in zip(scales.split(groups), words, strict=True):
        assert torch.equal(unpack_ue8m0(word.t(), part.shape[0]).t(), part)


@settings(max_examples=1500)
@given(shapes(), st.permutations([0, 1]))
def test_mn_major_is_idempotent_and_keeps_values(case, order):
    shape, seed = case
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    lead = list(range(x.dim() - 2))
    # The same values in other memory.
    view = x.permute(*lead, *(len(lead) + axis for axis in order)).contiguous()
    view = view.permute(*lead, *(len(lead) + axis for axis in order))
    once = to_mn_major(view)
    assert torch.equal(once, x)
    assert to_mn_major(once) is once or not x.numel()
