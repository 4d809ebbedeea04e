"""Expert-parallel parameters and gradients on 2 and 4 gloo ranks: equal to one process, and never doubled."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megamoe import (
    MegaMoEError,
    MoE,
    MoEConfig,
    RouterConfig,
    average_gradients,
    clip_grad_norm_,
    expert_parameters,
    update_expert_biases,
)
from tests.support.metrics import assert_close
from tests.support.processes import run_ranks

CONFIG = MoEConfig(
    hidden_size=24,
    intermediate_size=40,
    num_experts=8,
    top_k=2,
    shared_intermediate_size=16,
    router=RouterConfig(aux_loss_coef=0.1, z_loss_coef=0.01, expert_bias=True, bias_update_rate=0.01),
)
BATCH = 48


class Model(nn.Module):
    """Two MoE layers between dense ones."""

    def __init__(self, mesh: DeviceMesh | None):
        super().__init__()
        torch.manual_seed(0)
        group = None if mesh is None else mesh["expert"]
        everyone = None if mesh is None else dist.group.WORLD
        self.inner = nn.Linear(24, 24)
        self.moe = nn.ModuleList(MoE(CONFIG, group, balance_group=everyone) for _ in range(2))
        self.head = nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for layer in self.moe:
            x = x + layer(x)
        return self.head(x)


def make_mesh(world_size: int, expert_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size // expert_size, expert_size), mesh_dim_names=("data", "expert"))


def make_batch(step: int) -> torch.Tensor:
    return torch.randn(BATCH, 24, generator=torch.Generator().manual_seed(step))


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    experts = set(expert_parameters(model))
    dense = [p for p in model.parameters() if p not in experts]
    return torch.optim.AdamW([{"params": dense}, {"params": list(experts)}], lr=1e-2)


def train_step(model, mesh, step, optimizer=None, rank=0, world_size=1, max_norm=0.5):
    """One step on this rank's part of the global batch; returns loss over all ranks and gradient norm."""
    x = make_batch(step).chunk(world_size)[rank]
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    average_gradients(model, mesh)
    norm = clip_grad_norm_(model, max_norm)
    if optimizer is not None:
        optimizer.step()
        update_expert_biases(model)
    loss = loss.detach()
    if world_size > 1:
        dist.all_reduce(loss)
    return loss / world_size, norm


def gradients_equal_one_process(rank: int, world_size: int, expert_size: int) -> float:
    mesh = make_mesh(world_size, expert_size)
    single, model = Model(None), Model(mesh)
    for (name, ours), theirs in zip(model.named_parameters(), single.parameters(), strict=True):
        assert torch.equal(full(ours.detach()), theirs.detach()), f"initial {name}"
    _, expected = train_step(single, None, 0)
    _, norm = train_step(model, mesh, 0, rank=rank, world_size=world_size)
    assert_close(norm, expected, 1e-6, "gradient norm")
    assert norm > 0.5, "the norm must be clipped for this test to say something"
    for (name, ours), theirs in zip(model.named_parameters(), single.parameters(), strict=True):
        assert_close(full(ours.grad), theirs.grad, 2e-6, f"gradient of {name}")
    return float(norm)


