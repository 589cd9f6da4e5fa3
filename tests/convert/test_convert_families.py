"""Every family through a checkpoint: a layout's ranks load what was converted, and it converts back, bit by bit."""

import dataclasses
import json

import pytest
import torch
from convert_jobs import load_all
from engine_cases import random_batch, settings
from engine_ranks import run_ranks
from family_cases import CASES, write_case
from safetensors.torch import load_file, save_file

from moerl.config.layout import Layout
from moerl.convert.run import Conversion, convert
from moerl.models.checkpoint import HFCheckpoint
from moerl.models.family import num_mtp_layers
from moerl.types import ConvertError

EP2, TP2 = Layout(ranks=2, ep=2), Layout(ranks=2, tp=2)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {name: write_case(name, root) for name in CASES}


@pytest.fixture(scope="module")
def converted(directories, tmp_path_factory):
    """Checkpoints by case."""
    root = tmp_path_factory.mktemp("converted")
    for name, directory in directories.items():
        convert(Conversion(source=directory, target=root / name, to="moerl", dtype="float32"), dry_run=False)
    return {name: root / name for name in directories}


def assert_same(directory, expected):
    with HFCheckpoint(directory) as held:
        assert set(held.names()) == set(expected)
        for name, tensor in expected.items():
            assert held.read(name).equal(tensor), name


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_converts_back_to_the_same_bits(name, directories, converted, tmp_path):
    convert(Conversion(source=converted[name], target=tmp_path / "back"), dry_run=False)
    assert_same(tmp_path / "back", load_file(directories[name] / "model.safetensors"))


def chosen_settings(directory, layout):
    chosen = settings(directory, layout)
    mtp_loss = 0.1 if num_mtp_layers(json.loads((directory / "config.json").read_text())) else 0.0
    return dataclasses.replace(chosen, train=dataclasses.replace(chosen.train, mtp_loss=mtp_loss))


def test_ranks_load_the_checkpoints_of_every_family(directories, converted, tmp_path):
    cases = []
    for name, directory in directories.items():
        # The layouts that the family has, for sinks both; weights other than the checkpoint's to begin with.
        layouts = [TP2] if "num_experts_per_tok" not in CASES[name] else [TP2, EP2] if name == "gpt_oss" else [EP2]
        for layout in layouts:
            exported = tmp_path / f"{name}-tp{layout.tp}"
            exported.mkdir()
            cases.append((chosen_settings(directory, layout), converted[name], exported))
    for layout in (TP2, EP2):
        run_ranks(load_all, 2, [case for case in cases if case[0].train.layout == layout], random_batch())
    for chosen, _, exported in cases:
        assert_same(exported, load_file(chosen.model_dir / "model.safetensors"))


def test_every_missing_misshapen_and_unknown_tensor_is_listed(directories, tmp_path):
    directory = tmp_path / "broken"
    directory.mkdir()
    (directory / "config.json").write_bytes((directories["deepseek_v3"] / "config.json").read_bytes())
    tensors = load_file(directories["deepseek_v3"] / "model.safetensors")
    missing = ["model.norm.weight", "model.layers.2.mlp.experts.5.up_proj.weight", "model.layers.3.self_attn.kv_a_layernorm.weight"]
    for name in missing:
        del tensors[name]
    tensors["model.layers.1.self_attn.o_proj.weight"] = torch.ones(3, 5)
    tensors["model.layers.1.surprise.weight"] = torch.ones(3)
    tensors["model.layers.0.input_layernorm.weight"] = torch.ones(32, dtype=torch.int32)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConvertError) as caught:
        convert(Conversion(source=directory, target=tmp_path / "out", to="moerl", dtype="float32"), dry_run=False)
    listed = {(str(each.value).split(": ")[-1], each.rule) for each in caught.value.problems}
    assert listed >= {(name, "is missing") for name in missing}
    assert ("model.layers.1.self_attn.o_proj.weight", "must have shape (32, 32)") in listed
    assert ("model.layers.0.input_layernorm.weight", "must hold floating-point numbers") in listed
    assert ("model.layers.1.surprise.weight", "is no tensor of this model") in listed
    assert "found (3, 5)" in str(caught.value) and str(directory / "model.safetensors") in str(caught.value)
    assert not (tmp_path / "out.partial").exists()


def test_an_unknown_architecture_is_refused_with_the_nearest(directories, tmp_path):
    directory = tmp_path / "unknown"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes((directories["qwen3"] / "model.safetensors").read_bytes())
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3x"}))
    with pytest.raises(ConvertError, match="the nearest is qwen3"):
        convert(Conversion(source=directory, target=tmp_path / "out", to="moerl", dtype="float32"), dry_run=False)
