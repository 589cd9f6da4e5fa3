"""The child's side of moerl.rollout.server.server_process: a server that reports its port on stdout and ends with whoever started it."""

import argparse
import asyncio
import errno
import faulthandler
import logging
import os
import re
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn

from moerl.cluster.run_secret import RunSecret
from moerl.cluster.sockets import server_context
from moerl.hangs.python_stacks import answer_stack_requests
from moerl.rollout.server import wire
from moerl.rollout.server.app import build_app
from moerl.rollout.server.contract import Core
from moerl.rollout.server.limits import Limits
from moerl.rollout.server.secret_gate import SecretGate, TimedConnection, TLSConnection
from moerl.rollout.server.server_state import ServerState
from moerl.types.errors import EngineError

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 3
"""Time for answers that are being written at SIGTERM."""

MAX_SECRET_BYTES = 1024
"""Length of the first line of stdin, at most."""

KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections (15 s), so that none is closed just as it is used again."""


class _ChildServer(uvicorn.Server):
    """Reports readiness when it accepts requests, and does not wait for held requests when it is told to end."""

    def __init__(self, state: ServerState, limits: Limits, secret: RunSecret, ready: Any, tls: ssl.SSLContext | None = None):
        super().__init__(
            uvicorn.Config(
                SecretGate(build_app(state, limits), secret),
                http=TimedConnection if tls is None else partial(TLSConnection, tls),  # type: ignore[arg-type]
                ws="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
        )
        self._state, self._ready = state, ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own would end the process by the signal once more, after it has shut down."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.handle_exit, number, None)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets is not None
        port = sockets[0].getsockname()[1]
        self._ready.write(wire.READY.dump_json(wire.ReadyLine(port=port)) + b"\n")
        self._ready.close()
        logger.info("serving on port %d", port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._state.close()
        await super().shutdown(sockets)


@contextmanager
def running(ready: Any) -> Iterator[RunSecret]:
    """The block is the process's work, and the process ends with it: an EngineError is reported to the owner."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        secret = _read_secret()
        threading.Thread(target=_exit_with_owner, name="owner", daemon=True).start()
        yield secret
    except EngineError as error:
        ready.write(wire.READY.dump_json(wire.ReadyLine(error=str(error))) + b"\n")
        sys.exit(1)
    logging.shutdown()
    os._exit(0)  # everything is closed; the interpreter's teardown of torch would take another second


async def serve(
    options: argparse.Namespace, ready: Any, secret: RunSecret, start: Callable[[], tuple[Core, Limits]], *, version: int | None = None
) -> None:
    """Until SIGTERM. `start` returns when the engine has loaded its model, whose weights have `version`."""
    tls = None if options.tls is None else server_context(*options.tls)
    listener = listen(options.host, options.port)
    core, limits = start()
    state = ServerState(core, max_running=options.max_running, version=version)
    await _ChildServer(state, limits, secret, ready, tls).serve(sockets=[listener])


def private_stdout() -> Any:
    """The real stdout, for the ready line alone; whatever libraries print goes to stderr, and so do the stacks at a crash. To be called
    first: the process also heeds the signals that Ray's processes in a Slurm job, and what they start, are kept from."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGUSR1})
    faulthandler.enable()
    answer_stack_requests()
    ready = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return ready


def _read_secret() -> RunSecret:
    """The first line of stdin."""
    line = b""
    while not line.endswith(b"\n") and len(line) < MAX_SECRET_BYTES and (byte := os.read(0, 1)):
        line += byte
    text = line.decode(errors="replace")
    if not re.fullmatch(r"[0-9A-Za-z]{32,}\r?\n", text):
        raise EngineError(
            "stdin: must begin with a line of at least 32 letters and digits, the secret that every request must carry, and stay open; "
            "whoever reaches the port could change the weights otherwise. By hand: (openssl rand -hex 32 | tee secret; cat) | python -m ..."
        )
    return RunSecret(key=text.strip())


def _exit_with_owner() -> None:
    """Blocks on stdin, whose other end the owner holds."""
    while os.read(0, 4096):
        pass
    logger.warning("stdin ended: the owner of this server is gone")
    os._exit(1)


def listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Its connections inherit it. asyncio sets it only where the protocol is given by number; without it the second packet of every answer
    # waits for the client's delayed acknowledgement, 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise EngineError(f"rollout.host = {host!r}, rollout.port = {port}: cannot listen there: {error}") from error
        raise EngineError(
            f"rollout.port = {port}: port is in use on {host}; another program, or another run, listens there. Set rollout.port=0 to let "
            "the system choose, or choose a free one"
        ) from error
    return listener
