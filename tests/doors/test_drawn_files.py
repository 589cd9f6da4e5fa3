"""Fuzzers of files: whatever stands in them, they are read or refused with a message, in bounded time.

The seed is the commit's and printed in the header of a run. Words of a command and settings: tests/config/test_any_override.py.
"""

import itertools
import json
import random
import shutil

import pytest
import yaml
from drawn_inputs import check_cases, other_bytes, other_json, other_value

from moerl.config.compose import compose
from moerl.config.derive.model_configs import shipped_configs
from moerl.config.load import build
from moerl.config.resume import resume_differences
from moerl.config.rules.checkpoint_files import checkpoint_problems
from moerl.config.schema.data_config import FileData
from moerl.config.schema.model_config import ScratchModel
from moerl.config.yaml_files import parse_yaml
from moerl.convert.conversion import Conversion, convert
from moerl.convert.inspect import inspection
from moerl.convert.tensors.safetensors_file import read_header
from moerl.rollout.datasets.files import FileDataset
from moerl.scratch_model import write_scratch_model
from moerl.train.checkpoint.checkpoint_check import check
from moerl.train.checkpoint.checkpoint_dirs import digest_files, manifest_text
from moerl.types.errors import CheckpointError, ConfigError, ConvertError, DataError

RECIPE = "grpo-tiny-moe-1n2g-sync"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "model"
    sizes = ScratchModel(
        family="qwen3_moe", hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, ffn_size=8, num_experts=2
    )
    write_scratch_model(sizes, 32, directory, seed=0)
    return directory


def test_any_recipe_file_is_read_or_refused():
    files = [
        file.read_bytes()
        for group in ("recipe", "algorithm", "data", "eval", "layout")
        for file in (shipped_configs() / group).glob("*.yaml")
    ]
    whole = yaml.safe_dump(compose([f"recipe={RECIPE}"])).encode()

    def holds(draw: random.Random) -> None:
        text = other_bytes(draw, draw.choice([*files, whole, whole]))
        if draw.random() < 0.3:
            text = yaml.safe_dump(other_value(draw, yaml.safe_load(whole)), allow_unicode=True).encode(errors="surrogatepass")
        try:
            plain = parse_yaml(text)
        except ValueError:
            return
        if isinstance(plain, dict):
            try:
                build(plain)
            except ConfigError as error:
                str(error).encode()

    check_cases("recipe files", 900, holds)


def test_any_saved_settings_are_compared_or_refused(model):
    config = build(compose([f"recipe={RECIPE}"]))
    saved = yaml.safe_dump(compose([f"recipe={RECIPE}"])).encode()

    def holds(draw: random.Random) -> None:
        try:
            for each in resume_differences(other_bytes(draw, saved), config):
                str(each).encode()
        except ConfigError as error:
            str(error).encode()

    check_cases("saved settings", 300, holds)


def _with_header(data: bytes, change) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = change(data[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def test_any_header_of_safetensors_is_read_or_refused(model, tmp_path):
    data, file = (model / "model.safetensors").read_bytes(), tmp_path / "model.safetensors"

    def holds(draw: random.Random) -> None:
        file.write_bytes(_with_header(data, lambda header: other_json(draw, header)) if draw.random() < 0.9 else other_bytes(draw, data))
        try:
            stored = read_header(file)
        except ValueError:
            return
        places = sorted((each.begin, each.begin + each.num_bytes) for each in stored.values())
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))

    check_cases("safetensors headers", 1200, holds)


def _convert(source, target) -> None:
    for conversion in (Conversion(source=source, target=target), Conversion(source=source, target=target, to="moerl", dtype="bfloat16")):
        try:
            convert(conversion, dry_run=True)
        except ConvertError as error:
            str(error).encode()
    try:
        inspection(source, verify=False)
    except ConvertError as error:
        str(error).encode()


@pytest.mark.parametrize(("name", "count"), [("config.json", 900), ("model.safetensors.index.json", 300), ("model.safetensors", 300)])
def test_any_folder_is_converted_or_refused(model, tmp_path, name, count):
    folder = tmp_path / "folder"
    shutil.copytree(model, folder)
    if "index" in name:
        names = list(read_header(folder / "model.safetensors"))
        (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}))
    data = (folder / name).read_bytes()

    def holds(draw: random.Random) -> None:
        change = other_json if name.endswith(".json") else lambda draw, data: _with_header(data, lambda header: other_json(draw, header))
        (folder / name).write_bytes(change(draw, data))
        _convert(folder, tmp_path / "out")
        for each in checkpoint_problems(folder):
            str(each).encode()

    check_cases(name, count, holds)


def test_any_manifest_of_a_checkpoint_is_read_or_refused(model, tmp_path):
    directory = tmp_path / "checkpoints" / "step-000000"
    convert(Conversion(source=model, target=directory, to="moerl", dtype="bfloat16"), dry_run=False)
    manifest = directory / "manifest.json"
    data, index = manifest.read_bytes(), (directory / ".metadata").read_bytes()
    contents = json.loads(data)["contents"]

    def holds(draw: random.Random) -> None:
        changed = contents
        match draw.randrange(4):
            case 0:
                manifest.write_bytes(other_json(draw, data))
            case 1:  # whole, as its digest says
                changed = other_value(draw, contents)
                manifest.write_text(manifest_text(changed if isinstance(changed, dict) else {"model": changed}))
            case _:
                (directory / ".metadata").write_bytes(other_bytes(draw, index))
                manifest.write_text(manifest_text(contents | {"files": digest_files(directory, contents["files"])}))
        try:
            check(directory)
        except CheckpointError as error:
            str(error).encode()
        _convert(directory, tmp_path / "out")
        (directory / ".metadata").write_bytes(index)

    check_cases("manifests and indices", 500, holds)


ROW = {
    "prompt": [{"role": "user", "content": "1+1="}],
    "reward_model": {"ground_truth": "2"},
    "data_source": "x",
    "extra_info": {"answer": "2"},
}


def test_any_rows_are_read_or_refused(tmp_path):
    file = tmp_path / "rows.jsonl"

    def holds(draw: random.Random) -> None:
        file.write_bytes(b"\n".join(other_json(draw, json.dumps(ROW).encode()) for _ in range(draw.randrange(1, 4))))
        try:
            rows = FileDataset(FileData(files=(str(file),)), 0)
        except DataError as error:
            str(error).encode(errors="backslashreplace")
            return
        for index in range(len(rows)):
            json.dumps([rows[index].messages, rows[index].ground_truth, rows[index].extra_info], ensure_ascii=False, default=str).encode()

    check_cases("rows", 1200, holds)
