"""Triton kernels of the dispatch: tokens to the ranks of their experts, within one NVLink domain. For GPUs only.

Every rank puts its tokens into its own symmetric memory and its routing lists into everyone's, raises READY, waits for
all, works out from the lists where the rows of its own experts go, reads each token that it needs once, and writes it
to all its rows here. What lies there is written anew when all ranks have read it: see ``triton_flags``.

Rows are ordered by (expert, source rank, token, slot): a function of the routing alone. Blocks of ``CHUNK`` tokens of
one source rank are dealt to programs source by source, so that all links are busy at once.

Names: R ranks, n tokens here, ``max_tokens`` of any rank (the stride of lists and tables), K slots padded to KP, LOCAL
experts on this rank padded to BINS, WORDS int32 words of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.kernels import flag_words
from megamoe.kernels.triton_flags import (
    CAPACITY,
    COMBINES,
    COMBINES_SEEN,
    COUNT,
    DISPATCHES,
    DISPATCHES_SEEN,
    KIND_WORDS,
    LINE_WORDS,
    PULLED,
    READY,
    arrive,
    begin,
    count_of,
    end_program,
    epochs_ended,
    peer,
    publish,
    report,
    tell_count,
    wait_all,
    wait_until_ended,
)
from megamoe.kernels.triton_rows import (
    is_needed,
    load_piece,
    load_token,
    pull,
    read_scales,
    read_words,
    rows_of,
    write_piece,
    write_scales,
    write_words,
)

ALIGN = tl.constexpr(128)  # rows: every expert starts at a multiple
TOKEN_BITS = tl.constexpr(flag_words.TOKEN_BITS)
ELSEWHERE = tl.constexpr(flag_words.ELSEWHERE)
NOWHERE = tl.constexpr(flag_words.NOWHERE)

# Where a dispatch's table of rows comes from.
REUSED = tl.constexpr(0)
COUNTED_HERE = tl.constexpr(1)  # every program counts all lists: one launch, for few tokens
COUNTED_BEFORE = tl.constexpr(2)  # ``count_kernel`` has


# ---------------------------------------------------------------- inputs into symmetric memory


@triton.jit
def _load_lists(index, weights, n, block, num_experts, K: tl.constexpr, BLOCK: tl.constexpr):
    """A block of my routing; ids that name no expert become -1."""
    pair = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(index + pair, mask=pair < n * K, other=-1)
    expert = tl.where((expert >= 0) & (expert < num_experts), expert, -1).to(tl.int32)
    return expert, tl.load(weights + pair, mask=pair < n * K, other=0.0).to(tl.float32)


@triton.jit
def _write_lists(
    expert, weight, n, block, list_index, list_weights, deltas, my_rank, max_tokens, R: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of my routing into every rank's lists."""
    first = my_rank.to(tl.int64) * max_tokens * K
    pair = block * BLOCK + tl.arange(0, BLOCK)
    for r in range(R):
        delta = tl.load(deltas + r)
        tl.store(peer(list_index, delta, 4) + first + pair, expert, mask=pair < n * K)
        tl.store(peer(list_weights, delta, 4) + first + pair, weight, mask=pair < n * K)


