"""The layout that a GEMM requires: every row of the table on both architectures, and all refusals."""

from __future__ import annotations

import pytest
import torch

from megamoe.kernels.scales import broadcast_rows, check_layout, to_required_layout
from tests.support.errors import fails
from tests.support.plain_scales import expected_words, mn_major_copy, psum_rows, random_scales, storage_of

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("arch", "keep_fp32"), [(9, False), (9, True), (10, True)])
@pytest.mark.parametrize("groups", [None, 3])
def test_rowwise_fp32_becomes_mn_major(arch, keep_fp32, groups, seed):
    x = torch.randn(*([groups] if groups else []), 7, 3)  # not powers of two: none are needed
    result = to_required_layout(x, 7, 257, (1, 128), arch, groups, keep_fp32=keep_fp32)
    assert result.tolist() == x.tolist()
    assert result.stride() == ((24, 1, 8) if groups else (1, 8))
    assert to_required_layout(result, 7, 257, (1, 128), arch, groups, keep_fp32=keep_fp32) is result


@pytest.mark.parametrize(("arch", "keep_fp32"), [(9, False), (9, True), (10, True)])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("groups", [None, 3])
def test_blockwise_fp32_stays(arch, keep_fp32, transposed, groups, seed):
    lead = [groups] if groups else []
    x = torch.randn(*lead, 3, 2).transpose(-1, -2) if transposed else torch.randn(*lead, 2, 3)
    assert to_required_layout(x, 129, 384, (128, 128), arch, groups, keep_fp32=keep_fp32) is x


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.randn(2, 6)[:, :3], id="padded-rows"),
        pytest.param(lambda: torch.randn(1, 3).expand(2, 3), id="zero-stride"),
        pytest.param(lambda: torch.randn(4, 3)[::2], id="every-other-row"),
    ],
)
def test_blockwise_fp32_with_other_strides_is_refused(make):
    x = make()
    with fails(ValueError, "scales.stride()", x.stride(), "must be dense for [2, 3]"):
        to_required_layout(x, 256, 384, (128, 128), 9)


def test_blockwise_groups_with_gaps_are_refused():
    x = torch.randn(3, 4, 3)[:, :2]
    with fails(ValueError, "scales.stride()", x.stride(), "must be dense for [3, 2, 3]"):
        to_required_layout(x, 256, 384, (128, 128), 9, 3)


@pytest.mark.parametrize("gran_k", [32, 128])
@pytest.mark.parametrize("gran_mn", [1, 32, 128])
@pytest.mark.parametrize("groups", [None, 2])
def test_fp32_is_repeated_and_packed_on_blackwell(gran_k, gran_mn, groups, seed):
    mn, k = 133, 5 * gran_k + 1
    x = random_scales(*([groups] if groups else []), -(-mn // gran_mn), 6)
    result = to_required_layout(x, mn, k, (gran_mn, gran_k), 10, groups)
    rows = [i // gran_mn for i in range(mn)]
    expected = [expected_words(matrix[rows]) for matrix in x.reshape(-1, *x.shape[-2:])]
    assert result.tolist() == (expected if groups else expected[0])
    assert result.stride() == ((272, 1, 136) if groups else (1, 136))
    assert not storage_of(result)[..., mn:].any()


def test_blackwell_takes_the_psum_form(seed):
    x = random_scales(256, 4)
    poisoned = x.clone()
    poisoned[9:128], poisoned[140:] = NAN, 3.0
    result = to_required_layout(poisoned, 256, 512, (1, 128), 10, group_ends=torch.tensor([9, 140]))
    assert result.tolist() == expected_words(x, psum_rows([9, 140], 128))
    ends = torch.tensor([9, 140])
    poisoned = x.clone()
    poisoned[9:16], poisoned[140:] = INF, 0.0
    result = to_required_layout(poisoned, 256, 512, (1, 128), 10, group_ends=ends, group_alignment=16)
    assert result.tolist() == expected_words(x, psum_rows([9, 140], 16))


def test_blackwell_refuses_what_is_no_power_of_two():
    x = torch.ones(4, 2)
    x[3, 1] = 0.75
    with fails(ValueError, "scales[3, 1]", 0.75, "must be a positive power of two"):
        to_required_layout(x, 4, 256, (1, 128), 10)


@pytest.mark.parametrize("gran_k", [32, 128])
@pytest.mark.parametrize("groups", [None, 2])
def test_packed_scales_stay_on_blackwell(gran_k, groups, seed):
    codes = torch.randint(2**31, (*([groups] if groups else []), 6, 3), dtype=torch.int32)
    packed = mn_major_copy(codes)
    assert to_required_layout(packed, 6, 9 * gran_k, (1, gran_k), 10, groups) is packed


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda x: x.contiguous(), id="row-major"),
        pytest.param(lambda x: x.t().contiguous().t(), id="k-stride-unaligned"),
        pytest.param(lambda x: mn_major_copy(x.repeat(2, 1))[:6], id="k-stride-too-long"),
        pytest.param(lambda x: mn_major_copy(x.repeat_interleave(2, 0))[::2], id="every-other-row"),
    ],
)
def test_packed_scales_with_other_strides_are_refused(make):
    packed = make(torch.ones(6, 3, dtype=torch.int32))
    with fails(ValueError, "scales.stride()", packed.stride(), "must be MN-major with a K stride of 8"):
        to_required_layout(packed, 6, 12 * 128, (1, 128), 10)


