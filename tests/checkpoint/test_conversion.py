"""Whole checkpoints to megamoe's format and back: the same tensors, whatever happens on the way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megamoe import MegaMoEError, MoE, MoEConfig
from megamoe.checkpoint import (
    Checkpoint,
    convert,
    load_moe,
    moe_layers,
    outputs,
    read_layer,
    writing,
)
from megamoe.types import Fp8Tensor
from tests.checkpoint.test_layouts import same_bits
from tests.checkpoint.test_loading import TITAN, config_of, titan_checkpoint
from tests.checkpoint.test_quantized import dequantized
from tests.checkpoint.tiny import (
    FAMILIES,
    FP8_CONFIG,
    MXFP4_CONFIG,
    fp8_tensors,
    mxfp4_tensors,
    write_checkpoint,
)
from tests.support.errors import fails

SMALL = 8_000


def contents(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(folder)
    return {name: checkpoint.read(name) for name in checkpoint.weight_map}


def assert_same_checkpoint(actual: Path, expected: Path) -> None:
    """The same tensors in the same shards, the same index, the same other files."""
    a, b = contents(actual), contents(expected)
    assert a.keys() == b.keys()
    assert all(same_bits(a[name], b[name]) for name in b), [n for n in b if not same_bits(a[n], b[n])]
    assert Checkpoint(actual).weight_map == Checkpoint(expected).weight_map
    assert Checkpoint(actual).metadata() == Checkpoint(expected).metadata()
    files = {path.name for path in expected.iterdir()}
    assert {path.name for path in actual.iterdir()} == files
    for name in files:
        if name.endswith(".json"):
            assert json.loads((actual / name).read_text()) == json.loads((expected / name).read_text()), name
        elif not name.endswith(".safetensors"):
            assert (actual / name).read_bytes() == (expected / name).read_bytes(), name


def round_trip(source: Path, root: Path, size: int = SMALL) -> Path:
    """The checkpoint in megamoe's format, after a check that it can be had back."""
    convert(source, root / "megamoe", "megamoe", max_shard_size=size)
    convert(root / "megamoe", root / "back", "hf")
    assert_same_checkpoint(root / "back", source)
    return root / "megamoe"


@pytest.mark.parametrize("names", ["hub", "stacked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(family, names, saved, tmp_path):
    source = saved.folder(family, names)
    folder = round_trip(source, tmp_path)
    assert moe_layers(folder) == saved.layers[family]
    moes = [MoE(config_of(source)) for _ in range(2)]
    for layer in saved.layers[family]:
        for moe, place in zip(moes, (source, folder), strict=True):
            load_moe(moe, place, layer)
        assert all(
            torch.equal(a, b) for a, b in zip(moes[0].state_dict().values(), moes[1].state_dict().values(), strict=True)
        )
    stem = f"model.layers.{saved.layers[family][0]}.moe."
    names = {name.removeprefix(stem) for name in Checkpoint(folder).weight_map if name.startswith(stem)}
    assert names == moes[0].state_dict().keys()


@pytest.mark.parametrize("name", TITAN)
def test_round_trip_of_torchtitan(name, tmp_path, seed):
    # There is no config.json: the sizes are those of the tensors.
    moe, source = titan_checkpoint(tmp_path / "source", name)
    loaded = MoE(moe.config)
    load_moe(loaded, round_trip(source, tmp_path), 1)
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), moe.state_dict().values(), strict=True))


@pytest.mark.parametrize("stacked", [False, True])
def test_round_trip_of_fp8(stacked, tmp_path, seed):
    source = write_checkpoint(tmp_path / "source", fp8_tensors(FP8_CONFIG, stacked), FP8_CONFIG, shards=3)
    folder = round_trip(source, tmp_path, 10**6)
    config = MoEConfig.from_hf(FP8_CONFIG)
    for target, ours in read_layer(folder, 1, config).items():
        theirs = read_layer(source, 1, config)[target]
        if isinstance(theirs, Fp8Tensor):
            assert ours.block == theirs.block and same_bits(ours.scales, theirs.scales)
            ours, theirs = ours.codes, theirs.codes
        assert same_bits(ours, theirs)


def test_round_trip_of_fp8_with_a_width_that_splits_blocks(tmp_path, seed):
    fields = {**FP8_CONFIG, "moe_intermediate_size": 96}
    round_trip(write_checkpoint(tmp_path / "source", fp8_tensors(fields), fields), tmp_path)


