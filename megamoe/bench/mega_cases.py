"""Problems of the mega-kernel's benchmark: sizes, routing, weights, buffers, and the call in both forms."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megamoe.bench.ranks import rank_of, size_of
from megamoe.comm.collective import CollectiveExchange
from megamoe.comm.peer import PeerExchange
from megamoe.comm.symm import SymmetricBuffer
from megamoe.config import PRECISIONS, MoEConfig
from megamoe.errors import check_choice, check_int, fail_value
from megamoe.kernels import reference
from megamoe.kernels.gemm import grouped_bf16_gemm_nt, grouped_fp8_gemm_nt
from megamoe.kernels.gemm_swiglu import grouped_bf16_gemm_swiglu_nt, grouped_fp8_gemm_swiglu_nt
from megamoe.kernels.mega_plan import MegaSettings, Weight, choose_settings, plan_mega
from megamoe.kernels.quant import quantize_blockwise
from megamoe.kernels.row_groups import RowGroups
from megamoe.plan import plan_memory
from megamoe.types import Fp8Tensor, Routing

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16

SHAPES = ((7168, 2048, 64, 8), (4096, 2048, 64, 6), (4096, 1536, 32, 8))
"""H, I, E, K."""

ROUTINGS = ("uniform", "zipf", "one-hot")

REPLAY_US = 5000.0
"""Wanted length of one replay: ranks start some 20 us apart."""
MIN_CALLS, MAX_CALLS = 4, 32


@dataclass(frozen=True)
class MegaCase:
    """Tokens of each rank, the layer's sizes, and how tokens choose experts.

    Attributes:
        routing: ``uniform``; ``zipf``: the n-th most popular expert is wanted n^-1 times as often as the first;
            ``one-hot``: all tokens go to one expert, and to no other.
        precision: of tokens on their way, weights and activations: ``fp8`` or ``bf16``.
    """

    tokens: int
    hidden: int = 7168
    intermediate: int = 2048
    experts: int = 64
    top_k: int = 8
    routing: str = "uniform"
    precision: str = "fp8"

    @property
    def fp8(self) -> bool:
        return self.precision == "fp8"

    @property
    def label(self) -> str:
        sizes = f"H={self.hidden} I={self.intermediate} E={self.experts} K={self.top_k}"
        return f"T={self.tokens} {sizes} {self.routing} {self.precision}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.hidden, self.intermediate, self.experts, self.top_k

    @property
    def slots(self) -> int:
        """Of a token, with an expert in them."""
        return 1 if self.routing == "one-hot" else self.top_k

    @property
    def flops(self) -> float:
        """Of a rank, in the mean."""
        return 6.0 * self.tokens * self.slots * self.hidden * self.intermediate

    def config(self) -> MoEConfig:
        return MoEConfig(self.hidden, self.intermediate, self.experts, self.top_k, precision=self.precision)

    def calls(self, ranks: int) -> int:
        """How many a graph holds, the same on all ranks."""
        touched = min(self.experts // ranks, self.tokens * self.slots)
        microseconds = max(self.flops / 1e9, touched * 3 * self.hidden * self.intermediate / 4.3e6)
        microseconds *= 1 if self.fp8 else 2
        return max(MIN_CALLS, min(MAX_CALLS, round(REPLAY_US / max(microseconds, 1.0))))


def cases(
    shapes: Sequence[Sequence[int]],
    tokens: Sequence[int],
    routings: Sequence[str],
    ranks: int,
    precisions: Sequence[str] = ("fp8",),
) -> list[MegaCase]:
    """Every combination, shape by shape, and for each precision by precision.

    Raises:
        MegaMoEError: an argument breaks a rule, or ``ranks`` ranks cannot run a case.
    """
    for count in tokens:
        check_int("tokens", count, 1)
    for routing in routings:
        check_choice("routing", routing, ROUTINGS)
    for precision in precisions:
        check_choice("precision", precision, PRECISIONS)
    found = []
    for shape, precision in itertools.product(shapes, precisions):
        if len(shape) != 4:
            fail_value("shape", list(shape), "must be H, I, E and K", "Pass 7168,2048,64,8, say.")
        for routing in routings:
            found += [MegaCase(count, *shape, routing, precision) for count in tokens]
    for case in found:
        plan_mega(plan_memory(case.config(), ranks, case.tokens), case.intermediate, sms=1)
    return found


def choose_experts(case: MegaCase, count: int, generator: torch.Generator) -> torch.Tensor:
    """int64 ``[count, K]`` on the generator's device; -1 where a slot has no expert."""
    device = generator.device
    if case.routing == "one-hot":
        index = torch.full((count, case.top_k), -1, dtype=torch.int64, device=device)
        index[:, 0] = case.experts - 1
        return index
    scores = torch.rand(count, case.experts, device=device, generator=generator)
    if case.routing == "zipf":
        # Popular experts lie anywhere, the same on all ranks. Gumbel noise makes top-k a draw without replacement.
        order = torch.randperm(case.experts, generator=torch.Generator().manual_seed(0)).to(device)
        scores = -(order + 1).double().log() - (-scores.double().log()).log()
    return scores.topk(case.top_k).indices


