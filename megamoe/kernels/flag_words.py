"""The words of the exchange's flags, state and errors: numbers that host and device agree on."""

from __future__ import annotations

MAX_RANKS = 32

# Kinds of flags: each has a line of 128 bytes for every rank, so that no two writers share one.
READY = 0  # inputs of a dispatch are in place
PULLED = 1  # and have been read by the writer of the flag
SCATTERED = 2  # results have been written to their tokens' rank
REDUCED = 3  # and have been summed there
BARRIER = 4
COUNT = 5  # no flag but tokens of the rank, written before READY
LINE_WORDS = 16
KIND_WORDS = MAX_RANKS * LINE_WORDS
FLAG_WORDS = 6 * KIND_WORDS

# A rank's own state: epochs reached, and tickets of the programs of a launch that end together.
DISPATCH_EPOCH = 0
COMBINE_EPOCH = 1
BARRIER_EPOCH = 2
STAGED_TICKET = 4
PULLED_TICKET = 5
SCATTERED_TICKET = 6
REDUCED_TICKET = 7
STATE_WORDS = 16

# The error words: a phase, 0 = none, and three numbers. A wait's phase is its kind of flag + 1, with (rank that is
# missing, epoch that was waited for, epoch that was seen).
CAPACITY = 16  # with (rows that were needed, rows that there are)
ERROR_WORDS = 4

WORD_BYTES = 8
