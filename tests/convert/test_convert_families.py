"""Every family through a checkpoint: a layout's ranks load what was converted, and it converts back, bit by bit."""

import dataclasses
import json
import shutil

import pytest
import torch
from convert_jobs import load_all
from engine_cases import random_batch, settings
from engine_ranks import run_ranks
from family_cases import BUILT, CASES, write_case
from safetensors.torch import load_file, save_file

from moerl.config.schema.layout import Layout
from moerl.convert.conversion import Conversion, convert
from moerl.models.families.parts.config_fields import num_mtp_layers
from moerl.models.hf_checkpoint import HFCheckpoint
from moerl.train.checkpoint.checkpoint_dirs import MANIFEST, manifest_text
from moerl.types.errors import ConvertError

EP2, TP2 = Layout(ranks=2, ep=2), Layout(ranks=2, tp=2)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {name: write_case(name, root) for name in CASES}


@pytest.fixture(scope="module")
def converted(directories, tmp_path_factory):
    """Checkpoints by case."""
    root = tmp_path_factory.mktemp("converted")
    for name in BUILT:
        convert(Conversion(source=directories[name], target=root / name, to="moerl", dtype="float32"), dry_run=False)
    return {name: root / name for name in BUILT}


def assert_same(directory, expected):
    with HFCheckpoint(directory) as held:
        assert set(held.names()) == set(expected)
        for name, tensor in expected.items():
            assert held.read(name).equal(tensor), name


@pytest.mark.parametrize("name", BUILT)
def test_a_checkpoint_converts_back_to_the_same_bits(name, directories, converted, tmp_path):
    convert(Conversion(source=converted[name], target=tmp_path / "back"), dry_run=False)
    assert_same(tmp_path / "back", load_file(directories[name] / "model.safetensors"))


def chosen_settings(directory, layout):
    chosen = settings(directory, layout)
    mtp_loss = 0.1 if num_mtp_layers(json.loads((directory / "config.json").read_text())) else 0.0
    return dataclasses.replace(chosen, train=dataclasses.replace(chosen.train, mtp_loss=mtp_loss))


def test_ranks_load_the_checkpoints_of_every_family(directories, converted, tmp_path):
    cases = []
    for name in BUILT:
        # The layouts that the family has, for sinks both; weights other than the checkpoint's to begin with.
        layouts = [TP2] if "num_experts_per_tok" not in CASES[name] else [TP2, EP2] if name == "gpt_oss" else [EP2]
        for layout in layouts:
            exported = tmp_path / f"{name}-tp{layout.tp}"
            exported.mkdir()
            cases.append((chosen_settings(directories[name], layout), converted[name], exported))
    for layout in (TP2, EP2):
        run_ranks(load_all, 2, [case for case in cases if case[0].train.layout == layout], random_batch())
    for chosen, _, exported in cases:
        assert_same(exported, load_file(chosen.model_dir / "model.safetensors"))


def test_every_missing_misshapen_and_unknown_tensor_is_listed(directories, tmp_path):
    directory = tmp_path / "broken"
    directory.mkdir()
    (directory / "config.json").write_bytes((directories["deepseek_v3"] / "config.json").read_bytes())
    tensors = load_file(directories["deepseek_v3"] / "model.safetensors")
    missing = ["model.norm.weight", "model.layers.1.mlp.experts.5.up_proj.weight", "model.layers.3.self_attn.kv_a_layernorm.weight"]
    for name in missing:
        del tensors[name]
    tensors["model.layers.1.self_attn.o_proj.weight"] = torch.ones(3, 5)
    # All of a kind, so that none is odd among its like; and a whole kind that is missing.
    for expert in range(8):
        tensors[f"model.layers.2.mlp.experts.{expert}.gate_proj.weight"] = torch.ones(17, 32)
        missing.append(f"model.layers.3.mlp.experts.{expert}.down_proj.weight")
        tensors.pop(missing[-1])
    tensors["model.layers.1.surprise.weight"] = torch.ones(3)
    tensors["model.layers.0.input_layernorm.weight"] = torch.ones(32, dtype=torch.int32)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConvertError) as caught:
        convert(Conversion(source=directory, target=tmp_path / "out", to="moerl", dtype="float32"), dry_run=False)
    listed = {(str(each.value).split(": ")[-1], each.rule) for each in caught.value.problems}
    assert listed >= {(name, "is missing") for name in missing}
    assert ("model.layers.1.self_attn.o_proj.weight", "must have shape (32, 32)") in listed
    assert listed >= {(f"model.layers.2.mlp.experts.{expert}.gate_proj.weight", "must have shape (16, 32)") for expert in range(8)}
    assert ("model.layers.0.input_layernorm.weight", "must hold floating-point numbers") in listed
    assert ("model.layers.1.surprise.weight", "is no tensor of this model") in listed
    assert len(listed) == len(missing) + 8 + 3
    assert "found (3, 5)" in str(caught.value) and str(directory / "model.safetensors") in str(caught.value)
    assert not (tmp_path / "out.partial").exists()


