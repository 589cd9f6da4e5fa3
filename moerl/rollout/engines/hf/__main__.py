"""The server process: `python -m moerl.rollout.engines.hf --model DIR ...`.

The first line of its stdin is the secret that every request must carry. It writes one line of JSON to stdout when it serves
(wire.ReadyLine), logs to stderr, and ends with SIGTERM or when its stdin ends: whoever started it holds the other end, so it cannot outlive
its owner. By hand:

    (openssl rand -hex 32 | tee secret; cat) | python -m moerl.rollout.engines.hf --model DIR ... --port 8000
    curl -H "Authorization: Bearer $(cat secret)" http://127.0.0.1:8000/health
"""

import argparse
import asyncio
from functools import partial

from moerl.models.transformers_table import keep_table

keep_table()  # not in the package's __init__: environments of other engines, which lack what it needs, import that

import torch
from transformers.utils.logging import disable_progress_bar

from moerl.rollout.engines.engine_arguments import add_options
from moerl.rollout.engines.hf.forward import Forward
from moerl.rollout.engines.hf.fp8_weights import FP8Weights
from moerl.rollout.engines.hf.hf_core import HFCore
from moerl.rollout.engines.hf.hf_model import checkpoint_views, load_model, tensor_specs
from moerl.rollout.engines.hf.scheduler import Scheduler
from moerl.rollout.server.limits import Limits
from moerl.rollout.server.server_main import private_stdout, running, serve
from moerl.weights.installation import Loader
from moerl.weights.plan.fp8_pairs import in_fp8
from moerl.weights.verify.places import copy_into
from moerl.weights.weight_session import WeightSession


def main() -> None:
    options = _parse_options()
    version = 0 if options.load == "checkpoint" else None
    ready = private_stdout()
    disable_progress_bar()
    torch.set_num_threads(1)
    with running(ready) as secret:
        asyncio.run(serve(options, ready, secret, partial(_start, options, version), version=version))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m moerl.rollout.engines.hf", description="Serve a transformers model for rollouts.")
    add_options(parser, is_required=True)
    parser.add_argument("--deterministic", action="store_true", help="fixed shapes: a completion does not depend on its neighbours")
    parser.add_argument("--fp8-weights", action="store_true", help="pushes bring what published checkpoints quantize in blocks of FP8")
    parser.add_argument("--load", choices=["dummy", "checkpoint"], default="dummy", help="dummy: stale until weights are pushed")
    return parser.parse_args()


def _start(options: argparse.Namespace, version: int | None) -> tuple[HFCore, Limits]:
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
    core = HFCore(scheduler, session, views.values(), version=version)
    return core, Limits(max_context=options.max_context, vocab_size=forward.vocab_size, routes=forward.routes, has_sets=True)


def _session(views: dict[str, torch.Tensor], *, takes_fp8: bool) -> WeightSession:
    if not takes_fp8:
        loader = Loader(load=lambda name, start, piece: copy_into(views[name], start, piece))
        return WeightSession(tensor_specs(views), loader, read=views.__getitem__)
    expected = in_fp8(tensor_specs(views).values())
    weights = FP8Weights(views, expected)
    return WeightSession(expected, Loader(load=weights.load, takes_whole=weights.is_of_pair), read=weights.read)


if __name__ == "__main__":
    main()
