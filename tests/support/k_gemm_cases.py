"""Problems for the K-grouped GEMMs with their expected results, for the simulator, the CPU and a GPU alike.

Rows of no expert are NaN in both operands, and results are poisoned: neither may show.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from megamoe.kernels import gemm_k, quant
from megamoe.kernels.layout import ALIGN, align_up
from megamoe.kernels.row_groups import RowGroups
from megamoe.kernels.tiles import K_FORMS, Tile
from megamoe.types import Fp8Tensor
from tests.support.gemm_cases import BF16_ERROR, FP8_ERROR

NAN_CODE = 0x7F


@dataclass(frozen=True)
class KCase:
    """One K-grouped GEMM.

    Attributes:
        counts: rows of each expert.
        m, n: columns of the operands. spare: rows of no expert after the last one's block; negative: so many fewer.
        fp8: operands of FP8; with ``blocks`` those of B in 128x128 blocks.
        add: the result is added to what is there.
    """

    counts: tuple[int, ...]
    m: int = 256
    n: int = 256
    spare: int = 0
    fp8: bool = False
    add: bool = False
    out_dtype: torch.dtype = torch.float32
    blocks: bool = False

    @property
    def form(self) -> str:
        """Of the operands, as tiles name it."""
        return "fp8-blocks" if self.blocks else "fp8" if self.fp8 else "bf16"


def operands_of(form: str) -> dict[str, bool]:
    """The fields of a case with operands of this form."""
    return dict(fp8=form != "bf16", blocks=form == "fp8-blocks")


class KInstance:
    """Tensors of a case on a device, and the check of its result."""

    def __init__(self, case: KCase, seed: int = 0, device: str = "cpu"):
        self.case, self.device = case, device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.spans, position = [], 0
        for count in case.counts:
            self.spans.append((position, position + count))
            position += align_up(count)
        self.num_rows = position + case.spare
        ends = [end for _, end in self.spans]
        self.rows = RowGroups.psum(torch.tensor(ends, dtype=torch.int32, device=device))
        (self.a, a), (self.b, b) = self._operand(case.m, False), self._operand(case.n, case.blocks)
        self.old = self._randn(len(case.counts), case.m, case.n).to(case.out_dtype)
        self.sums = torch.zeros(self.old.shape, dtype=torch.float64, device=device)
        for expert, (start, end) in enumerate(self.spans):
            self.sums[expert] = a[start:end].double().t() @ b[start:end].double()

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def _operand(self, columns: int, in_blocks: bool) -> tuple[Any, torch.Tensor]:
        """The operand, and its values with zeros in the rows of no expert."""
        owned = torch.zeros(self.num_rows, 1, dtype=torch.bool, device=self.device)
        for start, end in self.spans:
            owned[start:end] = True
        x = self._randn(self.num_rows, columns)
        if not self.case.fp8:
            x = x.bfloat16()
            return x.masked_fill(~owned, float("nan")), x.float().masked_fill(~owned, 0)
        # Scales that differ from block to block and from column to column.
        blocks = -(-self.num_rows // ALIGN)
        if in_blocks:
            places = 3 * torch.arange(blocks)[:, None] + torch.arange(-(-columns // ALIGN))
            factors = 2.0 ** (places % 5).to(self.device).repeat_interleave(ALIGN, 1)[:, :columns]
        else:
            factors = self._randn(blocks, columns).exp()
        x *= factors.repeat_interleave(ALIGN, 0)[: self.num_rows]
        quantize = quant.quantize_blockwise if in_blocks else quant.quantize_columnwise
        cast = quantize(x.masked_fill(~owned, 0))
        values = quant.dequantize(cast)
        codes = cast.codes.view(torch.uint8).masked_fill(~owned, NAN_CODE)
        codes = codes.t().contiguous().t().view(torch.float8_e4m3fn)
        # So are the scales of blocks without rows.
        empty = torch.ones(blocks, dtype=torch.bool, device=self.device)
        for start, end in self.spans:
            empty[start // ALIGN : -(-end // ALIGN)] = False
        scales = cast.scales.masked_fill(empty[:, None], float("nan"))
        return Fp8Tensor(codes, scales, cast.block), values

    def poisoned(self) -> torch.Tensor:
        """A result to write into: NaN, or what is added to."""
        return self.old.clone() if self.case.add else torch.full_like(self.old, float("nan"))

    def check(self, out: torch.Tensor) -> None:
        """``out`` is right, expert by expert; exactly for an expert without rows."""
        case = self.case
        for expert, count in enumerate(case.counts):
            if not count:
                expected = self.old[expert] if case.add else torch.zeros_like(self.old[expert])
                assert torch.equal(out[expert], expected), f"expert {expert} without rows in {case}"
                continue
            expected = self.sums[expert] + (self.old[expert].double() if case.add else 0)
            norm = torch.linalg.vector_norm(expected)
            limit = FP8_ERROR if case.fp8 else 1e-5
            if case.out_dtype == torch.bfloat16:
                limit = BF16_ERROR
                # Rounded before it is added, too.
                norm += torch.linalg.vector_norm(self.sums[expert]) if case.add else 0
            error = torch.linalg.vector_norm(out[expert].double() - expected) / norm
            assert error < limit, f"relative error {error} of expert {expert} in {case}"


def compute(instance: KInstance, out: torch.Tensor, tile: Tile | None = None, rows: RowGroups | None = None) -> Any:
    """The public function of the case, into ``out``."""
    function = gemm_k.k_grouped_fp8_gemm_tn if instance.case.fp8 else gemm_k.k_grouped_bf16_gemm_tn
    c = out if instance.case.add else None
    return function(instance.a, instance.b, rows or instance.rows, out=out, c=c, tile=tile)


def standard_cases() -> dict[str, KCase]:
    """Small cases that together take every path of the kernels: ragged and empty experts, counts around steps."""
    bf16 = dict(out_dtype=torch.bfloat16)
    cases = {
        "ragged": KCase((200, 0, 64, 1), 128, 256, spare=128),
        "empty first, largest last": KCase((0, 130, 0, 37, 300), 256, 384),
        "around a step's rows": KCase((63, 64, 65, 127, 128, 129), 128, 256),
        "no rows": KCase((0, 0), 128, 256, spare=128),
        "one row": KCase((1,), 128, 128),
        "odd columns": KCase((70, 0, 200), 200, 264),
        "fewer columns than half a tile": KCase((70, 3), 64, 96),
        "more experts than are looked at at once": KCase((0,) * 130 + (5, 0, 140), 8, 16, add=True),
        "matrix ends inside a step": KCase((70, 0, 208), 72, 136, spare=-48),
        "bf16 result": KCase((200, 0, 64, 1), 128, 512, **bf16),
        "added": KCase((200, 0, 64, 1), 256, 384, add=True),
        "added to bf16": KCase((0, 130, 0, 37), 128, 264, add=True, **bf16),
        "nothing added": KCase((0, 0), 128, 256, spare=128, add=True),
    }
    return {f"{form}, {name}": replace(case, **operands_of(form)) for form in K_FORMS for name, case in cases.items()}
