"""How the doctor comes to every node: on this machine alone, by a Ray cluster's tasks, or because srun started it on each node.

Each way yields a `Launched`: the head's store, which is open before any node is asked, the nodes' names and what became of them. The
store's secret is made for this examination. Nodes get it through a pipe, as an argument of Ray's, or in a file that only this user reads.
"""

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from moerl.cluster.run_secret import RunSecret
from moerl.cluster.secret_store import SecretStore
from moerl.cluster.topology import expand
from moerl.doctor.checks.expected import Expectations
from moerl.doctor.on_each_node import PLACE, LoggedProcess, NodePlace, examine, refusal_of
from moerl.hardware.network_settings import find_interfaces
from moerl.types.errors import ConfigError, MoerlError, problem

_POLL_SECONDS = 0.1
_END_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Launched:
    store: SecretStore
    """Head's, at which it meets the nodes."""
    names: tuple[str, ...]
    """Names of the nodes, by index."""
    dead: Callable[[], Mapping[int, str]]
    """Nodes whose process ended early so far, and why."""
    hint: str = ""
    """Reason that may keep a node silent."""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """This process's place in a step that srun started with one task on each node."""

    index: int
    names: tuple[str, ...]
    step: str
    """Tells this step from every other one, also after a requeue."""


def slurm_step(environment: Mapping[str, str]) -> Slurm | None:
    """None outside of a step of several tasks. ConfigError if the step has not one task per node."""
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if "SLURM_PROCID" not in environment or "SLURM_STEP_NODELIST" not in environment or tasks == 1:
        return None
    nodes = int(environment["SLURM_STEP_NUM_NODES"])
    if tasks != nodes:
        reason = "each task would measure the others as if they were nodes"
        rule = f"must be one per node; the step has {tasks} tasks on {nodes} nodes"
        # Without --ntasks srun starts as many as the allocation was made for.
        fix = f"srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 moerl doctor"
        raise ConfigError([problem("srun --ntasks-per-node", tasks / nodes, rule, reason, fix)])
    step = "-".join(environment.get(f"SLURM_{part}", "0") for part in ("JOB_ID", "RESTART_COUNT", "STEP_ID"))
    return Slurm(index=int(environment["SLURM_PROCID"]), names=tuple(expand(environment["SLURM_STEP_NODELIST"])), step=step)


@contextmanager
def on_this_machine(expected: Expectations, seconds: float) -> Iterator[Launched]:
    """One node, this one."""
    names = (socket.gethostname(),)
    with _open_store("127.0.0.1", seconds) as store, _own_node(_place(store, 0, names, expected, seconds)) as dead:
        yield Launched(store=store, names=names, dead=dead)


@contextmanager
def on_slurm(slurm: Slurm, expected: Expectations, seconds: float) -> Iterator[Launched]:
    """The step's first task. The others find the store by a file in the run folder, which all nodes share. It listens on every address:
    by which of them the others reach this node, they find out."""
    file, hosts = _meeting_file(slurm, expected.run_dir), _own_addresses()
    with _open_store("0.0.0.0", seconds) as store:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as written:  # which others cannot read
                written.write("\n".join([str(store.port), store.secret.key, *hosts]))
            os.replace(written.name, file)
        except OSError as error:
            raise MoerlError(f"{slurm.names[0]}: the run folder cannot be written: {error}; choose another output_dir=") from error
        try:
            with _own_node(replace(_place(store, 0, slurm.names, expected, seconds), host=hosts[0])) as dead:
                yield Launched(store=store, names=slurm.names, dead=dead)
        finally:
            file.unlink(missing_ok=True)


def join_slurm(slurm: Slurm, expected: Expectations, seconds: float) -> None:
    """A task of the step that is not the first: it does what the head asks. MoerlError if it finds no head."""
    file = _meeting_file(slurm, expected.run_dir)
    last = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > last:
            raise MoerlError(f"{slurm.names[slurm.index]}: no {file} within {seconds:g} s; is the run folder shared with {slurm.names[0]}?")
        time.sleep(_POLL_SECONDS)
    port, secret, *hosts = file.read_text().splitlines()
    name = slurm.names[slurm.index]
    host = _first_reachable(name, hosts, int(port))
    place = NodePlace(
        index=slurm.index, name=name, host=host, port=int(port), secret=secret, num_nodes=len(slurm.names), expected=expected,
        seconds=seconds,
    )  # fmt: skip
    examine(place)


