"""Triton kernels of rows that stay on their GPU: layouts, and the movements between tokens and pool rows.

For GPUs only. Bits and results are those of ``layout`` and ``reference``. No launch waits for the device, and no sum
depends on which program comes first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe.kernels.layout import ALIGN

LAYOUT_WARPS, WARPS = 8, 4
MOST_CHUNKS = 256
"""Every program of the second layout kernel reads the counts of all chunks."""

SUB = 64
"""Pairs that are compared with each other."""

COUNT_BLOCK = 512

COUNTS_AT_ONCE = 4096
"""Numbers of histograms that a program holds."""

SENT_BYTES, SUMMED_BYTES = 4096, 2048
"""Of a row, by one program."""

UNROLL = 8
"""Slots whose rows are loaded together."""

PADDING_ROWS = 4
"""Zeroed at a time."""

VALUES = 1024

SCALED_ROWS = 64
"""Whose scales change their order together."""

BLOCK_ROWS = tl.constexpr(ALIGN)


# ---------------------------------------------------------------- layout


@triton.jit(do_not_specialize=["num_pairs", "num_rows", "num_experts", "chunk"])
def _count_kernel(
    ids, histograms, row_to_pair, num_pairs, num_rows, num_experts, chunk, BINS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Pairs of each expert in each chunk into ``histograms`` int32 [chunks, BINS], and no pair into any row."""
    pid = tl.program_id(0)
    end = tl.minimum((pid + 1) * chunk, num_pairs)
    count = tl.zeros([BINS], tl.int32)
    start = pid * chunk
    while start < end:
        pair = start + tl.arange(0, BLOCK)
        expert = tl.load(ids + pair, mask=pair < end, other=-1)
        valid = (expert >= 0) & (expert < num_experts)
        count += tl.histogram(tl.where(valid, expert, 0).to(tl.int32), BINS, mask=valid)
        start += BLOCK
    tl.store(histograms + pid * BINS + tl.arange(0, BINS), count)
    share = tl.cdiv(num_rows, tl.num_programs(0))
    start = pid * share
    end = tl.minimum(start + share, num_rows)
    while start < end:
        row = start + tl.arange(0, BLOCK)
        tl.store(row_to_pair + row, tl.full([BLOCK], -1, tl.int64), mask=row < end)
        start += BLOCK


