"""Tiny random models, saved by transformers, and checkpoints that transformers cannot write here, made by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, WIDTH, EXPERTS, TOKENS = 24, 20, 8, 33

_COMMON = dict(
    hidden_size=HIDDEN,
    intermediate_size=WIDTH,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=40,
    max_position_embeddings=32,
    num_experts_per_tok=3,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
_ROUTED = dict(moe_intermediate_size=WIDTH)
_MLA = dict(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
_DEEPSEEK = dict(**_ROUTED, n_routed_experts=EXPERTS, first_k_dense_replace=1, routed_scaling_factor=2.5)
_GROUPS = dict(n_group=4, topk_group=2, norm_topk_prob=True)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", dict(num_local_experts=EXPERTS)),
    "qwen2_moe": (
        "Qwen2Moe",
        dict(**_ROUTED, num_experts=EXPERTS, shared_expert_intermediate_size=12, decoder_sparse_step=2),
    ),
    "qwen3_moe": ("Qwen3Moe", dict(**_ROUTED, num_experts=EXPERTS, head_dim=12, mlp_only_layers=[1])),
    "olmoe": ("Olmoe", dict(num_experts=EXPERTS)),
    "deepseek_v2": ("DeepseekV2", dict(**_DEEPSEEK, **_MLA, n_group=1, topk_group=1, n_shared_experts=2)),
    "deepseek_v3": ("DeepseekV3", dict(**_DEEPSEEK, **_MLA, **_GROUPS, n_shared_experts=2)),
    "glm4_moe": ("Glm4Moe", dict(**_DEEPSEEK, **_GROUPS, head_dim=12, n_shared_experts=1)),
    "gpt_oss": ("GptOss", dict(num_local_experts=EXPERTS, head_dim=12)),
}


@dataclass(frozen=True)
class Saved:
    """Where ``save_families`` put what.

    Attributes:
        root: ``root / family / "hub"`` has the names of the hub, ``.../ "stacked"`` transformers' own.
        layers: MoE layers of each family.
    """

    root: Path
    seed: int
    layers: dict[str, list[int]]

    def folder(self, family: str, names: str = "hub") -> Path:
        return self.root / family / names

    def outputs(self, family: str) -> dict[str, torch.Tensor]:
        """``x`` [TOKENS, HIDDEN] and, by layer number, the outputs of transformers' blocks for it."""
        return torch.load(self.root / family / "outputs.pt")


@torch.no_grad()
def save_families(root: Path, seed: int) -> Saved:
    """Saves every family in both sets of names, in several shards where they are the hub's."""
    import transformers

    layers = {}
    for family, (name, fields) in FAMILIES.items():
        torch.manual_seed(seed)
        config = getattr(transformers, f"{name}Config")(**{**_COMMON, **fields})
        config._experts_implementation = "eager"
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.normal_(std=HIDDEN**-0.5)
        model.save_pretrained(root / family / "hub", max_shard_size=20_000)
        model.save_pretrained(root / family / "stacked", save_original_format=False)
        blocks = {i: block.mlp for i, block in enumerate(model.model.layers) if hasattr(block.mlp, "experts")}
        x = torch.randn(TOKENS, HIDDEN)
        outputs = {"x": x}
        for number, block in blocks.items():
            out = block(x.unsqueeze(0))
            outputs[str(number)] = (out[0] if isinstance(out, tuple) else out).view(TOKENS, HIDDEN)
        torch.save(outputs, root / family / "outputs.pt")
        layers[family] = list(blocks)
    return Saved(root, seed, layers)


def write_checkpoint(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None, shards: int = 1
) -> Path:
    """A checkpoint of ``shards`` shards with these tensors, dealt in turn."""
    folder.mkdir(parents=True)
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)] if shards > 1 else None
    weight_map = {name: names[i % shards] if names else "model.safetensors" for i, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        part = {name: tensors[name].contiguous() for name, place in weight_map.items() if place == shard}
        save_file(part, folder / shard, metadata={"format": "pt"})
    if names:
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_fp8(*shape: int) -> torch.Tensor:
    """Every e4m3 code but the two NaNs, at random."""
    codes = torch.randint(0, 254, shape, dtype=torch.uint8)
    return (codes + (codes >= 127).to(torch.uint8)).view(torch.float8_e4m3fn)


FP8_CONFIG = dict(
    model_type="deepseek_v3",
    hidden_size=256,
    moe_intermediate_size=128,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    num_hidden_layers=2,
    quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128]),
)


def fp8_tensors(config: dict[str, Any], stacked: bool = False, scale_dtype=torch.float32) -> dict[str, torch.Tensor]:
    """A DeepSeek-V3 checkpoint in FP8: layer 0 is dense, layer 1 an MoE layer, ``quantization_config`` apart."""
    hidden, width, experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    tensors = {
        "model.embed_tokens.weight": torch.randn(40, hidden, dtype=torch.bfloat16),
        "model.layers.1.mlp.gate.weight": torch.randn(experts, hidden, dtype=torch.bfloat16),
        "model.layers.1.mlp.gate.e_score_correction_bias": torch.randn(experts),
    }

    def add(name: str, scale_name: str, *shape: int) -> None:
        blocks = [*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)]
        tensors[name] = random_fp8(*shape)
        tensors[scale_name] = (
            2.0 ** torch.randint(-9, 0, blocks) * (1 + (scale_dtype == torch.float32) * torch.rand(blocks))
        ).to(scale_dtype)

    def linear(name: str, rows: int, cols: int) -> None:
        add(f"{name}.weight", f"{name}.weight_scale_inv", rows, cols)

    linear("model.layers.0.mlp.up_proj", 200, hidden)
    linear("model.layers.1.self_attn.o_proj", hidden, 300)
    mlps = ["shared_experts"] if stacked else ["shared_experts", *(f"experts.{e}" for e in range(experts))]
    for mlp in mlps:
        for name in ("gate_proj", "up_proj"):
            linear(f"model.layers.1.mlp.{mlp}.{name}", width, hidden)
        linear(f"model.layers.1.mlp.{mlp}.down_proj", hidden, width)
    if stacked:
        for name, rows, cols in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
            add(
                f"model.layers.1.mlp.experts.{name}",
                f"model.layers.1.mlp.experts.{name}_scale_inv",
                experts,
                rows,
                cols,
            )
    return tensors


MXFP4_CONFIG = dict(
    model_type="gpt_oss",
    hidden_size=64,
    intermediate_size=96,
    num_local_experts=4,
    num_experts_per_tok=2,
    num_hidden_layers=1,
    quantization_config=dict(quant_method="mxfp4"),
)


def mxfp4_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A gpt-oss checkpoint as published: all packed codes at random, scales within BF16's range."""
    hidden, width, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    stem = "model.layers.0.mlp."
    tensors = {
        "model.norm.weight": torch.randn(hidden, dtype=torch.bfloat16),
        f"{stem}router.weight": torch.randn(experts, hidden, dtype=torch.bfloat16),
        f"{stem}router.bias": torch.randn(experts, dtype=torch.bfloat16),
        f"{stem}experts.gate_up_proj_bias": torch.randn(experts, 2 * width, dtype=torch.bfloat16),
        f"{stem}experts.down_proj_bias": torch.randn(experts, hidden, dtype=torch.bfloat16),
    }
    for name, rows, cols in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
        shape = (experts, rows, cols // 32)
        tensors[f"{stem}experts.{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{stem}experts.{name}_scales"] = torch.randint(100, 150, shape, dtype=torch.uint8)
    return tensors
