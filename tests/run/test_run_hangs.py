"""Whole runs in which a process is frozen: they end, or go on, with a report that names it; nothing is left running."""

import asyncio
import os
import re
import signal

import psutil
import pytest
from whole_runs import DIGIT, SMALL, SYNC, assert_all_end, left_in_shared_memory, rows, shared_memory

from moerl import run
from moerl.check import load_checked
from moerl.train.group import MegatronTrainGroup
from moerl.types.errors import HangError

pytestmark = pytest.mark.usefixtures("shared_ray")

OVERRIDES = ("num_steps=3", "save_every=1", "deadlines.update_seconds=10", DIGIT)


def train(output_dir, *overrides):
    run.train(load_checked([f"recipe={SYNC}", *SMALL, *OVERRIDES, f"output_dir={output_dir}", *overrides]))
    return rows(output_dir, SYNC)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return train(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def freeze_rank_1(monkeypatch):
    """At the second update of the test; every process of the run at that moment."""
    before, family, calls = set(psutil.Process().children(recursive=True)), [], []
    upstream = MegatronTrainGroup.update

    async def update(group, *args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            family.extend(set(psutil.Process().children(recursive=True)) - before)
            os.kill(group.watched[1].process.pid, signal.SIGSTOP)
        return await upstream(group, *args, **kwargs)

    monkeypatch.setattr(MegatronTrainGroup, "update", update)
    return family


def reports(output_dir):
    return {path.parent.name.split("-", 2)[2]: path.read_text() for path in (output_dir / SYNC / "hangs").glob("*/report.txt")}


@pytest.mark.matrix
def test_a_run_whose_rank_hangs_goes_on_from_its_newest_checkpoint(tmp_path, freeze_rank_1, capfd):
    found = train(tmp_path, "deadlines.on_hang=restart")
    assert [row["step"] for row in found] == [1, 2, 3]
    ((phase, report),) = reports(tmp_path).items()
    assert phase == "update"
    assert report.startswith("update: rank 1 did not arrive within 10 s (deadlines.update_seconds)\n* rank 1 on node ")
    assert "restart 1 of 3 after a hang" in capfd.readouterr().out
    assert not (tmp_path / SYNC / "failure.txt").exists(), "it did not fail in the end"
    assert_all_end(freeze_rank_1)


@pytest.mark.matrix
def test_a_restart_after_a_hang_changes_no_bit(undisturbed, tmp_path, freeze_rank_1):
    assert train(tmp_path, "deadlines.on_hang=restart") == undisturbed


@pytest.mark.matrix
def test_a_run_that_was_asked_to_end_while_it_hung_is_not_started_again(tmp_path, freeze_rank_1, monkeypatch):
    upstream = MegatronTrainGroup.update

    async def update(group, *args, **kwargs):
        if group.saver._root.joinpath("step-000001").exists():  # the second one, which hangs
            asyncio.get_running_loop().call_later(1, os.kill, os.getpid(), signal.SIGUSR1)
        return await upstream(group, *args, **kwargs)

    monkeypatch.setattr(MegatronTrainGroup, "update", update)
    with pytest.raises(HangError, match="^update: rank 1 did not arrive") as caught:
        train(tmp_path, "deadlines.on_hang=restart")
    assert caught.value.exit_code == 75
    assert [row["step"] for row in rows(tmp_path, SYNC)] == [1]
    assert_all_end(freeze_rank_1)


@pytest.mark.matrix
@pytest.mark.parametrize(("on_hang", "exit_code"), [("stop", 1), ("requeue", 75)])
def test_a_run_that_may_not_restart_ends_with_the_report_and_leaves_nothing(tmp_path, freeze_rank_1, on_hang, exit_code):
    before = shared_memory()
    with pytest.raises(HangError, match="^update: rank 1 did not arrive") as caught:
        train(tmp_path, f"deadlines.on_hang={on_hang}")
    assert caught.value.exit_code == exit_code
    assert_all_end(freeze_rank_1)
    assert left_in_shared_memory(before) == set()
    failure = (tmp_path / SYNC / "failure.txt").read_text()
    assert failure.startswith(str(caught.value))
    assert ", in update, at step 2\nlog: " in failure


@pytest.mark.matrix
@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_server_frozen_in_a_push_is_named_and_replaced_at_the_deadline_of_the_push(undisturbed, tmp_path, strike, transport):
    """Long before its probes would tell."""
    struck = strike("push", signal.SIGSTOP)
    options = ("rollout.num_servers=2", f"weights.transport={transport}", "deadlines.push_seconds=5", "weights.bucket_bytes=100000")
    found = train(tmp_path, *options)
    assert found[-1].pop("fleet/restarts") == 1.0
    report = reports(tmp_path)["push"]
    name = report.splitlines()[1].removeprefix("* ").split(" on node ")[0]
    late = r"push: {} did not arrive within 5 s at the transfer \(deadlines\.push_seconds\)\n"
    assert re.match(late.format(re.escape(name)), report)
    assert name.startswith("server 127.0.0.1:")
    assert "moerl/rollout/engines/hf/__main__.py" in report.split(f"== {name}")[1]
    assert [row["reward/mean"] for row in found] == [row["reward/mean"] for row in undisturbed]
    assert_all_end(struck.family)
