"""Megatron-Bridge itself loads what --to megatron_bridge writes, and moerl reads what Megatron-Bridge saves, bit by bit."""

import importlib.util

import pytest
from bridge_folder_jobs import load_export_save
from engine_ranks import run_ranks
from family_cases import write_case
from safetensors.torch import load_file

from moerl.config.rules.model_rules import missing
from moerl.convert.conversion import Conversion, convert
from moerl.models.bridge_packages import BRIDGES
from moerl.models.hf_checkpoint import HFCheckpoint
from moerl.types.errors import ConvertError

LACKING = missing(BRIDGES["megatron_bridge"]) or (importlib.util.find_spec("modelopt") is None and "modelopt is not installed")
with_bridge = pytest.mark.skipif(bool(LACKING), reason=f"{LACKING}: make test-bridges")

MODELS = {"qwen3_moe": "Qwen3MoeForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: write_case(name, root, architectures=[kind], bos_token_id=1, eos_token_id=2) for name, kind in MODELS.items()}


@pytest.fixture(scope="module")
def written(models, tmp_path_factory):
    root = tmp_path_factory.mktemp("written")
    for name, model in models.items():
        convert(Conversion(source=model, target=root / name, to="megatron_bridge", dtype="float32"), dry_run=False)
    return {name: root / name for name in models}


@pytest.fixture(scope="module")
def exchanged(models, written, tmp_path_factory):
    """(tensors that Megatron-Bridge exports, folder that it saved) by model."""
    root = tmp_path_factory.mktemp("saved")
    cases = [(models[name], written[name], root / name) for name in MODELS]
    exported = run_ranks(load_export_save, 1, cases, imports="megatron.bridge.training.model_load_save", deadline_seconds=400)
    return {name: (tensors, root / name) for name, tensors in zip(MODELS, exported, strict=True)}


def assert_same(directory, model):
    with HFCheckpoint(directory) as held:
        expected = load_file(model / "model.safetensors")
        assert set(held.names()) == set(expected)
        assert [name for name, tensor in expected.items() if not held.read(name).equal(tensor)] == []


@with_bridge
@pytest.mark.parametrize("name", MODELS)
def test_megatron_bridge_loads_what_is_written_for_it(name, exchanged, models):
    """All but the layer of multi-token prediction, which its model of DeepSeek has not."""
    exported, _ = exchanged[name]
    expected = {key: value for key, value in load_file(models[name] / "model.safetensors").items() if ".layers.4." not in key}
    assert exported.keys() == expected.keys()
    assert [key for key, tensor in expected.items() if not exported[key].equal(tensor)] == []


@with_bridge
@pytest.mark.parametrize("name", MODELS)
def test_what_megatron_bridge_begins_from_and_saves_becomes_the_folder(name, exchanged, models, tmp_path):
    convert(Conversion(source=exchanged[name][1], target=tmp_path / "hf", files_from=models[name]), dry_run=False)
    assert_same(tmp_path / "hf", models[name])


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_for_megatron_bridge_becomes_the_folder_again(name, written, models, tmp_path, moerl):
    convert(Conversion(source=written[name], target=tmp_path / "hf", files_from=models[name]), dry_run=False)
    assert_same(tmp_path / "hf", models[name])
    assert "verified" in moerl("inspect", written[name], "--verify").stdout


def test_a_family_whose_weights_megatron_bridge_may_have_otherwise_is_refused(tmp_path):
    with pytest.raises(ConvertError, match="must be one of qwen2, .* with --to megatron_bridge"):
        convert(
            Conversion(source=write_case("mixtral", tmp_path), target=tmp_path / "out", to="megatron_bridge", dtype="float32"),
            dry_run=False,
        )
