"""Rows of a dispatch in Triton: own tokens into symmetric memory, and any rank's tokens into rows here.

Names as in ``triton_dispatch``. A piece of a token is GROUPS groups of 128 columns; in FP8 each group has a scale.
Needs triton: import it on GPUs only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megamoe.kernels.triton_flags import peer
from megamoe.kernels.triton_quant import magnitude_bits, scale_of

# ---------------------------------------------------------------- own tokens


@triton.jit
def load_piece(x, x_stride, t, first, n, H: tl.constexpr, GROUPS: tl.constexpr):
    """The piece of my token ``t`` that begins with group ``first``; zeros beyond the last token."""
    col = (first + tl.arange(0, GROUPS))[:, None] * 128 + tl.arange(0, 128)[None, :]
    return tl.load(x + t.to(tl.int64) * x_stride + col, mask=(col < H) & (t < n), other=0.0)


@triton.jit
def load_token(x, x_stride, t, n, H: tl.constexpr, GROUPS: tl.constexpr):
    """All pieces of my token ``t``."""
    pieces = ()
    for first in tl.static_range(0, (H + 127) // 128, GROUPS):
        pieces = pieces + (load_piece(x, x_stride, t, first, n, H, GROUPS),)
    return pieces


@triton.jit
def write_piece(
    value, t, first, rows, scales, min_amax, H: tl.constexpr, FP8: tl.constexpr, LARGEST: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """A piece of my token ``t``, in the dtype in which it travels."""
    num_groups: tl.constexpr = (H + 127) // 128
    start = t.to(tl.int64)
    group = first + tl.arange(0, GROUPS)
    col = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    if FP8:
        value = value.to(tl.float32)
        scale = scale_of(tl.max(magnitude_bits(value), axis=1), min_amax, LARGEST, False)
        code = (value * tl.div_rn(1.0, scale)[:, None]).to(tl.float8e4nv)
        tl.store(rows + start * H + col, code, mask=col < H)
        tl.store(scales + start * num_groups + group, scale, mask=group < num_groups)
    else:
        tl.store(rows + start * H + col, value.to(rows.dtype.element_ty), mask=col < H)


# ---------------------------------------------------------------- tokens of a rank, at the distance ``delta``


@triton.jit
def is_needed(list_index, source, token, my_rank, max_tokens, K: tl.constexpr, LOCAL: tl.constexpr):
    """Whether tokens of rank ``source`` have an expert here, whether or not they are there."""
    needed = token < 0
    for k in tl.static_range(K):
        place = (source.to(tl.int64) * max_tokens + token) * K + k
        expert = tl.load(list_index + place, mask=token < max_tokens, other=-1) - my_rank * LOCAL
        needed = needed | ((expert >= 0) & (expert < LOCAL))
    return needed


@triton.jit
def rows_of(table, token, mask, K: tl.constexpr):
    """Rows of all slots of tokens, and the last of them."""
    last = tl.where(mask, -1, -1)
    rows = ()
    for k in tl.static_range(K):
        row = tl.load(table + token.to(tl.int64) * K + k, mask=mask, other=-1)
        last = tl.maximum(last, row)
        rows = rows + (row,)
    return rows, last


@triton.jit
def read_words(words, delta, token, needed, c, WORDS: tl.constexpr, COLS: tl.constexpr):
    col = c + tl.arange(0, COLS)
    source = peer(words, delta, 4) + token.to(tl.int64) * WORDS
    return tl.load(source[:, None] + col[None, :], mask=needed[:, None] & (col < WORDS)[None, :])


@triton.jit
def read_scales(scales, delta, token, needed, SCALES: tl.constexpr, SCALE_COLS: tl.constexpr):
    group = tl.arange(0, SCALE_COLS)
    source = peer(scales, delta, 4) + token.to(tl.int64) * SCALES
    return tl.load(source[:, None] + group[None, :], mask=needed[:, None] & (group < SCALES)[None, :])


@triton.jit
def write_words(
    value, rows, table, token, mask, out_words, c, WORDS: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Words of tokens into all their rows. KEEP: ``rows`` are still in registers, and else read from the table."""
    col = c + tl.arange(0, COLS)
    for k in tl.static_range(K):
        row = rows[k] if KEEP else tl.load(table + token.to(tl.int64) * K + k, mask=mask, other=-1)
        place = row.to(tl.int64)[:, None] * WORDS + col[None, :]
        tl.store(out_words + place, value, mask=(row >= 0)[:, None] & (col < WORDS)[None, :])


@triton.jit
def write_scales(
    value, rows, table, token, mask, out_scales, scale_stride, SCALES: tl.constexpr, K: tl.constexpr,
    SCALE_COLS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """As ``write_words``, transposed."""
    group = tl.arange(0, SCALE_COLS)
    for k in tl.static_range(K):
        row = rows[k] if KEEP else tl.load(table + token.to(tl.int64) * K + k, mask=mask, other=-1)
        place = group.to(tl.int64)[None, :] * scale_stride + row[:, None]
        tl.store(out_scales + place, value, mask=(row >= 0)[:, None] & (group < SCALES)[None, :])


@triton.jit
def pull(
    words, scales, delta, table, out_words, out_scales, scale_stride, first, end, WORDS: tl.constexpr,
    SCALES: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, SCALE_COLS: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Tokens ``first`` to ``end``, each read once if a row here needs it, into their rows. KEEP: as in
    ``write_words``."""
    for start in range(first, end, ROWS):
        token = start + tl.arange(0, ROWS)
        mask = token < end
        rows, last = rows_of(table, token, mask, K)
        if SCALES > 0:
            # They come while words are moved.
            row_scales = read_scales(scales, delta, token, last >= 0, SCALES, SCALE_COLS)
        for c in range(0, WORDS, COLS):
            value = read_words(words, delta, token, last >= 0, c, WORDS, COLS)
            write_words(value, rows, table, token, mask, out_words, c, WORDS, K, COLS, KEEP)
        if SCALES > 0:
            # Many tokens' rows take registers of their own in this layout.
            FEW: tl.constexpr = KEEP and ROWS <= 2
            write_scales(row_scales, rows, table, token, mask, out_scales, scale_stride, SCALES, K, SCALE_COLS, FEW)
