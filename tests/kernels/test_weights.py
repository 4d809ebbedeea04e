"""Weight transforms: each row by an index formula, inverses bit for bit, storage kept or left alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.kernels.scales import is_mn_major, to_mn_major
from megamoe.kernels.weights import (
    deinterleave_gate_up,
    interleave_gate_up,
    restore_scales_from_utccp,
    restore_weights_from_mega_moe,
    transform_weights_for_mega_moe,
    transpose_scales_for_utccp,
)
from megamoe.types import Fp4Tensor, Fp8Tensor
from tests.support.errors import fails

FP8 = torch.float8_e4m3fn


def interleaved_from(row: int, half: int, gran: int) -> int:
    """The row of ``[gate | up]`` (``half`` rows each) that is row ``row`` of the interleaved weight."""
    turn, within = divmod(row, gran)
    return (turn % 2) * half + (turn // 2) * gran + within


def utccp_from(row: int) -> int:
    """The row of plain scales that is row ``row`` in the order of UTCCP."""
    block, within = divmod(row, 128)
    return 128 * block + 32 * (within % 4) + within // 4


def raw(x: torch.Tensor) -> torch.Tensor:
    """The bits: NaN codes compare too."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def random_bits(*shape: int, dtype: torch.dtype, generator: torch.Generator | None = None) -> torch.Tensor:
    """Every bit pattern, NaN codes too."""
    size = torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(256, (*shape, size), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).squeeze(-1)


