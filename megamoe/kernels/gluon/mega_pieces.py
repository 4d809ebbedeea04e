"""Device code that the mega-kernels share: tiles, the loader, the storer, pulled rows, results. See ``mega_moe``.

A stage of the ring holds 128 bytes of K: 128 columns in FP8, with their scales (SCALED), or 64 in BF16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.kernels import flag_words
from megamoe.kernels.gluon import flags, pieces
from megamoe.kernels.gluon.spelling import cta_barrier, reinterpret, tma_load, tma_store, wait_global_writes

BLOCK = gl.constexpr(128)
"""Rows of a block and of a tile, columns of half a tile, columns of a group of scales, bytes of K in a stage."""

HALF = gl.constexpr(64)
"""Rows of a consumer, and columns of K in a stage of BF16."""

PEEK = gl.constexpr(4)
"""Stages before the end of a tile at which the loader looks whether the next one is ready."""

PULLERS = gl.constexpr(2)

EARLY = gl.constexpr(4)
"""Rows that a consumer pulls at once: its warps."""

NO_TARGET = gl.constexpr(-(1 << 62))
"""Target of a padding row."""

PULLED_ROWS = gl.constexpr(flag_words.PULLED_ROWS)
FINISHED_TILES = gl.constexpr(flag_words.FINISHED_TILES)
CONSUMED_TILES = gl.constexpr(flag_words.CONSUMED_TILES)
TOKEN_BITS = gl.constexpr(flag_words.TOKEN_BITS)

WEIGHT_SCALES_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
"""Of the scales of a stage's weights, one for each half of the columns."""

NOTE_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
"""Of the two words of a tile."""

RESULTS_LAYOUT = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, 128], gl.bfloat16))

# ---------------------------------------------------------------- tiles


@gluon.jit
def columns_tiles(COLUMNS: gl.constexpr):
    """Tiles of 256 columns; the last may be half full."""
    return (COLUMNS + 2 * BLOCK - 1) // (2 * BLOCK)


@gluon.jit
def count_tiles(sizes, H: gl.constexpr, INTER: gl.constexpr):
    return gl.load(sizes) // BLOCK * (INTER // BLOCK + columns_tiles(H))


@gluon.jit
def read_tile(tiles, place, num_tiles):
    """The two words of a tile; valid == 0 and block 0 from the end on."""
    inside = place < num_tiles
    word = gl.load(tiles + 2 * place, mask=inside, other=0)
    return word, gl.load(tiles + 2 * place + 1, mask=inside, other=0)


@gluon.jit
def read_note(note, L: gl.constexpr):
    """The two words of a tile from shared memory."""
    return note.slice(0, 1, 0).load(L).item(), note.slice(1, 1, 0).load(L).item()


