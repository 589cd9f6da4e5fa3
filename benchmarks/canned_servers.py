"""Rollout servers that answer every request with the same bytes, each in a process of its own, and engines that are connected to them."""

import asyncio
import json
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moerl.cluster.run_secret import RunSecret
from moerl.rollout.server.app import Answers
from moerl.rollout.server.client import HTTPEngine, new_session
from moerl.rollout.server.messages import parse_requests
from moerl.rollout.server.server_main import listen

SECRET = RunSecret.new()
"""These servers ask nobody for it."""

ID = "R"
"""Of the completion in the servers' content; every answer has its request's instead. Encoding is not measured."""


class Connected(HTTPEngine):
    """To a server that runs already."""

    def __init__(self, port: int):
        self.name, self.host, self.authority = f"127.0.0.1:{port}", "127.0.0.1", None
        self._reading = set()

    async def start(self) -> None:
        self._session = new_session(SECRET)

    async def ended(self) -> Any:
        await asyncio.Event().wait()

    async def close(self) -> None:
        assert self._session is not None
        await self._session.close()


@contextmanager
def canned_servers(content: bytes, *, num_running: int, seconds: float = 0.0) -> Iterator[list[Connected]]:
    """Two. `content`: what they answer, after so many `seconds`; each has `num_running` requests at a time."""
    context = multiprocessing.get_context("spawn")
    servers, engines = [], []
    try:
        for _ in range(2):
            ours, theirs = context.Pipe()
            server = context.Process(target=_serve, args=(theirs, content, num_running, seconds), daemon=True)
            server.start()
            servers.append(server)
            engines.append(Connected(ours.recv()))
        yield engines
    finally:
        for server in servers:
            server.terminate()
            server.join()


def _serve(answer: Connection, content: bytes, num_running: int, seconds: float) -> None:
    before, after = content.split(json.dumps(ID).encode(), 1)
    free = asyncio.Semaphore(num_running)

    async def answer_to(request_id: str) -> tuple[int, bytes]:
        async with free:
            await asyncio.sleep(seconds)
        return 200, b"".join([before, json.dumps(request_id).encode(), after])

    async def generate(request: Request) -> Response:
        return Answers([answer_to(each.request_id) for each in parse_requests(await request.body())])

    listener = listen("127.0.0.1", 0)
    answer.send(listener.getsockname()[1])
    app = Starlette(routes=[Route("/generate", generate, methods=["POST"])])
    uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_keep_alive=600)).run([listener])
