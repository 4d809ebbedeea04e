"""The Triton casts have the bits of the torch ones, on any shape, stride, dtype and special value."""

from __future__ import annotations

import math

import pytest
import torch

from megamoe.kernels.quant import (
    quantize_blockwise,
    quantize_blockwise_both,
    quantize_columnwise,
    quantize_fp4,
    quantize_mxfp8,
    quantize_rowwise,
    swiglu_backward_quantize_rowwise,
    swiglu_quantize_rowwise,
    transpose_fp8,
)
from megamoe.kernels.reference import activate
from megamoe.kernels.scales import is_mn_major, pack_ue8m0_k_grouped
from megamoe.types import Fp8Tensor
from tests.support.metrics import relative_error

pytestmark = pytest.mark.gpu

SHAPES = [(1, 1), (1, 128), (3, 127), (127, 129), (128, 7168), (129, 300), (513, 384), (1000, 33), (2, 3, 130, 200)]


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Bit for bit, but for NaN, whose payload no rule fixes."""
    ours, theirs = ours.cpu().float(), theirs.cpu().float()
    both_nan = ours.isnan() & theirs.isnan()
    return bool(((ours.view(torch.int32) == theirs.view(torch.int32)) | both_nan).all())


def check(ours: Fp8Tensor, theirs: Fp8Tensor) -> None:
    assert ours.codes.is_cuda and ours.block == theirs.block
    assert ours.codes.shape == theirs.codes.shape and ours.scales.shape == theirs.scales.shape
    assert same_bits(ours.scales, theirs.scales), "scales"
    assert same_bits(ours.codes, theirs.codes), "codes"


CASTS = {
    "rowwise": quantize_rowwise,
    "rowwise32": lambda x, **options: quantize_rowwise(x, 32, **options),
    "blockwise": quantize_blockwise,
    "columnwise": quantize_columnwise,
    "columnwise32": lambda x, **options: quantize_columnwise(x, group=32, **options),
}


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("cast", CASTS)
def test_bits(cast, dtype, power_of_two, seed):
    for shape in SHAPES:
        x = (torch.randn(shape) * torch.logspace(-6, 4, shape[-1])).to(dtype)
        check(CASTS[cast](x.cuda(), power_of_two=power_of_two), CASTS[cast](x, power_of_two=power_of_two))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("cast", CASTS)
def test_special_values(cast, power_of_two, seed):
    x = torch.randn(300, 600)
    x[0] = 0.0
    x[1] = -0.0
    x[2] = 1e-40
    x[3] = torch.finfo(torch.float32).max
    x[140, 5], x[150, 200], x[160, 300], x[170, 301] = math.nan, math.inf, -math.inf, math.nan
    x[200] = 448 * 2.0 ** torch.arange(-300, 300).clamp(-20, 20)
    check(CASTS[cast](x.cuda(), power_of_two=power_of_two), CASTS[cast](x, power_of_two=power_of_two))


def test_mx_formats(seed):
    x = torch.randn(130, 300).bfloat16()
    ours, theirs = quantize_mxfp8(x.cuda()), quantize_mxfp8(x)
    assert same_bits(ours.codes, theirs.codes) and torch.equal(ours.scales.cpu(), theirs.scales)
    ours, theirs = quantize_fp4(x.cuda()), quantize_fp4(x)
    assert torch.equal(ours.packed.cpu(), theirs.packed) and torch.equal(ours.scales.cpu(), theirs.scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_transposed_copy(dtype, seed):
    for shape in [(1, 1), (128, 128), (200, 300), (256, 384), (3, 130, 257), (3, 256, 256), (2, 4096, 512)]:
        x = torch.randn(shape).to(dtype)
        cast, transposed = quantize_blockwise_both(x.cuda())
        check(cast, quantize_blockwise(x))
        check(transposed, transpose_fp8(quantize_blockwise(x)))


def test_views(seed):
    big = torch.randn(400, 1024).bfloat16()
    for view in (big[::2, 128:600], big.t(), big[:, ::2]):
        gpu = (
            view.cuda()
            if view.is_contiguous()
            else big.cuda().as_strided(view.shape, view.stride(), view.storage_offset())
        )
        check(quantize_rowwise(gpu), quantize_rowwise(view))
        check(quantize_blockwise(gpu), quantize_blockwise(view))


def test_mn_major_and_out(seed):
    x = torch.randn(130, 700).bfloat16()
    wanted = quantize_rowwise(x)
    ours = quantize_rowwise(x.cuda(), mn_major=True)
    assert is_mn_major(ours.scales)
    check(ours, wanted)
    codes = torch.full((130, 1024), 3.0, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.full((6, 132), math.nan, device="cuda")
    out = Fp8Tensor(codes[:, 128:828], scales.t()[:130], (1, 128))
    assert quantize_rowwise(x.cuda(), out=out) is out
    check(out, wanted)
    assert (codes[:, :128].float() == 3).all() and (codes[:, 828:].float() == 3).all() and scales[:, 130:].isnan().all()


@pytest.mark.parametrize("clamp", [None, 1.0])
def test_swiglu(clamp, seed):
    """exp differs in its last bit between devices: a code may move to its neighbour, which is 1/16 of its value."""
    for rows, width in [(1, 128), (130, 200), (700, 2048)]:
        pre, weights = torch.randn(rows, 2 * width).bfloat16(), torch.rand(rows)
        ours = swiglu_quantize_rowwise(pre.cuda(), weights.cuda(), clamp, mn_major=True)
        theirs = swiglu_quantize_rowwise(pre, weights, clamp)
        assert is_mn_major(ours.scales)
        assert relative_error(ours.scales.cpu(), theirs.scales) < 1e-6
        differing = (ours.codes.cpu().float() != theirs.codes.float()).double().mean()
        assert differing < 1e-3 and relative_error(ours.codes.cpu().float(), theirs.codes.float()) < 3e-3


@pytest.mark.parametrize("clamp", [None, 1.0])
def test_swiglu_backward(clamp, seed):
    for rows, width in [(1, 128), (130, 384), (700, 2048)]:
        pre, weights, grad = torch.randn(rows, 2 * width).bfloat16(), torch.rand(rows), torch.randn(rows, width)
        ours, grad_weights = swiglu_backward_quantize_rowwise(
            grad.bfloat16().cuda(), pre.cuda(), weights.cuda(), clamp, mn_major=True
        )
        theirs, wanted = swiglu_backward_quantize_rowwise(grad.bfloat16(), pre, weights, clamp)
        assert is_mn_major(ours.scales)
        # A sum that cancels has the errors of its terms.
        terms = grad.bfloat16().double().abs() * activate(pre.double(), "swiglu", clamp).abs()
        assert ((grad_weights.cpu() - wanted).abs() <= 1e-5 * terms.sum(1)).all()
        assert relative_error(ours.scales.cpu(), theirs.scales) < 1e-6
        differing = (ours.codes.cpu().float() != theirs.codes.float()).double().mean()
        assert differing < 2e-3 and relative_error(ours.codes.cpu().float(), theirs.codes.float()) < 3e-3


def test_k_grouped_packing(seed):
    groups = [0, 3, 4, 0, 5, 1, 16, 0]
    scales = 2.0 ** torch.randint(-20, 20, (sum(groups), 520))
    assert torch.equal(pack_ue8m0_k_grouped(scales.cuda(), groups).cpu(), pack_ue8m0_k_grouped(scales, groups))


def test_swiglu_keeps_nan_in_its_block(seed):
    pre, weights = torch.randn(4, 512), torch.ones(4)
    pre[1, 3] = math.nan
    result = swiglu_quantize_rowwise(pre.cuda(), weights.cuda(), 7.0)
    assert result.scales.isnan().nonzero().tolist() == [[1, 0]]


def test_more_than_2_31_elements():
    x = torch.empty(300_000, 7296, device="cuda", dtype=torch.bfloat16).fill_(1.0)
    x[-1] = 3.0
    cast = quantize_rowwise(x)
    assert x.numel() > 2**31
    assert torch.equal(cast.scales[-1], (torch.full((57,), 3.0) / 448).cuda())
    assert torch.equal(cast.scales[:-1].amax(), cast.scales[0, 0]) and (cast.codes[-1].float() == 448).all()
