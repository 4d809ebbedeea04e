"""Planted bugs in the casts between the GEMMs of the FP8 MLP: the simulator's reports, or a wrong result, show each."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from megamoe.kernels import triton_activation, triton_quant  # noqa: E402
from megamoe.kernels.gluon import casts  # noqa: E402
from tests.kernels.test_casts_sim import check_activation, check_casts  # noqa: E402
from tests.kernels.test_mlp_quant import case  # noqa: E402
from tests.support.gluon_sim.mutation import SCHEDULES, Bug, assert_caught  # noqa: E402

HELPERS = (triton_quant, triton_activation)
BF16, FP32 = torch.bfloat16, torch.float32


class Cast:
    """Both casts of random values, whose magnitudes differ from row to row and from column to column."""

    def __init__(self, shape=(384, 272), dtype=BF16, sms=1):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(shape, generator=generator)
        x *= 2.0 ** torch.randint(-4, 5, (shape[0], 1), generator=generator)
        self.x = (x * 2.0 ** torch.randint(-4, 5, (1, shape[1]), generator=generator)).to(dtype)
        self.sms = sms

    def __call__(self, module, policy, seed) -> None:
        check_casts(self.x, policy=policy, seed=seed, sms=self.sms, module=module)


class Special(Cast):
    """Rows and columns of zeros, and values that are not finite."""

    def __init__(self):
        super().__init__((128, 144))
        self.x[3], self.x[5, 7], self.x[9, 130] = 0, float("nan"), float("inf")


class Backward:
    """``activation_backward`` in one form, of two blocks of columns and three of rows."""

    def __init__(self, activation="swiglu", clamp=None, columns=True, sums=False, dtype=BF16, sms=2):
        with torch.random.fork_rng():
            torch.manual_seed(2)
            pre, grad, weights = case(activation, 384, 256, dtype)
        self.options = grad, pre, weights, activation, clamp
        self.columns, self.sums, self.sms = columns, sums, sms

    def __call__(self, module, policy, seed) -> None:
        options = dict(policy=policy, seed=seed, sms=self.sms, module=module)
        check_activation(self.options, self.columns, self.sums, **options)


CAST, MANY_SMS, FP32_CAST, SPECIAL = Cast(), Cast(sms=7), Cast(dtype=FP32), Special()
PLAIN, ROWS, SUMS, CLAMPED = Backward(), Backward(columns=False), Backward(sums=True), Backward(clamp=0.5)
RELU, OAI, FP32_BACKWARD = Backward("relu2"), Backward("swiglu_oai", 0.5, sums=True), Backward(dtype=FP32)
RUNS = [CAST, MANY_SMS, FP32_CAST, SPECIAL, PLAIN, ROWS, SUMS, CLAMPED, RELU, OAI, FP32_BACKWARD]

WAIT = "mbarrier.wait(bars.index(stage), phase)"
LOAD = "load_matrix(descs, xs, x_scales, bars, stage, row_ahead, col_ahead, SCALED)"
STEP = "row_ahead, col_ahead = next_block(row_ahead, col_ahead, step_rows, step_cols, col_blocks)"
UPSTREAM = "upstream = fp32_block(grads.index(stage)) * rows_of(row_weights, row_block)"

BUGS = [
    Bug(
        "codes of a word in another order",
        CAST,
        "pack_four(first, second, third, fourth)",
        "pack_four(first, third, second, fourth)",
    ),
    Bug("bytes of a pair exchanged", CAST, "low, $2, $1", "low, $1, $2"),
    Bug("rows taken apart in halves", CAST, "[32, 4, BLOCK]).permute((0, 2, 1))", "[4, 32, BLOCK]).permute((1, 2, 0))"),
    Bug("words not turned", CAST, ".permute((1, 0)), S)", ".reshape([BLOCK, 32]), S)"),
    Bug(
        "columns past the last one written",
        CAST,
        "mask=(cols < num_cols)[:, None]",
        "mask=(cols < num_cols + 16)[:, None]",
    ),
    Bug(
        "row codes past the last column",
        CAST,
        "mask=(cols < num_cols)[None, :]",
        "mask=(cols < num_cols + 16)[None, :]",
    ),
    Bug("column scales past the last column", CAST, "mask=col + lane < num_cols", "mask=col + lane < num_cols + 16"),
    Bug("words of another block of rows", CAST, "word = row_block * 32 +", "word = row_block * 16 +"),
    Bug(
        "a warp's maximum left out",
        CAST,
        "gl.max(parts.load(C), axis=0)",
        "gl.max(parts.slice(0, 4, 0).load(C), axis=0)",
    ),
    Bug("columns scaled like rows", CAST, "value * inverse_t[None, :]", "value * inverse[:, None]"),
    Bug("multiplied by the scale", CAST, "return scale, reciprocal(scale)", "return scale, scale"),
    Bug("an approximate reciprocal of the fourth", CAST, "rcp.rn.f32 $0, $1;", "mul.rn.f32 $0, $1, 0f3E800000;"),
    Bug(
        "NaN below all numbers",
        SPECIAL,
        "gl.max(magnitude_bits(value), axis=1)",
        "gl.max(gl.abs(value), axis=1).to(gl.int32, bitcast=True)",
        2,
    ),
    Bug(
        "block scales of another row of blocks",
        CAST,
        "gl.cdiv(num_cols, BLOCK) + col // BLOCK",
        "gl.cdiv(num_cols, BLOCK) + col // 64",
    ),
    Bug("half of each word", CAST, "(word & -65536)", "(word << 16)"),
    Bug(
        "scales of another block's rows",
        CAST,
        "[col_block, row_block * BLOCK], bar, x_scales",
        "[col_block, 0], bar, x_scales",
    ),
    Bug("scales of another group", CAST, "scales + col_block.to(gl.int64)", "scales + (col_block * 0).to(gl.int64)"),
    Bug("an expected byte too few", CAST, "BYTES + (BLOCK * 4 if SCALED else 0)", "BYTES"),
    Bug("a block twice", MANY_SMS, "gl.where(over, row_block + 1, row_block)", "row_block"),
    Bug("a block of columns too far", MANY_SMS, "over = col_block >= col_blocks", "over = col_block > col_blocks"),
    Bug(
        "loads not stepped on",
        CAST,
        f"        {LOAD}\n        {STEP}\n        row_block",
        f"        {LOAD}\n        row_block",
    ),
    Bug("the barriers' parity never changes", CAST, "phase ^= 1", "phase ^= 0", 2),
    Bug("no wait for a block", CAST, f"{WAIT}\n        col", "col"),
    Bug("loads ahead of the reads", CAST, f"{WAIT}\n        col", f"{WAIT}\n        {LOAD}\n        col"),
    Bug(
        "weights of the gradients' sums",
        PLAIN,
        "fp32_block(grads.index(stage)) * act",
        "fp32_block(grads.index(stage)) * act * act",
    ),
    Bug("unweighted activation", PLAIN, "            act *= rows_of(row_weights, row_block)\n", ""),
    Bug(
        "unweighted gradient",
        ROWS,
        f"{UPSTREAM}\n        gate",
        "upstream = fp32_block(grads.index(stage))\n        gate",
    ),
    Bug(
        "unweighted gradient of up",
        SUMS,
        f"{UPSTREAM}\n            gate",
        "upstream = fp32_block(grads.index(stage))\n            gate",
    ),
    Bug("weights of other rows", PLAIN, "gl.load(weights + row_block * BLOCK + rows)", "gl.load(weights + rows)"),
    Bug(
        "gradients of gate and up exchanged",
        ROWS,
        "gate_grad if half == 0 else up_grad,",
        "up_grad if half == 0 else gate_grad,",
    ),
    Bug(
        "up's scales on the gate's place",
        ROWS,
        "group = half * (num_cols // BLOCK) + col_block",
        "group = half + col_block",
    ),
    Bug("up of other columns", PLAIN, "[row, num_cols + col], bar", "[row, col], bar"),
    Bug(
        "sums of another block of rows",
        SUMS,
        "sums + row_block.to(gl.int64) * width",
        "sums + (row_block * 0).to(gl.int64) * width",
    ),
    Bug(
        "parts of other columns",
        PLAIN,
        "weight_grads + col_block.to(gl.int64)",
        "weight_grads + (col_block * 0).to(gl.int64)",
    ),
    Bug("not clamped", CLAMPED, 'within the clamp."""\n    if CLAMP:', 'within the clamp."""\n    if False:'),
    Bug("gradient outside of the clamp", CLAMPED, "tl.where(gate <= clamp, result, 0.0)", "result"),
    Bug("up's gradient outside of the clamp", OAI, "tl.where(tl.abs(up) <= clamp, result, 0.0)", "result"),
    Bug("up without its one", OAI, "up += 1.0", "up += 0.0"),
    Bug("negative values squared", RELU, "share = tl.where(gate < 0.0, 0.0, gate)", "share = gate"),
    Bug("half the slope", RELU, "slope = 2.0 * share", "slope = share"),
    Bug("a constant of the sigmoid", FP32_BACKWARD, "0fBFB8AA3B", "0fBFB8AAFF"),
]


@pytest.mark.parametrize("run", RUNS)
def test_cases_pass_without_bugs(run):
    run(casts, "random", 0)


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_are_seen(bug):
    assert_caught(casts, bug, SCHEDULES, HELPERS)
