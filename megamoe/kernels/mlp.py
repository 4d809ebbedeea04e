"""The expert MLP over expert-sorted rows: GEMM 1, activation x routing weight, GEMM 2, with its backward pass.

One autograd function for eager mode and one pair of operators for torch.compile, over the passes of ``mlp_bf16`` and
``mlp_fp8``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

from megamoe.kernels import mlp_bf16, mlp_fp8
from megamoe.kernels.main_grad import input_nodes, is_accumulated, main_grad_of, mark_added
from megamoe.kernels.mlp_options import MlpOptions
from megamoe.types import ExpertLayout, Fp8Tensor

Kept = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""What the backward pass gets from the forward pass besides its operands.

BF16: pre-activations. FP8, in place of the rows: their codes, as bytes, their scales ``[H / 128, P]``, pre-activations.
None where there is nothing, or ``recompute`` wants it again.
"""

PARAMETERS = ("up_proj", "down_proj", "up_bias", "down_bias")


def grouped_mlp(
    rows: torch.Tensor,
    row_weights: torch.Tensor,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    layout: ExpertLayout,
    options: MlpOptions,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    owners: Sequence[torch.Tensor | None] | None = None,
    row_codes: Fp8Tensor | None = None,
) -> torch.Tensor:
    """The rows' expert outputs, each already multiplied by its routing weight; differentiable once.

    Without ``down_bias`` the weight multiplies the activation before GEMM 2, with it (row + bias) after GEMM 2.

    A parameter with an attribute ``main_grad``, a float32 tensor of its shape, gets no ``.grad``: ``backward`` adds its
    gradient, unrounded, to ``main_grad``, on the stream of the forward pass, and sets ``grad_added_to_main_grad`` to
    True where the parameter has that attribute. Each backward pass through each call adds once. ``autograd.grad``
    returns gradients and adds nothing. torch.compile leaves such a call out of its graph.

    Args:
        rows: ``[P, H]``, padding rows zero; P a multiple of 128 for FP8. Its dtype is the operands' dtype of the BF16
            path.
        row_weights: ``[P]``, padding zero.
        up_proj: ``[e, 2I, H]`` (gate rows, then up rows), or ``[e, I, H]`` for ``relu2``; any floating dtype. Gradients
            come in this dtype, from fp32 sums. FP8 keeps copies of the weights: see ``weight_cache``.
        down_proj: ``[e, H, I]``.
        up_bias, down_bias: ``[e, 2I]`` and ``[e, H]``, added in fp32.
        owners: the parameters of which these four are the parts that this rank holds; None: they are the parameters.
        row_codes: for FP8, the rows cast already, as ``DispatchedRows.codes``. Not in compiled code.

    Returns:
        ``[P, H]`` in the dtype of ``rows``; padding rows are undefined.

    Raises:
        MegaMoEError: a ``main_grad`` of another dtype, shape or device; another number of rows than FP8 takes.
    """
    operands = rows, row_weights, up_proj, down_proj, up_bias, down_bias
    owners = operands[2:] if owners is None else tuple(owners)
    with_grads = torch.is_grad_enabled()
    adds = with_grads and any(getattr(owner, "main_grad", None) is not None for owner in owners)
    if torch.compiler.is_compiling() and not adds:
        trained = with_grads and any(x is not None and x.requires_grad for x in operands)
        constants = (
            options.activation,
            options.clamp,
            options.precision,
            options.weight_grad_scale,
            options.recompute,
            trained,
        )
        return _operator(*operands, layout.counts, layout.starts, *constants)[0]
    if not with_grads:
        return _forward(*operands, layout, options, False, row_codes)[0]
    if adds:
        return _adding(operands, layout, options, owners, row_codes)
    return _GroupedMlp.apply(*operands, layout, options, owners, row_codes)


def _adding(
    operands: tuple, layout: ExpertLayout, options: MlpOptions, owners: tuple, row_codes: Fp8Tensor | None
) -> torch.Tensor:
    for name, owner, part in zip(PARAMETERS, owners, operands[2:], strict=True):
        main_grad_of(name, owner, part)
    return _GroupedMlp.apply(*operands, layout, options, owners, row_codes)


