"""The exchange protocol: tokens to the ranks of their experts and back, differentiable.

A transport (one class) implements six data movements over a handle; ``dispatch`` and ``combine`` here turn them into
autograd operations. The backward pass of each is the other, over the same handle: nothing is routed or counted again.
In compiled code they are the operators of ``exchange_ops``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NoReturn

import torch
from torch.autograd.function import once_differentiable

from megamoe.comm import exchange_ops
from megamoe.errors import fail_type
from megamoe.kernels import local_rows
from megamoe.kernels.layout import max_pool_rows
from megamoe.kernels.quant import BLOCK, quantize_rowwise
from megamoe.types import DispatchedRows, DispatchHandle, ExpertLayout, Fp8Tensor, Routing


class Exchange(ABC):
    """Moves rows between tokens and experts. Holds no parameters; every rank of the group takes part in every call.

    Attributes:
        num_experts: E, over all ranks.
        num_local_experts: e, on this rank.
        name: by which compiled code finds this exchange (``exchange_ops.register``).
        sends_codes: whether ``send_codes`` works.
        handle_type: the class of its handles. It, ``plan_like`` and ``num_tokens`` are for torch.compile only.
    """

    num_experts: int
    num_local_experts: int
    name: str
    sends_codes: ClassVar[bool] = False
    handle_type: ClassVar[type[DispatchHandle]]

    def __new__(cls, *args, **kwargs):
        # Here, not in __init__: copies and unpickled exchanges are registered too.
        exchange = super().__new__(cls)
        exchange.name = exchange_ops.register(exchange)
        return exchange

    def dispatch(
        self, hidden_states: torch.Tensor, routing: Routing, dtype: torch.dtype, fp8: bool = False
    ) -> DispatchedRows:
        """Sends each token to the experts of its routing.

        Args:
            hidden_states: ``[T, H]``; T may differ from rank to rank and may be 0.
            routing: of these tokens.
            dtype: dtype in which the rows travel and arrive. The gradient of ``hidden_states`` is summed in fp32.
            fp8: the rows will be cast to FP8 in 1x128 blocks: an exchange that can casts each token once, before it is
                sent. The codes are the same. Not in compiled code.

        Raises:
            ExchangeError: a collective failed, or a rank did not come within the group's timeout.
        """
        weights = routing.topk_weights
        # Eager calls skip the operators: the dispatcher costs more than a small layer's rows.
        if torch.compiler.is_compiling():
            tensors = exchange_ops.plan(routing.topk_index, weights.detach(), self.name, torch.is_grad_enabled())
            handle = self.handle_type(*tensors)
            num_rows = handle.layout.num_rows
            rows, row_weights = exchange_ops.dispatch(hidden_states, weights, tensors, self.name, num_rows, dtype)
        else:
            handle = self.plan(routing)
            as_codes = fp8 and self.sends_codes
            rows, row_weights, codes, scales = _Dispatch.apply(hidden_states, weights, self, handle, dtype, as_codes)
            if as_codes:
                return DispatchedRows(rows, row_weights, handle, Fp8Tensor(codes, scales, (1, BLOCK)))
        return DispatchedRows(rows, row_weights, handle)

    def combine(self, rows: torch.Tensor, handle: DispatchHandle, out_dtype: torch.dtype) -> torch.Tensor:
        """``[T, H]`` of ``rows [P, H]``: each token's rows summed in fp32 in ascending slot order, rounded once.

        Raises:
            ExchangeError: as for ``dispatch``.
        """
        if torch.compiler.is_compiling():
            tensors = list(handle.tensors())
            return exchange_ops.combine(rows, tensors, self.name, self.num_tokens(handle), out_dtype)
        return _Combine.apply(rows, self, handle, out_dtype)

    @abstractmethod
    def plan(self, routing: Routing) -> DispatchHandle:
        """Works out who sends what to whom."""

    @abstractmethod
    def send_rows(self, tokens: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """``[P, H]`` pool rows of ``[T, H]`` tokens; padding rows are zero."""

    def send_codes(self, tokens: Fp8Tensor, handle: DispatchHandle) -> Fp8Tensor:
        """``[P, H]`` pool rows, scales MN-major, of ``[T, H]`` tokens in 1x128 blocks; padding decodes to zero."""
        fail_type("exchange", type(self).__name__, "sends no codes", "Look at sends_codes first, or send rows.")

    @abstractmethod
    def return_rows(self, rows: torch.Tensor, handle: DispatchHandle, out_dtype: torch.dtype) -> torch.Tensor:
        """``[T, H]`` sums over slots of ``[P, H]`` pool rows."""

    @abstractmethod
    def send_weights(self, topk_weights: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """``[P]`` pool weights of ``[T, K]`` routing weights; padding is zero."""

    @abstractmethod
    def return_weights(self, row_weights: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """``[T, K]`` of ``[P]``; zero for slots without an expert."""

    def return_rows_and_weights(
        self, rows: torch.Tensor, row_weights: torch.Tensor, handle: DispatchHandle, out_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``return_rows`` and ``return_weights``, for transports that can do both in one movement."""
        return self.return_rows(rows, handle, out_dtype), self.return_weights(row_weights, handle)

    def plan_like(self, routing: Routing, new_size: Callable[[], int]) -> DispatchHandle:
        """A handle of empty tensors with the shapes and dtypes of ``plan(routing)``: no data, no communication.

        Args:
            new_size: makes a size that depends on data.
        """
        self._cannot_be_traced()

    def num_tokens(self, handle: DispatchHandle) -> int:
        """T of ``handle``, from the shapes of its tensors."""
        self._cannot_be_traced()

    def _cannot_be_traced(self) -> NoReturn:
        fail_type(
            "exchange",
            type(self).__name__,
            "cannot be traced by torch.compile",
            "Give it handle_type, plan_like and num_tokens, or leave the layer out with torch.compiler.disable.",
        )


