"""Rollout engines of a run, and who receives what they answer, from its configuration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from moerl.cluster.placement import ProcessPlace, RunPlacement
from moerl.config.derive.model_configs import routes_to_replay
from moerl.config.derive.model_shape import read_config, shape_of_config
from moerl.config.schema.run_config import RunConfig
from moerl.rollout.commands import native_command, port_of, server_command
from moerl.rollout.fleet.collect import Collector, Decoder, Intake, LocalCollector
from moerl.rollout.server.client import HTTPEngine
from moerl.rollout.server.contract import RolloutEngine
from moerl.rollout.server.limits import Limits
from moerl.rollout.server.remote_process import RemoteProcess
from moerl.rollout.server.server_process import ServerProcess
from moerl.rollout.server.spread_process import NewProcess, NodeOfServer, SpreadProcess
from moerl.types.stored import keep


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Host and start of one process."""

    host: str = "127.0.0.1"
    process: NewProcess = ServerProcess


@dataclass(frozen=True, kw_only=True)
class _Home:
    """Nodes of one server."""

    index: int
    nodes: tuple["_Place", ...]
    """The first one answers."""

    @property
    def host(self) -> str:
        return self.nodes[0].host


def build_engines(config: RunConfig, model_dir: Path, log_dir: Path, placement: RunPlacement | None = None) -> list[RolloutEngine]:
    """One engine per server, not yet started. `model_dir`: a Hugging Face checkpoint directory, of which the engines read the
    configuration only: weights come by a push. Servers log to log_dir/rollout-N.log. `placement` None: every
    node of each is this host."""
    build = ENGINES[config.rollout.engine]
    homes = [_home(config, placement, index) for index in range(config.rollout.num_servers)]
    return [build(config, model_dir, log_dir, home) for home in homes]


def build_collector(config: RunConfig, model_dir: Path, decoder: Decoder) -> Collector:
    """Receiver of completions: this process those of engines inside it, Ray actors those of servers. Train ranks can fetch them."""
    rollout = config.rollout
    intake = Intake(vocab_size=read_config(model_dir)["vocab_size"], decoder=decoder, routes=routes_to_replay(config))
    if rollout.engine == "fake":
        return LocalCollector(intake, keep=keep)
    # Ray is imported for this one only.
    from moerl.rollout.fleet.ray_collectors import RayCollectors

    in_flight = rollout.num_servers * (rollout.max_running + rollout.max_queued)
    return RayCollectors(intake, num_actors=rollout.num_collectors, max_in_flight=in_flight)


def _home(config: RunConfig, placement: RunPlacement | None, index: int) -> _Home:
    if placement is None:
        places = (_Place(),) * config.rollout.layout.nodes
    else:
        places = tuple(_place(config, placement, place) for place in placement.servers[index])
    if config.rollout.host is not None:
        places = tuple(replace(place, host=config.rollout.host) for place in places)
    return _Home(index=index, nodes=places)


def _place(config: RunConfig, placement: RunPlacement, place: ProcessPlace) -> _Place:
    environment = {} if place.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(place.gpus)}
    process: NewProcess = partial(ServerProcess, environment=environment)
    if place.node.id != placement.here:
        process = partial(RemoteProcess, environment=environment, network=config.network, node_id=place.node.id)
    host = "127.0.0.1" if config.placement.nodes == 1 and place.node.id == placement.here else place.node.address
    return _Place(host=host, process=process)


def _build_hf(config: RunConfig, model_dir: Path, log_dir: Path, home: _Home) -> RolloutEngine:
    flags = {"--deterministic": config.deterministic, "--fp8-weights": config.rollout.layout.weights == "fp8"}
    extra = [flag for flag, is_set in flags.items() if is_set]
    return _engine(
        server_command(config, model_dir.absolute(), home.index, module="moerl.rollout.engines.hf", extra=extra, host=home.host),
        config,
        log_dir,
        home,
    )


def _build_native(config: RunConfig, model_dir: Path, log_dir: Path, home: _Home) -> RolloutEngine:
    """vLLM or SGLang, in an environment of its own, on every node of the server."""
    head, *others = (
        native_command(config, model_dir.absolute(), home.index, host=place.host, node_rank=rank, head=home.host)
        for rank, place in enumerate(home.nodes)
    )
    return _engine(head, config, log_dir, home, others)


def _engine(command: list[str], config: RunConfig, log_dir: Path, home: _Home, others: Sequence[list[str]] = ()) -> RolloutEngine:
    """`others`: the commands of the nodes after the first."""
    followers = [
        NodeOfServer(host=place.host, command=other, process=place.process) for place, other in zip(home.nodes[1:], others, strict=True)
    ]
    first, port = home.nodes[0].process, config.rollout.layout.port
    spread = partial(SpreadProcess, host=home.host, process=first, others=followers, port=port)
    return HTTPEngine(
        command,
        host=home.host,
        port=port_of(config.rollout, home.index),
        log_path=log_dir.absolute() / f"rollout-{home.index}.log",
        start_seconds=config.deadlines.start_seconds,
        process=spread if followers else first,
        other_hosts=[follower.host for follower in followers],
    )


def _build_fake(config: RunConfig, model_dir: Path, log_dir: Path, home: _Home) -> RolloutEngine:
    # torch and transformers are imported for this engine only.
    import torch

    from moerl.rollout.engines.fake_engine import FakeEngine
    from moerl.rollout.engines.hf.hf_model import checkpoint_specs
    from moerl.weights.plan.transfer_plan import in_fp8

    expected = checkpoint_specs(model_dir, getattr(torch, config.rollout_dtype))
    model = read_config(model_dir)
    return FakeEngine(
        f"fake-{home.index}",
        limits=Limits(max_context=config.model.max_context, vocab_size=model["vocab_size"], routes=shape_of_config(model).routes),
        expected=in_fp8(expected.values()) if config.rollout.layout.weights == "fp8" else expected,
        max_running=config.rollout.max_running,
    )


ENGINES: dict[str, Callable[[RunConfig, Path, Path, _Home], RolloutEngine]] = {
    "hf": _build_hf,
    "vllm": _build_native,
    "sglang": _build_native,
    "fake": _build_fake,
}
