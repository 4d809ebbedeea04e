"""Learning-rate schedule and parameter groups."""

from __future__ import annotations

import dataclasses

import pytest

from launch.config import LaunchError, TrainConfig
from launch.model import LanguageModel
from launch.optim import build_optimizer, learning_rate, set_learning_rate

CONFIG = TrainConfig(steps=100, batch_size=4, learning_rate=1.0, min_learning_rate_ratio=0.1, warmup_steps=10)


def test_schedule_warms_up_then_falls_to_the_minimum():
    rates = [learning_rate(step, CONFIG) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0)
    assert rates[54] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert all(earlier > later for earlier, later in zip(rates[9:], rates[10:], strict=False))


def test_schedule_without_warm_up_or_with_nothing_after_it():
    assert learning_rate(1, dataclasses.replace(CONFIG, warmup_steps=0)) <= 1.0
    assert learning_rate(10, dataclasses.replace(CONFIG, steps=10)) == pytest.approx(1.0)


def test_groups_hold_every_parameter_once_and_decay_matrices_only(small_model):
    model = LanguageModel(small_model)
    optimizer = build_optimizer(model, CONFIG)
    grouped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, model.parameters()))
    experts = {id(parameter) for layer in model.moe_layers() for parameter in layer.experts.parameters()}
    for group in optimizer.param_groups:
        decayed = group["weight_decay"] > 0
        assert all((parameter.ndim >= 2) == decayed for parameter in group["params"])
        assert len({id(parameter) in experts for parameter in group["params"]}) == 1


def test_rate_reaches_every_group(small_model):
    optimizer = build_optimizer(LanguageModel(small_model), CONFIG)
    set_learning_rate(optimizer, 0.25)
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"steps": 0}, "steps=0"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"accumulation": 3}, "accumulation=3"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"keep_checkpoints": 0}, "keep_checkpoints=0"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
    ],
)
def test_bad_settings_are_explained(change, message):
    with pytest.raises(LaunchError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_settings_round_trip():
    assert TrainConfig.from_dict(CONFIG.to_dict()) == CONFIG
