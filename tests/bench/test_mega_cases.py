"""Cases, routing and weights of the mega-kernel's benchmark."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megamoe.bench import mega_cases
from megamoe.bench.mega_cases import MegaCase, MegaWeights, cases, choose_experts, random_weights
from tests.support.errors import fails

SMALL = MegaCase(5, 256, 1024, 4, 2)

# ---------------------------------------------------------------- cases


def test_every_combination_shape_by_shape():
    found = cases([(256, 128, 4, 2), (384, 128, 8, 3)], [1, 8], ["uniform", "zipf"], 2)
    assert [case.shape for case in found] == [(256, 128, 4, 2)] * 4 + [(384, 128, 8, 3)] * 4
    assert [(case.routing, case.tokens) for case in found[:4]] == [
        ("uniform", 1),
        ("uniform", 8),
        ("zipf", 1),
        ("zipf", 8),
    ]
    assert len({case.label for case in found}) == 8
    assert found[-1].label == "T=8 H=384 I=128 E=8 K=3 zipf fp8"
    both = cases([(256, 128, 4, 2), (384, 128, 8, 3)], [1, 8], ["uniform"], 2, ["fp8", "bf16"])
    assert [case.precision for case in both] == ["fp8", "fp8", "bf16", "bf16"] * 2
    assert [case.config().precision for case in both[:4]] == [case.precision for case in both[:4]]


def test_cases_that_cannot_run():
    shape = (256, 128, 4, 2)
    with fails(ValueError, "tokens", 0, "must be at least 1"):
        cases([shape], [0], ["uniform"], 1)
    with fails(ValueError, "routing", "hot", "must be one of"):
        cases([shape], [1], ["hot"], 1)
    with fails(ValueError, "precision", "fp4", "must be one of"):
        cases([shape], [1], ["uniform"], 1, ["bf16", "fp4"])
    with fails(ValueError, "shape", [256, 128, 4], "must be H, I, E and K"):
        cases([(256, 128, 4)], [1], ["uniform"], 1)
    with fails(ValueError, "hidden_size", 192, "must be a multiple of 128"):
        cases([(192, 128, 4, 2)], [1], ["uniform"], 1)
    with fails(ValueError, "ep_size", 3, "divide num_experts = 4"):
        cases([shape], [1], ["uniform"], 3)


def test_flops_count_slots_with_experts():
    case = MegaCase(10, 256, 128, 4, 2)
    assert case.flops == 2 * 10 * 2 * 3 * 256 * 128
    assert MegaCase(10, 256, 128, 4, 2, "one-hot").flops == case.flops / 2


def test_calls_of_a_graph():
    large, small = MegaCase(8192), MegaCase(1)
    assert large.calls(2) == mega_cases.MIN_CALLS and MegaCase(1, 256, 128, 4, 2).calls(2) == mega_cases.MAX_CALLS
    assert mega_cases.MIN_CALLS < MegaCase(128).calls(2) < small.calls(2) <= mega_cases.MAX_CALLS
    # All experts' weights once: 32 x 3 x 7168 x 2048 bytes.
    assert MegaCase(128).calls(2) == round(mega_cases.REPLAY_US * 4.3e6 / (32 * 3 * 7168 * 2048))
    # Twice as many.
    bf16 = MegaCase(128, precision="bf16")
    assert bf16.calls(2) == round(mega_cases.REPLAY_US * 4.3e6 / (32 * 3 * 7168 * 2048 * 2))


def counts_of(case: MegaCase, tokens: int, seed: int) -> torch.Tensor:
    index = choose_experts(case, tokens, torch.Generator().manual_seed(seed))
    assert index.shape == (tokens, case.top_k) and index.dtype == torch.int64
    assert all(len(set(row)) == case.top_k for row in index[:50].tolist()), "a token's experts differ"
    assert index.min() >= 0 and index.max() < case.experts
    return index.flatten().bincount(minlength=case.experts).double()


def test_uniform_routing(seed):
    counts = counts_of(MegaCase(1, experts=16, top_k=2), 20000, seed)
    assert counts.max() / counts.min() < 1.25


def test_zipf_routing(seed):
    case = MegaCase(1, experts=16, top_k=1, routing="zipf")
    counts = counts_of(case, 20000, seed).sort(descending=True).values
    law = 1 / torch.arange(1, 17, dtype=torch.float64)
    assert torch.allclose(counts / counts.sum(), law / law.sum(), atol=0.02)
    # The same expert is the most popular on every rank, and not merely the first.
    first = {int(counts_of(case, 2000, seed + rank).argmax()) for rank in range(3)}
    assert len(first) == 1 and first != {0}
    assert counts_of(MegaCase(1, experts=16, top_k=8, routing="zipf"), 2000, seed).max() > 1800


def test_one_hot_routing(seed):
    index = choose_experts(MegaCase(1, experts=16, top_k=3, routing="one-hot"), 4, torch.Generator())
    assert index.tolist() == [[15, -1, -1]] * 4


# ---------------------------------------------------------------- weights


def weights_of(case: MegaCase, seed: int) -> MegaWeights:
    return random_weights(case, 1, torch.Generator().manual_seed(seed))


def test_random_weights(seed):
    weights = random_weights(SMALL, 2, torch.Generator().manual_seed(seed))
    assert weights.up.codes.shape == (2, 2048, 256) and weights.up.scales.shape == (2, 16, 2)
    assert weights.down.codes.shape == (2, 256, 1024) and weights.down.scales.shape == (2, 2, 8)
    values = weights.down.codes.float() * weights.down.scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert values.std() == pytest.approx(1024**-0.5, rel=0.05)


def test_random_weights_in_bf16(seed):
    """The same numbers, before the cast."""
    weights, bf16 = weights_of(SMALL, seed), weights_of(replace(SMALL, precision="bf16"), seed)
    assert weights.fp8 and not bf16.fp8 and weights.experts == bf16.experts == 4
    assert bf16.up.dtype == torch.bfloat16 and bf16.up.shape == (4, 2048, 256) and bf16.down.shape == (4, 256, 1024)
    for ours, cast in zip(bf16.expert(3), weights.expert(3), strict=True):
        assert ours.dtype == cast.dtype == torch.float32
        assert 1e-3 < (ours - cast).norm() / ours.norm() < 0.05
    assert torch.equal(bf16.expert(3)[1], bf16.down[3].float())
