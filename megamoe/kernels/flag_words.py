"""The words of the exchange's flags, state and errors: numbers that host and device agree on."""

from __future__ import annotations

MAX_RANKS = 32

# Kinds of flags: each has a line of 128 bytes for every rank, so that no two writers share one. A flag is an epoch
# times 1 << EPOCH_BITS; below are shares of the next one, of a rank's programs that raise it together.
READY = 0  # inputs of a dispatch are in place
PULLED = 1  # the writer of the flag has read the inputs of that dispatch
SCATTERED = 2  # results have been written to their tokens' rank; counts SCATTERED_STEPS for each combine
REDUCED = 3  # the writer of the flag has summed those of that combine
BARRIER = 4
COUNT = 5  # no flag but tokens of the rank, written before READY
EPOCH_BITS = 20
LINE_WORDS = 16
KIND_WORDS = MAX_RANKS * LINE_WORDS
FLAG_WORDS = 6 * KIND_WORDS

SCATTERED_STEPS = 16
"""Steps in which a combine's results may be announced."""

# A rank's own state: launches of each kind that have ended, in shares like a flag. How many dispatches and combines all
# ranks are known to have ended: those before a flag that all have raised since. And tickets of the programs that have
# come to the end of a step, or of all sums.
DISPATCHES = 0
COMBINES = 1
BARRIERS = 2
DISPATCHES_SEEN = 3
COMBINES_SEEN = 4
SUMMED_TICKET = 5
NEXT_TOKENS = 6  # the next tokens whose sum no program has begun
SCATTERED_TICKETS = 16  # one for each step
STATE_WORDS = 32

# The error words: a phase, 0 = none, and three numbers. A wait's phase is its kind of flag + 1, with (rank that is
# missing, epoch that was waited for, epoch that was seen).
CAPACITY = 16  # with (rows that were needed, rows that there are)
# Waits inside a mega-kernel, for other programs of the same launch: with (block of rows, what was waited for, seen).
PULLED_ROWS = 17  # rows of the block that have been read from their ranks
FINISHED_TILES = 18  # GEMM 1 tiles of the block, in halves of 64 rows
CONSUMED_TILES = 19  # GEMM 2 tiles that have read the block, whose slot of the pool another one waits for
ERROR_WORDS = 4

WORD_BYTES = 8

# Where a row of the pool comes from, in one int32: rank << TOKEN_BITS | token; -1 = a padding row.
TOKEN_BITS = 26

# Entries of a table of pairs that are no rows here.
ELSEWHERE = -1  # another rank's expert
NOWHERE = -2  # no expert, or no room
