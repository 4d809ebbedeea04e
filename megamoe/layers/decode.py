"""``DecodeRunner``: a layer in CUDA graphs, one for each of a few token counts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megamoe.comm.collective import CollectiveExchange
from megamoe.errors import check_int, check_tensor, fail_type, fail_value
from megamoe.layers.experts import Experts
from megamoe.layers.parallel import local_tensor
from megamoe.layers.shared import SharedExperts

DEFAULT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)

WARM_UP_CALLS = 2
"""Before a capture: the first compiles kernels and fills caches, the second shows that it needs nothing more."""


@dataclass
class _Bucket:
    """Static inputs and outputs of one token count; ``graph`` is None where calls are eager."""

    hidden_states: torch.Tensor
    token_mask: torch.Tensor
    live: int
    out: torch.Tensor | None = None
    graph: torch.cuda.CUDAGraph | None = None


@dataclass(frozen=True)
class _Step:
    """What a number of tokens needs: views, made once. ``out`` is None where calls are eager."""

    num_tokens: int
    bucket: _Bucket
    input: torch.Tensor
    mask: torch.Tensor
    out: torch.Tensor | None


class DecodeRunner:
    """Runs a layer on any number of tokens up to the largest bucket, each bucket as one CUDA graph.

    Tokens are padded to the next bucket with masked ones, which are routed nowhere: they move no rows and count in no
    statistic. Weights that change in place are seen by the graphs; parameters that become other objects are not: make
    the runner after loading and after ``rebalance`` has fixed the number of slots. On a CPU it calls the layer with the
    same padding, without graphs.

    Construction calls the layer for each bucket, largest first: with expert parallelism it is a collective, and so is
    each call afterwards; ranks may have different numbers of tokens.

    A call copies its tokens, checks that copies of weights are current, and replays. Whoever writes tokens to
    ``runner.input(T)`` and passes that very tensor saves the copy::

        torch.add(attention, residual, out=runner.input(T))
        y = runner(runner.input(T))

    Args:
        layer: ``layer(hidden_states [T, H], token_mask bool [T]) -> [T, H]``, such as ``MoE`` in evaluation mode.
        hidden_size: H.
        buckets: token counts, ascending.
        dtype: of the hidden states; default: bfloat16.
        device: default: that of the layer's parameters.

    Attributes:
        captures: graphs that have been captured: as many as buckets on a GPU, 0 on a CPU.

    Raises:
        MegaMoEError: an argument breaks a rule; the layer is in training mode; or its exchange waits for the host, so
            that no graph can hold it.
    """

    def __init__(
        self,
        layer: nn.Module,
        hidden_size: int,
        buckets: Sequence[int] = DEFAULT_BUCKETS,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ):
        if not isinstance(layer, nn.Module):
            fail_type("layer", type(layer).__name__, "must be an nn.Module", "Pass a MoE, or a module around one.")
        check_int("hidden_size", hidden_size, 1)
        if not buckets or list(buckets) != sorted(set(buckets)):
            fail_value("buckets", list(buckets), "must be ascending token counts", "Pass (1, 8, 32), say.")
        for bucket in buckets:
            check_int("buckets", bucket, 1)
        if layer.training:
            fail_value(
                "layer.training", True, "must be False: graphs hold no training step", "Call layer.eval() first."
            )
        if device is None:
            first = next(layer.parameters(), None)
            device = torch.device("cpu") if first is None else local_tensor(first).device
        self._layer, self._hidden_size, self._dtype = layer, hidden_size, dtype
        self._with_copies = [module for module in layer.modules() if _has_copies(module)]
        self.captures = 0
        self._sizes = tuple(buckets)
        self._buckets: dict[int, _Bucket] = {}
        self._steps: dict[tuple[int, ...], _Step] = {}
        # Any call may write them, in inference mode or not.
        with torch.inference_mode(False):
            most = self._sizes[-1]
            # A mask of n tokens is a piece of it.
            self._masks = torch.arange(2 * most, device=device) < most
            for size in self._sizes:
                hidden_states = torch.zeros(size, hidden_size, dtype=dtype, device=device)
                token_mask = torch.ones(size, dtype=torch.bool, device=device)
                self._buckets[size] = _Bucket(hidden_states, token_mask, size)
        self.device = self._masks.device
        if self.device.type == "cuda":
            self._check_capturable()
            pool = None
            # The largest first: the others then fit into its memory.
            for size in reversed(self._sizes):
                self._capture(self._buckets[size], pool)
                pool = self._buckets[size].graph.pool()

    @property
    def buckets(self) -> tuple[int, ...]:
        """Token counts, ascending."""
        return self._sizes

    def bucket_of(self, num_tokens: int) -> int:
        """The bucket that ``num_tokens`` run in.

        Raises:
            MegaMoEError: there are more tokens than the largest bucket has.
        """
        if num_tokens > self._sizes[-1]:
            rule = f"must not exceed the largest bucket, {self._sizes[-1]}"
            fail_value("tokens", num_tokens, rule, "Add a larger bucket.")
        return self._sizes[bisect_left(self._sizes, num_tokens)]

    def input(self, num_tokens: int) -> torch.Tensor:
        """``[num_tokens, H]``: the memory that a call of so many tokens reads, the same tensor each time.

        Numbers of tokens with the same bucket share it, and a call with another tensor writes it.

        Raises:
            MegaMoEError: ``num_tokens`` is negative or more than the largest bucket.
        """
        check_int("num_tokens", num_tokens, 0)
        return self._step(num_tokens).input

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` of ``hidden_states [T, H]``, T from 0; overwritten by the next call with the same bucket.

        Raises:
            MegaMoEError: another shape, dtype or device, or too many tokens.
        """
        step = self._steps.get(hidden_states.shape) if isinstance(hidden_states, torch.Tensor) else None
        if step is None or hidden_states.dtype != self._dtype or hidden_states.device != self.device:
            check_tensor("hidden_states", hidden_states, (None, self._hidden_size), (self._dtype,), self.device)
            step = self._step(hidden_states.shape[0])
        bucket = step.bucket
        if hidden_states is not step.input:
            # No graph of autograd may hold the buffer.
            step.input.copy_(hidden_states.detach() if hidden_states.requires_grad else hidden_states)
        if bucket.live != step.num_tokens:
            bucket.token_mask.copy_(step.mask)
            bucket.live = step.num_tokens
        if bucket.graph is None:
            with torch.no_grad():
                return self._layer(bucket.hidden_states, bucket.token_mask)[: step.num_tokens]
        for module in self._with_copies:
            module.refresh_copies()
        bucket.graph.replay()
        return step.out

    def _step(self, num_tokens: int) -> _Step:
        step = self._steps.get((num_tokens, self._hidden_size))
        if step is None:
            size = self.bucket_of(num_tokens)
            bucket, start = self._buckets[size], self._sizes[-1] - num_tokens
            with torch.inference_mode(False):
                hidden_states, mask = bucket.hidden_states[:num_tokens], self._masks[start : start + size]
            out = None if bucket.out is None else bucket.out[:num_tokens]
            step = _Step(num_tokens, bucket, hidden_states, mask, out)
            self._steps[num_tokens, self._hidden_size] = step
        return step

    def _check_capturable(self) -> None:
        for name, module in self._layer.named_modules():
            if isinstance(module, Experts) and isinstance(module.exchange, CollectiveExchange):
                fail_value(
                    f"{name or 'layer'}.exchange",
                    type(module.exchange).__name__,
                    "reads sizes back to the host, which no CUDA graph can hold",
                    'Build the layer with path="staged", or with group=None.',
                )

    @torch.no_grad()
    def _capture(self, bucket: _Bucket, pool: tuple[int, int] | None) -> None:
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_CALLS):
                    self._layer(bucket.hidden_states, bucket.token_mask)
            torch.cuda.current_stream().wait_stream(stream)
            bucket.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(bucket.graph, pool=pool):
                bucket.out = self._layer(bucket.hidden_states, bucket.token_mask)
        self.captures += 1


def _has_copies(module: nn.Module) -> bool:
    """Whether graphs may read FP8 copies of its weights."""
    if isinstance(module, Experts):
        return module.config.precision == "fp8"
    return isinstance(module, SharedExperts) and module.config.fuse_shared_experts and module.config.gated
