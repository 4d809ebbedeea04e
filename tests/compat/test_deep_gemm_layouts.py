"""DeepGEMM's scale layouts under their own names: words and strides by index, recipes, K groups, psum forms."""

from __future__ import annotations

import pytest
import torch

import megamoe.compat.deep_gemm as deep_gemm
from tests.compat.test_deep_gemm import random_scales, word_of, words_of
from tests.support.errors import fails

NAN = float("nan")


# ---------------------------------------------------------------- MN-major and packed


@pytest.mark.parametrize("shape", [(7, 3), (8, 5), (2, 9, 4)])
def test_mn_major_and_packed(shape, seed):
    scales = random_scales(*shape)
    result = deep_gemm.get_mn_major_tma_aligned_tensor(scales)
    padded = -(-shape[-2] // 4) * 4
    assert torch.equal(result, scales)
    assert result.stride()[-2:] == (1, padded)
    packed = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(scales)
    assert packed.stride()[-2:] == (1, padded)
    expected = [words_of(matrix) for matrix in scales.reshape(-1, *shape[-2:]).tolist()]
    assert packed.tolist() == (expected if len(shape) == 3 else expected[0])


def test_psum_groups_start_at_multiples_of_128(seed):
    scales = random_scales(300, 3)
    ends = torch.tensor([0, 5, 130, 260], dtype=torch.int32)
    rows = {*range(0, 5), *range(128, 130), *range(256, 260)}
    poisoned = scales.clone()
    poisoned[[i for i in range(300) if i not in rows]] = NAN
    packed = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(poisoned, ends)
    assert packed.tolist() == [[word] if i in rows else [0] for i, [word] in enumerate(words_of(scales.tolist()))]


# ---------------------------------------------------------------- K-grouped


def k_grouped_words(scales: torch.Tensor, groups: list[tuple[int, int]]) -> list[list[int]]:
    """Words of the K groups ``first`` to ``last`` of each expert group, columns of ``scales [k, mn]``."""
    return [
        [word_of(scales[k : min(k + 4, last), i].tolist()) for i in range(scales.shape[1])]
        for first, last in groups
        for k in range(first, last, 4)
    ]


@pytest.mark.parametrize("gran_k", [32, 128])
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([4, 8], id="whole-words"),
        pytest.param([1, 5, 2], id="ragged"),
        pytest.param([0, 3, 0, 6, 0], id="empty"),
        pytest.param([0, 0], id="all-empty"),
    ],
)
@pytest.mark.parametrize("psum", ["ks", "psum-with-ks", "psum"])
def test_k_grouped(gran_k, sizes, psum, seed):
    ks = [size * gran_k for size in sizes]
    starts = [sum(sizes[:g]) for g in range(len(sizes))]
    scales = random_scales(sum(sizes), 8)
    ends = [sum(ks[: g + 1]) for g in range(len(ks))]
    packed = deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
        scales,
        torch.tensor(ks if psum == "ks" else ends, dtype=torch.int32),
        None if psum == "psum" else ks,
        gran_k,
        gran_k,
        psum != "ks",
    )
    expected = k_grouped_words(scales, [(s, s + n) for s, n in zip(starts, sizes, strict=True)])
    assert packed.dtype == torch.int32
    assert packed.is_contiguous()
    assert packed.shape[1] == 8
    assert packed[: len(expected)].tolist() == expected


def test_k_grouped_rounds_the_k_of_a_group_up(seed):
    """A group of 129 columns has two scales."""
    scales = random_scales(3, 4)
    packed = deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
        scales, torch.tensor([129, 1], dtype=torch.int32), [129, 1], 128, 128
    )
    assert packed.tolist() == k_grouped_words(scales, [(0, 2), (2, 3)])


@pytest.mark.parametrize("with_ks", [False, True])
def test_k_grouped_psum_ends_within_a_block(with_ks, seed):
    """Groups of 100 and 156 columns from 0 and 128: one scale of 128 columns, then two."""
    scales = random_scales(3, 4)
    packed = deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(
        scales, torch.tensor([100, 284], dtype=torch.int32), [100, 156] if with_ks else None, 128, 128, True
    )
    expected = k_grouped_words(scales, [(0, 1), (1, 3)])
    assert packed[: len(expected)].tolist() == expected


