"""The saved models, made once per test process."""

from __future__ import annotations

import os
import random

import pytest

from tests.checkpoint.tiny import Saved, save_families


@pytest.fixture(scope="session")
def _saved(tmp_path_factory) -> Saved:
    pytest.importorskip("transformers")
    seed = int(os.environ.get("MEGAMOE_TEST_SEED", random.SystemRandom().randrange(2**31)))
    return save_families(tmp_path_factory.mktemp("models"), seed)


@pytest.fixture
def saved(_saved) -> Saved:
    """Tiny models of all families; their seed is printed with a failure."""
    print(f"MEGAMOE_TEST_SEED={_saved.seed} (of the saved models)")
    return _saved
