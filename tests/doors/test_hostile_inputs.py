"""What ended in a traceback, a hang or a wrong checkpoint once: each is refused with one message and exit code 2."""

import json
import os
import resource
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from moerl.config.schema.model_config import ScratchModel
from moerl.scratch_model import write_scratch_model
from moerl.types.errors import ConfigError

RECIPE = "recipe=grpo-tiny-moe-1n2g-sync"
BOMB = "# @package _global_\nl0: &l0 [a, a]\n" + "".join(f"l{i}: &l{i} [*l{i - 1}, *l{i - 1}]\n" for i in range(1, 40))
LONG = "a" * 300


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "model"
    write_scratch_model(
        ScratchModel(hidden_size=16, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=8, ffn_size=8), 32, directory, seed=0
    )
    return directory


@pytest.fixture
def folder(model, tmp_path):
    shutil.copytree(model, tmp_path / "folder")
    return tmp_path / "folder"


def refused(ended, *texts):
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("moerl: ") == 1 and "Traceback" not in ended.stderr, ended.stderr
    assert all(text in ended.stderr for text in texts), ended.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: caf\xe9\n".encode("latin-1"), "utf-8"), ("name: a\n".encode("utf-16"), "utf-8"), (b"name: \x00\n", "special characters"),
        (b"# @package _global_\nmodel: &a {x: *a}\n", "inside of what it stands for"), (BOMB.encode(), "each alias counted"),
        (b"x: " + b"[" * 3000 + b"]" * 3000, "nested"), (b"# @package _global_\nnull: 2\n", "cannot be composed"),
        (b"# @package _global_\nseed: !!binary aGk=\n", "seed = b'hi'"), (b"# @pack\nname: a\n", "header"), (b"a: [\n", "YAML"),
    ],
)  # fmt: skip
def test_a_recipe_file(text, says, moerl, tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_bytes(text)
    refused(moerl("check", "--config-dir", tmp_path, "recipe=mine"), says)


@pytest.mark.parametrize(
    "words",
    [
        ["check", RECIPE, "-x"], ["plan", "--servers", "abc"], ["inspect"], ["unheard"],
        ["check", "--config-dir", LONG, RECIPE], ["inspect", LONG],
        ["compare", LONG, LONG], ["convert", LONG, "x"],
        ["convert", ".", LONG], ["check", RECIPE, "~eval=nan"], ["report", LONG],
    ],
    ids=lambda words: " ".join(words)[:40],
)  # fmt: skip
def test_words_of_a_command(words, moerl):
    refused(moerl(*words))


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nowhere", "/dev/null/x", LONG])
def test_a_place_that_cannot_be_written(place, model, moerl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    refused(moerl("convert", model, place), "DST")
    if not place.startswith("/proc"):  # root is told there only when it tries
        refused(moerl("train", RECIPE, f"output_dir={place}"), "output_dir")


def test_a_run_whose_saved_settings_are_no_text(moerl, tmp_path):
    run = tmp_path / "grpo-tiny-moe-1n2g-sync"
    run.mkdir()
    (run / "config.yaml").write_bytes(b"name: caf\xe9\n")
    refused(moerl("check", RECIPE, f"output_dir={tmp_path}"), "must be the settings of the run")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9}, {"num_experts": 10**8}, {"num_hidden_layers": 9999, "num_experts": 60_000}, {"hidden_size": "x"},
        {"hidden_size": 0}, {"hidden_size": -1}, {"hidden_size": 128.5}, {"hidden_size": None}, {"num_experts": None},
        {"model_type": ["a"]}, {"num_attention_heads": 3, "num_key_value_heads": 2, "head_dim": 8},
        {"quantization_config": "fp8"}, {"rope_scaling": 7}, {"vocab_size": True},
    ],
    ids=str,
)  # fmt: skip
def test_a_config_json(changes, folder, moerl, tmp_path):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    refused(moerl("convert", folder, tmp_path / "out", "--to", "moerl", "--dtype", "bfloat16"))
    refused(moerl("check", RECIPE, f"model.path={folder}", "model.scratch=null"), "model.path")


