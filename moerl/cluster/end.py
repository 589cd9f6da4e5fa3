"""`moerl end`: ask a run to save its last step and end, and wait for it. Pods call it before they are taken away.

The driver is the process that holds the run directory's lock. A pod without it asks Ray to look on the head node.
"""

import os
import select
import signal
import socket
from pathlib import Path

import psutil

_CONNECT_SECONDS = 5.0


def end_run(run_dir: Path, seconds: float) -> str:
    """Outcome, for people. SIGTERM to the run's driver on this machine, which has `seconds` to end."""
    driver = driver_of(run_dir)
    if driver is None:
        return f"nothing trains {run_dir} on {socket.gethostname()}"
    descriptor = os.pidfd_open(driver.pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        # Readable once it has ended, whether or not its parent has asked how.
        ended, _, _ = select.select([descriptor], [], [], seconds)
    finally:
        os.close(descriptor)
    return f"pid {driver.pid} ended" if ended else f"pid {driver.pid} did not end within {seconds:g} s"


def end_run_at_head(run_dir: Path, seconds: float, address: str) -> str:
    """The same on the head node of the Ray cluster at `address` (HOST:PORT). Nothing is waited for if there is no Ray any more."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return f"no Ray at {address}: {error}"
    import ray

    ray.init(address, log_to_driver=False, logging_level="ERROR")
    try:
        # Ray's own name for the head's share of itself: 0.001 of it finds room beside whatever runs there.
        there = ray.remote(num_cpus=0, max_retries=0, resources={"node:__internal_head__": 0.001})(end_run)
        return str(ray.get(there.remote(run_dir, seconds)))
    finally:
        ray.shutdown()


def driver_of(run_dir: Path) -> psutil.Process | None:
    """The process on this machine that holds the run's lock."""
    lock = str((run_dir / ".lock").resolve())
    for process in psutil.process_iter():
        try:
            if any(file.path == lock for file in process.open_files()):
                return process
        except psutil.Error:  # it has just ended, or is somebody else's
            continue
    return None
