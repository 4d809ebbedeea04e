"""Triton kernels of the activations x routing weights, forward and backward, each in one pass over memory.

The arithmetic is fp32, each result rounded once. Names and limits are those of ``mlp_activation``. Needs triton: import
it on GPUs only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe.config import SWIGLU_OAI_ALPHA
from megamoe.kernels.formats import FP8_MAX, MIN_AMAX
from megamoe.kernels.triton_quant import magnitude_bits, scale_of

ALPHA = tl.constexpr(SWIGLU_OAI_ALPHA)

GROUP = 128
"""Columns with one scale."""

FORWARD_ROWS = 16
BACKWARD_ROWS, BACKWARD_COLUMNS = 4, 256
NUM_WARPS = 4

BACKWARD_REGISTERS = 96
"""At most, of a thread. Without a limit the assembler saves some, on the stack, for one more block."""

# ---------------------------------------------------------------- formulas


@triton.jit
def _sigmoid(x):
    """In four instructions: without the compiler's care for results below 2^-126, which become 0."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; "
        "rcp.approx.ftz.f32 $0, e; }",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def gate_share(gate, ACTIVATION: tl.constexpr):
    """The part of ``gate`` that passes, which takes most of the time; for ``relu2`` what is squared."""
    if ACTIVATION == "relu2":
        # A comparison, not a maximum: NaN must pass.
        share = tl.where(gate < 0.0, 0.0, gate)
    elif ACTIVATION == "geglu":
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "geglu_tanh":
        # (1 + tanh(y)) / 2 = sigmoid(2 y), y = sqrt(2 / pi) (gate + 0.044715 gate^3)
        share = _sigmoid(gate * (1.5957691216057308 + 0.07135481282752 * (gate * gate)))
    elif ACTIVATION == "swiglu_oai":
        share = _sigmoid(ALPHA * gate)
    else:
        tl.static_assert(ACTIVATION == "swiglu")
        share = _sigmoid(gate)
    return share


@triton.jit
def gate_value(gate, share, ACTIVATION: tl.constexpr):
    """What multiplies up."""
    if ACTIVATION == "relu2":
        gate = share
    return gate * share


@triton.jit
def gate_slope(gate, share, ACTIVATION: tl.constexpr):
    """The derivative of ``gate_value``."""
    if ACTIVATION == "relu2":
        slope = 2.0 * share
    elif ACTIVATION == "geglu":
        slope = share + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    else:
        rise = gate * share * (1.0 - share)
        if ACTIVATION == "geglu_tanh":
            rise *= 1.5957691216057308 + 0.21406443848256 * (gate * gate)
        elif ACTIVATION == "swiglu_oai":
            rise *= ALPHA
        slope = share + rise
    return slope