def _save_handle(ctx, handle: DispatchHandle) -> None:
    # As saved tensors: activation checkpointing then frees and recomputes them with the rows that they describe.
    ctx.handle_type = type(handle)
    ctx.save_for_backward(*handle.tensors())


def _saved_handle(ctx) -> DispatchHandle:
    return ctx.handle_type(*ctx.saved_tensors)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, topk_weights, exchange, handle, dtype, as_codes):
        ctx.exchange = exchange
        _save_handle(ctx, handle)
        ctx.token_dtype, ctx.weight_dtype = tokens.dtype, topk_weights.dtype
        row_weights = exchange.send_weights(topk_weights, handle)
        if not as_codes:
            return exchange.send_rows(tokens.to(dtype), handle), row_weights, None, None
        sent = exchange.send_codes(quantize_rowwise(tokens.to(dtype)), handle)
        ctx.mark_non_differentiable(sent.codes, sent.scales)
        stand_in = tokens.new_zeros((), dtype=dtype).expand(sent.codes.shape)
        return stand_in, row_weights, sent.codes, sent.scales

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows, grad_row_weights, *_):
        # Which gradients are needed follows from the model alone, never from data: all ranks agree on the collectives.
        needed = ctx.needs_input_grad[:2]
        grad_tokens, grad_weights = exchange_ops.return_gradients(
            ctx.exchange, grad_rows, grad_row_weights, _saved_handle(ctx), ctx.token_dtype, needed
        )
        grad_weights = None if grad_weights is None else grad_weights.to(ctx.weight_dtype)
        return grad_tokens, grad_weights, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, exchange, handle, out_dtype):
        ctx.exchange, ctx.row_dtype = exchange, rows.dtype
        _save_handle(ctx, handle)
        return exchange.return_rows(rows, handle, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_tokens):
        grad_rows = ctx.exchange.send_rows(grad_tokens.to(ctx.row_dtype).contiguous(), _saved_handle(ctx))
        return grad_rows, None, None, None


@dataclass(frozen=True)
class LocalHandle(DispatchHandle):
    """Handle of ``LocalExchange``.

    Attributes:
        counts, starts: of the layout.
        slot_to_row: int64 ``[T, K]``, -1 = no expert.
        row_to_slot: int64 ``[P]``, t * K + k, -1 = padding.
    """

    counts: torch.Tensor
    starts: torch.Tensor
    slot_to_row: torch.Tensor
    row_to_slot: torch.Tensor

    @property
    def layout(self) -> ExpertLayout:
        return ExpertLayout(self.counts, self.starts, self.row_to_slot.numel())


class LocalExchange(Exchange):
    """All experts on this rank (R = 1): a permutation, without communication or host synchronisation."""

    handle_type = LocalHandle
    sends_codes = True

    def __init__(self, num_experts: int):
        self.num_experts = self.num_local_experts = num_experts
        self.name = exchange_ops.register(self, f"local/{num_experts}")

    def plan(self, routing: Routing) -> LocalHandle:
        index = routing.topk_index
        layout, slot_to_row, row_to_slot = local_rows.layout_both_ways(index.flatten(), self.num_experts)
        return LocalHandle(layout.counts, layout.starts, slot_to_row.view(index.shape), row_to_slot)

    def send_rows(self, tokens: torch.Tensor, handle: LocalHandle) -> torch.Tensor:
        return local_rows.send_rows(tokens, handle.slot_to_row, handle.row_to_slot)

    def send_codes(self, tokens: Fp8Tensor, handle: LocalHandle) -> Fp8Tensor:
        return local_rows.send_codes(tokens, handle.slot_to_row, handle.row_to_slot)

    def return_rows(self, rows: torch.Tensor, handle: LocalHandle, out_dtype: torch.dtype) -> torch.Tensor:
        return local_rows.combine_slots(rows, handle.slot_to_row, out_dtype)

    def send_weights(self, topk_weights: torch.Tensor, handle: LocalHandle) -> torch.Tensor:
        return local_rows.permute(topk_weights.flatten(), handle.row_to_slot)

    def return_weights(self, row_weights: torch.Tensor, handle: LocalHandle) -> torch.Tensor:
        return local_rows.permute(row_weights, handle.slot_to_row.flatten()).view(handle.slot_to_row.shape)

    def plan_like(self, routing: Routing, new_size: Callable[[], int]) -> LocalHandle:
        index = routing.topk_index
        # As the layout chooses it.
        num_rows = new_size() if index.device.type == "cpu" else max_pool_rows(index.numel(), self.num_experts)
        return LocalHandle(
            counts=index.new_empty(self.num_experts),
            starts=index.new_empty(self.num_experts),
            slot_to_row=index.new_empty(index.shape),
            row_to_slot=index.new_empty(num_rows),
        )

    def num_tokens(self, handle: LocalHandle) -> int:
        return handle.slot_to_row.shape[0]