def mn_major(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def assert_rows_from(result: torch.Tensor, source: torch.Tensor, row_from) -> None:
    """Row i of each expert of ``result`` is row ``row_from(i)`` of that expert of ``source``."""
    assert result.shape == source.shape
    assert result.dtype == source.dtype
    result, source = raw(result), raw(source)
    for expert in range(source.shape[0]):
        for row in range(source.shape[1]):
            assert torch.equal(result[expert, row], source[expert, row_from(row)]), f"expert {expert}, row {row}"


# ---------------------------------------------------------------- gate and up in turn


def test_gate_and_up_alternate_by_eight_rows():
    """The documented order, spelled out."""
    weight = torch.arange(32).reshape(1, 32, 1)
    expected = [*range(0, 8), *range(16, 24), *range(8, 16), *range(24, 32)]
    assert interleave_gate_up(weight).flatten().tolist() == expected


@pytest.mark.parametrize(
    ("shape", "gran"),
    [
        pytest.param((2, 48, 5), 8, id="default-gran"),
        pytest.param((3, 10, 4), 1, id="row-by-row"),
        pytest.param((2, 36, 3), 3, id="odd-gran"),
        pytest.param((1, 256, 2), 64, id="wide-gran"),
        pytest.param((2, 16, 3), 8, id="I-equals-gran"),
        pytest.param((2, 32), 8, id="no-trailing-dimension"),
        pytest.param((2, 32, 3, 2, 2), 8, id="more-trailing-dimensions"),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_interleaving_takes_each_row_from_its_place(shape, gran, in_place, seed):
    weight = random_bits(*shape, dtype=torch.int32)
    original, address = weight.clone(), weight.data_ptr()
    result = interleave_gate_up(weight, gran, in_place=in_place)
    assert_rows_from(result, original, lambda row: interleaved_from(row, shape[1] // 2, gran))
    assert (result.data_ptr() == address) == in_place
    assert torch.equal(weight, result if in_place else original)
    back = deinterleave_gate_up(result, gran, in_place=in_place)
    assert torch.equal(back, original)
    assert (back.data_ptr() == result.data_ptr()) == in_place


def test_I_equal_to_gran_is_already_in_turn(seed):
    weight = torch.randn(2, 16, 3)
    result = interleave_gate_up(weight)
    assert torch.equal(result, weight)
    # Still a copy: the caller may write to it.
    assert result.data_ptr() != weight.data_ptr()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("change", [interleave_gate_up, deinterleave_gate_up])
def test_mn_major_scales_keep_their_strides(change, in_place, seed):
    plain = random_bits(2, 32, 3, dtype=torch.int32)
    scales = mn_major(plain)
    result = change(scales, in_place=in_place)
    assert result.stride() == scales.stride() == (96, 1, 32)
    assert torch.equal(result, change(plain))


@pytest.mark.parametrize("change", [interleave_gate_up, deinterleave_gate_up])
def test_in_place_writes_through_a_view(change, seed):
    """A slice of a shared buffer: what lies around it stays."""
    buffer = torch.randn(4, 32, 10)
    before, view = buffer.clone(), buffer[1:3, :, 2:7]
    expected = change(view.clone())
    assert change(view, in_place=True) is view
    assert torch.equal(buffer[1:3, :, 2:7], expected)
    buffer[1:3, :, 2:7] = before[1:3, :, 2:7]
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("change", [interleave_gate_up, deinterleave_gate_up])
@pytest.mark.parametrize(
    ("shape", "gran"),
    [
        pytest.param((2, 24, 3), 8, id="I-no-multiple-of-gran"),
        pytest.param((2, 17, 3), 8, id="odd-2I"),
        pytest.param((2, 8, 3), 8, id="I-below-gran"),
        pytest.param((16,), 8, id="no-experts"),
        pytest.param((2, 16, 3), 0, id="gran-0"),
        pytest.param((2, 16, 3), -4, id="negative-gran"),
    ],
)
def test_interleaving_refuses_rows_that_do_not_fit(change, shape, gran):
    with fails(ValueError, "weight.shape", list(shape), f"must be [e, 2I, ...] with 2I a multiple of {2 * gran}"):
        change(torch.zeros(shape), gran)


@pytest.mark.parametrize("shape", [(0, 32, 4), (2, 0, 4), (2, 32, 0)])
def test_empty_weights_work(shape):
    assert interleave_gate_up(torch.empty(shape)).shape == shape
    assert deinterleave_gate_up(torch.empty(shape)).shape == shape


# ---------------------------------------------------------------- the order of UTCCP


@pytest.mark.parametrize("shape", [(1, 128, 1), (2, 256, 3), (3, 384, 2)])
@pytest.mark.parametrize("layout", [torch.clone, mn_major], ids=["row-major", "mn-major"])
@pytest.mark.parametrize("in_place", [False, True])
def test_utccp_takes_each_row_from_its_place(shape, layout, in_place, seed):
    scales = layout(random_bits(*shape, dtype=torch.int32))
    original, address, strides = scales.clone(), scales.data_ptr(), scales.stride()
    result = transpose_scales_for_utccp(scales, in_place=in_place)
    assert_rows_from(result, original, utccp_from)
    assert result.stride() == strides
    assert (result.data_ptr() == address) == in_place
    assert torch.equal(scales, result if in_place else original)
    back = restore_scales_from_utccp(result, in_place=in_place)
    assert torch.equal(back, original)
    assert back.stride() == strides


def test_utccp_is_no_involution():
    """The inverse is another permutation: a swap of the two would show here."""
    scales = torch.arange(128, dtype=torch.int32).reshape(1, 128, 1)
    there = transpose_scales_for_utccp(scales).flatten().tolist()
    assert there[:5] == [0, 32, 64, 96, 1]
    assert restore_scales_from_utccp(scales).flatten().tolist()[:5] == [0, 4, 8, 12, 16]


@pytest.mark.parametrize("change", [transpose_scales_for_utccp, restore_scales_from_utccp])
def test_utccp_refuses_wrong_scales(change):
    with fails(TypeError, "scales.dtype", torch.float32, "must be torch.int32"):
        change(torch.ones(1, 128, 1))
    for shape in ((1, 64, 1), (1, 129, 1), (128, 1), (1, 1, 128, 1)):
        with fails(ValueError, "scales.shape", list(shape), "must be [e, mn, k] with mn a multiple of 128"):
            change(torch.ones(shape, dtype=torch.int32))


# ---------------------------------------------------------------- both weights


E, I, H = 2, 128, 256  # noqa: E741


def checkpoint(dtype: torch.dtype, generator: torch.Generator | None = None, e: int = E, i: int = I, h: int = H):
    """``(l1, l2)`` as loaded: FP8 or packed FP4 with int32 MN-major scales, or BF16."""
    per_byte = 2 if dtype == torch.uint8 else 1

    def one(rows: int, cols: int):
        weight = random_bits(e, rows, cols // per_byte, dtype=dtype, generator=generator)
        if dtype == torch.bfloat16:
            return weight
        return weight, mn_major(random_bits(e, rows, max(cols // 128, 1), dtype=torch.int32, generator=generator))

    return one(2 * i, h), one(h, i)


def parts(*weights) -> list[torch.Tensor]:
    return [tensor for weight in weights for tensor in (weight if isinstance(weight, tuple) else (weight,))]


WEIGHT_DTYPES = pytest.mark.parametrize("dtype", [FP8, torch.uint8, torch.bfloat16], ids=["fp8", "fp4", "bf16"])


@WEIGHT_DTYPES
@pytest.mark.parametrize("in_place", [False, True])
def test_transform_takes_each_row_from_its_place(dtype, in_place, seed):
    l1, l2 = checkpoint(dtype)
    original = [x.clone() for x in parts(l1, l2)]
    t1, t2 = transform_weights_for_mega_moe(l1, l2, in_place=in_place)
    if dtype == torch.bfloat16:
        assert_rows_from(t1, original[0], lambda row: interleaved_from(row, I, 8))
        assert torch.equal(raw(t2), raw(original[1]))
    else:
        assert_rows_from(t1[0], original[0], lambda row: interleaved_from(row, I, 8))
        # Interleaved first, then in the order of UTCCP.
        assert_rows_from(t1[1], original[1], lambda row: interleaved_from(utccp_from(row), I, 8))
        assert torch.equal(raw(t2[0]), raw(original[2]))
        assert_rows_from(t2[1], original[3], utccp_from)
        assert t1[1].stride() == l1[1].stride() == original[1].stride()
        assert t2[1].stride() == l2[1].stride()
    for passed, result, before in zip(parts(l1, l2), parts(t1, t2), original, strict=True):
        assert torch.equal(raw(passed), raw(result if in_place else before))
        if in_place:
            assert passed.data_ptr() == result.data_ptr()


@WEIGHT_DTYPES
@pytest.mark.parametrize("in_place", [False, True])
def test_restore_gives_the_checkpoint_bit_for_bit(dtype, in_place, seed):
    l1, l2 = checkpoint(dtype)
    original = [x.clone() for x in parts(l1, l2)]
    addresses = [x.data_ptr() for x in parts(l1, l2)]
    transformed = transform_weights_for_mega_moe(l1, l2, in_place=in_place)
    kept = [x.clone() for x in parts(*transformed)]
    restored = restore_weights_from_mega_moe(*transformed, in_place=in_place)
    for result, before in zip(parts(*restored), original, strict=True):
        assert torch.equal(raw(result), raw(before))
        assert result.dtype == before.dtype
        assert result.stride() == before.stride()
    if in_place:
        assert [x.data_ptr() for x in parts(*restored)] == addresses
    else:
        for passed, before in zip(parts(*transformed), kept, strict=True):
            assert torch.equal(raw(passed), raw(before))


def test_transform_refuses_what_it_cannot_take():
    l1, l2 = checkpoint(FP8)
    for change in (transform_weights_for_mega_moe, restore_weights_from_mega_moe):
        with fails(TypeError, "l2", "Tensor", "must be like l1, a tuple"):
            change(l1, l2[0])
        with fails(TypeError, "l2", "tuple", "must be like l1, a Tensor"):
            change(l1[0], l2)
        with fails(TypeError, "l1", "list", "must be a tensor or (weight, scales)"):
            change(list(l1), l2)
        with fails(TypeError, "l1", "Fp8Tensor", "must be a tensor or (weight, scales)"):
            change(Fp8Tensor(l1[0], torch.ones(E, 2, 2), (128, 128)), l2)
        with fails(TypeError, "l2", "Fp4Tensor", "must be a tensor or (weight, scales)"):
            change(l1, Fp4Tensor(l2[0], torch.ones(E, H, 4, dtype=torch.uint8)))
        with fails(TypeError, "scales.dtype", torch.float32, "must be torch.int32"):
            change((l1[0], l1[1].float()), l2)
        with fails(ValueError, "weight.shape", [E, 24, H], "must be [e, 2I, ...] with 2I a multiple of 16"):
            change(l1[0][:, :24].view(torch.uint8), l2[0])


@pytest.mark.parametrize("change", [transform_weights_for_mega_moe, restore_weights_from_mega_moe])
def test_scales_of_another_weight_are_refused(change):
    l1, l2 = checkpoint(FP8)
    with pytest.raises(ValueError, match="shape"):
        change((l1[0], l1[1][:, :128]), l2)
    with pytest.raises(ValueError, match="shape"):
        change(l1, (l2[0], l2[1][:, :128]))


@pytest.mark.parametrize("change", [transform_weights_for_mega_moe, restore_weights_from_mega_moe])
@pytest.mark.parametrize(
    "break_one",
    [
        pytest.param(lambda l1, l2: ((l1[0], l1[1][:, :64]), l2), id="scales-of-l1"),
        pytest.param(lambda l1, l2: ((l1[0][:, :24], l1[1]), l2), id="weight-of-l1"),
        pytest.param(lambda l1, l2: (l1, (l2[0], l2[1][:, :64])), id="scales-of-l2"),
    ],
)
def test_a_refusal_in_place_writes_nothing(change, break_one, seed):
    """Weights in use by a captured graph must not be left half transformed."""
    l1, l2 = checkpoint(FP8)
    original = [x.clone() for x in parts(l1, l2)]
    with pytest.raises(ValueError, match="shape"):
        change(*break_one(l1, l2), in_place=True)
    for passed, before in zip(parts(l1, l2), original, strict=True):
        assert torch.equal(raw(passed), raw(before))


# ---------------------------------------------------------------- every legal shape


@settings(max_examples=1500)
@given(
    st.integers(0, 4),
    st.integers(1, 12),
    st.integers(0, 5),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.int32, FP8]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_interleaving_and_back_is_identity(e, gran, turns, trailing, dtype, in_place, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = random_bits(e, 2 * gran * turns, *trailing, dtype=dtype, generator=generator)
    original = weight.clone()
    there = interleave_gate_up(weight, gran, in_place=in_place)
    order = [interleaved_from(row, gran * turns, gran) for row in range(2 * gran * turns)]
    assert torch.equal(raw(there), raw(original)[:, order])
    assert torch.equal(raw(deinterleave_gate_up(there, gran, in_place=in_place)), raw(original))


@settings(max_examples=700)
@given(
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([FP8, torch.uint8, torch.bfloat16]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_transform_and_restore_is_identity(e, i, h, dtype, in_place, seed):
    l1, l2 = checkpoint(dtype, torch.Generator().manual_seed(seed), e, 64 * i, 128 * h)
    original = [x.clone() for x in parts(l1, l2)]
    transformed = transform_weights_for_mega_moe(l1, l2, in_place=in_place)
    restored = restore_weights_from_mega_moe(*transformed, in_place=in_place)
    for result, before in zip(parts(*restored), original, strict=True):
        assert torch.equal(raw(result), raw(before))


@pytest.mark.parametrize(("shape", "gran"), [((2, 6, 3), 3), ((1, 128, 2), 8), ((3, 30, 1), 5)], ids=str)
def test_padded_scales_keep_their_strides_and_zero_padding(shape, gran, seed):
    """mn is padded to a multiple of 4, so the storage has gaps that a dense copy would lose."""
    scales = to_mn_major(torch.randn(shape))
    mixed = interleave_gate_up(scales, gran)
    assert mixed.stride() == scales.stride() and is_mn_major(mixed)
    aligned = scales.stride(2)
    storage = mixed.as_strided((shape[0], shape[2], aligned), (aligned * shape[2], aligned, 1))
    assert storage[..., shape[1] :].eq(0).all()
    assert torch.equal(mixed, interleave_gate_up(scales.contiguous(), gran))


def test_expanded_weights_get_storage_of_their_own():
    weight = torch.arange(16.0).view(1, 16, 1).expand(2, 16, 4)
    assert torch.equal(deinterleave_gate_up(interleave_gate_up(weight)), weight)
