"""Hugging Face folders become checkpoints that every layout loads, and checkpoints of runs become folders, bit by bit."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_jobs import Runs
from convert_jobs import load_and_export, train_save_export
from deepseek_cases import deepseek_settings, write_deepseek
from engine_cases import LAYOUTS, random_batch, settings
from engine_ranks import run_ranks
from safetensors.torch import load_file, save_file

from moerl.config.schema.layout import Layout
from moerl.convert.compare import compared
from moerl.convert.conversion import Conversion, convert
from moerl.convert.hf.hf_writing import WriteOptions
from moerl.models.hf_checkpoint import HFCheckpoint
from moerl.train.checkpoint import checkpoint_dirs
from moerl.types.errors import ConvertError

SMALL = WriteOptions(shard_bytes=60_000)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    return write_deepseek(tmp_path_factory.mktemp("deepseek"), "plain")["plain"]


def to_sharded(source, root, dtype="float32"):
    target = root / "checkpoints" / "step-000000"
    convert(Conversion(source=source, target=target, to="moerl", dtype=dtype, options=SMALL), dry_run=False)
    return target


def tensors_of(directory):
    with HFCheckpoint(directory) as held:
        return {name: held.read(name) for name in held.names()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].equal(tensor), name


@pytest.mark.parametrize(
    ("name", "layout", "dtype"),
    [
        ("untied-qwen3_moe", "one", "float32"),
        ("untied-qwen3_moe", "tp2-ep2-etp2-dp2", "float32"),
        ("untied-qwen3_moe", "tp2-pp2-ep2-dp2", "bfloat16"),
        ("qwen3", "pp2-vpp2", "float32"),
        ("qwen3", "tp2", "bfloat16"),
    ],
)
def test_every_layout_loads_a_converted_folder_and_trains_on(name, layout, dtype, checkpoints, tmp_path):
    chosen = Layout() if layout == "one" else LAYOUTS[layout]
    directory = to_sharded(checkpoints[name], tmp_path, dtype)
    assert checkpoint_dirs.newest(tmp_path / "checkpoints") == directory
    (tmp_path / "out").mkdir()
    norm = run_ranks(
        load_and_export, chosen.ranks, settings(checkpoints[name], chosen, dtype=dtype), random_batch(), directory, tmp_path / "out"
    )
    assert norm > 0
    expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors_of(checkpoints[name]).items()}
    assert_same(tensors_of(tmp_path / "out"), expected)


def test_multi_token_prediction_goes_there_and_back(deepseek, tmp_path):
    directory = to_sharded(deepseek, tmp_path)
    (tmp_path / "out").mkdir()
    chosen = deepseek_settings(deepseek, LAYOUTS["ep2"], mtp_loss=0.1)
    run_ranks(load_and_export, 2, chosen, random_batch(), directory, tmp_path / "out")
    assert_same(tensors_of(tmp_path / "out"), tensors_of(deepseek))
    convert(Conversion(source=directory, target=tmp_path / "back", options=SMALL), dry_run=False)
    assert_same(tensors_of(tmp_path / "back"), tensors_of(deepseek))


@pytest.mark.parametrize(("layout", "dtype"), [("tp2-ep2-etp2-dp2", "float32"), ("pp2", "bfloat16")])
def test_a_runs_checkpoint_becomes_the_folder_that_its_engine_exports(layout, dtype, checkpoints, tmp_path):
    chosen, model = LAYOUTS[layout], checkpoints["untied-qwen3_moe"]
    (tmp_path / "out").mkdir()
    directory = run_and_commit(settings(model, chosen, dtype=dtype), chosen.ranks, tmp_path, model)
    convert(Conversion(source=directory, target=tmp_path / "hf", files_from=model, options=SMALL), dry_run=False)
    assert_same(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "out"))
    assert (tmp_path / "hf" / "generation_config.json").exists()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["dtype"] == dtype


def run_and_commit(chosen, ranks, tmp_path, model):
    temporary = checkpoint_dirs.begin(tmp_path / "checkpoints", 1)
    run_ranks(train_save_export, ranks, chosen, random_batch(), temporary, tmp_path / "out")
    files = checkpoint_dirs.digest_files(temporary, sorted(path.name for path in temporary.iterdir()))
    return checkpoint_dirs.commit(temporary, files, {"version": 1}, json.loads((model / "config.json").read_text()), keep=1)


def test_transformers_loads_the_folder_made_of_a_runs_checkpoint(checkpoints, tmp_path):
    from transformers import AutoModelForCausalLM

    model = checkpoints["untied-qwen3_moe"]
    (tmp_path / "out").mkdir()
    directory = run_and_commit(settings(model, LAYOUTS["ep2"]), 2, tmp_path, model)
    convert(Conversion(source=directory, target=tmp_path / "hf"), dry_run=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert not loaded.lm_head.weight.equal(before.lm_head.weight)
    assert loaded.lm_head.weight.equal(load_file(tmp_path / "hf" / "model.safetensors")["lm_head.weight"])


def test_untrained_layers_of_multi_token_prediction_come_from_the_original_folder(deepseek, tmp_path):
    (tmp_path / "out").mkdir()
    directory = run_and_commit(deepseek_settings(deepseek, Layout()), 1, tmp_path, deepseek)
    with pytest.raises(ConvertError, match="--files-from = None: is needed"):
        convert(Conversion(source=directory, target=tmp_path / "hf"), dry_run=False)
    convert(Conversion(source=directory, target=tmp_path / "hf", files_from=deepseek), dry_run=False)
    assert_same(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "out"))


@pytest.fixture
def without_mtp(deepseek, tmp_path):
    """A checkpoint of a run that did not train its layers of multi-token prediction."""
    folder = tmp_path / "without"
    shutil.copytree(deepseek, folder)
    held = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in held.items() if not name.startswith(("model.layers.4.", "model.layers.5."))}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return to_sharded(folder, tmp_path)


def changed(model, root, change):
    """A copy of a folder, with its tensors changed."""
    shutil.copytree(model, root)
    held = load_file(root / "model.safetensors")
    change(held)
    save_file(held, root / "model.safetensors", metadata={"format": "pt"})
    return root


def test_untrained_layers_of_another_model_are_refused(deepseek, without_mtp, tmp_path):
    def change(held):
        held["model.layers.4.eh_proj.weight"] = torch.ones(48, 96)
        del held["model.layers.5.enorm.weight"]

    other = changed(deepseek, tmp_path / "other", change)
    with pytest.raises(ConvertError) as raised:
        convert(Conversion(source=without_mtp, target=tmp_path / "hf", files_from=other), dry_run=False)
    said = [(each.path, each.value, each.rule, each.reason.partition(";")[0]) for each in raised.value.problems]
    assert said == [
        ("--files-from", f"{other}: model.layers.4.eh_proj.weight", "must have shape (32, 64)", "found (48, 96)"),
        ("--files-from", f"{other}: model.layers.5.enorm.weight", "must have shape (32,)", "found none"),
    ]
    assert not (tmp_path / "hf").exists()


def test_untrained_layers_are_in_the_dtype_that_was_asked_for(deepseek, without_mtp, tmp_path):
    convert(Conversion(source=without_mtp, target=tmp_path / "hf", files_from=deepseek, dtype="bfloat16"), dry_run=False)
    convert(Conversion(source=deepseek, target=tmp_path / "direct", dtype="bfloat16"), dry_run=False)
    assert_same(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "direct"))


def test_a_conversion_does_not_go_on_with_untrained_layers_of_another_folder(deepseek, without_mtp, tmp_path):
    def change(held):
        held["model.layers.4.eh_proj.weight"][0, 0] = torch.nan

    broken, options = changed(deepseek, tmp_path / "broken", change), WriteOptions(shard_bytes=60_000, nonfinite="error")
    with pytest.raises(ConvertError, match="holds 1 values that are not finite"):
        convert(Conversion(source=without_mtp, target=tmp_path / "hf", files_from=broken, options=options), dry_run=False)
    with pytest.raises(ConvertError, match="was begun with another plan"):
        convert(Conversion(source=without_mtp, target=tmp_path / "hf", files_from=deepseek, options=options), dry_run=False)


def test_trained_layers_need_no_weights_of_the_folder_with_the_tokenizer(deepseek, without_mtp, tmp_path):
    files = tmp_path / "files"
    shutil.copytree(deepseek, files, ignore=shutil.ignore_patterns("*.safetensors"))
    directory = to_sharded(deepseek, tmp_path / "trained")
    convert(Conversion(source=directory, target=tmp_path / "hf", files_from=files), dry_run=False)
    assert_same(tensors_of(tmp_path / "hf"), tensors_of(deepseek))
    with pytest.raises(ConvertError, match=f"--files-from = '{files}': has no weights"):
        convert(Conversion(source=without_mtp, target=tmp_path / "none", files_from=files), dry_run=False)


def test_the_dtype_in_config_json_is_that_of_the_weights_where_biases_of_routers_come_first(deepseek, tmp_path):
    folder = tmp_path / "bfloat16"
    convert(Conversion(source=deepseek, target=folder, dtype="bfloat16"), dry_run=False)
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")  # the widest dtype first, as everybody writes them
    directory = to_sharded(folder, tmp_path, "bfloat16")
    convert(Conversion(source=directory, target=tmp_path / "hf", files_from=folder), dry_run=False)
    assert_same(tensors_of(tmp_path / "hf"), tensors_of(folder))
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_runs_checkpoint_becomes_a_folder_with_the_tokenizer_of_its_model(checkpoints, tmp_path):
    """The settings of the run, beside its checkpoints, name the model; one from scratch lies in the run's directory."""
    model, run = tmp_path / "model-of-run", tmp_path / "run"
    shutil.copytree(checkpoints["qwen3"], model)
    (model / "tokenizer.json").write_text('{"of": "the model"}')
    directory = to_sharded(model, run)
    (run / "config.yaml").write_text(f"model: {{path: {model}}}")
    said = convert(Conversion(source=directory, target=tmp_path / "hf", options=SMALL), dry_run=False)
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == '{"of": "the model"}'
    assert f"tokenizer.json, tokenizer_config.json ({model})" in said and "without" not in said
    (run / "config.yaml").write_text("model: {path: null, scratch: {family: qwen3}}")
    model.rename(run / "model")
    assert f"tokenizer_config.json ({run / 'model'})" in convert(Conversion(source=directory, target=tmp_path / "dry"), dry_run=True)


