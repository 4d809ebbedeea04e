"""The exchange as torch operators: what torch.compile traces in place of ``Exchange.dispatch`` and ``combine``.

An operator takes tensors and constants only: it names its exchange, as functional collectives name process groups, and
gets the handle as a list of tensors. Each operator needs the result of the one before it, so that a compiler cannot
reorder them, and all ranks run their collectives in the same order. Sizes that the arguments do not show
(``num_tokens``, ``num_rows``) are passed for the fake kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch

from megamoe.errors import fail_value
from megamoe.types import Routing

# ---------------------------------------------------------------- names

_serial = itertools.count()
_alive: WeakSet[Any] = WeakSet()
_by_name: WeakValueDictionary[str, Any] = WeakValueDictionary()


def register(exchange: Any, name: str | None = None) -> str:
    """The name by which operators find ``exchange`` while it lives; by default one that no other exchange has.

    Exchanges of the same name must be interchangeable. Compiled code guards on the name: layers that share one share
    the code.
    """
    name = f"{type(exchange).__name__}/{next(_serial)}" if name is None else name
    _alive.add(exchange)
    _by_name[name] = exchange
    return name


def find(name: str) -> Any:
    """A living exchange of this name.

    Raises:
        MegaMoEError: there is none.
    """
    exchange = _by_name.get(name)
    if exchange is None:
        # The one registered last is gone, or this is a copy, which took over its original's name.
        exchange = next((other for other in _alive if other.name == name), None)
        if exchange is None:
            fail_value(
                "exchange",
                name,
                "no living exchange of this process has this name",
                "Keep the layer that owns it while compiled code uses it, and compile again after loading.",
            )
        _by_name[name] = exchange
    return exchange


def return_gradients(
    exchange: Any,
    grad_rows: torch.Tensor,
    grad_row_weights: torch.Tensor,
    handle: Any,
    token_dtype: torch.dtype,
    needed: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of tokens and of routing weights, None where not ``needed``."""
    if all(needed):
        return exchange.return_rows_and_weights(grad_rows, grad_row_weights, handle, token_dtype)
    tokens = exchange.return_rows(grad_rows, handle, token_dtype) if needed[0] else None
    return tokens, exchange.return_weights(grad_row_weights, handle) if needed[1] else None


# ---------------------------------------------------------------- operators


@torch.library.custom_op("megamoe::plan", mutates_args=())
def plan(topk_index: torch.Tensor, topk_weights: torch.Tensor, exchange: str, grad_enabled: bool) -> list[torch.Tensor]:
    """The handle's tensors. Not differentiable; ``grad_enabled`` is the mode outside, by which a transport may plan."""
    with torch.set_grad_enabled(grad_enabled):
        return list(find(exchange).plan(Routing(topk_index, topk_weights)).tensors())


@plan.register_fake
def _(topk_index, topk_weights, exchange, grad_enabled):
    new_size = torch.library.get_ctx().new_dynamic_size
    with torch.set_grad_enabled(grad_enabled):
        return list(find(exchange).plan_like(Routing(topk_index, topk_weights), new_size).tensors())