# As torch.compiler.disable does it, which would import the compiler now. A graph has no place for writes to a
# parameter's attribute in its backward pass.
_adding._torchdynamo_disable = True
_adding._torchdynamo_disable_msg = "gradients are added to main_grad"


# ---------------------------------------------------------------- forward and backward


def _forward(
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
) -> tuple[torch.Tensor, Kept]:
    operands = rows, row_weights, up_proj, down_proj, up_bias, down_bias
    # The dtypes are chosen here: autocast must not choose again for the fp32 steps.
    with torch.autocast(rows.device.type, enabled=False):
        if options.precision == "fp8":
            out, *kept = mlp_fp8.forward(*operands, layout, options, trained, row_codes)
        else:
            out, *kept = mlp_bf16.forward(*operands, layout, options, trained)
    return out, tuple(kept)


def _backward(
    grad_out: torch.Tensor,
    rows: torch.Tensor | None,
    kept: Kept,
    row_weights: torch.Tensor,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    layout: ExpertLayout,
    options: MlpOptions,
    needed: Sequence[bool],
    totals: Sequence[torch.Tensor | None] = (None,) * 4,
) -> list[torch.Tensor | None]:
    """The gradients of the first six arguments of ``_forward``, None where not ``needed``; ``rows`` None for FP8.

    Those of the parameters are added to their ``totals`` where there are any, and None too.
    """
    operands = row_weights, up_proj, down_proj, up_bias, down_bias
    with torch.autocast(grad_out.device.type, enabled=False):
        if options.precision == "fp8":
            return mlp_fp8.backward(grad_out, *kept, *operands, layout, options, needed, totals)
        return mlp_bf16.backward(grad_out, rows, *operands, kept[0], layout, options, needed, totals)


class _GroupedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, row_weights, up_proj, down_proj, up_bias, down_bias, layout, options, owners, row_codes):
        operands = row_weights, up_proj, down_proj, up_bias, down_bias
        trained = any(ctx.needs_input_grad)
        out, kept = _forward(rows, *operands, layout, options, trained, row_codes)
        if trained:
            rows = None if options.precision == "fp8" else rows
            # The layout too: activation checkpointing replaces all saved tensors together, and nothing else.
            ctx.save_for_backward(rows, *kept, *operands, layout.counts, layout.starts)
            ctx.options = options
            # Others are no parameters, and are to be freed once they have been saved elsewhere.
            ctx.owners = [owner if owner is not None and owner.is_leaf else None for owner in owners]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        rows, first, second, third, *operands, counts, starts = ctx.saved_tensors
        layout = ExpertLayout(counts, starts, grad_out.shape[0])
        kept = first, second, third
        needed = ctx.needs_input_grad[:6]
        totals = _totals(ctx, operands)
        grads = _backward(grad_out, rows, kept, *operands, layout, ctx.options, needed, totals)
        for owner, total in zip(ctx.owners, totals, strict=True):
            if total is not None:
                mark_added(owner)
        return *grads, None, None, None, None


