"""The server process around an engine: its options, and from them to the first request. Runs in the engine's environment."""

import argparse
import asyncio
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from moerl.config.derive.model_shape import read_config, shape_of_config
from moerl.config.schema.rollout_config import ServerLayout
from moerl.rollout.server import wire
from moerl.rollout.server.app import build_app
from moerl.rollout.server.child import ChildServer, exit_with_owner, listen, private_stdout, report_error
from moerl.rollout.server.engine_core import Core
from moerl.rollout.server.gate import Gate
from moerl.rollout.server.limits import Limits
from moerl.rollout.server.server_options import Options
from moerl.types.errors import EngineError, Problem

logger = logging.getLogger(__name__)

PROBLEMS = TypeAdapter(list[Problem])
LAYOUT = TypeAdapter(ServerLayout)


FindProblems = Callable[[Mapping[str, Any], Mapping[str, Any] | None], list[Problem]]
"""Of the installed version, of engine_args, and of a model's config.json if it is known."""


def main(
    name: str,
    *,
    find_problems: FindProblems,
    start: Callable[[Options], Core],
    follow: Callable[[Options], None],
) -> None:
    """`name`: of the package after moerl.rollout.engines. `start` runs in the event loop and returns when the engine has loaded the model.
    `follow`: instead of it on a server's other nodes; returns when the server ends."""
    parsed = _parse(name)
    ready = private_stdout()
    arguments = json.loads(parsed.engine_args)
    if parsed.check:
        ready.write(PROBLEMS.dump_json(find_problems(arguments, json.loads(parsed.model_config))))
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    threading.Thread(target=exit_with_owner, name="owner", daemon=True).start()
    layout = LAYOUT.validate_json(parsed.layout)
    if parsed.head_port is not None:
        layout = replace(layout, port=parsed.head_port)
    options = Options(
        model=parsed.model,
        dtype=parsed.dtype,
        max_context=parsed.max_context,
        max_running=parsed.max_running,
        prefill_chunk=parsed.prefill_chunk,
        returns_routes=parsed.returns_routes,
        shares_gpus=parsed.shares_gpus,
        engine_args=arguments,
        layout=layout,
        node_rank=parsed.node_rank,
        head=parsed.head,
        host=parsed.host,
    )
    try:
        if problems := find_problems(arguments, read_config(options.model)):
            raise EngineError("\n".join(map(str, problems)))
        if layout.nodes > 1:
            ready.write(wire.READY.dump_json(wire.ReadyLine(arrived=True)) + b"\n")
        if options.node_rank > 0:
            follow(options)
        else:
            asyncio.run(_serve(options, parsed.host, parsed.port, ready, start))
    except EngineError as error:
        report_error(ready, error)
        sys.exit(1)
    logging.shutdown()
    os._exit(0)


async def _serve(options: Options, host: str, port: int, ready: Any, start: Callable[[Options], Core]) -> None:
    listener = listen(host, port)
    model = read_config(options.model)
    core = start(options)
    gate = Gate(core, max_running=options.max_running, loop=asyncio.get_running_loop())
    routes = shape_of_config(model).routes if options.returns_routes else None
    limits = Limits(max_context=options.max_context, vocab_size=model["vocab_size"], routes=routes)
    await ChildServer(build_app(gate, limits), gate, ready).serve(sockets=[listener])


def _parse(name: str, line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m moerl.rollout.engines.{name}.{name}_server", description=f"Serve a model with {name} for rollouts."
    )
    parser.add_argument("--check", action="store_true", help="print what is wrong with --engine-args and the model, as JSON, and end")
    parser.add_argument("--model-config", default="null", help="JSON of the model's config.json, for --check")
    parser.add_argument("--model", type=Path, help="directory of a Hugging Face checkpoint")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--max-context", type=int, help="prompt and response together, in tokens")
    parser.add_argument("--max-running", type=int, help="requests decoded together")
    parser.add_argument("--prefill-chunk", type=int, help="prompt tokens computed per iteration")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--returns-routes", action="store_true", help="requests may ask for the experts of their tokens")
    parser.add_argument("--shares-gpus", action="store_true", help="with the trainer: the server must be able to sleep")
    parser.add_argument("--engine-args", default="{}", help="JSON: the engine's own arguments by name")
    parser.add_argument("--layout", default="{}", help="JSON: rollout.layout")
    parser.add_argument("--node-rank", type=int, default=0, help="of this process among the nodes of the server")
    parser.add_argument("--head", default="127.0.0.1", help="host of node 0")
    parser.add_argument("--head-port", type=int, help="there, where the nodes meet; default: the layout's")
    return parser.parse_args(line)
