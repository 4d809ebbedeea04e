"""FP8 copies of weights: when they are cast again, where they lie, and when they go."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from megamoe.kernels import weight_cache
from megamoe.kernels.quant import dequantize, quantize_blockwise_both
from megamoe.kernels.weight_cache import Padding, fp8_copy

UP, DOWN = Padding(2, 128, 16), Padding(1, 16, 128)


@pytest.fixture
def casts(monkeypatch) -> list[torch.Size]:
    """One entry per cast."""
    done = []
    cast = weight_cache._cast

    def counted(weight, padding, target):
        done.append(weight.shape)
        cast(weight, padding, target)

    monkeypatch.setattr(weight_cache, "_cast", counted)
    return done


def weight(experts: int = 2, rows: int = 256, columns: int = 128, **options) -> nn.Parameter:
    return nn.Parameter(torch.randn(experts, rows, columns, **options))


def addresses(made: weight_cache.Fp8Copy) -> list[int]:
    parts = [made.plain] + ([] if made.transposed is None else [made.transposed])
    return [tensor.data_ptr() for part in parts for tensor in (part.codes, part.scales)]


def assert_is_copy(made: weight_cache.Fp8Copy, of: torch.Tensor, padding: Padding) -> None:
    plain, transposed = quantize_blockwise_both(padding.pad(of.detach()))
    for mine, wanted in ((made.plain, plain), (made.transposed, transposed)):
        if mine is not None:
            assert torch.equal(mine.codes.float(), wanted.codes.float())
            assert torch.equal(mine.scales, wanted.scales)
            assert mine.codes.is_contiguous() and mine.scales.is_contiguous()


@pytest.mark.parametrize(
    ("padding", "shape", "padded"),
    [
        (UP, (2, 256, 128), (2, 256, 128)),
        (UP, (2, 60, 24), (2, 256, 32)),
        (UP, (1, 258, 16), (1, 512, 16)),
        (DOWN, (2, 24, 30), (2, 32, 128)),
        (Padding(1, 128, 16), (2, 130, 16), (2, 256, 16)),
    ],
)
def test_padding(padding, shape, padded, seed):
    """Each half begins at a multiple of 128 rows; zeros follow it; nothing is lost."""
    x = torch.randn(shape)
    result = padding.pad(x)
    assert result.shape == padded == padding.shape(x)
    assert torch.equal(padding.unpad(result, *shape[1:]), x)
    size, room = shape[1] // padding.halves, padded[1] // padding.halves
    for half in range(padding.halves):
        part = result[:, half * room : (half + 1) * room]
        assert torch.equal(part[:, :size, : shape[2]], x[:, half * size : (half + 1) * size])
        assert not part[:, size:].any() and not part[:, :, shape[2] :].any()


@pytest.mark.parametrize(("padding", "shape"), [(UP, (2, 256, 128)), (UP, (2, 60, 24)), (DOWN, (2, 24, 30))])
def test_cast_once(padding, shape, casts, seed):
    w = nn.Parameter(torch.randn(shape))
    first = fp8_copy(w, padding, "inference")
    assert first.transposed is None and len(casts) == 1
    assert_is_copy(first, w, padding)
    before = addresses(first)
    assert fp8_copy(w, padding, "inference") is first and len(casts) == 1
    # The transposed codes come with the first training step, and stay; the plain ones keep their place.
    both = fp8_copy(w, padding, "training")
    assert both is first and len(casts) == 2 and addresses(both)[:2] == before
    assert_is_copy(both, w, padding)
    before = addresses(both)
    for phase in ("backward", "inference", "training"):
        assert addresses(fp8_copy(w, padding, phase)) == before and len(casts) == 2


class AnOptimizer(torch.optim.Optimizer):
    """Writes through ``.data``, as many do."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad)


def edit(w):
    with torch.no_grad():
        w[1].mul_(2)


def _edit_in_inference_mode(w):
    with torch.inference_mode():
        w.add_(1)


def edit_detached(w):
    w.detach().view(-1).neg_()


def _step(make):
    def change(w):
        w.grad = torch.ones_like(w)
        make([w]).step()

    return change


def _step_of_master_weights(w):
    master = nn.Parameter(w.detach().clone())
    master.grad = torch.ones_like(master)
    torch.optim.SGD([master], lr=0.5).step()
    w.data.copy_(master)


