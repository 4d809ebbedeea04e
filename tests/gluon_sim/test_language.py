"""What kernels compute: dtypes, overflow, conversions, reductions, masks. Against torch."""

import sys

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tests.support.gluon_sim import SimError, Unsupported, launch

TILE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


# ---------------------------------------------------------------- tiles


@gluon.jit
def activate(x, w, codes, scales, out, amax, rows, columns, stride, limit, num_warps: gl.constexpr):
    """A masked [64, 128] tile with 64-bit offsets: clamp, exp2, division, a scale per row, casts."""
    m = gl.arange(0, 64, layout=gl.SliceLayout(1, TILE))
    n = gl.arange(0, 128, layout=gl.SliceLayout(0, TILE))
    mask = (m < rows)[:, None] & (n < columns)[None, :]
    offset = m.to(gl.int64)[:, None] * stride + n[None, :]
    v = gl.load(x + offset, mask=mask, other=0.0).to(gl.float32)
    v = gl.minimum(v, limit)
    v = gl.maximum(v, -limit)
    h = v * (1.0 / (1.0 + gl.exp2(v * -1.4426950408889634))) * gl.load(w + m, mask=m < rows, other=0.0)[:, None]
    largest = gl.max(gl.abs(h), 1)
    scale = gl.div_rn(gl.where(largest < 1e-10, 1e-10, largest), 448.0)
    gl.store(codes + offset, (h / scale[:, None]).to(gl.float8e4nv), mask=mask)
    gl.store(scales + m, scale, mask=m < rows)
    gl.store(out + offset, gl.convert_layout(h, TILE).to(gl.bfloat16), mask=mask)
    gl.store(amax, gl.max(largest, 0))


def test_masked_tile(seed):
    rows, columns, stride, limit = 50, 120, 160, 2.5
    x, w = torch.randn(64, stride).bfloat16(), torch.rand(64)
    codes = torch.zeros(64, stride).to(torch.float8_e4m3fn)
    scales, out, amax = torch.zeros(64), torch.zeros(64, stride).bfloat16(), torch.zeros(1)
    launch(activate, 1, (x, w, codes, scales, out, amax, rows, columns, stride, limit), dict(num_warps=4))
    v = x[:rows, :columns].float().clamp(-limit, limit)
    h = v * torch.sigmoid(v) * w[:rows, None]
    scale = h.abs().amax(1).clamp_min(1e-10) / 448
    torch.testing.assert_close(scales[:rows], scale)
    torch.testing.assert_close(amax[0], h.abs().max())
    torch.testing.assert_close(out[:rows, :columns], h.bfloat16(), rtol=1e-2, atol=1e-6)
    decoded = codes[:rows, :columns].float() * scales[:rows, None]
    torch.testing.assert_close(decoded, h, rtol=0.07, atol=1e-3)
    assert not scales[rows:].any() and not out[rows:].any() and not out[:, columns:].any()


def test_rows_beyond_the_tensor_are_reported():
    x, w = torch.randn(40, 160).bfloat16(), torch.rand(64)
    codes, out = torch.zeros(64, 160).to(torch.float8_e4m3fn), torch.zeros(64, 160).bfloat16()
    args = (x, w, codes, torch.zeros(64), out, torch.zeros(1), 50, 120, 160, 2.5)
    with pytest.raises(SimError, match=r"illegal global memory access .* nearest tensor: x ends \d+ bytes before"):
        launch(activate, 1, args, dict(num_warps=4))


# ---------------------------------------------------------------- numbers


