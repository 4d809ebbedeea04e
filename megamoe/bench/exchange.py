"""The exchange over NVLink beside NCCL's: payload rates of large calls, latencies of small ones.

Run: torchrun --standalone --nproc-per-node 2 -m megamoe bench exchange. Results are compared bit for bit before
anything is timed; GPUs begin each replay of a graph together. The payload is what the receiving experts need from other
ranks: a row for each (token, expert) pair. A token that several experts of a rank need crosses the link once, so that
payload rates can pass the link's own. A dispatch begins with the routing, on both sides; what NCCL takes for the rows
alone, once it is known where they go, is listed too.
"""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megamoe.bench.ranks import starter
from megamoe.bench.timing import check_gpu, eager_microseconds, interleaved
from megamoe.comm.collective import CollectiveExchange
from megamoe.comm.peer import PeerExchange
from megamoe.comm.symm import SymmetricBuffer
from megamoe.config import MoEConfig
from megamoe.errors import fail_value
from megamoe.plan import plan_memory
from megamoe.types import Routing

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16

REPEATS = 10
"""Calls in a graph."""


@dataclass(frozen=True)
class ExchangeCase:
    """Tokens per rank and the layer's sizes."""

    tokens: int
    hidden: int = 7168
    experts: int = 64
    top_k: int = 8

    @property
    def label(self) -> str:
        return f"T={self.tokens} H={self.hidden} E={self.experts} K={self.top_k}"


LARGE = [ExchangeCase(8192), ExchangeCase(2048)]
SMALL = [ExchangeCase(tokens) for tokens in (1, 8, 32, 64, 128, 256)]


