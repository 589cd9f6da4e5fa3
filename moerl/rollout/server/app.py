"""HTTP in front of a gate. Tokens in, tokens out; nothing here but parsing, checks and waiting."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from moerl.rollout.server import wire
from moerl.rollout.server.gate import Gate
from moerl.rollout.server.limits import Limits
from moerl.types.errors import EngineError, EngineUnavailable, WeightError

Body = TypeVar("Body")


class BadRequest(Exception):
    """Becomes status 400."""


def build_app(gate: Gate, limits: Limits) -> Starlette:
    async def generate(request: HTTPRequest) -> Response:
        body = await _parse(request, wire.GENERATE)
        if violation := limits.violation(body.prompt_ids, body.sampling):
            raise BadRequest(f"{body.request_id}: {violation}")
        return await _generate(request, gate, body)

    async def abort(request: HTTPRequest) -> Response:
        return await _done(gate.abort((await _parse(request, wire.ABORT)).request_ids))

    async def pause(request: HTTPRequest) -> Response:
        return await _done(gate.pause((await _parse(request, wire.PAUSE)).mode))

    async def resume(request: HTTPRequest) -> Response:
        return await _done(gate.resume())

    async def sleep(request: HTTPRequest) -> Response:
        return await _moved(gate.sleep((await _parse(request, wire.PARTS)).parts))

    async def wake(request: HTTPRequest) -> Response:
        return await _moved(gate.wake((await _parse(request, wire.PARTS)).parts))

    async def health(request: HTTPRequest) -> Response:
        return _json(wire.HEALTH, await gate.health())

    async def needs(request: HTTPRequest) -> Response:
        return _json(wire.NEEDS, await gate.needs())

    async def connect(request: HTTPRequest) -> Response:
        return await _done(gate.connect(await _parse(request, wire.OFFER)))

    async def begin(request: HTTPRequest) -> Response:
        return await _done(gate.begin(await _parse(request, wire.MANIFEST)))

    async def install(request: HTTPRequest) -> Response:
        return await _done(gate.install())

    async def finish(request: HTTPRequest) -> Response:
        return await _done(gate.finish((await _parse(request, wire.FINISH)).version))

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


async def _generate(request: HTTPRequest, gate: Gate, body: wire.GenerateBody) -> Response:
    """Ends early, and frees the slot, when the client goes away."""
    answer = asyncio.ensure_future(gate.generate(body.prompt_ids, body.sampling, body.request_id))
    gone: asyncio.Future[Any] = asyncio.ensure_future(request.receive())  # after the body, the next message is the disconnect
    await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
    gone.cancel()
    if not answer.done():
        answer.cancel()
        return Response(status_code=499)
    return Response(wire.dump_completion(answer.result()), media_type="application/octet-stream")


async def _parse(request: HTTPRequest, adapter: TypeAdapter[Body]) -> Body:
    try:
        return adapter.validate_json(await request.body())
    except ValidationError as error:
        raise BadRequest(str(error)) from error


async def _done(verb: Awaitable[None]) -> Response:
    await verb
    return Response()


async def _moved(verb: Awaitable[int]) -> Response:
    return _json(wire.MOVED, wire.MovedBody(num_bytes=await verb))


def _json(adapter: TypeAdapter[Any], value: object) -> Response:
    return Response(adapter.dump_json(value), media_type="application/json")


def _error_handler(status: int) -> Callable[[HTTPRequest, Exception], Awaitable[Response]]:
    async def handle(request: HTTPRequest, error: Exception) -> Response:
        text = str(error) if status < 500 else f"{type(error).__name__}: {error}"
        return Response(wire.ERROR.dump_json(wire.ErrorBody(error=text)), status_code=status, media_type="application/json")

    return handle
