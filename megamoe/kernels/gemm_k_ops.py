"""Execution of checked K-grouped GEMMs, by device, and the torch operator that torch.compile sees in their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

import torch

from megamoe.errors import fail_value
from megamoe.kernels import reference_gemm
from megamoe.kernels.gemm_ops import get_num_sms, runs_kernels
from megamoe.kernels.row_groups import RowGroups
from megamoe.kernels.tiles import Tile, is_legal_k, k_form, legal_k_tiles


def _on_hopper(
    a: torch.Tensor,
    a_scales: torch.Tensor | None,
    b: torch.Tensor,
    b_scales: torch.Tensor | None,
    rows: RowGroups,
    out: torch.Tensor,
    add: bool,
    tile: Tile | None,
) -> Callable[[], None] | None:
    from megamoe.kernels.gluon import launch

    form = k_form(b.shape[1], None if b_scales is None else b_scales.shape[1])
    if tile is None:
        tile = legal_k_tiles(form)[0]
    elif not is_legal_k(tile, form, out.element_size()):
        fail_value("tile", tile, "no K-grouped kernel runs it", "Take one of megamoe.kernels.tiles.legal_k_tiles.")
    copied = False
    if a_scales is not None:
        # The tensor cores take e4m3 operands that are dense along the sum only.
        copied = not (a.t().is_contiguous() and b.t().is_contiguous())
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    operands = launch.KOperands(a, a_scales, b, b_scales, out, add, rows.index)
    run = launch.k_gemm(operands, tile, get_num_sms(a.device))
    return None if copied else run


def execute(
    a: torch.Tensor,
    a_scales: torch.Tensor | None,
    b: torch.Tensor,
    b_scales: torch.Tensor | None,
    rows: RowGroups,
    out: torch.Tensor,
    c: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> Callable[[], None] | None:
    """Computes into ``out``. Arguments as in ``gemm_k``, checked there.

    Returns:
        What computes it again while the tensors lie where they are; None if there is no short way.
    """
    # The kernels add to what is there.
    copied = c is not None and c is not out
    if copied:
        out.copy_(c)
    if torch.compiler.is_compiling():
        fields = None if tile is None else [int(field) for field in astuple(tile)]
        _operator(a, a_scales, b, b_scales, rows.index, out, c is not None, fields)
        return None
    run = _execute(a, a_scales, b, b_scales, rows, out, c is not None, tile)
    return None if copied else run


def _execute(
    a: torch.Tensor,
    a_scales: torch.Tensor | None,
    b: torch.Tensor,
    b_scales: torch.Tensor | None,
    rows: RowGroups,
    out: torch.Tensor,
    add: bool,
    tile: Tile | None,
) -> Callable[[], None] | None:
    if not out.numel():
        return None
    if not a.shape[0]:
        if not add:
            out.zero_()
        return None
    if runs_kernels(a):
        return _on_hopper(a, a_scales, b, b_scales, rows, out, add, tile)
    reference_gemm.k_gemm(a, a_scales, b, b_scales, rows, out, add)
    return None


# Eager calls skip the operator: its dispatch costs more than the launch.
@torch.library.custom_op("megamoe::k_grouped_gemm", mutates_args=("out",))
def _operator(
    a: torch.Tensor,
    a_scales: torch.Tensor | None,
    b: torch.Tensor,
    b_scales: torch.Tensor | None,
    ends: torch.Tensor,
    out: torch.Tensor,
    add: bool,
    tile: list[int] | None,
) -> None:
    rows = RowGroups.psum(ends)
    chosen = None if tile is None else Tile(*tile[:6], bool(tile[6]), tile[7], bool(tile[8]))
    _execute(a, a_scales, b, b_scales, rows, out, add, chosen)


@_operator.register_fake
def _(a, a_scales, b, b_scales, ends, out, add, tile) -> None:
    return None