@gluon.jit
def integers(out, a, b, big, CONSTANT: gl.constexpr):
    gl.store(out, a // b)
    gl.store(out + 1, a % b)
    gl.store(out + 2, (a < 0) & (b > 0))
    gl.store(out + 3, gl.minimum(a, b) + gl.maximum(a, CONSTANT))
    gl.store(out + 4, a.to(gl.int64) * big)
    gl.store(out + 5, (a + 0.5).to(gl.int32))
    gl.store(out + 6, gl.where(a < b, a, b) - (CONSTANT + 1) % 2)
    gl.store(out + 7, gl.cdiv(b, 4) + (a / 2).to(gl.int32) + (~b))


def test_integers_divide_as_in_c():
    out = torch.zeros(8, dtype=torch.int64)
    launch(integers, 1, (out, -7, 2, 1 << 40), dict(CONSTANT=2))
    assert out.tolist() == [-3, -1, 1, -5, -7 << 40, -6, -8, 1 - 3 - 3]


@gluon.jit
def overflow_of_scalars(out, m, k):
    gl.store(out + m * k - m * k, 1)


@gluon.jit
def no_overflow_of_scalars(out, m, k):
    gl.store(out + (m.to(gl.int64) * k - m.to(gl.int64) * k), 1)


@gluon.jit
def overflow_of_tensors(out, m, k):
    o = gl.arange(0, 32, layout=LINE) + m
    gl.store(out + (o * k - o * k), 1)


@gluon.jit
def no_overflow_of_tensors(out, m, k):
    o = (gl.arange(0, 32, layout=LINE) + m).to(gl.int64)
    gl.store(out + (o * k - o * k) + gl.arange(0, 32, layout=LINE), 1)


@gluon.jit
def mixed_tensors(out, m, k):
    o = gl.arange(0, 32, layout=LINE) + m
    gl.store(out + (o * k.to(gl.int64) - o * k.to(gl.int64)) + gl.arange(0, 32, layout=LINE), 1)


@gluon.jit
def overflow_of_sum(out, m, k):
    gl.store(out, gl.sum(gl.arange(0, 32, layout=LINE) * k * m, 0))


@pytest.mark.parametrize("kernel", [overflow_of_scalars, overflow_of_tensors, overflow_of_sum])
def test_int32_overflow(kernel):
    factors = (50_000, 1_000) if kernel is overflow_of_sum else (70_000, 70_000)
    with pytest.raises(SimError, match="int32 overflow"):
        launch(kernel, 1, (torch.zeros(32), *factors))


@pytest.mark.parametrize("kernel", [no_overflow_of_scalars, no_overflow_of_tensors, mixed_tensors])
def test_64_bits_do_not_overflow(kernel):
    out = torch.zeros(32)
    launch(kernel, 1, (out, 70_000, 70_000))
    assert out[0] == 1


@gluon.jit
def previous_stage(out, n, STAGES: gl.constexpr):
    it = 0
    for _ in range(n):
        gl.store(out + (it - 1) % STAGES, 1)
        it += 1


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="small integers are not among the constants of the code")
def test_remainder_of_a_negative_loop_variable():
    # On the GPU `it` is a run-time variable, and -1 % 4 is -1.
    with pytest.raises(SimError, match="-1 % 4: negative on the GPU if a loop carries"):
        launch(previous_stage, 1, (torch.zeros(4), 3), dict(STAGES=4))


@gluon.jit
def mixed_floats(x, y, out):
    o = gl.arange(0, 32, layout=LINE)
    a = gl.load(x + o)
    s = gl.max(gl.load(y + o), 0)
    gl.store(out + o, a * 0.1)
    gl.store(out + 32 + o, a * s)
    gl.store(out + 64 + o, gl.where(o % 2 == 0, a, 0.0) + gl.sum(a.to(gl.float32), 0))
    gl.store(out + 96 + o, gl.maximum(gl.load(y + o, mask=o < 5), 0.0))


def test_floats_are_promoted_as_by_triton(seed):
    x, y, out = torch.randn(32).bfloat16(), torch.rand(32), torch.zeros(128)
    launch(mixed_floats, 1, (x, y, out))
    # A constant becomes BF16; an fp32 scalar makes the result fp32.
    assert torch.equal(out[:32], (x * torch.tensor(0.1).bfloat16()).float())
    assert torch.equal(out[32:64], x.float() * y.max())
    torch.testing.assert_close(out[64:96], x.float() * (torch.arange(32) % 2 == 0) + x.float().sum())
    # Lanes that are masked off are NaN, which loses against numbers.
    assert torch.equal(out[96:], torch.where(torch.arange(32) < 5, y, 0.0))


