"""Launches of the Hopper kernels: tensor maps and compile-time parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megamoe.kernels.gluon import bf16, fp8, k_bf16, k_fp8, pieces, schedule, skinny
from megamoe.kernels.gluon.repeat import repeated
from megamoe.kernels.gluon.tile_counters import counter_of
from megamoe.kernels.tiles import Tile, k_form, k_step_rows, store_columns

KINDS = {"dense": schedule.DENSE, "contiguous": schedule.CONTIGUOUS, "psum": schedule.PSUM, "masked": schedule.MASKED}

ACTIVATIONS = {
    None: pieces.NONE,
    "swiglu": pieces.SWIGLU,
    "swiglu_oai": pieces.SWIGLU_OAI,
    "geglu": pieces.GEGLU,
    "geglu_tanh": pieces.GEGLU_TANH,
}

# 168 registers x 384 threads fill the register file; the kernels then share them out among their roles.
# Dependent launches overlap with the kernel before: see ``pieces.wait_for_previous_kernel``.
OPTIONS = dict(num_warps=4, maxnreg=168, launch_pdl=True, enable_fp_fusion=True)

SCALES_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@dataclass(frozen=True)
class Operands:
    """The tensors of one GEMM, 2-D but for weights; see ``gemm`` for their meaning.

    Attributes:
        a: ``[rows, K]``. a_scales: ``[rows of scales, columns]`` with stride 1 along columns, or None.
        b: ``[e, N, K]`` or ``[e, K, N]``. b_scales: ``[e, N / 128, K / 128]`` or None.
        out: ``[rows, columns]``. out_scales: ``[columns / 128, rows]`` for FP8 results.
        index: int32, or any tensor if the layout needs none.
        num_rows: rows of the matrix; of one expert if masked.
        pre: bf16 ``[rows, N]``, the sums before an activation, or None.
    """

    a: torch.Tensor
    a_scales: torch.Tensor | None
    b: torch.Tensor
    b_scales: torch.Tensor | None
    out: torch.Tensor
    out_scales: torch.Tensor | None
    index: torch.Tensor
    c: torch.Tensor | None
    bias: torch.Tensor | None
    row_weights: torch.Tensor | None
    num_rows: int
    pre: torch.Tensor | None = None


def _gluon_dtype(dtype: torch.dtype) -> Any:
    return {
        torch.float8_e4m3fn: gl.float8e4nv,
        torch.bfloat16: gl.bfloat16,
        torch.float32: gl.float32,
    }[dtype]


@functools.cache
def box_layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Shared-memory layout of a TMA box of operands or results."""
    return gl.NVMMASharedLayout.get_default_for(list(block), _gluon_dtype(dtype))


def descriptor(tensor: torch.Tensor, block: tuple[int, ...], layout: Any = None) -> TensorDescriptor:
    """Tensor map of ``tensor`` with boxes ``block``."""
    return TensorDescriptor.from_tensor(tensor, list(block), layout or box_layout(block, tensor.dtype))


class _Address:
    """Stands for a tensor in a kept launch: an address, so that no memory is kept alive."""

    __slots__ = ("dtype", "_address")

    def __init__(self, tensor: torch.Tensor):
        self.dtype = tensor.dtype
        self._address = tensor.data_ptr()

    def data_ptr(self) -> int:
        return self._address


def _detached(argument: Any) -> Any:
    """``argument`` without its tensor."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if isinstance(argument, TensorDescriptor):
        copy = object.__new__(TensorDescriptor)
        copy.__dict__.update(argument.__dict__)
        copy.base = _Address(argument.base)
        copy.shape = list(argument.shape)
        copy.strides = list(argument.strides)
        return copy
    return argument


_kernels: dict[tuple, Any] = {}


def _kind_of(argument: Any) -> Any:
    """What the compiler sees of an argument; sizes are not specialised."""
    if isinstance(argument, TensorDescriptor):
        return (argument.base.dtype, tuple(argument.block_shape), argument.layout)
    if isinstance(argument, torch.Tensor):
        return (argument.dtype, argument.data_ptr() % 16 == 0)
    return type(argument)


@functools.cache
def _compile_time(kernel: Any) -> frozenset[str]:
    """Names of the kernel's compile-time parameters."""
    return frozenset(parameter.name for parameter in kernel.params if parameter.is_constexpr)


