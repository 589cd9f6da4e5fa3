"""`python -m moerl.cluster.forks.ray_worker ...`: a worker of Ray in a forked process, with what Ray does for one that it executes."""

import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path

from moerl.cluster.forks.ray_workers import default_worker
from moerl.cluster.forks.title import set_title

_OOM_VARIABLE, _OOM_SCORE = "RAY_worker_oom_score_adjustment", "1000"
"""Ray's own default: the system kills a worker before it kills Ray."""


def main() -> None:
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(os.environ.get(_OOM_VARIABLE, _OOM_SCORE))
    del sys.path[0]  # the working directory, whose ray.py is not Ray
    import ray._raylet

    # Ray's own finds nothing to write to where the environment has moved.
    ray._raylet.setproctitle = lambda title: set_title([title])
    file = default_worker()
    sys.argv[0] = file
    sys.path.insert(0, os.path.dirname(file))
    runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    main()
