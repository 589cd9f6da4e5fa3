"""A checkpoint is read once when it is loaded, by all ranks together, and its digests are made of those same bytes."""

import os
import shutil

import pytest
import torch
from checkpoint_jobs import save_once
from engine_cases import LAYOUTS, random_batch, settings
from engine_ranks import run_ranks
from reading_jobs import damaged_files, peak_of_load, reads_of

from moerl.config.schema.layout import Layout
from moerl.config.schema.model_config import ScratchModel
from moerl.scratch_model import write_scratch_model
from moerl.train.checkpoint.checkpoint_dirs import HEAD, digest_files

NAMED = {**LAYOUTS, "tp2-pp2": Layout(ranks=4, tp=2, pp=2)}


@pytest.fixture(scope="module")
def saved(checkpoints, tmp_path_factory):
    """What the ranks of a layout saved, once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            run_ranks(save_once, NAMED[name].ranks, settings(checkpoints["qwen3_moe"], NAMED[name]), random_batch(), made[name])
        return made[name]

    return get


@pytest.mark.parametrize(
    ("before", "after", "weights_only"),
    [("dp2", "dp2", False), ("tp2-pp2", "ep4", False), ("dp2", "tp2", True)],
    ids=["replicas", "another layout", "weights alone"],
)
def test_every_byte_is_read_once_by_all_ranks_together(before, after, weights_only, checkpoints, saved):
    directory, layout = saved(before), NAMED[after]
    counts, opened = run_ranks(reads_of, layout.ranks, settings(checkpoints["qwen3_moe"], layout), directory, weights_only)
    assert opened == dict.fromkeys((path.name for path in directory.iterdir()), 1)
    stored = sum(path.stat().st_size for path in directory.iterdir())
    assert stored <= sum(counts) <= 1.05 * stored
    assert min(counts) > stored / len(counts) / 3  # all take part


def flip(path, at):
    contents = bytearray(path.read_bytes())
    contents[at] ^= 1
    path.write_bytes(contents)


@pytest.mark.parametrize("at", ["in a tensor", "in what says that it is one", "at the end"])
def test_all_ranks_know_of_damage_that_any_of_them_reads_and_go_no_further(at, checkpoints, saved, tmp_path):
    directory = tmp_path / "damaged"
    shutil.copytree(saved("tp2-pp2"), directory)
    names = [*HEAD, *sorted(path.name for path in directory.glob("*.distcp"))]
    files = digest_files(directory, names)
    for rank in (1, 3):
        shard = directory / f"__{rank}_0.distcp"
        flip(shard, {"in a tensor": shard.stat().st_size // 2, "in what says that it is one": 1, "at the end": -1}[at])
    found = run_ranks(damaged_files, 4, settings(checkpoints["qwen3_moe"], NAMED["tp2-pp2"]), directory, files)
    assert found == [(["__1_0.distcp", "__3_0.distcp"], True)] * 4


def test_without_a_whole_index_the_shards_are_still_compared(checkpoints, saved, tmp_path):
    directory = tmp_path / "damaged"
    shutil.copytree(saved("dp2"), directory)
    files = digest_files(directory, [*HEAD, *sorted(path.name for path in directory.glob("*.distcp"))])
    flip(directory / ".metadata", 100)
    flip(directory / "__1_0.distcp", 100)
    found = run_ranks(damaged_files, 2, settings(checkpoints["qwen3_moe"], NAMED["dp2"]), directory, files)
    assert found == [([".metadata", "__1_0.distcp"], True)] * 2


def test_a_file_that_lacks_its_end_while_it_is_read_is_damaged(checkpoints, saved, tmp_path):
    directory = tmp_path / "damaged"
    shutil.copytree(saved("dp2"), directory)
    files = digest_files(directory, [*HEAD, *sorted(path.name for path in directory.glob("*.distcp"))])
    os.truncate(directory / "__0_0.distcp", files["__0_0.distcp"][0] // 3)
    found = run_ranks(damaged_files, 2, settings(checkpoints["qwen3_moe"], NAMED["dp2"]), directory, files)
    assert [names for names, _ in found] == [["__0_0.distcp"]] * 2


def test_no_more_than_an_item_of_a_file_is_held_twice(tmp_path):
    """Of a file of 100 MB the largest item is the 50th part."""
    scratch = ScratchModel(family="qwen3_moe", hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=512, num_experts=8)
    write_scratch_model(scratch, 2048, tmp_path / "model", seed=0)
    (tmp_path / "saved").mkdir()
    chosen = settings(tmp_path / "model", Layout())
    run_ranks(save_once, 1, chosen, random_batch(), tmp_path / "saved")
    grown, file_bytes = run_ranks(peak_of_load, 1, chosen, tmp_path / "saved")
    largest = 2048 * 256 * torch.float32.itemsize
    assert file_bytes > 70 * 2**20
    assert grown < 2 * largest + 8 * 2**20
