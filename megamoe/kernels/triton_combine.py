"""Triton kernels of the combine: the experts' results back to their tokens, within one NVLink domain. For GPUs only.

Every rank writes its experts' rows into the slots at the rank of their token, raises SCATTERED, waits for all, and sums
its slots; rows of its own experts it reads where they are. The first kernel tells all ranks which movements have ended
here: only then do they write anew. After a mega-kernel, which has written all rows into slots, the sum alone is left.

Names: as in ``triton_dispatch``; slots are ``[K, max_tokens, H]``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.kernels.triton_flags import (
    COMBINES,
    DISPATCHES,
    REDUCED,
    SCATTERED,
    SCATTERED_TICKET,
    end_program,
    epochs_ended,
    is_last,
    peer,
    publish,
    publish_ended,
    wait_all,
)


@triton.jit
def _push(
    words, slots, deltas, pair_to_row, sizes, my_rank, max_tokens, R: tl.constexpr, K: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The rows of other ranks' tokens into the slots there."""
    for turn in range(tl.program_id(0), (R - 1) * tl.cdiv(max_tokens, ROWS), tl.num_programs(0)):
        source = (my_rank + 1 + turn % (R - 1)) % R
        first = turn // (R - 1) * ROWS
        end = tl.load(sizes + 1 + source)
        if first < end:
            token = (first + tl.arange(0, ROWS)).to(tl.int64)
            mask = token < end
            target = peer(slots, tl.load(deltas + source), 4)
            for k in range(K):
                row = tl.load(pair_to_row + (source.to(tl.int64) * max_tokens + token) * K + k, mask=mask, other=-1)
                move = (row >= 0)[:, None]
                for c in range(0, WORDS, COLS):
                    col = c + tl.arange(0, COLS)
                    inside = move & (col < WORDS)[None, :]
                    value = tl.load(words + row.to(tl.int64)[:, None] * WORDS + col[None, :], mask=inside)
                    place = (k * max_tokens.to(tl.int64) + token)[:, None] * WORDS + col[None, :]
                    tl.store(target + place, value, mask=inside)


