"""Ray's daemons on a node: their end is noticed also where `ray start` goes on without them."""

import asyncio
import os
import tempfile
from pathlib import Path

import psutil
import pytest
from ray._common.network_utils import build_address

from moerl.slurm.allocation import AllocatedNode
from moerl.slurm.ray_daemons import RayEnded, RayNode, end_of, host_of

FACTS = AllocatedNode(name="n0", gpus=(), num_cpus=1, versions={})


def is_agent(process: psutil.Process) -> bool:
    """Under the name that it gives itself, or before it has."""
    words = process.cmdline()
    return words[0].startswith("ray::RuntimeEnvAgent") or any(word.endswith("runtime_env/agent/main.py") for word in words[:4])


async def killed_agent(ray: RayNode) -> tuple[list[psutil.Process], str]:
    """(the daemons, what is said) after Ray's agent was killed, at which its raylet ends with 0."""
    async with asyncio.timeout(90):
        others = set(psutil.Process().children(recursive=True))
        _, end = await ray.start(None)
        family = [process for process in psutil.Process().children(recursive=True) if process not in others]
        watch = asyncio.ensure_future(end)
        await asyncio.sleep(0)
        next(process for process in family if is_agent(process)).kill()
        with pytest.raises(RayEnded) as caught:
            await watch
    return family, str(caught.value)


def test_a_raylet_that_ends_with_its_killed_agent_is_noticed_and_leaves_no_daemon():
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as directory:  # short, for Ray's sockets
        log = Path(directory) / "n0.log"
        ray = RayNode(facts=FACTS, address="127.0.0.1", directory=Path(directory), token="0" * 64, log=log, seconds=90)
        family, said = asyncio.run(killed_agent(ray))
        _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, [process.cmdline() for process in alive]
    assert said.startswith("n0: Ray's daemons ended")
    assert "runtime_env_agent" in said


def test_a_process_that_is_gone_has_ended():
    asyncio.run(asyncio.wait_for(end_of(2**22 - 1), 5))


@pytest.mark.parametrize("host", ["192.0.2.2", "fd00::1"])
def test_the_head_is_known_by_its_address_without_the_brackets_of_ipv6(host: str):
    assert host_of(build_address(host, 6379)) == host


_SLOW_AGENTS = """
import time
words = open("/proc/self/cmdline").read()
if "ray_agent.py" not in words and ("dashboard/agent.py" in words or "runtime_env/agent/main.py" in words):
    time.sleep(60)
"""


def test_a_node_comes_up_though_the_agents_of_ray_import_for_longer_than_its_raylet_waits(monkeypatch, tmp_path):
    """As where all nodes of a job read the same storage."""
    (tmp_path / "sitecustomize.py").write_text(_SLOW_AGENTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as directory:
        log = Path(directory) / "n0.log"
        ray = RayNode(facts=FACTS, address="127.0.0.1", directory=Path(directory), token="0" * 64, log=log, seconds=90)
        assert "runtime_env_agent" in asyncio.run(killed_agent(ray))[1]
