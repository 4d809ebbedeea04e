"""The expert MLP in FP8: rows and gradients in 1x128 blocks, weights in 128x128; for weight gradients, which sum over
rows, gradients in 128x1 blocks, rows and activations in 128x128.

Between the casts: fp32 inside a kernel, BF16 in memory where rows are BF16, else fp32. GEMM 1 computes the activation
from its fp32 sums, but for ``relu2``, and for rows that are not BF16 where pre-activations are kept. The rows are kept
as their codes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from megamoe.errors import fail_value
from megamoe.kernels import gemm, gemm_k, gemm_swiglu, mlp_quant, pool_gemm, quant
from megamoe.kernels.main_grad import can_be_written, finish
from megamoe.kernels.mlp_options import MlpOptions
from megamoe.kernels.reference import FP8_BLOCK
from megamoe.kernels.row_groups import RowGroups
from megamoe.kernels.weight_cache import K_MULTIPLE, Padding, fp8_copy, joined_copies
from megamoe.types import ExpertLayout, Fp8Tensor


def _paddings(options: MlpOptions) -> tuple[Padding, Padding]:
    """Of ``up_proj`` and ``down_proj``: no block may span gate and up."""
    return Padding(options.halves, FP8_BLOCK, K_MULTIPLE), Padding(1, K_MULTIPLE, FP8_BLOCK)


def _intermediate_dtype(rows: torch.Tensor) -> torch.dtype:
    """In which pre-activations and gradients between GEMMs lie in memory."""
    return torch.bfloat16 if rows.dtype == torch.bfloat16 else torch.float32


def kept_forms(
    rows: torch.Tensor,
    up_proj: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    options: MlpOptions,
) -> list[tuple[Sequence[int], torch.dtype] | None]:
    """Shapes and dtypes of what ``forward`` keeps: codes and scales of the rows, pre-activations.

    Codes as bytes: torch.compile's tools do not know what to do with e4m3 results.
    """
    num_rows = rows.shape[0]
    _, columns, hidden = _paddings(options)[0].shape(up_proj)
    codes = (num_rows, hidden), torch.uint8
    scales = (-(-hidden // FP8_BLOCK), num_rows), torch.float32
    pre = (num_rows, columns), _intermediate_dtype(rows)
    return [codes, scales, None if options.recompute == "activation" else pre]


def _pad_columns(x: torch.Tensor, columns: int) -> torch.Tensor:
    return x if x.shape[1] == columns else F.pad(x, (0, columns - x.shape[1]))


def _cut_columns(x: torch.Tensor, columns: int) -> torch.Tensor:
    return x if x.shape[1] == columns else x[:, :columns]


def _padded_bias(bias: torch.Tensor | None, padding: Padding) -> torch.Tensor | None:
    """``bias [e, M]`` as GEMMs add it to the padded results."""
    if bias is None:
        return None
    bias = bias if bias.dtype == torch.bfloat16 else bias.float()
    # Its columns are the weight's rows.
    rows = Padding(padding.halves, padding.rows, 1).pad(bias.unsqueeze(2))
    return rows.squeeze(2).contiguous()


def _weights(row_weights: torch.Tensor) -> torch.Tensor:
    return row_weights.float().contiguous()


def _fuses(options: MlpOptions, wide: torch.dtype, with_pre: bool) -> bool:
    """Whether GEMM 1 computes the activation, and stores its pre-activations beside it."""
    return options.activation in gemm_swiglu.ACTIVATIONS and (wide == torch.bfloat16 or not with_pre)


def _first_gemm(
    codes: Fp8Tensor,
    up: Fp8Tensor,
    groups: RowGroups,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    options: MlpOptions,
    wide: torch.dtype,
    with_pre: bool,
) -> tuple[Fp8Tensor, torch.Tensor | None]:
    """The activation (x routing weight), cast, and the pre-activations, where asked for or on the way."""
    if not _fuses(options, wide, with_pre):
        pre = gemm.grouped_fp8_gemm_nt(codes, up, groups, out_dtype=wide, bias=bias)
        return mlp_quant.activation(pre, weights, options.activation, options.clamp), pre
    shape = codes.codes.shape[0], up.codes.shape[1]
    pre = torch.empty(shape, dtype=wide, device=codes.codes.device) if with_pre else None
    act = gemm_swiglu.grouped_fp8_gemm_swiglu_nt(
        codes,
        up,
        groups,
        row_weights=weights,
        activation=options.activation,
        clamp=options.clamp,
        bias=bias,
        pre=pre,
    )
    return act, pre


def forward(
    rows: torch.Tensor,
    row_weights: torch.Tensor,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    layout: ExpertLayout,
    options: MlpOptions,
    trained: bool,
    row_codes: Fp8Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The result, and with ``trained`` what the backward pass needs, as in ``kept_forms``.

    With ``row_codes`` the rows have been cast before, and only their shape and dtype are looked at.

    Pre-activations are None where the backward pass computes them again.

    Raises:
        MegaMoEError: the pool does not consist of blocks of 128 rows.
    """
    up_padding, down_padding = _paddings(options)
    phase = "training" if trained else "inference"
    weights = fp8_copy(up_proj, up_padding, phase).plain, fp8_copy(down_proj, down_padding, phase).plain
    return _forward(rows, row_weights, *weights, up_bias, down_bias, layout, options, trained, row_codes)


