"""A rollout server in a process of its own, driven over HTTP."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from pydantic import TypeAdapter

from moerl.hangs.watched import WatchedProcess
from moerl.rollout.server import wire
from moerl.rollout.server.contract import PARTS, EngineHealth, EngineRefuses, MemoryPart, PauseMode
from moerl.rollout.server.remote_process import RemoteProcess
from moerl.rollout.server.server_process import ServerProcess
from moerl.rollout.server.spread_process import SpreadProcess
from moerl.types.completion import Completion, SamplingParams
from moerl.types.errors import EngineError, EngineUnavailable, WeightError
from moerl.types.push import Manifest, Needs, TransportOffer

T = TypeVar("T")

EXIT_SECONDS = 2.0
"""Time a server that broke a connection may take to end, before it counts as alive."""


class BrokenConnection(EngineUnavailable):
    """The server did not answer. Whoever watches its process can say more: HTTPEngine.explain."""


class HTTPEngine:
    """Implements RolloutEngine for any server that speaks moerl.rollout.server.wire and reports like moerl.rollout.engines.hf."""

    def __init__(
        self, command: Sequence[str], *, host: str, port: int, log_path: Path, start_seconds: float,
        process: Callable[..., ServerProcess | RemoteProcess | SpreadProcess] = ServerProcess, other_hosts: Sequence[str] = (),
    ):  # fmt: skip
        """`command` starts the server. `port` 0: the server chooses, and `name` tells after start. `process`: starts it somewhere.
        `other_hosts`: of its nodes after the first, which alone answers."""
        self.name = f"{host}:{port}"
        self.host, self.hosts = host, (host, *other_hosts)
        self._process = process(command, label=self.name, log_path=log_path, start_seconds=start_seconds)
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        """Address of a server that was started."""
        return f"http://{_bracketed(self.host)}:{self.name.rpartition(':')[2]}"

    @property
    def pid(self) -> int | None:
        """Id of the server process; None before start."""
        return self._process.pid

    @property
    def watched(self) -> tuple[WatchedProcess, ...]:
        return self._process.watched

    def kill(self) -> None:
        self._process.kill()

    async def start(self) -> None:
        port = await self._process.start()
        self.name = self._process.label = f"{self.host}:{port}"
        self._session = new_session()

    async def ended(self) -> EngineUnavailable:
        return await self._process.death()

    async def generate(self, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str) -> Completion:
        session = self._running_session("/generate")
        try:
            return await generate_at(session, self.url, self.name, prompt_ids, sampling, request_id)
        except BrokenConnection as error:
            raise await self.explain(error) from error

    async def abort(self, request_ids: tuple[str, ...] | None = None) -> None:
        await self.call("POST", "/abort", wire.ABORT, wire.AbortBody(request_ids=request_ids))

    async def pause(self, mode: PauseMode) -> None:
        await self.call("POST", "/pause", wire.PAUSE, wire.PauseBody(mode=mode))

    async def resume(self) -> None:
        await self.call("POST", "/resume")

    async def sleep(self, parts: tuple[MemoryPart, ...] = PARTS) -> int:
        return await self._move("/sleep", parts)

    async def wake(self, parts: tuple[MemoryPart, ...] = PARTS) -> int:
        return await self._move("/wake", parts)

    async def _move(self, path: str, parts: tuple[MemoryPart, ...]) -> int:
        content = await self.call("POST", path, wire.PARTS, wire.PartsBody(parts=parts))
        return _parse(self.name, wire.MOVED.validate_json, content).num_bytes

    async def health(self) -> EngineHealth:
        return _parse(self.name, wire.HEALTH.validate_json, await self.call("GET", "/health"))

    def receiver(self) -> "HTTPReceiver":
        return HTTPReceiver(self)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        await self._process.close()

    async def call(self, method: str, path: str, adapter: TypeAdapter[Any] | None = None, body: object = None) -> bytes:
        """The answer's body. EngineError with the server's reason for a refusal; EngineUnavailable with its last lines if it is gone."""
        data = None if adapter is None else adapter.dump_json(body)
        session = self._running_session(path)
        try:
            return await _exchange(session, method, self.url, path, data, name=self.name)
        except BrokenConnection as error:
            raise await self.explain(error) from error

    async def explain(self, error: BrokenConnection) -> EngineUnavailable:
        """A broken connection is nearly always the first sign of a dying server: its exit says more."""
        try:
            async with asyncio.timeout(EXIT_SECONDS):
                return await self._process.death()
        except TimeoutError:
            return error

    def _running_session(self, path: str) -> aiohttp.ClientSession:
        if self._session is None:
            raise EngineUnavailable(f"{self.name}: {path} on a server that is not running; start it first")
        return self._session


def new_session() -> aiohttp.ClientSession:
    """One connection per running request, and no deadline here: that is the pool's."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))


async def generate_at(
    session: aiohttp.ClientSession, url: str, name: str, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str
) -> Completion:
    """Completion from the server at `url`, by its `name` in errors. EngineError, EngineUnavailable, BrokenConnection."""
    body = wire.GenerateBody(request_id=request_id, prompt_ids=tuple(prompt_ids), sampling=sampling)
    data = wire.GENERATE.dump_json(body)
    content = await _exchange(session, "POST", url, "/generate", data, name=name, about=f": {request_id}")
    return _parse(f"{name}: {request_id}", wire.parse_completion, content)


async def _exchange(
    session: aiohttp.ClientSession, method: str, url: str, path: str, data: bytes | None, *, name: str, about: str = ""
) -> bytes:
    """`about` follows the server's name where the answer makes no sense."""
    try:
        async with session.request(method, url + path, data=data) as response:
            content = await response.read()
    except aiohttp.ClientError as error:
        raise BrokenConnection(f"{name}: {path} failed, the server still runs: {type(error).__name__}: {error}") from error
    if response.status != 200:
        reason = _parse(f"{name}{about}", wire.ERROR.validate_json, content).error
        raise (EngineRefuses if response.status == wire.UNAVAILABLE else EngineError)(f"{name}: {reason}")
    return content


class HTTPReceiver:
    """Implements WeightReceiver: the same server, the errors are WeightErrors."""

    def __init__(self, engine: HTTPEngine):
        self._engine = engine

    async def needs(self) -> Needs:
        try:
            return _parse(self._engine.name, wire.NEEDS.validate_json, await self._engine.call("GET", "/weights/needs"))
        except EngineError as error:
            raise WeightError(str(error)) from error

    async def connect(self, offer: TransportOffer) -> None:
        await self._call("/weights/connect", wire.OFFER, offer)

    async def begin(self, manifest: Manifest) -> None:
        await self._call("/weights/begin", wire.MANIFEST, manifest)

    async def install(self) -> None:
        await self._call("/weights/install")

    async def finish(self, version: int) -> None:
        await self._call("/weights/finish", wire.FINISH, wire.FinishBody(version=version))

    async def _call(self, path: str, adapter: TypeAdapter[Any] | None = None, body: object = None) -> None:
        try:
            await self._engine.call("POST", path, adapter, body)
        except EngineError as error:
            raise WeightError(str(error)) from error


def _parse(name: str, parse: Callable[[bytes], T], content: bytes) -> T:
    try:
        return parse(content)
    except ValueError as error:
        raise EngineError(f"{name}: answered {content[:200]!r}; is rollout.python of the same moerl?\n{error}") from error


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