def _compiled(kernel: Any, arguments: dict[str, Any], device: int) -> Any:
    """The kernel compiled for these arguments. Triton's own search for it costs more than the launch."""
    constants = _compile_time(kernel)
    kinds = (value if name in constants else _kind_of(value) for name, value in arguments.items())
    key = (kernel, device, *kinds)
    if key not in _kernels:
        _kernels[key] = kernel.warmup(*arguments.values(), grid=(1,), **OPTIONS)
    return _kernels[key]


def gemm(
    kind: str,
    x: Operands,
    tile: Tile,
    sms: int,
    *,
    activation: str | None = None,
    clamp: float | None = None,
    transposed_b: bool = False,
) -> Callable[[], None]:
    """Computes into ``x.out`` (and ``x.out_scales``). Nothing is checked here; ``gemm.py`` does.

    Returns:
        The launch, to be repeated while the tensors lie where they are.
    """
    kernel, arguments = arguments_of(
        kind, x, tile, activation=activation, clamp=clamp, transposed_b=transposed_b, counter=counter_of(x.out)
    )
    return _launched(kernel, arguments, x.a.device.index, sms)


def _launched(kernel: Any, arguments: dict[str, Any], device: int, sms: int) -> Callable[[], None]:
    """Launches the kernel with ``sms`` programs; returns the launch."""
    with torch.cuda.device(device):
        compiled = _compiled(kernel, arguments, device)
        # In the kernel's order, compile-time values and all; num_warps is the last of them.
        bound = {**arguments, "num_warps": OPTIONS["num_warps"]}
        values = tuple(_detached(bound[name]) for name in kernel.arg_names)
        run = repeated(compiled, sms, values)

    def launch() -> None:
        if torch._C._cuda_getDevice() == device:
            run(torch._C._cuda_getCurrentRawStream(device))
        else:
            with torch.cuda.device(device):
                run(torch._C._cuda_getCurrentRawStream(device))

    launch()
    return launch


