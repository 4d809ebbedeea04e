"""Hopper's casts between the GEMMs of the FP8 MLP on a GPU: the bits of the CPU's where no exp is in between."""

from __future__ import annotations

import pytest
import torch

from megamoe.kernels import mlp_quant
from megamoe.types import Fp8Tensor
from tests.kernels.test_mlp_quant import FORMS, case
from tests.support.metrics import relative_error

pytestmark = pytest.mark.gpu

SHAPES = [(0, 128), (128, 128), (128, 16), (256, 144), (384, 272), (1152, 720), (4096, 7168), (20096, 1024)]


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """But for the payload and the sign of NaN."""
    ours, theirs = ours.cpu().float(), theirs.cpu().float()
    both_nan = ours.isnan() & theirs.isnan()
    return bool(((ours.view(torch.int32) == theirs.view(torch.int32)) | both_nan).all())


def assert_same_bits(ours: Fp8Tensor, theirs: Fp8Tensor, what: str) -> None:
    assert ours.block == theirs.block and ours.scales.shape == theirs.scales.shape, what
    assert same_bits(ours.scales, theirs.scales), f"{what}: scales"
    assert same_bits(ours.codes, theirs.codes), f"{what}: codes"


def check(x: torch.Tensor) -> None:
    theirs, ours = mlp_quant.cast(x, columns=True), mlp_quant.cast(x.cuda(), columns=True)
    assert_same_bits(ours.rows, theirs.rows, "rows")
    assert_same_bits(ours.columns, theirs.columns, "columns")
    blocks = mlp_quant.columns_of_rows(ours.rows)
    assert_same_bits(blocks, mlp_quant.columns_of_rows(theirs.rows), "blocks")
    assert blocks.codes.t().is_contiguous() and ours.columns.codes.t().is_contiguous()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_bits(dtype, shape, seed):
    check((torch.randn(shape) * torch.logspace(-6, 4, shape[1])).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_special_values(dtype, seed):
    x = torch.randn(384, 400)
    x[3], x[:, 7], x[128:256, 128:256] = 0.0, -0.0, 0.0
    x[5], x[6] = 1e-40, torch.finfo(dtype).max
    x[290, 5], x[300, 140], x[310, 300], x[311, 301] = float("nan"), float("inf"), -float("inf"), float("nan")
    x[20] = 448 * 2.0 ** torch.arange(-200, 200).clamp(-20, 20)
    check(x.to(dtype))


def test_views(seed):
    wide = torch.randn(128, 420).bfloat16()
    for view in (wide[:, 8:280], wide[:, 3:147], torch.randn(144, 128).bfloat16().t()):
        strided = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device="cuda").copy_(view)
        both, wanted = mlp_quant.cast(strided, columns=True), mlp_quant.cast(view, columns=True)
        assert_same_bits(both.rows, wanted.rows, "rows")
        assert_same_bits(both.columns, wanted.columns, "columns")


def assert_near(ours: Fp8Tensor, theirs: Fp8Tensor, what: str) -> None:
    """exp differs in its last bits between devices: a code may move to its neighbour, which is 1/16 of its value."""
    assert ours.block == theirs.block and relative_error(ours.scales.cpu(), theirs.scales) < 1e-6, f"{what}: scales"
    codes, wanted = ours.codes.cpu().float(), theirs.codes.float()
    assert (codes != wanted).double().mean() < 2e-3, f"{what}: codes"
    assert relative_error(codes, wanted) < 3e-3, f"{what}: codes"


@pytest.mark.parametrize("shape", [(128, 128), (384, 256), (2304, 2048)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("activation", "clamp"), FORMS)
def test_activation_backward(activation, clamp, dtype, shape, seed):
    pre, grad, weights = case(activation, *shape, dtype)
    wanted = mlp_quant.activation_backward(grad, pre, weights, activation, clamp, columns=True, sums=True)
    options = grad.cuda(), pre.cuda(), weights.cuda(), activation, clamp
    for columns, sums in ((True, True), (True, False), (False, True), (False, False)):
        what = f"{columns} {sums}: "
        got = mlp_quant.activation_backward(*options, columns=columns, sums=sums)
        again = mlp_quant.activation_backward(*options, columns=columns, sums=sums)
        assert_near(got.pre.rows, wanted.pre.rows, what + "gradient, rows")
        assert_same_bits(again.pre.rows, got.pre.rows, what + "again")
        assert relative_error(got.row_weights.cpu(), wanted.row_weights) < 1e-5
        assert torch.equal(again.row_weights, got.row_weights)
        if columns:
            assert_near(got.pre.columns, wanted.pre.columns, what + "gradient, columns")
            assert_near(got.act, wanted.act, what + "activation")
            assert_same_bits(again.pre.columns, got.pre.columns, what + "again")
            assert_same_bits(again.act, got.act, what + "again")
        if sums:
            assert relative_error(got.sums.cpu(), wanted.sums) < 1e-5
            assert torch.equal(again.sums, got.sums)


def test_more_than_2_31_elements():
    """Each block is that of a small matrix."""
    part = torch.randn(128, 7296, device="cuda").bfloat16()
    x = part.repeat(2400, 1)
    assert x.numel() > 2**31
    both, wanted = mlp_quant.cast(x, columns=True), mlp_quant.cast(part, columns=True)
    blocks, wanted_blocks = mlp_quant.columns_of_rows(both.rows), mlp_quant.columns_of_rows(wanted.rows)
    for ours, theirs in ((both.rows, wanted.rows), (both.columns, wanted.columns), (blocks, wanted_blocks)):
        for first in (0, 1199, 2399):
            codes = ours.codes[128 * first : 128 * (first + 1)]
            assert torch.equal(codes.contiguous().view(torch.uint8), theirs.codes.contiguous().view(torch.uint8))
    assert torch.equal(both.columns.scales, wanted.columns.scales.expand(2400, -1))
    assert torch.equal(blocks.scales, wanted_blocks.scales.expand(2400, -1))