@pytest.mark.parametrize(("world_size", "expert_size"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_gradients_equal_one_process(world_size, expert_size):
    norms = run_ranks(gradients_equal_one_process, world_size, expert_size)
    assert len(set(norms)) == 1, "every rank must see the same norm"


def losses_of(rank: int, world_size: int, expert_size: int, steps: int) -> list[float]:
    mesh = make_mesh(world_size, expert_size)
    model = Model(mesh)
    optimizer = make_optimizer(model)
    return [float(train_step(model, mesh, step, optimizer, rank, world_size)[0]) for step in range(steps)]


def test_losses_do_not_depend_on_the_number_of_ranks():
    single = Model(None)
    optimizer = make_optimizer(single)
    expected = torch.tensor([train_step(single, None, step, optimizer)[0] for step in range(12)])
    assert expected[-1] < 0.7 * expected[0]
    for world_size, expert_size in ((2, 2), (4, 2), (4, 4)):
        losses = torch.tensor(run_ranks(losses_of, world_size, expert_size, 12)[0])
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


def biases_agree(rank: int, world_size: int) -> list:
    mesh = make_mesh(world_size, world_size)
    model, single = Model(mesh), Model(None)
    train_step(model, mesh, 0, rank=rank, world_size=world_size)
    train_step(single, None, 0)
    expected = torch.stack([layer.router.tokens_per_expert for layer in single.moe])
    counts = update_expert_biases(model)
    assert torch.equal(counts, expected)
    assert counts.sum() == 2 * BATCH * CONFIG.top_k
    return [layer.router.expert_bias.tolist() for layer in model.moe]


def test_expert_biases_agree_on_all_ranks():
    biases = run_ranks(biases_agree, 2)
    assert biases[0] == biases[1]
    assert any(value > 0 for value in biases[0][0]) and any(value < 0 for value in biases[0][0])


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def save_after_two_steps(rank: int, world_size: int, folder: str) -> list[float]:
    mesh = make_mesh(world_size, world_size)
    model = Model(mesh)
    optimizer = make_optimizer(model)
    for step in range(2):
        train_step(model, mesh, step, optimizer, rank, world_size)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    return [float(train_step(model, mesh, step, optimizer, rank, world_size)[0]) for step in (2, 3, 4)]


def load_and_continue(rank: int, world_size: int, folder: str) -> list[float]:
    mesh = make_mesh(world_size, world_size) if world_size > 1 else None
    model = Model(mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    optimizer = make_optimizer(model)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return [float(train_step(model, mesh, step, optimizer, rank, world_size)[0]) for step in (2, 3, 4)]


def test_checkpoint_of_two_ranks_loads_on_one_and_four(tmp_path):
    expected = torch.tensor(run_ranks(save_after_two_steps, 2, str(tmp_path))[0])
    for world_size in (1, 2, 4):
        losses = torch.tensor(run_ranks(load_and_continue, world_size, str(tmp_path))[0])
        torch.testing.assert_close(losses, expected, rtol=0 if world_size == 2 else 1e-5, atol=0)


def fsdp2_agrees(rank: int, world_size: int, expert_size: int) -> float:
    from torch.distributed.fsdp import fully_shard

    mesh = make_mesh(world_size, expert_size)
    everyone = init_device_mesh("cpu", (world_size,), mesh_dim_names=("world",))
    single, model = Model(None), Model(mesh)
    for layer in model.moe:
        fully_shard(layer.experts, mesh=mesh["data"])
    fully_shard(model, mesh=everyone)
    _, expected = train_step(single, None, 0)
    model(make_batch(0).chunk(world_size)[rank]).square().mean().backward()
    norm = clip_grad_norm_(model, 0.5)
    assert_close(norm, expected, 1e-6, "gradient norm")
    for (name, ours), theirs in zip(model.named_parameters(), single.parameters(), strict=True):
        assert_close(full(ours.grad), theirs.grad, 2e-6, f"gradient of {name}")
    with pytest.raises(MegaMoEError, match="sharded parameter.*FSDP2 averages gradients itself"):
        average_gradients(model, mesh)
    return float(norm)


@pytest.mark.parametrize(("world_size", "expert_size"), [(2, 2), (4, 2)])
def test_fsdp2_agrees(world_size, expert_size):
    assert len(set(run_ranks(fsdp2_agrees, world_size, expert_size))) == 1


def ddp_agrees(rank: int, world_size: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    single, model = Model(None), Model(make_mesh(world_size, world_size))
    experts = set(expert_parameters(model))
    ignored = [name for name, parameter in model.named_parameters() if parameter in experts]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    train_step(single, None, 0, max_norm=float("inf"))
    wrapped = DistributedDataParallel(model)
    wrapped(make_batch(0).chunk(world_size)[rank]).square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), single.parameters(), strict=True):
        assert_close(full(ours.grad), theirs.grad, 2e-6, f"gradient of {name}")


def test_ddp_agrees():
    run_ranks(ddp_agrees, 2)


def idle_ranks_get_zero_gradients(rank: int, world_size: int) -> None:
    moe = MoE(CONFIG, dist.group.WORLD)
    x = torch.randn(0, 24, requires_grad=True)
    moe(x).sum().backward()
    assert x.grad.shape == (0, 24)
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None and full(parameter.grad).eq(0).all(), name


def test_idle_ranks_get_zero_gradients():
    run_ranks(idle_ranks_get_zero_gradients, 2)


def missing_gradients_count_as_zero(rank: int, world_size: int) -> None:
    mesh = make_mesh(world_size, world_size)
    model = nn.Linear(3, 1, bias=False)
    if rank == 0:
        model.weight.grad = torch.full((1, 3), 4.0)
    average_gradients(model, mesh)
    assert model.weight.grad.tolist() == [[2.0, 2.0, 2.0]]
    with pytest.raises(MegaMoEError, match="mesh_dim_names.*must contain 'expert'"):
        average_gradients(model, init_device_mesh("cpu", (2,), mesh_dim_names=("data",)))


def test_missing_gradients_count_as_zero():
    run_ranks(missing_gradients_count_as_zero, 2)


def test_one_process_needs_no_mesh():
    model = nn.Linear(2, 2)
    model.weight.grad = torch.full((2, 2), 3.0)
    average_gradients(model, None)
    assert clip_grad_norm_(model, float("inf")) == 6.0
    assert model.weight.grad.eq(3.0).all()
    assert clip_grad_norm_(model, 3.0) == 6.0
    torch.testing.assert_close(model.weight.grad, torch.full((2, 2), 1.5))
    with pytest.raises(MegaMoEError, match="max_norm = 0.0: must be finite and > 0"):
        clip_grad_norm_(model, 0.0)
