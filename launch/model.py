"""A decoder-only byte-level language model whose feed-forward in every layer is a mixture of experts.

Symbols: B sequences, T tokens per sequence, H hidden size, N heads, D head size = H / N, V vocabulary (256 bytes).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launch.config import VOCAB_SIZE, LaunchError, ModelConfig
from megamoe import MoE


def rope_tables(context_length: int, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary position embeddings, each fp32 [context_length, head_size / 2]."""
    frequency = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    angle = torch.outer(torch.arange(context_length, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def apply_rope(x_BNTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + D/2]) of each head by their position's angle. cos, sin: [T, D/2]."""
    first, second = x_BNTD.chunk(2, dim=-1)
    cos, sin = cos.to(x_BNTD.dtype), sin.to(x_BNTD.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class KVCache:
    """Keys and values of one attention layer for generation, for the `length` positions seen so far."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add [B, N, T, D] keys and values; returns all of them so far."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat((self.keys, keys), dim=2), torch.cat((self.values, values), dim=2)
        self.keys, self.values = keys, values
        return keys, values


class Attention(nn.Module):
    """Causal self-attention with rotary positions and normalised queries and keys."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.num_heads = config.num_heads
        self.qkv_proj = nn.Linear(hidden, 3 * hidden, bias=False, device=device)
        self.out_proj = nn.Linear(hidden, hidden, bias=False, device=device)
        self.q_norm = nn.RMSNorm(hidden // config.num_heads, eps=config.norm_eps, device=device)
        self.k_norm = nn.RMSNorm(hidden // config.num_heads, eps=config.norm_eps, device=device)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None = None) -> Tensor:
        """x: [B, T, H]; cos, sin: [T, D/2] of the positions of x. Returns [B, T, H]."""
        batch, length, hidden = x.shape
        qkv = self.qkv_proj(x).view(batch, length, 3, self.num_heads, hidden // self.num_heads)
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(dim=2))
        # Norm and rotation in fp32 under autocast, too.
        query = apply_rope(self.q_norm(query.float()), cos, sin).to(value.dtype)
        key = apply_rope(self.k_norm(key.float()), cos, sin).to(value.dtype)
        mask = None
        if cache is not None:
            past = cache.length
            key, value = cache.append(key, value)
            mask = torch.ones(length, past + length, dtype=torch.bool, device=x.device).tril(diagonal=past)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return self.out_proj(out.transpose(1, 2).reshape(batch, length, hidden))


class Block(nn.Module):
    """Pre-norm attention, then a pre-norm mixture of experts, each added to the residual stream."""

    def __init__(self, config: ModelConfig, group=None, balance_group=None, device: torch.device | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps, device=device)
        self.attention = Attention(config, device)
        self.moe_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps, device=device)
        self.moe = MoE(config.moe, group=group, balance_group=balance_group, device=device)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, cache)
        return x + self.moe(self.moe_norm(x))


class LanguageModel(nn.Module):
    """Bytes in, logits of the next byte out.

    group: process group or 1-D device mesh over which the experts are spread; None keeps all of them here.
    balance_group: process group over which the load-balancing loss counts tokens; None means `group`.
    Seed torch equally on every rank before construction: every rank then starts from the same weights.
    """

    def __init__(self, config: ModelConfig, group=None, balance_group=None, device: torch.device | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCAB_SIZE, config.hidden_size, device=device)
        self.blocks = nn.ModuleList(Block(config, group, balance_group, device) for _ in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps, device=device)
        self.head = nn.Linear(config.hidden_size, VOCAB_SIZE, bias=False, device=device)
        cos, sin = rope_tables(config.context_length, config.hidden_size // config.num_heads, config.rope_theta)
        self.register_buffer("rope_cos", cos.to(device), persistent=False)
        self.register_buffer("rope_sin", sin.to(device), persistent=False)
        self._init_dense_parameters()

    def _init_dense_parameters(self) -> None:
        """Initialise all but the MoE layers, which initialise themselves."""
        std = self.config.hidden_size**-0.5
        nn.init.normal_(self.embedding.weight, std=1.0)
        nn.init.zeros_(self.head.weight)
        for block in self.blocks:
            nn.init.normal_(block.attention.qkv_proj.weight, std=std)
            # Each layer adds to the residual stream; the division keeps the sum's scale independent of the depth.
            nn.init.normal_(block.attention.out_proj.weight, std=std / math.sqrt(2 * self.config.num_layers))

    def forward(self, tokens: Tensor, caches: list[KVCache] | None = None) -> Tensor:
        """tokens: integer [B, T]. Returns logits [B, T, V]. `caches`, one per layer, hold the positions before."""
        start = caches[0].length if caches else 0
        end = start + tokens.shape[1]
        if end > self.config.context_length:
            raise LaunchError(f"{end} positions exceed context_length={self.config.context_length}: pass fewer tokens")
        cos, sin = self.rope_cos[start:end], self.rope_sin[start:end]
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin, caches[index] if caches else None)
        return self.head(self.final_norm(x))

    def new_caches(self) -> list[KVCache]:
        """Empty key-value caches, one per layer, for `forward`."""
        return [KVCache() for _ in self.blocks]

    def moe_layers(self) -> Iterator[MoE]:
        for block in self.blocks:
            yield block.moe


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats, fp32, for each target. logits: [B, T, V]; targets: [B, T]. Returns [B, T]."""
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return loss.view_as(targets)


def autocast(dtype: str, device: torch.device) -> contextlib.AbstractContextManager:
    """Context in which the model runs: "float32" leaves all as it is, "bfloat16" is automatic mixed precision."""
    if dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, dtype))


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """(all parameters, parameters that one token uses) of the whole model, over all ranks."""
    hidden, moe = config.hidden_size, config.moe
    head_size = hidden // config.num_heads
    matrices = 2 if moe.activation == "relu2" else 3
    expert = matrices * hidden * moe.intermediate_size
    shared = matrices * hidden * moe.shared_intermediate_size
    dense = 4 * hidden * hidden + 2 * head_size + 2 * hidden + moe.num_experts * hidden + shared
    outside = 2 * VOCAB_SIZE * hidden + hidden
    total = outside + config.num_layers * (dense + moe.num_experts * expert)
    active = outside + config.num_layers * (dense + moe.top_k * expert)
    return total, active
