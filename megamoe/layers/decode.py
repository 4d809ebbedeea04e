"""``DecodeRunner``: a layer in CUDA graphs, one for each of a few token counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megamoe.comm.collective import CollectiveExchange
from megamoe.errors import check_int, check_tensor, fail_type, fail_value
from megamoe.layers.experts import Experts
from megamoe.layers.parallel import local_tensor

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


class DecodeRunner:
    """Runs a layer on any number of tokens up to the largest bucket, each bucket as one CUDA graph.

    Tokens are padded to the next bucket with masked ones, which are routed nowhere: they move no rows and count in no
    statistic. Weights that change in place are seen by the graphs; parameters that become other objects are not: make
    the runner after loading and after ``rebalance`` has fixed the number of slots. On a CPU it calls the layer with the
    same padding, without graphs.

    Construction calls the layer for each bucket, largest first: with expert parallelism it is a collective, and so is
    each call afterwards; ranks may have different numbers of tokens.

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
        self.device = torch.device(device)
        self._layer, self._hidden_size, self._dtype = layer, hidden_size, dtype
        self._experts = [module for module in layer.modules() if isinstance(module, Experts)]
        self.captures = 0
        self._buckets: dict[int, _Bucket] = {}
        if self.device.type == "cuda":
            self._check_capturable()
        pool = None
        # The largest first: the others then fit into its memory.
        for size in reversed(list(buckets)):
            hidden_states = torch.zeros(size, hidden_size, dtype=dtype, device=self.device)
            token_mask = torch.ones(size, dtype=torch.bool, device=self.device)
            bucket = self._buckets[size] = _Bucket(hidden_states, token_mask, size)
            if self.device.type == "cuda":
                self._capture(bucket, pool)
                pool = bucket.graph.pool()

    @property
    def buckets(self) -> tuple[int, ...]:
        """Token counts, ascending."""
        return tuple(sorted(self._buckets))

    def bucket_of(self, num_tokens: int) -> int:
        """The bucket that ``num_tokens`` run in.

        Raises:
            MegaMoEError: there are more tokens than the largest bucket has.
        """
        for size in self.buckets:
            if num_tokens <= size:
                return size
        fail_value(
            "tokens", num_tokens, f"must not exceed the largest bucket, {self.buckets[-1]}", "Add a larger bucket."
        )

    @torch.no_grad()
    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` of ``hidden_states [T, H]``, T from 0; overwritten by the next call with the same bucket.

        Raises:
            MegaMoEError: another shape, dtype or device, or too many tokens.
        """
        check_tensor("hidden_states", hidden_states, (None, self._hidden_size), (self._dtype,), self.device)
        num_tokens = hidden_states.shape[0]
        bucket = self._buckets[self.bucket_of(num_tokens)]
        bucket.hidden_states[:num_tokens].copy_(hidden_states)
        if bucket.live != num_tokens:
            bucket.token_mask[:num_tokens] = True
            bucket.token_mask[num_tokens:] = False
            bucket.live = num_tokens
        if bucket.graph is None:
            bucket.out = self._layer(bucket.hidden_states, bucket.token_mask)
        else:
            for experts in self._experts:
                experts.refresh_copies()
            bucket.graph.replay()
        return bucket.out[:num_tokens]

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
