"""Five families with their experts spread over 2 and 4 gloo ranks, against transformers' own experts in one process.

Ranks import transformers for seconds: one start of four ranks serves all checks, in groups of 4 and of 2 x 2.
"""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megamoe import ExchangeError, average_gradients, clip_grad_norm_, expert_parameters
from megamoe.integrations.transformers import enable_expert_parallel, join
from tests.integrations.families import (
    FAMILIES,
    NUM_EXPERTS,
    batch,
    build,
    experts_modules,
    generate,
    prompts,
    robust_seed,
)
from tests.support.errors import fails
from tests.support.metrics import assert_close
from tests.support.processes import run_ranks

TOLERANCE = 1e-5
RANKS = 4
# Prompts of each rank: several, one, none; and new tokens of each.
LENGTHS = ([5, 9, 3], [12], [], [4, 7])
TOKENS = (64, 20, 64, 40)
TRAINING_LENGTHS = ([5, 9], [12], [3, 3, 3], [1])


@dataclass
class Case:
    """What one process computes with transformers' own experts.

    Attributes:
        seed: of the model. prompts, tokens: of each rank; eos: ends some of rank 3's sequences early.
        sequences, logits: of each rank's training batch.
        grads, norm: of the mean over ranks of sum(logits * output_grad).
    """

    family: str
    seed: int
    prompts: list[list[list[int]]]
    eos: int
    tokens: list[list[list[int]]]
    sequences: list[list[list[int]]]
    logits: list[Tensor] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    norm: Tensor | None = None

    def output_grad(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + rank)
        return torch.randn(self.logits[rank].shape, generator=generator)

    def generate(self, model: nn.Module, rank: int) -> list[list[int]]:
        """What ``rank`` generates with ``model``."""
        options = dict(eos_token_id=self.eos) if rank == 3 else {}
        return generate(model, self.prompts[rank], TOKENS[rank], **options)


def make_case(family: str, seed: int) -> Case:
    ranks = range(RANKS)
    own = [prompts(seed + rank, LENGTHS[rank]) for rank in ranks]
    sequences = [prompts(seed + 10 + rank, TRAINING_LENGTHS[rank]) for rank in ranks]
    seed = robust_seed(family, seed, [*((p, 64) for p in own if p), *((batch, 1) for batch in sequences)])
    model = build(family, seed)
    # Rank 3's first sequence ends here or, where the token came before, earlier.
    eos = generate(model, own[3], 64)[0][9]
    case = Case(family, seed, own, eos, [], sequences)
    case.tokens = [case.generate(model, rank) if own[rank] else [] for rank in ranks]
    assert eos in case.tokens[3][0][:10]
    for rank in ranks:
        logits = model(**batch(sequences[rank])).logits
        case.logits.append(logits.detach())
        ((logits * case.output_grad(rank)).sum() / RANKS).backward()
    case.grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    case.norm = clip_grad_norm_(model, float("inf"))
    return case


# ---------------------------------------------------------------- on each rank


def check_shards(case: Case, model: nn.Module, group: DeviceMesh, folder: str) -> None:
    """Each rank keeps its experts, in rank order, and nothing else of them in memory."""
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    freed = [weakref.ref(p) for module in experts_modules(model) for p in module.parameters()]
    frozen = {"lm_head.weight", next(name for name in whole if name.endswith("experts.down_proj"))}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    enable_expert_parallel(model, group)
    gc.collect()
    assert freed and all(reference() is None for reference in freed)
    count = NUM_EXPERTS // group.size()
    first = group.get_local_rank() * count
    names = {name for name, p in model.named_parameters() if any(p is e for e in expert_parameters(model))}
    assert len(names) == len(freed)
    for name, parameter in model.named_parameters():
        if name in names:
            local = parameter.to_local()
            assert torch.equal(local, whole[name][first : first + count]), name
            assert local.untyped_storage().nbytes() * group.size() == whole[name].untyped_storage().nbytes()
        else:
            assert torch.equal(parameter, whole[name])
        assert parameter.requires_grad == (
            name != "lm_head.weight" and parameter is not experts_modules(model)[0].down_proj
        )
    model.requires_grad_(True)
    model.save_pretrained(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        import transformers

        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert loaded.keys() >= whole.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in whole.items())


def check_training(case: Case, model: nn.Module, mesh: DeviceMesh, rank: int) -> None:
    logits = model(**batch(case.sequences[rank])).logits
    assert_close(logits, case.logits[rank], TOLERANCE, f"{case.family} logits")
    (logits * case.output_grad(rank)).sum().backward()
    average_gradients(model, mesh)
    # Parameters that eager did not use count as zero.
    for name, parameter in model.named_parameters():
        grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        expected = case.grads.get(name, torch.zeros_like(grad))
        assert_close(grad, expected, TOLERANCE, f"{case.family}, gradient of {name}")
    assert_close(clip_grad_norm_(model, float("inf")), case.norm, TOLERANCE, "norm")
    model.zero_grad()


def check_generate(case: Case, model: nn.Module, rank: int) -> None:
    """Uneven numbers, lengths and ends, and a rank without prompts; then the same prompts on all ranks."""
    assert case.generate(model, rank) == case.tokens[rank], f"{case.family} on rank {rank}"
    assert generate(model, case.prompts[0], 8) == [tokens[:8] for tokens in case.tokens[0]]


