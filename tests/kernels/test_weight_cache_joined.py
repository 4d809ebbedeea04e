"""Copies of two weights as one operand, and padded copies of biases: they follow what they are copies of, in place."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from megamoe.kernels import weight_cache
from megamoe.kernels.mlp_joined import SharedWeights
from megamoe.kernels.quant import dequantize, quantize_blockwise_both
from megamoe.kernels.weight_cache import Padding, fp8_copy, joined_copies
from tests.kernels.test_weight_cache import DOWN, IN_PLACE, UP, assert_is_copy, edit, edit_detached, weight


@pytest.fixture
def casts(monkeypatch) -> list[torch.Size]:
    """One entry per cast."""
    done, cast = [], weight_cache._cast
    monkeypatch.setattr(weight_cache, "_cast", lambda weight, *rest: (done.append(weight.shape), cast(weight, *rest)))
    return done


@pytest.fixture
def capture(monkeypatch):
    """``capture(True)`` begins what the cache takes for a capture. Unlike a real one it computes at once."""
    return lambda on: monkeypatch.setattr(weight_cache, "_is_capturing", lambda weight: on)


# ---------------------------------------------------------------- two weights as one operand


def shared_weights(experts: int, rows: int, columns: int) -> tuple[nn.Parameter, nn.Parameter]:
    """As a shared expert holds ``experts`` of the sizes of ``weight``: one matrix each."""
    up, down = torch.randn(2 * experts * rows, columns), torch.randn(columns, experts * rows)
    return nn.Parameter(up), nn.Parameter(down)


def assert_is_joined(joined, w: torch.Tensor, other: torch.Tensor, padding: Padding) -> None:
    wanted = quantize_blockwise_both(torch.cat([padding.pad(w.detach()), padding.pad(other.detach())]))[0]
    assert torch.equal(joined.codes.float(), wanted.codes.float()) and torch.equal(joined.scales, wanted.scales)
    assert joined.codes.is_contiguous() and joined.scales.is_contiguous()


@pytest.mark.parametrize("width", [128, 100])
@pytest.mark.parametrize("experts", [1, 3])
def test_joined_copies(width, experts, casts, seed):
    """The operand of the concatenated weights, wherever the parts of the second one lie."""
    up, down = shared_weights(experts, width, 64)
    w_up, w_down = weight(2, 2 * width, 64), weight(2, 64, width)
    more_up, more_down = SharedWeights(up, down).experts(width)
    joined_up, joined_down = joined_copies(w_up, more_up, UP), joined_copies(w_down, more_down, DOWN)
    plain_up = torch.stack([torch.cat(part) for part in zip(*(h.split(width) for h in up.chunk(2)), strict=True)])
    plain_down = torch.stack(down.split(width, dim=1))
    assert_is_joined(joined_up, w_up, plain_up, UP)
    assert_is_joined(joined_down, w_down, plain_down, DOWN)
    assert len(casts) == 4
    for _ in range(2):
        # New views of the same parameter.
        again = joined_copies(w_up, SharedWeights(up, down).experts(width)[0], UP)
        assert again is joined_up and len(casts) == 4


@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("refreshed", [True, False], ids=["refresh", "use"])
def test_joined_copies_follow_both(change, refreshed, seed):
    """In place."""
    w, (up, down) = weight(2, 256, 64), shared_weights(2, 128, 64)
    joined = joined_copies(w, SharedWeights(up, down).experts(128)[0], UP)
    for changed in (w, up, w, up):
        old = dequantize(joined)
        IN_PLACE[change](changed)
        if refreshed:
            weight_cache.refresh(w)
            weight_cache.refresh(up)
        else:
            assert joined_copies(w, SharedWeights(up, down).experts(128)[0], UP) is joined
        assert_is_joined(joined, w, SharedWeights(up, down).experts(128)[0], UP)
        assert change == "mark_changed" or not torch.equal(dequantize(joined), old), "the weight did not change"


def test_room_that_was_reserved(casts, seed):
    """One copy serves training and, with those of other experts, inference; else there are two, and both follow."""
    other = torch.randn(2, 256, 128)
    w = weight()
    weight_cache.reserve(w, 2)
    trained = fp8_copy(w, UP, "training")
    joined = joined_copies(w, other, UP)
    assert joined is trained.whole and len(weight_cache._find(w).copies) == 1 and len(casts) == 2
    assert_is_copy(trained, w, UP)
    w = weight()
    trained = fp8_copy(w, UP, "training")
    joined = joined_copies(w, other, UP)
    assert not len(trained.rest.codes) and len(weight_cache._find(w).copies) == 2
    edit(w)
    weight_cache.refresh(w)
    assert_is_copy(trained, w, UP)
    assert_is_joined(joined, w, other, UP)


def test_joined_with_another_weight(seed):
    """As after the number of slots has changed: the memory of the joint copy before is given back."""
    gc.collect()
    known = len(weight_cache._memories)
    other = nn.Parameter(torch.randn(1, 256, 128))
    first = weight()
    gone = weakref.ref(joined_copies(first, other, UP).codes)
    weight_cache.forget(first)
    second = weight(3)
    joined = joined_copies(second, other, UP)
    gc.collect()
    assert gone() is None
    assert_is_joined(joined, second, other, UP)
    edit_detached(other)
    weight_cache.refresh(other)
    assert_is_joined(joined, second, other, UP)
    del first, second, other, joined
    gc.collect()
    assert len(weight_cache._memories) == known


def test_captured_joined_copies(casts, capture, seed):
    """Each part as a copy of its own."""
    w, other = weight(), weight(1)
    joined = joined_copies(w, other, UP)
    capture(True)
    assert joined_copies(w, other, UP) is joined and len(casts) == 2
    edit_detached(other)
    joined_copies(w, other, UP)
    assert len(casts) == 3
    capture(False)
    for count in (4, 5):
        assert joined_copies(w, other, UP) is joined and len(casts) == count


# ---------------------------------------------------------------- biases


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_padded_biases(dtype, seed):
    """Where the padded weight's rows are; BF16 stays BF16, all others are fp32."""
    bias = torch.randn(3, 60, dtype=dtype)
    padded = weight_cache.padded_bias(bias, UP)
    assert padded.dtype == (dtype if dtype == torch.bfloat16 else torch.float32) and padded.is_contiguous()
    halves = padded.view(3, 2, 128)
    assert torch.equal(halves[:, :, :30].flatten(1), bias.to(padded.dtype)) and not halves[:, :, 30:].any()
    assert torch.equal(UP.unpad(UP.pad(bias.unsqueeze(2)), 60, 1).squeeze(2), bias)
    assert weight_cache.padded_bias(bias, DOWN).shape == (3, 64)
    assert UP.pad_bias(halves.flatten(1)).data_ptr() == padded.data_ptr()


