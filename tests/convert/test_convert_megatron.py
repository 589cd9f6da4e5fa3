"""Checkpoints that others train, by Megatron's own writer on ranks of several layouts, become the folders that went in, bit by bit."""

import dataclasses
import json
import pickle
import shutil

import pytest
import torch
from checkpoint_jobs import Runs
from engine_cases import settings
from engine_ranks import run_ranks
from family_cases import write_case
from megatron_jobs import DP_RESHARDABLE, FULLY_RESHARDABLE, save_all
from safetensors.torch import load_file

from moerl.config.schema.layout import Layout
from moerl.convert.compare import compared
from moerl.convert.conversion import Conversion, convert
from moerl.convert.hf.hf_source import HFSource
from moerl.convert.sharded.hf_to_sharded import parts_of
from moerl.convert.sharded.sharded_source import FORMAT, ShardPart, sharded_jobs, write_index
from moerl.convert.tensors.entry import computed
from moerl.convert.tensors.writing import write_files
from moerl.models.families.parts.config_fields import num_mtp_layers
from moerl.models.hf_checkpoint import HFCheckpoint
from moerl.types.errors import ConvertError

LAYOUT = Layout(ranks=4, tp=2, pp=2, ep=2)
SAVED = {"qwen3_moe": FULLY_RESHARDABLE, "deepseek_v3": DP_RESHARDABLE}
FURTHER = [
    ("qwen3_moe", Layout(ranks=2, pp=2, vpp=2), "float32"),
    ("deepseek_v3", Layout(ranks=4, tp=2, ep=2, etp=2), "bfloat16"),
    ("qwen2-tied", Layout(ranks=2, pp=2), "float32"),
    ("gpt_oss", Layout(ranks=2, ep=2), "float32"),
    ("mixtral", Layout(ranks=4, tp=2, ep=2), "bfloat16"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: write_case(name, root) for name in {*SAVED, *(case[0] for case in FURTHER)}}


def settings_of(model, layout, dtype="float32"):
    """With layers of multi-token prediction, where the model has them."""
    chosen = settings(model, layout, dtype=dtype)
    mtp_loss = 0.1 if num_mtp_layers(json.loads((model / "config.json").read_text())) else 0.0
    return dataclasses.replace(chosen, train=dataclasses.replace(chosen.train, mtp_loss=mtp_loss))


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory):
    """Folders like those of a run of Megatron-LM, by model."""
    root = tmp_path_factory.mktemp("saved")
    cases = [(settings_of(models[name], LAYOUT), sharding, root / name / "iter_0000001") for name, sharding in SAVED.items()]
    run_ranks(save_all, LAYOUT.ranks, cases)
    for name in SAVED:
        (root / name / "latest_checkpointed_iteration.txt").write_text("1")
    return {name: root / name for name in SAVED}


def assert_same(directory, model, dtype=torch.float32):
    with HFCheckpoint(directory) as held:
        expected = load_file(model / "model.safetensors")
        assert set(held.names()) == set(expected)
        for name, tensor in expected.items():
            kept = torch.float32 if name.endswith("e_score_correction_bias") else dtype
            assert held.read(name).dtype == kept and held.read(name).equal(tensor.to(kept)), name


@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_of_tensor_pipeline_and_expert_parallel_ranks_becomes_the_folder_it_began_with(name, saved, models, tmp_path):
    said = convert(Conversion(source=saved[name], target=tmp_path / "hf", files_from=models[name]), dry_run=False)
    assert_same(tmp_path / "hf", models[name])
    assert str(models[name]) in said and (tmp_path / "hf" / "generation_config.json").exists()


def test_layers_alike_are_stacked_and_others_are_not(saved, moerl):
    """So that both forms of keys are read here; optimizer and random streams are no weights."""
    stacked = moerl("inspect", saved["qwen3_moe"]).stdout
    assert "decoder.layers.mlp.experts.experts.linear_fc1.weight" in stacked and "[4, 8, 32, 32]" in stacked
    assert "optimizer.state.exp_avg.decoder.layers.mlp.experts" in stacked
    numbered = moerl("inspect", saved["deepseek_v3"] / "iter_0000001").stdout
    assert "decoder.layers.3.mlp.experts.experts.linear_fc1.weight" in numbered and "mtp.layers.0.eh_proj.weight" in numbered


@pytest.mark.matrix("megatron")
@pytest.mark.parametrize(("name", "layout", "dtype"), FURTHER)
def test_further_layouts_families_and_bfloat16(name, layout, dtype, models, tmp_path):
    run_ranks(save_all, layout.ranks, [(settings_of(models[name], layout, dtype), FULLY_RESHARDABLE, tmp_path / "iter_0000001")])
    convert(Conversion(source=tmp_path / "iter_0000001", target=tmp_path / "hf", files_from=models[name]), dry_run=False)
    assert_same(tmp_path / "hf", models[name], getattr(torch, dtype))


@pytest.mark.parametrize("places", [("model/dist_ckpt", "model/huggingface"), ("dist_ckpt", "huggingface")])
def test_config_and_tokenizer_of_verl_lie_beside_its_shards(places, saved, models, tmp_path):
    shards, beside = (tmp_path / "actor" / place for place in places)
    shutil.copytree(saved["qwen3_moe"] / "iter_0000001", shards)
    beside.mkdir(parents=True)
    (beside / "config.json").write_bytes((models["qwen3_moe"] / "config.json").read_bytes())
    (beside / "tokenizer.json").write_text("{}")
    convert(Conversion(source=tmp_path / "actor", target=tmp_path / "hf"), dry_run=False)
    assert_same(tmp_path / "hf", models["qwen3_moe"])
    assert (tmp_path / "hf" / "tokenizer.json").exists()


