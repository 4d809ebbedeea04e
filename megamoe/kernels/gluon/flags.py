"""Counters by which programs of one launch wait for each other: device code for roles of a single warp.

A counter is read with acquire and added to with release, both at the GPU's scope. What lies in memory may be written by
plain stores or TMA, and read by either: both sides fence the proxies.

Lanes of a warp must not part before an elected one issues a copy, so what loops and branches depend on comes from one
lane. Waits end after ``budget_ns``; the error word then says which it was, and later waits return at once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def load_counter(counter):
    """The counter's value, int32, the same in all lanes; what was written before it was added is then visible."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1]; shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff;",
        "=r,l,~{memory}",
        [counter],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def fence_proxies():
    """What plain stores wrote and this thread has acquired may be read by TMA."""
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.u32 $0, 0;", "=r,r,~{memory}", [0], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def add(counter, amount):
    """Counts what the lanes of this warp have done; of tensors with an element for each warp, what each warp has."""
    # Asm on scalars, or on an element of a warp's, runs in every lane: they meet, then one of them counts.
    gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 l; mov.u32 l, %laneid; setp.eq.u32 p, l, 0;
        fence.proxy.async; bar.warp.sync 0xffffffff;
        @p red.release.gpu.global.add.u32 [$1], $2; mov.u32 $0, 0; }""",
        "=r,l,r,~{memory}",
        [counter, amount],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def take(counter):
    """The counter's value, int32, the same in all lanes, which nobody else gets: it is one more then."""
    return gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b32 l, v; mov.u32 l, %laneid; setp.eq.u32 p, l, 0; mov.u32 v, 0;
        @p atom.relaxed.gpu.global.add.u32 v, [$1], 1; shfl.sync.idx.b32 $0, v, 0, 31, 0xffffffff; }""",
        "=r,l,~{memory}",
        [counter],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def clear(counter):
    """The counter is 0, for later launches."""
    gl.inline_asm_elementwise(
        "st.relaxed.gpu.global.b32 [$1], $2; mov.u32 $0, 0;",
        "=r,l,r,~{memory}",
        [counter, 0],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _now():
    """Nanoseconds, int64, the same in all lanes."""
    return gl.inline_asm_elementwise(
        """{ .reg .b64 t; .reg .b32 a, b; mov.u64 t, %globaltimer; mov.b64 {a, b}, t;
        shfl.sync.idx.b32 a, a, 0, 31, 0xffffffff; shfl.sync.idx.b32 b, b, 0, 31, 0xffffffff; mov.b64 $0, {a, b}; }""",
        "=l,r",
        [0],
        dtype=gl.int64,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _sleep():
    """Some 0.5 us."""
    gl.inline_asm_elementwise("nanosleep.u32 500; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _report(error, phase, first, second, third):
    """Sets the error words, unless they are set; every lane tries."""
    gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .b64 old;
        atom.relaxed.gpu.global.cas.b64 old, [$1], 0, $2; setp.eq.u64 p, old, 0;
        @p st.relaxed.gpu.global.b64 [$1+8], $3; @p st.relaxed.gpu.global.b64 [$1+16], $4;
        @p st.relaxed.gpu.global.b64 [$1+24], $5; mov.u32 $0, 0; }""",
        "=r,l,l,l,l,l,~{memory}",
        [error, phase.to(gl.int64), first.to(gl.int64), second.to(gl.int64), third.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_for_counter(counter, target, block, phase, error, budget_ns, PATIENT: gl.constexpr):
    """Waits until ``counter`` of a block of rows has reached ``target``.

    PATIENT: for long waits that nobody waits for at once. A look with acquire empties the SM's first cache.
    """
    seen = load_counter(counter)
    if seen < target:
        start = _now()
        # The error word is small: its lower half tells whether it is set.
        failed = load_counter(error.to(gl.pointer_type(gl.int32), bitcast=True))
        budget = gl.where(failed == 0, budget_ns + start * 0, start * 0)
        waited = start * 0
        while (seen < target) & (waited <= budget):
            seen = load_counter(counter)
            waited = _now() - start
            if PATIENT:
                _sleep()
        if seen < target:
            _report(error, phase, block, target, seen)
    fence_proxies()