def test_a_run_whose_checkpoints_are_a_link_names_its_model_too(checkpoints, tmp_path):
    directory, run, model = to_sharded(checkpoints["qwen3"], tmp_path / "run"), tmp_path / "run", checkpoints["qwen3"]
    (run / "config.yaml").write_text(f"model: {{path: {model}}}")
    (run / "checkpoints").rename(tmp_path / "disk")
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    (tmp_path / "best").symlink_to(directory)
    assert f"tokenizer_config.json ({model})" in convert(Conversion(source=directory, target=tmp_path / "hf"), dry_run=True)
    (run / "checkpoints").unlink()
    (tmp_path / "disk").rename(run / "checkpoints")
    assert f"tokenizer_config.json ({model})" in convert(Conversion(source=tmp_path / "best", target=tmp_path / "hf"), dry_run=True)


def test_a_checkpoint_whose_model_is_not_known_says_what_its_folder_lacks(checkpoints, tmp_path):
    directory = to_sharded(checkpoints["qwen3"], tmp_path)
    lacking = "without a tokenizer and generation_config.json: a run's checkpoint holds weights alone, and"

    def said():
        return convert(Conversion(source=directory, target=tmp_path / "hf"), dry_run=True).splitlines()[-2:]

    hint = "; --files-from MODEL takes them from the folder of a model"
    assert said() == ["with config.json", f"{lacking} {tmp_path / 'config.yaml'}, which names its model, is not there{hint}"]
    (tmp_path / "config.yaml").write_text("model: {path: /nowhere/qwen3}")
    assert said() == ["with config.json", f"{lacking} the run's model, /nowhere/qwen3, is not there{hint}"]
    with pytest.raises(ConvertError, match="--files-from = '/nowhere': must be a directory"):
        convert(Conversion(source=directory, target=tmp_path / "hf", files_from=Path("/nowhere")), dry_run=True)


