"""The language model: causality, cache, parameter count."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from launch.config import PRESETS, LaunchError, ModelConfig
from launch.model import LanguageModel, apply_rope, count_parameters, next_byte_loss, rope_tables


@pytest.fixture
def model(small_model):
    torch.manual_seed(0)
    model = LanguageModel(small_model)
    # The head starts at zero; logits must depend on the input for these tests.
    torch.nn.init.normal_(model.head.weight)
    return model.eval()


def test_logits_do_not_see_later_bytes(model):
    tokens = torch.randint(256, (2, 24))
    changed = tokens.clone()
    changed[:, 15:] = (changed[:, 15:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :15], after[:, :15], rtol=1e-5, atol=1e-5)
    assert (before[:, 15:] - after[:, 15:]).abs().amax(dim=(0, 2)).min() > 1e-3


@pytest.mark.parametrize("sizes", [[1] * 24, [10, 1, 13], [24]], ids=["bytewise", "uneven", "whole"])
def test_cache_gives_the_logits_of_one_pass(model, sizes):
    tokens = torch.randint(256, (2, 24))
    caches = model.new_caches()
    pieces = [model(piece, caches) for piece in tokens.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), rtol=1e-4, atol=1e-4)
    assert caches[0].length == 24


def test_rotary_scores_depend_on_the_distance_alone():
    cos, sin = rope_tables(32, 16, 10_000.0)
    query, key = torch.randn(16), torch.randn(16)
    rotated_query, rotated_key = (apply_rope(x.expand(1, 1, 32, 16), cos, sin)[0, 0] for x in (query, key))
    scores = rotated_query @ rotated_key.T
    torch.testing.assert_close(scores[5, 2], scores[25, 22], rtol=1e-4, atol=1e-4)


def test_too_many_positions_are_explained(model):
    with pytest.raises(LaunchError, match="context_length=32"):
        model(torch.zeros(1, 33, dtype=torch.int64))


def test_first_loss_is_that_of_a_uniform_guess(small_model):
    torch.manual_seed(0)
    tokens = torch.randint(256, (2, 32))
    loss = next_byte_loss(LanguageModel(small_model)(tokens), tokens).mean()
    torch.testing.assert_close(loss, torch.tensor(256.0).log())


@pytest.mark.parametrize("name", ["tiny", "small", "base"])
def test_parameters_are_counted(name):
    config = PRESETS[name].model
    model = LanguageModel(config, device=torch.device("meta"))
    total, active = count_parameters(config)
    assert total == sum(parameter.numel() for parameter in model.parameters())
    assert active < total


def test_config_round_trip(small_model):
    assert ModelConfig.from_dict(small_model.to_dict()) == small_model


def test_bad_shapes_are_explained(small_model):
    with pytest.raises(LaunchError, match="multiple of 2 \\* num_heads"):
        dataclasses.replace(small_model, num_heads=3)
    with pytest.raises(LaunchError, match="context_length=0"):
        dataclasses.replace(small_model, context_length=0)
