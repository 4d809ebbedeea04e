"""Problems for the GEMMs with their expected results, for the simulator, the CPU and a GPU alike.

Inputs are fresh and unit-scale; results are poisoned, and all rows of A that belong to no expert are NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from megamoe.kernels import quant, reference
from megamoe.kernels.layout import align_up
from megamoe.kernels.row_groups import RowGroups
from megamoe.kernels.scales import empty_mn_major, to_mn_major
from megamoe.types import Fp8Tensor
from tests.support.metrics import relative_error

BF16_ERROR = 3e-3
"""Frobenius error of one rounding to bf16 (0.17 % rms), with room."""

FP8_ERROR = 3e-4
"""Of FP8 products with fp32 results: Hopper's tensor cores keep about 14 bits of the sum of a block."""

POISON = -88.0
"""What results hold before; not NaN, which is what rows of no expert would give."""


@dataclass(frozen=True)
class Case:
    """One GEMM.

    Attributes:
        counts: rows of each expert; of the one matrix if dense.
        n, k: columns of the result (gate and up together) and length of the sums.
        kind: "dense", "contiguous", "psum" or "masked". max_rows: M_max if masked.
        fp8: FP8 operands, else BF16. nn: weights are [e, K, N].
        accumulate: the result is added to C, which it overwrites. bias: float32 bias.
        activation, clamp, weighted, fp8_out: of the fused kernels; pre: they store gate and up too.
    """

    counts: tuple[int, ...]
    n: int
    k: int
    kind: str = "psum"
    max_rows: int = 0
    fp8: bool = True
    nn: bool = False
    out_dtype: torch.dtype = torch.bfloat16
    accumulate: bool = False
    bias: bool = False
    activation: str | None = None
    clamp: float | None = None
    weighted: bool = False
    fp8_out: bool = False
    pre: bool = False


