"""The weight transform of DeepGEMM's mega-MoE kernels; the kernels themselves are not here."""

from __future__ import annotations

from collections.abc import Callable

from megamoe.compat.deep_gemm.missing import MEGA, missing
from megamoe.errors import check_choice
from megamoe.kernels import weights


def transform_weights_for_mega_moe(
    l1_weights: weights.Weight, l2_weights: weights.Weight, activation: str = "swiglu"
) -> tuple[weights.Weight, weights.Weight]:
    """See ``megamoe.kernels.weights.transform_weights_for_mega_moe``; the activation is always SwiGLU."""
    check_choice("activation", activation, ("swiglu",))
    return weights.transform_weights_for_mega_moe(l1_weights, l2_weights)


def __getattr__(name: str) -> Callable:
    return missing(name, MEGA, __name__)
