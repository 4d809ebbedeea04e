"""The mega-kernel's whole call beside the same layer in separate kernels, over its settings.

Run: torchrun --standalone --nproc-per-node 2 -m megamoe.bench.mega [--tokens 1 8 128] [--sweep]. Every rank gets the
same number of tokens, in BF16, with random routing. Results are compared before anything is timed; times are those of
CUDA-graph replays, interleaved, the slowest rank's.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megamoe.bench.timing import check_gpu, interleaved
from megamoe.comm.peer import PeerExchange
from megamoe.comm.symm import SymmetricBuffer
from megamoe.config import MoEConfig
from megamoe.kernels.gemm import grouped_fp8_gemm_nt
from megamoe.kernels.gemm_swiglu import grouped_fp8_gemm_swiglu_nt
from megamoe.kernels.mega_plan import MegaSettings, choose_settings, plan_mega
from megamoe.kernels.quant import quantize_blockwise
from megamoe.kernels.row_groups import RowGroups
from megamoe.plan import plan_memory
from megamoe.types import Fp8Tensor, Routing

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16

REPEATS = 12
"""Calls in a graph."""

TOKENS = (1, 8, 32, 128, 512, 2048, 8192)


@dataclass(frozen=True)
class MegaCase:
    """Tokens of each rank and the layer's sizes."""

    tokens: int
    hidden: int = 7168
    intermediate: int = 2048
    experts: int = 64
    top_k: int = 8


class MegaProblem:
    """A layer's buffers and weights on one rank, and its call in both forms.

    Args:
        group: of the ranks, or None for one.
        num_rows: rows of the pools; None: the most that any routing needs.
    """

    def __init__(self, case: MegaCase, group: dist.ProcessGroup | None, num_rows: int | None = None, seed: int = 0):
        self.case, self.group = case, group
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.device = torch.device("cuda", torch.cuda.current_device())
        config = MoEConfig(case.hidden, case.intermediate, case.experts, case.top_k, precision="fp8")
        memory_plan = plan_memory(config, self.ranks, case.tokens)
        self.sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.plan = plan_mega(memory_plan, case.intermediate, self.sms, num_rows)
        self.buffer = SymmetricBuffer(memory_plan, group)
        self.memory = self.buffer.lend(memory_plan)
        self.scratch = self.plan.views(torch.empty(self.plan.total, dtype=torch.uint8, device=self.device))
        self.exchange = PeerExchange(case.experts, self.buffer, capacity=self.plan.num_rows)
        self.generator = torch.Generator(self.device).manual_seed(seed + self.rank)
        local = memory_plan.num_local_experts
        self.up = self._weights(local, 2 * case.intermediate, case.hidden)
        self.down = self._weights(local, case.hidden, case.intermediate)

    def _weights(self, experts: int, rows: int, columns: int) -> Fp8Tensor:
        codes = torch.empty(experts, rows, columns, dtype=FP8, device=self.device)
        scales = torch.empty(experts, rows // 128, columns // 128, device=self.device)
        for expert in range(experts):
            weight = torch.randn(rows, columns, device=self.device, generator=self.generator) * columns**-0.5
            cast = quantize_blockwise(weight)
            codes[expert], scales[expert] = cast.codes, cast.scales
        return Fp8Tensor(codes, scales, (128, 128))

    def tokens(self, count: int | None = None) -> tuple[torch.Tensor, Routing]:
        """Random tokens and routing."""
        case, count = self.case, self.case.tokens if count is None else count
        x = torch.randn(count, case.hidden, device=self.device, generator=self.generator).to(BF16)
        scores = torch.rand(count, case.experts, device=self.device, generator=self.generator)
        weights = torch.rand(count, case.top_k, device=self.device, generator=self.generator)
        return x, Routing(scores.topk(case.top_k).indices, weights)

    def settings(self) -> MegaSettings:
        case = self.case
        return choose_settings(
            tokens=case.tokens, ranks=self.ranks, top_k=case.top_k, num_experts=case.experts, sms=self.sms
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
            self.up,
            self.down,
            out,
            num_experts=self.case.experts,
            activation="swiglu",
            clamp=None,
            all_sms=self.sms,
        )
        return lambda: self.buffer.run(launches)

    def staged(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The same layer in separate kernels."""
        rows, handle = self.exchange.dispatch_once(x, routing, FP8)
        groups = RowGroups.psum(handle.layout.ends.to(torch.int32))
        act = grouped_fp8_gemm_swiglu_nt(rows, self.up, groups, row_weights=handle.row_weights)
        return self.exchange.return_rows(grouped_fp8_gemm_nt(act, self.down, groups), handle, BF16)


def variants(chosen: MegaSettings, sweep: bool) -> Iterator[tuple[str, MegaSettings]]:
    """Settings to be measured, by name; the chosen ones first."""
    yield "mega", chosen
    if sweep:
        for group, lag in ((4, 2), (8, 1), (2, 2), (4, 1)):
            if (group, lag) != (chosen.group, chosen.lag):
                yield f"mega {group},{lag}", replace(chosen, group=group, lag=lag)
        for skew in (2, 3):
            yield f"mega skew {skew}", replace(chosen, skew=skew)
        yield "mega chunk 1024", replace(chosen, chunk=1024)
        yield "mega turns", replace(chosen, turns=True)


@torch.no_grad()
def measure(case: MegaCase, group: dist.ProcessGroup | None, rounds: int, sweep: bool) -> dict[str, float]:
    """Microseconds of a call by name; rank 0 prints whether results are the same bits."""
    problem = MegaProblem(case, group)
    x, routing = problem.tokens()
    expected = problem.staged(x, routing)
    problem.buffer.check()
    candidates: dict[str, list[Callable[[], object]]] = {"staged": [lambda: problem.staged(x, routing)]}
    for name, settings in variants(problem.settings(), sweep):
        out = torch.full_like(x, float("nan"))
        call = problem.fused(x, routing, out, settings)
        call()
        problem.buffer.check()
        error = float((out.double() - expected.double()).norm() / expected.double().norm())
        if not error < 1e-2:
            raise RuntimeError(f"{case}: {name}: relative error {error}")
        if problem.rank == 0:
            print(f"{name}: relative error {error:.1e}, same bits: {torch.equal(out, expected)}", flush=True)
        candidates[name] = [call]
    times = interleaved(candidates, rounds, REPEATS)
    values = torch.tensor(list(times.values()), device=problem.device)
    if group is not None:
        dist.all_reduce(values, dist.ReduceOp.MAX)
    problem.buffer.check()
    problem.buffer.close()
    return dict(zip(times, values.tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--shape", type=int, nargs=4, default=[7168, 2048, 64, 8], metavar=("H", "I", "E", "K"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sweep", action="store_true", help="other settings too")
    options = parser.parse_args()
    check_gpu()
    group = None
    if "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
        group = dist.group.WORLD
    hidden, intermediate, experts, top_k = options.shape
    for tokens in options.tokens:
        case = MegaCase(tokens, hidden, intermediate, experts, top_k)
        times = measure(case, group, options.rounds, options.sweep)
        if group is None or dist.get_rank() == 0:
            flops = 6 * tokens * top_k * hidden * intermediate
            for name, microseconds in times.items():
                print(f"{case}: {name}: {microseconds:.1f} us, {flops / microseconds / 1e6:.0f} TFLOPS", flush=True)
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