def test_packed_groups_with_gaps_are_refused():
    packed = mn_major_copy(torch.ones(2, 8, 4, dtype=torch.int32))[:, :, :3]
    with fails(ValueError, "scales.stride()", packed.stride(), "must be MN-major"):
        to_required_layout(packed, 8, 12 * 128, (1, 128), 10, 2)


@pytest.mark.parametrize(
    ("dtype", "granularity", "arch", "keep_fp32"),
    [
        pytest.param(torch.float32, (1, 32), 9, False, id="hopper-has-no-groups-of-32"),
        pytest.param(torch.float32, (128, 32), 9, False, id="hopper-has-no-blocks-of-32-columns"),
        pytest.param(torch.float32, (64, 128), 9, False, id="hopper-has-no-64-row-blocks"),
        pytest.param(torch.float32, (1, 64), 10, False, id="blackwell-has-no-groups-of-64"),
        pytest.param(torch.float32, (1, 32), 10, True, id="fp32-groups-of-32"),
        pytest.param(torch.float32, (32, 128), 10, True, id="fp32-32-row-blocks"),
        pytest.param(torch.int32, (1, 128), 9, False, id="hopper-reads-no-packed-scales"),
        pytest.param(torch.int32, (128, 128), 10, False, id="packed-blocks"),
        pytest.param(torch.int32, (1, 64), 10, False, id="packed-groups-of-64"),
        pytest.param(torch.float32, (1, 128), 8, False, id="older-architecture"),
    ],
)
def test_combinations_without_a_kernel_are_refused(dtype, granularity, arch, keep_fp32):
    mn, k = 256, 1024
    columns = k // granularity[1] // (4 if dtype == torch.int32 else 1)
    x = torch.ones(mn // granularity[0], columns, dtype=dtype)
    with fails(ValueError, "granularity", granularity, f"has no kernel for {dtype} scales on architecture {arch}"):
        to_required_layout(x, mn, k, granularity, arch, keep_fp32=keep_fp32)


@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        pytest.param((6, 4), None, id="mn-short"),
        pytest.param((7, 3), None, id="k-not-rounded-up"),
        pytest.param((7, 5), None, id="k-long"),
        pytest.param((4, 7), None, id="transposed"),
        pytest.param((2, 7, 4), None, id="groups-not-announced"),
        pytest.param((7, 4), 2, id="groups-missing"),
        pytest.param((3, 7, 4), 2, id="groups-differ"),
    ],
)
@pytest.mark.parametrize("arch", [9, 10])
def test_wrong_shapes_are_refused(shape, groups, arch):
    wanted = [7, 4] if groups is None else [groups, 7, 4]
    with fails(ValueError, "scales.shape", list(shape), f"must be {wanted}"):
        to_required_layout(torch.ones(shape), 7, 385, (1, 128), arch, groups)


def test_layout_check_counts_four_groups_per_word():
    packed = torch.ones(7, 2, dtype=torch.int32)
    assert check_layout(packed, 7, 513, 1, 128) is packed
    assert check_layout(packed, 7, 1024, 1, 128) is packed
    for k in (512, 1025):
        with fails(ValueError, "scales.shape", [7, 2], "must be [7, "):
            check_layout(packed, 7, k, 1, 128)
    with fails(TypeError, "scales.dtype", torch.float16, "must be torch.float32 or torch.int32"):
        check_layout(packed.half(), 7, 1024, 1, 128)


@pytest.mark.parametrize("arch", [9, 10])
@pytest.mark.parametrize(("mn", "k"), [(0, 512), (8, 0), (0, 0)])
def test_empty_scales_pass(arch, mn, k):
    shape = (mn, k // 128)
    result = to_required_layout(torch.empty(shape), mn, k, (1, 128), arch)
    assert result.shape == (shape if arch == 9 else (mn, k // 512))
    assert result.dtype == (torch.float32 if arch == 9 else torch.int32)


@pytest.mark.parametrize(("mn", "k"), [(0, 512), (8, 0), (0, 0)])
def test_empty_packed_scales_pass_again(mn, k):
    """What the first call returned is what the second may be given."""
    packed = to_required_layout(torch.empty(mn, k // 128), mn, k, (1, 128), 10)
    assert to_required_layout(packed, mn, k, (1, 128), 10).shape == packed.shape


def test_broadcast_rows_cuts_the_last_block():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert broadcast_rows(x, 5, 3).tolist() == [[1.0, 2.0]] * 3 + [[3.0, 4.0]] * 2
    assert broadcast_rows(x, 2, 1) is x
