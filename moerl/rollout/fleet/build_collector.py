"""The collector of a run, from its configuration: who receives what its servers answer."""

from pathlib import Path

from moerl.cluster.placement import RunPlacement
from moerl.cluster.run_secret import RunSecret
from moerl.config.derive.collectors import collectors_per_server, num_collectors
from moerl.config.derive.model_configs import routes_to_replay
from moerl.config.derive.model_shape import read_config
from moerl.config.schema.run_config import RunConfig
from moerl.rollout.fleet.collector import Collector, Decoder, Intake, LocalCollector
from moerl.types.stored import keep


def build_collector(
    config: RunConfig, model_dir: Path, decoder: Decoder, secret: RunSecret, *, placement: RunPlacement | None = None
) -> Collector:
    """Receiver of completions: this process those of engines inside it, Ray actors on the servers' nodes those of servers. Train ranks can
    fetch them."""
    rollout = config.rollout
    intake = Intake(vocab_size=read_config(model_dir)["vocab_size"], decoder=decoder, routes=routes_to_replay(config))
    if rollout.traits.runs_in_driver:
        return LocalCollector(intake, keep=keep)
    # Ray is imported for this one only.
    from moerl.rollout.fleet.ray_collectors import RayCollectors

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
