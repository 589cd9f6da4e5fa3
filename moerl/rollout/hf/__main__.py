"""The server process: `python -m moerl.rollout.hf --model DIR ...`.

It writes one line of JSON to stdout when it serves (wire.ReadyLine), logs to stderr, and ends with SIGTERM or when its stdin ends:
whoever started it holds the other end, so it cannot outlive its owner.
"""

import argparse
import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from transformers.utils.logging import disable_progress_bar

from moerl.rollout import wire
from moerl.rollout.hf.forward import Forward
from moerl.rollout.hf.model import checkpoint_views, load_model, tensor_specs
from moerl.rollout.hf.scheduler import Scheduler
from moerl.rollout.hf.server import build_app
from moerl.rollout.hf.worker import Worker
from moerl.rollout.limits import Limits
from moerl.types import EngineError
from moerl.weights.receive import WeightSession

logger = logging.getLogger("moerl.rollout.hf")

SHUTDOWN_SECONDS = 3
"""For answers that are being written at SIGTERM."""

KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections (15 s), so that none is closed just as it is used again."""


def main() -> None:
    options = _parse_options()
    ready = _private_stdout()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    disable_progress_bar()
    threading.Thread(target=_exit_with_owner, name="owner", daemon=True).start()
    torch.set_num_threads(1)
    try:
        listener = _listen(options.host, options.port)
        worker, limits = _build(options)
    except EngineError as error:
        ready.write(wire.READY.dump_json(wire.ReadyLine(error=str(error))) + b"\n")
        sys.exit(1)
    worker.start()
    asyncio.run(_Server(worker, limits, ready).serve(sockets=[listener]))
    logging.shutdown()
    os._exit(0)  # everything is closed; the interpreter's teardown of torch would take another second


class _Server(uvicorn.Server):
    """Reports readiness when it accepts requests, and does not wait for held requests when it is told to end."""

    def __init__(self, worker: Worker, limits: Limits, ready: Any):
        super().__init__(
            uvicorn.Config(
                build_app(worker, limits),
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
        )
        self._worker, self._ready = worker, ready

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
        await asyncio.to_thread(self._worker.close)
        await super().shutdown(sockets)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m moerl.rollout.hf", description="Serve a transformers model for rollouts.")
    parser.add_argument("--model", type=Path, required=True, help="directory of a Hugging Face checkpoint")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--max-context", type=int, required=True, help="prompt and response together, in tokens")
    parser.add_argument("--max-running", type=int, required=True, help="requests decoded together")
    parser.add_argument("--prefill-chunk", type=int, required=True, help="prompt tokens of one request per iteration")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--deterministic", action="store_true", help="fixed shapes: a completion does not depend on its neighbours")
    parser.add_argument("--load", choices=["dummy", "checkpoint"], default="dummy", help="dummy: stale until weights are pushed")
    return parser.parse_args()


def _private_stdout() -> Any:
    """The real stdout, for the ready line alone; whatever libraries print goes to stderr."""
    ready = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return ready


def _exit_with_owner() -> None:
    while os.read(0, 4096):
        pass
    logger.warning("stdin ended: the owner of this server is gone")
    os._exit(1)


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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


def _build(options: argparse.Namespace) -> tuple[Worker, Limits]:
    model = load_model(
        options.model,
        dtype=getattr(torch, options.dtype),
        load=options.load,
        deterministic=options.deterministic,
        max_context=options.max_context,
    )
    forward = Forward(
        model,
        num_slots=options.max_running,
        max_context=options.max_context,
        prefill_chunk=options.prefill_chunk,
        deterministic=options.deterministic,
    )
    views = checkpoint_views(model)
    session = WeightSession(tensor_specs(views), lambda name, tensor: views[name].copy_(tensor), read=views.__getitem__)
    scheduler = Scheduler(forward, max_context=options.max_context)
    version = 0 if options.load == "checkpoint" else None
    worker = Worker(scheduler, session, version=version, on_crash=lambda: os._exit(1))
    return worker, Limits(max_context=options.max_context, vocab_size=forward.vocab_size, routes=forward.routes)


if __name__ == "__main__":
    main()
