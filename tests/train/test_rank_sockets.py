"""What all ranks of a run do together: no socket from each to each, and no collective of all in a step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_cases import random_batch, settings
from engine_ranks import run_ranks
from socket_jobs import collectives_of_all

from moerl.config.schema.layout import Layout

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MEASURE = "import json, rank_sockets; print(json.dumps([rank_sockets.measured(16, lazy=lazy) for lazy in (False, True)]))"


def test_ranks_connect_to_those_they_exchange_with_and_not_to_all():
    environment = os.environ | {"PYTHONPATH": f"{BENCHMARKS}{os.pathsep}{BENCHMARKS.parent}"}
    done = subprocess.run([sys.executable, "-c", MEASURE], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    mesh, needed = json.loads(done.stdout.splitlines()[-1])
    assert min(row["joined"] for row in mesh) >= 15
    assert max(row["joined"] for row in needed) <= 4
    assert max(row["in a run"] for row in needed) <= 2 * 4 + 2  # 4 is the logarithm of 16
    assert max(row["after a checkpoint"] for row in needed[1:]) <= 2 * 4 + 3


@pytest.mark.parametrize("layout", [Layout(ranks=4, tp=2, ep=2), Layout(ranks=4, pp=2, cp=2)], ids=["tp2-ep2-dp2", "pp2-cp2"])
def test_a_step_has_no_collective_of_all_ranks(layout, checkpoints):
    found = run_ranks(collectives_of_all, layout.ranks, settings(checkpoints["qwen3_moe"], layout), random_batch())
    assert found.pop("start") <= 6  # groups of the optimizer; who owns which tensor
    # Objects are gathered by two: their sizes, then they.
    assert found == {"logprobs": 0, "update": 0, "push": 0, "checkpoint": 2, "next checkpoint": 0}
