"""The scratch memory and the settings of mega-kernels: arithmetic only."""

from __future__ import annotations

import pytest
import torch

from megamoe.config import MoEConfig
from megamoe.kernels.mega_plan import (
    MegaSettings,
    choose_settings,
    least_pool_blocks,
    next_power_of_two,
    plan_mega,
)
from megamoe.plan import POOL_BYTES, plan_memory
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
        consumed=(torch.int32, (5,)),
        claimed=(torch.int32, (1,)),
        tiles=(torch.int32, (5 * (3 + 1), 2)),
        histograms=(torch.int32, (2 * 1, 16)),
        row_source=(torch.int32, (640,)),
        row_target=(torch.int64, (640,)),
        row_weights=(torch.float32, (640,)),
        rows=(torch.float8_e4m3fn, (640, 256)),
        row_scales=(torch.float32, (2, 640)),
        act=(torch.float8_e4m3fn, (640, 384)),
        act_scales=(torch.float32, (3, 640)),
    )
    assert plan.pool_blocks == 5 and plan.pool_bytes == 640 * (256 + 384 + 4 * 5)
    assert plan.fused and plan.chunk == 64 and (plan.up_tiles, plan.down_tiles) == (3, 1)
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
    assert plan_mega(memory(**sizes, precision="bf16"), 256, 132, pool_bytes=1 << 50).pool_blocks >= 2**31 // 16384


# ---------------------------------------------------------------- the pool


def deepseek(tokens, precision="fp8", ranks=8, **options):
    return plan_mega(memory(7168, 256, 8, ranks, tokens, precision), 2048, 132, **options)