@triton.jit
def load_pre(pre, row64, col, mask, num_cols, stride, ACTIVATION: tl.constexpr):
    """fp32 gate and up of some rows and columns; ``relu2`` has no up, and gate stands in its place."""
    start = pre + row64 * stride + col
    gate = tl.load(start, mask=mask, other=0.0).to(tl.float32)
    up = gate
    if ACTIVATION != "relu2":
        up = tl.load(start + num_cols, mask=mask, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def limit(gate, up, clamp, CLAMP: tl.constexpr):
    """Gate and up within the clamp."""
    if CLAMP:
        # Comparisons, not minimum and maximum: NaN must pass.
        gate = tl.where(gate > clamp, clamp, gate)
        up = tl.where(up > clamp, clamp, tl.where(up < -clamp, -clamp, up))
    return gate, up


@triton.jit
def times_up(x, up, ACTIVATION: tl.constexpr):
    """``x`` times what multiplies the gate's value."""
    if ACTIVATION == "swiglu_oai":
        up += 1.0
    if ACTIVATION != "relu2":
        x *= up
    return x


@triton.jit
def activate(gate, up, clamp, ACTIVATION: tl.constexpr, CLAMP: tl.constexpr):
    """The activation without its weight."""
    gate, up = limit(gate, up, clamp, CLAMP)
    return times_up(gate_value(gate, gate_share(gate, ACTIVATION), ACTIVATION), up, ACTIVATION)


@triton.jit
def gate_gradient(gate, upstream, slope, clamp, ACTIVATION: tl.constexpr, CLAMP: tl.constexpr):
    """The gradient of gate, given that of its value."""
    result = upstream * slope
    if ACTIVATION == "relu2":
        result = tl.where(gate <= 0.0, 0.0, result)
    if CLAMP:
        # NaN is not within the limits.
        result = tl.where(gate <= clamp, result, 0.0)
    return result


@triton.jit
def up_gradient(up, upstream, value, clamp, CLAMP: tl.constexpr):
    """The gradient of up, given that of the activation without its weight."""
    result = upstream * value
    if CLAMP:
        result = tl.where(tl.abs(up) <= clamp, result, 0.0)
    return result


@triton.jit
def activate_backward(gate, up, upstream, clamp, ACTIVATION: tl.constexpr, CLAMP: tl.constexpr):
    """The gradients of gate and up (none for ``relu2``), given that of the activation without its weight."""
    limited_gate, limited_up = limit(gate, up, clamp, CLAMP)
    share = gate_share(limited_gate, ACTIVATION)
    value, slope = gate_value(limited_gate, share, ACTIVATION), gate_slope(limited_gate, share, ACTIVATION)
    gate_grad = gate_gradient(gate, times_up(upstream, limited_up, ACTIVATION), slope, clamp, ACTIVATION, CLAMP)
    return gate_grad, up_gradient(up, upstream, value, clamp, CLAMP)


# ---------------------------------------------------------------- kernels


@triton.jit
def _forward_kernel(
    pre,
    row_weights,
    out,
    scales,
    num_rows,
    num_cols,
    pre_stride,
    scale_group_stride,
    min_amax,
    clamp,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    WEIGHTED: tl.constexpr,
    QUANTIZE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
):
    groups = tl.cdiv(num_cols, GROUP)
    group = tl.program_id(0) % groups
    row = (tl.program_id(0) // groups) * ROWS + tl.arange(0, ROWS)
    col = group * GROUP + tl.arange(0, GROUP)
    row64, row_fits = row.to(tl.int64)[:, None], row < num_rows
    mask = row_fits[:, None] & (col < num_cols)[None, :]
    gate, up = load_pre(pre, row64, col[None, :], mask, num_cols, pre_stride, ACTIVATION)
    value = activate(gate, up, clamp, ACTIVATION, CLAMP)
    if WEIGHTED:
        value *= tl.load(row_weights + row, mask=row_fits, other=0.0).to(tl.float32)[:, None]
    if QUANTIZE:
        scale = scale_of(tl.max(magnitude_bits(value), axis=1), min_amax, LARGEST, False)
        value *= tl.div_rn(1.0, scale)[:, None]
        tl.store(scales + group.to(tl.int64) * scale_group_stride + row, scale, mask=row_fits)
    tl.store(out + row64 * num_cols + col[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    grad,
    pre,
    row_weights,
    grad_pre,
    act,
    grad_weights,
    num_rows,
    num_cols,
    grad_stride,
    pre_stride,
    clamp,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    WITH_ACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """All columns of some rows, so that the weights' gradients are sums in one order."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row64, row_fits = row.to(tl.int64)[:, None], row < num_rows
    weight = tl.load(row_weights + row, mask=row_fits, other=0.0).to(tl.float32)[:, None]
    halves: tl.constexpr = 1 if ACTIVATION == "relu2" else 2
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    first = 0
    while first < num_cols:
        col = (first + tl.arange(0, COLUMNS))[None, :]
        mask = row_fits[:, None] & (col < num_cols)
        gate, up = load_pre(pre, row64, col, mask, num_cols, pre_stride, ACTIVATION)
        upstream = tl.load(grad + row64 * grad_stride + col, mask=mask, other=0.0).to(tl.float32)
        value = activate(gate, up, clamp, ACTIVATION, CLAMP)
        total += upstream * value
        gate_grad, up_grad = activate_backward(gate, up, upstream * weight, clamp, ACTIVATION, CLAMP)
        start = grad_pre + row64 * (halves * num_cols) + col
        tl.store(start, gate_grad.to(grad_pre.dtype.element_ty), mask=mask)
        if halves == 2:
            tl.store(start + num_cols, up_grad.to(grad_pre.dtype.element_ty), mask=mask)
        if WITH_ACT:
            tl.store(act + row64 * num_cols + col, (value * weight).to(act.dtype.element_ty), mask=mask)
        first += COLUMNS
    tl.store(grad_weights + row, tl.sum(total, axis=1), mask=row_fits)


# ---------------------------------------------------------------- launchers


def forward(
    pre: torch.Tensor,
    row_weights: torch.Tensor | None,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    activation: str,
    clamp: float | None,
) -> None:
    """Activation (x ``row_weights [P]``) of ``pre [P, 2I]`` (stride 1 along the columns) into ``out [P, I]``.

    ``scales``: None, or MN-major ``[P, ceil(I / 128)]``, and ``out`` gets e4m3 codes.
    """
    num_rows, num_cols = out.shape
    programs = triton.cdiv(num_rows, FORWARD_ROWS) * triton.cdiv(num_cols, GROUP)
    if not programs:
        return
    with torch.cuda.device(pre.device):
        _forward_kernel[(programs,)](
            pre,
            pre if row_weights is None else row_weights,
            out,
            out if scales is None else scales,
            num_rows,
            num_cols,
            pre.stride(0),
            0 if scales is None else scales.stride(1),
            MIN_AMAX,
            0.0 if clamp is None else float(clamp),
            ACTIVATION=activation,
            CLAMP=clamp is not None,
            WEIGHTED=row_weights is not None,
            QUANTIZE=scales is not None,
            ROWS=FORWARD_ROWS,
            GROUP=GROUP,
            LARGEST=FP8_MAX,
            num_warps=NUM_WARPS,
        )


def backward(
    grad: torch.Tensor,
    pre: torch.Tensor,
    row_weights: torch.Tensor,
    grad_pre: torch.Tensor,
    act: torch.Tensor | None,
    grad_weights: torch.Tensor,
    activation: str,
    clamp: float | None,
) -> None:
    """The gradients of ``pre [P, 2I]`` and ``row_weights [P]`` for ``grad [P, I]``, and the weighted ``act [P, I]``.

    Operands have stride 1 along the columns, outputs are contiguous, ``grad_weights`` is fp32.
    """
    num_rows, num_cols = grad.shape
    if not num_rows:
        return
    with torch.cuda.device(grad.device):
        _backward_kernel[(triton.cdiv(num_rows, BACKWARD_ROWS),)](
            grad,
            pre,
            row_weights,
            grad_pre,
            grad_pre if act is None else act,
            grad_weights,
            num_rows,
            num_cols,
            grad.stride(0),
            pre.stride(0),
            0.0 if clamp is None else float(clamp),
            ACTIVATION=activation,
            CLAMP=clamp is not None,
            WITH_ACT=act is not None,
            ROWS=BACKWARD_ROWS,
            COLUMNS=BACKWARD_COLUMNS,
            num_warps=NUM_WARPS,
            maxnreg=BACKWARD_REGISTERS,
        )
