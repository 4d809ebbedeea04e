"""gpt-oss: stacked experts with biases, gate and up interleaved; transposed in BF16, MXFP4 as published."""

from __future__ import annotations

from megamoe.checkpoint.layouts import Layout
from megamoe.checkpoint.recipes.base import Form, Recipe, Stored

_EXPERTS = "mlp.experts."
_REST = {
    "router.weight": (Stored("mlp.router.weight"),),
    "router.bias": (Stored("mlp.router.bias"),),
    "experts.gate_up_proj_bias": (Stored(f"{_EXPERTS}gate_up_proj_bias", layout=Layout(interleaved=True)),),
    "experts.down_proj_bias": (Stored(f"{_EXPERTS}down_proj_bias"),),
}


def _mxfp4(name: str, interleaved: bool) -> tuple[Stored, ...]:
    layout = Layout(interleaved=interleaved, mxfp4=True)
    return (Stored(f"{_EXPERTS}{name}_blocks", layout=layout, scales=f"{_EXPERTS}{name}_scales"),)


_BF16 = {
    "experts.gate_up_proj": (Stored(f"{_EXPERTS}gate_up_proj", layout=Layout(interleaved=True, transposed=True)),),
    "experts.down_proj": (Stored(f"{_EXPERTS}down_proj", layout=Layout(transposed=True)),),
}
_MXFP4 = {
    "experts.gate_up_proj": _mxfp4("gate_up_proj", interleaved=True),
    "experts.down_proj": _mxfp4("down_proj", interleaved=False),
}
GPT_OSS = Recipe(
    forms=(
        Form("gpt_oss", "mlp.", {**_REST, **_BF16}),
        Form("gpt_oss_mxfp4", "mlp.", {**_REST, **_MXFP4}, dequantized="gpt_oss"),
    ),
    model_types=("gpt_oss",),
)
