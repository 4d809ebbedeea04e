"""The interpreter of arithmetic in inline asm, and the kernels' own texts run by it."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from megamoe.kernels.gluon import pieces  # noqa: E402
from tests.support.gluon_sim import float_asm  # noqa: E402


def text_of(function) -> str:
    """The asm in a kernel helper's source."""
    source = inspect.getsource(function.fn)
    strings = re.search(r"inline_asm_elementwise\(\s*((?:\"[^\"]*\"\s*)+),", source)[1]
    return "".join(re.findall(r"\"([^\"]*)\"", strings))


def test_instructions_in_order():
    program = float_asm.parse(
        "{ .reg .f32 a, b; mul.f32 a, $1, 0f40000000; fma.rn.f32 b, a, $2, 0f3F800000; neg.f32 $0, b; }"
    )
    x, y = torch.randn(5), torch.randn(5)
    assert torch.allclose(float_asm.run(program, [x, y]), -(2 * x * y + 1))


@pytest.mark.parametrize(
    "text", ["bar.sync 8, 256; mov.u32 $0, 0;", "sin.approx.f32 $0, $1;", "st.global.f32 [$1], $2;"]
)
def test_other_asm_is_left_to_others(text):
    assert float_asm.parse(text) is None


def test_erf():
    x = torch.cat([torch.linspace(-6, 6, 20001), torch.tensor([0.0, -0.0, math.inf, -math.inf, 1e-30, 40.0, -1e20])])
    value = float_asm.run(float_asm.parse(text_of(pieces.erf)), [x])
    assert (value.double() - torch.erf(x.double())).abs().max() < 6e-7
    assert torch.equal(torch.signbit(value[:-7]), torch.signbit(x[:-7]))
    assert float_asm.run(float_asm.parse(text_of(pieces.erf)), [torch.tensor(math.nan)]).isnan()


def test_sigmoid_uses_tanh():
    x = torch.linspace(-20, 20, 1001)
    half = float_asm.run(float_asm.parse(text_of(pieces.sigmoid)), [x * 0.5])
    assert (0.5 + 0.5 * half - torch.sigmoid(x)).abs().max() < 1e-6
