"""A rollout server in a process of its own, driven over HTTP."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from inspect import signature
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import aiohttp

from moerl.cluster.run_secret import RunSecret
from moerl.cluster.sockets import client_context
from moerl.hangs.watched import WatchedProcess
from moerl.rollout.server import messages, wire
from moerl.rollout.server.contract import EngineRefuses, RolloutEngine
from moerl.rollout.server.remote_process import RemoteProcess
from moerl.rollout.server.server_process import ServerProcess
from moerl.rollout.server.spread_process import NodeOfServer, SpreadProcess
from moerl.types.completion import Completion, SamplingParams
from moerl.types.errors import EngineError, EngineUnavailable, EngineUnsound, WeightError

P = ParamSpec("P")
T = TypeVar("T")

EXIT_SECONDS = 2.0
"""Time a server that broke a connection may take to end, before it counts as alive."""


class BrokenConnection(EngineUnavailable):
    """The server did not answer. Whoever watches its process can say more: HTTPEngine.explain."""


def _sent(
    method: Callable[Concatenate[RolloutEngine, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["HTTPEngine", P], Coroutine[Any, Any, T]]:
    """The contract's method over HTTP. Of a push, the errors are WeightErrors."""
    verb, parameters = wire.VERBS[method.__name__], signature(method)

    async def send(engine: "HTTPEngine", *args: P.args, **options: P.kwargs) -> T:
        given = parameters.bind(engine, *args, **options)
        given.apply_defaults()
        del given.arguments["self"]
        try:
            data = verb.dump(given.arguments) if given.arguments else None
            content = await engine.call(verb.http, verb.path, data, max_answer=verb.max_answer)
            answer: T = _parse(engine.name, verb.answer.validate_json, content)
        except EngineError as error:
            if verb.is_of_push:
                raise WeightError(str(error)) from error
            raise
        return answer

    return send


class HTTPEngine:
    """Implements RolloutEngine for any server that speaks moerl.rollout.server.wire and reports like moerl.rollout.engines.hf."""

    node_id: str | None = None
    """Node of the process that answers, Ray's id; None: not known."""

    def __init__(
        self, nodes: Sequence[NodeOfServer], *, secret: RunSecret, port: int, log_path: Path, start_seconds: float, meeting_port: int = 0,
        authority: Path | None = None,
    ):  # fmt: skip
        """`nodes`: the first one answers. `port` 0: the server chooses, and `name` tells after start. `meeting_port`: SpreadProcess's.
        `authority`: file of the certificates that the server's is held against; None: it speaks plain HTTP."""
        first, *others = nodes
        self.host, self.hosts, self.node_id = first.host, tuple(node.host for node in nodes), first.node_id
        self.name = f"{first.host}:{port}"
        how: dict[str, Any] = {"secret": secret, "label": self.name, "log_path": log_path, "start_seconds": start_seconds}
        self._process: ServerProcess | RemoteProcess | SpreadProcess = (
            SpreadProcess(nodes, port=meeting_port, **how) if others else first.process(first.command, **how)
        )
        self._secret, self.authority = secret, authority
        self._session: aiohttp.ClientSession | None = None
        self._reading: set[asyncio.Task[Completion | EngineError]] = set()

    @property
    def url(self) -> str:
        """Address of a server that was started."""
        scheme, host = "http" if self.authority is None else "https", f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.name.rpartition(':')[2]}"

    @property
    def watched(self) -> tuple[WatchedProcess, ...]:
        return self._process.watched

    def kill(self) -> None:
        self._process.kill()

    async def start(self) -> None:
        tls = client_context(self.authority)
        port = await self._process.start()
        self.name = self._process.label = f"{self.host}:{port}"
        self._session = new_session(self._secret, tls)

    async def ended(self) -> EngineUnavailable:
        return await self._process.death()

    async def generate(self, prompt_ids: tuple[int, ...], sampling: SamplingParams, request_id: str) -> Completion:
        session = self._running_session("/generate")
        request = wire.GenerateRequest(request_id=request_id, prompt_ids=tuple(prompt_ids), sampling=sampling)
        reading = asyncio.create_task(_only(generate_at(session, self.url, self.name, [request])))
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        try:
            outcome = await reading
        except BrokenConnection as error:
            raise await self.explain(error) from error
        except asyncio.CancelledError:
            whoever = asyncio.current_task()
            if self._session is session or whoever is None or whoever.cancelling():
                raise
            closed = BrokenConnection(f"{self.name}: /generate failed: the server was closed meanwhile")
            raise await self.explain(closed) from None
        if isinstance(outcome, EngineError):
            raise outcome
        return outcome

    abort = _sent(RolloutEngine.abort)
    pause = _sent(RolloutEngine.pause)
    resume = _sent(RolloutEngine.resume)
    sleep = _sent(RolloutEngine.sleep)
    wake = _sent(RolloutEngine.wake)
    health = _sent(RolloutEngine.health)
    needs = _sent(RolloutEngine.needs)
    connect = _sent(RolloutEngine.connect)
    begin = _sent(RolloutEngine.begin)
    install = _sent(RolloutEngine.install)
    finish = _sent(RolloutEngine.finish)

    async def close(self) -> None:
        session, self._session = self._session, None
        for reading in self._reading:  # a session that is closed tells nothing to who reads an answer's body
            reading.cancel()
        if session is not None:
            await session.close()
        await self._process.close()

    async def call(self, method: str, path: str, data: bytes | None = None, *, max_answer: int = wire.MAX_ERROR) -> bytes:
        """The answer's body. EngineError with the server's reason for a refusal; EngineUnavailable with its last lines if it is gone."""
        session = self._running_session(path)
        try:
            return await _exchange(session, method, self.url, path, data, name=self.name, max_answer=max_answer)
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