@dataclass(frozen=True)
class MegaWeights:
    """Experts of one rank: ``[e, 2 I, H]`` and ``[e, H, I]``, BF16 or codes in blocks of 128 x 128."""

    up: Weight
    down: Weight

    @property
    def fp8(self) -> bool:
        return isinstance(self.up, Fp8Tensor)

    @property
    def experts(self) -> int:
        """e"""
        return (self.up.codes if isinstance(self.up, Fp8Tensor) else self.up).shape[0]

    def expert(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both weights of an expert in fp32."""
        return _expert(self.up, index), _expert(self.down, index)


def _expert(weight: Weight, index: int) -> torch.Tensor:
    if isinstance(weight, Fp8Tensor):
        return reference.dequantize(Fp8Tensor(weight.codes[index], weight.scales[index], weight.block))
    return weight[index].float()


def random_weights(case: MegaCase, ranks: int, generator: torch.Generator) -> MegaWeights:
    """A rank's share of the experts, on the generator's device."""

    def make(rows: int, columns: int) -> Weight:
        shape = case.experts // ranks, rows, columns
        weights = torch.randn(shape, dtype=BF16, device=generator.device, generator=generator).mul_(columns**-0.5)
        return quantize_blockwise(weights) if case.fp8 else weights

    return MegaWeights(make(2 * case.intermediate, case.hidden), make(case.hidden, case.intermediate))


class MegaProblem:
    """A layer's buffers and weights on one rank, and its call in both forms.

    Args:
        group: of the ranks, or None for one.
        num_rows: rows of the pools; None: the most that any routing needs.
        weights: of this rank; default: random ones.
    """

    def __init__(
        self,
        case: MegaCase,
        group: dist.ProcessGroup | None,
        num_rows: int | None = None,
        seed: int = 0,
        weights: MegaWeights | None = None,
    ):
        self.case, self.group = case, group
        self.ranks, self.rank = size_of(group), rank_of(group)
        self.device = torch.device("cuda", torch.cuda.current_device())
        memory_plan = plan_memory(case.config(), self.ranks, case.tokens)
        self.sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.plan = plan_mega(memory_plan, case.intermediate, self.sms, num_rows)
        self.buffer = SymmetricBuffer(memory_plan, group)
        self.memory = self.buffer.lend(memory_plan)
        self.scratch = self.plan.views(torch.empty(self.plan.total, dtype=torch.uint8, device=self.device))
        self.exchange = PeerExchange(case.experts, self.buffer, capacity=self.plan.num_rows)
        self.collective = None if group is None else CollectiveExchange(case.experts, group)
        self.generator = torch.Generator(self.device).manual_seed(seed + self.rank)
        self.weights = random_weights(case, self.ranks, self.generator) if weights is None else weights

    def tokens(self, count: int | None = None) -> tuple[torch.Tensor, Routing]:
        """Random tokens and routing; weights of a token's experts differ by a factor of 3 at most."""
        case, count = self.case, self.case.tokens if count is None else count
        x = torch.randn(count, case.hidden, device=self.device, generator=self.generator).to(BF16)
        weights = 0.5 + torch.rand(count, case.top_k, device=self.device, generator=self.generator)
        return x, Routing(choose_experts(case, count, self.generator), weights / case.top_k)

    def settings(self) -> MegaSettings:
        case = self.case
        return choose_settings(
            tokens=case.tokens,
            ranks=self.ranks,
            top_k=case.top_k,
            num_experts=case.experts,
            intermediate_size=case.intermediate,
            sms=self.sms,
            fp8=case.fp8,
        )

    def fused(self, x: torch.Tensor, routing: Routing, out: torch.Tensor, settings: MegaSettings) -> Callable[[], None]:
        """A call of the mega-kernel into ``out``."""
        from megamoe.kernels import mega

        launches = mega.call(
            self.plan,
            settings,
            self.memory,
            self.scratch,
            x,
            (routing.topk_index, routing.topk_weights),
            self.weights.up,
            self.weights.down,
            out,
            num_experts=self.case.experts,
            activation="swiglu",
            clamp=None,
            all_sms=self.sms,
        )
        return lambda: self.buffer.run(launches)

    def staged(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The same layer in separate kernels."""
        rows, handle = self.exchange.dispatch_once(x, routing, FP8 if self.case.fp8 else BF16)
        groups = RowGroups.psum(handle.layout.ends.to(torch.int32))
        first, second = grouped_fp8_gemm_swiglu_nt, grouped_fp8_gemm_nt
        if not self.case.fp8:
            first, second = grouped_bf16_gemm_swiglu_nt, grouped_bf16_gemm_nt
        act = first(rows, self.weights.up, groups, row_weights=handle.row_weights)
        return self.exchange.return_rows(second(act, self.weights.down, groups), handle, BF16)

    def gemms(self, x: torch.Tensor, routing: Routing) -> Callable[[], None]:
        """Both GEMMs on the rows that one rank has, and nothing else."""
        rows, handle = self.exchange.dispatch_once(x, routing, FP8 if self.case.fp8 else BF16)
        groups = RowGroups.psum(handle.layout.ends.to(torch.int32))
        fused, gemm = grouped_fp8_gemm_swiglu_nt, grouped_fp8_gemm_nt
        if not self.case.fp8:
            fused, gemm = grouped_bf16_gemm_swiglu_nt, grouped_bf16_gemm_nt
        act = fused(rows, self.weights.up, groups)
        pre, out = gemm(rows, self.weights.up, groups), gemm(act, self.weights.down, groups)

        def both() -> None:
            gemm(rows, self.weights.up, groups, out=pre)
            gemm(act, self.weights.down, groups, out=out)

        return both

    def over_nccl(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The same BF16 kernels between NCCL's exchanges: with a group only, and in no graph, for it reads counts."""
        sent = self.collective.dispatch(x, routing, BF16)
        groups = RowGroups.psum(sent.layout.ends.to(torch.int32))
        act = grouped_bf16_gemm_swiglu_nt(sent.rows, self.weights.up, groups, row_weights=sent.row_weights)
        return self.collective.combine(grouped_bf16_gemm_nt(act, self.weights.down, groups), sent.handle, BF16)

    def finish(self) -> None:
        """Waits for the device; raises if a call has failed."""
        torch.cuda.synchronize()
        self.buffer.check()
