"""What `moerl check` and `moerl train` refuse to continue before anything is started: another model, a damaged checkpoint. And what a rank
refuses before it joins the others: a GPU that its PyTorch cannot use."""

import json
import sys

import pytest
import torch
import yaml

from moerl.__main__ import main
from moerl.check import load_checked
from moerl.config.load import to_plain
from moerl.scratch_model import write_scratch_model
from moerl.train.checkpoint import checkpoint_dirs
from moerl.train.train_worker import TrainWorker
from moerl.types.errors import CheckpointError, ConfigError

RECIPE = "grpo-tiny-moe-1n2g-sync"
SHARD = "__0_0.distcp"


@pytest.fixture
def run_dir(tmp_path):
    """Of a run of the recipe with two checkpoints."""
    config = load_checked([f"recipe={RECIPE}", f"output_dir={tmp_path}"])
    directory = tmp_path / RECIPE
    write_scratch_model(config.model.scratch, config.model.max_context, directory / "model", seed=0)
    (directory / "config.yaml").write_text(yaml.safe_dump(to_plain(config)))
    model = json.loads((directory / "model" / "config.json").read_text())
    for version in (1, 2):
        temporary = checkpoint_dirs.begin(directory / "checkpoints", version)
        (temporary / SHARD).write_bytes(b"weights")
        checkpoint_dirs.commit(temporary, checkpoint_dirs.digest_files(temporary, [SHARD]), {"version": version}, model, keep=2)
    return directory


def checked(run_dir, *overrides):
    return load_checked([f"recipe={RECIPE}", f"output_dir={run_dir.parent}", *overrides])


def test_the_same_model_continues_also_under_another_layout_and_dtype(run_dir):
    assert checked(run_dir, "train.layout.ranks=1", "train.layout.ep=1", "train.dtype=bfloat16").name == RECIPE


def edit(run_dir, **changes):
    file = run_dir / "model" / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in config.items() if value != "gone"}))
    return file


def test_another_model_is_refused_with_every_field_and_both_values(run_dir):
    file = edit(run_dir, num_hidden_layers=2, rope_theta=5e5, norm_topk_prob=False, hidden_act="gone")
    with pytest.raises(ConfigError) as error:
        checked(run_dir)
    newest = run_dir / "checkpoints" / "step-000002"
    found = {problem.path: (problem.value, problem.rule) for problem in error.value.problems}
    assert found == {
        f"{file}: num_hidden_layers": (2, f"was 4 in the model that {newest} was trained with"),
        f"{file}: rope_theta": (5e5, f"was 10000.0 in the model that {newest} was trained with"),
        f"{file}: norm_topk_prob": (False, f"was True in the model that {newest} was trained with"),
        f"{file}: hidden_act": (found[f"{file}: hidden_act"][0], f"was 'silu' in the model that {newest} was trained with"),
    }
    assert str(found[f"{file}: hidden_act"][0]) == "(not set)"


def test_entries_that_are_not_the_model_and_names_of_another_library_version_do_not_matter(run_dir):
    edit(run_dir, transformers_version="6.0", dtype="bfloat16", use_cache=False, num_experts="gone", num_local_experts=8)
    edit(run_dir, rope_theta="gone", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    checked(run_dir)


def test_all_that_differs_is_reported_at_once(run_dir):
    edit(run_dir, vocab_size=7)
    with pytest.raises(ConfigError) as error:
        checked(run_dir, "seed=1", "group_size=4")
    assert [problem.path.split(": ")[-1] for problem in error.value.problems] == ["seed", "group_size", "vocab_size"]


@pytest.mark.parametrize("verb", ["check", "train"])
def test_a_checkpoint_with_damaged_files_is_refused_before_anything_starts(run_dir, verb, monkeypatch, capsys):
    newest = run_dir / "checkpoints" / "step-000002"
    (newest / SHARD).write_bytes(b"half")
    (newest / "state.json").unlink()
    monkeypatch.setattr(sys, "argv", ["moerl", verb, f"recipe={RECIPE}", f"output_dir={run_dir.parent}"])
    with pytest.raises(SystemExit) as exited:
        main()
    assert exited.value.code == 1
    assert capsys.readouterr().err.splitlines() == [
        f"moerl: checkpoint {newest} is damaged; delete {newest} to continue from step-000001, which has every file in its full size",
        f"* {SHARD}: 4 bytes, should be 7",
        "* state.json: missing",
    ]
    assert not (run_dir / "logs").exists()


def test_a_damaged_manifest_does_not_hide_what_else_is_wrong(run_dir):
    (run_dir / "checkpoints" / "step-000002" / checkpoint_dirs.MANIFEST).write_text("{")
    with pytest.raises(ConfigError, match="seed = 1"):
        checked(run_dir, "seed=1")
    with pytest.raises(CheckpointError, match=r"manifest\.json: cannot be read"):
        checked(run_dir)


@pytest.mark.skipif(torch.cuda.is_available(), reason="its PyTorch can use a GPU")
def test_a_rank_that_has_a_gpu_does_not_train_on_cpu_by_a_pytorch_without_cuda(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="placement.device = 'auto': needs a PyTorch for these GPUs"):
        TrainWorker(0, 1, ("6",)).start(None, 1, "", 0, 1.0)
