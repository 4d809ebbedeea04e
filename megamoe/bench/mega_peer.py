"""DeepGEMM's mega MoE for Hopper (sgl-deep-gemm), called as its users do: from BF16 tokens to BF16 results."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
import torch.distributed as dist

from megamoe.bench import gemm
from megamoe.types import Fp8Tensor, Routing

NEEDED = (
    "fp8_mega_moe",
    "get_symm_buffer_for_sm90_mega_moe",
    "mega_moe_pre_dispatch_sm90",
    "transform_weights_for_mega_moe_sm90",
)


def find_peer() -> tuple[ModuleType | None, str]:
    """The installed DeepGEMM if it has a mega MoE for Hopper, or None and why there is no column for it."""
    module = gemm.deep_gemm()
    if module is None:
        return None, "DeepGEMM is not installed: no column for it"
    missing = [name for name in NEEDED if not hasattr(module, name)]
    if missing:
        return None, f"the installed DeepGEMM has no {missing[0]}: no column for it (sgl-deep-gemm has)"
    return module, ""


class PeerWeights:
    """A rank's experts as the peer lays them out: gate and up rows interleaved by 8, scales as they are.

    Args:
        up, down: codes ``[e, 2 I, H]`` (gate rows, then up rows) and ``[e, H, I]`` in blocks of 128 x 128.
    """

    def __init__(self, module: ModuleType, up: Fp8Tensor, down: Fp8Tensor):
        self.module = module
        # As bytes: not every operator that moves rows knows FP8.
        bytes_up = up.codes.view(torch.uint8), up.scales
        (codes, scales), self.down = module.transform_weights_for_mega_moe_sm90(bytes_up, (down.codes, down.scales))
        self.up = codes.view(up.codes.dtype), scales


class PeerLayer:
    """The peer's buffer for up to ``tokens`` tokens of each rank, and its call. Construction is a collective.

    Args:
        group: of the ranks; the peer needs one even of a single rank.
    """

    def __init__(
        self,
        weights: PeerWeights,
        group: dist.ProcessGroup,
        *,
        tokens: int,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
    ):
        self._module, self._weights = weights.module, weights
        make = self._module.get_symm_buffer_for_sm90_mega_moe
        self._buffer = make(group, experts, tokens, top_k, hidden, intermediate)

    def call(self, x: torch.Tensor, routing: Routing, out: torch.Tensor) -> Callable[[], None]:
        """Its whole call into ``out``: the cast and the copy into its buffer, then the kernel.

        Ids become int32 here, once: its routers hand them over so. Later changes of ``routing`` are not seen.
        """
        index, topk_weights = routing.topk_index.int().contiguous(), routing.topk_weights.float().contiguous()
        return lambda: self.run(x, index, topk_weights, out)

    def run(self, x: torch.Tensor, index: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> None:
        """One call: ``x [T, H]`` BF16, ``index`` int32 and ``topk_weights`` fp32 ``[T, K]``, ``out [T, H]`` BF16."""
        buffer = self._buffer
        self._module.mega_moe_pre_dispatch_sm90(
            x, index, topk_weights, buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights, x.shape[0]
        )
        self._module.fp8_mega_moe(out, self._weights.up, self._weights.down, buffer)

    def close(self) -> None:
        """Gives its memory back, once no kernel uses it."""
        buffer, self._buffer = self._buffer, None
        buffer.destroy()
