"""Ray of one host runs without its dashboard, and with stand-ins for its agents, of which one becomes the agent when it is asked."""

import os
import subprocess
import sys

from moerl.cluster.forks import ray_agent

SCRIPT = """
import psutil, ray
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
    print(modules("ray::DashboardAgent"), modules("ray::RuntimeEnvAgent"), [node["Alive"] for node in ray.nodes()])
"""
EXPECTED = """['gcs_server', 'raylet', 'dashboard agent', 'agent for runtime environments']
None False
False False
7
False True [True]
"""


def test_agents_stand_in_until_a_task_brings_an_environment():
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=240)
    assert done.stdout == EXPECTED, done.stderr


def test_an_agent_ends_whose_raylet_was_killed_before_it_began(tmp_path):
    """Its parent is another process then, of whose end nobody would tell it either."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    command = [sys.executable, ray_agent.__file__, sys.executable, "agent.py", f"--session-dir={tmp_path}", "--node-id=1"]
    subprocess.run(command, env={**os.environ, "RAY_RAYLET_PID": str(gone.pid)}, timeout=60, check=True)
