"""Ray of one host runs without its dashboard, and with stand-ins for its agents, of which one becomes the agent when it is asked."""

import os
import subprocess
import sys

import psutil

from moerl.cluster.forks import ray_agent

SCRIPT = """
import psutil, ray, sys
from moerl.cluster.forks.local_ray import local_ray

def names():
    return [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]

def modules(title):
    (agent,) = [child for child in psutil.Process().children(recursive=True) if title in " ".join(child.cmdline()[:3])]
    return any("_raylet" in found.path for found in agent.memory_maps())

class Reader:
    def read(self):
        import os
        return os.environ.get("OF_A_TEST")

with local_ray(120.0) as daemons:
    actor = ray.remote(num_cpus=0)(Reader)
    print([daemon.name for daemon in daemons])
    print(ray.get(actor.remote().read.remote()), any("/dashboard/dashboard.py " in name for name in names()))
    print(modules("ray::DashboardAgent"), modules("ray::RuntimeEnvAgent"))
    print(ray.get(actor.options(runtime_env={"env_vars": {"OF_A_TEST": "7"}}).remote().read.remote(), timeout=90))
    print(modules("ray::DashboardAgent"), modules("ray::RuntimeEnvAgent"), [node["Alive"] for node in ray.nodes()], flush=True)
    sys.stdin.read()
"""
EXPECTED = """['gcs_server', 'raylet', 'dashboard agent', 'agent for runtime environments']
None False
False False
7
False True [True]
"""


def test_agents_stand_in_until_a_task_brings_an_environment_and_all_end_with_a_killed_driver():
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as driver:
        said = "".join(driver.stdout.readline() for _ in EXPECTED.splitlines())
        family = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
    assert said == EXPECTED
    assert len(family) >= 4, "two daemons and their agents"
    assert psutil.wait_procs(family, timeout=20)[1] == []


def test_an_agent_ends_whose_raylet_was_killed_before_it_began(tmp_path):
    """Its parent is another process then, of whose end nobody would tell it either."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    command = [sys.executable, ray_agent.__file__, sys.executable, "agent.py", f"--session-dir={tmp_path}", "--node-id=1"]
    subprocess.run(command, env={**os.environ, "RAY_RAYLET_PID": str(gone.pid)}, timeout=60, check=True)
