"""A run whose server has the trainer's GPU in turn with it: the same bits as with a GPU of its own, also after a loss."""

import re
import signal

import pytest
from whole_runs import DIGIT, SMALL, SYNC, rows

from moerl import run
from moerl.check import load_checked

pytestmark = pytest.mark.usefixtures("shared_ray")

OVERRIDES = ("num_steps=3", "save_every=2", "weights.canary_every=0", DIGIT)
SHARED = ("placement.mode=colocated", "train.offload=all")
PUSH, CANARY, STEP = ["sharing", "serving"], ["sharing", "serving"], ["training", "sharing", "serving"]


def train(output_dir, *overrides):
    run.train(load_checked([f"recipe={SYNC}", *SMALL, *OVERRIDES, f"output_dir={output_dir}", *overrides]))
    log = (output_dir / SYNC / "run.log").read_text()
    return rows(output_dir, SYNC), re.findall(r"moerl\.residency: \w+ -> (\w+)", log)


@pytest.fixture(scope="module")
def separate(tmp_path_factory):
    return train(tmp_path_factory.mktemp("separate"))


def test_on_a_shared_gpu_a_run_has_the_same_bits_though_its_server_is_killed_while_the_trainer_has_it(separate, tmp_path, strike):
    struck = strike("idle", signal.SIGKILL)
    found, states = train(tmp_path, *SHARED)
    assert states == PUSH + CANARY + STEP + STEP + (PUSH + CANARY) + STEP
    assert struck.pools[0].fleet.members[0].num_starts == 2
    expected = [{name: value for name, value in row.items() if name != "fleet/restarts"} for row in separate[0]]
    assert [{name: value for name, value in row.items() if name != "fleet/restarts"} for row in found] == expected
    assert separate[1] == PUSH + CANARY + STEP * 3
