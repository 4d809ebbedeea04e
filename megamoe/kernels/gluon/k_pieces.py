"""Device code that the K-grouped GEMMs share: their results' stores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from megamoe.kernels.gluon import pieces
from megamoe.kernels.gluon.spelling import tma_add, tma_store


@gluon.jit
def store_sums(
    d_desc,
    d_bufs,
    expert,
    row,
    col,
    sums,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    ADD: gl.constexpr,
    PIECE: gl.constexpr,
):
    """fp32 registers -> D's type -> shared memory -> stored in D, or added to it, in pieces as wide as D's boxes.

    COUNT buffers from d_bufs[FIRST] on take turns: only the store that used one must be done with it. So the pieces of
    a call are a multiple of COUNT, and those outside of D are stored too, which writes nothing. Each element is added
    to once: the result depends on no order.

    Args:
        PIECE: 0, the number of the first piece.
    """
    WIDTH: gl.constexpr = sums.shape[1]
    if WIDTH > d_desc.block_shape[2]:
        left, right = pieces.halves(sums)
        store_sums(d_desc, d_bufs, expert, row, col, left, FIRST, COUNT, ADD, 2 * PIECE)
        store_sums(d_desc, d_bufs, expert, row, col + WIDTH // 2, right, FIRST, COUNT, ADD, 2 * PIECE + 1)
    else:
        d_buf = d_bufs.index(FIRST + PIECE % COUNT)
        tma.store_wait(COUNT - 1)
        d_buf.reshape([64, WIDTH]).store(sums.to(d_desc.dtype))
        fence_async_shared()
        if ADD:
            tma_add(d_desc, [expert, row, col], d_buf)
        else:
            tma_store(d_desc, [expert, row, col], d_buf)
