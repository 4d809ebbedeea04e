"""Weight gradients in the GEMM benchmark: operands, our call, the peers' calls on the same data, the right result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megamoe.bench import gemm_cases
from megamoe.kernels import gemm_k
from megamoe.kernels.layout import align_up
from megamoe.kernels.quant import dequantize, quantize_blockwise, quantize_columnwise
from megamoe.kernels.row_groups import RowGroups
from megamoe.kernels.tiles import Tile, legal_k_tiles
from megamoe.types import Fp8Tensor

START = 8.0
"""What an accumulator holds before."""


@dataclass(frozen=True)
class WgradCase:
    """A problem by its sizes: ``[M, N]`` per expert.

    Attributes:
        family: "wgrad" (BF16 results), "wgrad fp32" or "wgrad fp8" (added to fp32), or "wgrad fp8 blocks" (B in 128x128
            blocks, BF16 results).
        counts: rows of each expert.
    """

    family: str
    counts: tuple[int, ...]
    m: int
    n: int

    @property
    def label(self) -> str:
        rows = f"rows={sum(self.counts)} skewed" if len(set(self.counts)) > 1 else f"rows={self.counts[0]}"
        return f"{self.family} E={len(self.counts)} {rows} M={self.m} N={self.n}"

    @property
    def dtype(self) -> str:
        """Of the operands."""
        return "fp8" if self.family.startswith("wgrad fp8") else "bf16"

    @property
    def form(self) -> str:
        """Of the operands, as tiles name it."""
        return "fp8-blocks" if self.family == "wgrad fp8 blocks" else self.dtype

    @property
    def adds(self) -> bool:
        return self.family in ("wgrad fp32", "wgrad fp8")

    @property
    def flops(self) -> float:
        return 2.0 * sum(self.counts) * self.m * self.n

    @property
    def bytes(self) -> float:
        """Each operand once, and each result: written, or read and written."""
        operands = sum(self.counts) * (self.m + self.n) * (1 if self.dtype == "fp8" else 2)
        return operands + len(self.counts) * self.m * self.n * (8.0 if self.adds else 2.0)


GROUPS = ("wgrad", "wgrad-fp32", "wgrad-fp8", "wgrad-fp8-blocks")

SHAPES = ((4096, 7168), (7168, 2048))
SKEWED = ((8, 16384, 4096, 7168), (8, 16384, 7168, 2048), (32, 32768, 2048, 4096))
"""(experts, rows of all, M, N)."""


def cases(groups: list[str]) -> list[WgradCase]:
    """The problems by group name: even and skewed rows."""
    found = []
    for family in (group.replace("-", " ") for group in GROUPS if group in groups):
        found += [WgradCase(family, (rows,) * 8, m, n) for m, n in SHAPES for rows in (1024, 4096)]
        found += [WgradCase(family, gemm_cases.zipf_counts(experts, rows), m, n) for experts, rows, m, n in SKEWED]
    return found


class WgradProblem:
    """A case's tensors, several sets of operands among them if they are small. Padding rows are zero, as peers need."""

    def __init__(self, case: WgradCase, peer: object | None):
        self.case, self.peer = case, peer
        self.aligned = [align_up(count) for count in case.counts]
        starts = [sum(self.aligned[:expert]) for expert in range(len(case.counts))]
        self.spans = [(start, start + count) for start, count in zip(starts, case.counts, strict=True)]
        self.num_rows = sum(self.aligned)
        self.rows = RowGroups.psum(self._int32([end for _, end in self.spans]))
        self.aligned_ends = self._int32([start + rows for start, rows in zip(starts, self.aligned, strict=True)])
        self.ks = self._int32(self.aligned)
        size = 1 if case.dtype == "fp8" else 2
        self.sets = max(1, min(8, round(gemm_cases.CACHE_BYTES / (self.num_rows * (case.m + case.n) * size))))
        casts = quantize_columnwise, quantize_blockwise if case.form == "fp8-blocks" else quantize_columnwise
        sizes = tuple(zip((case.m, case.n), casts, strict=True))
        self.operands = [tuple(self._operand(*size) for size in sizes) for _ in range(self.sets)]
        dtype = torch.float32 if case.adds else torch.bfloat16
        shape = (len(case.counts), case.m, case.n)
        self.outs = [torch.empty(shape, dtype=dtype, device=gemm_cases.DEVICE) for _ in range(2 if peer else 1)]

    @staticmethod
    def _int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=gemm_cases.DEVICE)

    def _operand(self, columns: int, quantize: Callable[[torch.Tensor], Fp8Tensor]) -> Any:
        x = torch.zeros(self.num_rows, columns, dtype=torch.bfloat16, device=gemm_cases.DEVICE)
        for start, end in self.spans:
            x[start:end].normal_()
        if self.case.dtype == "bf16":
            return x
        cast = quantize(x)
        return Fp8Tensor(cast.codes.t().contiguous().t(), cast.scales, cast.block)

    def tiles(self) -> tuple[Tile, list[Tile]]:
        """The tile that is chosen, and every legal one."""
        tiles = legal_k_tiles(self.case.form)
        return tiles[0], tiles

    def poison(self, out: torch.Tensor) -> None:
        """Before a checked call: NaN, or what is added to."""
        out.fill_(START if self.case.adds else float("nan"))

    def check(self, out: torch.Tensor) -> float:
        """Relative error of the worst row, over all experts, of the result of the first operands."""
        errors = []
        for expert, (start, _) in enumerate(self.spans):
            rows = slice(start, start + self.aligned[expert])
            a, b = (self._values(x, rows) for x in self.operands[0])
            expected = a.t() @ b
            if self.case.adds:
                expected += START
            errors.append(gemm_cases.worst_row(out[expert], expected))
        return gemm_cases.largest(errors)

    def _values(self, x: Any, rows: slice) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return x[rows].float()
        blocks = slice(rows.start // 128, rows.stop // 128)
        return dequantize(Fp8Tensor(x.codes[rows], x.scales[blocks], x.block))

    # ------------------------------------------------------------ calls

    def ours(self, tile: Tile | None = None) -> list[Callable[[], object]]:
        """Our GEMM, once per set of operands."""
        function = gemm_k.k_grouped_fp8_gemm_tn if self.case.dtype == "fp8" else gemm_k.k_grouped_bf16_gemm_tn
        out = self.outs[0]
        options = dict(out=out, c=out if self.case.adds else None, tile=tile)
        return [lambda a=a, b=b: function(a, b, self.rows, **options) for a, b in self.operands]

    def deep_gemm(self) -> list[Callable[[], object]]:
        """DeepGEMM's kernel, which adds to fp32 and has one scale per column and 128 rows on both sides."""
        out = self.outs[1]
        rest = (out, self.aligned, self.ks, out)
        if self.case.dtype == "bf16":
            return [lambda a=a, b=b: self.peer.k_grouped_bf16_gemm_tn_contiguous(a, b, *rest) for a, b in self.operands]
        pairs = [(self._k_major(a), self._k_major(b)) for a, b in self.operands]
        return [lambda a=a, b=b: self.peer.k_grouped_fp8_gemm_nt_contiguous(a, b, *rest) for a, b in pairs]

    def _k_major(self, x: Fp8Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each expert's ``[columns, rows]`` after the one before."""
        parts = x.codes.view(torch.uint8).split(self.aligned)
        codes = torch.cat([part.t().flatten() for part in parts])
        return codes.view(torch.float8_e4m3fn), x.scales.t()

    def grouped_mm(self) -> list[Callable[[], object]]:
        """torch's grouped GEMM, which stores BF16."""
        return [lambda a=a, b=b: F.grouped_mm(a.t(), b, offs=self.aligned_ends) for a, b in self.operands]
