"""HTTP in front of the generation thread. Tokens in, tokens out; the event loop only parses, checks and waits."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from moerl.rollout.server import wire
from moerl.rollout.server.contract import EngineHealth, MemoryPart, PauseMode
from moerl.rollout.server.engine_core import Outcome, ServerRequest
from moerl.rollout.server.limits import Limits
from moerl.types.errors import EngineError, EngineUnavailable, WeightError
from moerl.types.push import Manifest, Needs, TransportOffer

Body = TypeVar("Body")


class ServedWorker(Protocol):
    """What serves the requests: moerl.rollout.engines.hf.hf_worker, or moerl.rollout.server.gate around another engine."""

    def generate(self, request: ServerRequest) -> None: ...

    def abort(self, request_ids: tuple[str, ...] | None) -> "Future[None]": ...

    def pause(self, mode: PauseMode) -> "Future[None]": ...

    def resume(self) -> "Future[None]": ...

    def sleep(self, parts: tuple[MemoryPart, ...]) -> "Future[int]": ...

    def wake(self, parts: tuple[MemoryPart, ...]) -> "Future[int]": ...

    def health(self) -> EngineHealth: ...

    def needs(self) -> Needs: ...

    def connect(self, offer: TransportOffer) -> None: ...

    def begin(self, manifest: Manifest) -> "Future[None]": ...

    def install(self) -> "Future[None]": ...

    def finish(self, version: int) -> "Future[None]": ...


class BadRequest(Exception):
    """Becomes status 400."""


def build_app(worker: ServedWorker, limits: Limits) -> Starlette:
    async def generate(request: HTTPRequest) -> Response:
        body = await _parse(request, wire.GENERATE)
        if violation := limits.violation(body.prompt_ids, body.sampling):
            raise BadRequest(f"{body.request_id}: {violation}")
        return await _generate(request, worker, body)

    async def abort(request: HTTPRequest) -> Response:
        return await _wait(worker.abort((await _parse(request, wire.ABORT)).request_ids))

    async def pause(request: HTTPRequest) -> Response:
        return await _wait(worker.pause((await _parse(request, wire.PAUSE)).mode))

    async def resume(request: HTTPRequest) -> Response:
        return await _wait(worker.resume())

    async def sleep(request: HTTPRequest) -> Response:
        return await _moved(worker.sleep((await _parse(request, wire.PARTS)).parts))

    async def wake(request: HTTPRequest) -> Response:
        return await _moved(worker.wake((await _parse(request, wire.PARTS)).parts))

    async def health(request: HTTPRequest) -> Response:
        return _json(wire.HEALTH, worker.health())

    async def needs(request: HTTPRequest) -> Response:
        return _json(wire.NEEDS, worker.needs())

    async def connect(request: HTTPRequest) -> Response:
        await asyncio.to_thread(worker.connect, await _parse(request, wire.OFFER))
        return Response()

    async def begin(request: HTTPRequest) -> Response:
        return await _wait(worker.begin(await _parse(request, wire.MANIFEST)))

    async def install(request: HTTPRequest) -> Response:
        return await _wait(worker.install())

    async def finish(request: HTTPRequest) -> Response:
        return await _wait(worker.finish((await _parse(request, wire.FINISH)).version))

    posts: dict[str, Callable[[HTTPRequest], Awaitable[Response]]] = {
        "/generate": generate,
        "/abort": abort,
        "/pause": pause,
        "/resume": resume,
        "/sleep": sleep,
        "/wake": wake,
        "/weights/connect": connect,
        "/weights/begin": begin,
        "/weights/install": install,
        "/weights/finish": finish,
    }
    routes = [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
    statuses = {BadRequest: 400, EngineUnavailable: wire.UNAVAILABLE, EngineError: 409, WeightError: 409, Exception: 500}
    handlers: dict[Any, Any] = {kind: _error_handler(status) for kind, status in statuses.items()}
    routes += [Route("/health", health, methods=["GET"]), Route("/weights/needs", needs, methods=["GET"])]
    return Starlette(routes=routes, exception_handlers=handlers)


async def _generate(request: HTTPRequest, worker: ServedWorker, body: wire.GenerateBody) -> Response:
    """Ends early, and frees the slot, when the client goes away."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Outcome] = loop.create_future()

    def deliver(result: Outcome) -> None:
        loop.call_soon_threadsafe(lambda: None if outcome.done() else outcome.set_result(result))

    prompt = np.array(body.prompt_ids, dtype=np.int64)
    worker.generate(ServerRequest(request_id=body.request_id, prompt_ids=prompt, sampling=body.sampling, done=deliver))
    gone: asyncio.Future[Any] = asyncio.ensure_future(request.receive())  # after the body, the next message is the disconnect
    await asyncio.wait([outcome, gone], return_when=asyncio.FIRST_COMPLETED)
    gone.cancel()
    if not outcome.done():
        worker.abort((body.request_id,))
        return Response(status_code=499)
    result = outcome.result()
    if isinstance(result, EngineError):
        raise result
    return Response(wire.dump_completion(result), media_type="application/octet-stream")


async def _parse(request: HTTPRequest, adapter: TypeAdapter[Body]) -> Body:
    try:
        return adapter.validate_json(await request.body())
    except ValidationError as error:
        raise BadRequest(str(error)) from error


async def _wait(future: "Future[None]") -> Response:
    await asyncio.wrap_future(future)
    return Response()


async def _moved(future: "Future[int]") -> Response:
    return _json(wire.MOVED, wire.MovedBody(num_bytes=await asyncio.wrap_future(future)))


def _json(adapter: TypeAdapter[Any], value: object) -> Response:
    return Response(adapter.dump_json(value), media_type="application/json")


def _error_handler(status: int) -> Callable[[HTTPRequest, Exception], Awaitable[Response]]:
    async def handle(request: HTTPRequest, error: Exception) -> Response:
        text = str(error) if status < 500 else f"{type(error).__name__}: {error}"
        return Response(wire.ERROR.dump_json(wire.ErrorBody(error=text)), status_code=status, media_type="application/json")

    return handle