@gluon.jit
def await_tile(it, bars, bufs, STAGES: gl.constexpr):
    """A consumer's next tile, once its first stage is there: the loader's note lies beside that."""
    s = stage_of(it, STAGES)
    mbarrier.wait(bars[0].index(s), phase_of(it, STAGES))
    return read_note(bufs[-1].index(s), gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def unpack(word):
    """(expert, column tile, rows, whether of GEMM 2) of a tile's first word; the second is its block."""
    return word & 255, (word >> 8) & 255, (word >> 16) & 255, word >> 24


@gluon.jit
def pool_row(block, pool_rows):
    """Where the rows of a block start in the pool, which all blocks take in turns."""
    return block * BLOCK % pool_rows


@gluon.jit
def stage_of(it, STAGES: gl.constexpr):
    """Where the ring is at its ``it``-th block of K."""
    if STAGES & (STAGES - 1) == 0:
        # The compiler does not know that ``it`` is not negative.
        return it & (STAGES - 1)
    else:
        return it % STAGES


@gluon.jit
def phase_of(it, STAGES: gl.constexpr):
    """Whether it has come round an odd number of times."""
    if STAGES == 4:
        return (it >> 2) & 1
    else:
        return (it // STAGES) & 1


# ---------------------------------------------------------------- the loader


@gluon.jit
def weight_scales(word, scales, H: gl.constexpr, INTER: gl.constexpr):
    """Pointers to the scales of a tile's weights: a lane for each half of the columns, at the first block of K."""
    up_scales, down_scales = scales
    expert, n, valid, second = unpack(word)
    UP_K: gl.constexpr = H // BLOCK
    DOWN_K: gl.constexpr = INTER // BLOCK
    half = pieces.lanes(2)
    pointers = up_scales + (expert * (2 * INTER // BLOCK) + n + half * (INTER // BLOCK)) * UP_K
    if second == 1:
        block = 2 * n + half
        if H % (2 * BLOCK) != 0:
            block = gl.minimum(block, H // BLOCK - 1)
        pointers = down_scales + (expert * (H // BLOCK) + block) * DOWN_K
    return pointers


@gluon.jit
def load_weights(
    it, first, second, k, two, note, b_desc, w_scales, bars, bufs, STAGES: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Asks for both halves' columns of a block of K, once its stage is free, and SCALED puts their scales beside them.
    ``note``: beside a tile's first."""
    full, empty, lead, results_full, results_empty = bars
    values = 0
    if SCALED:
        values = gl.load(w_scales + k)
    s = stage_of(it, STAGES)
    mbarrier.wait(empty.index(s), phase_of(it, STAGES) ^ 1)
    if k == 0:
        bufs[-1].index(s).store(note)
    # The byte count is a compile-time one.
    if SCALED:
        mbarrier.expect(full.index(s), 3 * BLOCK * BLOCK + BLOCK * 4, pred=two)
        mbarrier.expect(full.index(s), (2 * BLOCK + HALF) * BLOCK + HALF * 4, pred=two == 0)
    else:
        mbarrier.expect(full.index(s), 3 * BLOCK * BLOCK, pred=two)
        mbarrier.expect(full.index(s), (2 * BLOCK + HALF) * BLOCK, pred=two == 0)
    for half in gl.static_range(2):
        row = first if half == 0 else second
        if SCALED:
            tma_load(b_desc, [row, k * BLOCK], full.index(s), bufs[1].index(s * 2 + half))
        else:
            tma_load(b_desc, [row, k * HALF], full.index(s), bufs[1].index(s).slice(half * BLOCK, BLOCK, 0))
    if SCALED:
        bufs[3].index(s).store(values)
        mbarrier.arrive(full.index(s), count=1)


@gluon.jit
def load_rows(
    it, row, k, two, a_desc, scales_desc, bars, bufs, STAGES: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Asks for the rows, and SCALED for their scales; of a half tile only for the upper half's."""
    STEP: gl.constexpr = BLOCK if SCALED else HALF
    s = stage_of(it, STAGES)
    bar = bars[0].index(s)
    tma_load(a_desc, [row, k * STEP], bar, bufs[0].index(s * 2))
    tma_load(a_desc, [row + HALF, k * STEP], bar, bufs[0].index(s * 2 + 1), pred=two)
    if SCALED:
        tma_load(scales_desc, [k, row], bar, bufs[2].index(s * 2))
        tma_load(scales_desc, [k, row + HALF], bar, bufs[2].index(s * 2 + 1), pred=two)


@gluon.jit
def counter_of(word, block, pulled, finished, INTER: gl.constexpr):
    """(counter, value at which the tile's rows are there, what it counts)"""
    expert, n, valid, second = unpack(word)
    counter = pulled + block
    target = valid
    phase = PULLED_ROWS + second * 0
    if second == 1:
        counter = finished + block
        target = (INTER // BLOCK) * (1 + (valid > HALF).to(gl.int32))
        phase = FINISHED_TILES + second * 0
    return counter, target, phase


@gluon.jit
def load_tile(
    it, ready, awaited, word, block, places, row, first, second, two, a_desc, scales_desc, b_desc, w_scales, bars, bufs,
    waits, INTER: gl.constexpr, NK: gl.constexpr, STAGES: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Feeds one tile. Near its end takes the next one; returns that, and whether its rows are there.

    places: (tiles, how many there are, the counter of those taken, pulled, finished).
    """
    error, budget_ns = waits
    tiles, num_tiles, claimed, pulled, finished = places
    note = gl.where(pieces.lanes(2) == 0, word, block)
    AHEAD: gl.constexpr = STAGES if STAGES < NK else NK
    LOOK: gl.constexpr = NK - PEEK if NK > PEEK + AHEAD else AHEAD
    start = 0
    if ready == 0:
        if flags.load_counter(awaited[0]) < awaited[1]:
            for k in range(0, AHEAD):
                load_weights(it + k, first, second, k, two, note, b_desc, w_scales, bars, bufs, STAGES, SCALED)
            flags.wait_for_counter(awaited[0], awaited[1], block, awaited[2], error, budget_ns, False)
            for k in range(0, AHEAD):
                load_rows(it + k, row, k, two, a_desc, scales_desc, bars, bufs, STAGES, SCALED)
            start = AHEAD + 0
        else:
            flags.fence_proxies()
    for k in range(start, LOOK):
        load_weights(it + k, first, second, k, two, note, b_desc, w_scales, bars, bufs, STAGES, SCALED)
        load_rows(it + k, row, k, two, a_desc, scales_desc, bars, bufs, STAGES, SCALED)
    place = flags.take(claimed)
    word, block = read_tile(tiles, place, num_tiles)
    following = counter_of(word, block, pulled, finished, INTER)
    next_ready = 0
    if flags.load_counter(following[0]) >= following[1]:
        next_ready = 1
        flags.fence_proxies()
    for k in range(LOOK, NK):
        load_weights(it + k, first, second, k, two, note, b_desc, w_scales, bars, bufs, STAGES, SCALED)
        load_rows(it + k, row, k, two, a_desc, scales_desc, bars, bufs, STAGES, SCALED)
    return next_ready, following, word, block


@gluon.jit
def load_tiles(
    descs, scales, bars, bufs, tables, counters, waits, pool_rows, H: gl.constexpr, INTER: gl.constexpr,
    STAGES: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """The loader. ``scales``: pointers to those of both weights. Without SCALED anything stands for scales."""
    rows_desc, up_desc, act_desc, down_desc, row_scales_desc, act_scales_desc = descs
    tiles, sizes, row_source, row_target, row_weights = tables
    pulled, finished, consumed, claimed = counters
    STEP: gl.constexpr = BLOCK if SCALED else HALF
    UP_K: gl.constexpr = H // STEP
    DOWN_K: gl.constexpr = INTER // STEP
    num_tiles = count_tiles(sizes, H, INTER)
    places = (tiles, num_tiles, claimed, pulled, finished)
    it = 0
    ready = 0
    word, block = read_tile(tiles, gl.program_id(0), num_tiles)
    awaited = counter_of(word, block, pulled, finished, INTER)
    expert, n, valid, second = unpack(word)
    while valid > 0:
        two = valid > HALF
        row = pool_row(block, pool_rows)
        w_scales = scales[0]
        if SCALED:
            w_scales = weight_scales(word, scales, H, INTER)
        if second == 0:
            gate = expert * (2 * INTER) + n * BLOCK
            ready, awaited, word, block = load_tile(
                it, ready, awaited, word, block, places, row, gate, gate + INTER, two, rows_desc, row_scales_desc,
                up_desc, w_scales, bars, bufs, waits, INTER, UP_K, STAGES, SCALED,
            )  # fmt: skip
            it += UP_K
        else:
            # Past the last column are the next expert's: they are not stored.
            col = expert * H + n * (2 * BLOCK)
            ready, awaited, word, block = load_tile(
                it, ready, awaited, word, block, places, row, col, col + BLOCK, two, act_desc, act_scales_desc,
                down_desc, w_scales, bars, bufs, waits, INTER, DOWN_K, STAGES, SCALED,
            )  # fmt: skip
            it += DOWN_K
        expert, n, valid, second = unpack(word)
    # Consumers are told that there are no more.
    s = stage_of(it, STAGES)
    mbarrier.wait(bars[1].index(s), phase_of(it, STAGES) ^ 1)
    bufs[-1].index(s).store(pieces.lanes(2) * 0)
    mbarrier.arrive(bars[0].index(s), count=2 if SCALED else 1)


# ---------------------------------------------------------------- the storer


@gluon.jit
def store_half(act_desc, d_bufs, bars, row, n, counter, CODES: gl.constexpr, C: gl.constexpr):
    """CODES: the layout of FP8 codes in the buffer, or None: it holds BF16."""
    full, empty, lead, results_full, results_empty = bars
    if CODES is None:
        act = d_bufs.index(C)
    else:
        act = reinterpret(d_bufs.index(C), gl.float8e4nv, [HALF, BLOCK], CODES)
    tma_store(act_desc, [row + C * HALF, n * BLOCK], act)
    wait_global_writes()
    mbarrier.arrive(results_empty.index(C), count=1)
    flags.add(counter, 1)


@gluon.jit
def store_tiles(act_desc, bars, d_bufs, told_note, counters, pool_rows, CODES: gl.constexpr):
    """The storer: activated tiles into the pool of GEMM 2's rows. It also counts the tiles of GEMM 2 that have read.

    ``told_note``: consumer 0's, of the tile that it hands over.
    """
    full, empty, lead, results_full, results_empty = bars
    pulled, finished, consumed, claimed = counters
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    turn0 = 0
    turn1 = 0
    mbarrier.wait(results_full.index(0), turn0 & 1)
    word, block = read_note(told_note, L)
    expert, n, valid, second = unpack(word)
    while valid > 0:
        if second == 0:
            row = pool_row(block, pool_rows)
            store_half(act_desc, d_bufs, bars, row, n, finished + block, CODES, 0)
            if valid > HALF:
                mbarrier.wait(results_full.index(1), turn1 & 1)
                store_half(act_desc, d_bufs, bars, row, n, finished + block, CODES, 1)
                turn1 += 1
        else:
            mbarrier.arrive(results_empty.index(0), count=1)
            flags.add(consumed + block, 1)
        turn0 += 1
        mbarrier.wait(results_full.index(0), turn0 & 1)
        word, block = read_note(told_note, L)
        expert, n, valid, second = unpack(word)


# ---------------------------------------------------------------- pulling rows


@gluon.jit
def early_rows(early, pool_rows):
    """Rows that consumers pull, ``early`` times four each, before there is anything to compute; for none of them there
    was another one in its slot."""
    return gl.minimum(early * (2 * EARLY) * gl.num_programs(0), pool_rows)


@gluon.jit
def sources_of(row, row_source, deltas, L: gl.constexpr):
    """(rows, which of them have a token, distance of its rank's memory in words, its number) of EARLY rows."""
    rows = row + gl.arange(0, EARLY, layout=L)
    source = gl.load(row_source + rows)
    here = source >= 0
    # As a multiple of whole elements, so that the compiler knows that 16-byte alignment is kept.
    delta = gl.load(deltas + (source >> TOKEN_BITS), mask=here, other=0) * 4
    return rows, here, delta, (source & ((1 << TOKEN_BITS) - 1)).to(gl.int64)


@gluon.jit
def pull_early_rows(
    tables, counters, peers, pool_words, pool_scales, early, pool_rows, H: gl.constexpr, SCALED: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Consumer C: four rows at a time, one for each of its warps, which have the registers for much of a row."""
    tiles, sizes, row_source, row_target, row_weights = tables
    pulled, finished, consumed, claimed = counters
    deltas, words, scales = peers
    WORDS: gl.constexpr = H // 4 if SCALED else H // 2
    SCALES: gl.constexpr = H // BLOCK if SCALED else 0
    PIECE: gl.constexpr = 2048 if WORDS > 1024 else (1024 if WORDS > 512 else (512 if WORDS > 256 else 256))
    VECTORS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    SINGLES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    col = gl.arange(0, PIECE, layout=gl.SliceLayout(0, VECTORS))
    group = gl.arange(0, 64, layout=gl.SliceLayout(0, SINGLES))
    end = gl.minimum(gl.load(sizes), early_rows(early, pool_rows))
    row = (gl.program_id(0) * 2 + C) * EARLY
    while row < end:
        # Padding follows an expert's last row.
        if gl.load(row_source + row) >= 0:
            rows, here, delta, token = sources_of(row, row_source, deltas, gl.SliceLayout(1, VECTORS))
            values = ()
            if SCALED:
                # They come while words are moved.
                rows1, here1, delta1, token1 = sources_of(row, row_source, deltas, gl.SliceLayout(1, SINGLES))
                from_scales = scales + delta1 + token1 * SCALES
                for first in gl.static_range(0, SCALES, 64):
                    inside = here1[:, None] & (group + first < SCALES)[None, :]
                    value = gl.load(from_scales[:, None] + (group + first)[None, :], mask=inside)
                    values = values + (value,)
            from_words = words + delta + token * WORDS
            to_words = pool_words + rows.to(gl.int64) * WORDS
            for start in gl.static_range(0, WORDS, PIECE):
                inside = here[:, None] & (col + start < WORDS)[None, :]
                piece = gl.load(from_words[:, None] + (col + start)[None, :], mask=inside)
                gl.store(to_words[:, None] + (col + start)[None, :], piece, mask=inside)
            if SCALED:
                for first in gl.static_range(0, SCALES, 64):
                    inside = here1[:, None] & (group + first < SCALES)[None, :]
                    place = ((group + first) * pool_rows)[None, :] + rows1[:, None]
                    gl.store(pool_scales + place, values[first // 64], mask=inside)
            flags.add(pulled + rows // BLOCK, here.to(gl.int32))
        row += gl.num_programs(0) * (2 * EARLY)


@gluon.jit
def pull_rows(
    tables, counters, waits, peers, pool_words, pool_scales, early, pool_rows, H: gl.constexpr, CHUNK: gl.constexpr,
    SCALED: gl.constexpr, J: gl.constexpr,
):  # fmt: skip
    """One warp: every ``num_programs * PULLERS``-th row from the rank of its token, SCALED with scales.

    A row waits until its slot's last block is done with. What else is written into the slot comes after its rows.
    """
    tiles, sizes, row_source, row_target, row_weights = tables
    pulled, finished, consumed, claimed = counters
    error, budget_ns = waits
    deltas, words, scales = peers
    WORDS: gl.constexpr = H // 4 if SCALED else H // 2
    SCALES: gl.constexpr = H // BLOCK if SCALED else 0
    VECTORS: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    col = gl.arange(0, CHUNK, layout=VECTORS)
    group = pieces.lanes(64)
    used = gl.load(sizes)
    row = early_rows(early, pool_rows) + gl.program_id(0) * PULLERS + J
    while row < used:
        source = gl.load(row_source + row)
        if source >= 0:
            # As a multiple of whole elements, so that the compiler knows that 16-byte alignment is kept.
            delta = gl.load(deltas + (source >> TOKEN_BITS)) * 4
            token = (source & ((1 << TOKEN_BITS) - 1)).to(gl.int64)
            from_words = words + delta + token * WORDS
            from_scales = scales + delta + token * SCALES
            place = row % pool_rows
            if row >= pool_rows:
                before = (row - pool_rows) // BLOCK
                reads = columns_tiles(H) + before * 0
                phase = CONSUMED_TILES + before * 0
                flags.wait_for_counter(consumed + before, reads, before, phase, error, budget_ns, True)
            to_words = pool_words + place.to(gl.int64) * WORDS
            for first in gl.static_range(0, SCALES, 64):
                inside = group + first < SCALES
                value = gl.load(from_scales + first + group, mask=inside)
                gl.store(pool_scales + (group + first) * pool_rows + place, value, mask=inside)
            for start in range(0, WORDS, CHUNK):
                chunk = gl.load(from_words + start + col, mask=col + start < WORDS)
                gl.store(to_words + start + col, chunk, mask=col + start < WORDS)
            flags.add(pulled + row // BLOCK, 1)
        row += gl.num_programs(0) * PULLERS


# ---------------------------------------------------------------- consumers


@gluon.jit
def note_for_storer(told_note, word, block):
    lane = gl.arange(0, 2, layout=gl.BlockedLayout([1], [32], [4], [0]))
    told_note.store(gl.where(lane == 0, word, block))


@gluon.jit
def tell_read(bars, told, tile, told_note, C: gl.constexpr):
    """Consumer 0 tells the storer that a tile of GEMM 2 has been summed up, and so read, for both.

    ``told``: tiles that the storer was told of before; returns those with this one.
    """
    full, empty, lead, results_full, results_empty = bars
    word, block = tile
    second = word >> 24
    if C == 0:
        if second == 1:
            mbarrier.wait(results_empty.index(C), (told & 1) ^ 1)
            note_for_storer(told_note, word, block)
            mbarrier.arrive(results_full.index(C), count=1)
        told += second
    return told


@gluon.jit
def tell_end(bars, told, told_note, C: gl.constexpr):
    """Consumer 0 tells the storer that there are no more tiles."""
    if C == 0:
        mbarrier.wait(bars[4].index(C), (told & 1) ^ 1)
        note_for_storer(told_note, told * 0, told * 0)
        mbarrier.arrive(bars[3].index(C), count=1)


@gluon.jit
def scatter_rows(d_buf, f0, f1, row_target, row, slots, n, H: gl.constexpr):
    """BF16 rows into the slots of their tokens, 256 contiguous bytes of each at a time."""
    B: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    target = gl.load(row_target + row + gl.arange(0, HALF, layout=gl.SliceLayout(1, B)))
    cols = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, B))
    pointers = (slots + n * (2 * BLOCK) + target * 8)[:, None] + cols[None, :]
    wanted = (target != NO_TARGET)[:, None] & (cols >= 0)[None, :]
    cta_barrier()
    d_buf.store(f0.to(gl.bfloat16))
    cta_barrier()
    gl.store(pointers, d_buf.load(B), mask=wanted)
    cta_barrier()
    d_buf.store(f1.to(gl.bfloat16))
    cta_barrier()
    if H % (2 * BLOCK) != 0:
        wanted = wanted & ((2 * n + 1) * BLOCK < H)
    gl.store(pointers + BLOCK, d_buf.load(B), mask=wanted)


@gluon.jit
def tile_biases(word, biases, H: gl.constexpr, INTER: gl.constexpr):
    """Pointers to the biases of both halves of a tile's columns; of a half beyond the last column to any."""
    up_bias, down_bias = biases
    expert, n, valid, second = unpack(word)
    bias0 = up_bias + expert * (2 * INTER) + n * BLOCK
    bias1 = bias0 + INTER
    if second == 1:
        bias0 = down_bias + expert * H + n * (2 * BLOCK)
        bias1 = bias0 + BLOCK
        if H % (2 * BLOCK) != 0:
            bias1 = bias0 + gl.where((2 * n + 1) * BLOCK < H, BLOCK, 0)
    return bias0, bias1


@gluon.jit
def bias_rows(bias, L: gl.constexpr):
    """fp32 [64, 128], the same in each row."""
    values = gl.load(bias + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, L)))
    return gl.full([HALF, BLOCK], 0.0, gl.float32, L) + values[None, :]


@gluon.jit
def routing_weights(block, row_weights, LR: gl.constexpr, C: gl.constexpr):
    """Of consumer C's rows."""
    return gl.load(row_weights + block * BLOCK + C * HALF + gl.arange(0, HALF, layout=LR))
