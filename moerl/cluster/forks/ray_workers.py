"""Ray's workers as forks: the raylet executes this file instead of Ray's own, and it hands the worker's command line to the fork server.

The worker tells the raylet its own pid when it registers, and ends when the raylet does, which it finds in its environment. This process
is then needed no more. Where no server answers it becomes the worker itself.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from moerl.cluster.forks.fork_client import CannotForkError, ForkedProcess
from moerl.cluster.forks.fork_server import VARIABLE

_ASK_SECONDS = 0.1
_GCS_WAIT = "RAY_gcs_server_port_wait_time_s"


@contextmanager
def own_ray(deadline: float) -> Iterator[None]:
    """Context in which a Ray that this process starts has what a run on one host needs, and its workers forked if there is a fork server.

    It has no autoscaler, and no process that reads workers' logs for a driver that prints none of them. Its node may take until `deadline`,
    of the monotonic clock, to come up: Ray itself waits 30 s, which are few on a busy machine.
    """
    # Ray's own file for the purpose, and the only way to give another: ray.init takes none. The same holds for the time it waits.
    from ray._private import services
    from ray._private.parameter import RayParams

    upstream, get_node = RayParams.__init__, services.get_node

    def get_node_in_time(*args: Any) -> Any:
        while True:
            try:
                return get_node(*args)
            except RuntimeError:  # it has not registered
                if time.monotonic() > deadline or not _raylet_runs():
                    raise
                time.sleep(_ASK_SECONDS)

    def with_less(self: Any, *args: Any, **kwargs: Any) -> None:
        upstream(self, *args, **kwargs)
        self.no_monitor, self.include_log_monitor = True, False
        if os.environ.get(VARIABLE):
            self.worker_path = __file__

    RayParams.__init__, services.get_node = with_less, get_node_in_time
    os.environ.setdefault(_GCS_WAIT, str(max(int(deadline - time.monotonic()), 1)))
    try:
        yield
    finally:
        RayParams.__init__, services.get_node = upstream, get_node


def _raylet_runs() -> bool:
    import psutil  # not by what executes this file

    return any(child.name() == "raylet" and child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process().children())


def main() -> None:
    try:
        ForkedProcess([sys.executable, "-m", "moerl.cluster.forks.ray_worker", *sys.argv[1:]], stdin=0, stdout=1, stderr=2, is_worker=True)
    except CannotForkError:
        os.execv(sys.executable, [sys.executable, default_worker(), *sys.argv[1:]])


def default_worker() -> str:
    """Ray's own file. Found without importing Ray."""
    spec = find_spec("ray")
    assert spec is not None and spec.origin is not None
    return os.path.join(os.path.dirname(spec.origin), "_private", "workers", "default_worker.py")


if __name__ == "__main__":
    main()
