"""Triton kernel of the combine: the experts' results back to their tokens, within one NVLink domain. For GPUs only.

Every rank writes its experts' rows into the slots at the rank of their token, raises SCATTERED, waits for all, and sums
its slots; rows of its own experts it reads where they are. Slots are written anew when all ranks have summed them: see
``triton_flags``. After a mega-kernel, which has written all rows into slots, the sum alone is left.

Many tokens are announced in STEPS: while some programs write, others sum what has come, and then all do.

Names: as in ``triton_dispatch``; slots are ``[K, max_tokens, H]``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.kernels import flag_words
from megamoe.kernels.triton_flags import (
    COMBINES,
    COMBINES_SEEN,
    DISPATCHES,
    DISPATCHES_SEEN,
    NEXT_TOKENS,
    REDUCED,
    SCATTERED,
    SCATTERED_STEPS,
    SCATTERED_TICKETS,
    SUMMED_TICKET,
    begin,
    end_program,
    epochs_ended,
    is_last,
    peer,
    publish,
    wait_all,
    wait_until_ended,
)

ELSEWHERE = tl.constexpr(flag_words.ELSEWHERE)
NOWHERE = tl.constexpr(flag_words.NOWHERE)


@triton.jit
def _end_of(step, tokens, STEPS: tl.constexpr):
    """How many tokens of any rank are announced by ``step``: ever fewer more, as the last are summed while all wait."""
    left = STEPS - 1 - step
    return (tokens - tokens.to(tl.int64) * left * left // (STEPS * STEPS)).to(tl.int32)


@triton.jit
def _announced(epoch, step, STEPS: tl.constexpr):
    return (epoch - 1) * SCATTERED_STEPS + (step + 1) * (SCATTERED_STEPS // STEPS)


@triton.jit
def _most_tokens(sizes, R: tl.constexpr):
    """Of any rank: the same on all of them."""
    most = tl.load(sizes + 1)
    for r in tl.static_range(1, R):
        most = tl.maximum(most, tl.load(sizes + 1 + r))
    return most


@triton.jit
def _rows_to_push(pair_to_row, sizes, turn, my_rank, max_tokens, R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    """(source rank, token, rows of its slots) of a turn; links are busy by turns."""
    source = (my_rank + 1 + turn % (R - 1)) % R
    token = (turn // (R - 1)).to(tl.int64)
    slot = tl.arange(0, KP)
    mask = (slot < K) & (token < tl.load(sizes + 1 + source))
    place = (source.to(tl.int64) * max_tokens + token) * K + slot
    return source, token, tl.load(pair_to_row + place, mask=mask, other=-1)


@triton.jit
def _push(
    words, slots, deltas, pair_to_row, sizes, first, end, pushers, my_rank, max_tokens, R: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, WORDS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The rows of other ranks' tokens ``first`` to ``end`` into the slots there, a token at a time."""
    slot = tl.arange(0, KP)
    start = first * (R - 1) + tl.program_id(0)
    source, token, row = _rows_to_push(pair_to_row, sizes, start, my_rank, max_tokens, R, K, KP)
    for turn in range(start, end * (R - 1), pushers):
        # Which rows are next is known by the time that these have come.
        after = tl.minimum(turn + pushers, end * (R - 1) - 1)
        following = _rows_to_push(pair_to_row, sizes, after, my_rank, max_tokens, R, K, KP)
        move = (row >= 0)[:, None]
        target = peer(slots, tl.load(deltas + source), 4)
        place = (slot * max_tokens.to(tl.int64) + token)[:, None] * WORDS
        for c in range(0, WORDS, COLS):
            col = (c + tl.arange(0, COLS))[None, :]
            inside = move & (col < WORDS)
            value = tl.load(words + row.to(tl.int64)[:, None] * WORDS + col, mask=inside)
            tl.store(target + place + col, value, mask=inside)
        source, token, row = following


