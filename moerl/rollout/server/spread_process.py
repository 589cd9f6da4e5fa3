"""The processes of one server that spans several nodes, as one: started together, watched together, ended together.

    first node: free ports --> every node: launch, arrive --> first node: serves --> a process ends, and with it the server

The first node's process alone answers requests. Where one of them ends the engine's collective calls break or hang in the others:
whoever learns of its end closes the server, which ends the rest.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moerl.cluster.run_secret import RunSecret
from moerl.config.schema.rollout_config import NUM_PORTS
from moerl.hangs.watched import WatchedProcess
from moerl.rollout.server.remote_process import RemoteProcess
from moerl.rollout.server.server_process import ServerProcess
from moerl.types.errors import EngineError, EngineUnavailable

NewProcess = Callable[..., ServerProcess | RemoteProcess]


@dataclass(frozen=True, kw_only=True)
class NodeOfServer:
    """One process of a server: its host, how it is started there, and with which command."""

    host: str = "127.0.0.1"
    process: NewProcess = ServerProcess
    command: Sequence[str] = ()
    node_id: str | None = None
    """Ray's."""


class SpreadProcess:
    """The same calls as ServerProcess."""

    def __init__(
        self, nodes: Sequence[NodeOfServer], *, secret: RunSecret, label: str, log_path: Path, start_seconds: float, port: int
    ):  # fmt: skip
        """`port`: where the nodes meet on the first one; 0: chosen there at every start. Nodes after it log beside log_path."""
        self._hosts = [node.host for node in nodes]
        self._logs = [log_path if rank == 0 else log_path.with_stem(f"{log_path.stem}-node{rank}") for rank in range(len(nodes))]
        self._processes = [
            node.process(node.command, secret=secret, label=_label_of(label, rank), log_path=log, start_seconds=start_seconds)
            for rank, (node, log) in enumerate(zip(nodes, self._logs, strict=True))
        ]
        self._start_seconds, self._port = start_seconds, port
        self._arrived: list[asyncio.Event] = []
        self._end: asyncio.Task[EngineError] | None = None
        self._failure: EngineError | None = None

    @property
    def label(self) -> str:
        return self._processes[0].label

    @label.setter
    def label(self, label: str) -> None:
        for rank, process in enumerate(self._processes):
            process.label = _label_of(label, rank)

    @property
    def watched(self) -> tuple[WatchedProcess, ...]:
        return tuple(each for process in self._processes for each in process.watched)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    async def start(self) -> int:
        """The port it serves on. EngineError if a process ends first or reports an error, or if not all is ready after start_seconds; all
        of them are gone then."""
        self._failure = EngineError(f"{self.label}: its start was broken off")
        self._arrived = [asyncio.Event() for _ in self._processes]
        try:
            async with asyncio.timeout(self._start_seconds):
                meeting = self._port if self._port else await self._processes[0].free_ports(NUM_PORTS)
                self._end = asyncio.create_task(self._first_end(meeting))
                port = await self._until_ready(self._end)
        except TimeoutError as error:
            self._failure = EngineError(self._late())
            raise self._failure from error
        except EngineError as error:
            self._failure = error
            raise
        else:
            self._failure = None
            return port
        finally:
            if self._failure is not None:
                await self.close()

    async def death(self) -> EngineUnavailable:
        """End of the process that ends first. Cancel it if the server turns out to live."""
        end, failure = self._end, self._failure
        if failure is None:
            assert end is not None
            await asyncio.wait({end})  # whoever waits does not end it, and its cancellation by close() is nobody else's
            failure = EngineUnavailable(f"{self.label}: the server was closed") if end.cancelled() else end.result()
        return failure if isinstance(failure, EngineUnavailable) else EngineUnavailable(str(failure))

    async def close(self) -> None:
        """Returns when no process is left on any node."""
        if self._end is not None:
            self._end.cancel()
            await asyncio.gather(self._end, return_exceptions=True)
        await asyncio.gather(*(process.close() for process in self._processes))

    async def _until_ready(self, end: "asyncio.Task[EngineError]") -> int:
        ready = asyncio.create_task(self._ready())
        try:
            await asyncio.wait({ready, end}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                return ready.result()
            raise end.result()
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)

    async def _ready(self) -> int:
        for arrived in self._arrived:
            await arrived.wait()
        return await self._processes[0].port()

    async def _first_end(self, meeting: int) -> EngineError:
        """Starts all of them, and returns when one has ended."""
        lives = [asyncio.create_task(self._live(rank, meeting)) for rank in range(len(self._processes))]
        try:
            done, _ = await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for life in lives:
                life.cancel()
            await asyncio.gather(*lives, return_exceptions=True)
        rank = next(rank for rank, life in enumerate(lives) if life in done)
        return self._ended_first(rank, lives[rank].result())

    async def _live(self, rank: int, meeting: int) -> EngineError:
        process = self._processes[rank]
        try:
            await process.launch(["--head-port", str(meeting)])
        except EngineError as error:
            return error
        self._arrived[rank].set()
        return await process.death()

    def _ended_first(self, rank: int, death: EngineError) -> EngineError:
        what = f"the process on node {rank} of its {len(self._hosts)} nodes ({self._hosts[rank]}) ended first, and the server with it"
        others = "; ".join(name for other, name in enumerate(self._named()) if other != rank)
        ended = EngineUnavailable(f"{self.label}: {what}: {death}\nthe others: {others}")
        ended.origin = death.origin
        return ended

    def _late(self) -> str:
        deadline = f"{self.label}: not ready after deadlines.start_seconds = {self._start_seconds:g}"
        missing = [name for arrived, name in zip(self._arrived, self._named(), strict=True) if not arrived.is_set()]
        if missing:
            return f"{deadline}; of its {len(self._hosts)} nodes these did not arrive: {'; '.join(missing)}"
        return f"{deadline}; all its nodes arrived, and loading may be slow. Raise it or see the logs: {'; '.join(self._named())}"

    def _named(self) -> Iterator[str]:
        for rank, (host, log) in enumerate(zip(self._hosts, self._logs, strict=True)):
            yield f"node {rank} ({host}), log {log}"


def _label_of(label: str, rank: int) -> str:
    return label if rank == 0 else f"{label} node {rank}"