def test_round_trip_of_mxfp4(tmp_path, seed):
    source = write_checkpoint(tmp_path / "source", mxfp4_tensors(MXFP4_CONFIG), MXFP4_CONFIG, shards=2)
    folder = round_trip(source, tmp_path)
    config = MoEConfig.from_hf(MXFP4_CONFIG)
    ours, theirs = (read_layer(place, 0, config)["experts.gate_up_proj"] for place in (folder, source))
    assert ours.block == theirs.block == (1, 32)
    assert same_bits(ours.codes, theirs.codes) and same_bits(ours.scales, theirs.scales)


def test_dequantized_fp8(tmp_path, seed, monkeypatch):
    tensors = fp8_tensors(FP8_CONFIG)
    source = write_checkpoint(tmp_path / "source", tensors, FP8_CONFIG, shards=2)
    convert(source, tmp_path / "megamoe", "megamoe", dequantize=True)
    convert(tmp_path / "megamoe", tmp_path / "hf", "hf")
    result = contents(tmp_path / "hf")
    assert result.keys() == {name for name in tensors if not name.endswith("_scale_inv")}
    for name, value in result.items():
        if tensors[name].dtype == torch.float8_e4m3fn:
            wanted = dequantized(tensors[name], tensors[f"{name}_scale_inv"]).float().bfloat16()
            assert same_bits(value, wanted), name
        else:
            assert same_bits(value, tensors[name]), name
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config == {key: value for key, value in FP8_CONFIG.items() if key != "quantization_config"}
    # From a checkpoint in megamoe's format too, and in several pieces: the blocks of a row are 128 x 300 codes.
    convert(source, tmp_path / "codes", "megamoe")
    monkeypatch.setattr(outputs, "CHUNK", 128 * 300)
    convert(tmp_path / "codes", tmp_path / "hf2", "hf", dequantize=True)
    again = contents(tmp_path / "hf2")
    assert again.keys() == result.keys() and all(same_bits(again[name], result[name]) for name in result)


def test_dequantized_mxfp4(tmp_path, seed):
    source = write_checkpoint(tmp_path / "source", mxfp4_tensors(MXFP4_CONFIG), MXFP4_CONFIG)
    convert(source, tmp_path / "megamoe", "megamoe", dequantize=True)
    convert(tmp_path / "megamoe", tmp_path / "hf", "hf")
    convert(source, tmp_path / "codes", "megamoe")
    convert(tmp_path / "codes", tmp_path / "hf2", "hf", dequantize=True)
    config = MoEConfig.from_hf(MXFP4_CONFIG)
    expected, actual = MoE(config), MoE(config)
    load_moe(expected, source, 0, dequantize=True)
    # gpt-oss in BF16 has other names and another layout than in MXFP4.
    assert "model.layers.0.mlp.experts.gate_up_proj" in Checkpoint(tmp_path / "hf")
    for folder in ("megamoe", "hf", "hf2"):
        load_moe(actual, tmp_path / folder, 0)
        assert all(
            torch.equal(a, b) for a, b in zip(actual.state_dict().values(), expected.state_dict().values(), strict=True)
        )
        assert "quantization_config" not in json.loads((tmp_path / folder / "config.json").read_text())


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_without_the_record(family, saved, tmp_path):
    # As if training had written the folder: the names are those usual for the model type.
    source = saved.folder(family)
    convert(source, tmp_path / "megamoe", "megamoe")
    (tmp_path / "megamoe" / "megamoe.json").unlink()
    convert(tmp_path / "megamoe", tmp_path / "back", "hf", max_shard_size=SMALL)
    a, b = contents(tmp_path / "back"), contents(source)
    assert a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in b)
    assert len(set(Checkpoint(tmp_path / "back").weight_map.values())) > 2


def test_mxfp4_without_the_record(tmp_path, seed):
    source = write_checkpoint(tmp_path / "source", mxfp4_tensors(MXFP4_CONFIG), MXFP4_CONFIG)
    convert(source, tmp_path / "megamoe", "megamoe")
    (tmp_path / "megamoe" / "megamoe.json").unlink()
    convert(tmp_path / "megamoe", tmp_path / "back", "hf")
    assert_same_checkpoint(tmp_path / "back", source)


