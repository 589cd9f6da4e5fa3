"""Damaged and incomplete checkpoints name the file and the tensor."""

import json

import pytest
import torch
from safetensors.torch import save_file

from moerl.models.fp8_blocks import dequantized, quantized
from moerl.models.hf_checkpoint import INDEX, HFCheckpoint, write_shards
from moerl.types.errors import CheckpointError

TENSORS = {f"layer.{i}.weight": torch.arange(40, dtype=torch.float32).reshape(4, 10) + i for i in range(5)}


@pytest.fixture
def sharded(tmp_path):
    """Two tensors to a file."""
    write_shards(TENSORS.items(), tmp_path, shard_bytes=400)
    return tmp_path


def test_shards_hold_every_tensor_and_keep_to_their_size(sharded):
    files = sorted(sharded.glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-{i:05d}.safetensors" for i in range(3)]
    with HFCheckpoint(sharded) as checkpoint:
        for name, tensor in TENSORS.items():
            assert checkpoint.read(name).equal(tensor)
            assert checkpoint.shape(name) == (4, 10)


def test_a_tensor_larger_than_a_shard_has_a_file_of_its_own(tmp_path):
    write_shards(TENSORS.items(), tmp_path, shard_bytes=1)
    assert len(list(tmp_path.glob("*.safetensors"))) == len(TENSORS)
    with HFCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.read("layer.4.weight").equal(TENSORS["layer.4.weight"])


def test_views_of_one_storage_are_written_as_separate_tensors(tmp_path):
    whole = torch.arange(12.0).reshape(2, 6)
    write_shards([("left", whole[:, :3]), ("right", whole[:, 3:]), ("all", whole)], tmp_path, shard_bytes=1000)
    with HFCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.read("left").equal(whole[:, :3])
        assert checkpoint.read("right").equal(whole[:, 3:])
        assert checkpoint.read("all").equal(whole)


def test_a_missing_tensor_is_named(sharded):
    with HFCheckpoint(sharded) as checkpoint, pytest.raises(CheckpointError, match=f"{sharded}.*no_such.weight"):
        checkpoint.read("no_such.weight")


@pytest.mark.parametrize("num_bytes", [0, 4, 100, -1])
def test_a_truncated_file_is_named_with_the_tensor(num_bytes, sharded):
    file = sharded / "model-00001.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with HFCheckpoint(sharded) as checkpoint:
        assert checkpoint.read("layer.0.weight").equal(TENSORS["layer.0.weight"])
        for read in (checkpoint.read, checkpoint.shape):
            with pytest.raises(CheckpointError, match=f"{file}: cannot read layer.2.weight"):
                read("layer.2.weight")


def test_a_file_that_is_gone_is_named_with_the_tensor(sharded):
    (sharded / "model-00002.safetensors").unlink()
    with HFCheckpoint(sharded) as checkpoint, pytest.raises(CheckpointError, match=r"model-00002.safetensors: cannot read layer.4.weight"):
        checkpoint.read("layer.4.weight")


def test_a_file_without_the_tensor_that_the_index_promises_is_named(sharded):
    file = sharded / "model-00000.safetensors"
    save_file({"layer.0.weight": TENSORS["layer.0.weight"]}, file)
    with HFCheckpoint(sharded) as checkpoint, pytest.raises(CheckpointError, match=f"{file}: cannot read layer.1.weight"):
        checkpoint.read("layer.1.weight")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"metadata": {}}', '{"weight_map": ["layer.0.weight"]}'])
def test_a_damaged_index_is_named(content, sharded):
    (sharded / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=f"{sharded / INDEX}"):
        HFCheckpoint(sharded)


def test_a_damaged_or_missing_single_file_is_named(tmp_path):
    file = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=f"{file}"):
        HFCheckpoint(tmp_path)
    file.write_bytes(b"not a header at all")
    with pytest.raises(CheckpointError, match=f"{file}"):
        HFCheckpoint(tmp_path)


def test_the_index_lists_every_tensor_and_their_size(sharded):
    index = json.loads((sharded / INDEX).read_text())
    assert index["metadata"]["total_size"] == 5 * 160
    assert index["weight_map"].keys() == TENSORS.keys()


@pytest.fixture
def blocks(tmp_path):
    """A matrix in blocks of FP8, one row and two columns of which are incomplete, and its values by a product with every scale."""
    values, scales = quantized(torch.randn(300, 500, generator=torch.Generator().manual_seed(0)), "float32")
    rows, columns = (scales.repeat_interleave(128, dim=0)[:300].repeat_interleave(128, dim=1)[:, :500]), values.float()
    save_file({"x.weight": values, "x.weight_scale_inv": scales, "plain": torch.zeros(2)}, tmp_path / "model.safetensors")
    return tmp_path, rows * columns


@pytest.mark.parametrize(
    ("where", "dim"), [(slice(None), 0), (slice(0, 128), 0), (slice(100, 260), 0), (slice(290, 300), 0), (slice(130, 450), 1)]
)
def test_any_range_of_a_matrix_in_fp8_is_that_of_the_whole(where, dim, blocks):
    directory, whole = blocks
    with HFCheckpoint(directory) as checkpoint:
        assert sorted(checkpoint.names()) == ["plain", "x.weight"]
        assert checkpoint.shape("x.weight") == (300, 500) and checkpoint.is_fp8("x.weight") and not checkpoint.is_fp8("plain")
        assert checkpoint.read("x.weight", where, dim).equal(whole[where] if dim == 0 else whole[:, where])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_scales_in_another_dtype_are_the_numbers_they_are(dtype, tmp_path):
    """Qwen3's are in bfloat16."""
    values, scales = quantized(torch.randn(300, 500, generator=torch.Generator().manual_seed(0)), "ue8m0")
    save_file({"x.weight": values, "x.weight_scale_inv": scales.to(dtype)}, tmp_path / "model.safetensors")
    with HFCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.read("x.weight").equal(torch.cat(list(dequantized(values, scales, torch.float32))))


@pytest.mark.parametrize("scales", [None, torch.zeros(2, 4), torch.zeros(3, 4, dtype=torch.int32)])
def test_fp8_without_scales_of_its_shape_is_refused(scales, tmp_path):
    held = {"x.weight": torch.zeros(300, 500).to(torch.float8_e4m3fn)} | ({} if scales is None else {"x.weight_scale_inv": scales})
    save_file(held, tmp_path / "model.safetensors")
    with HFCheckpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match="x.weight_scale_inv"):
        checkpoint.read("x.weight")