def test_a_folder_of_more_layers_than_its_config_json_says(folder, moerl, tmp_path):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 3}))
    refused(moerl("convert", folder, tmp_path / "out"), "model.layers.3.input_layernorm.weight", "is no tensor of this model")


def _header(file, change):
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = change(json.loads(data[8 : 8 + length]))
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def _second_on_first(header):
    first = {}
    for name, entry in header.items():
        if name != "__metadata__" and (held := first.setdefault(str(entry["shape"]), entry)) is not entry:
            return header | {name: held}
    raise AssertionError("no two tensors have one shape")


@pytest.mark.parametrize(
    "change",
    [
        lambda header: [1], lambda header: 7, lambda header: None, lambda header: "text", lambda header: b'{"a":' * 5000,
        lambda header: header | {"x": {"dtype": "F32", "shape": "ab", "data_offsets": [0, 0]}},
        lambda header: header | {"x": {"dtype": "F32", "shape": ["0"], "data_offsets": [0, 0]}},
        lambda header: header | {"x": {"dtype": "F32", "shape": [[0]], "data_offsets": [0, 0]}},
        lambda header: header | {"x": {"dtype": "F32", "shape": [0], "data_offsets": [0.0, 0.0]}},
        lambda header: header | {"\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}},
    ],
)  # fmt: skip
def test_a_header_of_safetensors(change, folder, moerl):
    _header(folder / "model.safetensors", change)
    refused(moerl("inspect", folder), "cannot be read as safetensors")


def test_two_tensors_on_the_same_bytes(folder, moerl, tmp_path):
    _header(folder / "model.safetensors", _second_on_first)
    refused(moerl("convert", folder, tmp_path / "out"), "overlaps")


@pytest.mark.parametrize(
    "index",
    [{"weight_map": {"x": LONG * 20}}, {"weight_map": {"x": "../model.safetensors"}}, {"weight_map": [1]}, {"weight_map": {}}, {}, [1]],
)
def test_an_index_of_files(index, folder, moerl):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(moerl("inspect", folder), "index.json")
    refused(moerl("check", RECIPE, f"model.path={folder}", "model.scratch=null"), "index.json")


@pytest.mark.parametrize("content", ['"\\ud800"', '"a\\udcff"'])
def test_rows_with_half_of_a_character(content, tmp_path):
    from moerl.config.schema.data_config import FileData
    from moerl.rollout.datasets.files import FileDataset
    from moerl.types.errors import DataError

    row = f'{{"prompt": [{{"role": "user", "content": {content}}}], "reward_model": {{"ground_truth": "1"}}}}'
    (tmp_path / "rows.jsonl").write_text(row + "\n" + '{"a":' * 5000)
    with pytest.raises(DataError, match="(?s)row 1: holds half of a character.*row 2: is no JSON: nested too deeply"):
        FileDataset(FileData(files=(str(tmp_path / "rows.jsonl"),)), 0)


def test_a_disk_without_room(folder, tmp_path):
    """A real limit of the kernel, on the size of files, as a user's command meets it: what was written stays for the next try."""
    command = [sys.executable, "-m", "moerl", "convert", str(folder), str(tmp_path / "out")]
    limits = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))  # noqa: E731
    ended = subprocess.run(
        command, capture_output=True, text=True, preexec_fn=limits, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    refused(ended, "could not be completed", "File too large")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text",
    ['{"eos_token_id": 1,', "[1]", *(f'{{"eos_token_id": {each}}}' for each in ('"</s>"', "[1, null]", "[]", "-1", "[1, -1]"))],
)
def test_a_generation_config_that_says_nothing_of_use_is_refused(tmp_path, text):
    from moerl.models.transformers_tokenizer import stop_tokens

    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        stop_tokens(tmp_path, SimpleNamespace(eos_token_id=0))
