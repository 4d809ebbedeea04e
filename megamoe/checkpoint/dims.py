"""The sizes of a layer and the shapes of its tensors that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megamoe.checkpoint.layouts import MX_GROUP
from megamoe.config import MoEConfig
from megamoe.errors import fail_value

BLOCK = 128

FP8_BLOCK = (BLOCK, BLOCK)
MXFP4_BLOCK = (1, MX_GROUP)


@dataclass(frozen=True)
class Dims:
    """Sizes of a layer and which of its optional tensors exist.

    Attributes:
        hidden, width, experts: H, I, E.
        shared: width of the shared expert; 0 = none.
        biases, router_bias, expert_bias, shared_gate: whether the layer has these.
    """

    hidden: int
    width: int
    experts: int
    shared: int = 0
    biases: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    shared_gate: bool = False

    @classmethod
    def of(cls, config: MoEConfig) -> Dims:
        """The sizes of a configured layer.

        Raises:
            MegaMoEError: its experts have no gate, which no known format stores.
        """
        if not config.gated:
            fail_value(
                "config.activation", config.activation, "has no gate: no checkpoint format is known", "Use torch.save."
            )
        return cls(
            config.hidden_size,
            config.intermediate_size,
            config.num_experts,
            config.shared_intermediate_size,
            config.bias,
            config.router.linear_bias,
            config.router.expert_bias,
            config.shared_gate,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """megamoe's tensors and their shapes; those of the routed experts without the first axis, E."""
        hidden, width, experts, shared = self.hidden, self.width, self.experts, self.shared
        shapes: dict[str, tuple[int, ...]] = {"router.weight": (experts, hidden)}
        if self.router_bias:
            shapes["router.bias"] = (experts,)
        if self.expert_bias:
            shapes["router.expert_bias"] = (experts,)
        shapes["experts.gate_up_proj"] = (2 * width, hidden)
        shapes["experts.down_proj"] = (hidden, width)
        if self.biases:
            shapes["experts.gate_up_proj_bias"] = (2 * width,)
            shapes["experts.down_proj_bias"] = (hidden,)
        if shared:
            shapes["shared_experts.gate_up_proj"] = (2 * shared, hidden)
            shapes["shared_experts.down_proj"] = (hidden, shared)
        if self.shared_gate:
            shapes["shared_experts.shared_gate"] = (1, hidden)
        return shapes


def halves(name: str) -> int:
    """How many matrices lie below each other in one of megamoe's tensors: gate and up, or one."""
    return 2 if ".gate_up_proj" in name else 1


def scales_shape(shape: tuple[int, ...], block: tuple[int, int], parts: int = 1) -> tuple[int, int]:
    """The shape of the block scales of ``parts`` matrices below each other, each of whole blocks."""
    return parts * -(-shape[0] // parts // block[0]), -(-shape[1] // block[1])


def is_routed(name: str) -> bool:
    """Whether one of megamoe's tensors has a first axis of E experts."""
    return name.startswith("experts.")


def infer(numel: Callable[[str], int | None], router_shape: tuple[int, ...], experts_share: bool) -> Dims:
    """The sizes of a layer without a config, from its tensors.

    Args:
        numel: number of values in one of megamoe's tensors as stored (of one expert, where each has its own); None
            where it is not there.
        router_shape: ``[E, H]``.
        experts_share: all experts are stacked in one tensor.
    """
    experts, hidden = router_shape
    down = numel("experts.down_proj") or 0
    shared_down = numel("shared_experts.down_proj") or 0
    return Dims(
        hidden,
        down // (experts if experts_share else 1) // hidden,
        experts,
        shared_down // hidden,
        biases=numel("experts.down_proj_bias") is not None,
        router_bias=numel("router.bias") is not None,
        expert_bias=numel("router.expert_bias") is not None,
        shared_gate=numel("shared_experts.shared_gate") is not None,
    )
