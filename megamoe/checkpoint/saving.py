"""``MoE`` modules back into a checkpoint in the names, shards and dtypes of the one that they came from."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from megamoe.checkpoint.dims import Dims, is_routed
from megamoe.checkpoint.files import RECORD, Checkpoint, TensorSpec
from megamoe.checkpoint.layer import StoredLayer
from megamoe.checkpoint.loading import numbered_layers, open_layers
from megamoe.checkpoint.outputs import Output, copied, layer_outputs
from megamoe.checkpoint.writing import by_weight_map, copy_files, in_order, write_index, write_json, write_shard
from megamoe.comm.failures import named_collective
from megamoe.errors import fail_value
from megamoe.layers.moe import MoE
from megamoe.layers.parallel import local_tensor


class ModuleLayer:
    """The tensors of a ``MoE`` on rank 0 of its group, one expert at a time: a ``LayerSource``.

    Every rank of the group reads the same in the same order.
    """

    def __init__(self, moe: MoE, like: StoredLayer):
        self.dims, self.blocks = Dims.of(moe.config), {}
        self.specs: dict[str, TensorSpec] = dict(like.specs)
        self._moe = moe

    def read(self, target: str, expert: int | None) -> torch.Tensor:
        tensor = local_tensor(attrgetter(target)(self._moe).detach())
        group = self._moe.experts.group
        if is_routed(target):
            owner, slot = divmod(expert, tensor.shape[0])
            if group is None:
                tensor = tensor[slot]
            else:
                mine = dist.get_rank(group) == owner
                tensor = tensor[slot].contiguous() if mine else torch.empty_like(tensor[0])
                with named_collective(f"save_moe_layers, {target} of expert {expert}", group):
                    dist.broadcast(tensor, dist.get_global_rank(group, owner), group=group)
        return tensor.to(self.specs[target].dtype).cpu()


@torch.no_grad()
def save_moe_layers(
    model: nn.Module,
    folder: str | Path,
    like: str | Path,
    *,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Writes ``like`` again with the values of the ``MoE`` layers of ``model``: same names, layouts, shards and dtypes.

    Every rank calls it; rank 0 writes, and gets the others' experts one at a time. The number of a layer is the one in
    its name, as for ``load_moe_layers``.

    Args:
        folder: the new folder; must not exist. It has its name only when it is complete.
        like: the checkpoint that the layers came from, or one of the same model.
        tensors: values for other tensors of ``like``, by their names there; the rest is copied.

    Raises:
        MegaMoEError: ``folder`` exists; ``like`` does not match the model, or is quantised; an unknown name or another
            shape in ``tensors``; the layers are not in the default placement of experts.
        CheckpointError: the disk is full, say; the other ranks then raise an ``ExchangeError`` at their next step.
    """
    folder, source = Path(folder), Checkpoint(like)
    if folder.exists():
        fail_value("folder", str(folder), "must not exist", "Choose another folder, or delete this one.")
    modules = numbered_layers(model)
    stored = open_layers(source, [(number, moe.config) for moe, number in modules])
    outputs = {name: copied(source, name) for name in source.weight_map}
    for name, value in (tensors or {}).items():
        outputs[name] = _replaced(outputs, name, value)
    for (moe, number), layer in zip(modules, stored, strict=True):
        if layer.blocks:
            rule = f"has layer {number} quantised, and the parameters of the model are not"
            fail_value("like", str(source.folder), rule, "Convert it with dequantize=True and pass the result.")
        if not moe.experts.placement.is_default:
            fail_value("model", f"layer {number}", "is not in the default placement", "Call rebalance first.")
        new = layer_outputs(ModuleLayer(moe, layer), layer.form, layer.stem)
        outputs.update((output.name, output) for output in new)
    of_layers = {entry.name for layer in stored for entry in layer.entries}
    shards = by_weight_map(outputs.values(), source.weight_map)
    if not dist.is_initialized() or dist.get_rank() == 0:
        _write(folder, source, shards)
    elif all(_with_rank_0(moe) for moe, _ in modules):
        for shard in shards.values():
            for output in in_order(shard):
                if output.name in of_layers:
                    for _ in output.pieces():
                        pass
    if dist.is_initialized():
        with named_collective("save_moe_layers, end", None):
            dist.barrier()


def _with_rank_0(moe: MoE) -> bool:
    group = moe.experts.group
    return group is not None and 0 in dist.get_process_group_ranks(group)


def _replaced(outputs: Mapping[str, Output], name: str, value: torch.Tensor) -> Output:
    if name not in outputs:
        fail_value("tensors", name, "is not a tensor of like", "Pass the names in the checkpoint.")
    spec = outputs[name].spec
    if tuple(value.shape) != spec.shape:
        fail_value(f"tensors[{name!r}].shape", list(value.shape), f"must be {list(spec.shape)}", "Reshape it.")
    return Output(name, spec, lambda: [local_tensor(value.detach()).to(spec.dtype).cpu()])


def _write(folder: Path, source: Checkpoint, shards: dict[str, list[Output]]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        metadata = source.metadata()
        for shard, outputs in shards.items():
            write_shard(partial / shard, outputs, metadata)
        write_index(partial, shards, source.index_metadata)
        copy_files(source.folder, partial)
        if source.record is not None:
            write_json(partial / RECORD, source.record)
        partial.chmod(0o755)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
