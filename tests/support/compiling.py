"""Compares compiled layers with eager ones, and counts what torch.compile did."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from megamoe.layers.parallel import local_tensor


def skip_without_cpp_compiler() -> None:
    """Skips the test where inductor has no C++ compiler to build CPU code with."""
    from torch._inductor import cpp_builder

    try:
        cpp_builder.get_cpp_compiler()
    except Exception as error:
        pytest.skip(f"inductor needs a C++ compiler: {error}")


def graph_breaks() -> dict[str, int]:
    """Why torch.compile broke graphs since the last ``torch._dynamo.reset()``, with counts."""
    return dict(torch._dynamo.utils.counters["graph_break"])


def step(moe: nn.Module, call: Callable[..., torch.Tensor], x: torch.Tensor, *args) -> dict[str, torch.Tensor]:
    """Everything that one training step of ``moe`` through ``call`` leaves: output, gradients, statistics.

    Parameters without a gradient are left out; the gradients and counters of ``moe`` are zeroed before.
    """
    moe.zero_grad()
    moe.router.tokens_per_expert.zero_()
    moe.router.losses.fill_(-1)
    leaf = x.clone().requires_grad_()
    out = call(leaf, *args)
    # Depends on the output, so that an error in the forward pass shows in every gradient.
    out.backward(0.5 + out.detach() * 0.1)
    results = {"output": out.detach(), "input gradient": leaf.grad}
    results |= {name: local_tensor(p.grad).clone() for name, p in moe.named_parameters() if p.grad is not None}
    return results | {"counters": moe.router.tokens_per_expert.clone(), "losses": moe.router.losses.clone()}


def assert_same(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float, what: str
) -> None:
    """Equal bits for tolerance 0, else the relative Frobenius error is at most ``tolerance``; counters are equal."""
    assert actual.keys() == expected.keys(), what
    for name, wanted in expected.items():
        got = actual[name]
        assert got.shape == wanted.shape and got.dtype == wanted.dtype, f"{what}: {name}"
        if tolerance == 0 or name == "counters":
            assert torch.equal(got, wanted), f"{what}: {name}"
        else:
            error = torch.linalg.vector_norm(got.double() - wanted.double())
            norm = torch.linalg.vector_norm(wanted.double())
            assert error <= tolerance * norm, f"{what}: {name}: relative error {float(error / norm):.1e}"
