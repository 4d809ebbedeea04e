"""The expert MLP in FP8 over routed and shared experts, in inference: two parameters for each GEMM, one operand."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megamoe.kernels import mlp_fp8
from megamoe.kernels.mlp_options import MlpOptions
from megamoe.types import ExpertLayout, Fp8Tensor


class SharedWeights(NamedTuple):
    """A shared expert as its parameters hold it: floating ``[2W, H]`` (gate rows, then up rows) and ``[H, W]``."""

    up: torch.Tensor
    down: torch.Tensor

    def experts(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views as W / ``width`` experts: ``[S, 2, width, H]`` and ``[S, H, width]``; the sum of their results is its
        own."""
        up, down = self.up.detach(), self.down.detach()
        return up.unflatten(0, (2, -1, width)).transpose(0, 1), down.unflatten(1, (-1, width)).transpose(0, 1)


def joined_mlp(
    rows: torch.Tensor,
    row_weights: torch.Tensor,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    shared: SharedWeights,
    layout: ExpertLayout,
    options: MlpOptions,
    row_codes: Fp8Tensor | None = None,
) -> torch.Tensor:
    """``grouped_mlp`` without gradients for e routed experts and S shared ones after them.

    Args:
        rows, row_weights, up_proj, down_proj, row_codes: as in ``grouped_mlp``, in FP8.
        shared: the shared expert; its width W is S times that of the routed ones.
        layout: of e + S experts.
    """
    operands = rows, row_weights, up_proj, down_proj, *shared
    if torch.compiler.is_compiling():
        return _operator(*operands, layout.counts, layout.starts, options.activation, options.clamp)
    return _compute(*operands, layout, options, row_codes)


def _compute(
    rows: torch.Tensor,
    row_weights: torch.Tensor,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    shared_up: torch.Tensor,
    shared_down: torch.Tensor,
    layout: ExpertLayout,
    options: MlpOptions,
    row_codes: Fp8Tensor | None = None,
) -> torch.Tensor:
    up, down = SharedWeights(shared_up, shared_down).experts(down_proj.shape[2])
    with torch.autocast(rows.device.type, enabled=False):
        return mlp_fp8.forward_joined(rows, row_weights, (up_proj, up), (down_proj, down), layout, options, row_codes)


# Eager calls skip it, as they skip those of ``mlp``.
@torch.library.custom_op("megamoe::joined_mlp", mutates_args=())
def _operator(
    rows: torch.Tensor,
    row_weights: torch.Tensor,
    up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    shared_up: torch.Tensor,
    shared_down: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor,
    activation: str,
    clamp: float | None,
) -> torch.Tensor:
    """``joined_mlp``. Not differentiable."""
    layout, options = ExpertLayout(counts, starts, rows.shape[0]), MlpOptions(activation, clamp, "fp8")
    return _compute(rows, row_weights, up_proj, down_proj, shared_up, shared_down, layout, options).contiguous()


@_operator.register_fake
def _(rows, row_weights, up_proj, down_proj, shared_up, shared_down, counts, starts, activation, clamp):
    return rows.new_empty(rows.shape)
