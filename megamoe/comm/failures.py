"""Collectives that fail say which step of which group failed, and what to look for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megamoe.errors import ExchangeError


@contextmanager
def named_collective(step: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """A collective over ``group`` that fails inside the block raises an ``ExchangeError`` that names ``step``."""
    try:
        yield
    except RuntimeError as error:
        raise ExchangeError(
            f"{step}: the collective failed on rank {dist.get_rank(group)} of {dist.get_world_size(group)}. Every rank "
            "of the group must make the same calls; a rank that raised or died makes the others fail here after the "
            f"process group's timeout (init_process_group(timeout=...)). Cause: {error}"
        ) from error
