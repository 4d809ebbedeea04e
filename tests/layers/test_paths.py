"""Which path a layer takes: arithmetic only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megamoe import MoEConfig
from megamoe.config import PRECISIONS
from megamoe.layers.paths import CROSSOVERS, Crossover, PathChoice, choose_path, explain, fused_shared_experts

CONFIG = MoEConfig(256, 128, 8, 2, precision="fp8", max_tokens_per_rank=64)
USUAL = dict(ranks=2, device="cuda", dtype=torch.bfloat16, needs_grad=False)


def choose(config: MoEConfig = CONFIG, **changes) -> PathChoice:
    return choose_path(config, **{**USUAL, **changes})


def test_all_is_well():
    assert choose().path == "fused"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(device="cpu"), "NVLink joins GPUs, and the device is cpu"),
        (dict(max_tokens_per_rank=None), "max_tokens_per_rank is not set"),
        (dict(hidden_size=264), "hidden_size is no multiple of 16"),
        (dict(dtype=torch.float32), "in 16 bits, and parameters are torch.float32"),
        (dict(ranks=64, num_experts=64), "NVLink serves 32 ranks at most"),
        (dict(unreachable="spans machines"), "spans machines"),
    ],
)
def test_collective(changes, reason):
    fields = {name: changes.pop(name) for name in list(changes) if hasattr(CONFIG, name)}
    choice = choose(replace(CONFIG, **fields), **changes)
    assert choice.path == "collective" and reason in choice.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(needs_grad=True), "gradients are recorded"),
        (dict(device_obstacle="no Hopper"), "no Hopper"),
        (dict(precision="bf16", intermediate_size=100), "beyond the mega-kernel's limits: intermediate_size = 100"),
        (dict(pool_bytes=1), "beyond the mega-kernel's limits: pool_bytes = 1: must hold a block of 128 rows"),
        (dict(pool_bytes=128 * 400), "must hold lag + group = 2 blocks of 128 rows for settings.lag = 1"),
        (dict(hidden_size=2880, intermediate_size=2880, bias=True), "hidden_size = 2880: must be a multiple of 128"),
        (dict(activation="relu2"), "no activation without gate (relu2)"),
        (dict(hidden_size=272), "beyond the mega-kernel's limits: hidden_size = 272: must be a multiple of 128"),
        (dict(intermediate_size=18433), "beyond the mega-kernel's limits: intermediate_size = 18560"),
        (dict(top_k=17, num_experts=32), "beyond the mega-kernel's limits: top_k = 17"),
        (dict(num_experts=514), "beyond the mega-kernel's limits: num_local_experts = 257"),
        (dict(dtype=torch.float16), "takes rows in bfloat16, and they are torch.float16"),
    ],
)
def test_staged(changes, reason):
    fields = {name: changes.pop(name) for name in list(changes) if hasattr(CONFIG, name)}
    choice = choose(replace(CONFIG, **fields), **changes)
    assert choice.path == "staged" and reason in choice.reason


def test_precisions_are_measured_apart():
    """Copies of FP8 weights are padded to whole blocks."""
    table = [Crossover(2, 1, None, "codes"), Crossover(2, 8, None, "numbers", "bf16")]
    bf16 = replace(CONFIG, precision="bf16")
    for config, tokens, wanted in [
        (CONFIG, 1, PathChoice("fused", "codes")),
        (replace(CONFIG, intermediate_size=100), 1, PathChoice("fused", "codes")),
        (bf16, 7, PathChoice("staged", "numbers")),
        (bf16, 8, PathChoice("fused", "numbers")),
    ]:
        assert choose(replace(config, max_tokens_per_rank=tokens), crossovers=table) == wanted
    assert choose(replace(bf16, max_tokens_per_rank=2047)).path == "staged"
    assert choose(replace(bf16, max_tokens_per_rank=2048)).path == "fused"


def test_biases_need_no_other_path():
    """In FP8 they are padded as the weights are."""
    oai = replace(CONFIG, activation="swiglu_oai", hidden_size=2944, bias=True)
    assert choose(replace(oai, intermediate_size=2880)).path == "fused"
    assert choose(replace(oai, precision="bf16", intermediate_size=2944, max_tokens_per_rank=8192)).path == "fused"
    reason = choose(replace(oai, precision="bf16", intermediate_size=2880, max_tokens_per_rank=8192)).reason
    assert "intermediate_size = 2880: must be a multiple of 128" in reason


def test_pools_that_hold_all_rows_need_not_hold_what_the_order_of_tiles_does():
    block = 128 * (256 + 128 + 4 * 3)
    one = replace(CONFIG, num_experts=1, top_k=1, pool_bytes=2 * block, max_tokens_per_rank=256)
    assert choose(one, ranks=1, crossovers=[Crossover(1, 1, None, "")]).path == "fused"
    assert choose(replace(one, pool_bytes=block), ranks=1).path == "staged"


@pytest.mark.parametrize(
    ("changes", "count", "reason"),
    [
        (dict(), 2, ""),
        (dict(fuse_shared_experts=False), 0, "fuse_shared_experts is not set"),
        (dict(precision="bf16"), 0, "BF16 weights are not copied"),
        (dict(activation="relu2"), 0, "no activation without gate (relu2)"),
        (dict(bias=True), 0, "the routed experts have biases"),
        (dict(shared_intermediate_size=200), 0, "its width 200 is no multiple of intermediate_size = 128"),
        (dict(shared_intermediate_size=64), 0, "its width 64 is no multiple"),
        (dict(shared_intermediate_size=14 * 128), 14, ""),
        (dict(shared_intermediate_size=15 * 128), 0, "top_k = 2 and 15 more slots are beyond the mega-kernel's 16"),
        (dict(num_experts=508), 2, ""),
        (dict(num_experts=510), 0, "255 experts of a rank and 2 more are beyond the mega-kernel's 256"),
    ],
)
def test_fused_shared_experts(changes, count, reason):
    config = replace(CONFIG, **{"shared_intermediate_size": 256, "fuse_shared_experts": True, **changes})
    found, why = fused_shared_experts(config, 2)
    assert found == count and reason in why and bool(why) == (count == 0)


def test_shared_experts_count():
    """A rank's, with the replicas that it holds, and their slots."""
    config = replace(CONFIG, shared_intermediate_size=256, fuse_shared_experts=True)
    assert fused_shared_experts(config, 2, num_experts=508) == (2, "")
    assert fused_shared_experts(config, 2, num_experts=510)[0] == 0
    assert choose(num_experts=508, shared_experts=2).path == "fused"
    assert choose(num_experts=508, shared_experts=3).path == "staged"
    assert choose(shared_experts=14).path == "fused" and choose(shared_experts=15).path == "staged"