class Instance:
    """Tensors of a case on a device, and the check of its result."""

    def __init__(self, case: Case, seed: int = 0, device: str = "cpu"):
        self.case, self.device = case, device
        self.generator = torch.Generator(device).manual_seed(seed)
        self._lay_out_rows()
        experts, width = len(case.counts), self._columns
        a = torch.full((self.num_rows, case.k), float("nan"), device=device)
        for start, end in self.written:
            a[start:end] = self._randn(end - start, case.k)
            if case.kind == "contiguous":
                # Padding rows of a block are computed: with zeros they give zeros.
                a[end : align_up(end)] = 0
        b = self._randn(experts, case.n, case.k) * case.k**-0.5
        self.bias = self._randn(experts, case.n) if case.bias else None
        self.row_weights = None
        if case.weighted:
            self.row_weights = torch.rand(self.num_rows, generator=self.generator, device=device)
        if case.fp8:
            self.a, self.a_values = self._quantized_rows(a)
            self.b = quant.quantize_blockwise(b)
            b_values = quant.dequantize(self.b)
        else:
            self.a, self.a_values = a.bfloat16(), a.bfloat16().float()
            self.b = b.bfloat16()
            b_values = self.b.float()
            if case.nn:
                self.b = self.b.transpose(1, 2).contiguous()
        if case.kind == "masked":
            self.a = self._by_expert(self.a)
        self.c = self._randn(self.num_rows, width).to(case.out_dtype) if case.accumulate else None
        self.expected = self._expected(b_values)

    @property
    def _columns(self) -> int:
        return self.case.n // 2 if self.case.activation else self.case.n

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def _lay_out_rows(self) -> None:
        """``written``: (start, end) of each expert's rows; ``rows``: what tells the kernels."""
        case = self.case
        if case.kind == "dense":
            self.num_rows, self.written, self.rows = case.counts[0], [(0, case.counts[0])], None
            return
        starts, position = [], 0
        for count in case.counts:
            starts.append(position)
            position += case.max_rows if case.kind == "masked" else align_up(count)
        self.num_rows = position
        self.written = [(start, start + count) for start, count in zip(starts, case.counts, strict=True)]
        if case.kind == "masked":
            self.rows = RowGroups.masked(self._int32(case.counts))
        elif case.kind == "psum":
            self.rows = RowGroups.psum(self._int32([end for _, end in self.written]))
        else:
            ids = torch.full((self.num_rows,), -1, dtype=torch.int32, device=self.device)
            for expert, (start, end) in enumerate(self.written):
                ids[start:end] = expert
            self.rows = RowGroups.contiguous(ids)

    def _int32(self, values) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def _quantized_rows(self, a: torch.Tensor) -> tuple[Fp8Tensor, torch.Tensor]:
        x = quant.quantize_rowwise(a, mn_major=True)
        return x, quant.dequantize(x)

    def _by_expert(self, a: Any) -> Any:
        experts, rows = len(self.case.counts), self.case.max_rows
        if isinstance(a, torch.Tensor):
            return a.view(experts, rows, -1)
        return Fp8Tensor(a.codes.view(experts, rows, -1), to_mn_major(a.scales.reshape(experts, rows, -1)), a.block)

    def _expected(self, b: torch.Tensor) -> torch.Tensor:
        """fp32 result; NaN in rows that must be left alone. ``expected_pre``: the same before the activation."""
        case = self.case
        self.expected_pre = torch.zeros(self.num_rows, case.n, device=self.device)
        result = torch.full((self.num_rows, self._columns), float("nan"), device=self.device)
        for expert, (start, end) in enumerate(self.written):
            rows = (self.a_values[start:end].double() @ b[expert].double().t()).float()
            if self.bias is not None:
                rows += self.bias[expert]
            if self.c is not None:
                rows += self.c[start:end].float()
            self.expected_pre[start:end] = rows
            if case.activation:
                rows = reference.activate(rows, case.activation, case.clamp)
            if self.row_weights is not None:
                rows *= self.row_weights[start:end, None]
            result[start:end] = rows
        return result

    def poisoned(self) -> Any:
        """A result to write into: POISON everywhere, or C."""
        shape = (self.num_rows, self._columns)
        if self.c is not None:
            out = self.c.clone()
        elif self.case.fp8_out:
            codes = torch.full(shape, POISON, device=self.device).to(torch.float8_e4m3fn)
            scales = empty_mn_major(torch.Size((shape[0], shape[1] // 128)), torch.float32, torch.device(self.device))
            out = Fp8Tensor(codes, scales.fill_(POISON), (1, 128))
        else:
            out = torch.full(shape, POISON, dtype=self.case.out_dtype, device=self.device)
        return self._by_expert(out) if self.case.kind == "masked" else out

    def poisoned_pre(self) -> torch.Tensor | None:
        """What gate and up are written into, or None."""
        if not self.case.pre:
            return None
        return torch.full((self.num_rows, self.case.n), POISON, dtype=torch.bfloat16, device=self.device)

    def check_pre(self, pre: torch.Tensor) -> None:
        """Gate and up are right, rounded to bf16; blocks without rows are as they were."""
        outside = torch.ones(self.num_rows, dtype=torch.bool, device=self.device)
        for start, end in self.written:
            outside[start : align_up(end)] = False
            wanted, got = self.expected_pre[start:end], pre[start:end].float()
            if end > start:
                assert relative_error(got, wanted) < BF16_ERROR
                # Every element is its own.
                assert ((got - wanted).abs() <= 2**-7 * wanted.abs() + 0.02).all()
        assert (pre[outside].float() == POISON).all(), "pre-activations of no expert were written"

    def check(self, out: Any) -> None:
        """``out`` is right where it must be written and as it was elsewhere."""
        values = self._values(out)
        poisoned = self._values(self.poisoned())
        self._check_untouched(values, poisoned)
        if self.case.kind == "contiguous":
            for _, end in self.written:
                padding = slice(end, align_up(end))
                assert not (values[padding] == poisoned[padding]).any(), "padding rows of a block were left out"
        for start, end in self.written:
            if end > start:
                self._check_rows(values[start:end].float(), self.expected[start:end])

    def _values(self, out: Any) -> torch.Tensor:
        """A result as one matrix."""
        if not isinstance(out, Fp8Tensor):
            return out.reshape(self.num_rows, self._columns)
        scales = out.scales.reshape(self.num_rows, self._columns // 128)
        return quant.dequantize(Fp8Tensor(out.codes.reshape(self.num_rows, self._columns), scales, out.block))

    def _check_rows(self, values: torch.Tensor, expected: torch.Tensor) -> None:
        if self.case.fp8_out:
            rounded = quant.dequantize(reference.quantize(expected, (1, 128)))
            # A code that falls the other way moves by a step of e4m3; the cast itself costs 2.6 %.
            error = relative_error(values, rounded)
            assert error < 8e-3, f"{error} from the quantised reference"
            assert relative_error(values, expected) < 0.035
            return
        error = relative_error(values, expected)
        exact = FP8_ERROR if self.case.fp8 else 1e-5
        limit = BF16_ERROR if self.case.out_dtype == torch.bfloat16 else exact
        assert error < limit, f"relative error {error} in {self.case}"

    def _check_untouched(self, values: torch.Tensor, before: torch.Tensor) -> None:
        outside = torch.ones(self.num_rows, dtype=torch.bool, device=self.device)
        for start, end in self.written:
            outside[start : align_up(end) if self.case.kind == "contiguous" else end] = False
        wrong = ((values != before).any(1) & outside).nonzero().flatten()
        assert not wrong.numel(), f"rows {wrong[:8].tolist()} of no expert were written"

    def with_rows(self, **changes: Any) -> RowGroups:
        """The row groups with other fields."""
        return replace(self.rows, **changes)


def standard_cases() -> dict[str, Case]:
    """Small cases that together take every path of the kernels: ragged and empty experts, sizes around tile edges."""
    ragged = (100, 0, 200)
    fp32 = dict(out_dtype=torch.float32)
    cases = {
        "contiguous": Case(ragged, 512, 512, "contiguous"),
        "psum": Case(ragged, 512, 384),
        "psum, tails of N and K": Case((100, 1, 130), 264, 208),
        "psum, smallest": Case((1,), 8, 16),
        "psum, all rows to one expert": Case((0, 0, 300, 0), 256, 256),
        "psum, no rows": Case((0, 0), 256, 256),
        "psum, around the tile's rows": Case((63, 64, 65, 127, 128, 129), 256, 128),
        "masked": Case((100, 0, 130, 1), 256, 256, "masked", 140),
        "masked, odd M_max": Case((37, 0, 5), 128, 256, "masked", 37),
        "dense": Case((150,), 264, 400, "dense"),
        "dense, one row": Case((1,), 136, 144, "dense"),
        "dense, fp32": Case((150,), 256, 256, "dense", **fp32),
        "dense, fp32 + C": Case((150,), 264, 256, "dense", accumulate=True, **fp32),
        "psum, fp32 + C": Case(ragged, 256, 256, accumulate=True, **fp32),
        "bias": Case(ragged, 392, 256, bias=True),
        "swiglu": Case(ragged, 512, 256, activation="swiglu", weighted=True),
        "swiglu to fp8": Case(ragged, 512, 256, activation="swiglu", weighted=True, fp8_out=True),
        "swiglu to fp8, clamp, masked": Case(
            (100, 0, 30), 256, 256, "masked", 140, activation="swiglu", clamp=0.7, fp8_out=True
        ),
        "swiglu_oai, bias": Case(ragged, 256, 256, activation="swiglu_oai", clamp=1.0, bias=True),
        "geglu": Case(ragged, 256, 128, activation="geglu", weighted=True),
        "geglu_tanh to fp8": Case(ragged, 256, 128, activation="geglu_tanh", fp8_out=True),
    }
    for name, case in list(cases.items()):
        if not case.fp8_out and not name.startswith("psum, no rows"):
            cases[f"bf16, {name}"] = replace(case, fp8=False)
    for name in ("contiguous", "psum", "psum, tails of N and K", "masked", "dense", "bias"):
        cases[f"bf16 nn, {name}"] = replace(cases[name], fp8=False, nn=True)
    for name, case in {
        "swiglu to fp8": replace(cases["swiglu to fp8"], k=384),
        "swiglu": Case((63, 0, 200, 1), 768, 256, "contiguous", activation="swiglu", weighted=True),
        "geglu to fp8, bias, clamp": Case(ragged, 256, 256, activation="geglu", clamp=0.7, bias=True, fp8_out=True),
    }.items():
        cases[f"{name}, pre-activations"] = replace(case, pre=True)
    for name, case in {
        "swiglu": Case((100, 1, 129), 272, 192, activation="swiglu", weighted=True),
        "swiglu_oai, bias": Case(ragged, 560, 128, "contiguous", activation="swiglu_oai", clamp=1.0, bias=True),
    }.items():
        cases[f"bf16, {name}, pre-activations"] = replace(case, fp8=False, pre=True)
    cases["bf16, C in bf16"] = Case(ragged, 264, 336, fp8=False, accumulate=True)
    cases["bf16 nn, C in bf16, dense"] = Case((150,), 264, 336, "dense", fp8=False, nn=True, accumulate=True)
    return cases


def compute(instance: Instance, out: Any, rows: RowGroups | None, tile: Any = None) -> Any:
    """The public function of the case, into ``out``."""
    from megamoe.kernels import gemm, gemm_swiglu

    case = instance.case
    if case.activation:
        pre = instance.poisoned_pre()
        options = dict(
            row_weights=instance.row_weights,
            activation=case.activation,
            clamp=case.clamp,
            bias=instance.bias,
            out=out,
            pre=pre,
            tile=tile,
        )
        operands = instance.a, instance.b, rows or _one_group(instance)
        if case.fp8:
            result = gemm_swiglu.grouped_fp8_gemm_swiglu_nt(*operands, quantize=case.fp8_out, **options)
        else:
            result = gemm_swiglu.grouped_bf16_gemm_swiglu_nt(*operands, **options)
        if pre is not None:
            instance.check_pre(pre)
        return result
    options = dict(out=out, c=out if case.accumulate else None, bias=instance.bias, tile=tile)
    if rows is None:
        b = instance.b
        if case.fp8:
            return gemm.fp8_gemm_nt(instance.a, Fp8Tensor(b.codes[0], b.scales[0], b.block), **options)
        return (gemm.bf16_gemm_nn if case.nn else gemm.bf16_gemm_nt)(instance.a, b[0], **options)
    if case.fp8:
        return gemm.grouped_fp8_gemm_nt(instance.a, instance.b, rows, **options)
    function = gemm.grouped_bf16_gemm_nn if case.nn else gemm.grouped_bf16_gemm_nt
    return function(instance.a, instance.b, rows, **options)


def _one_group(instance: Instance) -> RowGroups:
    return RowGroups.psum(torch.tensor([instance.num_rows], dtype=torch.int32, device=instance.device))
