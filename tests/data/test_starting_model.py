"""The model that a run starts from, read in a process of its own."""

import resource

import pytest

from moerl.config.load import load
from moerl.starting_model import load_model
from moerl.types.errors import MoerlError


def test_a_model_for_which_there_is_no_room_is_told_as_a_disk_and_not_as_a_traceback(tmp_path, capfd):
    """safetensors tells of it by a class of its own."""
    config = load(["recipe=grpo-tiny-moe-1n2g-sync", f"output_dir={tmp_path}"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, before[1]))
    try:
        with pytest.raises(MoerlError, match=r"(?s)File too large.*why: the disk has no room.*fix: make room"):
            load_model(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "Traceback" not in capfd.readouterr().err
    assert not (config.run_dir / "model").exists()
