"""Device code that the K-grouped GEMMs share: their results' stores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from megamoe.kernels.gluon import pieces
from megamoe.kernels.gluon.spelling import tma_add, tma_store


@gluon.jit
def store_sums(d_desc, d_bufs, expert, row, col, sums, C: gl.constexpr, ADD: gl.constexpr, PIECE: gl.constexpr):
    """fp32 registers -> D's type -> shared memory -> stored in D, or added to it, in pieces as wide as D's boxes.

    Two buffers take turns: only the store before the last one must be done with its own. So the pieces of a call are
    even in number, and those outside of D are stored too, which writes nothing. Each element is added to once: the
    result depends on no order.

    Args:
        d_bufs: two buffers of each consumer C. PIECE: 0, the number of the first piece.
    """
    WIDTH: gl.constexpr = sums.shape[1]
    if WIDTH > d_desc.block_shape[2]:
        left, right = pieces.halves(sums)
        store_sums(d_desc, d_bufs, expert, row, col, left, C, ADD, 2 * PIECE)
        store_sums(d_desc, d_bufs, expert, row, col + WIDTH // 2, right, C, ADD, 2 * PIECE + 1)
    else:
        d_buf = d_bufs.index(2 * C + PIECE % 2)
        tma.store_wait(1)
        d_buf.reshape([64, WIDTH]).store(sums.to(d_desc.dtype))
        fence_async_shared()
        if ADD:
            tma_add(d_desc, [expert, row, col], d_buf)
        else:
            tma_store(d_desc, [expert, row, col], d_buf)
