"""Real servers killed or frozen in a run that goes on: the same bits as without, and every step once."""

import os
import signal

import pytest
from whole_runs import DIGIT, SMALL, SYNC, rows

from moerl import run
from moerl.check import load_checked
from moerl.rollout.pool import RolloutPool
from moerl.train.group import MegatronTrainGroup
from moerl.types import EngineError

OVERRIDES = ("num_steps=4", "save_every=0", "rollout.probe_seconds=2", "weights.bucket_bytes=100000", DIGIT)
"""A push of half a megabyte has several buckets."""


@pytest.fixture
def strike(monkeypatch):
    """strike(when, signal): server 0 gets the signal once, at that place of the second step."""
    pools = []
    start = RolloutPool.start

    async def noted(pool):
        pools.append(pool)
        await start(pool)

    monkeypatch.setattr(RolloutPool, "start", noted)

    def prepare(when, number):
        calls = []

        def hit(at):
            calls.append(at)
            if len(calls) == at:
                os.kill(pools[0].fleet.members[0].engine.pid, number)

        def before(owner, name, at):
            upstream = getattr(owner, name)

            async def struck(*args, **kwargs):
                hit(at)
                return await upstream(*args, **kwargs)

            monkeypatch.setattr(owner, name, struck)

        def in_second_bucket(upstream):
            async def struck(group, bucket):
                if bucket.index == 1:
                    hit(3)  # after the first push and that of the first step
                return await upstream(group, bucket)

            monkeypatch.setattr(MegatronTrainGroup, "transmit", struck)

        if when == "generation":
            before(RolloutPool, "_generate", 20)  # of 16 requests a step
        elif when == "idle":
            before(MegatronTrainGroup, "update", 2)
        else:
            in_second_bucket(MegatronTrainGroup.transmit)
        return pools

    return prepare


def train(output_dir, *overrides):
    run.train(load_checked([f"recipe={SYNC}", *SMALL, *OVERRIDES, f"output_dir={output_dir}", *overrides]))
    return rows(output_dir, SYNC)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return train(tmp_path_factory.mktemp("undisturbed"))


def without_restarts(rows):
    return [{name: value for name, value in row.items() if name != "fleet/restarts"} for row in rows]


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("when", "number", "num_servers", "transport"),
    [
        ("generation", signal.SIGKILL, 1, "shm"),
        pytest.param("generation", signal.SIGKILL, 2, "shm", marks=slow),
        pytest.param("generation", signal.SIGSTOP, 2, "shm", marks=slow),
        pytest.param("idle", signal.SIGKILL, 1, "shm", marks=slow),
        pytest.param("idle", signal.SIGKILL, 2, "gloo", marks=slow),
        pytest.param("push", signal.SIGKILL, 2, "shm", marks=slow),
        ("push", signal.SIGKILL, 2, "gloo"),
        pytest.param("push", signal.SIGKILL, 1, "gloo", marks=slow),
    ],
)
def test_a_lost_server_comes_back_and_changes_no_bit(undisturbed, tmp_path, strike, when, number, num_servers, transport):
    pools = strike(when, number)
    found = train(tmp_path, f"rollout.num_servers={num_servers}", f"weights.transport={transport}")
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert without_restarts(found) == without_restarts(undisturbed)
    assert (found[-1]["fleet/restarts"], undisturbed[-1]["fleet/restarts"]) == (1.0, 0.0)
    assert pools[0].fleet.members[0].num_starts == 2


@slow
def test_without_restarts_the_run_ends_with_what_the_server_said(tmp_path, strike):
    strike("generation", signal.SIGKILL)
    with pytest.raises(Exception, match="no rollout server is left") as caught:
        train(tmp_path, "rollout.max_restarts=0")
    assert "ended by signal 9 (Killed)" in str(caught.value)
    assert isinstance(caught.value.__cause__, EngineError)
