"""`python -m moerl.slurm.ray_start SECONDS ...`: `ray start ...`, on a node that may take so long to come up.

Ray itself waits 30 s, and its raylet, which nothing can tell to wait longer, as long for its agents. Those import for many seconds, on all
nodes of a job at once and from the same storage.
"""

import sys
import time

from moerl.cluster.forks.ray_workers import own_ray


def main() -> None:
    deadline = time.monotonic() + float(sys.argv.pop(1))
    from ray.scripts.scripts import main as ray

    sys.argv.insert(1, "start")
    with own_ray(deadline):
        ray()


if __name__ == "__main__":
    main()
