"""End Ray's agents with a killed driver.

Ray's daemons end with the driver that started them, and in order: a raylet first ends what its workers started. Its agents notice only
after a minute that it is gone. The reaper is a process of its own that reads a pipe from the driver: at its end, which also kill -9
brings, it waits for the daemons and then kills the agents.
"""

import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

import psutil

from moerl.cluster.descendants import started_at

DAEMON_SECONDS = 20.0


@contextmanager
def reaping_ray(others: Collection[int]) -> Iterator[None]:
    """Context after ray.init: no process of a cluster that this process started outlives it by long. `others`: children that this
    process had before."""
    daemons = [child for child in psutil.Process().children() if child.pid not in others]
    agents = [child for daemon in daemons for child in daemon.children() if "agent" in " ".join(child.cmdline()).lower()]
    listed = [",".join(f"{p.pid}:{started_at(p.pid)}" for p in group) for group in (daemons, agents)]
    # A session of its own: Ctrl-C in the terminal must not end it before the driver.
    reaper = subprocess.Popen(
        [sys.executable, "-m", "moerl.cluster.ray_agents_reaper", *listed], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        reaper.communicate()


def reap(daemons: str, agents: str) -> None:
    """Both as PID:START,...; a pid that names another process by now is left alone."""
    psutil.wait_procs(list(_still_there(daemons)), timeout=DAEMON_SECONDS)
    for process in _still_there(agents):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _still_there(listed: str) -> Iterator[psutil.Process]:
    for item in filter(None, listed.split(",")):
        pid, started = item.split(":")
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(pid))
            if started_at(process.pid) == float(started):
                yield process


if __name__ == "__main__":
    sys.stdin.buffer.read()
    reap(*sys.argv[1:])
