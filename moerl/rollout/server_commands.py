"""Commands that start each process of a rollout server, and what its engine is told there. Nothing is started, and no torch imported."""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from moerl.config.derive.gpu_map import num_shared
from moerl.config.derive.model_configs import model_config, routes_to_replay
from moerl.config.rules.engine_rules import interpreter
from moerl.config.schema.rollout_config import RolloutConfig, ServerLayout
from moerl.config.schema.run_config import RunConfig
from moerl.rollout.engines.engine_arguments import as_command_line, options_of, server_parser
from moerl.rollout.engines.sglang import sglang_launch as sglang
from moerl.rollout.engines.vllm import vllm_launch as vllm

_LAUNCH: dict[str, Any] = {"sglang": sglang, "vllm": vllm}


def server_command(
    config: RunConfig, model_dir: Path, index: int, *, host: str = "127.0.0.1", node_rank: int = 0, head: str | None = None
) -> list[str]:
    """Command for the process of one node of server `index`. All nodes of a server are started together, with the same `head`: the host of
    node 0 (None: `host`), which alone reports a port and answers requests on `host`."""
    rollout = config.rollout
    options = {
        "--model": model_dir,
        "--dtype": config.rollout_dtype,
        "--max-context": config.model.max_context,
        "--max-running": rollout.max_running,
        "--prefill-chunk": rollout.prefill_chunk,
        "--host": host,
        "--port": port_of(rollout, index),
    }
    if rollout.engine in _LAUNCH:
        module = f"moerl.rollout.engines.{rollout.engine}.{rollout.engine}_server"
        own = _native_options(config, index, node_rank=node_rank, head=host if head is None else head)
    else:
        module = "moerl.rollout.engines.hf"
        flags = {"--deterministic": config.deterministic, "--fp8-weights": rollout.layout.weights == "fp8"}
        own = [flag for flag, is_set in flags.items() if is_set]
    tls = [] if rollout.tls is None else ["--tls", rollout.tls.certificate, rollout.tls.key]
    return [interpreter(rollout), "-m", module, *(str(part) for option in options.items() for part in option), *tls, *own]


def _native_options(config: RunConfig, index: int, *, node_rank: int, head: str) -> list[str]:
    """Options that engines with an environment of their own have beside those of all."""
    layout = config.rollout.layout
    own = ["--engine-args", json.dumps(config.rollout.engine_args)]
    if index < num_shared(config):
        own.append("--shares-gpus")
    if given := {name: value for name, value in asdict(layout).items() if value != getattr(ServerLayout(), name)}:
        own += ["--layout", json.dumps(given)]
    if layout.nodes > 1:
        own += ["--node-rank", str(node_rank), "--head", head]
    if routes_to_replay(config) is not None:
        own.append("--returns-routes")
    if config.pushes_mtp:
        own.append("--pushes-mtp")
    return own


def port_of(rollout: RolloutConfig, index: int) -> int:
    """0: the server chooses."""
    return rollout.port + index if rollout.port else 0


_ANY_PORT = 25000
"""Port in what is printed, for one that is chosen at the start."""


def _engine_line(config: RunConfig, command: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(environment, command line) that the process of `command` gives its engine on GPUs, without what it adds to receive weights."""
    options = options_of(server_parser(config.rollout.engine).parse_args(command[3:]))
    if options.layout.port == 0:
        options = replace(options, layout=replace(options.layout, port=_ANY_PORT))
    launch = _LAUNCH[config.rollout.engine]
    environment = sglang.environment(options) if launch is sglang else {}
    return environment, as_command_line(launch.arguments(options, model_config(config.model)) | config.rollout.engine_args)


def described(config: RunConfig) -> Iterator[str]:
    """Lines for people: how a server is spread, and what starts it. None for engines without an environment of their own."""
    rollout, layout = config.rollout, config.rollout.layout
    if rollout.engine not in _LAUNCH:
        return
    spread = f"attention tp {layout.tp} * dp {layout.dp}, experts ep {layout.ep} * tp {layout.expert_tp}"
    yield (
        f"each server     {layout.gpus} GPUs over {layout.nodes} nodes: {spread}"
        if layout.nodes > 1
        else f"each server     {layout.gpus} GPUs: {spread}"
    )
    model = Path("MODEL" if config.model.path is None else config.model.path)
    command = server_command(config, model, 0, head="HEAD")
    environment, line = _engine_line(config, command)
    yield f"node 0 runs     {shlex.join(command)}"
    yield f"which is        {shlex.join([*(f'{name}={value}' for name, value in environment.items()), rollout.engine, *line])}"
    if layout.nodes > 1:
        port = f"; port {_ANY_PORT} stands for one that is free there, added as --head-port" if layout.port == 0 else ""
        yield f"other nodes     the same with --node-rank 1 to {layout.nodes - 1}; HEAD is the host of node 0{port}"