def payload_rows(index: torch.Tensor, num_experts: int, rank: int, ranks: int) -> int:
    """(token, expert) pairs of this rank's tokens that go to other ranks."""
    local = num_experts // ranks
    return int(((index >= 0) & (index < num_experts) & (index // local != rank)).sum())


class _Problem:
    """Random tokens and both exchanges."""

    def __init__(self, case: ExchangeCase, group: dist.ProcessGroup, allocator: str):
        self.case, self.rank, self.ranks = case, dist.get_rank(group), dist.get_world_size(group)
        device = self.device = torch.device("cuda", torch.cuda.current_device())
        config = MoEConfig(case.hidden, 128, case.experts, case.top_k, precision="fp8")
        self.buffer = SymmetricBuffer(plan_memory(config, self.ranks, case.tokens), group, allocator=allocator)
        generator = torch.Generator(device).manual_seed(self.rank)
        self.x = torch.randn(case.tokens, case.hidden, device=device, generator=generator).bfloat16()
        scores = torch.rand(case.tokens, case.experts, device=device, generator=generator)
        self.routing = Routing(scores.topk(case.top_k).indices, torch.rand(case.tokens, case.top_k, device=device))
        self.collective = CollectiveExchange(case.experts, group)
        self.payload = payload_rows(self.routing.topk_index, case.experts, self.rank, self.ranks)

    def peer(self, num_sms: int | None) -> PeerExchange:
        return PeerExchange(self.case.experts, self.buffer, num_sms=num_sms)

    def check(self, peer: PeerExchange) -> None:
        """Rows and sums have the bits of the other exchange's."""
        with torch.no_grad():
            theirs = self.collective.plan(self.routing)
            expected = self.collective.send_rows(self.x, theirs)
            rows, handle = peer.dispatch_once(self.x, self.routing, BF16)
            peer.buffer.check()
            spans = handle.layout.spans()
            if spans != theirs.layout.spans():
                raise RuntimeError(f"{self.case.label}: the layouts differ")
            out = torch.zeros_like(expected)
            for start, end in spans:
                if not torch.equal(rows[start:end], expected[start:end]):
                    raise RuntimeError(f"{self.case.label}: rows {start} to {end} differ")
                out[start:end] = rows[start:end]
            combined = peer.return_rows(rows, handle, BF16)
            peer.buffer.check()
            if not torch.equal(combined, self.collective.return_rows(out, theirs, BF16)):
                raise RuntimeError(f"{self.case.label}: the sums differ")


def _slowest(times: dict[str, float]) -> dict[str, float]:
    """The slowest rank's."""
    values = torch.tensor(list(times.values()), device="cuda")
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(times, values.tolist(), strict=True))


@torch.no_grad()
def measure_rates(
    case: ExchangeCase, group: dist.ProcessGroup, sms: list[int], allocator: str, rounds: int
) -> list[dict]:
    """A row for each movement and number of SMs: microseconds, GB/s of payload each way, and times NCCL's rate."""
    problem = _Problem(case, group, allocator)
    candidates, handles = {}, {}
    for num_sms in sms:
        peer = problem.peer(num_sms)
        problem.check(peer)
        rows, handle = peer.dispatch_once(problem.x, problem.routing, BF16)
        handles[num_sms] = rows, handle
        for name, dtype in (("dispatch fp8", FP8), ("dispatch bf16", BF16)):
            candidates[f"{name}, {num_sms} SMs"] = [
                lambda peer=peer, dtype=dtype: peer.dispatch_once(problem.x, problem.routing, dtype)
            ]
        candidates[f"combine bf16, {num_sms} SMs"] = [
            lambda peer=peer, rows=rows, handle=handle: peer.return_rows(rows, handle, BF16)
        ]
    times = interleaved(candidates, rounds, REPEATS, starter(group, problem.device))
    collective = problem.collective
    theirs = collective.plan(problem.routing)
    pool = collective.send_rows(problem.x, theirs)

    def dispatch(rows: torch.Tensor) -> torch.Tensor:
        return collective.send_rows(rows, collective.plan(problem.routing))

    times["dispatch bf16, NCCL"] = eager_microseconds(lambda: dispatch(problem.x), rounds)
    # As many bytes as codes have. They are not cast, and no scales travel.
    codes = problem.x[:, : case.hidden // 2].contiguous()
    times["dispatch fp8, NCCL"] = eager_microseconds(lambda: dispatch(codes), rounds)
    for name, rows in (("bf16", problem.x), ("fp8", codes)):
        alone = eager_microseconds(lambda rows=rows: collective.send_rows(rows, theirs), rounds)
        times[f"dispatch {name}, NCCL's rows alone"] = alone
    times["combine bf16, NCCL"] = eager_microseconds(lambda: collective.return_rows(pool, theirs, BF16), rounds)
    times = _slowest(times)
    problem.buffer.check()
    problem.buffer.close()
    rates = {}
    for name, microseconds in times.items():
        nbytes = problem.payload * case.hidden * (1 if "fp8" in name else 2)
        rates[name] = nbytes / microseconds / 1e3
    out = []
    for name, microseconds in times.items():
        movement = name.split(",")[0]
        out.append(
            {
                "case": case.label,
                "what": name,
                "us": round(microseconds, 1),
                "payload_gb_per_s": round(rates[name], 1),
                "x_nccl": round(rates[name] / rates[f"{movement}, NCCL"], 2),
            }
        )
    return out


@torch.no_grad()
def measure_latencies(case: ExchangeCase, group: dist.ProcessGroup, allocator: str, rounds: int) -> list[dict]:
    """Dispatch and combine together, and a barrier alone."""
    problem = _Problem(case, group, allocator)
    peer = problem.peer(None)
    problem.check(peer)
    combined = torch.empty(peer.capacity, case.hidden, dtype=BF16, device=problem.device).normal_()

    def both() -> None:
        _, handle = peer.dispatch_once(problem.x, problem.routing, FP8)
        peer.return_rows(combined, handle, BF16)

    candidates = {"dispatch fp8 + combine bf16": [both], "barrier": [peer.barrier]}
    times = _slowest(interleaved(candidates, rounds, REPEATS, starter(group, problem.device)))
    problem.buffer.check()
    problem.buffer.close()
    return [{"case": case.label, "what": name, "us": round(value, 2)} for name, value in times.items()]


def _group() -> dist.ProcessGroup:
    if "RANK" not in os.environ:
        fail_value(
            "RANK",
            None,
            "must be set: the exchange is measured between processes",
            "Start it as torchrun --standalone --nproc-per-node 2 -m megamoe bench exchange.",
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return dist.group.WORLD


def run(folder: Path, rounds: int, allocator: str, sms: list[int]) -> None:
    """Measures, prints, and writes ``exchange.csv`` into ``folder``, all from rank 0."""
    check_gpu()
    group = _group()
    try:
        rows = []
        for case in LARGE:
            rows += measure_rates(case, group, sms, allocator, rounds)
        for case in SMALL:
            rows += measure_latencies(case, group, allocator, rounds)
        if dist.get_rank() == 0:
            for row in rows:
                print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
            folder.mkdir(parents=True, exist_ok=True)
            columns = list(dict.fromkeys(key for row in rows for key in row))
            with open(folder / "exchange.csv", "w", newline="") as file:
                writer = csv.DictWriter(file, columns)
                writer.writeheader()
                writer.writerows(rows)
    finally:
        dist.destroy_process_group()