def test_record_that_no_longer_fits(saved, tmp_path):
    # A tensor more than there was: the recorded shards have no place for it.
    convert(saved.folder("mixtral"), tmp_path / "megamoe", "megamoe")
    extra = tmp_path / "megamoe" / "model.safetensors"
    tensors = {**contents(tmp_path / "megamoe"), "new.weight": torch.ones(3)}
    shutil.rmtree(tmp_path / "x", ignore_errors=True)
    write_checkpoint(tmp_path / "x", tensors)
    shutil.copy(tmp_path / "x" / "model.safetensors", extra)
    convert(tmp_path / "megamoe", tmp_path / "back", "hf")
    back = contents(tmp_path / "back")
    assert back.keys() == {*contents(saved.folder("mixtral")), "new.weight"}
    record = json.loads((tmp_path / "megamoe" / "megamoe.json").read_text())
    record["layers"]["model.layers.0."] = "unheard of"
    (tmp_path / "megamoe" / "megamoe.json").write_text(json.dumps(record))
    with fails(ValueError, "megamoe.json", "unheard of", "must be one of mixtral"):
        convert(tmp_path / "megamoe", tmp_path / "back2", "hf")


@pytest.mark.parametrize(
    "change",
    [{"layers": []}, {"weight_map": []}, {"weight_map": {"t": "../model.safetensors"}}, {"weight_map": {"t": 3}}],
)
def test_bad_record(change, saved, tmp_path):
    convert(saved.folder("mixtral"), tmp_path / "megamoe", "megamoe")
    path = tmp_path / "megamoe" / "megamoe.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with fails(ValueError, "file", str(path), "must have an object of forms and one of shard names"):
        convert(tmp_path / "megamoe", tmp_path / "back", "hf")


def test_names_that_are_taken(saved, tmp_path):
    # A tensor outside the family's names that would be overwritten.
    name = "model.layers.0.moe.router.weight"
    source = write_checkpoint(tmp_path / "c", {**contents(saved.folder("mixtral")), name: torch.ones(1)})
    with fails(ValueError, "src", str(source), f"has tensors of the names that the MoE layers get: {name}"):
        convert(source, tmp_path / "x", "megamoe")


