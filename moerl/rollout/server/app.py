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
from moerl.rollout.server.limits import PUSH_BYTES, Limits, push_violation
from moerl.types.errors import EngineError, EngineUnavailable, WeightError

T = TypeVar("T")
Handler = Callable[[HTTPRequest], Awaitable[Response]]


class BadRequest(Exception):
    """Becomes status 400."""


class TooLarge(Exception):
    """Becomes status 413, and ends the connection: the rest of the body is not read."""


def build_app(gate: Gate, limits: Limits) -> Starlette:
    async def generate(request: HTTPRequest) -> Response:
        """Ends early, and frees the slot, when the client goes away."""
        body = await _parsed(request, wire.GENERATE.validate_json, limits.body_bytes)
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
    for verb in wire.VERBS.values():
        handler = _handler(verb, getattr(gate, verb.name), PUSH_BYTES if verb.is_of_push else limits.body_bytes)
        routes.append(Route(verb.path, handler, methods=[verb.http]))
    statuses = {BadRequest: 400, TooLarge: 413, EngineUnavailable: wire.UNAVAILABLE, EngineError: 409, WeightError: 409, Exception: 500}
    handlers: dict[Any, Any] = {kind: _error_handler(status) for kind, status in statuses.items()}
    return Starlette(routes=routes, exception_handlers=handlers)


def _handler(verb: wire.Verb, call: Callable[..., Awaitable[Any]], max_bytes: int) -> Handler:
    async def handle(request: HTTPRequest) -> Response:
        arguments = await _parsed(request, verb.parse, max_bytes)
        if violation := push_violation(arguments):
            raise BadRequest(violation)
        answer = await call(**arguments)
        return Response(verb.answer.dump_json(answer), media_type="application/json")

    return handle


async def _parsed(request: HTTPRequest, parse: Callable[[bytes], T], max_bytes: int) -> T:
    body = await _body(request, max_bytes)
    try:
        return parse(body)
    except ValidationError as error:
        raise BadRequest(str(error)) from error


async def _body(request: HTTPRequest, max_bytes: int) -> bytes:
    """Whether it says its length beforehand or comes in chunks, at most `max_bytes` of it are kept."""
    said, body = request.headers.get("content-length", "0"), bytearray()
    if int(said) > max_bytes:  # digits, which the protocol has seen to
        raise TooLarge(f"a body of {said} bytes: must be at most {max_bytes}")
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise TooLarge(f"a body of more than {max_bytes} bytes")
    return bytes(body)


def _error_handler(status: int) -> Callable[[HTTPRequest, Exception], Awaitable[Response]]:
    async def handle(request: HTTPRequest, error: Exception) -> Response:
        text = str(error) if status < 500 else f"{type(error).__name__}: {error}"
        body, headers = wire.ERROR.dump_json(wire.ErrorBody(error=text)), {"connection": "close"} if isinstance(error, TooLarge) else None
        return Response(body, status_code=status, headers=headers, media_type="application/json")

    return handle
