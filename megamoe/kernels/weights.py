"""Weight transforms of the kernels that want one, and their inverses. All are permutations: bit-exact for any dtype.

megamoe's own Hopper kernels take weights as checkpoints store them; these serve DeepGEMM's mega-MoE kernels.
"""

from __future__ import annotations

import torch

from megamoe.errors import fail_type, fail_value
from megamoe.types import Fp4Tensor, Fp8Tensor

Weight = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

UTCCP_ROWS = 128


def _store(result: torch.Tensor, into: torch.Tensor, in_place: bool) -> torch.Tensor:
    return (into if in_place else _zeros_with_strides_of(into)).copy_(result)


def _zeros_with_strides_of(x: torch.Tensor) -> torch.Tensor:
    """Zeros with the shape and strides of ``x``: padding (MN-major scales) belongs to the layout, and is zero."""
    axes = list(zip(x.shape, x.stride(), strict=True))
    if any(size > 1 and stride == 0 for size, stride in axes) or not x.numel():
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return x.new_zeros(max(size * stride for size, stride in axes)).as_strided(x.shape, x.stride())


def interleave_gate_up(weight: torch.Tensor, gran: int = 8, *, in_place: bool = False) -> torch.Tensor:
    """``[gate | up]`` rows in turn, ``gran`` at a time: gate 0..7, up 0..7, gate 8..15, ...

    Args:
        weight: ``[e, 2I, ...]``, weights or their scales.
        in_place: write into ``weight``'s storage, whose address may be known elsewhere.

    Raises:
        MegaMoEError: 2I is not a multiple of 2 * gran.
    """
    halves = _check_rows(weight, gran).unflatten(1, (2, -1, gran))
    return _store(halves.transpose(1, 2).flatten(1, 3), weight, in_place)


def deinterleave_gate_up(weight: torch.Tensor, gran: int = 8, *, in_place: bool = False) -> torch.Tensor:
    """The inverse of ``interleave_gate_up``."""
    turns = _check_rows(weight, gran).unflatten(1, (-1, 2, gran))
    return _store(turns.transpose(1, 2).flatten(1, 3), weight, in_place)


def _check_rows(weight: torch.Tensor, gran: int) -> torch.Tensor:
    if weight.dim() < 2 or gran < 1 or weight.shape[1] % (2 * gran):
        fail_value(
            "weight.shape",
            list(weight.shape),
            f"must be [e, 2I, ...] with 2I a multiple of {2 * gran}",
            "Pad I, or pass another gran.",
        )
    return weight


def transpose_scales_for_utccp(scales: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
    """Inside each 128 rows of packed scales: 4 x 32 -> 32 x 4, the order of Blackwell's scale copies.

    Args:
        scales: int32 ``[e, mn, k]``, mn a multiple of 128; any strides.

    Raises:
        MegaMoEError: another dtype, or mn is not a multiple of 128.
    """
    return _swap_scale_rows(scales, (4, 32), in_place)


def restore_scales_from_utccp(scales: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
    """The inverse of ``transpose_scales_for_utccp``."""
    return _swap_scale_rows(scales, (32, 4), in_place)


def _check_scale_rows(scales: torch.Tensor) -> torch.Tensor:
    if scales.dtype != torch.int32:
        fail_type("scales.dtype", scales.dtype, "must be torch.int32 (four UE8M0 codes)", "Pack them first.")
    if scales.dim() != 3 or scales.shape[1] % UTCCP_ROWS:
        fail_value(
            "scales.shape", list(scales.shape), f"must be [e, mn, k] with mn a multiple of {UTCCP_ROWS}", "Pad mn."
        )
    return scales


def _swap_scale_rows(scales: torch.Tensor, shape: tuple[int, int], in_place: bool) -> torch.Tensor:
    swapped = _check_scale_rows(scales).unflatten(1, (-1, *shape)).transpose(2, 3).flatten(1, 3)
    return _store(swapped, scales, in_place)


def transform_weights_for_mega_moe(l1: Weight, l2: Weight, *, in_place: bool = False) -> tuple[Weight, Weight]:
    """The weights as DeepGEMM's SM100 mega-MoE kernels take them.

    GEMM 1: gate and up interleaved by 8 rows, in weight and scales; both scales in the order of UTCCP. BF16 weights
    have no scales, and GEMM 2's weight stays as it is.

    Args:
        l1: ``[e, 2I, H]``, or a pair with its int32 scales ``[e, 2I, H / 128]``; l2: ``[e, H, I]`` likewise.
        in_place: write into the given storage.

    Raises:
        MegaMoEError: one of the two has scales and the other not, or a shape does not fit.
    """
    return _transform(l1, l2, interleave_gate_up, transpose_scales_for_utccp, in_place)


def restore_weights_from_mega_moe(l1: Weight, l2: Weight, *, in_place: bool = False) -> tuple[Weight, Weight]:
    """The inverse of ``transform_weights_for_mega_moe``: the checkpoint's weights, bit for bit."""
    return _transform(l1, l2, deinterleave_gate_up, restore_scales_from_utccp, in_place)


def _transform(l1: Weight, l2: Weight, rows, scale_order, in_place: bool) -> tuple[Weight, Weight]:
    for name, weight in (("l1", l1), ("l2", l2)):
        if isinstance(weight, (Fp8Tensor, Fp4Tensor)) or not isinstance(weight, (tuple, torch.Tensor)):
            fail_type(name, type(weight).__name__, "must be a tensor or (weight, scales)", "Pack the scales as int32.")
    if isinstance(l1, tuple) != isinstance(l2, tuple):
        fail_type("l2", type(l2).__name__, f"must be like l1, a {type(l1).__name__}", "Give both scales, or neither.")
    if not isinstance(l1, tuple):
        return rows(l1, in_place=in_place), l2
    # All checks before the first write: weights in use must not be left half transformed.
    _check_rows(l1[0], 8)
    for name, (weight, scales) in (("l1", l1), ("l2", l2)):
        if _check_scale_rows(scales).shape[:2] != weight.shape[:2]:
            fail_value(
                f"{name} scales.shape",
                list(scales.shape),
                f"must begin as the weight's {list(weight.shape)}",
                "Pair them.",
            )
    l1_scales = _store(l1[1], l1[1], in_place)
    # The inverse undoes the steps in the other order.
    for step in (rows, scale_order) if rows is interleave_gate_up else (scale_order, rows):
        step(l1_scales, in_place=True)
    return (rows(l1[0], in_place=in_place), l1_scales), (l2[0], scale_order(l2[1], in_place=in_place))
