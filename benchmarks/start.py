"""A run on one host until the row of its first step: with forked processes, against the same with every process executed.

    python benchmarks/start.py --ranks 2 --rounds 5

The two take turns, as machines are noisy. Seconds to the row are the user's wait; CPU seconds are of all processes of a run of one step,
its end included, counted by tools/cpu_cost.py.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from moerl.cluster.forks.fork_server import VARIABLE

COUNTER = Path(__file__).parents[1] / "tools" / "cpu_cost.py"
SMALL = (
    "recipe=grpo-tiny-moe-1n2g-sync", "model.scratch.num_layers=2", "model.scratch.hidden_size=32", "model.scratch.num_experts=4",
    "groups_per_step=4", "group_size=4", "num_steps=1",
)  # fmt: skip
WAYS = {"executed": {VARIABLE: ""}, "forked": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, environment in WAYS.items():
            found[way].append(measure(environment, options.ranks))
    print(f"{'':10}{'to the row, s':>16}{'CPU s':>10}   medians of {options.rounds}, {options.ranks} ranks, 1 server")
    for way, pairs in found.items():
        print(f"{way:10}{middle(pairs, 0):16.1f}{middle(pairs, 1):10.1f}")
    ratios = [middle(found["forked"], column) / middle(found["executed"], column) for column in (0, 1)]
    print(f"{'ratio':10}{ratios[0]:16.2f}{ratios[1]:10.2f}")


def measure(environment: dict[str, str], num_ranks: int) -> tuple[float, float]:
    """Seconds to the row of the first step, and CPU seconds of the whole run."""
    with tempfile.TemporaryDirectory() as directory:
        train = [sys.executable, "-m", "moerl", "train", *SMALL, f"output_dir={directory}"]
        layout = [f"train.layout.ranks={num_ranks}", f"train.layout.ep={num_ranks}"]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        inherited = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "RAY_ADDRESS")}
        began, seconds = time.monotonic(), 0.0
        process = subprocess.Popen([sys.executable, str(COUNTER), "--", *train, *layout], env=inherited | environment, **pipes)
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip().startswith("1/1 "):
                seconds = time.monotonic() - began
        _, errors = process.communicate()
        counted = re.search(r"([\d.]+) CPU seconds", errors)
        if process.returncode or not seconds or not counted:
            raise SystemExit(f"the run failed:\n{errors}")
        return seconds, float(counted[1])


def middle(pairs: list[tuple[float, float]], column: int) -> float:
    return statistics.median(pair[column] for pair in pairs)


if __name__ == "__main__":
    main()
