"""HTTP in front of a gate. Tokens in, tokens out; nothing here but parsing, checks and waiting."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from moerl.rollout.server import wire
from moerl.rollout.server.gate import Gate
from moerl.rollout.server.limits import Limits
from moerl.types.errors import EngineError, EngineUnavailable, WeightError

T = TypeVar("T")
Handler = Callable[[HTTPRequest], Awaitable[Response]]


class BadRequest(Exception):
    """Becomes status 400."""


def build_app(gate: Gate, limits: Limits) -> Starlette:
    async def generate(request: HTTPRequest) -> Response:
        """Ends early, and frees the slot, when the client goes away."""
        body = await _parsed(request, wire.GENERATE.validate_json)
        if violation := limits.violation(body.prompt_ids, body.sampling):
            raise BadRequest(f"{body.request_id}: {violation}")
        answer = asyncio.ensure_future(gate.generate(body.prompt_ids, body.sampling, body.request_id))
        gone: asyncio.Future[Any] = asyncio.ensure_future(request.receive())  # after the body, the next message is the disconnect
        await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not answer.done():
            answer.cancel()
            return Response(status_code=499)
        return Response(wire.dump_completion(answer.result()), media_type="application/octet-stream")

    routes = [Route("/generate", generate, methods=["POST"])]
    routes += [Route(verb.path, _handler(verb, getattr(gate, verb.name)), methods=[verb.http]) for verb in wire.VERBS.values()]
    statuses = {BadRequest: 400, EngineUnavailable: wire.UNAVAILABLE, EngineError: 409, WeightError: 409, Exception: 500}
    handlers: dict[Any, Any] = {kind: _error_handler(status) for kind, status in statuses.items()}
    return Starlette(routes=routes, exception_handlers=handlers)


def _handler(verb: wire.Verb, call: Callable[..., Awaitable[Any]]) -> Handler:
    async def handle(request: HTTPRequest) -> Response:
        answer = await call(**await _parsed(request, verb.parse))
        return Response(verb.answer.dump_json(answer), media_type="application/json")

    return handle


async def _parsed(request: HTTPRequest, parse: Callable[[bytes], T]) -> T:
    try:
        return parse(await request.body())
    except ValidationError as error:
        raise BadRequest(str(error)) from error


def _error_handler(status: int) -> Callable[[HTTPRequest, Exception], Awaitable[Response]]:
    async def handle(request: HTTPRequest, error: Exception) -> Response:
        text = str(error) if status < 500 else f"{type(error).__name__}: {error}"
        return Response(wire.ERROR.dump_json(wire.ErrorBody(error=text)), status_code=status, media_type="application/json")

    return handle