@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("refreshed", [True, False], ids=["refresh", "use"])
def test_padded_biases_follow(change, refreshed, seed):
    bias = nn.Parameter(torch.randn(3, 60))
    padded = weight_cache.padded_bias(bias, UP)
    for _ in range(2):
        old, version = padded.clone(), padded._version
        weight_cache.refresh(bias)
        assert weight_cache.padded_bias(bias, UP) is padded and padded._version == version, "nothing has changed"
        IN_PLACE[change](bias)
        if refreshed:
            weight_cache.refresh(bias)
        else:
            assert weight_cache.padded_bias(bias, UP) is padded
        assert torch.equal(padded, UP.pad_bias(bias.detach()))
        assert change == "mark_changed" or not torch.equal(padded, old), "the bias did not change"


def test_a_bias_in_the_memory_of_a_weight(seed):
    """Both have copies of their own."""
    memory = torch.randn(2 * 256 * 128 + 2 * 60)
    w, bias = memory[: 2 * 256 * 128].view(2, 256, 128), memory[2 * 256 * 128 :].view(2, 60)
    made, padded = fp8_copy(w, UP, "training"), weight_cache.padded_bias(bias, UP)
    memory.mul_(2)
    weight_cache.refresh(memory)
    assert_is_copy(made, w, UP)
    assert torch.equal(padded, UP.pad_bias(bias))


def test_captured_biases(capture, seed):
    """As weights in inference."""
    bias = nn.Parameter(torch.randn(3, 60))
    padded = weight_cache.padded_bias(bias, UP)
    version = padded._version
    capture(True)
    assert weight_cache.padded_bias(bias, UP) is padded and padded._version == version
    edit(bias)
    weight_cache.padded_bias(bias, UP)
    assert padded._version > version
    capture(False)
    for _ in range(2):
        version = padded._version
        assert torch.equal(weight_cache.padded_bias(bias, UP), UP.pad_bias(bias.detach()))
        assert padded._version > version, "replays write it"
