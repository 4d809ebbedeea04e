"""``MlpOptions``: everything about the expert MLP that is not a tensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MlpOptions:
    """Everything about ``grouped_mlp`` that is not a tensor.

    Attributes:
        activation, clamp, precision: as in ``MoEConfig``.
        weight_grad_scale: multiplies the gradients of weights and biases (1/R makes a sum over R ranks their mean).
        recompute: as in ``MoEConfig``.
    """

    activation: str
    clamp: float | None = None
    precision: str = "bf16"
    weight_grad_scale: float = 1.0
    recompute: str = "none"

    @property
    def halves(self) -> int:
        """Column blocks of GEMM 1's weight: gate and up, or only one."""
        return 1 if self.activation == "relu2" else 2