@pytest.mark.parametrize(("precision", "block_bytes"), [("fp8", 128 * 9504), ("bf16", 128 * 18432)])
def test_the_pool_does_not_grow_with_the_worst_case(precision, block_bytes):
    """A model like DeepSeek-V3 on 8 ranks."""
    for tokens in (1, 128, 512, 8192, 1 << 17):
        plan = deepseek(tokens, precision)
        blocks = plan.num_rows // 128
        assert plan.num_rows == plan.memory.most_rows
        assert plan.pool_blocks == min(blocks, POOL_BYTES // block_bytes)
        assert plan.pool_bytes == plan.pool_blocks * block_bytes <= POOL_BYTES <= 400 << 20
        # Few tokens have room for all.
        if tokens != 512:
            assert (plan.pool_blocks == blocks) == (tokens <= 128)
        plan.check_pool(
            choose_settings(tokens=tokens, ranks=8, top_k=8, num_experts=256, intermediate_size=2048, sms=132)
        )
    large = deepseek(8192, precision)
    shapes = {region.name: region.shape for region in large.regions}
    assert shapes["rows"] == (large.pool_blocks * 128, 7168) and shapes["act"] == (large.pool_blocks * 128, 2048)
    assert shapes["consumed"] == (large.num_rows // 128,) and shapes["row_source"] == (large.num_rows,)
    assert large.total <= 400 << 20


def test_the_pool_is_as_large_as_asked_for():
    whole, one = deepseek(8192, pool_bytes=1 << 40), deepseek(8192, pool_bytes=128 * 9504)
    assert whole.pool_blocks == whole.num_rows // 128 and one.pool_blocks == 1
    assert deepseek(8192, pool_bytes=13 * 128 * 9504 - 1).pool_blocks == 12
    assert whole.total - one.total >= whole.pool_bytes - one.pool_bytes - 4 * 1024
    for pool_bytes in (0, 128 * 9504 - 1):
        with fails(ValueError, "pool_bytes", pool_bytes, "must"):
            deepseek(8192, pool_bytes=pool_bytes)


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_grows_with_tokens_ranks_and_slots(precision):
    sizes = dict(hidden=2048, experts=64, top_k=2, ranks=2, tokens=512, precision=precision)
    for name in ("tokens", "ranks", "top_k"):
        plans = [plan_mega(memory(**{**sizes, name: sizes[name] * factor}), 1024, 132) for factor in (1, 2, 4, 8)]
        # Fewer experts on a rank need less padding.
        measure = [(plan.pool_bytes, plan.total) for plan in plans] if name != "ranks" else [
            (plan.pool_bytes, plan.num_rows - 128 * plan.memory.num_local_experts) for plan in plans
        ]  # fmt: skip
        assert all(a <= b and c < d for (a, c), (b, d) in zip(measure, measure[1:], strict=False)), name


@pytest.mark.parametrize(("group", "lag", "least"), [(1, 1, 2), (4, 2, 6), (8, 12, 20)])
def test_settings_that_need_a_larger_pool(group, lag, least):
    settings = MegaSettings(132, group, lag)
    assert least_pool_blocks(settings) == least
    block = 128 * 9504
    deepseek(8192, pool_bytes=least * block).check_pool(settings)
    small = deepseek(8192, pool_bytes=(least - 1) * block)
    rule = f"lag + group = {least} blocks of 128 rows for settings.lag = {lag} and settings.group = {group}"
    with fails(ValueError, "pool_bytes", (least - 1) * block, rule):
        small.check_pool(settings)
    # Where no block ever waits for a slot, no bound holds.
    deepseek(1, ranks=1, num_rows=128).check_pool(settings)


@pytest.mark.parametrize(
    ("blocks", "group", "lag"), [(1, 1, 1), (2, 1, 1), (5, 2, 3), (16, 8, 8), (27, 8, 19), (32, 8, 24), (99, 8, 24)]
)
def test_settings_fit_a_small_pool(blocks, group, lag):
    """With all of its room used, and of settings that fit nothing changed."""
    plan = deepseek(8192, pool_bytes=blocks * 128 * 9504)
    fitted = plan.fit(MegaSettings(132, 8, 24, early=3))
    assert fitted == MegaSettings(132, group, lag, early=3)
    if blocks > 1:
        plan.check_pool(fitted)
    whole = deepseek(1, ranks=1, num_rows=128)
    assert whole.fit(MegaSettings(132, 8, 24)) == MegaSettings(132, 8, 24)


def test_explain_lists_every_region_and_the_pool():
    plan = deepseek(8192)
    text = plan.explain()
    for region in plan.regions:
        assert region.name in text and f"{region.nbytes:,}" in text and str(list(region.shape)) in text
    for number in (plan.num_rows, plan.num_rows // 128, plan.pool_blocks, plan.pool_bytes, plan.total):
        assert f"{number:,}" in text


# ---------------------------------------------------------------- limits


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


def test_programs_have_one_chunk_each():
    """Or chunks are as long as they may be. In several launches there are two programs for each SM."""
    for tokens, sms, chunk in ((64, 16, 8), (64, 15, 16), (4096, 3, 128), (8192, 66, 128), (8192, 132, 64)):
        plan = plan_mega(memory(tokens=tokens), 384, sms)
        assert plan.chunk == chunk, (tokens, sms)
        region = next(region for region in plan.regions if region.name == "histograms")
        assert region.shape[0] == 2 * -(-tokens // chunk)


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
        (
            dict(tokens=1 << 21, hidden=16384, top_k=16, experts=16, pool_bytes=1 << 50),
            ("pool_bytes", 1 << 50, "must be fewer than 2^31"),
        ),
    ],
    ids=lambda x: "" if isinstance(x, tuple) else str(x),
)
def test_sizes_that_do_not(arguments, words):
    arguments = dict(arguments)
    rest = (arguments.pop("intermediate", 256), 132, arguments.pop("num_rows", None))
    rest += (arguments.pop("pool_bytes", POOL_BYTES),)
    plan = memory(**arguments)
    with fails(ValueError, *words):
        plan_mega(plan, *rest)


def test_settings():
    """What was measured, at the sizes where it was."""
    sizes = dict(ranks=2, top_k=8, num_experts=64, intermediate_size=2048, sms=132)
    few = dict(early=4)
    for tokens, fp8_lag, bf16_lag, others in (
        (1, 8, 8, few), (256, 8, 8, few), (257, 12, 12, {}), (1024, 12, 12, {}), (1025, 16, 8, {}), (8192, 16, 8, {}),
    ):  # fmt: skip
        assert choose_settings(tokens=tokens, **sizes) == MegaSettings(132, 8, fp8_lag, **others)
        assert choose_settings(tokens=tokens, **sizes, fp8=False) == MegaSettings(132, 8, bf16_lag, skew=2, **others)


def test_lag_is_of_so_many_tiles():
    sizes = dict(tokens=2048, ranks=2, top_k=8, num_experts=64)
    for intermediate_size, lag in {128: 32, 768: 32, 1408: 24, 1536: 22, 2944: 11, 14336: 2, 18432: 1}.items():
        for sms in (132, 78, 1):
            chosen = choose_settings(**sizes, intermediate_size=intermediate_size, sms=sms)
            # What holds for all SMs holds for fewer.
            assert 1 <= chosen.lag <= lag and (sms < 132 or chosen.lag == lag)


def test_next_power_of_two():
    assert [next_power_of_two(n) for n in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]
