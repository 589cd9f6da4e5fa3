"""Makes the modules here, and the cases and ranks of tests/train, importable; writes the tiny checkpoints once."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "train")]

import pytest
from engine_cases import write_checkpoints


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Directories of tiny checkpoints, by name."""
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))
