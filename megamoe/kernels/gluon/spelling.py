"""Names of Gluon that differ between triton 3.6 and 3.9, under one spelling. Kernels import them from here.

Pass the byte count of ``mbarrier.expect`` by position: the keyword's name differs too.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

# 3.8 renamed the tile copies; 3.9 keeps the old names only to raise.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""``tma_load(descriptor, coordinates, barrier, buffer, pred=True)``: start a TMA copy from global to shared memory."""

tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""``tma_store(descriptor, coordinates, buffer)``: start a TMA copy from shared to global memory."""


@builtin
def _tma_add(descriptor, coordinates, buffer, _semantic=None):
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    add = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(add, descriptor.handle, coordinates, buffer.handle)


# Before 3.8 only the compiler's own language has it.
tma_add = getattr(tma, "async_atomic_add", None) or _tma_add
"""``tma_add(descriptor, coordinates, buffer)``: start to add shared memory to global memory, element by element."""

# 3.7 renamed it.
cta_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""``cta_barrier()``: barrier of the threads of a partition; of the whole program outside of warp_specialize."""

_REINTERPRET_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpret(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The bytes of a shared-memory buffer as another dtype, shape and layout."""
    if _REINTERPRET_IS_PUBLIC:
        return buffer.reinterpret(dtype, shape, layout)
    else:
        return buffer._reinterpret(dtype, shape, layout)


@gluon.jit
def wait_global_writes():
    """Wait until the thread's TMA stores are in global memory. ``tma.store_wait`` only waits until the shared memory
    may be reused, and its ``read_only=False`` needs triton 3.8."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r,r,~{memory}", [0], dtype=gl.int32, is_pure=False, pack=1
    )
