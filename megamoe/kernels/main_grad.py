"""Gradients of parameters that the backward pass adds to ``main_grad`` itself, instead of giving them to autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megamoe.errors import check_tensor


def main_grad_of(name: str, owner: torch.Tensor | None, part: torch.Tensor | None) -> torch.Tensor | None:
    """Where the gradient of ``part`` is added: ``owner.main_grad``, or this rank's part of it; None: autograd takes it.

    Args:
        name: of the parameter, for messages.
        owner: the parameter; what is no leaf of autograd's graph is none, and None.
        part: the parameter itself, or this rank's part of it.

    Raises:
        MegaMoEError: ``main_grad`` is not float32, or not of ``part``'s shape and device.
    """
    main_grad = getattr(owner, "main_grad", None)
    if main_grad is None or not (owner.is_leaf and owner.requires_grad):
        return None
    main_grad = getattr(main_grad, "_local_tensor", main_grad)
    check_tensor(f"{name}.main_grad", main_grad, part.shape, (torch.float32,), part.device)
    return main_grad


def mark_added(owner: torch.Tensor) -> None:
    """Tells the framework of ``owner``, where it asks by this attribute, that nothing is left to be added."""
    if hasattr(owner, "grad_added_to_main_grad"):
        owner.grad_added_to_main_grad = True


def is_accumulated(node: torch.autograd.graph.Node | None) -> bool:
    """Whether the running backward pass adds to the gradient of the leaf behind ``node``: no for ``autograd.grad``."""
    while node is not None and node.next_functions:
        node = node.next_functions[0][0]
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # autograd.grad, asked for this very leaf.
        return False


def input_nodes(ctx: torch.autograd.graph.Node, are_tensors: Sequence[bool]) -> list[torch.autograd.graph.Node | None]:
    """Where each of a function's inputs comes from; None for what is no tensor, or needs no gradient."""
    nodes = iter(ctx.next_functions)
    return [next(nodes)[0] if is_tensor else None for is_tensor in are_tensors]


def can_be_written(total: torch.Tensor) -> bool:
    """Whether a kernel's tensor maps can describe ``total``."""
    return total.is_contiguous() and total.data_ptr() % 16 == 0


def finish(sums: torch.Tensor, scale: float, dtype: torch.dtype, total: torch.Tensor | None) -> torch.Tensor | None:
    """``scale`` x ``sums``: in ``dtype``, or added to ``total`` where there is one, and then None."""
    if total is None:
        return (sums * scale).to(dtype)
    total.add_(sums, alpha=scale)
    return None