def test_k_grouped_refuses_wrong_arguments():
    call = deep_gemm.get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor
    scales, layout = torch.ones(4, 8), torch.tensor([256, 256], dtype=torch.int32)
    with fails(ValueError, "gran_k", 64, "must be one of 32, 128"):
        call(scales, layout, [256, 256], 64, 128)
    for ks in (None, []):
        with fails(ValueError, "ks_cpu", ks, "must name the k of each group"):
            call(scales, layout, ks, 128, 128)
    with fails(ValueError, "ks_cpu", [512], "must have 2 entries as grouped_layout"):
        call(scales, layout, [512], 128, 128)
    with fails(ValueError, "groups", [2, 3], "must be >= 0 and add up to scales.shape[0] = 4"):
        call(scales, layout, [256, 384], 128, 128)


# ---------------------------------------------------------------- recipes


def test_recipe_of_three_takes_the_side_of_is_sfa(seed):
    sfa, sfb = torch.randn(5, 3), torch.randn(2, 3)
    result = deep_gemm.transform_sf_into_required_layout(sfa, 5, 384, (1, 128, 128), is_sfa=True)
    assert torch.equal(result, sfa)
    assert result.stride() == (1, 8)
    assert deep_gemm.transform_sf_into_required_layout(sfb, 130, 384, (1, 128, 128), is_sfa=False) is sfb
    with fails(ValueError, "scales.shape", [5, 3], "must be [1, 3]"):
        deep_gemm.transform_sf_into_required_layout(sfa, 5, 384, (1, 128, 128), is_sfa=False)


@pytest.mark.parametrize("disable_ue8m0_cast", [False, True])
def test_recipe_of_two_takes_groups(disable_ue8m0_cast, seed):
    sf = torch.randn(2, 5, 3)
    result = deep_gemm.transform_sf_into_required_layout(sf, 5, 384, (1, 128), 2, disable_ue8m0_cast=disable_ue8m0_cast)
    assert torch.equal(result, sf)
    assert result.stride() == (24, 1, 8)


@pytest.mark.parametrize(
    ("recipe", "is_sfa"),
    [
        pytest.param((1, 128, 128), None, id="three-without-a-side"),
        pytest.param((1, 128), True, id="two-with-a-side"),
        pytest.param((1, 128), False, id="two-with-the-other-side"),
        pytest.param((128,), None, id="one"),
        pytest.param((1, 1, 1, 128), True, id="four"),
    ],
)
def test_other_recipes_are_refused(recipe, is_sfa):
    with fails(ValueError, "recipe", recipe, "must be 3 numbers with is_sfa or 2 without"):
        deep_gemm.transform_sf_into_required_layout(torch.ones(4, 1), 4, 128, recipe, is_sfa=is_sfa)


def test_a_cpu_is_treated_as_hopper():
    with fails(ValueError, "granularity", (1, 128), "has no kernel for torch.int32 scales on architecture 9"):
        deep_gemm.transform_sf_into_required_layout(torch.ones(4, 1, dtype=torch.int32), 4, 512, (1, 128))
    with fails(ValueError, "granularity", (1, 32), "has no kernel for torch.float32 scales on architecture 9"):
        deep_gemm.transform_sf_into_required_layout(torch.ones(4, 4), 4, 128, (1, 32))


@pytest.fixture
def blackwell(monkeypatch):
    """The device counts as architecture 10."""
    monkeypatch.setattr(deep_gemm.utils.layout, "arch_of", lambda tensor: 10)


def test_blackwell_packs(blackwell, seed):
    sf = random_scales(2, 5)
    result = deep_gemm.transform_sf_into_required_layout(sf, 130, 640, (1, 128, 128), is_sfa=False)
    assert result.tolist() == [words_of(sf.tolist())[i // 128] for i in range(130)]
    assert result.stride() == (1, 132)
    again = deep_gemm.transform_sf_into_required_layout(result, 130, 640, (1, 128))
    assert again is result
    with fails(ValueError, "granularity", (1, 32), "without the cast to UE8M0"):
        deep_gemm.transform_sf_into_required_layout(torch.ones(4, 4), 4, 128, (1, 32), disable_ue8m0_cast=True)


def test_blackwell_zeroes_psum_gaps(blackwell, seed):
    scales = random_scales(140, 4)
    poisoned = scales.clone()
    poisoned[3:128] = NAN
    result = deep_gemm.transform_sf_into_required_layout(
        poisoned, 140, 512, (1, 128), psum_layout=torch.tensor([3, 140], dtype=torch.int32)
    )
    assert result.tolist() == [[0] if 3 <= i < 128 else words for i, words in enumerate(words_of(scales.tolist()))]
