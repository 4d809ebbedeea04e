"""The kernels between the GEMMs of the expert MLP with every set of types, for ``offline``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from megamoe.kernels import mlp_quant, triton_activation, triton_segments
from megamoe.kernels.gluon import cast_launch
from megamoe.kernels.offline_gemm import BF16, FP8, FP32, Launch
from megamoe.kernels.offline_quant import Variant
from megamoe.types import Fp8Tensor

GATED = ("swiglu", "swiglu_oai", "geglu", "geglu_tanh")


def _forms() -> Iterator[tuple[str, dict[str, object]]]:
    """Every activation, with a clamp where it may have one."""
    for activation, clamp in (*itertools.product(GATED, (False, True)), ("relu2", False)):
        yield f"{activation}{', clamp' if clamp else ''}", dict(ACTIVATION=activation, CLAMP=clamp)


def _is_plain(form: dict[str, object]) -> bool:
    """The form that stands for all where types differ from BF16: the arithmetic is fp32 in any case."""
    return form["ACTIVATION"] == GATED[0] and not form["CLAMP"]


def _activations() -> Iterator[Variant]:
    sizes = dict(num_rows="i32", num_cols="i32", pre_stride="i32", clamp="fp32", row_weights="*fp32")
    # GEMMs round their results where they are Hopper's and no bias follows them; else they are fp32.
    forward = ("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "fp16"), ("fp32", "fp32")
    backward = ("bf16", "bf16", "bf16"), ("bf16", "fp32", "bf16"), ("fp32", "fp32", "fp16"), ("fp32", "fp32", "fp32")
    casts = ("bf16", "fp8e4nv"), ("fp32", "fp8e4nv")
    for name, form in _forms():
        types = (*forward, *casts) if _is_plain(form) else (forward[0], casts[0])
        for (pre, out), weighted in itertools.product(types, (False, True)):
            yield Variant(
                f"{name}{' x weight' if weighted else ''}, {pre} to {out}",
                triton_activation._forward_kernel,
                dict(
                    pre=f"*{pre}",
                    out=f"*{out}",
                    scales="*fp32" if out == "fp8e4nv" else f"*{out}",
                    scale_group_stride="i32",
                    min_amax="fp32",
                    **sizes,
                ),
                dict(
                    WEIGHTED=weighted,
                    QUANTIZE=out == "fp8e4nv",
                    ROWS=triton_activation.FORWARD_ROWS,
                    GROUP=triton_activation.GROUP,
                    LARGEST=448.0,
                    **form,
                ),
                triton_activation.NUM_WARPS,
                ("num_cols", "pre_stride", "scale_group_stride"),
            )
        types = backward if _is_plain(form) else backward[:1]
        for (grad, pre, out), with_act in itertools.product(types, (False, True)):
            yield Variant(
                f"{name} backward{' + activation' if with_act else ''}, {pre} to {out}",
                triton_activation._backward_kernel,
                dict(
                    grad=f"*{grad}",
                    pre=f"*{pre}",
                    grad_pre=f"*{out}",
                    act=f"*{out}",
                    grad_weights="*fp32",
                    grad_stride="i32",
                    **sizes,
                ),
                dict(
                    WITH_ACT=with_act,
                    ROWS=triton_activation.BACKWARD_ROWS,
                    COLUMNS=triton_activation.BACKWARD_COLUMNS,
                    **form,
                ),
                triton_activation.NUM_WARPS,
                ("num_cols", "pre_stride", "grad_stride"),
                triton_activation.BACKWARD_REGISTERS,
            )


class _Cast(Launch):
    """A launch of the FP8 casts."""

    def compile(self) -> Any:
        """The compiled kernel, for the active driver's target."""
        options = cast_launch.OPTIONS[self.kernel.fn.__name__]
        return self.kernel.warmup(*self.arguments.values(), grid=(1,), **options)


