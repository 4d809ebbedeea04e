"""Checkpoints of published models: loaded into ``MoE`` modules, converted to megamoe's layout and back."""

from megamoe.checkpoint.conversion import convert
from megamoe.checkpoint.files import Checkpoint, CheckpointError
from megamoe.checkpoint.loading import load_moe, load_moe_layers, moe_layers, read_layer
from megamoe.checkpoint.saving import save_moe_layers

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "convert",
    "load_moe",
    "load_moe_layers",
    "moe_layers",
    "read_layer",
    "save_moe_layers",
]