def test_the_folder_release_of_a_converted_model_is_found(saved, models, tmp_path):
    shutil.copytree(saved["qwen3_moe"] / "iter_0000001", tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    convert(Conversion(source=tmp_path, target=tmp_path / "hf", files_from=models["qwen3_moe"]), dry_run=False)
    assert_same(tmp_path / "hf", models["qwen3_moe"])


def refused(source, config, tmp_path, **changes):
    """Problems with the checkpoint under a config.json with `changes`."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(json.loads((config / "config.json").read_text()) | changes))
    with pytest.raises(ConvertError) as caught:
        convert(Conversion(source=source, target=tmp_path / "hf", files_from=tmp_path / "model"), dry_run=False)
    assert not (tmp_path / "hf").exists()
    return [(str(each.value).split(": ")[-1], each.rule) for each in caught.value.problems]


def test_every_key_that_is_missing_too_many_or_of_another_shape_is_in_one_message(saved, models, tmp_path):
    """The router of other experts, a layer more, and the layer that is dense instead of the first one that is not."""
    changes = {"num_hidden_layers": 5, "first_k_dense_replace": 2, "kv_lora_rank": 12}
    problems = refused(saved["deepseek_v3"], models["deepseek_v3"], tmp_path, **changes)
    assert ("decoder.layers.1.mlp.linear_fc1.weight", "is missing") in problems
    assert ("decoder.layers.4.mlp.experts.experts.linear_fc2.weight", "is missing") in problems
    assert ("decoder.layers.0.self_attention.linear_kv_up_proj.weight", "does not fit its model") in problems
    assert ("decoder.layers.1.mlp.router.weight", "does not fit its model") in problems


def test_stacks_of_other_layers_or_experts_are_named_once(saved, models, tmp_path):
    problems = refused(saved["qwen3_moe"], models["qwen3_moe"], tmp_path, num_hidden_layers=5, num_experts=4)
    assert ("decoder.layers.mlp.experts.experts.linear_fc1.weight", "must have leading axes of 5 and 4") in problems
    assert ("decoder.layers.self_attention.linear_qkv.weight", "must have leading axes of 5") in problems
    assert len(problems) == len(set(problems)) and not any(rule == "is missing" for _, rule in problems)


def test_a_checkpoint_without_config_json_asks_for_the_model(saved, moerl, tmp_path):
    ended = moerl("convert", saved["qwen3_moe"], tmp_path / "hf")
    assert ended.returncode == 2
    assert "--files-from = None: must hold config.json" in ended.stderr and "Megatron's checkpoints have no config.json" in ended.stderr


@pytest.mark.parametrize("to", ["moerl", "moe", "megatron_bridge"])
def test_what_others_train_becomes_a_folder_first(to, saved, tmp_path, models):
    with pytest.raises(ConvertError, match="must be a Hugging Face folder or a run's checkpoint"):
        compared(models["qwen3_moe"], saved["qwen3_moe"], tolerance=0.0)
    with pytest.raises(ConvertError, match=f"must be a Hugging Face folder with --to {to}"):
        convert(Conversion(source=saved["qwen3_moe"], target=tmp_path / "out", to=to, dtype="float32"), dry_run=False)


def test_another_format_and_an_index_that_runs_a_command_are_refused(saved, models, tmp_path, moerl):
    source, mark = shutil.copytree(saved["qwen3_moe"] / "iter_0000001", tmp_path / "iter_0000001"), tmp_path / "ran"
    (source / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    ended = moerl("convert", source, tmp_path / "hf", "--files-from", models["qwen3_moe"])
    assert ended.returncode == 2 and "its format is 'zarr', not 'torch_dist'" in ended.stderr
    (source / ".metadata").write_bytes(pickle.dumps(Runs(mark)))
    for verb in (("inspect", source), ("convert", source, tmp_path / "hf", "--files-from", models["qwen3_moe"])):
        ended = moerl(*verb)
        assert ended.returncode == 2 and "which is no data of a checkpoint" in ended.stderr
    assert not mark.exists()


def test_a_critic_of_a_model_with_a_tied_output_layer_is_refused_and_does_not_lose_its_head(models, tmp_path):
    model = models["qwen2-tied"]
    head = computed("head", torch.float32, (1, 32), lambda: torch.ones(1, 32))
    parts = parts_of(HFSource.open(model), torch.float32)
    parts.append(ShardPart(entry=head, key="output_layer.weight", offset=(0, 0), global_shape=(1, 32)))

    def complete(directory, finished):
        write_index(directory, parts, finished)
        (directory / "metadata.json").write_text(json.dumps(FORMAT))

    jobs = sharded_jobs(parts, shard_bytes=10**6, nonfinite="ignore")
    write_files(jobs, tmp_path / "critic", plan={}, workers=1, on_bytes=lambda num_bytes: None, complete=complete)
    with pytest.raises(ConvertError) as caught:
        convert(Conversion(source=tmp_path / "critic", target=tmp_path / "hf", files_from=model), dry_run=False)
    assert [str(each.value).split(": ")[-1] for each in caught.value.problems] == ["output_layer.weight"]
