"""A rollout server in a process of its own, driven over HTTP."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from pydantic import TypeAdapter

from moerl.cluster.party import Party
from moerl.push_types import Bucket, Manifest, Needs, TransportOffer
from moerl.rollout import wire
from moerl.rollout.engine import PARTS, EngineHealth, Part, PauseMode
from moerl.rollout.remote_process import RemoteProcess
from moerl.rollout.server_process import ServerProcess
from moerl.types import Completion, EngineError, EngineUnavailable, SamplingParams, WeightError

T = TypeVar("T")

EXIT_SECONDS = 2.0
"""How long a server that broke a connection may take to end, before it counts as alive."""


class HTTPEngine:
    """Implements RolloutEngine for any server that speaks moerl.rollout.wire and reports like moerl.rollout.hf."""

    def __init__(
        self, command: Sequence[str], *, host: str, port: int, log_path: Path, start_seconds: float,
        process: Callable[..., ServerProcess | RemoteProcess] = ServerProcess,
    ):  # fmt: skip
        """`command` starts the server. `port` 0: the server chooses, and `name` tells after start. `process`: starts it somewhere."""
        self.name = f"{host}:{port}"
        self.host = host
        self._process = process(command, label=self.name, log_path=log_path, start_seconds=start_seconds)
        self._session: aiohttp.ClientSession | None = None

    @property
    def pid(self) -> int | None:
        """Of the server process; None before start."""
        return self._process.pid

    @property
    def party(self) -> Party:
        return self._process.party

    def kill(self) -> None:
        self._process.kill()

    async def start(self) -> None:
        port = await self._process.start()
        self.name = self._process.label = f"{self.host}:{port}"
        # One connection per running request, and no deadline here: that is the pool's.
        self._session = aiohttp.ClientSession(
            base_url=f"http://{_bracketed(self.host)}:{port}",
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def ended(self) -> EngineUnavailable:
        return await self._process.death()

    async def generate(self, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str) -> Completion:
        body = wire.GenerateBody(request_id=request_id, prompt_ids=tuple(prompt_ids), sampling=sampling)
        content = await self.call("POST", "/generate", wire.GENERATE, body, about=f": {request_id}")
        return _parse(f"{self.name}: {request_id}", wire.parse_completion, content)

    async def abort(self, request_ids: tuple[str, ...] | None = None) -> None:
        await self.call("POST", "/abort", wire.ABORT, wire.AbortBody(request_ids=request_ids))

    async def pause(self, mode: PauseMode) -> None:
        await self.call("POST", "/pause", wire.PAUSE, wire.PauseBody(mode=mode))

    async def resume(self) -> None:
        await self.call("POST", "/resume")

    async def sleep(self, parts: tuple[Part, ...] = PARTS) -> int:
        return await self._move("/sleep", parts)

    async def wake(self, parts: tuple[Part, ...] = PARTS) -> int:
        return await self._move("/wake", parts)

    async def _move(self, path: str, parts: tuple[Part, ...]) -> int:
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

    async def call(self, method: str, path: str, adapter: TypeAdapter[Any] | None = None, body: object = None, *, about: str = "") -> bytes:
        """The answer's body. EngineError with the server's reason for a refusal; EngineUnavailable with its last lines if it is gone.
        `about` follows the server's name where the answer makes no sense."""
        if self._session is None:
            raise EngineUnavailable(f"{self.name}: {path} on a server that is not running; start it first")
        data = None if adapter is None else adapter.dump_json(body)
        try:
            async with self._session.request(method, path, data=data) as response:
                content = await response.read()
        except aiohttp.ClientError as error:
            raise await self._explain(path, error) from error
        if response.status != 200:
            reason = _parse(f"{self.name}{about}", wire.ERROR.validate_json, content).error
            raise (EngineUnavailable if response.status == wire.UNAVAILABLE else EngineError)(f"{self.name}: {reason}")
        return content

    async def _explain(self, path: str, error: aiohttp.ClientError) -> EngineUnavailable:
        """A broken connection is nearly always the first sign of a dying server: its exit says more."""
        try:
            async with asyncio.timeout(EXIT_SECONDS):
                return await self._process.death()
        except TimeoutError:
            return EngineUnavailable(f"{self.name}: {path} failed, the server still runs: {type(error).__name__}: {error}")


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

    async def install(self, bucket: Bucket) -> None:
        await self._call("/weights/install", wire.BUCKET, bucket)

    async def finish(self, version: int) -> None:
        await self._call("/weights/finish", wire.FINISH, wire.FinishBody(version=version))

    async def _call(self, path: str, adapter: TypeAdapter[Any], body: object) -> None:
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
