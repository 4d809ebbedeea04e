"""The memory plan: exact, monotone, and what it says."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamoe import MoEConfig
from megamoe.kernels import flag_words
from megamoe.kernels.layout import ALIGN
from megamoe.plan import POOL_BYTES, REGION_ALIGN, MemoryPlan, plan_memory
from tests.support.errors import fails


def config(hidden=256, experts=8, top_k=2, precision="bf16", **others) -> MoEConfig:
    return MoEConfig(hidden, 128, experts, top_k, precision=precision, **others)


PLANS = st.builds(
    dict,
    hidden=st.integers(1, 40).map(lambda n: 16 * n),
    top_k=st.integers(1, 8),
    ranks=st.sampled_from([1, 2, 4, 8]),
    tokens=st.integers(1, 300),
    precision=st.sampled_from(["bf16", "fp8"]),
)


def planned(hidden, top_k, ranks, tokens, precision) -> MemoryPlan:
    return plan_memory(config(hidden, 8, top_k, precision), ranks, tokens)


@given(PLANS)
def test_regions_hold_what_they_are_for(p):
    plan = planned(**p)
    tokens, hidden, top_k = p["tokens"], p["hidden"], p["top_k"]
    pairs = tokens * top_k
    wanted = {
        "flags": flag_words.FLAG_WORDS * 8,
        "state": flag_words.STATE_WORDS * 8,
        "error": flag_words.ERROR_WORDS * 8,
        "list_index": p["ranks"] * pairs * 4,
        "list_weights": p["ranks"] * pairs * 4,
        "rows": tokens * hidden * 2,
        "scales": tokens * -(-hidden // 128) * 4 if p["precision"] == "fp8" else 0,
        "slots": pairs * hidden * 2,
        "slot_weights": pairs * 4,
    }
    assert {region.name: region.nbytes for region in plan.regions} == wanted
    end = 0
    for region in plan.regions:
        assert region.offset >= end and region.offset % REGION_ALIGN == 0
        end = region.offset + region.nbytes
    assert plan.total >= end


@given(PLANS, st.sampled_from(["hidden", "top_k", "tokens"]))
def test_grows_with_every_argument(p, name):
    more = {**p, name: p[name] + (16 if name == "hidden" else 1)}
    if more["top_k"] > 8:
        return
    small, large = planned(**p), planned(**more)
    assert large.total >= small.total and large.covers(small) and large.most_rows >= small.most_rows


def test_covers_no_larger_one_and_no_other_group():
    plan = plan_memory(config(), 2, 64)
    assert plan.covers(plan) and plan.covers(plan_memory(config(), 2, 63))
    assert not plan.covers(plan_memory(config(), 2, 65))
    assert not plan.covers(plan_memory(config(), 4, 8))
    assert not plan.covers(plan_memory(config(precision="fp8"), 2, 8))
    # Fewer tokens of more columns: rows fit, lists do not.
    assert not plan.covers(plan_memory(config(hidden=16), 2, 128))


@given(PLANS)
def test_most_rows_suffice_for_any_routing(p):
    plan = planned(**p)
    pairs, local = p["ranks"] * p["tokens"] * p["top_k"], 8 // p["ranks"]
    # All pairs on one expert, or one row in the last block of as many experts as can be.
    partial = min(local, pairs)
    worst = max(-(-pairs // ALIGN) * ALIGN, (partial + (pairs - partial) // ALIGN) * ALIGN)
    assert plan.most_rows >= worst and plan.most_rows % ALIGN == 0


def test_large_models():
    """A model like DeepSeek-V3 on 8 ranks."""
    deepseek = config(7168, 256, 8, "fp8")
    decode, prefill = plan_memory(deepseek, 8, 128), plan_memory(deepseek, 8, 8192)
    assert decode.total + decode.most_rows * 7168 <= 300 << 20
    assert prefill.total <= 1.2 * (1 << 30)


def test_explain_lists_every_region():
    plan = plan_memory(config(), 2, 64)
    text = plan.explain()
    for region in plan.regions:
        assert region.name in text and f"{region.nbytes:,}" in text
    assert f"{plan.total:,}" in text and f"{plan.most_rows:,}" in text


def test_the_pool_is_no_part_of_the_allocation():
    usual, small = plan_memory(config(), 2, 64), plan_memory(config(pool_bytes=3 << 20), 2, 64)
    assert (usual.pool_bytes, small.pool_bytes) == (POOL_BYTES, 3 << 20) and usual.regions == small.regions
    assert usual.covers(small) and small.covers(usual)
    assert "holds 384 MiB of them" in usual.explain() and "holds 3 MiB of them" in small.explain()


def test_tokens_come_from_the_config():
    assert plan_memory(config(max_tokens_per_rank=64), 2) == plan_memory(config(), 2, 64)
    assert dataclasses.replace(plan_memory(config(), 2, 64)) == plan_memory(config(), 2, 64)


def test_replicated_experts():
    """More of them than the router knows: only the rows' bound grows."""
    plain, replicated = plan_memory(config(), 2, 64), plan_memory(config(), 2, 64, num_experts=12)
    assert replicated.num_local_experts == 6 and replicated.most_rows > plain.most_rows
    assert replicated.regions == plain.regions and plain.covers(replicated)
    with fails(ValueError, "num_experts", 7, "must be at least 8"):
        plan_memory(config(), 2, 64, num_experts=7)


def test_shared_experts():
    """Slots for a rank's own tokens, on experts of its own."""
    plain, more = plan_memory(config(), 2, 64), plan_memory(config(), 2, 64, shared_experts=3)
    assert (more.top_k, more.num_local_experts, more.shared_experts) == (5, 7, 3) and more.covers(plain)
    assert more["slots"].nbytes == 5 * 64 * 256 * 2 and more["list_index"].nbytes == 2 * 64 * 5 * 4
    # However others are routed, a shared expert has a block of this rank's tokens.
    assert more.most_rows == plain.most_rows + 3 * 128
    assert plan_memory(config(), 2, 129, shared_experts=3).most_rows == plan_memory(config(), 2, 129).most_rows + 768
    with fails(ValueError, "shared_experts", -1, "must be at least 0"):
        plan_memory(config(), 2, 64, shared_experts=-1)


@pytest.mark.parametrize(
    ("arguments", "kind", "argument", "value", "rule"),
    [
        ((config(), 2), ValueError, "tokens", None, "must be known"),
        ((config(), 2, 0), ValueError, "tokens", 0, "must be at least 1"),
        ((config(), 2, 1.5), TypeError, "tokens", 1.5, "must be an integer"),
        ((config(), 0, 8), ValueError, "ep_size", 0, "must be at least 1"),
        ((config(), 3, 8), ValueError, "ep_size", 3, "must be at most 32 and divide num_experts = 8"),
        ((config(experts=64), 64, 8), ValueError, "ep_size", 64, "must be at most 32"),
        ((config(hidden=100), 2, 8), ValueError, "hidden_size", 100, "must be a multiple of 16"),
        ((config(experts=32, top_k=8), 32, 2**24), ValueError, "tokens", 2**24, "must stay below 2^31 rows"),
        (({}, 2, 8), TypeError, "config", "dict", "must be a MoEConfig"),
    ],
)
def test_bad_arguments(arguments, kind, argument, value, rule):
    with fails(kind, argument, value, rule):
        plan_memory(*arguments)