@triton.jit
def _sum_histograms(histograms, num_chunks, chunk, BINS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Pairs of each expert: all, and those of the chunks before ``chunk``."""
    total = tl.zeros([AT_ONCE, BINS], tl.int32)
    before = tl.zeros([AT_ONCE, BINS], tl.int32)
    bins = tl.arange(0, BINS)[None, :]
    start = 0
    while start < num_chunks:
        row = (start + tl.arange(0, AT_ONCE))[:, None]
        count = tl.load(histograms + row * BINS + bins, mask=row < num_chunks, other=0)
        total += count
        before += tl.where(row < chunk, count, 0)
        start += AT_ONCE
    return tl.sum(total, 0), tl.sum(before, 0)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "chunk"])
def _assign_kernel(
    ids, histograms, counts, starts, pair_to_row, row_to_pair, num_pairs, num_experts, chunk, BINS: tl.constexpr,
    AT_ONCE: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """The rows of a chunk's pairs; the first program writes the layout."""
    pid = tl.program_id(0)
    total, before = _sum_histograms(histograms, tl.num_programs(0), pid, BINS, AT_ONCE)
    blocks = (total + (BLOCK_ROWS - 1)) // BLOCK_ROWS
    first = (tl.cumsum(blocks, 0) - blocks) * BLOCK_ROWS
    if pid == 0:
        bins = tl.arange(0, BINS)
        tl.store(counts + bins, total.to(tl.int64), mask=bins < num_experts)
        tl.store(starts + bins, first.to(tl.int64), mask=bins < num_experts)
    next_row = first + before
    place = tl.arange(0, SUB)
    earlier = place[:, None] < place[None, :]
    end = tl.minimum((pid + 1) * chunk, num_pairs)
    start = pid * chunk
    while start < end:
        pair = start + place
        expert = tl.load(ids + pair, mask=pair < end, other=-1)
        valid = (expert >= 0) & (expert < num_experts)
        expert = tl.where(valid, expert, 0).to(tl.int32)
        # Pairs without an expert are like no expert's.
        named = tl.where(valid, expert, -1)
        rank = tl.sum(((named[:, None] == named[None, :]) & earlier).to(tl.int32), 0)
        row = tl.gather(next_row, expert, 0) + rank
        next_row += tl.histogram(expert, BINS, mask=valid)
        tl.store(pair_to_row + pair, tl.where(valid, row, -1).to(tl.int64), mask=pair < end)
        tl.store(row_to_pair + row, pair.to(tl.int64), mask=valid)
        start += SUB


def layout_pairs(
    expert_ids: torch.Tensor, num_experts: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts and starts ``[e]``, ``pair_to_row [N]`` and ``row_to_pair [num_rows]``, all int64.

    Args:
        expert_ids: int32 or int64 ``[N]``, contiguous.
        num_experts: at most ``COUNTS_AT_ONCE``.
        num_rows: enough for any ids.
    """
    device, num_pairs = expert_ids.device, expert_ids.numel()
    # Not parts of one tensor: outputs of an operator may not share memory.
    counts = torch.empty(num_experts, dtype=torch.int64, device=device)
    starts = torch.empty_like(counts)
    pair_to_row = torch.empty(num_pairs, dtype=torch.int64, device=device)
    row_to_pair = torch.empty(num_rows, dtype=torch.int64, device=device)
    chunk = max(triton.cdiv(num_pairs, MOST_CHUNKS * SUB), 1) * SUB
    # Without pairs too: there are counts and starts to write.
    chunks = max(triton.cdiv(num_pairs, chunk), 1)
    bins = max(16, triton.next_power_of_2(num_experts))
    histograms = torch.empty(chunks, bins, dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        _count_kernel[(chunks,)](
            expert_ids,
            histograms,
            row_to_pair,
            num_pairs,
            num_rows,
            num_experts,
            chunk,
            BINS=bins,
            BLOCK=COUNT_BLOCK,
            num_warps=WARPS,
        )
        _assign_kernel[(chunks,)](
            expert_ids,
            histograms,
            counts,
            starts,
            pair_to_row,
            row_to_pair,
            num_pairs,
            num_experts,
            chunk,
            BINS=bins,
            AT_ONCE=COUNTS_AT_ONCE // bins,
            SUB=SUB,
            num_warps=LAYOUT_WARPS,
        )
    return counts, starts, pair_to_row, row_to_pair


@triton.jit(do_not_specialize=["num_experts"])
def _ends_kernel(counts, starts, ends, num_experts, PADDED: tl.constexpr, EXPERTS: tl.constexpr):
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    inside = expert < num_experts
    rows = tl.load(counts + expert, mask=inside, other=0)
    if PADDED:
        rows = (rows + (BLOCK_ROWS - 1)) // BLOCK_ROWS * BLOCK_ROWS
    tl.store(ends + expert, (tl.load(starts + expert, mask=inside, other=0) + rows).to(tl.int32), mask=inside)


def group_ends(counts: torch.Tensor, starts: torch.Tensor, padded: bool) -> torch.Tensor:
    """int32 ``[e]`` of int64 ``counts`` and ``starts``, both contiguous: one past each group's last row, or padding."""
    ends = torch.empty(counts.shape, dtype=torch.int32, device=counts.device)
    with torch.cuda.device(counts.device):
        _ends_kernel[(triton.cdiv(ends.numel(), VALUES),)](
            counts, starts, ends, ends.numel(), PADDED=padded, EXPERTS=VALUES, num_warps=WARPS
        )
    return ends


# ---------------------------------------------------------------- movements


@triton.jit
def _rows_of_slots(slot_to_row, token, first, K: tl.constexpr, UNROLL: tl.constexpr):
    """The rows of slots ``first`` to ``first + UNROLL`` of a token, one number for each; -1 = none."""
    rows = ()
    for k in tl.static_range(UNROLL):
        rows = rows + (tl.load(slot_to_row + token * K + first + k, mask=first + k < K, other=-1),)
    return rows


@triton.jit(do_not_specialize=["num_rows"])
def _send_rows_kernel(
    tokens, slot_to_row, row_to_slot, rows, num_rows, num_cols, token_stride, K: tl.constexpr, UNROLL: tl.constexpr,
    COLS: tl.constexpr, PADDING_ROWS: tl.constexpr,
):  # fmt: skip
    """COLS columns of one token into all its rows, or zeros into the padding rows of one block."""
    pieces = tl.cdiv(num_cols, COLS)
    turn = tl.program_id(0) // pieces
    col = tl.program_id(0) % pieces * COLS + tl.arange(0, COLS)
    inside = col < num_cols
    blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    # Blocks first: one that is all padding takes longer than a token.
    if turn < blocks:
        block = turn * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        if tl.min(tl.load(row_to_slot + block, mask=block < num_rows, other=0), 0) < 0:
            for start in range(0, BLOCK_ROWS, PADDING_ROWS):
                row = turn * BLOCK_ROWS + start + tl.arange(0, PADDING_ROWS)
                padding = tl.load(row_to_slot + row, mask=row < num_rows, other=0) < 0
                zeros = tl.zeros([PADDING_ROWS, COLS], rows.dtype.element_ty)
                place = row.to(tl.int64)[:, None] * num_cols + col[None, :]
                tl.store(rows + place, zeros, mask=padding[:, None] & inside[None, :])
    else:
        token = (turn - blocks).to(tl.int64)
        value = tl.load(tokens + token * token_stride + col, mask=inside)
        for first in range(0, K, UNROLL):
            targets = _rows_of_slots(slot_to_row, token, first, K, UNROLL)
            for k in tl.static_range(UNROLL):
                tl.store(rows + targets[k] * num_cols + col, value, mask=inside & (targets[k] >= 0))


@triton.jit(do_not_specialize=["num_rows", "top_k"])
def _send_scales_kernel(
    scales, row_to_slot, out, num_rows, top_k, num_scales, ROWS: tl.constexpr, SCALES: tl.constexpr
):
    """All scales of ROWS rows: those of their tokens, or zeros, turned."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(row_to_slot + row, mask=row < num_rows, other=-1)
    scale = tl.arange(0, SCALES)
    inside = (slot >= 0)[:, None] & (scale < num_scales)[None, :]
    value = tl.load(scales + (slot // top_k)[:, None] * num_scales + scale[None, :], mask=inside, other=0.0)
    place = scale.to(tl.int64)[:, None] * num_rows + row[None, :]
    tl.store(out + place, tl.trans(value), mask=(scale < num_scales)[:, None] & (row < num_rows)[None, :])


@triton.jit
def _gather_rows_kernel(source, row_to_source, rows, num_cols, source_stride, COLS: tl.constexpr):
    """COLS columns of one row: those of its source, or zeros."""
    pieces = tl.cdiv(num_cols, COLS)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    col = tl.program_id(0) % pieces * COLS + tl.arange(0, COLS)
    inside = col < num_cols
    place = tl.load(row_to_source + row)
    value = tl.load(source + place * source_stride + col, mask=inside & (place >= 0), other=0)
    tl.store(rows + row * num_cols + col, value, mask=inside)


@triton.jit
def _sum_slots_kernel(
    rows, slot_to_row, out, num_cols, row_stride, K: tl.constexpr, UNROLL: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """COLS columns of the sum of one token's rows, in ascending order of slots."""
    pieces = tl.cdiv(num_cols, COLS)
    token = (tl.program_id(0) // pieces).to(tl.int64)
    col = tl.program_id(0) % pieces * COLS + tl.arange(0, COLS)
    inside = col < num_cols
    dtype: tl.constexpr = tl.float64 if rows.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros([COLS], dtype)
    for first in range(0, K, UNROLL):
        sources = _rows_of_slots(slot_to_row, token, first, K, UNROLL)
        # All are on their way before the first is needed.
        values = ()
        for k in tl.static_range(UNROLL):
            start = rows + sources[k] * row_stride
            values = values + (tl.load(start + col, mask=inside & (sources[k] >= 0), other=0.0),)
        for k in tl.static_range(UNROLL):
            total += values[k].to(dtype)
    if out.dtype.element_ty != tl.float64:
        # torch goes from fp64 to 16 bits by way of fp32.
        total = total.to(tl.float32)
    tl.store(out + token * num_cols + col, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _gather_values_kernel(source, place_of, out, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(place_of + index, mask=index < count, other=-1)
    tl.store(out + index, tl.load(source + place, mask=place >= 0, other=0), mask=index < count)


def _columns(num_cols: int, nbytes: int, dtype: torch.dtype) -> int:
    """Columns of a program: a power of two."""
    return min(triton.next_power_of_2(num_cols), nbytes // dtype.itemsize)


def _unroll(top_k: int) -> int:
    """Slots of one round: as few as needed for the fewest rounds."""
    return triton.cdiv(top_k, max(triton.cdiv(top_k, UNROLL), 1)) or 1


def send_rows(tokens: torch.Tensor, slot_to_row: torch.Tensor, row_to_slot: torch.Tensor) -> torch.Tensor:
    """``[P, H]``: each row of ``tokens [T, H]`` in all its rows, zero where ``row_to_slot [P]`` is -1.

    ``tokens`` has stride 1 along H; ``slot_to_row``, int64 ``[T, K]``, is contiguous.
    """
    (num_tokens, num_cols), num_rows = tokens.shape, row_to_slot.numel()
    rows = tokens.new_empty(num_rows, num_cols)
    cols, top_k = _columns(num_cols, SENT_BYTES, tokens.dtype), slot_to_row.shape[1]
    programs = (num_tokens + triton.cdiv(num_rows, ALIGN)) * triton.cdiv(num_cols, cols)
    if rows.numel():
        with torch.cuda.device(tokens.device):
            _send_rows_kernel[(programs,)](
                tokens,
                slot_to_row,
                row_to_slot,
                rows,
                num_rows,
                num_cols,
                tokens.stride(0),
                K=top_k,
                UNROLL=_unroll(top_k),
                COLS=cols,
                PADDING_ROWS=PADDING_ROWS,
                num_warps=WARPS,
            )
    return rows


def send_scales(scales: torch.Tensor, row_to_slot: torch.Tensor, top_k: int) -> torch.Tensor:
    """``[P, S]`` with stride 1 along P, a multiple of 4: the rows' tokens' of ``scales [T, S]``, zero for padding.

    ``scales``, fp32, and ``row_to_slot [P]`` are contiguous.
    """
    num_rows, num_scales = row_to_slot.numel(), scales.shape[1]
    out = scales.new_empty(num_scales, num_rows)
    if out.numel():
        with torch.cuda.device(scales.device):
            _send_scales_kernel[(triton.cdiv(num_rows, SCALED_ROWS),)](
                scales,
                row_to_slot,
                out,
                num_rows,
                top_k,
                num_scales,
                ROWS=SCALED_ROWS,
                SCALES=triton.next_power_of_2(num_scales),
                num_warps=WARPS,
            )
    return out.t()


def gather_rows(source: torch.Tensor, row_to_source: torch.Tensor) -> torch.Tensor:
    """``[P, H]``: row p is ``source[row_to_source[p]]``, or zero where that is -1; ``source`` has stride 1 along H."""
    rows = source.new_empty(row_to_source.numel(), source.shape[1])
    cols = _columns(source.shape[1], SENT_BYTES, source.dtype)
    if rows.numel():
        with torch.cuda.device(source.device):
            _gather_rows_kernel[(rows.shape[0] * triton.cdiv(rows.shape[1], cols),)](
                source, row_to_source, rows, rows.shape[1], source.stride(0), COLS=cols, num_warps=WARPS
            )
    return rows


def sum_slots(rows: torch.Tensor, slot_to_row: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """``[T, H]``: sums of the rows of ``slot_to_row``, int64 ``[T, K]`` and contiguous, in fp32 or fp64.

    ``rows`` has stride 1 along H.
    """
    top_k = slot_to_row.shape[1]
    out = rows.new_empty(slot_to_row.shape[0], rows.shape[1], dtype=out_dtype)
    cols = _columns(rows.shape[1], SUMMED_BYTES, rows.dtype)
    if out.numel():
        with torch.cuda.device(rows.device):
            _sum_slots_kernel[(out.shape[0] * triton.cdiv(out.shape[1], cols),)](
                rows,
                slot_to_row,
                out,
                out.shape[1],
                rows.stride(0),
                K=top_k,
                UNROLL=_unroll(top_k),
                COLS=cols,
                num_warps=WARPS,
            )
    return out


def gather_values(source: torch.Tensor, place_of: torch.Tensor) -> torch.Tensor:
    """``[N]``: ``source[place_of[n]]``, or zero where that is -1; both contiguous."""
    out = source.new_empty(place_of.numel())
    if out.numel():
        with torch.cuda.device(source.device):
            _gather_values_kernel[(triton.cdiv(out.numel(), VALUES),)](
                source, place_of, out, out.numel(), BLOCK=VALUES, num_warps=WARPS
            )
    return out