@gluon.jit
def to_eight_bits(x, out):
    o = gl.arange(0, 32, layout=LINE)
    gl.store(out + o, gl.load(x + o).to(gl.float8e4nv))


def test_cast_to_fp8_saturates():
    x, out = torch.tensor([1e9, -1e9, float("nan"), 1.07] + [0.0] * 28), torch.zeros(32).to(torch.float8_e4m3fn)
    launch(to_eight_bits, 1, (x, out))
    assert out[:2].float().tolist() == [448, -448] and out[2].float().isnan() and out[3].float() == 1.125


@gluon.jit
def halves(x, out):
    m = gl.arange(0, 64, layout=gl.SliceLayout(1, TILE))
    n = gl.arange(0, 128, layout=gl.SliceLayout(0, TILE))
    v = gl.load(x + m[:, None] * 128 + n[None, :])
    left, right = v.reshape([64, 2, 64]).permute((0, 2, 1)).split()
    o = m[:, None] * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, TILE))[None, :]
    gl.store(out + o, left - right)


def test_reshape_permute_split(seed):
    x, out = torch.randn(64, 128), torch.zeros(64, 64)
    launch(halves, 1, (x, out))
    assert torch.equal(out, x[:, :64] - x[:, 64:])


@gluon.jit
def atomics(sums, seen, tickets, flags, num_warps: gl.constexpr):
    o = gl.arange(0, 128, layout=LINE)
    gl.atomic_add(sums + o % 4, 1.5, mask=o < 100, sem="relaxed")
    gl.store(seen + o, gl.atomic_add(tickets, 1, sem="relaxed") + gl.atomic_max(flags + 4 + o, o, sem="relaxed"))
    gl.store(flags, gl.atomic_cas(flags + 1, 0, 5) + gl.atomic_cas(flags + 2, 1, 7) + gl.atomic_xchg(flags + 3, 9))


def test_atomics():
    sums, seen = torch.zeros(4), torch.zeros(128, dtype=torch.int32)
    tickets, flags = torch.full((1,), 40, dtype=torch.int32), torch.zeros(132, dtype=torch.int32)
    flags[:4] = torch.tensor([0, 0, 3, 2])
    launch(atomics, 1, (sums, seen, tickets, flags), dict(num_warps=4))
    assert sums.tolist() == [37.5] * 4 and (seen == 40).all() and tickets == 41
    assert flags[:4].tolist() == [5, 5, 3, 9] and flags[4:].tolist() == list(range(128))


# ---------------------------------------------------------------- names


@gluon.jit
def unknown_function(x):
    gl.associative_scan(x, 0, None)


@gluon.jit
def unknown_asm(x):
    gl.inline_asm_elementwise("prefetch.global.L2 [$1];", "=r,l", [x], dtype=gl.int32, is_pure=False, pack=1)


@pytest.mark.parametrize(
    "kernel, text", [(unknown_function, "no model of gl.associative_scan"), (unknown_asm, "prefetch.global.L2")]
)
def test_what_has_no_model_says_so(kernel, text):
    with pytest.raises(Unsupported, match=text):
        launch(kernel, 1, (torch.zeros(1),))


# ---------------------------------------------------------------- plain Triton


@triton.jit
def add_rows(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    o = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for c in range(0, n, BLOCK):
        total += tl.load(x + row * n + c + o, mask=c + o < n, other=0.0)
    tl.store(out + row, tl.sum(total))


def test_plain_triton_with_two_axes(seed):
    x, out = torch.randn(6, 100), torch.zeros(6)
    launch(add_rows, (2, 3), (x, out, 100), dict(BLOCK=32))
    torch.testing.assert_close(out, x.sum(1))
