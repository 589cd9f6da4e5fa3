"""From the configuration to the run's rollout engines."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moerl.config.engines import interpreter
from moerl.config.model_shape import read_config, shape_of_config
from moerl.config.router_replay import routes_to_replay
from moerl.config.schema import RolloutConfig, RunConfig
from moerl.config.server_layout import ServerLayout
from moerl.rollout.engine import RolloutEngine
from moerl.rollout.http_engine import HTTPEngine
from moerl.rollout.limits import Limits


def build_engines(config: RunConfig, model_dir: Path, log_dir: Path) -> list[RolloutEngine]:
    """One engine per server, not yet started. `model_dir`: a Hugging Face checkpoint directory, of which the engines read the
    configuration only: weights come by a push. Servers log to log_dir/rollout-N.log."""
    build = ENGINES[config.rollout.engine]
    return [build(config, model_dir, log_dir, index) for index in range(config.rollout.num_servers)]


def _build_hf(config: RunConfig, model_dir: Path, log_dir: Path, index: int) -> RolloutEngine:
    extra = ["--deterministic"] if config.deterministic else []
    return _start_by("moerl.rollout.hf", extra, config, model_dir, log_dir, index)


def _build_native(config: RunConfig, model_dir: Path, log_dir: Path, index: int) -> RolloutEngine:
    """In an environment of its own, on this host: a server of one node."""
    return _engine(native_command(config, model_dir, index), config, log_dir, index)


def native_command(config: RunConfig, model_dir: Path, index: int, *, node_rank: int = 0, head: str | None = None) -> list[str]:
    """What starts the process of one node of server `index`. All of a server's nodes are started together, with the same `head`, the host of
    node 0 (None: rollout.host); node 0 alone reports a port and serves."""
    layout = config.rollout.layout
    extra = ["--engine-args", json.dumps(config.rollout.engine_args)]
    if layout != ServerLayout():
        extra += ["--layout", json.dumps(given_layout(layout))]
    if layout.nodes > 1:
        extra += ["--node-rank", str(node_rank), "--head", config.rollout.host if head is None else head]
    if routes_to_replay(config) is not None:
        extra.append("--returns-routes")
    return _command(f"moerl.rollout.{config.rollout.engine}.server", extra, config, model_dir, index)


def given_layout(layout: ServerLayout) -> dict[str, Any]:
    """Its fields that are not the defaults."""
    return {name: value for name, value in asdict(layout).items() if value != getattr(ServerLayout(), name)}


def _start_by(module: str, extra: list[str], config: RunConfig, model_dir: Path, log_dir: Path, index: int) -> RolloutEngine:
    return _engine(_command(module, extra, config, model_dir, index), config, log_dir, index)


def _command(module: str, extra: list[str], config: RunConfig, model_dir: Path, index: int) -> list[str]:
    rollout = config.rollout
    options = {
        "--model": model_dir,
        "--dtype": config.rollout_dtype,
        "--max-context": config.model.max_context,
        "--max-running": rollout.max_running,
        "--prefill-chunk": rollout.prefill_chunk,
        "--host": rollout.host,
        "--port": _port(rollout, index),
    }
    return [interpreter(rollout), "-m", module, *(str(part) for option in options.items() for part in option), *extra]


def _engine(command: list[str], config: RunConfig, log_dir: Path, index: int) -> RolloutEngine:
    rollout = config.rollout
    log_path = log_dir / f"rollout-{index}.log"
    port = _port(rollout, index)
    return HTTPEngine(command, host=rollout.host, port=port, log_path=log_path, start_seconds=rollout.start_seconds)


def _port(rollout: RolloutConfig, index: int) -> int:
    return rollout.port + index if rollout.port else 0


def _build_fake(config: RunConfig, model_dir: Path, log_dir: Path, index: int) -> RolloutEngine:
    # torch and transformers are imported for this engine only.
    import torch

    from moerl.rollout.fake import FakeEngine
    from moerl.rollout.hf.model import checkpoint_specs

    model = read_config(model_dir)
    return FakeEngine(
        f"fake-{index}",
        limits=Limits(max_context=config.model.max_context, vocab_size=model["vocab_size"], routes=shape_of_config(model).routes),
        expected=checkpoint_specs(model_dir, getattr(torch, config.rollout_dtype)),
        max_running=config.rollout.max_running,
    )


ENGINES: dict[str, Callable[[RunConfig, Path, Path, int], RolloutEngine]] = {
    "hf": _build_hf,
    "sglang": _build_native,
    "fake": _build_fake,
}
