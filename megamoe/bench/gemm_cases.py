"""Problems of the GEMM benchmark: operands, our call, the peers' calls on the same tensors, and the expected result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megamoe.kernels import gemm, gemm_ops, gemm_swiglu, reference, reference_gemm
from megamoe.kernels.layout import align_up
from megamoe.kernels.quant import dequantize, quantize_blockwise, quantize_rowwise
from megamoe.kernels.row_groups import RowGroups
from megamoe.kernels.scales import to_mn_major
from megamoe.kernels.tiles import Tile, choose_tile, legal_tiles
from megamoe.types import Fp8Tensor

DEVICE = "cuda"

CACHE_BYTES = 150e6
"""Weights of as many bytes are used in turn, three times the L2 cache."""


@dataclass(frozen=True)
class GemmCase:
    """A problem by its sizes.

    Attributes:
        family: "fp8", "swiglu", "bf16", "bf16 nn", "masked" or "dense".
        counts: rows of each expert.
    """

    family: str
    counts: tuple[int, ...]
    n: int
    k: int

    @property
    def label(self) -> str:
        rows = f"M={self.counts[0]}" if len(set(self.counts)) == 1 else f"rows={sum(self.counts)} skewed"
        return f"{self.family} E={len(self.counts)} {rows} N={self.n} K={self.k}"

    @property
    def dtype(self) -> str:
        """Of the operands, as tiles name it."""
        return "bf16" if self.family.startswith("bf16") else "fp8"

    @property
    def flops(self) -> float:
        return 2.0 * sum(self.counts) * self.n * self.k

    @property
    def bytes(self) -> float:
        """Each operand and the result once."""
        size = 2 if self.dtype == "bf16" else 1
        used = sum(count > 0 for count in self.counts)
        return size * (used * self.n * self.k + sum(self.counts) * self.k) + 2.0 * sum(self.counts) * self.n


def zipf_counts(experts: int, rows: int) -> tuple[int, ...]:
    """Rows per expert that fall as 1 / rank, at least one each."""
    weights = [1 / (rank + 1) for rank in range(experts)]
    return tuple(max(1, round(rows * weight / sum(weights))) for weight in weights)


def cases(groups: list[str]) -> list[GemmCase]:
    """The benchmark's problems by group name."""
    shapes = ((4096, 7168), (7168, 2048))
    found = []
    if "fp8" in groups:
        found += [GemmCase("fp8", (m,) * 8, n, k) for n, k in shapes for m in (128, 1024, 4096)]
    if "skewed" in groups:
        for n, k in ((2048, 4096), (4096, 2048), (1536, 4096)):
            found += [GemmCase("fp8", zipf_counts(32, rows), n, k) for rows in (8192, 32768)]
    if "few" in groups:
        found += [GemmCase("fp8", (m,) * 8, n, k) for n, k in shapes for m in (1, 8, 64)]
    if "swiglu" in groups:
        found += [
            GemmCase("swiglu", (m,) * 8, n, k) for n, k in ((4096, 7168), (2048, 4096)) for m in (128, 1024, 4096)
        ]
    for family in ("bf16", "bf16 nn"):
        if family.replace(" ", "-") in groups:
            found += [GemmCase(family, (m,) * 8, n, k) for n, k in shapes for m in (128, 1024, 4096)]
    if "masked" in groups:
        found += [GemmCase("masked", (m,) * 32, n, k) for n, k in shapes for m in (1, 4, 8, 16, 32, 64, 128)]
    if "dense" in groups:
        dense = ((2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
        found += [GemmCase("dense", (m,), n, k) for m in (64, 128, 4096) for n, k in dense]
    return found


GROUPS = ("fp8", "skewed", "few", "swiglu", "bf16", "bf16-nn", "masked", "dense")


def worst_row(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The largest relative error of a row."""
    # By row: in the whole's norm a row of small values, one with a small routing weight say, may be wrong unseen.
    difference = torch.linalg.vector_norm(actual.double() - expected.double(), dim=1)
    return (difference / torch.linalg.vector_norm(expected.double(), dim=1).clamp_min(1e-300)).max()


def largest(errors: list[torch.Tensor]) -> float:
    """NaN if one is NaN."""
    return torch.stack(errors).max().item()


class Problem:
    """A case's tensors, several sets of weights among them."""

    def __init__(self, case: GemmCase, peer: object | None):
        self.case, self.peer = case, peer
        self.is_bf16 = case.dtype == "bf16"
        self.masked = case.family == "masked"
        experts = len(case.counts)
        self.max_rows = align_up(max(case.counts))
        self.num_rows = experts * self.max_rows if self.masked else sum(map(align_up, case.counts))
        if case.family == "dense":
            self.num_rows = case.counts[0]
        self._index()
        a = torch.zeros(self.num_rows, case.k, device=DEVICE)
        for start, end in self.spans:
            a[start:end].normal_()
        weight_bytes = experts * case.n * case.k * (2 if self.is_bf16 else 1)
        self.sets = max(1, min(8, round(CACHE_BYTES / weight_bytes)))
        weights = [self._weights() for _ in range(self.sets)]
        if self.is_bf16:
            self.a, self.weights = a.bfloat16(), weights
        else:
            self.a = quantize_rowwise(a, mn_major=True)
            self.weights = weights
            if self.masked:
                self.a = Fp8Tensor(
                    self.a.codes.view(experts, self.max_rows, case.k),
                    to_mn_major(self.a.scales.reshape(experts, self.max_rows, -1)),
                    (1, 128),
                )
        del a
        self.row_weights = torch.rand(self.num_rows, device=DEVICE)
        shape = (experts, self.max_rows, case.n) if self.masked else (self.num_rows, case.n)
        self.outs = [torch.full(shape, float("nan"), dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]

    def _weights(self):
        case = self.case
        experts = len(case.counts)
        shape = (experts, case.k, case.n) if case.family == "bf16 nn" else (experts, case.n, case.k)
        values = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(std=case.k**-0.5)
        return values if self.is_bf16 else quantize_blockwise(values)

    def _index(self) -> None:
        starts, position = [], 0
        for count in self.case.counts:
            starts.append(position)
            position += self.max_rows if self.masked else align_up(count)
        self.spans = [(start, start + count) for start, count in zip(starts, self.case.counts, strict=True)]
        ids = torch.full((self.num_rows,), -1, dtype=torch.int32, device=DEVICE)
        for expert, (start, end) in enumerate(self.spans):
            ids[start:end] = expert
        self.ids = ids
        if self.masked:
            self.counts = torch.tensor(self.case.counts, dtype=torch.int32, device=DEVICE)
            self.rows = RowGroups.masked(self.counts, max(self.case.counts))
        elif self.case.family == "dense":
            self.rows = None
        else:
            self.rows = RowGroups.contiguous(ids)

    def tiles(self) -> tuple[Tile, list[Tile]]:
        """The tile that is chosen, and every legal one."""
        a = self.a if self.is_bf16 else self.a.codes
        sizes = gemm_ops.problem_of(self.rows, a, len(self.case.counts), self.case.n, False)
        return choose_tile(sizes, self.case.dtype), legal_tiles(sizes, self.case.dtype)

    @staticmethod
    def poison(out: torch.Tensor) -> None:
        """Before a checked call."""
        out.fill_(float("nan"))

    def _checked_spans(self) -> list[tuple[int, slice]]:
        experts = sorted({0, len(self.spans) // 2, len(self.spans) - 1})
        return [
            (expert, slice(max(self.spans[expert][0], self.spans[expert][1] - 512), self.spans[expert][1]))
            for expert in experts
        ]

    def check(self, out: torch.Tensor) -> float:
        """Relative error of the worst row of the first weights' result: some experts, up to 512 rows of each."""
        case, b = self.case, self.weights[0]
        out = out.reshape(-1, case.n)
        errors = []
        for expert, span in self._checked_spans():
            if self.is_bf16:
                expected = self.a[span].float() @ (b[expert] if case.family == "bf16 nn" else b[expert].t()).float()
            else:
                codes, scales = self.a.codes.reshape(-1, case.k), self.a.scales
                scales = scales.reshape(-1, scales.shape[-1])
                expected = reference_gemm.product(codes[span], scales[span], b.codes[expert], b.scales[expert], False)
            errors.append(worst_row(out[span], expected))
        return largest(errors)

    # ------------------------------------------------------------ calls

    def ours(self, tile: Tile | None = None) -> list[Callable[[], object]]:
        """Our plain GEMM, once per set of weights."""
        return [lambda b=b: self._ours(b, self.outs[0], tile) for b in self.weights]

    def _ours(self, b, out: torch.Tensor, tile: Tile | None):
        if self.case.family == "dense":
            b = Fp8Tensor(b.codes[0], b.scales[0], b.block)
            return gemm.fp8_gemm_nt(self.a, b, out=out, tile=tile)
        if self.case.family == "bf16 nn":
            return gemm.grouped_bf16_gemm_nn(self.a, b, self.rows, out=out, tile=tile)
        if self.is_bf16:
            return gemm.grouped_bf16_gemm_nt(self.a, b, self.rows, out=out, tile=tile)
        return gemm.grouped_fp8_gemm_nt(self.a, b, self.rows, out=out, tile=tile)

    def swiglu(self) -> tuple[list[Callable[[], object]], Fp8Tensor]:
        """GEMM, SwiGLU, routing weight and cast in one kernel, once per set of weights; and where the result goes."""
        inter = self.case.n // 2
        codes = torch.empty(self.num_rows, inter, dtype=torch.float8_e4m3fn, device=DEVICE)
        scales = torch.empty(inter // 128, self.num_rows, device=DEVICE).t()
        out = Fp8Tensor(codes, scales, (1, 128))
        calls = [
            lambda b=b: gemm_swiglu.grouped_fp8_gemm_swiglu_nt(
                self.a, b, self.rows, row_weights=self.row_weights, out=out
            )
            for b in self.weights
        ]
        return calls, out

    def check_swiglu(self, out: Fp8Tensor) -> float:
        """``check`` of the fused result: against the reference that is cast to FP8 too."""
        errors = []
        for expert, span in self._checked_spans():
            b = self.weights[0]
            pre = reference_gemm.product(
                self.a.codes[span], self.a.scales[span], b.codes[expert], b.scales[expert], False
            )
            act = reference.activate(pre, "swiglu", None) * self.row_weights[span, None]
            expected = dequantize(reference.quantize(act, (1, 128)))
            actual = dequantize(Fp8Tensor(out.codes[span], out.scales[span], out.block))
            errors.append(worst_row(actual, expected))
        return largest(errors)

    def deep_gemm(self) -> list[Callable[[], object]]:
        """DeepGEMM's kernel for the same problem."""
        return [lambda b=b: self._deep_gemm(b, self.outs[1]) for b in self.weights]

    def _deep_gemm(self, b, out: torch.Tensor):
        peer = self.peer
        if self.case.family == "bf16":
            return peer.m_grouped_bf16_gemm_nt_contiguous(self.a, b, out, self.ids)
        if self.case.family == "bf16 nn":
            return peer.m_grouped_bf16_gemm_nn_contiguous(self.a, b, out, self.ids)
        a = (self.a.codes, self.a.scales)
        if self.case.family == "dense":
            return peer.fp8_gemm_nt(a, (b.codes[0], b.scales[0]), out)
        if self.masked:
            return peer.m_grouped_fp8_fp4_gemm_nt_masked(
                a, (b.codes, b.scales), out, self.counts, max(self.case.counts)
            )
        return peer.m_grouped_fp8_gemm_nt_contiguous(a, (b.codes, b.scales), out, self.ids)

    def grouped_mm(self) -> list[Callable[[], object]]:
        """torch's grouped GEMM (BF16)."""
        ends = torch.tensor([align_up(end) for _, end in self.spans], dtype=torch.int32, device=DEVICE)
        if self.case.family == "bf16 nn":
            return [lambda b=b: F.grouped_mm(self.a, b, offs=ends) for b in self.weights]
        return [lambda b=b: F.grouped_mm(self.a, b.transpose(1, 2), offs=ends) for b in self.weights]
