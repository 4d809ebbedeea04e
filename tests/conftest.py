"""Fixtures and settings shared by all tests."""

from __future__ import annotations

import os
import random

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "megamoe", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("megamoe")

# Several pytest workers share few cores.
torch.set_num_threads(1)


@pytest.fixture
def seed(record_property) -> int:
    """A fresh seed per test, fixed by MEGAMOE_TEST_SEED; printed with a failure."""
    value = int(os.environ.get("MEGAMOE_TEST_SEED", random.SystemRandom().randrange(2**31)))
    record_property("seed", value)
    print(f"MEGAMOE_TEST_SEED={value}")
    torch.manual_seed(value)
    return value


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
