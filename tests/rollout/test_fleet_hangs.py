"""A real server that is frozen in a generation: its stacks are written down before it is ended, and it comes back."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from tiny_servers import MAX_RUNNING, collector, hf_engine, push

from moerl.hangs.hang_reports import HangReports
from moerl.hangs.watched import ProcessId, WatchedProcess
from moerl.rollout.fleet.rollout_pool import RolloutPool
from moerl.types.completion import SamplingParams
from moerl.types.errors import EngineError

pytestmark = pytest.mark.usefixtures("forked")

SAMPLING = SamplingParams(max_tokens=200, seed=3)


def pool_of(engine, run_dir, **options):
    return RolloutPool([engine], max_running=MAX_RUNNING, max_queued=2, collector=collector(), hangs=HangReports(run_dir), **options)


async def is_late(engine, run_dir):
    """With a completion, because it is paused; what the pool says."""
    hasty = pool_of(engine, run_dir, request_seconds=1)
    hasty.fleet.served(hasty.fleet.members)
    await hasty.pause("keep")
    with pytest.raises(EngineError) as caught:
        await hasty.generate((1, 2, 3), SAMPLING, "late")
    await hasty.resume()
    return caught.value


async def is_frozen(pool, engine, tensors):
    """In a generation; the completion, which the next server brings."""
    held = asyncio.create_task(pool.generate((1, 2, 3), SAMPLING, "held"))
    while (await engine.health()).num_running == 0:
        pass
    os.kill(engine._process.pid, signal.SIGSTOP)
    await pool.fleet.until_stale()
    await push(engine, tensors, 1)
    pool.fleet.served(pool.fleet.members)
    return (await held).completion


@pytest.fixture(scope="module")
def struck(checkpoints, tmp_path_factory):
    """One server, late and then frozen: its first name, what was said, the completion, and the directories of both reports."""
    root = tmp_path_factory.mktemp("hangs")
    engine = hf_engine(checkpoints["dense"].directory, root / "log", "--load", "checkpoint")
    pool = pool_of(engine, root / "frozen", request_seconds=120, max_restarts=1, probe_seconds=1)

    async def scenario():
        try:
            await pool.start()
            pool.fleet.served(pool.fleet.members)
            name, late = engine.name, await is_late(engine, root / "late")
            return name, late, await is_frozen(pool, engine, checkpoints["dense"].tensors), root
        finally:
            await pool.close()

    return asyncio.run(scenario())


def test_a_server_that_is_late_with_a_completion_is_named_with_its_stacks(struck):
    name, late, _, root = struck
    first, second, *_ = str(late).splitlines()
    assert first.startswith(f"{name}: late took longer than deadlines.completion_seconds = 1;")
    assert second == f"rollout: server {name} did not arrive within 1 s (deadlines.completion_seconds)"
    (report,) = (root / "late").glob("hangs/*-rollout/report.txt")
    server, driver = report.read_text().split("\n== ")[1:3]
    assert server.startswith(f"server {name} on node")
    assert "moerl/rollout/engines/hf/hf_core.py" in server
    assert driver.startswith("driver on node")


def test_a_server_frozen_in_a_generation_is_named_with_its_stacks_and_replaced(struck):
    name, _, completion, root = struck
    assert completion.num_tokens == 200
    (report,) = (root / "frozen").glob("hangs/*-rollout/report.txt")
    text = report.read_text()
    assert text.startswith(
        f"rollout: server {name} did not arrive within 3 probes of 1 s (deadlines.probe_seconds)\n* server {name} on node"
    )
    assert "its process is stopped" in text.splitlines()[1]
    assert "stacks: py-spy" in text
    assert "moerl/rollout/engines/hf/hf_core.py" in text
    assert "serving on port" in text, "the end of its log"


def test_a_stopped_process_below_a_server_is_the_one_that_is_named(tmp_path):
    """As an engine's own, for which the server waits, and answers probes."""
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        child = int(server.stdout.readline())
        os.kill(child, signal.SIGSTOP)
        watched = WatchedProcess(name="server a", node="n", process=ProcessId.of(server.pid))
        error = asyncio.run(HangReports(tmp_path).report("push", "1 s", watched=[watched], silent=["server a"]))
        os.kill(child, signal.SIGKILL)
    assert f"\n* server a on node n, process {child} below it (sleep 60): its process is stopped" in str(error)
