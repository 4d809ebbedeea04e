"""Random expert placements: permuted, uneven, with replicas (also on one rank), with unused slots and empty ranks."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from megamoe import ExpertPlacement


def random_placement(
    rng: random.Random, num_experts: int, ep_size: int, replicas: int = 0, num_slots: int = 0
) -> ExpertPlacement:
    """``num_experts`` experts and ``replicas`` more of random ones, anywhere; ``num_slots`` 0 = as many as needed."""
    experts = [*range(num_experts), *(rng.randrange(num_experts) for _ in range(replicas))]
    rng.shuffle(experts)
    lists: list[list[int]] = [[] for _ in range(ep_size)]
    for expert in experts:
        rng.choice([held for held in lists if not num_slots or len(held) < num_slots]).append(expert)
    return ExpertPlacement(num_experts, lists, num_slots)


@st.composite
def placements(draw, max_experts: int = 12, max_ranks: int = 5) -> ExpertPlacement:
    """Hypothesis' version of ``random_placement``, with spare slots."""
    num_experts, ep_size = draw(st.integers(1, max_experts)), draw(st.integers(1, max_ranks))
    replicas = draw(st.integers(0, num_experts))
    rng = random.Random(draw(st.integers(0, 2**32)))
    placement = random_placement(rng, num_experts, ep_size, replicas)
    spare = draw(st.integers(0, 2))
    return ExpertPlacement(num_experts, placement.experts_by_rank, placement.num_slots + spare)