def _totals(ctx, operands: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """What the running backward pass adds the parameters' gradients to; ``operands``: all but the rows."""
    totals, nodes = [], input_nodes(ctx, (True, *(x is not None for x in operands)))
    parts = zip(PARAMETERS, ctx.owners, operands[1:], nodes[2:], ctx.needs_input_grad[2:6], strict=True)
    for name, owner, part, node, need in parts:
        total = main_grad_of(name, owner, part) if need else None
        totals.append(total if total is not None and is_accumulated(node) else None)
    return totals


# ---------------------------------------------------------------- operators

# Eager calls skip them: the dispatcher costs more than a small layer's GEMMs.


@torch.library.custom_op("megamoe::grouped_mlp", mutates_args=())
def _operator(
    rows: torch.Tensor,
    row_weights: torch.Tensor,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    counts: torch.Tensor,
    starts: torch.Tensor,
    activation: str,
    clamp: float | None,
    precision: str,
    weight_grad_scale: float,
    recompute: str,
    trained: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``_forward``; in place of what is not kept an empty tensor."""
    layout = ExpertLayout(counts, starts, rows.shape[0])
    options = MlpOptions(activation, clamp, precision, weight_grad_scale, recompute)
    operands = rows, row_weights, up_proj, down_proj, up_bias, down_bias
    out, kept = _forward(*operands, layout, options, trained)
    if not trained:
        kept = None, None, None
    return out.contiguous(), *(out.new_empty(0) if x is None else x.contiguous() for x in kept)


@_operator.register_fake
def _(
    rows,
    row_weights,
    up_proj,
    down_proj,
    up_bias,
    down_bias,
    counts,
    starts,
    activation,
    clamp,
    precision,
    weight_grad_scale,
    recompute,
    trained,
):
    options = MlpOptions(activation, clamp, precision, weight_grad_scale, recompute)
    home = mlp_fp8 if precision == "fp8" else mlp_bf16
    kept = [None] * 3
    if trained:
        kept = home.kept_forms(rows, up_proj, up_bias, down_bias, options)
    outputs = (rows.new_empty(0) if form is None else rows.new_empty(form[0], dtype=form[1]) for form in kept)
    return rows.new_empty(rows.shape), *outputs


@torch.library.custom_op("megamoe::grouped_mlp_backward", mutates_args=())
def _backward_operator(
    grad_out: torch.Tensor,
    rows: torch.Tensor | None,
    kept_first: torch.Tensor,
    kept_second: torch.Tensor,
    kept_third: torch.Tensor,
    row_weights: torch.Tensor,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    counts: torch.Tensor,
    starts: torch.Tensor,
    activation: str,
    clamp: float | None,
    precision: str,
    weight_grad_scale: float,
    recompute: str,
    needed: list[bool],
) -> list[torch.Tensor]:
    """The ``needed`` ones of ``_backward``'s gradients."""
    layout = ExpertLayout(counts, starts, grad_out.shape[0])
    options = MlpOptions(activation, clamp, precision, weight_grad_scale, recompute)
    operands = row_weights, up_proj, down_proj, up_bias, down_bias
    # The empty ones stand for None.
    kept = tuple(x if x.dim() == 2 else None for x in (kept_first, kept_second, kept_third))
    grads = _backward(grad_out, rows, kept, *operands, layout, options, needed)
    return [grad.contiguous() for grad in grads if grad is not None]


@_backward_operator.register_fake
def _(
    grad_out,
    rows,
    kept_first,
    kept_second,
    kept_third,
    row_weights,
    up_proj,
    down_proj,
    up_bias,
    down_bias,
    counts,
    starts,
    activation,
    clamp,
    precision,
    weight_grad_scale,
    recompute,
    needed,
):
    # The gradient of the result is like the rows.
    operands = grad_out, row_weights, up_proj, down_proj, up_bias, down_bias
    return [tensor.new_empty(tensor.shape) for tensor, need in zip(operands, needed, strict=True) if need]


def _keep_for_backward(ctx, inputs, output) -> None:
    rows, *operands = inputs[:6]
    ctx.options, (_, *kept) = inputs[8:13], output
    ctx.mark_non_differentiable(*kept)
    rows = None if ctx.options[2] == "fp8" else rows
    # Inductor mixes up the strides of several empty tensors and those of others.
    ctx.save_for_backward(rows, *(x if x.dim() == 2 else None for x in kept), *operands, *inputs[6:8])


def _grads(ctx, grad_out, *_):
    needed = list(ctx.needs_input_grad[:6])
    rows, *saved = ctx.saved_tensors
    kept = (grad_out.new_empty(0) if x is None else x for x in saved[:3])
    grads = iter(_backward_operator(grad_out, rows, *kept, *saved[3:], *ctx.options, needed))
    return *(next(grads) if need else None for need in needed), *[None] * 8


_operator.register_autograd(_grads, setup_context=_keep_for_backward)
