"""A layer of experts in plain torch, and DeepGEMM's mega MoE as far as its contract goes; faults can be planted."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megamoe.bench.mega_cases import MegaWeights
from megamoe.types import Fp8Tensor, Routing
from tests.support import plain_fp8


def plain_layer(weights: MegaWeights, x: torch.Tensor, routing: Routing, group: int = 128) -> torch.Tensor:
    """fp64 ``[T, H]``, expert by expert; activations are cast, to FP8 in blocks of ``group``."""

    def cast(rows: torch.Tensor, width: int) -> torch.Tensor:
        if not weights.fp8:
            return rows.bfloat16().double()
        scales = plain_fp8.spread(plain_fp8.block_scales(rows, (1, width)), (1, width), rows.shape)
        # In fp32, by the reciprocal, as the numerics say: BF16 tokens have exact ties.
        return plain_fp8.round_e4m3((rows.float() * scales.float().reciprocal()).double()) * scales

    def decoded(w: Fp8Tensor | torch.Tensor, expert: int) -> torch.Tensor:
        if not weights.fp8:
            return w[expert].double()
        return w.codes[expert].double() * plain_fp8.spread(w.scales[expert].double(), w.block, w.codes[expert].shape)

    out = torch.zeros(x.shape, dtype=torch.float64)
    rows = cast(x.double(), 128)
    for expert in range(weights.experts):
        for token, slot in (routing.topk_index == expert).nonzero().tolist():
            gate, up = (rows[token] @ decoded(weights.up, expert).t()).chunk(2)
            act = cast((gate * gate.sigmoid() * up * routing.topk_weights[token, slot])[None], group)
            out[token] += (act @ decoded(weights.down, expert).t())[0]
    return out


def spoil(out: torch.Tensor, fault: str) -> None:
    """A fault in one token: the last, or one that is not compared with the reference."""
    row = out[2 if "unsampled" in fault else -1]
    if "nan" in fault:
        row[7] = float("nan")
    elif "missing" in fault:
        row.zero_()
    else:
        row.mul_(1.1)


class FakePeer:
    """The contract of the peer's functions, in plain torch. Its scales cover 64 activations."""

    fault = ""

    def __init__(self):
        self.made, self.destroyed = [], 0

    def get_symm_buffer_for_sm90_mega_moe(self, group, experts, tokens, top_k, hidden, intermediate):
        self.made.append((experts, tokens, top_k, hidden, intermediate))
        rows = -(-tokens // 384) * 384
        return SimpleNamespace(
            x=torch.empty(rows, hidden),
            x_sf=torch.empty(rows, hidden // 128),
            topk_idx=torch.full((rows, top_k), -1),
            topk_weights=torch.empty(rows, top_k),
            destroy=self._destroy,
        )

    def _destroy(self):
        self.destroyed += 1

    def transform_weights_for_mega_moe_sm90(self, up, down):
        codes, scales = up
        gate, other = (half.unflatten(1, (-1, 8)) for half in codes.chunk(2, dim=1))
        return (torch.stack([gate, other], dim=2).flatten(1, 3), scales), down

    def mega_moe_pre_dispatch_sm90(self, x, index, weights, buf_x, buf_x_sf, buf_index, buf_weights, num_tokens):
        assert x.dtype == torch.bfloat16 and index.dtype == torch.int32 and weights.dtype == torch.float32
        assert index.is_contiguous() and weights.is_contiguous() and num_tokens == x.shape[0]
        buf_x[:num_tokens], buf_index[:num_tokens], buf_weights[:num_tokens] = x, index, weights
        buf_index[num_tokens:] = -1

    def fp8_mega_moe(self, y, up, down, buffer):
        (codes, scales), n = up, y.shape[0]
        assert codes.dtype == torch.float8_e4m3fn and codes.is_contiguous() and scales.is_contiguous()
        halves = codes.view(torch.uint8).unflatten(1, (-1, 2, 8)).transpose(1, 2).flatten(1, 3)
        block = (128, 128)
        weights = MegaWeights(Fp8Tensor(halves.view(codes.dtype), scales, block), Fp8Tensor(*down, block))
        routing = Routing(buffer.topk_idx[:n], buffer.topk_weights[:n])
        y.copy_(plain_layer(weights, buffer.x[:n], routing, group=64))
        if self.fault:
            spoil(y, self.fault)
