"""Flags between ranks, in Triton: epochs that only grow, one writer each, in symmetric memory.

A movement of rows is numbered by an epoch, counted on the device so that CUDA graphs replay. A flag holds the epoch
that its writer has reached, times 1 << EPOCH_BITS; a reader waits for "at least". So no flag is ever cleared, and late
readers are no hazard. One program raises a flag (``publish``), or several add a share each (``arrive``): only all
shares make an epoch. Where programs may be an epoch apart, as in the steps of a combine, one's next share would pass
for another's: there the last one to come, by a ticket, raises the flag for all.

A rank that has raised a flag has ended all launches before that one. So what a dispatch leaves to be read may be
written anew after a combine without further ado, and the other way round; two of a kind in a row need a flag for that.

Memory order: writers' threads meet at a barrier, then one warp stores or adds with release at system scope; the first
warp of a reader polls with acquire at system scope, and all meet at a barrier. Needs triton: import it on GPUs only.

Waits end after ``budget_ns``: the error word then says which wait it was, for whom, and what it saw. A kernel whose
wait has failed goes on, within bounds, over whatever it finds; later waits see the error word and return at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.kernels import flag_words

READY = tl.constexpr(flag_words.READY)
PULLED = tl.constexpr(flag_words.PULLED)
SCATTERED = tl.constexpr(flag_words.SCATTERED)
REDUCED = tl.constexpr(flag_words.REDUCED)
BARRIER = tl.constexpr(flag_words.BARRIER)
COUNT = tl.constexpr(flag_words.COUNT)
LINE_WORDS = tl.constexpr(flag_words.LINE_WORDS)
KIND_WORDS = tl.constexpr(flag_words.KIND_WORDS)
DISPATCHES = tl.constexpr(flag_words.DISPATCHES)
COMBINES = tl.constexpr(flag_words.COMBINES)
BARRIERS = tl.constexpr(flag_words.BARRIERS)
EPOCH_BITS = tl.constexpr(flag_words.EPOCH_BITS)
SUMMED_TICKET = tl.constexpr(flag_words.SUMMED_TICKET)
DISPATCHES_SEEN = tl.constexpr(flag_words.DISPATCHES_SEEN)
COMBINES_SEEN = tl.constexpr(flag_words.COMBINES_SEEN)
NEXT_TOKENS = tl.constexpr(flag_words.NEXT_TOKENS)
SCATTERED_TICKETS = tl.constexpr(flag_words.SCATTERED_TICKETS)
SCATTERED_STEPS = tl.constexpr(flag_words.SCATTERED_STEPS)
CAPACITY = tl.constexpr(flag_words.CAPACITY)


@triton.jit
def _load_acquire(pointers):
    """By the first warp; the others see what ends every wait: fewer look at the flags, and empty the SM's L1."""
    return tl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.lt.u32 p, t, 32; mov.b64 $0, 9223372036854775807;
        @p ld.acquire.sys.global.b64 $0, [$1]; }""",
        "=&l,l,~{memory}",
        [pointers],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _now(like):
    """Nanoseconds, one value per element of ``like``: a reduction over them is the same for a whole warp."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,l", [like], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _ranks(RANKS: tl.constexpr, LANES: tl.constexpr):
    # Spare lanes repeat the last rank.
    return tl.minimum(tl.arange(0, LANES), RANKS - 1)