def test_replicas_count():
    """Physical experts, not logical ones, are what a rank holds."""
    assert choose(num_experts=512).path == "fused"
    assert choose(num_experts=514).path == "staged"


def test_one_rank_needs_no_links():
    """It takes any dtype and any number of tokens; what was measured decides."""
    alone = dict(ranks=1, unreachable="nobody is there")
    decoding, others = (replace(CONFIG, max_tokens_per_rank=tokens) for tokens in (128, 129))
    assert choose(decoding, **alone).path == "fused" and choose(others, **alone).path == "staged"
    assert choose(others, **alone, crossovers=[Crossover(1, 1, None, "")]).path == "fused"
    for changes in (dict(device="cpu", device_obstacle="no GPU"), dict(dtype=torch.float64)):
        assert choose(**alone, **changes).path == "staged"
    assert choose(replace(CONFIG, max_tokens_per_rank=None), **alone).path == "staged"


def test_what_was_measured_decides():
    table = [Crossover(2, 8, 512, "two"), Crossover(4, 1, 100, "four"), Crossover(1, 1, 0, "one")]
    for ranks, tokens, path in [
        (2, 7, "staged"), (2, 8, "fused"), (2, 512, "fused"), (2, 513, "staged"),
        (4, 1, "fused"), (8, 100, "fused"), (8, 101, "staged"), (1, 1, "staged"),
    ]:  # fmt: skip
        choice = choose(replace(CONFIG, max_tokens_per_rank=tokens), ranks=ranks, crossovers=table)
        assert choice == PathChoice(path, {1: "one", 2: "two", 4: "four", 8: "four"}[ranks]), (ranks, tokens)


def test_the_table_is_in_order():
    for precision in PRECISIONS:
        ranks = [each.ranks for each in CROSSOVERS if each.precision == precision]
        assert ranks == sorted(set(ranks)) and ranks[0] == 1


def test_explain():
    text = explain({"inference": PathChoice("fused", "it is fast"), "training": PathChoice("staged", "it trains")})
    assert text == "inference  fused: it is fast\ntraining   staged: it trains"