def _empty(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _columns(rows: int, columns: int, block: tuple[int, int]) -> Fp8Tensor:
    scales = _empty(rows // block[0], columns // block[1])
    return Fp8Tensor(_empty(columns, rows, dtype=FP8).t(), scales, block)


def _rows(rows: int, columns: int) -> Fp8Tensor:
    return Fp8Tensor(_empty(rows, columns, dtype=FP8), _empty(columns // 128, rows).t(), mlp_quant.ROW)


def _fp8_casts() -> Iterator[_Cast]:
    rows, columns = 512, 384
    for dtype, name in ((BF16, "bf16"), (torch.float16, "fp16"), (FP32, "fp32")):
        outputs = _rows(rows, columns), _columns(rows, columns, mlp_quant.COLUMN)
        x = _empty(rows, columns, dtype=dtype)
        yield _Cast(f"both ways, {name}", *cast_launch.cast_arguments(x, None, *outputs))
    x = _rows(rows, columns)
    blocks = _columns(rows, columns, mlp_quant.TILE)
    yield _Cast("columnwise of FP8 rows", *cast_launch.cast_arguments(x.codes, x.scales, None, blocks))
    for (name, form), dtype in itertools.product(_forms(), (BF16, FP32)):
        if dtype == FP32 and not _is_plain(form):
            continue
        width = columns * (1 if form["ACTIVATION"] == "relu2" else 2)
        grad, pre = _empty(rows, columns, dtype=dtype), _empty(rows, width, dtype=dtype)
        for both, sums in itertools.product((False, True), (False, True)):
            kernel, arguments = cast_launch.activation_backward_arguments(
                grad,
                pre,
                _empty(rows),
                _rows(rows, width),
                _columns(rows, width, mlp_quant.COLUMN) if both else None,
                _columns(rows, columns, mlp_quant.TILE) if both else None,
                _empty(columns // 128, rows),
                _empty(rows // 128, width) if sums else None,
                form["ACTIVATION"],
                1.0 if form["CLAMP"] else None,
            )
            forms = f"{' both ways' if both else ' rowwise'}{' + sums' if sums else ''}"
            yield _Cast(f"{name} backward{forms}, {'bf16' if dtype == BF16 else 'fp32'}", kernel, arguments)


def _bias_gradients() -> Iterator[Variant]:
    for dtype, wide in (("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")):
        sizes = dict(num_cols="i32", x_stride="i32")
        for weighted in (False, True):
            yield Variant(
                f"segment sums{' x weight' if weighted else ''}, {dtype}",
                triton_segments._segment_sums_kernel,
                dict(
                    x=f"*{dtype}",
                    weights=f"*{wide if weighted else dtype}",
                    starts="*i64",
                    counts="*i64",
                    sums=f"*{wide}",
                    num_experts="i32",
                    **sizes,
                ),
                dict(
                    WEIGHTED=weighted,
                    SPLITS=triton_segments.SPLITS,
                    ROWS=triton_segments.ROWS,
                    BLOCK=triton_segments.BLOCK,
                ),
                triton_segments.NUM_WARPS,
                ("num_cols", "x_stride"),
            )
        for vectors in sorted({dtype, wide}):
            yield Variant(
                f"row dots, {dtype} x {vectors}",
                triton_segments._row_dots_kernel,
                dict(x=f"*{dtype}", vectors=f"*{vectors}", ids="*i64", dots=f"*{wide}", num_rows="i32", **sizes),
                dict(ROWS=triton_segments.DOT_ROWS, BLOCK=triton_segments.DOT_BLOCK),
                triton_segments.NUM_WARPS,
                ("num_cols", "x_stride"),
            )


def variants() -> Iterator[Variant | Launch]:
    """Every kernel and activation for BF16 rows, and every set of types for one activation; 16-byte aligned rows."""
    yield from _fp8_casts()
    yield from _activations()
    yield from _bias_gradients()
