"""Ray's workers as forks: the raylet executes this file instead of Ray's own, and it hands the worker's command line to the fork server.

The worker tells the raylet its own pid when it registers, and ends when the raylet does, which it finds in its environment. This process
is then needed no more. Where no server answers it becomes the worker itself.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from moerl.cluster.forks.fork_client import CannotForkError, ForkedProcess
from moerl.cluster.forks.fork_server import VARIABLE


@contextmanager
def own_ray() -> Iterator[None]:
    """Context in which a Ray that this process starts has what a run on one host needs, and its workers forked if there is a fork server.

    It has no autoscaler, and no process that reads workers' logs for a driver that prints none of them.
    """
    # Ray's own file for the purpose, and the only way to give another: ray.init takes none.
    from ray._private.parameter import RayParams

    upstream = RayParams.__init__

    def with_less(self: Any, *args: Any, **kwargs: Any) -> None:
        upstream(self, *args, **kwargs)
        self.no_monitor, self.include_log_monitor = True, False
        if os.environ.get(VARIABLE):
            self.worker_path = __file__

    RayParams.__init__ = with_less
    try:
        yield
    finally:
        RayParams.__init__ = upstream


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