@contextmanager
def on_ray(address: str, expected: Expectations, seconds: float) -> Iterator[Launched]:
    """A task on every node of the cluster at `address`, with all GPUs of the node. MoerlError if it cannot be joined."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    from moerl.cluster.forks.local_ray import CONNECT_SECONDS, TOKENS, cannot_join, require_listener
    from moerl.cluster.ray_nodes import only_on

    require_listener(address, min(seconds, CONNECT_SECONDS))
    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        raise cannot_join(address, f"{error}; {TOKENS}") from error
    try:
        alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeManagerAddress"])
        names = _names([node["NodeName"] for node in alive])
        with _open_store(ray.util.get_node_ip_address(), seconds) as store:
            task, running = ray.remote(max_retries=0)(examine), []
            for index, node in enumerate(alive):
                options = {"num_cpus": 0, "num_gpus": node["Resources"].get("GPU", 0), "scheduling_strategy": only_on(node["NodeID"])}
                running.append(task.options(**options).remote(_place(store, index, names, expected, seconds)))

            def dead() -> dict[int, str]:
                ended, _ = ray.wait(running, num_returns=len(running), timeout=0)
                failed = {}
                for reference in ended:
                    try:
                        ray.get(reference)
                    except ray.exceptions.RayError as error:
                        failed[running.index(reference)] = str(error).strip().splitlines()[-1]
                return failed

            yield Launched(store=store, names=names, dead=dead, hint="; all its GPUs must be free, and its Python must have moerl")
            ray.wait(running, num_returns=len(running), timeout=_END_SECONDS)
    finally:
        ray.shutdown()


def _open_store(host: str, seconds: float) -> closing[SecretStore]:
    return closing(SecretStore.open(host, RunSecret.new(), seconds))


def _place(store: SecretStore, index: int, names: Sequence[str], expected: Expectations, seconds: float) -> NodePlace:
    return NodePlace(
        index=index, name=names[index], host=store.host, port=store.port, secret=store.secret.key, num_nodes=len(names), expected=expected,
        seconds=seconds,
    )  # fmt: skip


def _names(given: list[str]) -> tuple[str, ...]:
    """A node of Ray that was given no name has its address for one, which two nodes on one machine share."""
    return tuple(name if given.count(name) == 1 else f"{name}#{index}" for index, name in enumerate(given))


@contextmanager
def _own_node(place: NodePlace) -> Iterator[Callable[[], Mapping[int, str]]]:
    with LoggedProcess("moerl.doctor.on_each_node", PLACE.dump_json(place), {}) as process:

        def dead() -> dict[int, str]:
            if not process.poll():
                return {}
            said = process.said()
            return {place.index: said[-1] if said else f"it ended with code {process.returncode}"}

        yield dead
        with suppress(subprocess.TimeoutExpired):  # a slow command of its own; the head has its finding about it
            process.wait(_END_SECONDS)


def _meeting_file(slurm: Slurm, run_dir: Path) -> Path:
    return run_dir / f".doctor-{slurm.step}"


def _own_addresses() -> list[str]:
    """Others first: addresses that other nodes may reach, then the host's name, then loopback, for nodes that share a machine."""
    addresses = [address for found in find_interfaces().values() for address in found if ":" not in address]
    return [*(a for a in addresses if not a.startswith("127.")), socket.gethostname(), "127.0.0.1"]


def _first_reachable(name: str, hosts: list[str], port: int) -> str:
    refusals = []
    for host in hosts:
        if not (refusal := refusal_of(host, port)):
            return host
        refusals.append(refusal)
    raise MoerlError(f"{name}: cannot reach the first node at port {port}: {'; '.join(refusals)}")
