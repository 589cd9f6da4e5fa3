"""Rails of a run's processes: every node of the run is asked for those of its GPUs (hardware/rails.py)."""

import asyncio
import logging
from dataclasses import dataclass

from ray.exceptions import RayError

from moerl.cluster.placement import ProcessPlace, RunPlacement
from moerl.cluster.ray_nodes import on_node
from moerl.hardware.hardware_tools import Absent
from moerl.hardware.rails import Rails, find_rails

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRails:
    ranks: tuple[int, ...]
    """By rank of the policy."""
    servers: tuple[tuple[int, ...], ...]
    """By server and its model processes, each of which has a GPU."""


async def find_process_rails(placement: RunPlacement, *, seconds: float) -> ProcessRails | None:
    """None, with the reason in the log, where a push has no rails to heed: on one node or on CPU, or where a node does not tell its own."""
    places = [*placement.ranks, *(place for server in placement.servers for place in server)]
    nodes = {place.node.id: place.node.name for place in places}
    if len(nodes) < 2 or not all(place.gpus for place in places):
        return None
    asked = [on_node(node, find_rails, seconds=seconds) for node in nodes]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    found: dict[str, Rails] = {}
    for (node, name), answer in zip(nodes.items(), answers, strict=True):
        if isinstance(answer, Absent | TimeoutError | RayError):
            logger.info("the push heeds no rails: node %s: %s", name, answer.reason if isinstance(answer, Absent) else repr(answer))
            return None
        if isinstance(answer, BaseException):
            raise answer
        found[node] = answer
    rails = combined(placement, found)
    if isinstance(rails, str):
        logger.info("the push heeds no rails: %s", rails)
        return None
    logger.info("the push heeds rails: %d on every node", 1 + max(rails.ranks))
    return rails


def combined(placement: RunPlacement, found: dict[str, Rails]) -> ProcessRails | str:
    """`found`: by Ray's id of the node. Why there are none, as text, where nodes are not alike or a GPU is unknown."""
    counts = {len(set(rails.values())) for rails in found.values()}
    if len(counts) > 1:
        return f"nodes have {min(counts)} to {max(counts)} of them, and their numbers mean nothing to each other"
    try:
        ranks = [rail for place in placement.ranks for rail in _rails(place, found)]
        servers = [tuple(rail for place in server for rail in _rails(place, found)) for server in placement.servers]
    except KeyError as error:
        return f"GPU {error} of a process is not one that nvidia-smi topo numbers"
    return ProcessRails(ranks=tuple(ranks), servers=tuple(servers))


def _rails(place: ProcessPlace, found: dict[str, Rails]) -> list[int]:
    return [found[place.node.id][gpu] for gpu in place.gpus]
