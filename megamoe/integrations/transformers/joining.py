"""Ranks that call a model differently often: those that have finished take part without tokens until all have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from megamoe.comm.exchange import Exchange
from megamoe.comm.failures import named_collective
from megamoe.errors import ExchangeError, fail_value
from megamoe.integrations.transformers.experts import Recipe, run_experts
from megamoe.layers.parallel import local_tensor


@dataclass(frozen=True)
class ShardedExperts:
    """One experts module of a model, with its part of the experts."""

    module: nn.Module
    recipe: Recipe
    exchange: Exchange

    def run(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        return run_experts(self.module, self.recipe, self.exchange, hidden_states, top_k_index, top_k_weights)

    def run_empty(self) -> None:
        """Takes part in the other ranks' call."""
        down = local_tensor(getattr(self.module, self.recipe.weights[1]))
        hidden_size = down.shape[2 if self.recipe.transposed else 1]
        index = torch.empty(0, 1, dtype=torch.int64, device=down.device)
        self.run(down.new_empty(0, hidden_size), index, down.new_empty(0, 1))


class ExpertParallel:
    """The sharded experts of a model in the order of its forward pass, and where in one this rank is.

    Inside ``join`` each forward pass starts, in its first experts module, with an all-reduce: 1 from a rank that runs
    one, 0 from a rank that has finished. Those that have finished run the experts without tokens while the sum is > 0.
    """

    def __init__(self, layers: list[ShardedExperts], group: dist.ProcessGroup | None):
        self.layers, self.group = layers, group
        self.depth = 0
        self.next_layer = 0
        self.between_passes = True

    def forward(
        self, layer: int, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The call of experts module ``layer``."""
        joined = self.depth > 0 and self.group is not None
        if joined:
            self._enter(layer, hidden_states.device)
        out = self.layers[layer].run(hidden_states, top_k_index, top_k_weights)
        if joined:
            self.next_layer = (layer + 1) % len(self.layers)
            self.between_passes = self.next_layer == 0
        return out

    def _enter(self, layer: int, device: torch.device) -> None:
        if torch.is_grad_enabled():
            fail_value(
                "torch.is_grad_enabled()",
                True,
                "inside join() there is no backward pass: ranks that have finished would miss it",
                "Call the model under torch.no_grad(), or equally often on every rank and without join().",
            )
        if layer != self.next_layer:
            fail_value(
                "experts module",
                layer,
                f"is called out of order: module {self.next_layer} of {len(self.layers)} is next",
                "Inside join(), let every forward pass run all layers.",
            )
        self.between_passes = False
        if layer == 0:
            # Nothing waits for the sum here.
            self._count_running(1, device)

    def _count_running(self, running: int, device: torch.device) -> torch.Tensor:
        count = torch.tensor([running], dtype=torch.int32, device=device)
        with named_collective("start of a joined forward pass", self.group):
            dist.all_reduce(count, group=self.group)
        return count

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """See ``join``."""
        if self.depth == 0:
            self.next_layer, self.between_passes = 0, True
        self.depth += 1
        outermost = self.depth == 1 and self.group is not None
        try:
            yield
            if outermost:
                self._serve_others()
        except Exception:
            # Within a forward pass the others wait for rows: they find out by their timeout.
            if outermost and self.between_passes:
                with contextlib.suppress(ExchangeError):
                    self._serve_others()
            raise
        finally:
            self.depth -= 1

    @torch.no_grad()
    def _serve_others(self) -> None:
        self.between_passes = False
        device = local_tensor(self.layers[0].module.down_proj).device
        while int(self._count_running(0, device)):
            for layer in self.layers:
                layer.run_empty()


def parallelism(model: nn.Module) -> ExpertParallel | None:
    """What ``enable_expert_parallel`` has set on ``model``."""
    return model.__dict__.get("_megamoe_parallel")


@contextlib.contextmanager
def join(model: nn.Module) -> Iterator[None]:
    """Inside, ranks call ``model`` as often as each needs, also never; without gradients. A collective of its group.

    A rank that reaches the end takes part in the others' forward passes, without tokens, until all have reached it. So
    does one that leaves by an exception between two forward passes. ``model.generate`` does all this by itself.

    Args:
        model: one passed to ``enable_expert_parallel``.

    Raises:
        MegaMoEError: ``model`` has no expert parallelism.
        ExchangeError: another rank failed within a forward pass, or did not come within the group's timeout.
    """
    parallel = parallelism(model)
    if parallel is None:
        fail_value("model", type(model).__name__, "has no expert parallelism", "Call enable_expert_parallel first.")
    with parallel.join():
        yield
