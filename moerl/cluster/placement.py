"""From the map of GPUs, which says who shares a node, to the machines of the Ray cluster: which of them each of these nodes is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import ray

from moerl.cluster.ray_nodes import Node, alive_nodes, only_on
from moerl.cluster.topology import by_name, by_topology
from moerl.config.derive.gpu_map import MappedGPU, gpu_map
from moerl.config.schema.run_config import PlacementConfig, RunConfig
from moerl.types.errors import ConfigError, Problem, problem

_FREE_SECONDS = 30.0
"""Time for the GPUs of a run that has just ended to be free again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlace:
    """Place of one process."""

    node: Node
    gpus: tuple[str, ...]
    """Value of CUDA_VISIBLE_DEVICES. Empty: the process uses none, and sees none."""


@dataclass(frozen=True, kw_only=True)
class RunPlacement:
    ranks: tuple[ProcessPlace, ...]
    servers: tuple[tuple[ProcessPlace, ...], ...]
    """By server, a place on each of its nodes."""
    here: str
    """Id of the driver's node."""
    beside: Mapping[str, tuple[ProcessPlace, ...]] = field(default_factory=dict)
    """Ranks of models beside the policy that have their own, by name."""

    @property
    def on_gpus(self) -> bool:
        return any(place.gpus for place in self.ranks)


def find_placement(config: RunConfig) -> RunPlacement:
    """ConfigError if the cluster has not the nodes that the configuration names, or they have GPUs and too few of them. Ray must be
    initialised."""
    mapped, here = gpu_map(config), ray.get_runtime_context().get_node_id()
    nodes = _nodes(config.placement, alive_nodes(), here)
    with_gpus = config.rollout.traits.has_environment  # the hf server computes on CPU
    needed = {gpu for gpus in (mapped.ranks, *mapped.beside.values(), *(mapped.servers if with_gpus else ())) for gpu in gpus}
    on_gpus = config.placement.device != "cpu" and any(node.num_gpus for node in nodes)
    if on_gpus and (missing := {gpu.node for gpu in needed if gpu.index >= nodes[gpu.node].num_gpus}):
        raise ConfigError([_too_few_gpus(nodes[number], sum(gpu.node == number for gpu in needed)) for number in sorted(missing)])
    ids = _gpu_ids(nodes) if on_gpus else {}

    def place(gpus: Sequence[MappedGPU], number: int, *, on_gpu: bool) -> ProcessPlace:
        node = nodes[gpus[0].node if gpus else number % len(nodes)]
        return ProcessPlace(node=node, gpus=tuple(ids[node.id][gpu.index] for gpu in gpus) if ids and on_gpu else ())

    def places_of(server: Sequence[MappedGPU], number: int) -> tuple[ProcessPlace, ...]:
        by_node = [tuple(gpus) for _, gpus in groupby(server, key=lambda gpu: gpu.node)] if server else [()]
        return tuple(place(gpus, number, on_gpu=with_gpus) for gpus in by_node)

    return RunPlacement(
        ranks=tuple(place([gpu], rank, on_gpu=True) for rank, gpu in enumerate(mapped.ranks)),
        servers=tuple(places_of(gpus, number) for number, gpus in enumerate(mapped.servers)),
        beside={name: tuple(place([gpu], rank, on_gpu=True) for rank, gpu in enumerate(gpus)) for name, gpus in mapped.beside.items()},
        here=here,
    )


def _nodes(placement: PlacementConfig, alive: Sequence[Node], here: str) -> list[Node]:
    """Those of the run, in the order of the network. One node: the driver's, if it will do."""
    uses_gpus = placement.device != "cpu" and any(node.num_gpus for node in alive)
    if placement.gpu is not None and placement.device != "cpu" and not uses_gpus:
        raise ConfigError([_no_gpus(placement.gpu.name, alive)])
    wanted = placement.gpus_per_node if placement.gpus_per_node is not None and uses_gpus else 0
    usable = [node for node in alive if node.num_gpus >= wanted]
    if len(usable) < placement.nodes:
        raise ConfigError([_missing(placement, usable, alive, wanted)])
    if placement.nodes == 1 and any(node.id == here for node in usable):
        return [node for node in usable if node.id == here]
    names = {node.name for node in usable}
    path = placement.topology
    order = by_name(names) if path is None else by_topology(names, Path(path).read_text(), path=path)
    rank = {name: number for number, name in enumerate(order)}
    return sorted(usable, key=lambda node: (rank[node.name], node.address, node.id))[: placement.nodes]


def _missing(placement: PlacementConfig, usable: Sequence[Node], alive: Sequence[Node], wanted: int) -> Problem:
    having = f" with {wanted} GPUs" if wanted else ""
    others = [f"{node.name} ({node.num_gpus} GPUs)" for node in alive if node not in usable]
    also = f"; too small: {', '.join(others)}" if others else ""
    names = ", ".join(by_name(node.name for node in usable)) if usable else "none"
    reason = f"the Ray cluster has {len(usable)} nodes{having}: {names}{also}"
    fix = "start Ray on the missing ones (RAY_ADDRESS names the cluster), or a layout for fewer nodes"
    return Problem(path="placement.nodes", value=placement.nodes, rule="must be there", reason=reason, fix=fix)


def _no_gpus(name: str, alive: Sequence[Node]) -> Problem:
    names = ", ".join(by_name(node.name for node in alive))
    reason = f"the nodes of the Ray cluster have none ({names}): the run would compute on their CPUs, without a word"
    fix = "start where the GPUs are (RAY_ADDRESS names a cluster), or placement.device=cpu for a run without GPUs"
    return problem("placement.gpu", name, "must be there", reason, fix)


def _too_few_gpus(node: Node, needed: int) -> Problem:
    reason = "processes beyond the GPUs of a node would share its first one, or compute on its CPU, without a word"
    fix = "placement.device=cpu for a run without GPUs, fewer train.layout.ranks and rollout.num_servers, or placement.mode=colocated"
    return problem("placement.device", "auto", f"needs {needed} GPUs on node {node.name}, which has {node.num_gpus}", reason, fix)


def _gpu_ids(nodes: Sequence[Node]) -> Mapping[str, list[str]]:
    """By node, what CUDA calls its GPUs: a job may have been given some of them only. ConfigError where others of the cluster hold some."""
    task = ray.remote(num_cpus=0)(_visible)
    calls = [task.options(num_gpus=node.num_gpus, scheduling_strategy=only_on(node.id)).remote() for node in nodes]
    _, waiting = ray.wait(calls, num_returns=len(calls), timeout=_FREE_SECONDS)
    if waiting:
        raise ConfigError([_held([node for node, call in zip(nodes, calls, strict=True) if call in waiting])])
    return {node.id: ids for node, ids in zip(nodes, ray.get(calls), strict=True)}


def _held(nodes: Sequence[Node]) -> Problem:
    counts = ", ".join(f"{node.name} ({node.num_gpus} GPUs)" for node in nodes)
    reason = (
        f"not all GPUs became free within {_FREE_SECONDS:g} s on {counts}: Ray has given some to other jobs, and a run takes whole nodes"
    )
    fix = "end what holds them (ray status, ray list actors), wait for it, or start a Ray cluster for this run"
    return problem("placement.device", "auto", "needs GPUs that nobody else has", reason, fix)


def _visible() -> list[Any]:
    return sorted((str(number) for number in ray.get_gpu_ids()), key=lambda name: (len(name), name))