def test_layers_of_multi_token_prediction_may_be_absent_but_not_in_part(directories, tmp_path):
    directory = shutil.copytree(directories["deepseek_v3"], tmp_path / "deepseek")
    tensors = load_file(directory / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.startswith("model.layers.4.")}, directory / "model.safetensors")
    convert(Conversion(source=directory, target=tmp_path / "out", to="moerl", dtype="float32"), dry_run=False)
    tensors.pop("model.layers.4.eh_proj.weight")
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConvertError, match=r"model.layers.4.eh_proj.weight': is missing") as caught:
        convert(Conversion(source=directory, target=tmp_path / "again", to="moerl", dtype="float32"), dry_run=False)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("name", CASES)
def test_a_folder_of_every_family_becomes_a_folder_with_the_same_tensors(name, directories, tmp_path):
    convert(Conversion(source=directories[name], target=tmp_path / "out"), dry_run=False)
    assert_same(tmp_path / "out", load_file(directories[name] / "model.safetensors"))


def test_a_folder_that_becomes_a_folder_must_hold_its_model_and_nothing_else(directories, tmp_path):
    directory = shutil.copytree(directories["qwen3"], tmp_path / "qwen3")
    tensors = load_file(directory / "model.safetensors") | {"v_head.weight": torch.ones(3)}
    for layer in range(4):
        tensors.pop(f"model.layers.{layer}.self_attn.q_norm.weight")
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = torch.ones(3, 4)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConvertError) as caught:
        convert(Conversion(source=directory, target=tmp_path / "less"), dry_run=False)
    rules = ["is missing"] * 4 + ["must have shape (24, 32)"] * 4 + ["is no tensor of this model"]
    assert [each.rule for each in caught.value.problems] == rules


def test_rotary_frequencies_which_old_folders_hold_are_no_unknown_tensors(directories, tmp_path):
    directory = shutil.copytree(directories["qwen3"], tmp_path / "qwen3")
    kept = load_file(directory / "model.safetensors")
    save_file(kept | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, directory / "model.safetensors")
    convert(Conversion(source=directory, target=tmp_path / "sharded", to="moerl", dtype="float32"), dry_run=False)
    convert(Conversion(source=tmp_path / "sharded", target=tmp_path / "out", files_from=directory), dry_run=False)
    assert_same(tmp_path / "out", kept)


def test_a_setting_that_config_json_lacks_is_named(directories, tmp_path):
    directory = shutil.copytree(directories["deepseek_v3"], tmp_path / "deepseek")
    config = json.loads((directory / "config.json").read_text())
    for name in ("kv_lora_rank", "n_group"):
        (directory / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key != name}))
        for to in ("hf", "moerl"):
            with pytest.raises(ConvertError, match=f"config.json: {name} = None: is missing"):
                convert(Conversion(source=directory, target=tmp_path / "out", to=to, dtype="float32"), dry_run=False)


def test_a_checkpoint_whose_weights_are_of_another_model_than_its_config_is_refused(converted, tmp_path):
    directory = shutil.copytree(converted["glm4_moe"], tmp_path / "step-000000")
    contents = json.loads((directory / MANIFEST).read_text())["contents"]
    contents["model"] |= {"moe_intermediate_size": 24, "use_qk_norm": False, "vocab_size": 99}
    (directory / MANIFEST).write_text(manifest_text(contents))
    with pytest.raises(ConvertError) as caught:
        convert(Conversion(source=directory, target=tmp_path / "out"), dry_run=False)
    text = str(caught.value)
    assert "layers.1.mlp.experts.experts.linear_fc1.weight': does not fit its model" in text
    assert "found (32, 32), the model of its config.json has (48, 32)" in text
    assert "q_layernorm.weight': does not fit its model" in text and "without this parameter" in text
    assert "word_embeddings" not in text  # 101 rows are 99 and padding


def test_an_unknown_architecture_is_refused_with_the_nearest(directories, tmp_path):
    directory = tmp_path / "unknown"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes((directories["qwen3"] / "model.safetensors").read_bytes())
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3x"}))
    with pytest.raises(ConvertError, match="the nearest is qwen3"):
        convert(Conversion(source=directory, target=tmp_path / "out", to="moerl", dtype="float32"), dry_run=False)
