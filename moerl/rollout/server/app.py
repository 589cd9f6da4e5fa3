"""HTTP in front of a state. Tokens in, tokens out; nothing here but parsing, checks and waiting."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from moerl.rollout.server import messages, wire
from moerl.rollout.server.limits import PUSH_BYTES, Limits, push_violation
from moerl.rollout.server.server_state import ServerState
from moerl.rollout.server.wire import GenerateRequest
from moerl.types.errors import EngineError, EngineUnavailable, WeightError

T = TypeVar("T")
Handler = Callable[[HTTPRequest], Awaitable[Response]]


class BadRequest(Exception):
    """Becomes status 400."""


class TooLarge(Exception):
    """Becomes status 413, and ends the connection: the rest of the body is not read."""


_STATUSES: dict[type[Exception], int] = {
    BadRequest: 400, ClientDisconnect: 400, TooLarge: 413, EngineUnavailable: wire.UNAVAILABLE, EngineError: 409, WeightError: 409,
    Exception: 500,
}  # fmt: skip
"""The first that fits. Nobody hears that of a client which went away within its body."""


def build_app(state: ServerState, limits: Limits) -> Starlette:
    async def generate(request: HTTPRequest) -> Response:
        asked = await _parsed(request, messages.parse_requests, limits.body_bytes + messages.MORE_BYTES)
        return Answers([_content(state, limits, each) for each in asked])

    routes = [Route("/generate", generate, methods=["POST"])]
    for verb in wire.VERBS.values():
        handler = _handler(verb, getattr(state, verb.name), PUSH_BYTES if verb.is_of_push else limits.body_bytes)
        routes.append(Route(verb.path, handler, methods=[verb.http]))
    handlers: dict[Any, Any] = dict.fromkeys(_STATUSES, _refuse)
    return Starlette(routes=routes, exception_handlers=handlers)


class Answers(Response):
    """Stream of the answers to a message, each as soon as it is there; those of one turn of the event loop leave together.

    Requests of a client that goes away end early, and free their slots.
    """

    def __init__(self, contents: Sequence[Coroutine[Any, Any, tuple[int, bytes]]]):
        """`contents`: status and content of each frame, in the order of the requests."""
        super().__init__(media_type="application/octet-stream")
        del self.headers["content-length"]  # nobody knows it yet
        self._contents = contents
        self._frames: list[bytes] = []
        self._changed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        tasks = [asyncio.create_task(self._answer(place, content)) for place, content in enumerate(self._contents)]
        gone = asyncio.ensure_future(receive())  # after the body, the next message is the disconnect
        gone.add_done_callback(lambda _: self._changed.set())
        try:
            left = len(tasks)
            while left and not gone.done():
                await self._changed.wait()
                self._changed.clear()
                frames, self._frames = self._frames, []
                left -= len(frames)
                *pieces, last = messages.pieces_of(frames)
                for piece in pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": last, "more_body": left > 0})
        finally:
            for task in (gone, *tasks):
                task.cancel()

    async def _answer(self, place: int, content: Coroutine[Any, Any, tuple[int, bytes]]) -> None:
        frame = messages.dump_frame(place, *await content)
        self._frames.append(frame)  # to the list that is there now, and not to the one of before the wait
        self._changed.set()


async def _content(state: ServerState, limits: Limits, request: GenerateRequest) -> tuple[int, bytes]:
    """Status and content of the answer."""
    try:
        if violation := limits.violation(request.prompt_ids, request.sampling):
            raise BadRequest(f"{request.request_id}: {violation}")
        completion = await state.generate(request.prompt_ids, request.sampling, request.request_id)
        return 200, wire.dump_completion(completion)
    except Exception as error:
        return _refusal(error)


def _handler(verb: wire.Verb, call: Callable[..., Awaitable[Any]], max_bytes: int) -> Handler:
    async def handle(request: HTTPRequest) -> Response:
        arguments = await _parsed(request, verb.parse, max_bytes)
        if violation := push_violation(**arguments):
            raise BadRequest(violation)
        answer = await call(**arguments)
        return Response(verb.answer.dump_json(answer), media_type="application/json")

    return handle


async def _parsed(request: HTTPRequest, parse: Callable[[bytes], T], max_bytes: int) -> T:
    body = await _body(request, max_bytes)
    try:
        return parse(body)
    except ValueError as error:  # pydantic's too
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


async def _refuse(request: HTTPRequest, error: Exception) -> Response:
    status, content = _refusal(error)
    headers = {"connection": "close"} if isinstance(error, TooLarge) else None
    return Response(content, status_code=status, headers=headers, media_type="application/json")


def _refusal(error: Exception) -> tuple[int, bytes]:
    """Status and content of the answer."""
    status = next(status for kind, status in _STATUSES.items() if isinstance(error, kind))
    said = f"{type(error).__name__}: {error}" if status == 500 else str(error)
    return status, wire.ERROR.dump_json(wire.ErrorBody(error=said))
