"""Expectations that the nodes are held to, by what the user or a recipe says there should be. Limits stand with their checks."""

from dataclasses import dataclass, field
from pathlib import Path

from moerl.config.derive.companion_models import own_layouts
from moerl.config.derive.gpu_map import num_gpus
from moerl.config.derive.rdma import SHARP, crosses_nodes
from moerl.config.rules.engine_rules import interpreter, joins_by_nccl
from moerl.config.schema.run_config import NetworkConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class Expectations:
    nodes: int | None = None
    """None: as many as there are."""
    gpus_per_node: int | None = None
    """None: as many as on the other nodes."""
    ranks: int | None = None
    """Ranks of the trainer."""
    server_gpus: int = 0
    """GPUs of rollout servers that have GPUs of their own."""
    gb_per_second: float | None = None
    """One way between two nodes. None: the sum of the rates of a node's InfiniBand ports."""
    run_dir: Path = Path()
    reference_te: bool = False
    """Transformer Engine is not needed."""
    joins_by_nccl: bool = False
    """A push makes one NCCL communicator of trainer and servers."""
    engines: dict[str, str] = field(default_factory=dict)
    """Engine -> interpreter of its environment."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    deepep: bool = False
    """Ranks or servers send tokens to other nodes by DeepEP."""
    sharp: bool = False
    """Ranks are to sum in switches."""


def expected_of(
    config: RunConfig | None,
    *,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    gb_per_second: float | None = None,
    run_dir: Path | None = None,
) -> Expectations:
    """By what a run needs, if there is one, and what is said besides, which counts more."""
    if config is None:
        where = Path.cwd() if run_dir is None else run_dir
        return Expectations(nodes=nodes, gpus_per_node=gpus_per_node, gb_per_second=gb_per_second, run_dir=where.absolute())
    placement, engine, on_cpu = config.placement, config.rollout.engine, config.placement.device == "cpu"
    ranks = config.train.layout.ranks + sum(layout.ranks for layout in own_layouts(config).values())
    return Expectations(
        nodes=placement.nodes if nodes is None else nodes,
        gpus_per_node=_gpus_per_node(config) if gpus_per_node is None else gpus_per_node,
        ranks=None if on_cpu else ranks,
        server_gpus=num_gpus(config) - ranks,
        gb_per_second=gb_per_second,
        run_dir=(config.run_dir if run_dir is None else run_dir).absolute(),
        reference_te=config.train.reference_te or on_cpu,
        joins_by_nccl=joins_by_nccl(config),
        engines={engine: interpreter(config.rollout)} if config.rollout.traits.has_environment else {},
        network=config.network,
        deepep=crosses_nodes(config, "train") or crosses_nodes(config, "rollout"),
        sharp=str({**config.network.variables, **config.train.environment}.get(SHARP)) == "1",
    )


def _gpus_per_node(config: RunConfig) -> int | None:
    """None if the recipe leaves it open, or counts processes: as placement.device=cpu, slurm.gpus_per_node=0 says that its nodes have no
    GPUs."""
    placed, uses_none = config.placement.gpus_per_node, config.slurm.gpus_per_node == 0 or config.placement.device == "cpu"
    return None if placed is None or uses_none else placed
