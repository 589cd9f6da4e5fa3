"""Hugging Face -> Megatron -> Hugging Face gives every bit back, under every layout."""

import json
import re

import pytest
import torch
from engine_cases import DENSE_LAYOUTS, LAYOUTS, settings
from engine_jobs import export_to, new_engine
from engine_ranks import RankError, run_ranks
from safetensors.torch import load_file, save_file

from moerl.config.schema.layout import Layout
from moerl.models.hf_checkpoint import INDEX, HFCheckpoint

_ALL = [
    *(("qwen3_moe", layout) for layout in ("one", *LAYOUTS)),
    *(("untied-qwen3_moe", layout) for layout in ("one", "ep2", "tp2-ep2-etp2-dp2")),
    *((name, layout) for name in ("qwen3", "untied-qwen3") for layout in ("one", *DENSE_LAYOUTS)),
]
CASES = [
    pytest.param(name, layout, marks=[pytest.mark.matrix] if layout != "one" and LAYOUTS[layout].ranks > 2 else []) for name, layout in _ALL
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_loading_and_exporting_gives_the_checkpoint_back_bit_by_bit(name, layout, checkpoints, tmp_path):
    chosen = Layout() if layout == "one" else LAYOUTS[layout]
    names, specs = run_ranks(export_to, chosen.ranks, settings(checkpoints[name], chosen), tmp_path)
    original = load_file(checkpoints[name] / "model.safetensors")
    written = json.loads((tmp_path / INDEX).read_text())
    assert sorted(names) == sorted(original) == sorted(written["weight_map"])
    assert written["metadata"]["total_size"] == sum(tensor.nbytes for tensor in original.values())
    assert len(set(written["weight_map"].values())) > 1
    with HFCheckpoint(tmp_path) as exported:
        for spec in specs:
            tensor = exported.read(spec.name)
            assert tensor.equal(original[spec.name]), spec.name
            assert (exported.shape(spec.name), spec.dtype) == (spec.shape, "float32")
    assert [spec.name for spec in specs] == names


def test_bfloat16_weights_are_the_rounded_ones(checkpoints, tmp_path):
    chosen = settings(checkpoints["qwen3_moe"], LAYOUTS["ep2"], dtype="bfloat16")
    _, specs = run_ranks(export_to, 2, chosen, tmp_path)
    original = load_file(checkpoints["qwen3_moe"] / "model.safetensors")
    with HFCheckpoint(tmp_path) as exported:
        for spec in specs:
            assert spec.dtype == "bfloat16"
            assert exported.read(spec.name).equal(original[spec.name].bfloat16()), spec.name


@pytest.fixture
def changed(checkpoints, tmp_path):
    """A copy of a checkpoint of one file after `change(tensors)`."""

    def make(name, change):
        directory = tmp_path / "changed"
        directory.mkdir()
        (directory / "config.json").write_bytes((checkpoints[name] / "config.json").read_bytes())
        tensors = load_file(checkpoints[name] / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    return make


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.experts.5.up_proj.weight", "model.norm.weight", "model.layers.0.self_attn.k_proj.weight"]
)
def test_a_checkpoint_without_a_tensor_is_refused_with_its_name(name, changed):
    directory = changed("qwen3_moe", lambda tensors: tensors.pop(name))
    with pytest.raises(RankError, match=f"CheckpointError: {directory}: .*{name}"):
        run_ranks(new_engine, 1, settings(directory, Layout()))


SHAPES = {
    "model.embed_tokens.weight": (128, 32),
    "model.norm.weight": (32,),
    "model.layers.0.self_attn.q_proj.weight": (32, 32),
    "model.layers.0.self_attn.v_proj.weight": (16, 32),
    "model.layers.1.mlp.experts.5.down_proj.weight": (32, 16),
    "model.layers.1.mlp.experts.5.up_proj.weight": (16, 32),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("change", [-2, 2])
def test_a_tensor_with_more_or_fewer_rows_is_refused_with_its_name_and_both_shapes(name, change, changed):
    expected = SHAPES[name]
    rows = expected[0] + change

    def resize(tensors):
        tensors[name] = torch.cat([tensors[name], tensors[name]])[:rows].clone()

    directory = changed("qwen3_moe", resize)
    message = f"CheckpointError: {name} has shape {(rows, *expected[1:])}, but by its config.json it must have {expected}"
    with pytest.raises(RankError, match=re.escape(message)):
        run_ranks(new_engine, 2, settings(directory, LAYOUTS["tp2"]))