def forward_joined(
    rows: torch.Tensor,
    row_weights: torch.Tensor,
    ups: tuple[torch.Tensor, torch.Tensor],
    downs: tuple[torch.Tensor, torch.Tensor],
    layout: ExpertLayout,
    options: MlpOptions,
    row_codes: Fp8Tensor | None = None,
) -> torch.Tensor:
    """The result of rows of e + s experts, in inference, whose weights are two tensors each (``joined_copies``)."""
    weights = (joined_copies(*pair, padding) for pair, padding in zip((ups, downs), _paddings(options), strict=True))
    return _forward(rows, row_weights, *weights, None, None, layout, options, False, row_codes)[0]


def _forward(
    rows: torch.Tensor,
    row_weights: torch.Tensor,
    up: Fp8Tensor,
    down: Fp8Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    layout: ExpertLayout,
    options: MlpOptions,
    trained: bool,
    row_codes: Fp8Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """``forward`` with padded weights."""
    if rows.shape[0] % FP8_BLOCK:
        fail_value(
            "rows.shape[0]", rows.shape[0], f"must be a multiple of {FP8_BLOCK} in FP8", "Add rows of no expert."
        )
    up_padding, down_padding = _paddings(options)
    groups, weights, wide = RowGroups.padded(layout), _weights(row_weights), _intermediate_dtype(rows)
    columns = up.codes.shape[2]
    if row_codes is None:
        codes = quant.quantize_rowwise(_pad_columns(rows, columns), mn_major=True)
    else:
        padded = _pad_columns(row_codes.codes.view(torch.uint8), columns).view(torch.float8_e4m3fn)
        codes = Fp8Tensor(padded, row_codes.scales, row_codes.block)
    inner_weights = weights if down_bias is None else None
    bias = _padded_bias(up_bias, up_padding)
    keeps = trained and options.recompute == "none"
    act, pre = _first_gemm(codes, up, groups, inner_weights, bias, options, wide, keeps)
    if down_bias is None:
        out = gemm.grouped_fp8_gemm_nt(act, down, groups, out_dtype=wide)
    else:
        bias = _padded_bias(down_bias, down_padding)
        unweighted = gemm.grouped_fp8_gemm_nt(act, down, groups, out_dtype=torch.float32, bias=bias)
        out = torch.mul(unweighted, weights.unsqueeze(1), out=torch.empty_like(unweighted, dtype=wide))
    out = _cut_columns(out, rows.shape[1]).to(rows.dtype)
    if not trained:
        return out, None, None, None
    return out, codes.codes.view(torch.uint8), codes.scales.t(), pre if keeps else None


def backward(
    grad_out: torch.Tensor,
    row_codes: torch.Tensor,
    row_scales: torch.Tensor,
    pre: torch.Tensor | None,
    row_weights: torch.Tensor,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    layout: ExpertLayout,
    options: MlpOptions,
    needed: Sequence[bool],
    totals: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """The gradients of the first six arguments of ``forward``, None where not ``needed``.

    Those of the last four are added to their ``totals`` where there are any, and None too. The routing weight
    multiplies a row's result, before or after GEMM 2: its gradient, and all others but those of the biases, are the
    same sums either way.
    """
    up_total, down_total, up_bias_total, down_bias_total = totals
    need_rows, need_weights, need_up, need_down, need_up_bias, need_down_bias = needed
    scale, wide, hidden = options.weight_grad_scale, _intermediate_dtype(grad_out), grad_out.shape[1]
    grad_rows = grad_weights = grad_up = grad_down = grad_up_bias = grad_down_bias = None
    up_padding, down_padding = _paddings(options)
    up, down = fp8_copy(up_proj, up_padding, "backward"), fp8_copy(down_proj, down_padding, "backward")
    groups, weights = RowGroups.padded(layout), _weights(row_weights)
    rows = Fp8Tensor(row_codes.view(torch.float8_e4m3fn), row_scales.t(), mlp_quant.ROW)
    if pre is None:
        bias = _padded_bias(up_bias, up_padding)
        if _fuses(options, wide, True):
            # The same kernel as in the forward pass: the same bits. Its activation is not needed.
            _, pre = _first_gemm(rows, up.plain, groups, None, bias, options, wide, True)
        else:
            pre = gemm.grouped_fp8_gemm_nt(rows, up.plain, groups, out_dtype=wide, bias=bias)

    grad_out = grad_out.contiguous()
    grad = mlp_quant.cast(_pad_columns(grad_out, row_codes.shape[1]), need_down)
    grad_act = gemm.grouped_fp8_gemm_nt(grad.rows, down.transposed, groups, out_dtype=wide)
    inner = mlp_quant.activation_backward(
        grad_act,
        pre,
        weights,
        options.activation,
        options.clamp,
        columns=need_up or need_down,
        sums=need_up_bias,
    )
    if need_weights:
        grad_weights = inner.row_weights
        if down_bias is not None:
            grad_weights = grad_weights + pool_gemm.row_dots(grad_out, down_bias, layout)
        grad_weights = grad_weights.to(row_weights.dtype)
    if need_down:
        sides = grad.columns, inner.act
        grad_down = _parameter_gradient(*sides, layout, down_proj, down_padding, scale, down_total)
    if need_down_bias:
        sums = pool_gemm.segment_sum(grad_out, layout, weights)
        grad_down_bias = finish(sums, scale, down_bias.dtype, down_bias_total)
    if need_rows:
        grad_rows = gemm.grouped_fp8_gemm_nt(inner.pre.rows, up.transposed, groups, out_dtype=wide)
        grad_rows = _cut_columns(grad_rows, hidden).to(grad_out.dtype)
    if need_up:
        sides = inner.pre.columns, mlp_quant.columns_of_rows(rows)
        grad_up = _parameter_gradient(*sides, layout, up_proj, up_padding, scale, up_total)
    if need_up_bias:
        # Padding rows have no weight, and add nothing to their block's sum.
        sums = pool_gemm.segment_sum(inner.sums, _blocks(layout))
        sums = sums.unflatten(1, (options.halves, -1))[:, :, : up_bias.shape[1] // options.halves].flatten(1)
        grad_up_bias = finish(sums, scale, up_bias.dtype, up_bias_total)
    return [grad_rows, grad_weights, grad_up, grad_down, grad_up_bias, grad_down_bias]


def _blocks(layout: ExpertLayout) -> ExpertLayout:
    """``layout`` in blocks of 128 rows."""
    counts = (layout.counts + FP8_BLOCK - 1) // FP8_BLOCK
    return ExpertLayout(counts, layout.starts // FP8_BLOCK, layout.num_rows // FP8_BLOCK)


def _parameter_gradient(
    a: Fp8Tensor,
    b: Fp8Tensor,
    layout: ExpertLayout,
    parameter: torch.Tensor,
    padding: Padding,
    scale: float,
    total: torch.Tensor | None,
) -> torch.Tensor | None:
    """``_weight_gradient`` without the padding, in the parameter's dtype or added to ``total``."""
    if total is None:
        padded = _weight_gradient(a, b, layout, parameter.dtype, scale)
        return padding.unpad(padded, *parameter.shape[1:])
    if padding.shape(parameter) == parameter.shape and can_be_written(total):
        _weight_gradient(a, b, layout, torch.float32, scale, total)
    else:
        padded = _weight_gradient(a, b, layout, torch.float32, scale)
        total.add_(padding.unpad(padded, *parameter.shape[1:]))
    return None


def _weight_gradient(
    a: Fp8Tensor,
    b: Fp8Tensor,
    layout: ExpertLayout,
    dtype: torch.dtype,
    scale: float,
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[e, M, N]``: ``scale`` x the sums over each expert's rows, rounded once to ``dtype``, or added to ``total``."""
    if scale != 1:
        a = Fp8Tensor(a.codes, a.scales * scale, a.block)
    rounded = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    rows = pool_gemm.row_ends(layout)
    return gemm_k.k_grouped_fp8_gemm_tn(a, b, rows, out=total, out_dtype=rounded, c=total).to(dtype)
