"""``Experts`` whose parameters have ``main_grad``: on one rank, in torch.compile, as DTensors on two ranks."""

from __future__ import annotations

import pytest
import torch

from megamoe import Experts, MoEConfig
from tests.support.errors import fails
from tests.support.generators import random_routing
from tests.support.metrics import assert_close
from tests.support.processes import run_ranks

CONFIG = MoEConfig(hidden_size=24, intermediate_size=20, num_experts=6, top_k=2, bias=True)


def make(precision: str, group=None) -> tuple[Experts, tuple[torch.Tensor, ...], torch.Tensor]:
    """Experts, the arguments of a call and a gradient, the same on every rank."""
    torch.manual_seed(3)
    experts = Experts(MoEConfig(**{**vars(CONFIG), "precision": precision}), group)
    routing = random_routing("dropped", 30, 6, 2)
    return experts, (torch.randn(30, 24), routing.topk_index, routing.topk_weights), torch.randn(30, 24)


def add_main_grads(experts: Experts) -> list[torch.nn.Parameter]:
    parameters = list(experts.parameters())
    for parameter in parameters:
        parameter.main_grad = torch.zeros(getattr(parameter, "_local_tensor", parameter).shape)
        parameter.grad_added_to_main_grad = False
    return parameters


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_accumulation_over_micro_batches(precision):
    experts, arguments, grad = make(precision)
    for scale in (1, -0.3, 0.7):
        experts(arguments[0] * scale, *arguments[1:]).backward(grad)
    expected = [parameter.grad for parameter in experts.parameters()]
    experts.zero_grad()
    parameters = add_main_grads(experts)
    for scale in (1, -0.3, 0.7):
        experts(arguments[0] * scale, *arguments[1:]).backward(grad)
    for parameter, want in zip(parameters, expected, strict=True):
        assert parameter.grad is None and parameter.grad_added_to_main_grad
        assert torch.equal(parameter.main_grad, want)


def test_refuses_another_dtype():
    experts, arguments, _ = make("bf16")
    experts.down_proj.main_grad = torch.zeros_like(experts.down_proj, dtype=torch.bfloat16)
    with fails(TypeError, "down_proj.main_grad.dtype", torch.bfloat16, "must be one of torch.float32"):
        experts(*arguments)


def test_compiled():
    """The graph is left, and compiled again where ``main_grad`` comes later; one graph is refused."""
    experts, arguments, grad = make("bf16")
    torch._dynamo.reset()
    compiled = torch.compile(experts, backend="aot_eager")
    compiled(*arguments).backward(grad)
    expected = [parameter.grad for parameter in experts.parameters()]
    experts.zero_grad()
    parameters = add_main_grads(experts)
    compiled(*arguments).backward(grad)
    for parameter, want in zip(parameters, expected, strict=True):
        assert parameter.grad is None and parameter.grad_added_to_main_grad
        assert_close(parameter.main_grad, want, 1e-6)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="gradients are added to main_grad"):
        torch.compile(experts, backend="aot_eager", fullgraph=True)(*arguments)
    torch._dynamo.reset()


def on_two_ranks(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("expert",))
    for precision in ("bf16", "fp8"):
        experts, arguments, grad = make(precision, mesh)
        experts(*arguments).backward(grad)
        expected = [parameter.grad.to_local() for parameter in experts.parameters()]
        experts.zero_grad()
        parameters = add_main_grads(experts)
        # In a DTensor as well as in a plain tensor of this rank's part.
        whole = torch.zeros_like(parameters[0].detach())
        assert isinstance(whole, DTensor)
        parameters[0].main_grad = whole
        # One of them keeps its gradient in .grad.
        parameters[3].main_grad = None
        for _ in range(2):
            experts(*arguments).backward(grad)
        for parameter, want in zip(parameters[:3], expected, strict=False):
            main_grad = getattr(parameter.main_grad, "_local_tensor", parameter.main_grad)
            assert parameter.grad is None and parameter.grad_added_to_main_grad
            assert_close(main_grad, 2 * want, 1e-6)
        assert_close(parameters[3].grad.to_local(), 2 * expected[3], 1e-6)
        assert not parameters[3].grad_added_to_main_grad
        # autograd.grad still returns DTensors, and adds nothing.
        before = parameters[1].main_grad.clone()
        (returned,) = torch.autograd.grad(experts(*arguments), parameters[1], grad)
        assert_close(returned.to_local(), expected[1], 1e-6)
        assert returned.placements == parameters[1].placements and returned.shape == parameters[1].shape
        assert torch.equal(parameters[1].main_grad, before)
        parameters[1].main_grad = torch.zeros(parameters[1].shape)
        with fails(ValueError, "down_proj.main_grad.shape", list(parameters[1].shape), str([3, 24, 20])):
            experts(*arguments)


def test_expert_parallel():
    run_ranks(on_two_ranks, 2)
