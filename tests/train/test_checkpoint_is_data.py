"""A checkpoint runs nothing: whatever its pickles name, and whatever digests stand beside them, it is data or it is refused."""

import io
import pickle
from pathlib import PurePosixPath

import pytest
import torch
from checkpoint_jobs import Runs, refused_loads
from engine_cases import random_batch, settings
from engine_ranks import run_ranks
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from moerl.config.schema.layout import Layout
from moerl.config.schema.model_config import ScratchModel
from moerl.scratch_model import write_scratch_model
from moerl.train.checkpoint.checkpoint_pickles import load_tensor, read_index
from moerl.types.errors import CheckpointError

KEY, SHARD = "decoder.weight", "__0_0.distcp"
FLOAT = dcp.TensorProperties(dtype=torch.float32)


def index_of(*, size=(4,), chunk=(4,), offset=(0,), place=(SHARD, 0, 100), properties=FLOAT):
    held = dcp.TensorStorageMetadata(properties, torch.Size(size), [dcp.ChunkStorageMetadata(torch.Size(offset), torch.Size(chunk))])
    return dcp.Metadata({KEY: held}, storage_data={dcp.MetadataIndex(KEY, torch.Size(offset)): filesystem._StorageInfo(*place)})


def written(directory, index):
    (directory / ".metadata").write_bytes(index if isinstance(index, bytes) else pickle.dumps(index))
    (directory / SHARD).write_bytes(bytes(100))
    return directory


def test_an_index_that_a_run_writes_is_read(tmp_path):
    assert read_index(written(tmp_path, index_of())).state_dict_metadata[KEY].size == (4,)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_an_index_that_names_a_command_is_refused_and_runs_nothing(tmp_path, protocol):
    mark = tmp_path / "ran"
    hidden = index_of()
    hidden.planner_data = {"deep": [Runs(mark)]}
    for evil in (Runs(mark), hidden):
        with pytest.raises(CheckpointError, match="which is no data of a checkpoint"):
            read_index(written(tmp_path, pickle.dumps(evil, protocol)))
    assert not mark.exists()


def _sets_attributes_of_a_class() -> bytes:
    """BUILD on the class itself, not on an object of it: afterwards every index of the process would be another."""
    return b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}(\x8c\x0bplanner_dataK\x07u\x86b."


def test_an_index_that_writes_into_a_class_of_python_leaves_it_as_it_was(tmp_path):
    """BUILD on pathlib's class, which old checkpoints name."""
    evil = b"\x80\x02cpathlib\nPurePosixPath\nN}X\x06\x00\x00\x00parentX\x04\x00\x00\x00evils\x86b."
    with pytest.raises(CheckpointError):
        read_index(written(tmp_path, evil))
    assert PurePosixPath("/a/b").parent == PurePosixPath("/a")


@pytest.mark.parametrize(
    "index",
    [
        b"", b"\x80\x04.", pickle.dumps([1]), pickle.dumps({"state_dict_metadata": {}}), b"(" * 100_000 + b"t" * 100_000 + b".",
        index_of(place=("../elsewhere", 0, 100)), index_of(place=("/etc/passwd", 0, 100)), index_of(place=(SHARD, 50, 100)),
        index_of(place=(SHARD, -1, 100)), index_of(place=(None, 0, 100)), index_of(size=(10**15,), chunk=(4,)),
        index_of(size=(10**15,), chunk=(10**15,)), index_of(offset=(2,)), index_of(properties=7), index_of(chunk=(2, 2)),
        dcp.Metadata({KEY: 7}, storage_data={}), dcp.Metadata(7), dcp.Metadata({}, storage_data=[1]),
    ],
)  # fmt: skip
def test_an_index_that_is_none_is_refused(tmp_path, index):
    with pytest.raises(CheckpointError, match="cannot be read as the index of a checkpoint"):
        read_index(written(tmp_path, index))


def test_an_index_changes_no_class(tmp_path):
    before = dict(vars(dcp.Metadata))
    with pytest.raises(CheckpointError):
        read_index(written(tmp_path, _sets_attributes_of_a_class()))
    assert dict(vars(dcp.Metadata)) == before


@pytest.mark.parametrize("held", ["command", "list", "nothing"])
def test_a_stored_tensor_is_a_tensor_or_refused(tmp_path, held):
    buffer = io.BytesIO()
    if held != "nothing":
        torch.save(Runs(tmp_path / "ran") if held == "command" else [torch.ones(2)], buffer)
    with pytest.raises(CheckpointError, match="a stored tensor cannot be read"):
        load_tensor(buffer.getvalue())
    assert not (tmp_path / "ran").exists()


def test_no_rank_runs_what_a_checkpoint_names(tmp_path):
    """Every file that a rank unpickles: the index, common.pt, a random stream, what Transformer Engine keeps beside a weight. Megatron and
    torch load the last three with weights_only off."""
    model = tmp_path / "model"
    scratch = ScratchModel(family="qwen3", hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=16)
    write_scratch_model(scratch, 32, model, seed=0)
    mark = tmp_path / "ran"
    said = run_ranks(refused_loads, 1, settings(model, Layout()), random_batch(), tmp_path / "saved", mark)
    assert not mark.exists()
    assert said.keys() == {".metadata", "common.pt", "rng", "_extra_state", "_extra_state of an evaluation"}
    for name, text in said.items():
        assert "cannot be loaded" in text and ("system" in text), (name, text)
        assert len(text.splitlines()) == 1, text
