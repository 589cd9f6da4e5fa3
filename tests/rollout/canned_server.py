"""A rollout server without a model: what it answers follows from the name of the request. A process of its own.

part-N: the first N tokens, as a push would leave them; when asked for the rest, the rest. held: nothing, ever. refuse: that the request is
wrong. garbage: tokens outside the vocabulary. die: the process ends. Any other: `max_tokens` tokens.
"""

import asyncio
import json
import os
import socket

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moerl.rollout.server import wire
from moerl.rollout.server.app import Answers
from moerl.rollout.server.messages import parse_requests
from moerl.types.completion import Completion, SamplingParams, ServerLoad, VersionSpan

VOCAB, LAYERS, TOP_K, EXPERTS = 1000, 4, 2, 8
dropped: list[str] = []
sizes: list[int] = []
aborted = asyncio.Event()


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(ord("a") + token % 26) for token in token_ids)


def token_at(position: int) -> int:
    """Of the response."""
    return position * 7 % VOCAB


def answer(request_id: str, num_prompt: int, sampling: SamplingParams) -> Completion:
    first, end, reason = sampling.num_drawn, sampling.num_drawn + sampling.max_tokens, "length"
    if request_id.startswith("part-") and first == 0:
        end, reason = int(request_id.removeprefix("part-")), "abort"
    tokens = [VOCAB if request_id == "garbage" else token_at(position) for position in range(first, end)]
    position = np.arange(num_prompt + len(tokens) - 1)[:, None, None]
    routes = (position + np.arange(LAYERS)[:, None] + np.arange(TOP_K)) % EXPERTS
    return Completion(
        request_id=request_id,
        token_ids=tuple(tokens),
        logprobs=tuple(-0.25 * (token % 4) for token in tokens),
        spans=(VersionSpan(version=1 + (first > 0), num_tokens=len(tokens)),),
        finish_reason=reason,  # type: ignore[arg-type]
        routes=routes.astype(np.uint8) if sampling.returns_routes else None,
        load=ServerLoad(cache_share=0.75, num_preempted=3),
    )


async def content(asked: wire.GenerateRequest) -> tuple[int, bytes]:
    if asked.request_id == "die":
        os._exit(3)
    if asked.request_id == "refuse":
        return 400, wire.ERROR.dump_json(wire.ErrorBody(error="refuse: is refused"))
    if asked.request_id == "held":
        try:
            await aborted.wait()
        finally:
            dropped.append("held")
    return 200, wire.dump_completion(answer(asked.request_id, len(asked.prompt_ids), asked.sampling))


async def generate(request: Request) -> Response:
    requests = parse_requests(await request.body())
    sizes.append(len(requests))
    return Answers([content(asked) for asked in requests])


async def abort(request: Request) -> Response:
    assert await request.json() == {"request_ids": ["held"]}
    aborted.set()
    return JSONResponse(None)


async def list_sizes(_: Request) -> Response:
    """Requests in each message so far."""
    return JSONResponse(sizes)


async def list_dropped(_: Request) -> Response:
    return JSONResponse(dropped)


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    routes = [Route("/generate", generate, methods=["POST"]), Route("/abort", abort, methods=["POST"])]
    app = Starlette(routes=[*routes, Route("/dropped", list_dropped), Route("/sizes", list_sizes)])
    uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_keep_alive=75)).run([listener])


if __name__ == "__main__":
    main()