@triton.jit
def _push_weights(
    row_weights, slot_weights, deltas, pair_to_row, sizes, max_tokens, R: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One number of every row into its (token, slot) at the token's rank."""
    per_rank = tl.cdiv(max_tokens * K, BLOCK)
    for turn in range(tl.program_id(0), R * per_rank, tl.num_programs(0)):
        source = turn // per_rank
        pair = (turn % per_rank) * BLOCK + tl.arange(0, BLOCK)
        mask = pair < tl.load(sizes + 1 + source) * K
        row = tl.load(pair_to_row + source.to(tl.int64) * max_tokens * K + pair, mask=mask, other=-1)
        value = tl.load(row_weights + row, mask=row >= 0)
        tl.store(peer(slot_weights, tl.load(deltas + source), 4) + pair, value, mask=row >= 0)


@triton.jit
def _reduce(
    rows, slots, out, out_stride, index, n, pair_to_row, my_rank, num_experts, max_tokens, H: tl.constexpr,
    K: tl.constexpr, LOCAL: tl.constexpr, FROM_SLOTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """fp32 sums of each token's slots, in ascending order. FROM_SLOTS: the rows of own experts are in slots too."""
    pieces: tl.constexpr = (H + COLS - 1) // COLS
    for turn in range(tl.program_id(0), tl.cdiv(n, ROWS) * pieces, tl.num_programs(0)):
        token = (turn // pieces * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        col = (turn % pieces) * COLS + tl.arange(0, COLS)
        mask = token < n
        inside = (col < H)[None, :]
        total = tl.zeros([ROWS, COLS], tl.float32)
        for k in tl.static_range(K):
            expert = tl.load(index + token * K + k, mask=mask, other=-1)
            there = (expert >= 0) & (expert < num_experts)
            if not FROM_SLOTS:
                row = tl.load(pair_to_row + (my_rank.to(tl.int64) * max_tokens + token) * K + k, mask=mask, other=-1)
                here = expert // LOCAL == my_rank
                there = there & (here == 0)
            place = (k * max_tokens.to(tl.int64) + token)[:, None] * H + col[None, :]
            far = tl.load(slots + place, mask=there[:, None] & inside, other=0.0)
            if FROM_SLOTS:
                total += far.to(tl.float32)
            else:
                place = row.to(tl.int64)[:, None] * H + col[None, :]
                near = tl.load(rows + place, mask=(row >= 0)[:, None] & inside, other=0.0)
                total += near.to(tl.float32) + far.to(tl.float32)
        place = token[:, None] * out_stride + col[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=mask[:, None] & inside)


@triton.jit
def _take_weights(slot_weights, out, index, n, num_experts, K: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n * K, tl.num_programs(0) * BLOCK):
        pair = start + tl.arange(0, BLOCK)
        mask = pair < n * K
        expert = tl.load(index + pair, mask=mask, other=-1)
        sent = (expert >= 0) & (expert < num_experts)
        tl.store(out + pair, tl.load(slot_weights + pair, mask=sent, other=0.0), mask=mask)


@triton.jit(do_not_specialize=["n", "my_rank", "budget_ns", "num_experts", "max_tokens"])
def combine_kernel(
    rows, words, row_weights, index, n, flags, deltas, slots, slot_words, slot_weights, state, error, budget_ns,
    my_rank, num_experts, max_tokens, pair_to_row, sizes, out, out_stride, out_weights, R: tl.constexpr,
    LANES: tl.constexpr, K: tl.constexpr, LOCAL: tl.constexpr, H: tl.constexpr, WORDS: tl.constexpr,
    PUSH: tl.constexpr, REDUCE: tl.constexpr, MOVE: tl.constexpr, WEIGHTS: tl.constexpr, FROM_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, SUM_ROWS: tl.constexpr, SUM_COLS: tl.constexpr,
):  # fmt: skip
    """Rows (MOVE) and one number of each (WEIGHTS) back to their tokens.

    PUSH and REDUCE: in one launch, whose programs must then all run at once, or in two. FROM_SLOTS, instead of PUSH:
    the launch before has written all rows into their slots, and the dispatch that it is part of ends here too.
    """
    epoch = epochs_ended(state + COMBINES) + 1
    if PUSH:
        if tl.program_id(0) == tl.num_programs(0) - 1:
            publish_ended(flags, deltas, state, my_rank, R, LANES)
        # Everyone has summed what lies there from the combine before.
        wait_all(flags, REDUCED, epoch - 1, error, budget_ns, R, LANES)
        if MOVE and R > 1:
            _push(words, slot_words, deltas, pair_to_row, sizes, my_rank, max_tokens, R, K, WORDS, ROWS, COLS)
        if WEIGHTS:
            _push_weights(row_weights, slot_weights, deltas, pair_to_row, sizes, max_tokens, R, K, BLOCK)
        if is_last(state + SCATTERED_TICKET, tl.num_programs(0)):
            publish(flags, deltas, SCATTERED, epoch, my_rank, R, LANES)
    if FROM_SLOTS:
        if tl.program_id(0) == 0:
            publish(flags, deltas, SCATTERED, epoch, my_rank, R, LANES)
    if REDUCE:
        wait_all(flags, SCATTERED, epoch, error, budget_ns, R, LANES)
        if MOVE:
            _reduce(
                rows, slots, out, out_stride, index, n, pair_to_row, my_rank, num_experts, max_tokens, H, K, LOCAL,
                FROM_SLOTS, SUM_ROWS, SUM_COLS,
            )  # fmt: skip
        if WEIGHTS:
            _take_weights(slot_weights, out_weights, index, n, num_experts, K, BLOCK)
        if FROM_SLOTS:
            end_program(state + DISPATCHES)
        end_program(state + COMBINES)
