"""The scratch memory and the settings of mega-kernels: arithmetic only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megamoe.config import MoEConfig
from megamoe.kernels.mega_plan import MegaSettings, choose_settings, next_power_of_two, plan_mega
from megamoe.plan import plan_memory
from tests.support.errors import fails


def memory(hidden=256, experts=8, top_k=2, ranks=2, tokens=40, precision="fp8"):
    return plan_memory(MoEConfig(hidden, 128, experts, top_k, precision=precision), ranks, tokens)


def test_regions():
    """Worked out by hand for a small layer."""
    plan = plan_mega(memory(), 384, sms=3)
    # 160 pairs for 4 experts: one block for each, and one more for every 128 of the other 156.
    assert plan.num_rows == (4 + 1) * 128
    shapes = {region.name: (region.dtype, region.shape) for region in plan.regions}
    assert shapes == dict(
        counts=(torch.int64, (4,)),
        starts=(torch.int64, (4,)),
        sizes=(torch.int32, (3,)),
        pulled=(torch.int32, (5,)),
        finished=(torch.int32, (5,)),
        tiles=(torch.int32, (5 * (3 + 1) + 2 * 3, 2)),
        histograms=(torch.int32, (2 * 5, 16)),
        row_source=(torch.int32, (640,)),
        row_target=(torch.int64, (640,)),
        row_weights=(torch.float32, (640,)),
        rows=(torch.float8_e4m3fn, (640, 256)),
        row_scales=(torch.float32, (2, 640)),
        act=(torch.float8_e4m3fn, (640, 384)),
        act_scales=(torch.float32, (3, 640)),
    )
    assert plan.fused and plan.chunk == 8 and (plan.up_tiles, plan.down_tiles) == (3, 1)
    assert plan_mega(memory(hidden=384), 128, 3).down_tiles == 2


def test_regions_in_bf16():
    """Tables are the same, rows have two bytes a column, and there are no scales."""
    fp8, bf16 = plan_mega(memory(), 384, 3), plan_mega(memory(precision="bf16"), 384, 3)
    shapes = {region.name: (region.dtype, region.shape) for region in bf16.regions}
    assert shapes == {
        **{region.name: (region.dtype, region.shape) for region in fp8.regions if "scales" not in region.name},
        "rows": (torch.bfloat16, (640, 256)),
        "act": (torch.bfloat16, (640, 384)),
    }
    # Regions of scales end at a multiple of 1024.
    assert bf16.total - fp8.total == 640 * (256 + 384) - 5 * 1024 - 8 * 1024
    # No index of scales limits the rows.
    sizes = dict(tokens=1 << 20, hidden=16384, top_k=16, experts=16)
    assert plan_mega(memory(**sizes, precision="bf16"), 256, 132).num_rows * (16384 // 128) >= 2**31


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_views_lie_within_the_scratch_and_apart(precision):
    plan = plan_mega(memory(precision=precision), 384, sms=3)
    scratch = torch.zeros(plan.total, dtype=torch.uint8)
    views = plan.views(scratch)
    for number, view in enumerate(views.values(), 1):
        assert view.data_ptr() % 16 == scratch.data_ptr() % 16
        assert not view.view(torch.uint8).any()
        view.view(torch.uint8).fill_(number)
    assert [int(view.view(torch.uint8).unique()) for view in views.values()] == list(range(1, len(views) + 1))


def test_many_tokens_take_several_launches():
    assert plan_mega(memory(tokens=4096), 384, sms=3).fused
    assert not plan_mega(memory(tokens=4097), 384, sms=3).fused
    # Slots are padded to a power of two.
    assert not plan_mega(memory(tokens=4096, top_k=3), 384, sms=3).fused
    assert plan_mega(memory(tokens=4096), 384, sms=3).chunk == 128


@pytest.mark.parametrize("size", [128, 768, 1408, 2944, 14336, 18432])
def test_sizes_that_run(size):
    assert plan_mega(memory(hidden=min(size, 16384)), size, 132).total > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(hidden=192), ("hidden_size", 192, "must be a multiple of 128 up to 16384")),
        (dict(hidden=16512), ("hidden_size", 16512, "must be a multiple of 128 up to 16384")),
        (dict(intermediate=64), ("intermediate_size", 64, "must be a multiple of 128 up to 18432")),
        (dict(intermediate=18560), ("intermediate_size", 18560, "must be a multiple of 128 up to 18432")),
        (dict(experts=514), ("num_local_experts", 257, "must be at most 256")),
        (dict(experts=34, top_k=17), ("top_k", 17, "must be at most 16")),
        (dict(tokens=1 << 26, top_k=1), ("tokens", 1 << 26, "must be below 2^26")),
        (dict(num_rows=200), ("num_rows", 200, "must be a multiple of 128")),
        (dict(tokens=1 << 21, hidden=16384, top_k=16, experts=16), ("num_rows", None, "must stay below 2^31")),
    ],
    ids=lambda x: "" if isinstance(x, tuple) else str(x),
)
def test_sizes_that_do_not(arguments, words):
    arguments = dict(arguments)
    rest = (arguments.pop("intermediate", 256), 132, arguments.pop("num_rows", None))
    plan = memory(**arguments)
    name, value, rule = words
    with fails(ValueError, name, plan.most_rows if value is None else value, rule):
        plan_mega(plan, *rest)


def test_settings():
    """What was measured, at the sizes where it was."""
    sizes = dict(ranks=2, top_k=8, num_experts=64, sms=132)
    for tokens, order in {1: (8, 1), 128: (8, 1), 256: (8, 1), 257: (4, 2), 512: (4, 2), 8192: (4, 2)}.items():
        settings = choose_settings(tokens=tokens, **sizes)
        assert settings == MegaSettings(132, *order) == replace(settings, stages=4, skew=1, chunk=512)
        assert choose_settings(tokens=tokens, **sizes, fp8=False) == replace(settings, lag=1, skew=2)


def test_next_power_of_two():
    assert [next_power_of_two(n) for n in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]
