"""A rollout server on another node of the Ray cluster: a small actor there owns its process.

The actor ends with the driver's job, and the server with the actor, as if it were the driver.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from moerl.cluster.lost_actors import is_lost, lost_node
from moerl.cluster.ray_nodes import only_on, reached_at
from moerl.config.schema.run_config import NetworkConfig
from moerl.hangs.watched import WatchedProcess
from moerl.hardware.network_settings import find_settings, variables
from moerl.rollout.server.server_process import ServerProcess
from moerl.types.errors import EngineUnavailable, MoerlError
from moerl.types.exit_codes import ExitCode

logger = logging.getLogger(__name__)


class ProcessOwner:
    """Runs as a Ray actor."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], network: NetworkConfig, deepep: bool, **settings: Any):
        self._own, self._environment, self._network = dict(environment), dict(environment), network
        self._deepep = deepep
        self._process = ServerProcess(command, environment=self._environment, **settings)

    async def call(self, verb: str, *arguments: Any) -> tuple[Any, MoerlError | None, WatchedProcess]:
        """ServerProcess's answer to `verb`, or its error, which Ray would wrap in its own if it were raised; and the process now."""
        answer, failure = None, None
        try:
            if verb in ("start", "launch"):
                # Settings of this node's network, which are not the driver's.
                of_node = variables(find_settings(self._network, "rollout", reached_at=reached_at(), deepep=self._deepep))
                self._environment |= of_node | self._own  # as where the driver starts a server: what is the servers' own wins
            answer = await getattr(self._process, verb)(*arguments)
        except MoerlError as error:
            failure = error
        return answer, failure, self._process.watched[0]

    async def label(self, label: str) -> None:
        self._process.label = label

    async def kill(self) -> None:
        self._process.kill()


class RemoteProcess:
    """The same calls as ServerProcess, on the node `node_id`."""

    def __init__(self, command: Sequence[str], *, label: str, node_id: str, **settings: Any):
        """`settings`: ProcessOwner's."""
        self._command, self._label, self._node_id, self._settings = list(command), label, node_id, settings
        self._owner: Any = None
        self._seen: WatchedProcess | None = None
        """The process as it was at the last answer."""

    @property
    def label(self) -> str:
        return self._label

    @label.setter
    def label(self, label: str) -> None:
        self._label = label
        if self._owner is not None:
            self._owner.label.remote(label)

    @property
    def watched(self) -> tuple[WatchedProcess, ...]:
        name = f"server {self._label}"
        if self._seen is None:
            return (WatchedProcess(name=name, node=self._node_id, node_id=self._node_id),)
        return (replace(self._seen, name=name, node_id=self._node_id),)

    def kill(self) -> None:
        """Soon: SIGKILL by the owner, which also ends a stopped process."""
        if self._owner is not None:
            self._owner.kill.remote()

    async def start(self) -> int:
        """Also where an earlier owner is gone; EngineError if the node is."""
        self._own()
        return int(await self._ask("start"))

    async def launch(self, arguments: Sequence[str]) -> None:
        self._own()
        await self._ask("launch", list(arguments))

    async def port(self) -> int:
        return int(await self._ask("port"))

    async def free_ports(self, count: int) -> int:
        self._own()
        return int(await self._ask("free_ports", count))

    async def death(self) -> EngineUnavailable:
        try:
            death: EngineUnavailable = await self._ask("death")
        except EngineUnavailable as error:
            return error
        return death

    async def close(self) -> None:
        if self._owner is None:
            return
        owner = self._owner
        try:
            await self._ask("close")
        except EngineUnavailable as error:
            logger.info("%s", error)
        ray.kill(owner)
        self._owner = None

    def _own(self) -> None:
        if self._owner is None:
            actor = ray.remote(ProcessOwner).options(num_cpus=0, scheduling_strategy=only_on(self._node_id))
            self._owner = actor.remote(self._command, label=self._label, **self._settings)
            self._settings["has_log"] = True

    async def _ask(self, verb: str, *arguments: Any) -> Any:
        """Answer of the owner; raises the error that it returns."""
        owner = self._owner
        if owner is None:
            raise EngineUnavailable(f"{self._label}: the server was closed")
        try:
            answer, failure, self._seen = await owner.call.remote(verb, *arguments)
        except RayError as error:
            if self._owner is owner:  # not one that was started since
                self._owner = None
            first = str(error).splitlines()[0]
            gone = EngineUnavailable(f"{self._label}: the node of the server, or its owner there, is gone: {lost_node(error) or first}")
            if is_lost(error):  # the node was there when the run chose it
                gone.exit_code = ExitCode.KILLED
            raise gone from error
        if failure is not None:
            raise failure
        return answer
