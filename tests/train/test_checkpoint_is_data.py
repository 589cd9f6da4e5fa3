"""A checkpoint runs nothing: whatever its pickles name, and whatever digests stand beside them, it is data or it is refused."""

import io
import pickle
import resource
import zipfile
from contextlib import nullcontext
from pathlib import PurePosixPath

import pytest
import torch
from checkpoint_jobs import Runs, refused_loads
from engine_cases import random_batch, settings
from engine_ranks import run_ranks
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

import megatron_patches
from moerl.config.schema.layout import Layout
from moerl.config.schema.model_config import ScratchModel
from moerl.scratch_model import write_scratch_model
from moerl.train.checkpoint.checkpoint_pickles import check_extra_state, load_tensor, read_index
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


def _chunks(*offsets):
    index = index_of(size=(8,), chunk=(2,))
    index.state_dict_metadata[KEY].chunks = [dcp.ChunkStorageMetadata(torch.Size((offset,)), torch.Size((2,))) for offset in offsets]
    index.storage_data = {dcp.MetadataIndex(KEY, torch.Size((offset,))): filesystem._StorageInfo(SHARD, 0, 100) for offset in offsets}
    return index


def test_the_chunks_of_a_tensor_are_its_parts_each_once(tmp_path):
    assert len(read_index(written(tmp_path, _chunks(0, 2, 6, 4))).state_dict_metadata[KEY].chunks) == 4
    for offsets in ((0, 0, 0, 0), (0, 2, 4, 4), (0, 2, 4, 5)):
        with pytest.raises(CheckpointError, match="not the whole of it, each part once"):
            read_index(written(tmp_path, _chunks(*offsets)))
    with pytest.raises(CheckpointError, match="no place in a file"):
        read_index(written(tmp_path, index_of(place=(SHARD, 0.0, 100))))


NESTED = b"N\x85\x94" + b"".join(b"h%ch%c\x86\x94" % (i, i) for i in range(40))
"""t = (t, t), forty times: as a key it is hashed in 2 ** 40 steps."""


@pytest.mark.parametrize(
    "index",
    [
        b"\x80\x04}" + NESTED + b"Ns.", b"\x80\x04}(" + NESTED + b"Nu.", b"\x80\x04(" + NESTED + b"Nd.",
        b"\x80\x04\x8f(" + NESTED + b"\x90.",
        b"\x80\x04(" + NESTED + b"\x91.", b"\x80\x04}ctorch.distributed.checkpoint.metadata\nMetadataIndex\n(" + NESTED + b"tRNs.",
        b"\x80\x02Nr\xff\xff\xff\x7f.",
    ],
)  # fmt: skip
def test_an_index_takes_neither_hours_nor_all_memory(tmp_path, index):
    with pytest.raises(CheckpointError, match="cannot be read as the index"):
        read_index(written(tmp_path, index))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 * 2**20  # KiB


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
        load_tensor(buffer, (2,), torch.float32)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("data", [b"\x80\x02}" + NESTED + b"Ns.", b"\x80\x02" + b"N0" * 4096 + b"N."])
def test_a_stored_tensor_takes_no_hours(tmp_path, data):
    buffer, changed = io.BytesIO(), io.BytesIO()
    torch.save(torch.ones(2), buffer)
    with zipfile.ZipFile(buffer) as archive, zipfile.ZipFile(changed, "w") as copy:
        for part in archive.infolist():
            copy.writestr(part.filename, data if part.filename.endswith(".pkl") else archive.read(part))
    assert load_tensor(buffer, (2,), torch.float32).tolist() == [1.0, 1.0]
    with pytest.raises(CheckpointError, match="a stored tensor cannot be read: its pickle"):
        load_tensor(changed, (2,), torch.float32)


def test_what_an_engine_keeps_beside_a_weight_is_read_if_this_megatron_can():
    """Since 0.19 pickled tensors name a function of Megatron's."""
    megatron_patches.activate()
    from megatron.core import safe_globals

    written = pickle.dumps({"scale": torch.ones(2)}, protocol=3)
    of_torch, of_megatron = b"ctorch.storage\n_load_from_bytes\n", b"cmegatron.core.safe_globals\nsafe_load_from_bytes\n"
    assert (of_torch in written) != (of_megatron in written)
    is_new = hasattr(safe_globals, "safe_load_from_bytes")
    for name, can_read in ((of_torch, True), (of_megatron, is_new)):
        state = written.replace(of_megatron if is_new else of_torch, name)
        with nullcontext() if can_read else pytest.raises(CheckpointError, match="safe_load_from_bytes, which is no data"):
            check_extra_state("linear._extra_state", torch.frombuffer(bytearray(state), dtype=torch.uint8))


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