def _load(w):
    holder = nn.Module()
    holder.w = w
    holder.load_state_dict({"w": torch.randn_like(w)})


def _new_data(w):
    w.data = torch.randn_like(w)


def _swap(w):
    torch.utils.swap_tensors(w, nn.Parameter(torch.randn_like(w)))


def _told(w):
    w.data.zero_()
    weight_cache.mark_changed(w)


IN_PLACE = {
    "no_grad": edit,
    "inference mode": _edit_in_inference_mode,
    "detached view": edit_detached,
    "SGD": _step(lambda ps: torch.optim.SGD(ps, lr=0.5)),
    "SGD, fused": _step(lambda ps: torch.optim.SGD(ps, lr=0.5, fused=True)),
    "AdamW": _step(lambda ps: torch.optim.AdamW(ps, lr=0.5)),
    "AdamW, fused": _step(lambda ps: torch.optim.AdamW(ps, lr=0.5, fused=True)),
    "optimizer of another library": _step(AnOptimizer),
    "master weights": _step_of_master_weights,
    "load_state_dict": _load,
    "mark_changed": _told,
}


@pytest.mark.parametrize("phase", ["inference", "training"])
@pytest.mark.parametrize("change", IN_PLACE)
def test_renewed_in_place(change, phase, seed):
    w = weight()
    made = fp8_copy(w, UP, phase)
    before = addresses(made)
    for _ in range(2):
        old = dequantize(made.plain)
        IN_PLACE[change](w)
        made = fp8_copy(w, UP, phase)
        assert addresses(made) == before
        assert_is_copy(made, w, UP)
        if change != "mark_changed":
            assert not torch.equal(dequantize(made.plain), old), "the weight did not change"


@pytest.mark.parametrize("change", [_new_data, _swap], ids=["data", "swap_tensors"])
def test_other_memory(change, seed):
    """The copy of what lay there before must not be taken, nor stay."""
    w = weight()
    fp8_copy(w, UP, "training")
    known = len(weight_cache._memories)
    for _ in range(3):
        change(w)
        assert_is_copy(fp8_copy(w, UP, "training"), w, UP)
    gc.collect()
    assert len(weight_cache._memories) == known


def test_views_and_dtypes(casts, seed):
    """Parts of one buffer have copies of their own; a view made anew finds the copy of the one before."""
    buffer = torch.randn(6, 256, 128)
    for _ in range(2):
        for part in (buffer[:2], buffer[2:4], buffer[::3], buffer[:2].transpose(1, 2)):
            assert_is_copy(fp8_copy(part, UP, "training"), part, UP)
    assert len(casts) == 4
    layer = nn.Linear(1, 1)
    layer.weight = weight()
    fp8_copy(layer.weight, UP, "training")
    assert_is_copy(fp8_copy(layer.bfloat16().weight, UP, "training"), layer.weight, UP)


def test_deepcopy(seed):
    layer = nn.Module()
    layer.w = weight()
    mine = fp8_copy(layer.w, UP, "training")
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.w.mul_(3)
    theirs = fp8_copy(twin.w, UP, "training")
    assert not set(addresses(mine)) & set(addresses(theirs))
    assert_is_copy(theirs, twin.w, UP)
    assert_is_copy(fp8_copy(layer.w, UP, "training"), layer.w, UP)


def test_dies_with_the_weight(seed):
    gc.collect()
    known = len(weight_cache._memories)
    w = weight()
    fp8_copy(w, UP, "training")
    view = w.detach()[:1]
    del w
    gc.collect()
    assert len(weight_cache._memories) == known + 1, "the memory is still in use"
    del view
    gc.collect()
    assert len(weight_cache._memories) == known
    # Also without the cycle collector, and many times over.
    for _ in range(20):
        fp8_copy(torch.randn(2, 256, 128), UP, "training")
        assert len(weight_cache._memories) == known


def test_forget(casts, seed):
    w = weight()
    made = fp8_copy(w, UP, "training")
    weight_cache.forget(w)
    again = fp8_copy(w, UP, "training")
    assert again is not made and len(casts) == 2


