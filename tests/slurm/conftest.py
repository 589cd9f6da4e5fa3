"""One Slurm of two nodes for all tests of this folder. Lets them import `two_nodes`."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import moerl

sys.path.insert(0, str(Path(__file__).parent))

from jobs import Jobs
from two_nodes import TwoNodes, why_not_here

# The jobs' programs find the package that is tested here, installed or not.
os.environ["PYTHONPATH"] = str(Path(moerl.__file__).parent.parent)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    if reason := why_not_here():
        pytest.fail(f"no Slurm can be started here: {reason}")
    two_nodes = TwoNodes(tmp_path_factory.mktemp("slurm"))
    yield two_nodes
    two_nodes.close()


@pytest.fixture
def jobs(cluster: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    """Whatever a test did, the next one finds idle nodes without a process of this one's."""
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as node_disk:  # short, for Ray's sockets
        monkeypatch.setenv("TMPDIR", node_disk)
        submitted = Jobs(cluster, tmp_path, Path(node_disk))
        yield submitted
        submitted.assert_nothing_is_left()
