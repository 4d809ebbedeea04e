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
    arrive,
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
def _unit(
    pair_to_row, sizes, unit, end, my_rank, max_tokens, R: tl.constexpr, K: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """(rank, token, piece, rows of its slots) of a unit of what is written; links are busy by turns."""
    turn = unit // PIECES
    source = (my_rank + 1 + turn % (R - 1)) % R
    token = (turn // (R - 1)).to(tl.int64)
    tokens = tl.load(sizes + 1 + source)
    rows = ()
    for k in tl.static_range(K):
        row = tl.load(pair_to_row + (source.to(tl.int64) * max_tokens + token) * K + k, mask=unit < end, other=-1)
        # Beyond a rank's tokens anything may be in the table.
        rows = rows + (tl.where(token < tokens, row, -1),)
    return source, token, unit % PIECES, rows


@triton.jit
def _read_unit(words, piece, rows, WORDS: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr):
    col = piece * COLS + tl.arange(0, COLS)
    values = ()
    for k in tl.static_range(K):
        row = rows[k]
        values = values + (tl.load(words + row.to(tl.int64) * WORDS + col, mask=(row >= 0) & (col < WORDS)),)
    return values


@triton.jit
def _write_unit(
    values, slots, deltas, source, token, piece, rows, max_tokens, WORDS: tl.constexpr, K: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    col = piece * COLS + tl.arange(0, COLS)
    target = peer(slots, tl.load(deltas + source), 4) + token * WORDS
    for k in tl.static_range(K):
        place = k * max_tokens.to(tl.int64) * WORDS + col
        tl.store(target + place, values[k], mask=(rows[k] >= 0) & (col < WORDS))


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
def _piece_of(turn, n, H: tl.constexpr, COLS: tl.constexpr):
    """(token, columns, which of them there are) of a turn of the sums."""
    pieces: tl.constexpr = (H + COLS - 1) // COLS
    token = (turn // pieces).to(tl.int64)
    col = turn % pieces * COLS + tl.arange(0, COLS)
    return token, col, (col < H) & (token < n)


@triton.jit
def _read_near(
    turn, n, rows, index, pair_to_row, my_rank, num_experts, max_tokens, H: tl.constexpr, K: tl.constexpr,
    FROM_SLOTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Where the results of a turn are, and those of own experts."""
    token, col, inside = _piece_of(turn, n, H, COLS)
    places = _slots_of(token, n, index, pair_to_row, my_rank, num_experts, max_tokens, K, FROM_SLOTS)
    values = ()
    if not FROM_SLOTS:
        for k in tl.static_range(K):
            row = places[k]
            near = tl.load(rows + tl.maximum(row, 0).to(tl.int64) * H + col, mask=inside & (row >= 0), other=0.0)
            values = values + (near,)
    return places, values


@triton.jit
def _read_far(
    turn, n, slots, near, max_tokens, H: tl.constexpr, K: tl.constexpr, FROM_SLOTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """All results of a turn."""
    token, col, inside = _piece_of(turn, n, H, COLS)
    places, values = near
    out = ()
    for k in tl.static_range(K):
        far = slots + (k * max_tokens.to(tl.int64) + token) * H + col
        mask = inside & (places[k] == ELSEWHERE)
        if FROM_SLOTS:
            out = out + (tl.load(far, mask=mask, other=0.0),)
        else:
            out = out + (tl.load(far, mask=mask, other=values[k]),)
    return out


@triton.jit
def _write_sum(turn, n, values, out, out_stride, H: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr):
    """fp32 sums in ascending order of slots."""
    token, col, inside = _piece_of(turn, n, H, COLS)
    total = tl.zeros([COLS], tl.float32)
    for k in tl.static_range(K):
        total += values[k].to(tl.float32)
    tl.store(out + token * out_stride + col, total.to(out.dtype.element_ty), mask=inside)


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
    LANES: tl.constexpr, K: tl.constexpr, H: tl.constexpr, WORDS: tl.constexpr, MOVE: tl.constexpr,
    WEIGHTS: tl.constexpr, FROM_SLOTS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, COLS: tl.constexpr,
    SUM_TOKENS: tl.constexpr, SUM_COLS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Rows (MOVE) and one number of each (WEIGHTS) back to their tokens; all programs must run at once.

    The first ``pushers`` programs write, the others begin to sum. STEPS: in which results are announced; with one, all
    programs write. AHEAD: so many turns of a program's sums read own rows before others' have come, and their slots
    together; with one step only. FROM_SLOTS: the launch before has written all rows into their slots; the dispatch that
    it is part of ends here too, and programs need not run at once.
    """
    pid, programs = tl.program_id(0), tl.num_programs(0)
    everyone = begin(deltas, R, LANES)
    epoch = epochs_ended(state + COMBINES) + 1
    dispatches = epochs_ended(state + DISPATCHES)
    PUSHED: tl.constexpr = MOVE and R > 1
    PIECES: tl.constexpr = (WORDS + COLS - 1) // COLS
    if FROM_SLOTS:
        if pid == 0:
            publish(flags, everyone, SCATTERED, _announced(epoch, 0, 1), my_rank, LANES)
    else:
        most = _most_tokens(sizes, R)
        if PUSHED:
            # What is written next has come by then, and which rows are after that is known.
            units = tl.where(pid < pushers, most * (PIECES * (R - 1)), 0)
            source, token, piece, rows_0 = _unit(pair_to_row, sizes, pid, units, my_rank, max_tokens, R, K, PIECES)
            source_1, token_1, piece_1, rows_1 = _unit(
                pair_to_row, sizes, pid + pushers, units, my_rank, max_tokens, R, K, PIECES
            )
            values = _read_unit(words, piece, rows_0, WORDS, K, COLS)
        # Everyone has summed what lies there from the combine before.
        wait_until_ended(
            COMBINES_SEEN, REDUCED, epoch - 1, 0, flags, everyone, state, error, budget_ns, my_rank, R, LANES
        )
    if (not FROM_SLOTS) and pid < pushers:
        first = most * 0
        unit = pid
        for step in range(STEPS):
            end = _end_of(step, most, STEPS)
            if PUSHED:
                while unit < end * (PIECES * (R - 1)):
                    source_2, token_2, piece_2, rows_2 = _unit(
                        pair_to_row, sizes, unit + 2 * pushers, units, my_rank, max_tokens, R, K, PIECES
                    )
                    values_1 = _read_unit(words, piece_1, rows_1, WORDS, K, COLS)
                    _write_unit(values, slot_words, deltas, source, token, piece, rows_0, max_tokens, WORDS, K, COLS)
                    source, token, piece, rows_0, values = source_1, token_1, piece_1, rows_1, values_1
                    source_1, token_1, piece_1, rows_1 = source_2, token_2, piece_2, rows_2
                    unit += pushers
            if WEIGHTS:
                _push_weights(
                    row_weights, slot_weights, deltas, pair_to_row, sizes, first, end, pushers, max_tokens, R, K, BLOCK
                )
            if STEPS == 1:
                arrive(flags, everyone, SCATTERED, SCATTERED_STEPS, pushers, my_rank, R, LANES)
            elif is_last(state + SCATTERED_TICKETS + step, pushers):
                publish(flags, everyone, SCATTERED, _announced(epoch, step, STEPS), my_rank, LANES)
            first = end

    if FROM_SLOTS or STEPS == 1:
        pieces: tl.constexpr = (H + SUM_COLS - 1) // SUM_COLS
        near = ()
        if MOVE:
            # Where results are, and those of own experts, while others come.
            for turn in tl.static_range(AHEAD):
                near = near + (
                    _read_near(
                        pid + turn * programs, n, rows, index, pair_to_row, my_rank, num_experts, max_tokens, H, K,
                        FROM_SLOTS, SUM_COLS,
                    ),
                )  # fmt: skip
        wait_all(flags, SCATTERED, _announced(epoch, 0, 1), error, budget_ns, R, LANES)
        if MOVE:
            values = ()
            for turn in tl.static_range(AHEAD):
                values = values + (
                    _read_far(pid + turn * programs, n, slots, near[turn], max_tokens, H, K, FROM_SLOTS, SUM_COLS),
                )
            for turn in tl.static_range(AHEAD):
                _write_sum(pid + turn * programs, n, values[turn], out, out_stride, H, K, SUM_COLS)
            for turn in range(pid + AHEAD * programs, n * pieces, programs):
                _sum(
                    turn // pieces, n, rows, slots, out, out_stride, index, pair_to_row, turn % pieces,
                    my_rank, num_experts, max_tokens, H, K, FROM_SLOTS, 1, SUM_COLS,
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
        tl.store(state + DISPATCHES_SEEN, dispatches + (1 if FROM_SLOTS else 0))
    if FROM_SLOTS:
        end_program(state + DISPATCHES)
    end_program(state + COMBINES)
