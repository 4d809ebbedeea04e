"""The kernels of rows that stay on their GPU with every set of types, for ``offline``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton

from megamoe.kernels import triton_local
from megamoe.kernels.offline_quant import Variant

HIDDEN = 4096
TOP_KS = (1, 6, 8, 10, 64)
BINS = (16, 128, 512, 1024)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def _send(name: str, dtype: torch.dtype, top_k: int) -> Variant:
    columns = triton_local._columns(HIDDEN, triton_local.SENT_BYTES, dtype)
    return Variant(
        f"local send, K = {top_k}, {name}",
        triton_local._send_rows_kernel,
        dict(
            tokens=f"*{name}",
            slot_to_row="*i64",
            row_to_slot="*i64",
            rows=f"*{name}",
            num_rows="i32",
            num_cols="i32",
            token_stride="i32",
        ),
        dict(K=top_k, UNROLL=triton_local._unroll(top_k), COLS=columns, PADDING_ROWS=triton_local.PADDING_ROWS),
        triton_local.WARPS,
        ("num_cols", "token_stride"),
    )


def variants() -> Iterator[Variant]:
    """Every kernel and number of slots for BF16 rows, and every set of types; 16-byte aligned rows."""
    sizes = dict(num_pairs="i32", num_experts="i32", chunk="i32")
    for ids in ("i64", "i32"):
        common = dict(ids=f"*{ids}", histograms="*i32", row_to_pair="*i64", **sizes)
        for bins in BINS:
            yield Variant(
                f"local layout, counts, {bins} experts, {ids}",
                triton_local._count_kernel,
                dict(num_rows="i32", **common),
                dict(BINS=bins, BLOCK=triton_local.COUNT_BLOCK),
                triton_local.WARPS,
            )
            yield Variant(
                f"local layout, rows, {bins} experts, {ids}",
                triton_local._assign_kernel,
                dict(counts="*i64", starts="*i64", pair_to_row="*i64", **common),
                dict(BINS=bins, AT_ONCE=triton_local.COUNTS_AT_ONCE // bins, SUB=triton_local.SUB),
                triton_local.LAYOUT_WARPS,
            )
    for name, dtype in DTYPES.items():
        sent = triton_local._columns(HIDDEN, triton_local.SENT_BYTES, dtype)
        summed = triton_local._columns(HIDDEN, triton_local.SUMMED_BYTES, dtype)
        for top_k in TOP_KS if name == "bf16" else (8,):
            unroll = triton_local._unroll(top_k)
            yield _send(name, dtype, top_k)
            for out in dict.fromkeys((name, "fp32", "bf16")):
                yield Variant(
                    f"local sum, K = {top_k}, {name} to {out}",
                    triton_local._sum_slots_kernel,
                    dict(
                        rows=f"*{name}",
                        slot_to_row="*i64",
                        out=f"*{out}",
                        num_cols="i32",
                        row_stride="i32",
                    ),
                    dict(K=top_k, UNROLL=unroll, COLS=summed),
                    triton_local.WARPS,
                    ("num_cols", "row_stride"),
                )
        yield Variant(
            f"local gather of rows, {name}",
            triton_local._gather_rows_kernel,
            dict(source=f"*{name}", row_to_source="*i64", rows=f"*{name}", num_cols="i32", source_stride="i32"),
            dict(COLS=sent),
            triton_local.WARPS,
            ("num_cols", "source_stride"),
        )
    for padded in (False, True):
        yield Variant(
            f"local ends{', padded' * padded}",
            triton_local._ends_kernel,
            dict(counts="*i64", starts="*i64", ends="*i32", num_experts="i32"),
            dict(PADDED=padded, EXPERTS=triton_local.VALUES),
            triton_local.WARPS,
        )
    yield _send("u8", torch.uint8, 8)
    for hidden in (2880, 7168):
        num_scales = triton.cdiv(hidden, 128)
        yield Variant(
            f"local send of scales, H = {hidden}",
            triton_local._send_scales_kernel,
            dict(scales="*fp32", row_to_slot="*i64", out="*fp32", num_rows="i32", top_k="i32", num_scales="i32"),
            dict(ROWS=triton_local.SCALED_ROWS, SCALES=triton.next_power_of_2(num_scales)),
            triton_local.WARPS,
        )
    for name in (*DTYPES, "i64"):
        yield Variant(
            f"local gather of values, {name}",
            triton_local._gather_values_kernel,
            dict(source=f"*{name}", place_of="*i64", out=f"*{name}", count="i32"),
            dict(BLOCK=triton_local.VALUES),
            triton_local.WARPS,
        )