@triton.jit
def _of_lane_0(condition):
    """One lane's answer for its warp: lanes that load the same flag at once might still see different values."""
    answer = tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;",
        "=r,r",
        [condition.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    return answer != 0


@triton.jit
def report(error, PHASE: tl.constexpr, first, second, third):
    """Sets the error word, unless it is set."""
    # No barrier is in here: of a program's warps only some may have come.
    tl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b64 old;
        atom.relaxed.gpu.global.cas.b64 old, [$1], 0, $2; setp.eq.u64 p, old, 0;
        @p st.relaxed.gpu.global.b64 [$1+8], $3; @p st.relaxed.gpu.global.b64 [$1+16], $4;
        @p st.relaxed.gpu.global.b64 [$1+24], $5; mov.u32 $0, 0; }""",
        "=r,l,l,l,l,l,~{memory}",
        [error, tl.full([], PHASE, tl.int64), first.to(tl.int64), second.to(tl.int64), third.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def begin(deltas, R: tl.constexpr, LANES: tl.constexpr):
    """The first of a program: the launch before has ended, and the next one may take up idle SMs already.

    Returns the distance to every rank's memory, a lane for each, for ``publish``.
    """
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;",
        "=r,~{memory}",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    return tl.load(deltas + _ranks(R, LANES))


@triton.jit
def _load_relaxed(pointer):
    return tl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b64 $0, [$1];", "=l,l,~{memory}", [pointer], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def wait_all(flags, KIND: tl.constexpr, epoch, error, budget_ns, RANKS: tl.constexpr, LANES: tl.constexpr):
    """Wait until every rank's flag has reached ``epoch``; what they wrote before may be read afterwards."""
    rank = _ranks(RANKS, LANES)
    epoch = epoch.to(tl.int64) << EPOCH_BITS
    pointers = flags + KIND * KIND_WORDS + rank * LINE_WORDS
    seen = _load_acquire(pointers)
    # The lanes of a warp never part: they shuffle in here.
    if _of_lane_0(tl.min(seen, 0) < epoch):
        start = tl.min(_now(seen), 0)
        # Beside the second look, which it does not delay.
        failed = _load_relaxed(error)
        seen = _load_acquire(pointers)
        budget = tl.where(failed == 0, budget_ns, -1)
        waited = start * 0
        while _of_lane_0((tl.min(seen, 0) < epoch) & (waited <= budget)):
            seen = _load_acquire(pointers)
            waited = tl.max(_now(seen), 0) - start
        if _of_lane_0(tl.min(seen, 0) < epoch):
            late = tl.min(tl.where(seen < epoch, rank, RANKS), 0)
            at_most = tl.min(tl.where(rank == late, seen, epoch), 0)
            STEPS: tl.constexpr = SCATTERED_STEPS if KIND == SCATTERED else 1
            awaited, seen_of_late = epoch >> EPOCH_BITS, at_most >> EPOCH_BITS
            report(error, KIND + 1, late, (awaited + (STEPS - 1)) // STEPS, seen_of_late // STEPS)
    # The acquire of one thread becomes that of all; and all go on together, whatever each has seen.
    tl.debug_barrier()


@triton.jit
def peer(pointer, delta, BYTES: tl.constexpr):
    """``pointer`` into own symmetric memory, in a peer's. ``delta``: their distance in units of 16 bytes."""
    # As a multiple of whole elements, so that the compiler knows that 16-byte alignment is kept.
    return pointer + delta * (16 // BYTES)


@triton.jit
def publish(flags, everyone, KIND: tl.constexpr, epoch, my_rank, LANES: tl.constexpr):
    """Raise my flag at every rank, after all that this program's threads did before. ``everyone``: from ``begin``."""
    tl.debug_barrier()
    pointers = peer(flags, everyone, 8) + (KIND * KIND_WORDS + my_rank * LINE_WORDS)
    tl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.lt.u32 p, t, 32;
        @p st.release.sys.global.b64 [$1], $2; mov.u32 $0, 0; }""",
        "=r,l,l,~{memory}",
        [pointers, tl.zeros([LANES], tl.int64) + (epoch.to(tl.int64) << EPOCH_BITS)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def arrive(
    flags, everyone, KIND: tl.constexpr, epochs, participants, my_rank, R: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Raise my flag at every rank by ``epochs`` once the ``participants``, the launch's first programs, have come here.

    Each adds its share, the first program what the others leave of it. As for ``publish`` what their threads did before
    is then visible. None may come here again before all have.
    """
    tl.debug_barrier()
    share = tl.where(tl.program_id(0) == 0, (epochs << EPOCH_BITS) - (participants - 1), 1).to(tl.int64)
    pointers = peer(flags, everyone, 8) + (KIND * KIND_WORDS + my_rank * LINE_WORDS)
    shares = tl.zeros([LANES], tl.int64) + share
    tl.atomic_add(pointers, shares, mask=tl.arange(0, LANES) < R, sem="release", scope="sys")


@triton.jit
def tell_count(flags, everyone, count, my_rank, LANES: tl.constexpr):
    """Write my number of tokens to every rank; a release must follow."""
    pointers = peer(flags, everyone, 8) + (COUNT * KIND_WORDS + my_rank * LINE_WORDS)
    tl.store(pointers, tl.zeros([LANES], tl.int64) + count)


@triton.jit
def count_of(flags, rank, max_tokens):
    """Tokens of a rank, as it told; within bounds whatever is there."""
    count = tl.load(flags + COUNT * KIND_WORDS + rank * LINE_WORDS)
    return tl.minimum(tl.maximum(count, 0), max_tokens).to(tl.int32)


@triton.jit
def is_last(ticket, participants):
    """Whether the other ``participants`` of the launch have come here; what they wrote before is then visible."""
    tl.debug_barrier()
    last = participants <= 1
    if participants > 1:
        last = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == participants - 1
        if last:
            # For the next launch: nothing else looks at it until then.
            tl.store(ticket, 0)
    return last


@triton.jit
def epochs_ended(counter):
    """Launches of a kind that have ended: the same for all programs of a launch, whichever of them have ended."""
    return _load_relaxed(counter) >> EPOCH_BITS


@triton.jit
def end_program(counter):
    """The last of a program. All programs of a launch together add one epoch, and no part of them does."""
    programs = tl.num_programs(0)
    share = tl.where(tl.program_id(0) == 0, (1 << EPOCH_BITS) - (programs - 1), 1)
    tl.atomic_add(counter, share.to(tl.int64), sem="relaxed", scope="gpu")


@triton.jit
def wait_until_ended(
    SEEN: tl.constexpr, KIND: tl.constexpr, ended, teller, flags, everyone, state, error, budget_ns, my_rank,
    R: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Wait until all ranks have ended that many movements of a kind, if no flag has shown so.

    All take the same turn here, since all make the same calls; program ``teller`` tells them that I have.
    """
    if tl.load(state + SEEN) < ended:
        if tl.program_id(0) == teller:
            publish(flags, everyone, KIND, ended, my_rank, LANES)
        wait_all(flags, KIND, ended, error, budget_ns, R, LANES)


@triton.jit(do_not_specialize=["my_rank", "budget_ns"])
def barrier_kernel(flags, deltas, state, error, my_rank, budget_ns, R: tl.constexpr, LANES: tl.constexpr):
    """One program: all ranks have come here, and see what each wrote before."""
    everyone = begin(deltas, R, LANES)
    epoch = epochs_ended(state + BARRIERS) + 1
    publish(flags, everyone, BARRIER, epoch, my_rank, LANES)
    wait_all(flags, BARRIER, epoch, error, budget_ns, R, LANES)
    end_program(state + BARRIERS)
