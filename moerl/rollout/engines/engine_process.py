"""The server process around an engine, from its options to the first request. Runs in the engine's environment."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from moerl.config.derive.model_shape import read_config, shape_of_config
from moerl.rollout.engines.engine_arguments import Options, options_of, server_parser
from moerl.rollout.server import wire
from moerl.rollout.server.contract import Core
from moerl.rollout.server.limits import Limits
from moerl.rollout.server.server_main import private_stdout, running, serve
from moerl.types.errors import EngineError, Problem

PROBLEMS = TypeAdapter(list[Problem])

FindProblems = Callable[[Mapping[str, Any], Mapping[str, Any] | None], list[Problem]]
"""Problems of the installed version, of engine_args, and of a model's config.json if it is known."""


def main(
    name: str, *, find_problems: FindProblems, start: Callable[[Options], Core], follow: Callable[[Options], None],
    most_left: int | None = None,
) -> None:  # fmt: skip
    """`name`: of the package after moerl.rollout.engines. `start` runs in the event loop and returns when the engine has loaded the model.
    `follow`: instead of it on a server's other nodes; returns when the server ends. `most_left`: entries that it says top-k and top-p left
    of a token, at most; None: it says nothing of them."""
    parsed = server_parser(name).parse_args()
    ready = private_stdout()
    if parsed.check:
        ready.write(PROBLEMS.dump_json(find_problems(parsed.engine_args, parsed.model_config)))
        return
    if parsed.head_port is not None:
        parsed.layout = replace(parsed.layout, port=parsed.head_port)
    options = options_of(parsed)
    with running(ready) as secret:
        if problems := find_problems(options.engine_args, read_config(options.model)):
            raise EngineError("\n".join(map(str, problems)))
        if options.layout.nodes > 1:
            ready.write(wire.READY.dump_json(wire.ReadyLine(arrived=True)) + b"\n")
        if options.node_rank > 0:
            follow(options)
        else:
            asyncio.run(serve(parsed, ready, secret, partial(_start, options, start, most_left)))


def _start(options: Options, start: Callable[[Options], Core], most_left: int | None) -> tuple[Core, Limits]:
    model = read_config(options.model)
    routes = shape_of_config(model).routes if options.returns_routes else None
    sizes = {"max_context": options.max_context, "vocab_size": model["vocab_size"]}
    return start(options), Limits(**sizes, routes=routes, has_sets=most_left is not None, most_left=most_left)