@triton.jit
def _stage(
    x, x_stride, index, weights, n, memory, everyone, state, error, budget_ns, my_rank, num_experts, max_tokens, epoch,
    min_amax, teller, R: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr, H: tl.constexpr, FP8: tl.constexpr,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, LISTS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    flags, deltas, list_index, list_weights, rows, scales = memory
    pid, programs = tl.program_id(0), tl.num_programs(0)
    num_groups: tl.constexpr = (H + 127) // 128
    # A token in few registers is read at once, and before what is written next is free.
    AHEAD: tl.constexpr = ROWS and num_groups <= 4 * GROUPS
    BLOCK: tl.constexpr = GROUPS * 128
    if AHEAD:
        token = load_token(x, x_stride, pid, n, H, GROUPS)
    if LISTS:
        expert, weight = _load_lists(index, weights, n, pid, num_experts, K, BLOCK)
    # Everyone has read what lies there from the dispatch before.
    wait_until_ended(
        DISPATCHES_SEEN, PULLED, epoch - 1, teller, flags, everyone, state, error, budget_ns, my_rank, R, LANES
    )
    if LISTS:
        # Programs without a block write nothing.
        _write_lists(expert, weight, n, pid, list_index, list_weights, deltas, my_rank, max_tokens, R, K, BLOCK)
        for block in range(pid + programs, tl.cdiv(n * K, BLOCK), programs):
            expert, weight = _load_lists(index, weights, n, block, num_experts, K, BLOCK)
            _write_lists(expert, weight, n, block, list_index, list_weights, deltas, my_rank, max_tokens, R, K, BLOCK)
    if AHEAD:
        for t in range(pid, n, programs):
            if t != pid:
                token = load_token(x, x_stride, t, n, H, GROUPS)
            for i in tl.static_range((num_groups + GROUPS - 1) // GROUPS):
                write_piece(token[i], t, i * GROUPS, rows, scales, min_amax, H, FP8, LARGEST, GROUPS)
    elif ROWS:
        for t in range(pid, n, programs):
            for first in tl.static_range(0, num_groups, GROUPS):
                value = load_piece(x, x_stride, t, first, n, H, GROUPS)
                write_piece(value, t, first, rows, scales, min_amax, H, FP8, LARGEST, GROUPS)


@triton.jit
def stage_and_meet(
    x, x_stride, index, weights, n, memory, everyone, state, error, budget_ns, my_rank, num_experts, max_tokens, epoch,
    min_amax, R: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr, H: tl.constexpr, FP8: tl.constexpr,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, LISTS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """My tokens and lists into symmetric memory, and everyone's seen there; all programs must run at once."""
    # The last program has the least to do.
    _stage(
        x, x_stride, index, weights, n, memory, everyone, state, error, budget_ns, my_rank, num_experts, max_tokens,
        epoch, min_amax, tl.num_programs(0) - 1, R, LANES, K, H, FP8, LARGEST, ROWS, LISTS, GROUPS,
    )  # fmt: skip
    flags, deltas, list_index, list_weights, rows, scales = memory
    stagers = tl.minimum(tl.maximum(n, 1), tl.num_programs(0))
    if tl.program_id(0) < stagers:
        if tl.program_id(0) == 0:
            tell_count(flags, everyone, n, my_rank, LANES)
        arrive(flags, everyone, READY, 1, stagers, my_rank, R, LANES)
    wait_all(flags, READY, epoch, error, budget_ns, R, LANES)


@triton.jit(do_not_specialize=["n", "my_rank", "budget_ns", "num_experts", "max_tokens"])
def stage_kernel(
    x, x_stride, index, weights, n, flags, deltas, list_index, list_weights, rows, scales, state, error, budget_ns,
    my_rank, num_experts, max_tokens, min_amax, R: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
    FP8: tl.constexpr, LARGEST: tl.constexpr, ROWS: tl.constexpr, LISTS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """My tokens and lists into symmetric memory; the next kernel raises the flag."""
    memory = (flags, deltas, list_index, list_weights, rows, scales)
    everyone = begin(deltas, R, LANES)
    epoch = epochs_ended(state + DISPATCHES) + 1
    # The first program starts first: the others, which may not all run at once, wait for what it tells.
    _stage(
        x, x_stride, index, weights, n, memory, everyone, state, error, budget_ns, my_rank, num_experts, max_tokens,
        epoch, min_amax, 0, R, LANES, K, H, FP8, LARGEST, ROWS, LISTS, GROUPS,
    )  # fmt: skip


# ---------------------------------------------------------------- who gets which rows


@triton.jit
def _local_experts(list_index, source, token, slot, mask, my_rank, max_tokens, K: tl.constexpr, LOCAL: tl.constexpr):
    """(local expert, whether it is one, whether it is one at all) of (token, slot) pairs of a source rank."""
    place = (source.to(tl.int64) * max_tokens + token) * K + slot
    expert = tl.load(list_index + place, mask=mask, other=-1)
    named = expert >= 0
    expert -= my_rank * LOCAL
    mine = named & (expert >= 0) & (expert < LOCAL)
    return tl.where(mine, expert, 0), mine, named, place


@triton.jit
def _count(
    list_index, source, first, end, my_rank, max_tokens, K: tl.constexpr, KP: tl.constexpr, LOCAL: tl.constexpr,
    BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of each local expert among the tokens ``first`` to ``end`` of a source rank."""
    total = tl.zeros([BINS], tl.int32)
    for start in range(first * KP, end * KP, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        token, slot = pair // KP, pair % KP
        mask = (token < end) & (slot < K)
        expert, mine, _, _ = _local_experts(list_index, source, token, slot, mask, my_rank, max_tokens, K, LOCAL)
        total += tl.histogram(expert, BINS, mask=mine)
    return total


@triton.jit(do_not_specialize=["n", "my_rank", "budget_ns", "max_tokens"])
def count_kernel(
    n, flags, deltas, list_index, state, error, budget_ns, my_rank, max_tokens, histograms, R: tl.constexpr,
    LANES: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, LOCAL: tl.constexpr, BINS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Raises READY for what ``stage_kernel`` wrote, waits for all, and counts each chunk's rows of each local expert
    into ``histograms`` int32 [R * chunks of a rank, BINS]."""
    everyone = begin(deltas, R, LANES)
    epoch = epochs_ended(state + DISPATCHES) + 1
    if tl.program_id(0) == 0:
        tell_count(flags, everyone, n, my_rank, LANES)
        publish(flags, everyone, READY, epoch, my_rank, LANES)
    wait_all(flags, READY, epoch, error, budget_ns, R, LANES)
    per_rank = tl.cdiv(max_tokens, CHUNK)
    for chunk in range(tl.program_id(0), R * per_rank, tl.num_programs(0)):
        source = chunk // per_rank
        first = (chunk % per_rank) * CHUNK
        end = tl.minimum(first + CHUNK, count_of(flags, source, max_tokens))
        count = _count(list_index, source, first, end, my_rank, max_tokens, K, KP, LOCAL, BINS, BLOCK)
        tl.store(histograms + chunk * BINS + tl.arange(0, BINS), count)


@triton.jit
def count_all(
    flags, list_index, source, first, my_rank, max_tokens, R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    LOCAL: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of each local expert: all, and those of tokens before token ``first`` of rank ``source``."""
    look = look_at_pairs(flags, list_index, 0, my_rank, max_tokens, R, K, KP, LOCAL, BLOCK)
    return count_from(look, flags, list_index, source, first, my_rank, max_tokens, R, K, KP, LOCAL, BINS, BLOCK)


@triton.jit
def look_at_pairs(
    flags, list_index, start, my_rank, max_tokens, R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    LOCAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(local expert or what is none, whether its token is there) of a block of pairs, in the order of rows."""
    # A single look covers several ranks' lists.
    pair = start + tl.arange(0, BLOCK)
    place, slot = pair // KP, pair % KP
    rank, token = place // max_tokens, place % max_tokens
    inside = (rank < R) & (slot < K)
    count = tl.load(flags + COUNT * KIND_WORDS + rank * LINE_WORDS, mask=inside, other=0)
    expert = tl.load(list_index + place * K + slot, mask=inside, other=-1) - my_rank * LOCAL
    return expert, token < count


@triton.jit
def count_from(
    look, flags, list_index, source, first, my_rank, max_tokens, R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    LOCAL: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As ``count_all``, with a look at the first block."""
    both = tl.zeros([2 * BINS], tl.int32)
    end = source * max_tokens + first
    for start in range(0, R * max_tokens * KP, BLOCK):
        expert, there = look
        place = (start + tl.arange(0, BLOCK)) // KP
        mine = there & (expert >= 0) & (expert < LOCAL)
        # One histogram of two halves.
        both += tl.histogram(tl.where(mine, expert, 0) + tl.where(place < end, 0, BINS), 2 * BINS, mask=mine)
        look = look_at_pairs(flags, list_index, start + BLOCK, my_rank, max_tokens, R, K, KP, LOCAL, BLOCK)
    both = tl.reshape(both, [2, BINS])
    before = tl.sum(tl.where(tl.arange(0, 2)[:, None] == 0, both, 0), 0)
    return tl.sum(both, 0), before


@triton.jit
def sum_histograms(histograms, num_chunks, chunk, BINS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Rows of each local expert: all, and those of the chunks before ``chunk``."""
    # Summed up over rows at the end, so that nothing but loads is in the loop.
    before = tl.zeros([AT_ONCE, BINS], tl.int32)
    total = tl.zeros([AT_ONCE, BINS], tl.int32)
    bins = tl.arange(0, BINS)
    for start in range(0, num_chunks, AT_ONCE):
        row = start + tl.arange(0, AT_ONCE)
        count = tl.load(histograms + row[:, None] * BINS + bins[None, :], mask=(row < num_chunks)[:, None], other=0)
        total += count
        before += tl.where((row < chunk)[:, None], count, 0)
    return tl.sum(total, 0), tl.sum(before, 0)


@triton.jit
def assign_rows(
    list_index, list_weights, pair_to_row, row_weights, next_row, source, first, end, capacity, my_rank, max_tokens,
    row_source, row_target, delta, K: tl.constexpr, KP: tl.constexpr, LOCAL: tl.constexpr, BINS: tl.constexpr,
    SUB: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Rows of the (token, slot) pairs of tokens ``first`` to ``end``, or that they have none here.

    ``next_row``: of each expert. UNITS > 0, the units of 16 bytes of a slot's row: no table of pairs is made, but where
    each row comes from, and the slot that its result goes to, counted in these units from the first one here.
    """
    bins = tl.arange(0, BINS)
    for start in range(first * KP, end * KP, SUB):
        pair = start + tl.arange(0, SUB)
        token, slot = pair // KP, pair % KP
        mask = (token < end) & (slot < K)
        expert, mine, named, place = _local_experts(
            list_index, source, token, slot, mask, my_rank, max_tokens, K, LOCAL
        )
        # Beside the look at the experts, where registers are left.
        EARLY: tl.constexpr = SUB <= 128
        if EARLY:
            weight = tl.load(list_weights + place, mask=mask)
        hit = ((expert[:, None] == bins[None, :]) & mine[:, None]).to(tl.int32)
        row = tl.sum(hit * (tl.cumsum(hit, 0) - 1 + next_row[None, :]), 1)
        next_row += tl.sum(hit, 0)
        elsewhere = named & (mine == 0)
        mine = mine & (row < capacity)
        if UNITS > 0:
            tl.store(row_source + row, source << TOKEN_BITS | token, mask=mine)
            tl.store(row_target + row, delta + (slot * max_tokens.to(tl.int64) + token) * UNITS, mask=mine)
        else:
            tl.store(pair_to_row + place, tl.where(mine, row, tl.where(elsewhere, ELSEWHERE, NOWHERE)), mask=mask)
        if not EARLY:
            weight = tl.load(list_weights + place, mask=mine)
        tl.store(row_weights + row, weight, mask=mine)


@triton.jit
def lay_out(total, capacity):
    """(first row of each expert, rows of each that fit, rows that are needed)."""
    blocks = (total + (ALIGN - 1)) // ALIGN
    ends = tl.cumsum(blocks, 0)
    starts = (ends - blocks) * ALIGN
    fit = tl.maximum(tl.minimum(total, capacity - starts), 0)
    return starts, fit, tl.sum(blocks, 0) * ALIGN


@triton.jit
def write_layout(
    total, capacity, counts, starts, sizes, flags, max_tokens, error, R: tl.constexpr, LANES: tl.constexpr,
    LOCAL: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    first, fit, needed = lay_out(total, capacity)
    bins = tl.arange(0, BINS)
    tl.store(counts + bins, fit.to(tl.int64), mask=bins < LOCAL)
    tl.store(starts + bins, tl.minimum(first, capacity).to(tl.int64), mask=bins < LOCAL)
    rank = tl.minimum(tl.arange(0, LANES), R - 1)
    tl.store(sizes + 1 + rank, count_of(flags, rank, max_tokens))
    tl.store(sizes, tl.minimum(needed, capacity))
    if needed > capacity:
        report(error, CAPACITY, needed, capacity, needed)


# ---------------------------------------------------------------- dispatch


@triton.jit
def _zero_padding(
    total, capacity, out_words, out_scales, scale_stride, row_weights, WORDS: tl.constexpr, SCALES: tl.constexpr,
    LOCAL: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, SCALE_COLS: tl.constexpr,
    FILL: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Zeros between each expert's last row and the next expert's first."""
    starts, _, _ = lay_out(total, capacity)
    bins = tl.arange(0, BINS)
    for expert in range(tl.program_id(0), LOCAL, tl.num_programs(0)):
        end = tl.sum(tl.where(bins == expert, starts + total, 0), 0)
        stop = tl.minimum((end + (ALIGN - 1)) // ALIGN * ALIGN, capacity)
        for start in range(end, stop, ROWS):
            row = start + tl.arange(0, ROWS)
            mask = row < stop
            row64 = row.to(tl.int64)
            if WEIGHTS:
                tl.store(row_weights + row, tl.zeros([ROWS], tl.float32), mask=mask)
            if FILL:
                for c in range(0, WORDS, COLS):
                    col = c + tl.arange(0, COLS)
                    zeros = tl.zeros([ROWS, COLS], tl.int32)
                    place = row64[:, None] * WORDS + col[None, :]
                    tl.store(out_words + place, zeros, mask=mask[:, None] & (col < WORDS)[None, :])
                if SCALES > 0:
                    group = tl.arange(0, SCALE_COLS)
                    place = group.to(tl.int64)[None, :] * scale_stride + row[:, None]
                    zeros = tl.zeros([ROWS, SCALE_COLS], tl.float32)
                    tl.store(out_scales + place, zeros, mask=mask[:, None] & (group < SCALES)[None, :])


@triton.jit(do_not_specialize=["n", "my_rank", "budget_ns", "num_experts", "max_tokens", "capacity", "scale_stride"])
def dispatch_kernel(
    x, x_stride, index, weights, n, flags, deltas, list_index, list_weights, rows, scales, words, state, error,
    budget_ns, my_rank, num_experts, max_tokens, min_amax, histograms, pair_to_row, counts, starts, sizes, row_weights,
    out_words, out_scales, scale_stride, capacity, R: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, LOCAL: tl.constexpr, BINS: tl.constexpr, H: tl.constexpr, WORDS: tl.constexpr,
    SCALES: tl.constexpr, FP8: tl.constexpr, LARGEST: tl.constexpr, STAGE: tl.constexpr, TABLE: tl.constexpr,
    MOVE: tl.constexpr, PADDING: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, SUB: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, SCALE_COLS: tl.constexpr, AHEAD: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """The rows of this rank's experts into ``out_words`` (and ``out_scales``, transposed).

    STAGE: inputs are staged here too; all programs must then run at once, since they wait for each other. TABLE: where
    the table of rows comes from. MOVE: rows are read; otherwise only the table is made. AHEAD: a chunk's rows are read
    at once, before it is known where they go. KEEP: that stays in registers. PADDING: it is zeroed.
    """
    pid, programs = tl.program_id(0), tl.num_programs(0)
    everyone = begin(deltas, R, LANES)
    epoch = epochs_ended(state + DISPATCHES) + 1
    combines = epochs_ended(state + COMBINES)
    if STAGE:
        memory = (flags, deltas, list_index, list_weights, rows, scales)
        stage_and_meet(
            x, x_stride, index, weights, n, memory, everyone, state, error, budget_ns, my_rank, num_experts, max_tokens,
            epoch, min_amax, R, LANES, K, H, FP8, LARGEST, MOVE, TABLE != REUSED, GROUPS,
        )  # fmt: skip
    elif TABLE != COUNTED_BEFORE:
        if pid == 0:
            tell_count(flags, everyone, n, my_rank, LANES)
            publish(flags, everyone, READY, epoch, my_rank, LANES)
        wait_all(flags, READY, epoch, error, budget_ns, R, LANES)

    per_rank = tl.cdiv(max_tokens, CHUNK)
    num_chunks = R * per_rank
    total = tl.zeros([BINS], tl.int32)
    # At least one turn: every program needs the totals.
    for turn in range(pid, tl.maximum(num_chunks, pid + 1), programs):
        source = (my_rank + 1 + turn % R) % R
        first = turn // R * CHUNK
        if AHEAD:
            # The tokens come while rows are counted.
            token = first + tl.arange(0, ROWS)
            delta = tl.load(deltas + source)
            needed = is_needed(list_index, source, token, my_rank, max_tokens, K, LOCAL)
            look = look_at_pairs(flags, list_index, 0, my_rank, max_tokens, R, K, KP, LOCAL, BLOCK)
            end = tl.minimum(first + CHUNK, count_of(flags, source, max_tokens))
            needed = needed & (token < end)
            values = read_words(words, delta, token, needed, 0, WORDS, COLS)
            if SCALES > 0:
                row_scales = read_scales(scales, delta, token, needed, SCALES, SCALE_COLS)
            total, before = count_from(
                look, flags, list_index, source, first, my_rank, max_tokens, R, K, KP, LOCAL, BINS, BLOCK
            )
        elif TABLE == REUSED:
            end = tl.minimum(first + CHUNK, tl.load(sizes + 1 + source))
        else:
            end = tl.minimum(first + CHUNK, count_of(flags, source, max_tokens))
            if TABLE == COUNTED_HERE:
                total, before = count_all(
                    flags, list_index, source, first, my_rank, max_tokens, R, K, KP, LOCAL, BINS, BLOCK
                )
            else:
                total, before = sum_histograms(histograms, num_chunks, source * per_rank + turn // R, BINS, 64)
        if TABLE != REUSED:
            first_row, _, _ = lay_out(total, capacity)
            assign_rows(
                list_index, list_weights, pair_to_row, row_weights, first_row + before, source, first, end, capacity,
                my_rank, max_tokens, pair_to_row, pair_to_row, 0, K, KP, LOCAL, BINS, SUB, 0,
            )  # fmt: skip
            # Other threads of this program read the table next.
            tl.debug_barrier()
        table = pair_to_row + source.to(tl.int64) * max_tokens * K
        if AHEAD:
            mask = token < end
            rows_here, _ = rows_of(table, token, mask, K)
            write_words(values, rows_here, table, token, mask, out_words, 0, WORDS, K, COLS, KEEP)
            if SCALES > 0:
                write_scales(
                    row_scales, rows_here, table, token, mask, out_scales, scale_stride, SCALES, K, SCALE_COLS, KEEP
                )
        elif MOVE:
            pull(
                words, scales, tl.load(deltas + source), table, out_words, out_scales, scale_stride, first, end, WORDS,
                SCALES, K, ROWS, COLS, SCALE_COLS, KEEP,
            )  # fmt: skip
        if TABLE != REUSED:
            if turn == 0:
                write_layout(total, capacity, counts, starts, sizes, flags, max_tokens, error, R, LANES, LOCAL, BINS)
    if PADDING:
        if TABLE == REUSED:
            bins = tl.arange(0, BINS)
            total = tl.load(counts + bins, mask=bins < LOCAL, other=0).to(tl.int32)
        _zero_padding(
            total, capacity, out_words, out_scales, scale_stride, row_weights, WORDS, SCALES, LOCAL, BINS, ROWS, COLS,
            SCALE_COLS, MOVE, TABLE != REUSED,
        )  # fmt: skip
    if pid == 0:
        # Those that are READY.
        tl.store(state + COMBINES_SEEN, combines)
    end_program(state + DISPATCHES)