def test_refresh(casts, seed):
    """Only what is out of date, in place, both forms; nothing for weights that have no copy."""
    w, other = weight(), weight()
    made = fp8_copy(w, UP, "training")
    fp8_copy(w, DOWN, "inference")
    before = addresses(made)
    weight_cache.refresh(w)
    weight_cache.refresh(other)
    assert len(casts) == 2
    edit(w)
    weight_cache.refresh(w)
    assert len(casts) == 4 and addresses(made) == before
    assert_is_copy(made, w, UP)
    fp8_copy(w, UP, "training")
    fp8_copy(w, DOWN, "inference")
    assert len(casts) == 4


@pytest.mark.parametrize("change", IN_PLACE)
def test_refresh_sees_every_change(change, seed):
    w = weight()
    made = fp8_copy(w, UP, "training")
    fp8_copy(w, DOWN, "inference")
    for _ in range(2):
        weight_cache.refresh(w)
        IN_PLACE[change](w)
        weight_cache.refresh(w)
        assert_is_copy(made, w, UP)
        (other,) = (copy for (padding, *_), copy in weight_cache._find(w).copies.items() if padding is DOWN)
        assert_is_copy(other, w, DOWN)


def test_refresh_looks_no_further_than_needed(seed, monkeypatch):
    """At the one copy that is out of date."""
    asked, whole = [], weight_cache.fp8_copy

    def ask(weight, padding, phase, **options):
        asked.append(padding)
        return whole(weight, padding, phase, **options)

    w = weight()
    fp8_copy(w, UP, "training")
    fp8_copy(w, DOWN, "inference")
    monkeypatch.setattr(weight_cache, "fp8_copy", ask)
    for _ in range(3):
        weight_cache.refresh(w)
    assert not asked
    edit(w)
    fp8_copy(w, UP, "inference")
    weight_cache.refresh(w)
    assert asked == [DOWN]
    with torch.inference_mode():
        unversioned = torch.randn(2, 256, 128)
    fp8_copy(unversioned, UP, "inference")
    weight_cache.refresh(unversioned)
    weight_cache.refresh(unversioned)
    assert asked == [DOWN, UP, UP]


def test_weights_made_in_inference_mode(casts, seed):
    """They have no versions: nothing tells whether they have changed, so each call casts; in the same memory."""
    with torch.inference_mode():
        w = torch.randn(2, 256, 128)
        before = addresses(fp8_copy(w, UP, "inference"))
        w.mul_(2)
        made = fp8_copy(w, UP, "inference")
    assert addresses(made) == before and len(casts) == 2
    assert_is_copy(made, w, UP)
    # A copy made there can be written outside.
    w = weight()
    with torch.inference_mode():
        fp8_copy(w, UP, "inference")
    edit(w)
    assert_is_copy(fp8_copy(w, UP, "training"), w, UP)


# ---------------------------------------------------------------- CUDA graphs: who casts, on any device


@pytest.fixture
def capture(monkeypatch):
    """``capture(True)`` begins what the cache takes for a capture. Unlike a real one it computes at once."""

    def set_state(capturing: bool) -> None:
        monkeypatch.setattr(weight_cache, "_is_capturing", lambda weight: capturing)

    return set_state


def test_captured_inference_reads_the_copy_where_it_lies(casts, capture, seed):
    w = weight()
    made = fp8_copy(w, UP, "inference")
    capture(True)
    assert fp8_copy(w, UP, "inference") is made and len(casts) == 1
    capture(False)
    assert fp8_copy(w, UP, "inference") is made and len(casts) == 1
    # Out of date when a capture begins: the graph casts, and what its replays write nobody else trusts.
    edit(w)
    capture(True)
    fp8_copy(w, UP, "inference")
    assert len(casts) == 2
    capture(False)
    for count in (3, 4):
        assert fp8_copy(w, UP, "inference") is made and len(casts) == count


def test_captured_training_step_casts_in_each_replay(casts, capture, seed):
    w = weight()
    before = addresses(fp8_copy(w, UP, "training"))
    capture(True)
    assert addresses(fp8_copy(w, UP, "training")) == before and len(casts) == 2, "replays find other weights"
    fp8_copy(w, UP, "backward")
    assert len(casts) == 2, "the backward pass takes what the forward pass cast"
    # Another graph, of inference: replays of the first one leave copies from before their optimizer's step.
    fp8_copy(w, UP, "inference")
    assert len(casts) == 3
    capture(False)
    # Replays change weights without a new version.
    for count in (4, 5):
        assert addresses(fp8_copy(w, UP, "inference")) == before and len(casts) == count
