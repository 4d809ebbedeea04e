"""Execution of checked GEMMs, by device, and the torch operator that torch.compile sees in their place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import astuple

import torch

from megamoe.errors import check_int, fail_value
from megamoe.kernels import reference_gemm
from megamoe.kernels.row_groups import RowGroups
from megamoe.kernels.tiles import Problem, Tile, choose_tile, is_legal

# ---------------------------------------------------------------- device


@functools.cache
def _is_hopper(index: int) -> bool:
    """Whether the GPU runs our kernels and triton is there to compile them."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.get_device_capability(index)[0] == 9


def runs_kernels(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and _is_hopper(tensor.device.index)


@functools.cache
def _sm_count(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


_num_sms: int | None = None


def set_num_sms(count: int | None) -> None:
    """Streaming multiprocessors that GEMMs use from now on, to leave some to communication; None = all."""
    global _num_sms
    if count is not None:
        check_int("count", count, 1)
    _num_sms = count


def num_sms_limit() -> int | None:
    """What ``set_num_sms`` was given last."""
    return _num_sms


def get_num_sms(device: torch.device | None = None) -> int:
    """Streaming multiprocessors that GEMMs use on ``device`` (default: the current GPU)."""
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    count = _sm_count(index)
    return count if _num_sms is None else min(_num_sms, count)


# ---------------------------------------------------------------- Hopper


def problem_of(
    rows: RowGroups | None, a: torch.Tensor, experts: int, n: int, wide_only: bool, out_bytes: int = 2
) -> Problem:
    """What decides on the tile: sizes, the hint of ``rows``, the SMs to use."""
    if rows is None:
        kind, usual = "dense", a.shape[0]
    elif rows.kind == "masked":
        kind, usual = "masked", a.shape[1]
    else:
        kind, usual = rows.kind, -(-a.shape[0] // max(experts, 1))
    if rows is not None and rows.expected is not None:
        usual = min(rows.expected, a.shape[-2])
    blocks = a.shape[0] // 128 if kind == "contiguous" else None
    return Problem(usual, experts, n, a.shape[-1], kind, get_num_sms(a.device), wide_only, out_bytes, blocks)


@functools.lru_cache(maxsize=4096)
def _chosen_tile(problem: Problem, dtype: str) -> Tile:
    return choose_tile(problem, dtype)


def _on_hopper(
    a: torch.Tensor,
    a_scales: torch.Tensor | None,
    b: torch.Tensor,
    b_scales: torch.Tensor | None,
    rows: RowGroups | None,
    out: torch.Tensor,
    out_scales: torch.Tensor | None,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    tile: Tile | None,
    transposed_b: bool,
    activation: str | None,
    clamp: float | None,
    pre: torch.Tensor | None,
) -> Callable[[], None] | None:
    from megamoe.kernels.gluon import launch

    kind = "dense" if rows is None else rows.kind
    n = b.shape[-1] if transposed_b else b.shape[-2]
    # A bias is added in fp32, after the results have changed their order.
    problem = problem_of(rows, a, b.shape[0], n, activation is not None, out.element_size())
    dtype = "bf16" if a.dtype == torch.bfloat16 else "fp8"
    if tile is None:
        tile = _chosen_tile(problem, dtype)
    elif not is_legal(tile, problem, dtype):
        fail_value("tile", tile, f"no kernel runs it for {problem}", "Take one of megamoe.kernels.tiles.legal_tiles.")
    # The FP8 kernels add to what is there.
    copied = c is not None and a_scales is not None and c is not out
    if copied:
        out.copy_(c)
    masked = kind == "masked"
    operands = launch.Operands(
        a.view(-1, a.shape[-1]) if masked else a,
        None if a_scales is None else _flat_scales(a_scales),
        b,
        b_scales,
        out.view(-1, out.shape[-1]) if masked else out,
        None if out_scales is None else _flat_scales(out_scales),
        b if rows is None else rows.index,
        c,
        bias,
        row_weights,
        a.shape[-2],
        pre,
    )
    run = launch.gemm(kind, operands, tile, problem.sms, activation=activation, clamp=clamp, transposed_b=transposed_b)
    return None if copied else run


def _flat_scales(scales: torch.Tensor) -> torch.Tensor:
    """MN-major ``[(e,) rows, K / 128]`` as ``[(e *) K / 128, rows]``: the K blocks of one expert after another's."""
    if scales.dim() == 2:
        return scales.t()
    experts, rows, blocks = scales.shape
    return scales.as_strided((experts * blocks, rows), (scales.stride(2), 1))


# ---------------------------------------------------------------- operator


def execute(
    a: torch.Tensor,
    a_scales: torch.Tensor | None,
    b: torch.Tensor,
    b_scales: torch.Tensor | None,
    rows: RowGroups | None,
    out: torch.Tensor,
    out_scales: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    tile: Tile | None = None,
    transposed_b: bool = False,
    activation: str | None = None,
    clamp: float | None = None,
    pre: torch.Tensor | None = None,
) -> Callable[[], None] | None:
    """Computes into ``out`` (and ``out_scales``, ``pre``). Arguments as in ``gemm``, checked there.

    Returns:
        What computes it again while the tensors lie where they are; None if there is no short way.
    """
    rest, last = (c, bias, row_weights), (transposed_b, activation, clamp, pre)
    if torch.compiler.is_compiling():
        kind, index, expected = ("dense", None, None) if rows is None else (rows.kind, rows.index, rows.expected)
        fields = None if tile is None else [int(field) for field in astuple(tile)]
        _operator(
            a,
            a_scales,
            b,
            b_scales,
            kind,
            index,
            expected,
            out,
            out_scales,
            *rest,
            fields,
            *last,
        )
    elif not out.numel() or not b.shape[0]:
        return None
    elif runs_kernels(a) and a.shape[-1]:
        return _on_hopper(a, a_scales, b, b_scales, rows, out, out_scales, *rest, tile, *last)
    else:
        reference_gemm.gemm(a, a_scales, b, b_scales, rows, out, out_scales, *rest, *last)
    return None


# Eager calls skip the operator: its dispatch costs more than the launch.
@torch.library.custom_op("megamoe::gemm", mutates_args=("out", "out_scales", "pre"))
def _operator(
    a: torch.Tensor,
    a_scales: torch.Tensor | None,
    b: torch.Tensor,
    b_scales: torch.Tensor | None,
    kind: str,
    index: torch.Tensor | None,
    expected: int | None,
    out: torch.Tensor,
    out_scales: torch.Tensor | None,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    tile: list[int] | None,
    transposed_b: bool,
    activation: str | None,
    clamp: float | None,
    pre: torch.Tensor | None,
) -> None:
    rows = None if index is None else RowGroups(kind, index, expected)
    chosen = None if tile is None else Tile(*tile[:6], bool(tile[6]), tile[7], bool(tile[8]))
    last = chosen, transposed_b, activation, clamp, pre
    execute(a, a_scales, b, b_scales, rows, out, out_scales, c, bias, row_weights, *last)


@_operator.register_fake
def _(
    a,
    a_scales,
    b,
    b_scales,
    kind,
    index,
    expected,
    out,
    out_scales,
    c,
    bias,
    row_weights,
    tile,
    transposed_b,
    activation,
    clamp,
    pre,
) -> None:
    return None