@pytest.mark.parametrize("part", ["", "checkpoints"])
def test_a_run_in_the_place_of_one_of_its_checkpoints_is_told_the_newest(part, checkpoints, tmp_path):
    directory = to_sharded(checkpoints["qwen3"], tmp_path)
    with pytest.raises(ConvertError, match=f"must be one checkpoint.*\\n.*\\n.*its newest is {directory}"):
        convert(Conversion(source=tmp_path / part, target=tmp_path / "hf"), dry_run=True)


def test_a_folder_and_its_checkpoint_compare_equal(checkpoints, tmp_path):
    directory = to_sharded(checkpoints["untied-qwen3_moe"], tmp_path)
    comparison = compared(checkpoints["untied-qwen3_moe"], directory, tolerance=0.0)
    assert comparison.is_equal and comparison.num_equal == 87


def test_a_runs_checkpoint_needs_no_resharding_and_says_so(checkpoints, tmp_path):
    directory = to_sharded(checkpoints["qwen3"], tmp_path)
    with pytest.raises(ConvertError, match="loads into any layout and dtype as it is"):
        convert(Conversion(source=directory, target=tmp_path / "again", to="moerl", dtype="bfloat16"), dry_run=False)


@pytest.mark.parametrize("verb", ["inspect", "compare", "convert"])
def test_a_checkpoint_whose_index_runs_a_command_is_refused_whatever_its_digests_say(verb, checkpoints, tmp_path, moerl):
    directory, mark = to_sharded(checkpoints["qwen3"], tmp_path), tmp_path / "ran"
    (directory / ".metadata").write_bytes(pickle.dumps(Runs(mark)))
    contents = json.loads((directory / checkpoint_dirs.MANIFEST).read_text())["contents"]
    contents["files"] = checkpoint_dirs.digest_files(directory, contents["files"])
    (directory / checkpoint_dirs.MANIFEST).write_text(checkpoint_dirs.manifest_text(contents))
    ended = moerl(verb, directory, *{"compare": [checkpoints["qwen3"]], "convert": [tmp_path / "hf"]}.get(verb, []))
    assert ended.returncode == 2
    assert "moerl: 1 problem with the checkpoint" in ended.stderr and "which is no data of a checkpoint" in ended.stderr
    assert not mark.exists() and not (tmp_path / "hf").exists()
