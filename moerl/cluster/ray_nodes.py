"""Nodes of the Ray cluster: which there are, where they reach each other, and functions that run on one of them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    id: str
    """Ray's."""
    name: str
    address: str
    num_gpus: int
    num_cpus: int


def alive_nodes() -> list[Node]:
    return [
        Node(
            id=entry["NodeID"],
            name=entry["NodeManagerHostname"],
            address=entry["NodeManagerAddress"],
            num_gpus=int(entry["Resources"].get("GPU", 0)),
            num_cpus=int(entry["Resources"].get("CPU", 0)),
        )
        for entry in ray.nodes()
        if entry["Alive"]
    ]


def reached_at() -> str | None:
    """This node's address for the other nodes of the cluster; None when it is the only one, or this process is in no cluster."""
    if not ray.is_initialized():
        return None
    alive = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return ray.util.get_node_ip_address() if len(alive) > 1 else None


def only_on(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Strategy of a task or an actor that runs on that node or not at all."""
    return NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)


async def on_node(node_id: str | None, function: Callable[..., T], *args: Any, seconds: float) -> T:
    """`node_id`: Ray's; None: this node. TimeoutError after `seconds`; Ray's errors for a node that is gone."""
    async with asyncio.timeout(seconds):
        if node_id is None or (ray.is_initialized() and node_id == ray.get_runtime_context().get_node_id()):
            return await asyncio.to_thread(function, *args)
        return await ray.remote(function).options(num_cpus=0, scheduling_strategy=only_on(node_id), max_retries=0).remote(*args)
