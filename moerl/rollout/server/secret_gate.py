"""Defence of a server against strangers: requests without the run's secret, and connections on which no request comes."""

import asyncio
import resource
import ssl
import time
from functools import partial
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

CLOSE_SECONDS = 1.0
"""Time for the other side of TLS to say that it closes too; it is cut off then."""

_REFUSAL = Response(
    wire.ERROR.dump_json(wire.ErrorBody(error="the request does not carry the secret of this server's run")),
    status_code=wire.STRANGER,
    headers={"connection": "close"},
    media_type="application/json",
)


class SecretGate:
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

    def send_400_response(self, msg: str) -> None:
        """Answer to what is no HTTP. A request whose body it was ends too: its answer, after this one, would be a traceback in the log."""
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        super().send_400_response(msg)

    def _end_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.abort()

    def _make_room(self) -> None:
        connections: set[Any] = self.connections  # all of this class
        silent = [connection for connection in connections if connection.cycle is None]
        oldest = min(silent, key=lambda connection: connection._since)
        if self._since - oldest._since > GRACE_SECONDS:
            oldest.transport.abort()


class TLSConnection(TimedConnection):
    """A timed connection that speaks HTTP as soon as TLS is agreed, and counts from its first packet. uvicorn's own TLS would show a
    connection after the handshake alone, before which a stranger may be silent for a minute, and as many of them as there are files."""

    def __init__(self, context: ssl.SSLContext, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._context, self._early = context, b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.pause_reading()  # what comes is the handshake's
        self._handshake = self.loop.create_task(self._agree(transport))

    def data_received(self, data: bytes) -> None:
        if self.scheme == "https":
            super().data_received(data)
        else:  # came with the last packet of the handshake
            self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio tells some ends of a handshake and not others: this is called once or twice."""
        if self in self.connections:
            super().connection_lost(exc)

    async def _agree(self, transport: asyncio.Transport) -> None:
        start = partial(self.loop.start_tls, ssl_handshake_timeout=REQUEST_SECONDS, ssl_shutdown_timeout=CLOSE_SECONDS)
        try:
            secured = await start(transport, self, self._context, server_side=True)
        except OSError as error:  # not TLS, or no trust in the certificate
            self.connection_lost(error)
            return
        if secured is None or secured.is_closing():  # ended meanwhile
            self.connection_lost(None)
            return
        H11Protocol.connection_made(self, secured)
        if self._early:
            super().data_received(self._early)
