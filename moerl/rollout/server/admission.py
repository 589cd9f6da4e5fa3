"""Defence of a server against strangers: requests without the run's secret, and connections on which no request comes."""

import asyncio
import resource
import time
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from moerl.cluster.run_secret import RunSecret
from moerl.rollout.server import wire

REQUEST_SECONDS = 10.0
"""Time from a connection to the end of its first request's headers: the run's own send them at once."""

GRACE_SECONDS = 1.0
"""Time that every connection has for it, however many wait."""

_REFUSAL = Response(
    wire.ERROR.dump_json(wire.ErrorBody(error="the request does not carry the secret of this server's run")),
    status_code=wire.STRANGER,
    headers={"connection": "close"},
    media_type="application/json",
)


class Admission:
    """An app for requests that carry the run's secret. Others are refused by their headers alone, and their connection is closed."""

    def __init__(self, app: ASGIApp, secret: RunSecret):
        self._app, self._secret = app, secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        authorization = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        app = self._app if self._secret.admits(authorization) else _REFUSAL
        await app(scope, receive, send)


class TimedConnection(H11Protocol):
    """One of uvicorn's connections that ends if its first request is late; uvicorn's own waits for ever.

    Without a request they take at most half of the files that the process may open: then the oldest gives way to a new one.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = time.monotonic()
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._end_if_silent)
        if len(self.connections) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    def _end_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.abort()

    def _make_room(self) -> None:
        connections: set[Any] = self.connections  # all of this class
        silent = [connection for connection in connections if connection.cycle is None]
        oldest = min(silent, key=lambda connection: connection._since)
        if self._since - oldest._since > GRACE_SECONDS:
            oldest.transport.abort()