def check_join(case: Case, model: nn.Module, rank: int) -> None:
    """Each rank generates as often as it is high, and calls the model besides."""
    inputs = batch(case.sequences[rank])
    with join(model):
        for _ in range(rank):
            assert generate(model, case.prompts[0], 5) == [tokens[:5] for tokens in case.tokens[0]]
        if rank % 2:
            with torch.no_grad():
                assert_close(model(**inputs).logits, case.logits[rank], TOLERANCE)
    # Afterwards every rank is where the others are.
    with torch.no_grad():
        assert_close(model(**inputs).logits, case.logits[rank], TOLERANCE)


def check_mixed_dtypes(case: Case, mesh: DeviceMesh, rank: int) -> None:
    """In bfloat16 models routing weights are fp32, or not: a rank without tokens cannot see which."""
    model = build(case.family, case.seed).bfloat16()
    enable_expert_parallel(model, mesh["expert"])
    with torch.no_grad(), join(model):
        if rank % 2:
            logits = model(**batch(case.sequences[rank])).logits
            # No more than that: an expert may change where two are about equally good.
            assert logits.dtype == torch.bfloat16 and logits.isfinite().all()


class Stop(Exception):
    """Raised on purpose."""


def check_failures_between_passes(case: Case, model: nn.Module, rank: int) -> None:
    """The others finish as if nothing had been, and the failing rank raises what it raised."""

    def stop(input_ids, scores):
        if input_ids.shape[1] > 15:
            raise Stop
        return scores

    for options, kind in ((dict(max_new_tokens=-3), ValueError), (dict(max_new_tokens=30), Stop)):
        if rank == 1:
            with pytest.raises(kind):
                model.generate(**batch(case.prompts[1]), logits_processor=[stop], do_sample=False, **options)
        else:
            assert generate(model, case.prompts[0], 20) == [tokens[:20] for tokens in case.tokens[0]]


def check_errors(case: Case, model: nn.Module, mesh: DeviceMesh, rank: int) -> None:
    inputs = batch(case.sequences[rank])
    with fails(ValueError, "torch.is_grad_enabled()", True, "no backward pass"), join(model):
        model(**inputs)
    model.set_experts_implementation("grouped_mm")
    with fails(ValueError, "experts_implementation", "grouped_mm", "cannot run experts that are spread"):
        model(**inputs)
    model.set_experts_implementation("megamoe")
    with fails(ValueError, "model", type(model).__name__, "has expert parallelism already"):
        enable_expert_parallel(model, mesh["expert"])
    layers = model.model.layers
    model.model.layers = nn.ModuleList(list(layers)[::-1])
    with torch.no_grad(), fails(ValueError, "experts module", 1, "is called out of order: module 0 of 2"), join(model):
        model(**inputs)
    model.model.layers = layers

    odd = dist.new_group([0, 1, 2])
    if rank < 3:
        with fails(ValueError, "num_experts", NUM_EXPERTS, "must be a multiple of the expert-parallel group's 3"):
            enable_expert_parallel(build(case.family, case.seed), odd)
    name = "model.layers.1.self_attn.q_proj.weight"
    last = mesh["expert"].get_local_rank() == mesh["expert"].size() - 1
    differing = build(case.family, case.seed)
    if last:
        with torch.no_grad():
            differing.get_parameter(name)[3, 4] += 1e-3
    with fails(ValueError, "model", [name], "1 of 23 tensors differ between the ranks"):
        enable_expert_parallel(differing, mesh["expert"])
    wider = build(case.family, case.seed)
    experts = experts_modules(wider)[1]
    if last:
        experts.down_proj = nn.Parameter(experts.down_proj.double())
    with fails(ValueError, "model", ["model.layers.1.mlp.experts.down_proj"], "1 of 23 tensors differ"):
        enable_expert_parallel(wider, mesh["expert"])


def check_failure_within_a_pass(case: Case, rank: int) -> None:
    """No hang: the others raise, when the group's timeout is over at the latest."""
    model = build(case.family, case.seed)
    enable_expert_parallel(model, dist.new_group(timeout=timedelta(seconds=20)))

    def stop(*_):
        raise Stop

    if rank == 1:
        model.model.layers[1].self_attn.register_forward_hook(stop)
    start = time.monotonic()
    with pytest.raises(Stop if rank == 1 else ExchangeError):
        generate(model, case.prompts[0], 5)
    # The rank that fails does not wait for those that cannot go on.
    assert time.monotonic() - start < (15 if rank == 1 else 45)


def check_all(rank: int, world_size: int, cases: list[Case], folder: str) -> None:
    for expert_size in (4, 2):
        sizes = (world_size // expert_size, expert_size)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "expert"))
        for case in cases:
            model = build(case.family, case.seed, implementation="grouped_mm")
            check_shards(case, model, mesh["expert"], f"{folder}/{case.family}-{expert_size}")
            check_training(case, model, mesh, rank)
            check_generate(case, model, rank)
            if case.family in ("mixtral", "gpt_oss"):
                check_mixed_dtypes(case, mesh, rank)
            if case.family == "mixtral":
                check_join(case, model, rank)
                check_errors(case, model, mesh, rank)
            if case.family == "gpt_oss" and expert_size == 4:
                check_failures_between_passes(case, model, rank)
                check_training(case, model, mesh, rank)
    check_failure_within_a_pass(cases[0], rank)


@pytest.mark.timeout(300)
def test_expert_parallel_models(seed, tmp_path: Path):
    cases = [make_case(family, seed) for family in FAMILIES]
    run_ranks(check_all, RANKS, cases, str(tmp_path), timeout=270.0)
