"""Launches of the casts between the GEMMs of the FP8 MLP: tensor maps and compile-time parameters."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl

from megamoe.kernels.formats import FP8_MAX, MIN_AMAX
from megamoe.kernels.gluon import casts
from megamoe.kernels.gluon.launch import SCALES_LAYOUT, descriptor
from megamoe.types import Fp8Tensor

BLOCK = 128

OPTIONS: dict[str, dict[str, Any]] = {
    "cast_kernel": dict(num_warps=8, maxnreg=128),
    "activation_backward_kernel": dict(num_warps=8),
}
"""Of a kernel's launches."""

PROGRAMS = {"cast_kernel": 2, "activation_backward_kernel": 1}
"""Of a kernel on a multiprocessor: as many as registers and shared memory allow."""

RING_BYTES = {"cast_kernel": 80 * 1024, "activation_backward_kernel": 200 * 1024}
"""Shared memory for the inputs of the blocks that are on their way."""


def _stages(kernel: str, block_bytes: int) -> int:
    """Blocks that are on their way at a time; more than three take time to start."""
    return max(min(RING_BYTES[kernel] // block_bytes, 3), 1)


def _matrix(x: torch.Tensor) -> Any:
    """Tensor map of ``x [rows, columns]`` in boxes of a block; of a copy where it cannot be read so."""
    stride = x.stride(0) * x.element_size()
    if x.stride(1) != 1 or x.stride(0) < x.shape[1] or x.data_ptr() % 16 or stride % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * x.element_size(), rank=2)
    return descriptor(x, (BLOCK, BLOCK), layout)


def _words(columns: Fp8Tensor) -> torch.Tensor:
    """int32 ``[N, P / 4]`` of codes ``[P, N]`` that are dense along the rows."""
    return columns.codes.t().view(torch.int32)


def cast_arguments(
    x: torch.Tensor, x_scales: torch.Tensor | None, rows: Fp8Tensor | None, columns: Fp8Tensor
) -> tuple[Any, dict[str, Any]]:
    """The kernel and its arguments by name: of ``both_ways``, or with ``x_scales`` of ``columns_of_rows``."""
    scaled, words = x_scales is not None, _words(columns)
    scales = x_scales if scaled else rows.scales
    arguments = dict(
        x_desc=_matrix(x),
        x_scales_desc=descriptor(scales.t(), (1, BLOCK), SCALES_LAYOUT),
        # Of row-wise codes no others are made: their places are taken by the columns'.
        codes=words if scaled else rows.codes,
        scales=columns.scales if scaled else scales,
        codes_t=words,
        scales_t=columns.scales,
        row_blocks=x.shape[0] // BLOCK,
        num_cols=x.shape[1],
        scale_group_stride=scales.stride(1),
        min_amax=MIN_AMAX,
        SCALED=scaled,
        STAGES=_stages("cast_kernel", BLOCK * BLOCK * x.element_size()),
        LARGEST=FP8_MAX,
    )
    return casts.cast_kernel, arguments


def activation_backward_arguments(
    grad: torch.Tensor,
    pre: torch.Tensor,
    row_weights: torch.Tensor,
    rows: Fp8Tensor,
    columns: Fp8Tensor | None,
    act: Fp8Tensor | None,
    weight_grads: torch.Tensor,
    sums: torch.Tensor | None,
    activation: str,
    clamp: float | None,
) -> tuple[Any, dict[str, Any]]:
    """The kernel and its arguments by name, of ``activation_backward``."""
    halves = 1 if activation == "relu2" else 2
    # Where there is no such output, any tensor takes its place.
    columns, act = columns or rows, act or rows
    with_columns = columns is not rows
    arguments = dict(
        grad_desc=_matrix(grad),
        pre_desc=_matrix(pre),
        row_weights=row_weights,
        codes=rows.codes,
        scales=rows.scales,
        codes_t=_words(columns) if with_columns else row_weights,
        scales_t=columns.scales,
        act_t=_words(act) if with_columns else row_weights,
        act_scales_t=act.scales,
        weight_grads=weight_grads,
        sums=weight_grads if sums is None else sums,
        row_blocks=grad.shape[0] // BLOCK,
        num_cols=grad.shape[1],
        scale_group_stride=rows.scales.stride(1),
        min_amax=MIN_AMAX,
        clamp=0.0 if clamp is None else float(clamp),
        ACTIVATION=activation,
        CLAMP=clamp is not None,
        WITH_COLUMNS=with_columns,
        WITH_SUMS=sums is not None,
        STAGES=_stages("activation_backward_kernel", (1 + halves) * BLOCK * BLOCK * grad.element_size()),
        LARGEST=FP8_MAX,
    )
    return casts.activation_backward_kernel, arguments


def _launch(kernel: Any, arguments: dict[str, Any], device: torch.device, sms: int) -> None:
    name = kernel.fn.__name__
    blocks = arguments["row_blocks"] * -(-arguments["num_cols"] // BLOCK)
    with torch.cuda.device(device):
        kernel[(min(sms * PROGRAMS[name], blocks),)](**arguments, **OPTIONS[name])


def both_ways(x: torch.Tensor, rows: Fp8Tensor, columns: Fp8Tensor, sms: int) -> None:
    """Casts ``x [P, N]`` into ``rows`` with MN-major scales and into ``columns``, in 128x1 blocks and with codes dense
    along the rows. P is a multiple of 128, N of 16.
    """
    if x.numel():
        _launch(*cast_arguments(x, None, rows, columns), x.device, sms)


def columns_of_rows(x: Fp8Tensor, columns: Fp8Tensor, sms: int) -> None:
    """Casts the values of ``x [P, N]``, with MN-major scales per row and 128 columns, into ``columns``, in 128x128
    blocks and with codes dense along the rows. P is a multiple of 128, N of 16.
    """
    if x.codes.numel():
        _launch(*cast_arguments(x.codes, x.scales, None, columns), x.codes.device, sms)


def activation_backward(
    grad: torch.Tensor,
    pre: torch.Tensor,
    row_weights: torch.Tensor,
    rows: Fp8Tensor,
    columns: Fp8Tensor | None,
    act: Fp8Tensor | None,
    weight_grads: torch.Tensor,
    sums: torch.Tensor | None,
    activation: str,
    clamp: float | None,
    sms: int,
) -> None:
    """The gradients of ``pre [P, N]``, N = 2I or I for ``relu2``, for ``grad [P, I]`` of the same dtype.

    P and I are multiples of 128.

    Args:
        rows, columns: the gradient of ``pre`` as in ``both_ways``.
        act: the activation x ``row_weights`` in 128x128 blocks, like ``columns``; None where there are none.
        weight_grads: fp32 ``[I / 128, P]``, gets each 128 columns' part of the gradient of ``row_weights [P]``.
        sums: fp32 ``[P / 128, N]``, gets those of each 128 rows of the unrounded gradients, or None.
    """
    if grad.numel():
        arguments = rows, columns, act, weight_grads, sums, activation, clamp
        _launch(*activation_backward_arguments(grad, pre, row_weights, *arguments), grad.device, sms)
