"""Ray's workers as forks: the raylet executes this file instead of Ray's own, and it hands the worker's command line to the fork server.

The worker tells the raylet its own pid when it registers, and ends when the raylet does, which it finds in its environment. This process
is then needed no more. Where no server answers it becomes the worker itself.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from moerl.cluster.forks.fork_client import CannotForkError, ForkedProcess
from moerl.cluster.forks.fork_server import VARIABLE

_ASK_SECONDS = 0.1
_PORT_WAIT_MS = 500
_AGENT = os.path.join(os.path.dirname(__file__), "ray_agent.py")
_GCS_WAIT = "RAY_gcs_server_port_wait_time_s"


@contextmanager
def own_ray(deadline: float) -> Iterator[None]:
    """Context in which a Ray that this process starts has what a run on one host needs, and its workers forked if there is a fork server.

    It has no autoscaler, no process that reads workers' logs for a driver that prints none of them, no head of a dashboard, and stand-ins
    for its agents (ray_agent.py). Its node may take until `deadline`, of the monotonic clock, to come up: Ray itself waits 30 s, which are
    few on a busy machine.
    """
    # Ray's own file for the purpose, and the only way to give another: ray.init takes none. The same holds for what else is replaced here.
    from ray._private import node, services
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    upstream, get_node, start_process, start_dashboard, wait_for_port = (
        RayParams.__init__, services.get_node, services.start_ray_process, Node.start_api_server, node.wait_for_persisted_port
    )  # fmt: skip

    def get_node_in_time(*args: Any) -> Any:
        while True:
            try:
                return get_node(*args)
            except RuntimeError:  # it has not registered
                if time.monotonic() > deadline or not _runs("raylet"):
                    raise
                time.sleep(_ASK_SECONDS)

    def wait_in_parts(*args: Any, timeout_ms: int) -> Any:
        until = time.monotonic() + timeout_ms / 1000
        while True:
            try:
                return wait_for_port(*args, timeout_ms=_PORT_WAIT_MS)  # in C++, where it hears no signal
            except RuntimeError:
                if not _runs("gcs_server"):
                    raise RuntimeError("gcs_server ended as it started") from None
                if time.monotonic() > until:
                    raise

    def with_less(self: Any, *args: Any, **kwargs: Any) -> None:
        upstream(self, *args, **kwargs)
        self.no_monitor, self.include_log_monitor = True, False
        if os.environ.get(VARIABLE):
            self.worker_path = __file__

    def start_with_stand_ins(command: list[str], *args: Any, **kwargs: Any) -> Any:
        return start_process(list(map(_with_stand_in, command)), *args, **kwargs)

    RayParams.__init__, services.get_node = with_less, get_node_in_time
    services.start_ray_process, Node.start_api_server = start_with_stand_ins, lambda *_, **__: None
    node.wait_for_persisted_port = wait_in_parts
    os.environ.setdefault(_GCS_WAIT, str(max(int(deadline - time.monotonic()), 1)))
    try:
        yield
    finally:
        RayParams.__init__, services.get_node = upstream, get_node
        services.start_ray_process, Node.start_api_server = start_process, start_dashboard
        node.wait_for_persisted_port = wait_for_port


def _with_stand_in(word: str) -> str:
    """An argument of the raylet; of one that is the command of an agent, that of its stand-in."""
    name, is_option, command = word.partition("_agent_command=")
    if not is_option or not name.startswith("--"):
        return word
    return f"{name}_agent_command={subprocess.list2cmdline([sys.executable, _AGENT])} {command}"


def _runs(name: str) -> bool:
    import psutil  # not by what executes this file

    return any(child.name() == name and child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process().children())


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