@torch.library.custom_op("megamoe::dispatch", mutates_args=())
def dispatch(
    tokens: torch.Tensor,
    topk_weights: torch.Tensor,
    handle: list[torch.Tensor],
    exchange: str,
    num_rows: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[P, H]`` rows in ``dtype`` and ``[P]`` row weights of ``tokens [T, H]`` and ``topk_weights [T, K]``."""
    transport = find(exchange)
    plan_handle = transport.handle_type(*handle)
    return transport.send_rows(tokens.to(dtype), plan_handle), transport.send_weights(topk_weights, plan_handle)


@dispatch.register_fake
def _(tokens, topk_weights, handle, exchange, num_rows, dtype):
    return tokens.new_empty(num_rows, tokens.shape[1], dtype=dtype), topk_weights.new_empty(num_rows)


@torch.library.custom_op("megamoe::dispatch_backward", mutates_args=())
def dispatch_backward(
    grad_rows: torch.Tensor,
    grad_row_weights: torch.Tensor,
    handle: list[torch.Tensor],
    exchange: str,
    num_tokens: int,
    top_k: int,
    token_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    needed: list[bool],
) -> list[torch.Tensor]:
    """Those of the gradients of tokens and routing weights that are ``needed``."""
    transport = find(exchange)
    plan_handle = transport.handle_type(*handle)
    grads = return_gradients(transport, grad_rows, grad_row_weights, plan_handle, token_dtype, needed)
    dtypes = token_dtype, weight_dtype
    return [grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True) if grad is not None]


@dispatch_backward.register_fake
def _(grad_rows, grad_row_weights, handle, exchange, num_tokens, top_k, token_dtype, weight_dtype, needed):
    grads = []
    if needed[0]:
        grads.append(grad_rows.new_empty(num_tokens, grad_rows.shape[1], dtype=token_dtype))
    if needed[1]:
        grads.append(grad_rows.new_empty(num_tokens, top_k, dtype=weight_dtype))
    return grads


def _keep_for_dispatch_backward(ctx, inputs, output) -> None:
    tokens, topk_weights, handle, ctx.exchange, _, _ = inputs
    ctx.sizes = topk_weights.shape
    ctx.dtypes = tokens.dtype, topk_weights.dtype
    ctx.save_for_backward(*handle)


def _dispatch_grads(ctx, grad_rows: torch.Tensor, grad_row_weights: torch.Tensor) -> tuple:
    handle = list(ctx.saved_tensors)
    needed = list(ctx.needs_input_grad[:2])
    grads = dispatch_backward(grad_rows, grad_row_weights, handle, ctx.exchange, *ctx.sizes, *ctx.dtypes, needed)
    grad_tokens = grads[0] if needed[0] else None
    grad_weights = grads[-1] if needed[1] else None
    return grad_tokens, grad_weights, [None] * len(handle), None, None, None


dispatch.register_autograd(_dispatch_grads, setup_context=_keep_for_dispatch_backward)


@torch.library.custom_op("megamoe::combine", mutates_args=())
def combine(
    rows: torch.Tensor, handle: list[torch.Tensor], exchange: str, num_tokens: int, out_dtype: torch.dtype
) -> torch.Tensor:
    """``[T, H]`` sums over slots of ``rows [P, H]``."""
    transport = find(exchange)
    return transport.return_rows(rows, transport.handle_type(*handle), out_dtype)


@combine.register_fake
def _(rows, handle, exchange, num_tokens, out_dtype):
    return rows.new_empty(num_tokens, rows.shape[1], dtype=out_dtype)


@torch.library.custom_op("megamoe::combine_backward", mutates_args=())
def combine_backward(
    grad_tokens: torch.Tensor, handle: list[torch.Tensor], exchange: str, num_rows: int, dtype: torch.dtype
) -> torch.Tensor:
    """``[P, H]`` rows in ``dtype`` of ``grad_tokens [T, H]``."""
    transport = find(exchange)
    return transport.send_rows(grad_tokens.to(dtype).contiguous(), transport.handle_type(*handle))


@combine_backward.register_fake
def _(grad_tokens, handle, exchange, num_rows, dtype):
    return grad_tokens.new_empty(num_rows, grad_tokens.shape[1], dtype=dtype)


def _keep_for_combine_backward(ctx, inputs, output) -> None:
    rows, handle, ctx.exchange, _, _ = inputs
    ctx.num_rows, ctx.row_dtype = rows.shape[0], rows.dtype
    ctx.save_for_backward(*handle)


def _combine_grads(ctx, grad_tokens: torch.Tensor) -> tuple:
    handle = list(ctx.saved_tensors)
    grad_rows = combine_backward(grad_tokens, handle, ctx.exchange, ctx.num_rows, ctx.row_dtype)
    return grad_rows, [None] * len(handle), None, None, None


combine.register_autograd(_combine_grads, setup_context=_keep_for_combine_backward)
