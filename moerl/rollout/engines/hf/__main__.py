"""The server process: `python -m moerl.rollout.engines.hf --model DIR ...`.

It writes one line of JSON to stdout when it serves (wire.ReadyLine), logs to stderr, and ends with SIGTERM or when its stdin ends:
whoever started it holds the other end, so it cannot outlive its owner.
"""

import argparse
import asyncio
import logging
import os
import sys
import threading
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from moerl.rollout.engines.hf.forward import Forward
from moerl.rollout.engines.hf.fp8_weights import FP8Weights
from moerl.rollout.engines.hf.hf_model import checkpoint_views, load_model, tensor_specs
from moerl.rollout.engines.hf.hf_worker import GenerationThread
from moerl.rollout.engines.hf.scheduler import Scheduler
from moerl.rollout.server.app import build_app
from moerl.rollout.server.child import ChildServer, exit_with_owner, listen, private_stdout, report_error
from moerl.rollout.server.limits import Limits
from moerl.types.errors import EngineError
from moerl.weights.plan.fp8_pairs import in_fp8
from moerl.weights.receive import WeightSession

logger = logging.getLogger("moerl.rollout.engines.hf")


def main() -> None:
    options = _parse_options()
    ready = private_stdout()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    disable_progress_bar()
    threading.Thread(target=exit_with_owner, name="owner", daemon=True).start()
    torch.set_num_threads(1)
    try:
        listener = listen(options.host, options.port)
        worker, limits = _build(options)
    except EngineError as error:
        report_error(ready, error)
        sys.exit(1)
    worker.start()
    asyncio.run(ChildServer(build_app(worker, limits), worker, ready).serve(sockets=[listener]))
    logging.shutdown()
    os._exit(0)  # everything is closed; the interpreter's teardown of torch would take another second


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m moerl.rollout.engines.hf", description="Serve a transformers model for rollouts.")
    parser.add_argument("--model", type=Path, required=True, help="directory of a Hugging Face checkpoint")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--max-context", type=int, required=True, help="prompt and response together, in tokens")
    parser.add_argument("--max-running", type=int, required=True, help="requests decoded together")
    parser.add_argument("--prefill-chunk", type=int, required=True, help="prompt tokens of one request per iteration")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--deterministic", action="store_true", help="fixed shapes: a completion does not depend on its neighbours")
    parser.add_argument("--fp8-weights", action="store_true", help="pushes bring what published checkpoints quantize in blocks of FP8")
    parser.add_argument("--load", choices=["dummy", "checkpoint"], default="dummy", help="dummy: stale until weights are pushed")
    return parser.parse_args()


def _build(options: argparse.Namespace) -> tuple[GenerationThread, Limits]:
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
    session = _session(views, takes_fp8=options.fp8_weights)
    scheduler = Scheduler(forward, max_context=options.max_context)
    version = 0 if options.load == "checkpoint" else None
    worker = GenerationThread(scheduler, session, version=version, on_crash=lambda: os._exit(1))
    return worker, Limits(max_context=options.max_context, vocab_size=forward.vocab_size, routes=forward.routes)


def _session(views: dict[str, torch.Tensor], *, takes_fp8: bool) -> WeightSession:
    if not takes_fp8:
        return WeightSession(tensor_specs(views), lambda name, tensor: views[name].copy_(tensor), read=views.__getitem__)
    expected = in_fp8(tensor_specs(views).values())
    weights = FP8Weights(views, expected)
    return WeightSession(expected, weights.load, read=weights.read)


if __name__ == "__main__":
    main()
