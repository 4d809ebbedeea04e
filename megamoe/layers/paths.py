"""Which way a layer's calls take: a pure function of the layer, the device and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megamoe.config import MoEConfig
from megamoe.errors import MegaMoEError
from megamoe.kernels import flag_words
from megamoe.kernels.layout import align_up
from megamoe.kernels.mega_plan import HOPPER_SMS, MOST_LOCAL_EXPERTS, MOST_TOP_K, choose_settings, plan_mega
from megamoe.plan import COLUMN_ALIGN, plan_memory

BF16 = torch.bfloat16


@dataclass(frozen=True)
class PathChoice:
    """A path and why.

    Attributes:
        path: ``collective`` (torch.distributed between separate kernels), ``staged`` (NVLink between separate kernels;
            on one rank nothing travels) or ``fused`` (the mega-kernel); of shared experts ``fused`` (with the routed
            ones) or ``dense``.
        reason: a clause.
    """

    path: str
    reason: str


@dataclass(frozen=True)
class Crossover:
    """Where the mega-kernel is the faster one: from ``ranks`` on, up to the next entry of that precision.

    Attributes:
        ranks: R, at least.
        least_tokens, most_tokens: of any rank; None: no limit.
        source: what was measured.
        precision: of the GEMMs.
    """

    ranks: int
    least_tokens: int
    most_tokens: int | None
    source: str
    precision: str = "fp8"


CROSSOVERS = (
    Crossover(1, 1, 128, "1.03 to 1.9 x separate kernels, 1 to 128 tokens on one H200, in runs of their own"),
    Crossover(2, 1, None, "1.01 to 1.28 x separate kernels, 1 to 8192 tokens on 2 H200"),
    Crossover(1, 1, 0, "on one rank nothing travels that the mega-kernel could hide; not measured", "bf16"),
    Crossover(2, 2048, None, "1.09 to 1.11 x separate kernels, 2048 to 8192 tokens on 2 H200, 0.83 x with 512", "bf16"),
)
"""By precision and ascending number of ranks, from ``bench mega``."""


def fused_shared_experts(config: MoEConfig, ranks: int, *, num_experts: int | None = None) -> tuple[int, str]:
    """S, the experts of the routed ones' width as which the shared expert is computed with them; if 0, why.

    Args:
        num_experts: physical experts of all ranks; default: the config's.
    """
    width, inner = config.shared_intermediate_size, config.intermediate_size
    count = width // inner
    local = (config.num_experts if num_experts is None else num_experts) // ranks
    obstacle = ""
    if not config.fuse_shared_experts:
        obstacle = "fuse_shared_experts is not set"
    elif config.precision != "fp8":
        obstacle = "BF16 weights are not copied, and those of shared and routed experts do not lie side by side"
    elif not config.gated:
        obstacle = f"the mega-kernel has no activation without gate ({config.activation})"
    elif config.bias:
        obstacle = "the routed experts have biases, and the shared one has none"
    elif width % inner:
        obstacle = f"its width {width} is no multiple of intermediate_size = {inner}"
    elif config.top_k + count > MOST_TOP_K:
        obstacle = f"top_k = {config.top_k} and {count} more slots are beyond the mega-kernel's {MOST_TOP_K}"
    elif local + count > MOST_LOCAL_EXPERTS:
        obstacle = f"{local} experts of a rank and {count} more are beyond the mega-kernel's {MOST_LOCAL_EXPERTS}"
    return (0, obstacle) if obstacle else (count, "")


def why_not_fused(
    config: MoEConfig,
    ranks: int,
    *,
    device_obstacle: str = "",
    num_experts: int | None = None,
    shared_experts: int = 0,
) -> str:
    """Why the mega-kernel cannot serve a layer, or nothing.

    Args:
        device_obstacle: why it does not run on the device, or nothing.
        num_experts: physical experts of all ranks; default: the config's.
        shared_experts: as in ``plan_memory``.
    """
    if device_obstacle:
        return device_obstacle
    if not config.gated:
        return f"the mega-kernel has no activation without gate ({config.activation})"
    if config.max_tokens_per_rank is None:
        return "max_tokens_per_rank is not set, on which the shared memory depends"
    try:
        memory = plan_memory(config, ranks, num_experts=num_experts, shared_experts=shared_experts)
        plan = plan_mega(memory, kernel_width(config), sms=1, pool_bytes=memory.pool_bytes)
        experts = memory.num_local_experts * ranks
        sizes = dict(tokens=memory.max_tokens, ranks=ranks, top_k=memory.top_k, num_experts=experts)
        sizes |= dict(intermediate_size=plan.intermediate_size, sms=HOPPER_SMS)
        plan.check_pool(plan.fit(choose_settings(**sizes, fp8=memory.fp8)))
    except MegaMoEError as error:
        return f"beyond the mega-kernel's limits: {error}"
    return ""


def kernel_width(config: MoEConfig) -> int:
    """I of the weights that the mega-kernel is given: FP8 copies are padded."""
    return align_up(config.intermediate_size) if config.precision == "fp8" else config.intermediate_size


def why_not_staged(config: MoEConfig, ranks: int, *, device: str, dtype: torch.dtype) -> str:
    """Why rows cannot travel over NVLink, or nothing. ``dtype``: of the GEMMs."""
    if ranks == 1:
        return ""
    if device != "cuda":
        return f"NVLink joins GPUs, and the device is {device}"
    if config.max_tokens_per_rank is None:
        return "max_tokens_per_rank is not set, on which the shared memory depends"
    if ranks > flag_words.MAX_RANKS:
        return f"NVLink serves {flag_words.MAX_RANKS} ranks at most"
    if config.hidden_size % COLUMN_ALIGN:
        return f"hidden_size is no multiple of {COLUMN_ALIGN}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"rows travel over NVLink in 16 bits, and parameters are {dtype}"
    return ""


def choose_path(
    config: MoEConfig,
    *,
    ranks: int,
    device: str,
    dtype: torch.dtype,
    needs_grad: bool,
    device_obstacle: str = "",
    unreachable: str = "",
    num_experts: int | None = None,
    shared_experts: int = 0,
    crossovers: Sequence[Crossover] = CROSSOVERS,
) -> PathChoice:
    """The fastest path that can serve a layer. Nothing is looked up anywhere: all ranks that ask alike choose alike.

    Args:
        config: the layer; ``max_tokens_per_rank`` is the number of tokens that the choice is made for.
        ranks: R.
        device: its type, such as ``cuda``.
        dtype: of the GEMMs' inputs.
        needs_grad: whether gradients are recorded.
        device_obstacle: why the mega-kernel does not run on the device, or nothing.
        unreachable: why ranks cannot share memory, or nothing.
        num_experts: physical experts of all ranks; default: the config's.
        shared_experts: as in ``plan_memory``.
        crossovers: what was measured.
    """
    obstacle = why_not_staged(config, ranks, device=device, dtype=dtype) or (unreachable if ranks > 1 else "")
    if obstacle:
        return PathChoice("collective", obstacle)
    obstacle = without_fusion(config, ranks, dtype, needs_grad, device_obstacle, num_experts, shared_experts)
    if obstacle:
        return PathChoice("staged", obstacle)
    tokens = config.max_tokens_per_rank
    known = (each for each in crossovers if each.ranks <= ranks and each.precision == config.precision)
    measured = max(known, key=lambda each: each.ranks)
    most = tokens if measured.most_tokens is None else measured.most_tokens
    return PathChoice("fused" if measured.least_tokens <= tokens <= most else "staged", measured.source)


def without_fusion(
    config: MoEConfig,
    ranks: int,
    dtype: torch.dtype,
    needs_grad: bool,
    device_obstacle: str = "",
    num_experts: int | None = None,
    shared_experts: int = 0,
) -> str:
    """Why calls take separate kernels whatever is faster, or nothing; arguments as in ``choose_path``."""
    if needs_grad:
        return "gradients are recorded, and the mega-kernel has no backward pass"
    sizes = dict(num_experts=num_experts, shared_experts=shared_experts)
    obstacle = why_not_fused(config, ranks, device_obstacle=device_obstacle, **sizes)
    if not obstacle and dtype != BF16:
        obstacle = f"the mega-kernel takes rows in bfloat16, and they are {dtype}"
    return obstacle


def choose_shared(obstacle: str) -> PathChoice:
    """How a shared expert is computed that is to be fused; ``obstacle`` as from ``fused_shared_experts``."""
    if obstacle:
        return PathChoice("dense", obstacle)
    return PathChoice("fused", "with the routed experts, in FP8, where no gradients are recorded")


def explain(choices: Mapping[str, PathChoice]) -> str:
    """A line for each kind of calls."""
    width = max(map(len, choices))
    return "\n".join(f"{kind:{width}}  {choice.path}: {choice.reason}" for kind, choice in choices.items())
