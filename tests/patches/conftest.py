"""Makes patch_jobs, and the engine_* modules of tests/train, importable; writes the tiny checkpoints once."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "train")]

import pytest
from engine_cases import write_checkpoints


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Directories of tiny checkpoints, by name."""
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))