def new_session(secret: RunSecret, tls: ssl.SSLContext | None = None) -> aiohttp.ClientSession:
    """One connection per message whose answers are not all there, and no deadline here: that is the pool's. `tls`: for https."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=True if tls is None else tls),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={**secret.headers, "Accept-Encoding": "identity"},
        auto_decompress=False,  # a few bytes could become gigabytes
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def generate_at(
    session: aiohttp.ClientSession, url: str, name: str, requests: Sequence[wire.GenerateRequest], data: bytes | None = None
) -> AsyncGenerator[tuple[int, Completion | EngineError], None]:
    """Outcomes, as they come, of requests to the server at `url`, each with the place of its request; `name` is the server's in errors.
    `data`: the message of these requests; None: it is made.

    Raises what ends all of them, of which nothing more comes then: EngineError, EngineUnsound, BrokenConnection.
    """
    frames = messages.Frames([wire.max_completion(len(request.prompt_ids), request.sampling) for request in requests])

    def about(place: int) -> str:
        return f"{name}: {requests[place].request_id}"

    data = messages.dump_requests(requests) if data is None else data
    async with _requested(session, "POST", url, "/generate", data, name=name, about=about(0)) as response:
        async for chunk in response.content.iter_any():
            try:
                found = list(frames.feed(chunk))
            except ValueError as error:
                raise _unsound(about(0), frames.unread, error) from error
            for place, status, content in found:
                yield place, _outcome(name, about(place), status, content)
    if frames.unread:
        raise _unsound(about(0), frames.unread, "the answer ends within a frame")
    if frames.missing:
        raise BrokenConnection(f"{name}: /generate ended, the server still runs: {len(frames.missing)} answers are missing")


async def _only(outcomes: AsyncGenerator[tuple[int, Completion | EngineError], None]) -> Completion | EngineError:
    """The outcome of a message of one request."""
    ((_, outcome),) = [each async for each in outcomes]
    return outcome


async def abort_at(session: aiohttp.ClientSession, url: str, name: str, request_ids: Sequence[str]) -> None:
    """RolloutEngine.abort of these, from a process that has no HTTPEngine. EngineError."""
    verb = wire.VERBS["abort"]
    data = verb.dump({"request_ids": tuple(request_ids)})
    await _exchange(session, verb.http, url, verb.path, data, name=name, max_answer=verb.max_answer)


async def _exchange(
    session: aiohttp.ClientSession, method: str, url: str, path: str, data: bytes | None, *, name: str, max_answer: int
) -> bytes:
    """EngineUnsound also if the answer has more than `max_answer` bytes."""
    async with _requested(session, method, url, path, data, name=name, about=name) as response:
        return await _content(response, max_answer, name)


@asynccontextmanager
async def _requested(
    session: aiohttp.ClientSession, method: str, url: str, path: str, data: bytes | None, *, name: str, about: str
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Answer of status 200, to be read; what goes wrong meanwhile is told of `about`, the server and what it was asked for."""
    try:
        async with session.request(method, url + path, data=data, allow_redirects=False) as response:
            if response.status == wire.STRANGER:
                raise EngineError(
                    f"{about}: whoever answers there does not know this run's secret; is it another run's server, or another program, on "
                    "the same port? Set rollout.port=0 to let the system choose, or choose a free one"
                )
            if response.status != 200:
                raise _refusal(name, about, response.status, await _content(response, wire.MAX_ERROR, about))
            yield response
    except aiohttp.ClientConnectorCertificateError as error:
        raise EngineError(
            f"{about}: the certificate that is shown there is not trusted ({error.certificate_error}). rollout.tls.certificate must "
            f"be signed by rollout.tls.authority, be in date, and have {error.host} in its subjectAltName (an address as IP, a name as DNS)"
        ) from error
    except aiohttp.ClientError as error:
        raise BrokenConnection(f"{name}: {path} failed, the server still runs: {type(error).__name__}: {error}") from error


def _outcome(name: str, about: str, status: int, content: bytes | bytearray) -> Completion | EngineError:
    try:
        return _parse(about, wire.parse_completion, content) if status == 200 else _refusal(name, about, status, content)
    except EngineUnsound as error:
        return error


def _refusal(name: str, about: str, status: int, content: bytes | bytearray) -> EngineError:
    reason = _parse(about, wire.ERROR.validate_json, content, status=status).error
    return (EngineRefuses if status == wire.UNAVAILABLE else EngineError)(f"{name}: {reason}")


async def _content(response: aiohttp.ClientResponse, max_bytes: int, name: str) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > max_bytes:
            response.close()
            raise EngineUnsound(f"{name}: answered with more than {max_bytes} bytes, which no answer to this request has")
    return bytes(content)


def _parse(name: str, parse: Callable[[bytes | bytearray], T], content: bytes | bytearray, *, status: int = 200) -> T:
    try:
        return parse(content)
    except ValueError as error:
        raise _unsound(name, content, error, "" if status == 200 else f" with status {status}") from error


def _unsound(name: str, content: bytes | bytearray, error: ValueError | str, status: str = "") -> EngineUnsound:
    return EngineUnsound(f"{name}: answered {bytes(content[:200])!r}{status}; is rollout.python of the same moerl?\n{error}")