def test_shards(saved, tmp_path):
    folder = tmp_path / "megamoe"
    convert(saved.folder("qwen3_moe"), folder, "megamoe", max_shard_size="8KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    assert len(shards) > 4 and not list(folder.glob("*.tmp"))
    checkpoint = Checkpoint(folder)
    sizes = {shard: [] for shard in shards}
    for name, shard in checkpoint.weight_map.items():
        sizes[shard].append(checkpoint.spec(name).nbytes)
    assert all(sum(parts) <= 8000 or len(parts) == 1 for parts in sizes.values())
    assert index["metadata"]["total_size"] == sum(map(sum, sizes.values()))
    # Layers follow each other by number, not by spelling.
    places = [checkpoint.weight_map[f"model.layers.{layer}.moe.experts.down_proj"] for layer in (0, 2)]
    assert places == sorted(places)


def test_other_files_are_copied(saved, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(saved.folder("olmoe"), source)
    (source / "tokenizer.json").write_bytes(bytes(range(256)) * 50)
    (source / "LICENSE").write_text("free")
    (source / "pytorch_model.bin").write_bytes(b"weights")
    (source / "original").mkdir()
    folder = tmp_path / "megamoe"
    convert(source, folder, "megamoe")
    assert (folder / "tokenizer.json").read_bytes() == bytes(range(256)) * 50
    assert {path.name for path in folder.iterdir()} == {
        "LICENSE",
        "config.json",
        "generation_config.json",
        "megamoe.json",
        "model.safetensors",
        "tokenizer.json",
    }


@pytest.mark.parametrize("verify", [True, False])
def test_progress(verify, saved, tmp_path):
    calls = []
    options = dict(max_shard_size=SMALL, verify=verify, progress=lambda *call: calls.append(call))
    convert(saved.folder("mixtral"), tmp_path / "megamoe", "megamoe", **options)
    for phase in ("write", "verify"):
        steps = [call for call in calls if call[0] == phase]
        assert bool(steps) == (verify or phase == "write")
        dones = [done for _, done, _ in steps]
        assert dones == sorted(dones)
        assert all(done == total for _, done, total in steps[-1:])


# ---------------------------------------------------------------- refusals


def test_refusals(saved, tmp_path):
    source = saved.folder("mixtral")
    with fails(ValueError, "to", "onnx", "must be one of 'hf', 'megamoe'"):
        convert(source, tmp_path / "x", "onnx")
    with fails(ValueError, "dst", str(tmp_path), "must not exist"):
        convert(source, tmp_path, "megamoe")
    with fails(ValueError, "src", str(source), "is not in megamoe's format"):
        convert(source, tmp_path / "x", "hf")
    convert(source, tmp_path / "megamoe", "megamoe")
    with fails(ValueError, "src", str(tmp_path / "megamoe"), "is in megamoe's format already"):
        convert(tmp_path / "megamoe", tmp_path / "x", "megamoe")
    for size in ("", "5 apples", "0", 0, "-3GB"):
        with fails(ValueError, "max_shard_size", size, "must be a positive size"):
            convert(source, tmp_path / "x", "megamoe", max_shard_size=size)
    with fails(TypeError, "max_shard_size", None, "must be an int or a str"):
        convert(source, tmp_path / "x", "megamoe", max_shard_size=None)
    assert not (tmp_path / "x").exists() and not (tmp_path / "x.partial").exists()
    for name in ("megamoe.json", "config.json"):
        (tmp_path / "megamoe" / name).unlink()
    with fails(ValueError, "src", str(tmp_path / "megamoe"), "has neither megamoe.json nor config.json"):
        convert(tmp_path / "megamoe", tmp_path / "x", "hf")


def test_sizes():
    sizes = {"5GB": 5 * 10**9, "1.5 kb": 1500, "7": 7, 12: 12, "3B": 3, "2tb": 2 * 10**12}
    assert {text: writing.parse_size(text) for text in sizes} == sizes


def test_not_a_moe_model(tmp_path):
    source = write_checkpoint(tmp_path / "c", {"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2)})
    with fails(ValueError, "src", str(source), "has no MoE layers of a known format"):
        convert(source, tmp_path / "x", "megamoe")


def change_config(source: Path, **fields) -> dict:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **fields}))


def test_config_that_does_not_match_the_tensors(saved, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(saved.folder("deepseek_v3"), source)
    change_config(source, n_routed_experts=12, first_k_dense_replace=0, num_hidden_layers=5)
    with pytest.raises(MegaMoEError) as caught:
        convert(source, tmp_path / "x", "megamoe")
    for words in (
        "missing: layer 0 which is an MoE layer by config.json",
        "missing: layer 3 which",
        "missing: layer 4 which",
        "missing: model.layers.1.mlp.experts.{8-11}.down_proj.weight [24, 20]",
        "missing: model.layers.2.mlp.experts.{8-11}.down_proj.weight [24, 20]",
        "wrong: model.layers.1.mlp.gate.weight is [8, 24], must be [12, 24]",
    ):
        assert words in str(caught.value), caught.value
    assert not (tmp_path / "x.partial").exists()


def test_layer_that_is_missing_as_a_whole(saved, tmp_path):
    tensors = {n: t for n, t in contents(saved.folder("mixtral")).items() if "1.block_sparse_moe" not in n}
    config = json.loads((saved.folder("mixtral") / "config.json").read_text())
    source = write_checkpoint(tmp_path / "c", tensors, config)
    with pytest.raises(MegaMoEError, match="missing: layer 1 which is an MoE layer by config.json"):
        convert(source, tmp_path / "x", "megamoe")


def test_sizes_cannot_be_inferred_without_the_router(tmp_path, seed):
    _, source = titan_checkpoint(tmp_path / "c", "plain")
    tensors = {name: value for name, value in contents(source).items() if "router" not in name}
    broken = write_checkpoint(tmp_path / "d", tensors)
    with pytest.raises(MegaMoEError, match=r"moe.router.gate.weight must be there and \[E, H\], is \[\]"):
        convert(broken, tmp_path / "x", "megamoe")


def test_damaged_sources_leave_nothing(saved, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(saved.folder("mixtral"), source)
    shards = sorted(source.glob("*.safetensors"))
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    with pytest.raises(MegaMoEError, match="is truncated or no safetensors file"):
        convert(source, tmp_path / "x", "megamoe")
    save_file({"unnamed": torch.ones(2)}, shards[1])
    with pytest.raises(MegaMoEError, match=f"unnamed is in {shards[1].name}, but not in the index"):
        convert(source, tmp_path / "x", "megamoe")
    shards[1].unlink()
    with pytest.raises(MegaMoEError, match=f"names 1 missing shards: {shards[1].name}"):
        convert(source, tmp_path / "x", "megamoe")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_folder_in_the_way(saved, tmp_path):
    source, partial = saved.folder("mixtral"), tmp_path / "x.partial"
    partial.mkdir()
    (partial / "thesis.txt").write_text("mine")
    with fails(ValueError, "folder", str(partial), "is in the way: it holds no unfinished conversion"):
        convert(source, tmp_path / "x", "megamoe")
    assert (partial / "thesis.txt").read_text() == "mine"
