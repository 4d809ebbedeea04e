"""What a recipe consists of: for each of megamoe's tensors, the stored tensors that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megamoe.checkpoint.layouts import PLAIN, Layout

EXPERT = "{expert}"


@dataclass(frozen=True)
class Stored:
    """A stored tensor: all rows of one of megamoe's tensors, or one half of them.

    Attributes:
        name: after the layer's number. With ``{expert}`` there is one tensor per expert; without, a tensor of the
            routed experts has them stacked on its first axis.
        half: 0 = the gate rows, 1 = the up rows, None = all rows.
        layout: of one expert's matrix.
        scales: name of the block scales where the tensor is quantised; None = it never is.
    """

    name: str
    half: int | None = None
    layout: Layout = PLAIN
    scales: str | None = None

    @property
    def per_expert(self) -> bool:
        return EXPERT in self.name

    @property
    def stored_scales(self) -> Stored:
        """The block scales as a stored tensor of their own: their rows are ordered as the codes' are."""
        return Stored(self.scales, self.half, Layout(interleaved=self.layout.interleaved))


@dataclass(frozen=True)
class Form:
    """One way in which layers lie on disk.

    Attributes:
        name: identifies the form in ``megamoe.json``.
        prefix: of all names of a layer's MoE block, after the layer's number.
        tensors: megamoe's name -> the stored tensors that it is made of, gate before up.
        dequantized: name of the form that holds the same tensors unquantised; None = this one, without the scales.
    """

    name: str
    prefix: str
    tensors: Mapping[str, tuple[Stored, ...]]
    dequantized: str | None = None


@dataclass(frozen=True)
class Recipe:
    """The forms of a family; the first is the one to write where nothing else is known.

    Attributes:
        model_types: ``model_type`` in ``config.json``; none for formats that any model may have.
        is_moe: whether a layer is an MoE layer, by ``config.json`` and its number.
    """

    forms: tuple[Form, ...]
    model_types: tuple[str, ...] = ()
    is_moe: Callable[[Mapping[str, Any], int], bool] = lambda config, layer: True


def gated_mlp(target: str, prefix: str, names: tuple[str, str, str]) -> dict[str, tuple[Stored, ...]]:
    """A gated MLP of three linear layers, which may be FP8.

    Args:
        target: megamoe's name of the MLP, ``experts`` or ``shared_experts``.
        prefix: of the stored names.
        names: of the gate, up and down layers.
    """
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return {
        f"{target}.gate_up_proj": (
            Stored(gate, 0, scales=f"{gate}_scale_inv"),
            Stored(up, 1, scales=f"{up}_scale_inv"),
        ),
        f"{target}.down_proj": (Stored(down, scales=f"{down}_scale_inv"),),
    }


def stacked_experts(prefix: str) -> dict[str, tuple[Stored, ...]]:
    """The experts as transformers has them in memory, and writes them with ``save_original_format=False``."""
    return {
        f"experts.{name}": (Stored(f"{prefix}{name}", scales=f"{prefix}{name}_scale_inv"),)
        for name in ("gate_up_proj", "down_proj")
    }


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
