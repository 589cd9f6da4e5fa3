"""Ray's daemons on one node of a job: ports, token and directories of the job's own, so that no other Ray on the node matters."""

import asyncio
import os
import sys
from collections import Counter, deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from moerl.cluster.descendants import end_with_parent_alone
from moerl.cluster.sockets import free_ports
from moerl.hardware.network_settings import find_interfaces
from moerl.slurm.allocation import AllocatedNode
from moerl.slurm.meeting import POLL_SECONDS, appeared
from moerl.types.errors import MoerlError

_LOG_LINES = 20
_ERROR_LINES = 3
_DAEMONS = ("raylet", "gcs_server")
_WHICH_CLUSTER = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_NAMESPACE", "RAY_JOB_ID")
"""Variables that name somebody else's cluster."""


class RayEnded(MoerlError):
    """On a node where it ran; the job itself may be sound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """Where and how Ray runs on this node."""

    facts: AllocatedNode
    address: str
    """Address of this node."""
    directory: Path
    """On the node's own disk, for this job alone."""
    token: str
    log: Path
    seconds: float
    """Time for its daemons to come up."""

    def environment(self) -> dict[str, str]:
        """Variables of Ray's daemons and of whoever joins them here; process groups use the interface of the same address."""
        token_file = self.directory / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(self.token)
        inherited = {name: value for name, value in os.environ.items() if name not in _WHICH_CLUSTER}
        ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file), "RAY_USAGE_STATS_ENABLED": "0"}
        name = next(name for name, addresses in find_interfaces().items() if self.address in addresses)
        # NCCL takes a name without = as the beginning of names.
        network = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
        return {**network, **inherited, **ray, "TMPDIR": str(self.directory)}

    async def start(self, cluster: str | None) -> tuple[str, Awaitable[None]]:
        """(the cluster's address, what raises MoerlError when the daemons end), once this node's daemons run. None: this node is the head.

        MoerlError if they do not start; the caller bounds the time.
        """
        with self.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self._command(cluster),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(),
                preexec_fn=end_with_parent_alone,
            )
        address = await self._address(process)
        daemons = [child.pid for child in psutil.Process(process.pid).children(recursive=True) if child.name() in _DAEMONS]
        return address, self._end(process, daemons)

    def _command(self, cluster: str | None) -> list[str]:
        if cluster is None:
            # The one daemon of Ray that cannot ask the system for a port.
            client = free_ports(1, fix="end what holds them")
            role = ["--head", "--port=0", f"--ray-client-server-port={client}", "--include-dashboard=false", "--no-monitor"]
        else:
            role = [f"--address={cluster}"]
        # 0: the system chooses.
        chosen = ("node-manager-port", "object-manager-port", "metrics-export-port", "runtime-env-agent-port")
        workers = ["--min-worker-port=0", "--max-worker-port=0"]
        ports = [f"--{name}=0" for name in (*chosen, "dashboard-agent-listen-port", "dashboard-agent-grpc-port")]
        size = [f"--num-cpus={self.facts.num_cpus}", f"--num-gpus={len(self.facts.gpus)}", f"--node-name={self.facts.name}"]
        place = [f"--node-ip-address={self.address}", f"--temp-dir={self.directory}", "--include-log-monitor=false"]
        program = [sys.executable, "-m", "moerl.slurm.ray_start", f"{self.seconds:g}"]
        return [*program, *role, *ports, *workers, *size, *place, "--disable-usage-stats", "--block"]

    async def _address(self, process: "asyncio.subprocess.Process") -> str:
        """Ray writes it when everything is started."""
        written = asyncio.create_task(appeared(self.directory / "ray_current_cluster"))
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait([written, ended], return_when=asyncio.FIRST_COMPLETED)
            if not written.done():
                raise MoerlError(f"{self.facts.name}: Ray did not start (exit code {process.returncode})\n{self._tail()}")
            return written.result().strip()
        finally:
            written.cancel()
            ended.cancel()

    async def _end(self, process: "asyncio.subprocess.Process", daemons: Sequence[int]) -> None:
        """Raises RayEnded. `daemons`: without which the node has no Ray. A raylet whose agent was killed ends with 0, which `ray start`
        takes for an end in order."""
        watched = [asyncio.create_task(process.wait()), *(asyncio.create_task(end_of(pid)) for pid in daemons)]
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in watched:
                task.cancel()
            # Not in order: Ray would take half a minute. Its daemons end with this process.
            if process.returncode is None:
                process.kill()
            await process.wait()
        why = self._why()
        raise RayEnded(f"{self.facts.name}: Ray's daemons ended\n{why if why else self._tail()}".rstrip())

    def _why(self) -> str:
        said = self.directory / "session_latest" / "logs" / "raylet.err"
        errors = [line for line in said.read_text(errors="replace").splitlines() if " E " in line] if said.exists() else []
        return "".join(f"    {line}\n" for line in errors[-_ERROR_LINES:])

    def _tail(self) -> str:
        with self.log.open(errors="replace") as log:
            return f"last lines of {self.log}:\n" + "".join(f"    {line}" for line in deque(log, maxlen=_LOG_LINES))


def host_of(address: str) -> str:
    """Address of a node as Ray's tables have it, from one with a port, where that of IPv6 stands in brackets."""
    return address.rpartition(":")[0].strip("[]")


async def end_of(pid: int) -> None:
    """End of any process, also one that is not this one's child."""
    try:
        file = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(file, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(file)
        os.close(file)


async def wait_until_registered(cluster: str, expected: Sequence[tuple[str, AllocatedNode]], seconds: float) -> None:
    """`expected`: address and facts of each node. MoerlError names those that Ray does not know with their GPUs within the time."""
    # Heavy, and it reads the token's place from the environment when it is first imported.
    from ray.autoscaler.v2.sdk import get_cluster_status

    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        status = await asyncio.to_thread(get_cluster_status, cluster)
        registered = Counter((node.ip_address, _gpus(node)) for node in [*status.active_nodes, *status.idle_nodes])
        missing = []
        for address, facts in expected:
            known = (address, len(facts.gpus))
            if registered[known] == 0:
                missing.append(f"{facts.name} with {len(facts.gpus)} GPUs at {address}")
            registered[known] -= 1
        if not missing:
            return
        if asyncio.get_running_loop().time() > deadline:
            raise MoerlError(f"not registered with Ray within slurm.start_seconds = {seconds:g}: {', '.join(missing)}")
        await asyncio.sleep(POLL_SECONDS)


def _gpus(node: object) -> int:
    usage = node.resource_usage.usage  # type: ignore[attr-defined]
    return int(sum(resource.total for resource in usage if resource.resource_name == "GPU"))
