"""Rollout engines of a run, and who receives what they answer, from its configuration."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from moerl.cluster.placement import ProcessPlace, RunPlacement
from moerl.cluster.run_secret import RunSecret
from moerl.config.derive.collectors import collectors_per_server, num_collectors
from moerl.config.derive.model_configs import routes_to_replay
from moerl.config.derive.model_shape import read_config, shape_of_config
from moerl.config.derive.rdma import crosses_nodes
from moerl.config.schema.run_config import RunConfig
from moerl.rollout.fleet.collector import Collector, Decoder, Intake, LocalCollector
from moerl.rollout.fleet.ray_collectors import RayCollectors
from moerl.rollout.server.client import HTTPEngine
from moerl.rollout.server.contract import RolloutEngine
from moerl.rollout.server.limits import Limits
from moerl.rollout.server.remote_process import RemoteProcess
from moerl.rollout.server.server_process import ServerProcess
from moerl.rollout.server.spread_process import NewProcess, NodeOfServer
from moerl.rollout.server_commands import port_of, server_command
from moerl.types.stored import keep


def build_engines(
    config: RunConfig, model_dir: Path, log_dir: Path, secret: RunSecret, placement: RunPlacement | None = None
) -> list[RolloutEngine]:
    """One engine per server, not yet started. `model_dir`: a Hugging Face checkpoint directory, of which the engines read the
    configuration only: weights come by a push. Servers log to log_dir/rollout-N.log. `placement` None: every
    node of each is this host."""
    numbers = range(config.rollout.num_servers)
    if config.rollout.traits.runs_in_driver:
        return [_fake(config, model_dir, index) for index in numbers]
    return [_server(config, model_dir, log_dir, index, _nodes(config, placement, index), secret) for index in numbers]


def build_collector(
    config: RunConfig, model_dir: Path, decoder: Decoder, secret: RunSecret, *, placement: RunPlacement | None = None
) -> Collector:
    """Receiver of completions: this process those of engines inside it, Ray actors on the servers' nodes those of servers. Train ranks can
    fetch them."""
    rollout = config.rollout
    intake = Intake(vocab_size=read_config(model_dir)["vocab_size"], decoder=decoder, routes=routes_to_replay(config))
    if rollout.traits.runs_in_driver:
        return LocalCollector(intake, keep=keep)
    return RayCollectors(
        intake,
        secret=secret,
        num_actors=num_collectors(config),
        per_server=collectors_per_server(config),
        nodes=() if placement is None else list(dict.fromkeys(places[0].node.id for places in placement.servers)),
        start_seconds=config.deadlines.start_seconds,
        max_restarts=rollout.max_restarts,
        authority=rollout.authority,
    )


def _nodes(config: RunConfig, placement: RunPlacement | None, index: int) -> list[NodeOfServer]:
    """Nodes of server `index`, without commands; the first one answers."""
    if placement is None:
        nodes = [NodeOfServer()] * config.rollout.layout.nodes
    else:
        nodes = [_node(config, placement, place) for place in placement.servers[index]]
    return nodes if config.rollout.host is None else [replace(node, host=config.rollout.host) for node in nodes]


def _node(config: RunConfig, placement: RunPlacement, place: ProcessPlace) -> NodeOfServer:
    own = {name: str(value) for name, value in config.rollout.environment.items()}
    environment = own | {"CUDA_VISIBLE_DEVICES": ",".join(place.gpus)}
    process: NewProcess = partial(ServerProcess, environment=environment)
    if place.node.id != placement.here:
        deepep = crosses_nodes(config, "rollout")
        process = partial(RemoteProcess, environment=environment, network=config.network, deepep=deepep, node_id=place.node.id)
    host = "127.0.0.1" if config.placement.nodes == 1 and place.node.id == placement.here else place.node.address
    return NodeOfServer(host=host, process=process, node_id=place.node.id)


def _server(
    config: RunConfig, model_dir: Path, log_dir: Path, index: int, nodes: Sequence[NodeOfServer], secret: RunSecret
) -> RolloutEngine:
    """A process on every node of the server."""
    model_dir, head = model_dir.absolute(), nodes[0].host
    started = [
        replace(node, command=server_command(config, model_dir, index, host=node.host, node_rank=rank, head=head))
        for rank, node in enumerate(nodes)
    ]
    return HTTPEngine(
        started,
        secret=secret,
        port=port_of(config.rollout, index),
        log_path=log_dir.absolute() / f"rollout-{index}.log",
        start_seconds=config.deadlines.start_seconds,
        meeting_port=config.rollout.layout.port,
        authority=config.rollout.authority,
    )


def _fake(config: RunConfig, model_dir: Path, index: int) -> RolloutEngine:
    # torch and transformers are imported for this engine only.
    import torch

    from moerl.rollout.engines.fake_engine import FakeEngine
    from moerl.rollout.engines.hf.hf_model import checkpoint_specs

    model = read_config(model_dir)
    return FakeEngine(
        f"fake-{index}",
        limits=Limits(max_context=config.model.max_context, vocab_size=model["vocab_size"], routes=shape_of_config(model).routes),
        expected=checkpoint_specs(model_dir, getattr(torch, config.rollout_dtype), fp8=config.rollout.layout.weights == "fp8"),
        max_running=config.rollout.max_running,
    )
