"""``PeerExchange`` on several ranks of one process: each rank is a thread, its kernels run under the simulator."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megamoe import MoE
from megamoe.comm.peer import PeerExchange
from megamoe.comm.symm import SymmetricBuffer
from megamoe.kernels.peer_rows import PeerMemory
from megamoe.layers.replicas import ExpertSlots
from megamoe.placement import ExpertPlacement
from megamoe.plan import MemoryPlan
from tests.support.exchange_sim import SMS, Sizes, World

LIMIT = 120.0
"""Seconds that ranks wait for each other; a failed rank ends the others' waits at once."""


class SimulatedBuffer(SymmetricBuffer):
    """Every movement of all ranks is run to its end, together."""

    def __init__(self, world: World, rank: int, meeting: threading.Barrier):
        self._world, self._rank, self._meeting = world, rank, meeting
        self.plan, self.device, self.rank = world.plan, torch.device("cpu"), rank
        self.attached = {}

    def lend(self, plan: MemoryPlan) -> PeerMemory:
        assert plan == self.plan
        return self._world.memories[self._rank]

    def _memory(self) -> torch.Tensor:
        return self._world.allocations[self._rank]

    def run(self, launches) -> None:
        self._world.add(self._rank, launches)
        self._meeting.wait(LIMIT)

    def check(self) -> None:
        assert not any(any(error) for error in self._world.errors), self._world.errors


def run_peers(sizes: Sizes, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """``[function(rank, exchange, *args) for rank in ...]``, each in a thread.

    Args:
        options: of ``PeerExchange``.
    """
    world = World(sizes)
    turns = iter(range(1 << 30))

    def run() -> None:
        world.run("random", next(turns))

    meeting = threading.Barrier(sizes.ranks, action=run)
    results: list[Any] = [None] * sizes.ranks
    failures: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            exchange = PeerExchange(sizes.experts, SimulatedBuffer(world, rank, meeting), **{"num_sms": SMS, **options})
            results[rank] = function(rank, exchange, *args)
        except threading.BrokenBarrierError:
            pass
        except BaseException as failure:
            failures.append(failure)
            meeting.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(sizes.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    world_errors = [error for error in world.errors if any(error)]
    assert not world_errors, world_errors
    return results


def on_rank(full: MoE, rank: int, exchange: PeerExchange) -> MoE:
    """The layer of a rank: its part of the experts of a layer on one rank, and their exchange."""
    moe = copy.deepcopy(full)
    local = exchange.num_local_experts
    for name, parameter in list(moe.experts.named_parameters(recurse=False)):
        setattr(moe.experts, name, nn.Parameter(parameter.detach()[rank * local : (rank + 1) * local].clone()))
    moe.experts.exchange = exchange
    moe.experts.slots = ExpertSlots(
        ExpertPlacement.even(exchange.num_experts, exchange.memory_plan.ep_size), rank, torch.device("cpu")
    )
    return moe