@triton.jit
def _push_weights(
    row_weights, slot_weights, deltas, pair_to_row, sizes, first, end, pushers, max_tokens, R: tl.constexpr,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One number of every row of tokens ``first`` to ``end`` into its (token, slot) at the token's rank."""
    blocks = tl.cdiv((end - first) * K, BLOCK)
    for turn in range(tl.program_id(0), R * blocks, pushers):
        source = turn // blocks
        pair = first * K + (turn % blocks) * BLOCK + tl.arange(0, BLOCK)
        mask = pair < tl.minimum(end, tl.load(sizes + 1 + source)) * K
        row = tl.load(pair_to_row + source.to(tl.int64) * max_tokens * K + pair, mask=mask, other=-1)
        value = tl.load(row_weights + row, mask=row >= 0)
        tl.store(peer(slot_weights, tl.load(deltas + source), 4) + pair, value, mask=row >= 0)


@triton.jit
def _slots_of(
    token, n, index, pair_to_row, my_rank, num_experts, max_tokens, K: tl.constexpr, FROM_SLOTS: tl.constexpr,
):  # fmt: skip
    """Where the results of a token's slots are, one number for each: a row here, or as in a table of pairs."""
    out = ()
    for k in tl.static_range(K):
        if FROM_SLOTS:
            expert = tl.load(index + token * K + k, mask=token < n, other=-1)
            out = out + (tl.where((expert >= 0) & (expert < num_experts), ELSEWHERE, NOWHERE),)
        else:
            place = (my_rank.to(tl.int64) * max_tokens + token) * K + k
            out = out + (tl.load(pair_to_row + place, mask=token < n, other=NOWHERE),)
    return out


@triton.jit
def _sum(
    first, n, rows, slots, out, out_stride, index, pair_to_row, piece, my_rank, num_experts, max_tokens,
    H: tl.constexpr, K: tl.constexpr, FROM_SLOTS: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """fp32 sums of the slots of tokens from ``first`` on, in ascending order. FROM_SLOTS: rows of own experts too."""
    col = piece * COLS + tl.arange(0, COLS)
    inside = col < H
    places = ()
    for t in tl.static_range(TOKENS):
        token = (first + t).to(tl.int64)
        places = places + (_slots_of(token, n, index, pair_to_row, my_rank, num_experts, max_tokens, K, FROM_SLOTS),)
    for t in tl.static_range(TOKENS):
        token = (first + t).to(tl.int64)
        total = tl.zeros([COLS], tl.float32)
        for k in tl.static_range(K):
            row = places[t][k]
            far = slots + (k * max_tokens.to(tl.int64) + token) * H
            start = far if FROM_SLOTS else tl.where(row >= 0, rows + tl.maximum(row, 0).to(tl.int64) * H, far)
            total += tl.load(start + col, mask=inside & (row != NOWHERE), other=0.0).to(tl.float32)
        tl.store(out + token * out_stride + col, total.to(out.dtype.element_ty), mask=inside & (token < n))


@triton.jit
def _take_weights(slot_weights, out, index, first, end, num_experts, K: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(first * K, end * K, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        mask = pair < end * K
        expert = tl.load(index + pair, mask=mask, other=-1)
        sent = (expert >= 0) & (expert < num_experts)
        tl.store(out + pair, tl.load(slot_weights + pair, mask=sent, other=0.0), mask=mask)


@triton.jit(do_not_specialize=["n", "my_rank", "budget_ns", "num_experts", "max_tokens", "pushers"])
def combine_kernel(
    rows, words, row_weights, index, n, flags, deltas, slots, slot_words, slot_weights, state, error, budget_ns,
    my_rank, num_experts, max_tokens, pair_to_row, sizes, out, out_stride, out_weights, pushers, R: tl.constexpr,
    LANES: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, H: tl.constexpr, WORDS: tl.constexpr, MOVE: tl.constexpr,
    WEIGHTS: tl.constexpr, FROM_SLOTS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, COLS: tl.constexpr,
    SUM_TOKENS: tl.constexpr, SUM_COLS: tl.constexpr,
):  # fmt: skip
    """Rows (MOVE) and one number of each (WEIGHTS) back to their tokens; all programs must run at once.

    The first ``pushers`` programs write, the others begin to sum. FROM_SLOTS: the launch before has written all rows
    into their slots; the dispatch that it is part of ends here too, and programs need not run at once.
    """
    pid, programs = tl.program_id(0), tl.num_programs(0)
    everyone = begin(deltas, R, LANES)
    epoch = epochs_ended(state + COMBINES) + 1
    if FROM_SLOTS:
        if pid == 0:
            publish(flags, everyone, SCATTERED, _announced(epoch, 0, 1), my_rank, LANES)
    else:
        # Everyone has summed what lies there from the combine before.
        wait_until_ended(
            COMBINES_SEEN, REDUCED, epoch - 1, 0, flags, everyone, state, error, budget_ns, my_rank, R, LANES
        )
    if (not FROM_SLOTS) and pid < pushers:
        most = _most_tokens(sizes, R)
        first = most * 0
        for step in range(STEPS):
            end = _end_of(step, most, STEPS)
            if MOVE and R > 1:
                _push(
                    words, slot_words, deltas, pair_to_row, sizes, first, end, pushers, my_rank, max_tokens, R, K, KP,
                    WORDS, COLS,
                )  # fmt: skip
            if WEIGHTS:
                _push_weights(
                    row_weights, slot_weights, deltas, pair_to_row, sizes, first, end, pushers, max_tokens, R, K, BLOCK
                )
            if is_last(state + SCATTERED_TICKETS + step, pushers):
                publish(flags, everyone, SCATTERED, _announced(epoch, step, STEPS), my_rank, LANES)
            first = end

    if FROM_SLOTS or STEPS == 1:
        wait_all(flags, SCATTERED, _announced(epoch, 0, 1), error, budget_ns, R, LANES)
        pieces: tl.constexpr = (H + SUM_COLS - 1) // SUM_COLS
        if MOVE:
            for turn in range(pid, tl.cdiv(n, SUM_TOKENS) * pieces, programs):
                _sum(
                    turn // pieces * SUM_TOKENS, n, rows, slots, out, out_stride, index, pair_to_row, turn % pieces,
                    my_rank, num_experts, max_tokens, H, K, FROM_SLOTS, SUM_TOKENS, SUM_COLS,
                )  # fmt: skip
        if WEIGHTS:
            share = tl.cdiv(n, programs)
            first = tl.minimum(pid * share, n)
            _take_weights(slot_weights, out_weights, index, first, tl.minimum(first + share, n), num_experts, K, BLOCK)
    else:
        most = _most_tokens(sizes, R)
        step = pid * 0
        end = _end_of(step, most, STEPS)
        wait_all(flags, SCATTERED, _announced(epoch, step, STEPS), error, budget_ns, R, LANES)
        first = tl.atomic_add(state + NEXT_TOKENS, SUM_TOKENS, sem="relaxed", scope="gpu").to(tl.int32)
        while first < n:
            last = tl.minimum(first + SUM_TOKENS, n)
            if end < last:
                # After a failed wait nothing is certain, not even that all tokens are announced.
                while (end < last) & (step < STEPS - 1):
                    step += 1
                    end = _end_of(step, most, STEPS)
                wait_all(flags, SCATTERED, _announced(epoch, step, STEPS), error, budget_ns, R, LANES)
            if MOVE:
                for piece in range((H + SUM_COLS - 1) // SUM_COLS):
                    _sum(
                        first, n, rows, slots, out, out_stride, index, pair_to_row, piece, my_rank, num_experts,
                        max_tokens, H, K, FROM_SLOTS, SUM_TOKENS, SUM_COLS,
                    )  # fmt: skip
            if WEIGHTS:
                _take_weights(slot_weights, out_weights, index, first, last, num_experts, K, BLOCK)
            first = tl.atomic_add(state + NEXT_TOKENS, SUM_TOKENS, sem="relaxed", scope="gpu").to(tl.int32)
        if is_last(state + SUMMED_TICKET, programs):
            # For the next launch.
            tl.store(state + NEXT_TOKENS, tl.zeros([], tl.int64))

    if pid == programs - 1:
        # Those before the combine that all have come to; a mega-kernel's own dispatch has ended with it.
        tl.store(state + DISPATCHES_SEEN, epochs_ended(state + DISPATCHES) + (1 if FROM_SLOTS else 0))
    if FROM_SLOTS:
        end_program(state + DISPATCHES)
    end_program(state + COMBINES)
