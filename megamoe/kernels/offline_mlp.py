"""The kernels between the GEMMs of the expert MLP with every set of types, for ``offline``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megamoe.kernels import triton_activation, triton_mlp, triton_segments
from megamoe.kernels.offline_quant import Variant

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


def _fp8_casts() -> Iterator[Variant]:
    outputs = dict(codes="*fp8e4nv", scales="*fp32", codes_t="*fp8e4nv", scales_t="*fp32")
    sizes = dict(row_blocks="i32", num_cols="i32", scale_group_stride="i32", min_amax="fp32")
    options = dict(BLOCK=triton_mlp.BLOCK, LARGEST=448.0)
    aligned = ("num_cols", "scale_group_stride")
    for dtype, scaled in (("bf16", False), ("fp16", False), ("fp32", False), ("fp8e4nv", True)):
        # Of FP8 rows no codes are made: their places are taken by the columns'.
        yield Variant(
            f"columnwise of FP8 rows, {dtype}" if scaled else f"both ways, {dtype}",
            triton_mlp._columns_kernel,
            dict(x=f"*{dtype}", x_scales="*fp32" if scaled else f"*{dtype}", x_stride="i32", **outputs, **sizes),
            dict(
                SCALED=scaled,
                ROWS=triton_mlp.CAST_ROWS,
                COLUMNS=triton_mlp.BLOCK if scaled else triton_mlp.COLUMNS,
                **options,
            ),
            triton_mlp.NUM_WARPS,
            (*aligned, "x_stride"),
        )
    types = dict(
        row_weights="*fp32",
        act_t="*fp8e4nv",
        act_scales_t="*fp32",
        weight_grads="*fp32",
        sums="*fp32",
        grad_stride="i32",
        pre_stride="i32",
        clamp="fp32",
    )
    for (name, form), dtype in itertools.product(_forms(), ("bf16", "fp32")):
        if dtype == "fp32" and not _is_plain(form):
            continue
        for columns, sums in itertools.product((False, True), (False, True)):
            yield Variant(
                f"{name} backward{' both ways' if columns else ' rowwise'}{' + sums' if sums else ''}, {dtype}",
                triton_mlp._activation_backward_kernel,
                dict(grad=f"*{dtype}", pre=f"*{dtype}", **types, **outputs, **sizes),
                dict(
                    WITH_COLUMNS=columns,
                    WITH_SUMS=sums,
                    ROWS=triton_mlp.activation_rows(form["ACTIVATION"], form["CLAMP"]),
                    COLUMNS=triton_mlp.COLUMNS,
                    **form,
                    **options,
                ),
                triton_mlp.NUM_WARPS,
                (*aligned, "grad_stride", "pre_stride"),
            )


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


def variants() -> Iterator[Variant]:
    """Every kernel and activation for BF16 rows, and every set of types for one activation; 16-byte aligned rows."""
    yield from _fp8_casts()
    yield from _activations()
    yield from _bias_gradients()
