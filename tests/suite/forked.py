"""Plugin of pytest: the fork server and the Ray that tests of one process share, so that a rank or a server costs a fork, not imports.

Both are the product's own. Runs that tests start as a user does, by their command line, have neither: they start their own.
"""

import os
import time
from collections.abc import Iterator

import psutil
import pytest

from moerl.cluster.forks.fork_server import VARIABLE, executed_servers
from moerl.cluster.forks.ray_workers import own_ray

IMPORT_SECONDS = 60.0


@pytest.fixture(scope="session")
def fork_server() -> Iterator[str]:
    """What VARIABLE is to say. Both servers are there, so that a test which looks for processes that stayed does not find the second."""
    before = len(psutil.Process().children(recursive=True))
    with executed_servers() as name:
        # The process that owns them, the first, and its fork for Ray's workers when the first has imported. Without forks there is none.
        deadline = time.monotonic() + IMPORT_SECONDS
        while len(psutil.Process().children(recursive=True)) < before + 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        yield name


@pytest.fixture(scope="session")
def ray_of_session(fork_server: str) -> Iterator[str]:
    """The address of a Ray on one core, fewer than ranks, as on a laptop: nobody has connected to it."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, fork_server)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        with own_ray(time.monotonic() + IMPORT_SECONDS):
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def forked(fork_server: str) -> Iterator[None]:
    """Servers that this module's runs start, and Ray's workers, are forks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, fork_server)
        yield


@pytest.fixture(scope="module")
def shared_ray(forked: None, ray_of_session: str) -> Iterator[None]:
    """Runs of this module use it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", ray_of_session)
        yield


@pytest.fixture(scope="module")
def connected(shared_ray: None) -> Iterator[None]:
    """This process has joined it."""
    import ray

    ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