def arguments_of(
    kind: str,
    x: Operands,
    tile: Tile,
    *,
    activation: str | None = None,
    clamp: float | None = None,
    transposed_b: bool = False,
    counter: torch.Tensor | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The kernel and its arguments by name, without ``num_warps``.

    Args:
        counter: int32 ``[1]``, zero, from which programs take tiles; None: at fixed distances.
    """
    counted = _counted(counter, x.a.device)
    if x.a.dtype == torch.bfloat16:
        kernel = bf16.bf16_gemm_kernel
        arguments = _bf16_arguments(kind, x, tile, counted, activation, clamp, transposed_b)
    elif tile.is_wide:
        kernel, arguments = fp8.fp8_gemm_kernel, _wide_arguments(kind, x, tile, counted, activation, clamp)
    else:
        kernel, arguments = skinny.fp8_skinny_gemm_kernel, _skinny_arguments(kind, x, tile, counted)
    plain = {name: value.value if isinstance(value, gl.constexpr) else value for name, value in arguments.items()}
    return kernel, plain


def _counted(counter: torch.Tensor | None, device: torch.device) -> dict[str, Any]:
    """What tells a kernel where its programs take tiles from."""
    if counter is None:
        return dict(counter=torch.empty(1, dtype=torch.int32, device=device), counted=0)
    return dict(counter=counter, counted=1)


def _stored(x: Operands) -> Any:
    if x.out.dtype == torch.float8_e4m3fn:
        return pieces.FP8
    if x.out.dtype == torch.bfloat16:
        return pieces.BF16
    return pieces.FP32 if x.c is None else pieces.ADD_FP32


def _wide_arguments(
    kind: str, x: Operands, tile: Tile, counted: dict[str, Any], activation: str | None, clamp: float | None
) -> dict[str, Any]:
    experts, n, k = x.b.shape
    second = tile.block_n - 128
    b = x.b.view(experts * n, k)
    # The fp32 results are stored without TMA: any tensor map will do.
    out = x.out if x.out.dtype != torch.float32 else x.a
    return dict(
        a_desc=descriptor(x.a, (tile.rows, 128)),
        b_desc=descriptor(b, (128, 128)),
        b1_desc=descriptor(b, (second, 128)),
        sfa_desc=descriptor(x.a_scales, (1, 128), SCALES_LAYOUT),
        d_desc=descriptor(out, (64, 128)),
        d1_desc=descriptor(out, (64, second)) if x.pre is None else _halves(x.pre),
        sfb_ptr=x.b_scales,
        d_ptr=x.out,
        bias_ptr=x.b_scales if x.bias is None else x.bias,
        sf_ptr=x.b_scales if x.out_scales is None else x.out_scales,
        weights_ptr=x.b_scales if x.row_weights is None else x.row_weights,
        index=x.index,
        **counted,
        num_rows=x.num_rows,
        num_experts=experts,
        n8=n // 8,
        k=k,
        sf_stride=0 if x.out_scales is None else x.out_scales.stride(0),
        clamp=0.0 if clamp is None else clamp,
        LAYOUT=KINDS[kind],
        STAGES=tile.stages,
        GROUP_M=tile.group_m,
        TOGETHER=tile.together,
        BLOCK_M=tile.rows,
        WIDTH=second,
        ACTIVATION=ACTIVATIONS[activation],
        CLAMP=clamp is not None,
        WEIGHTED=x.row_weights is not None,
        PRE=x.pre is not None,
        BIAS=x.bias is not None,
        OUT=_stored(x),
    )


def _halves(pre: torch.Tensor) -> TensorDescriptor:
    """Map of ``pre [rows, 2 I]`` as ``[2, rows, I]``."""
    rows, columns = pre.shape
    box = (1, 64, 128)
    strides = [columns // 2, columns, 1]
    return TensorDescriptor(pre, [2, rows, columns // 2], strides, list(box), box_layout(box, pre.dtype))


def _skinny_arguments(kind: str, x: Operands, tile: Tile, counted: dict[str, Any]) -> dict[str, Any]:
    experts, n, k = x.b.shape
    scale_columns = max(32, tile.block_m)
    return dict(
        a_desc=descriptor(x.a, (tile.block_m, 128)),
        b_desc=descriptor(x.b.view(experts * n, k), (tile.block_n, 128)),
        sfa_desc=descriptor(x.a_scales, (1, scale_columns), SCALES_LAYOUT),
        sfb_ptr=x.b_scales,
        d_ptr=x.out,
        bias_ptr=x.b_scales if x.bias is None else x.bias,
        index=x.index,
        **counted,
        num_rows=x.num_rows,
        num_experts=experts,
        n8=n // 8,
        k=k,
        LAYOUT=KINDS[kind],
        STAGES=tile.stages,
        GROUP_M=tile.group_m,
        TOGETHER=tile.together,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        KS=tile.k_blocks,
        SFA_COLS=scale_columns,
        SWAP=tile.swap,
        BIAS=x.bias is not None,
        OUT=_stored(x),
    )


def _bf16_arguments(
    kind: str,
    x: Operands,
    tile: Tile,
    counted: dict[str, Any],
    activation: str | None,
    clamp: float | None,
    transposed_b: bool,
) -> dict[str, Any]:
    experts, n, k = x.b.shape
    if transposed_b:
        n, k = k, n
        b_desc = descriptor(x.b, (1, 64, 256))
    else:
        b_desc = descriptor(x.b.view(experts * n, k), (256 if activation is None else 128, 64))
    wide = tile.stages <= 3 and activation is None
    start = pieces.FROM_ZERO
    start_ptr = x.a
    if x.c is not None:
        start, start_ptr = pieces.FROM_C, x.c
    elif x.bias is not None:
        start, start_ptr = pieces.FROM_BIAS, x.bias
    d_desc = descriptor(x.out if x.out.dtype == torch.bfloat16 else x.a, (64, 256 if wide else 128))
    return dict(
        a_desc=descriptor(x.a, (128, 64)),
        b_desc=b_desc,
        d_desc=d_desc,
        pre_desc=d_desc if x.pre is None else _halves(x.pre),
        d_ptr=x.out,
        start_ptr=start_ptr,
        weights_ptr=x.index if x.row_weights is None else x.row_weights,
        index=x.index,
        **counted,
        num_rows=x.num_rows,
        num_experts=experts,
        n8=n // 8,
        k=k,
        clamp=0.0 if clamp is None else clamp,
        LAYOUT=KINDS[kind],
        STAGES=tile.stages,
        GROUP_M=tile.group_m,
        TOGETHER=tile.together,
        SKEW=tile.skew,
        WIDE=wide,
        ACTIVATION=ACTIVATIONS[activation],
        CLAMP=clamp is not None,
        WEIGHTED=x.row_weights is not None,
        PRE=x.pre is not None,
        START=start,
        OUT=pieces.FP32 if x.out.dtype == torch.float32 else pieces.BF16,
        TRANSPOSED_B=transposed_b,
    )


# ---------------------------------------------------------------- K-grouped


@dataclass(frozen=True)
class KOperands:
    """The tensors of one K-grouped GEMM; see ``gemm_k`` for their meaning.

    Attributes:
        a: BF16 ``[rows, M]``, or e4m3 codes ``[rows, M]`` dense along the rows. a_scales: ``[rows / 128, M]`` or None.
        b, b_scales: the same with N columns; or scales ``[rows / 128, N / 128]``.
        out: ``[e, M, N]``. add: the sums are added to it.
        ends: int32 ``[e]``.
    """

    a: torch.Tensor
    a_scales: torch.Tensor | None
    b: torch.Tensor
    b_scales: torch.Tensor | None
    out: torch.Tensor
    add: bool
    ends: torch.Tensor

    @property
    def form(self) -> str:
        """One of ``tiles.K_FORMS``."""
        return k_form(self.b.shape[1], None if self.b_scales is None else self.b_scales.shape[1])


def k_gemm(x: KOperands, tile: Tile, sms: int) -> Callable[[], None]:
    """Computes into ``x.out``. Nothing is checked here; ``gemm_k`` does. Returns the launch, as ``gemm``."""
    kernel, arguments = k_arguments_of(x, tile, counter_of(x.out))
    return _launched(kernel, arguments, x.a.device.index, sms)


def _two_row_dimensions(x: torch.Tensor, step: int, columns: int) -> TensorDescriptor:
    """Map of ``x [rows, C]`` whose element (q, r, c) is ``x[q + r, c]``, r < step; boxes of ``step`` rows."""
    rows, width = x.shape
    box = (1, step, columns)
    return TensorDescriptor(x, [rows, step, width], [width, width, 1], list(box), box_layout(box, x.dtype))


def _codes_by_sixteens(x: torch.Tensor, columns: int) -> TensorDescriptor:
    """Map of ``x [rows, C]``, dense along the rows, whose element (c, q, r) is ``x[16 q + r, c]``, r < 128."""
    rows, width = x.shape
    box = (columns, 1, 128)
    return TensorDescriptor(x, [width, rows // 16, 128], [rows, 16, 1], list(box), box_layout(box, x.dtype))


def k_arguments_of(x: KOperands, tile: Tile, counter: torch.Tensor | None = None) -> tuple[Any, dict[str, Any]]:
    """The K-grouped kernel and its arguments by name, without ``num_warps``; ``counter`` as in ``arguments_of``."""
    columns = store_columns(tile.stages, x.form, x.out.element_size())
    common = dict(
        d_desc=descriptor(x.out, (1, 64, columns)),
        index=x.ends,
        **_counted(counter, x.a.device),
        num_rows=x.a.shape[0],
        num_experts=x.out.shape[0],
        m=x.out.shape[1],
        n=x.out.shape[2],
        STAGES=tile.stages,
        GROUP_M=tile.group_m,
    )
    if x.a_scales is not None:
        blocks = x.form == "fp8-blocks"
        kernel = k_fp8.k_grouped_fp8_gemm_kernel
        arguments = dict(
            a_desc=_codes_by_sixteens(x.a, 128),
            b_desc=_codes_by_sixteens(x.b, 256),
            sfa_desc=descriptor(x.a_scales, (1, 128), SCALES_LAYOUT),
            sfb_desc=descriptor(x.a_scales if blocks else x.b_scales, (1, 256), SCALES_LAYOUT),
            sfb_ptr=x.b_scales,
            **common,
            ADD=x.add,
            BLOCKS=blocks,
        )
    else:
        kernel = k_bf16.k_grouped_bf16_gemm_kernel
        step = k_step_rows(tile.stages, x.form)
        arguments = dict(
            a_desc=_two_row_dimensions(x.a, step, 64),
            b_desc=_two_row_dimensions(x.b, step, 256),
            **common,
            SKEW=tile.skew,
            ADD=x.add,
        )
    return kernel, arguments
