"""The kernels between the GEMMs of the expert MLP with every set of types, for ``offline``."""

from __future__ import annotations

from collections.abc import Iterator

from megamoe.kernels import triton_mlp, triton_segments
from megamoe.kernels.offline_quant import Variant


def variants() -> Iterator[Variant]:
    """Every kernel in every form that a launcher can ask for, with 16-byte aligned rows."""
    outputs = dict(codes="*fp8e4nv", scales="*fp32", codes_t="*fp8e4nv", scales_t="*fp32")
    sizes = dict(num_rows="i32", num_cols="i32", scale_group_stride="i32", min_amax="fp32")
    options = dict(BLOCK=triton_mlp.BLOCK, CHUNK=triton_mlp.CHUNK, LARGEST=448.0)
    aligned = ("num_cols", "scale_group_stride")
    for dtype, scaled in (("bf16", False), ("fp16", False), ("fp32", False), ("fp8e4nv", True)):
        yield Variant(
            f"columnwise of FP8 rows, {dtype}" if scaled else f"both ways, {dtype}",
            triton_mlp._columns_kernel,
            dict(x=f"*{dtype}", x_scales="*fp32" if scaled else f"*{dtype}", x_stride="i32", **outputs, **sizes),
            dict(SCALED=scaled, **options),
            triton_mlp.NUM_WARPS,
            (*aligned, "x_stride"),
        )
    types = dict(
        row_weights="*fp32",
        act_t="*fp8e4nv",
        act_scales_t="*fp32",
        weight_grads="*fp32",
        grad_stride="i32",
        pre_stride="i32",
        clamp="fp32",
    )
    for dtype in ("bf16", "fp32"):
        for clamp in (False, True):
            yield Variant(
                f"swiglu backward both ways, {dtype}{', clamp' if clamp else ''}",
                triton_mlp._swiglu_backward_kernel,
                dict(grad=f"*{dtype}", pre=f"*{dtype}", **types, **outputs, **sizes),
                dict(CLAMP=clamp, **options),
                triton_mlp.NUM_WARPS,
                (*aligned, "grad_stride", "pre_stride"),
            )
    for dtype, wide in (("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")):
        yield Variant(
            f"segment sums, {dtype}",
            triton_segments._segment_sums_kernel,
            dict(
                x=f"*{dtype}",
                starts="*i64",
                counts="*i64",
                sums=f"*{wide}",
                num_experts="i32",
                num_cols="i32",
                x_stride="i32",
            ),
            dict(SPLITS=triton_segments.SPLITS, ROWS=triton_segments.ROWS, BLOCK=triton_segments.BLOCK),
            triton_segments.NUM_WARPS,
            ("num_cols", "x_stride"),
        )
