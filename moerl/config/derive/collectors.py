"""Processes that receive a run's completions: how many, and how long they take for a step's. Imports no Ray."""

import math

from moerl.config.derive.object_store import sample_bytes
from moerl.config.schema.run_config import RunConfig

BYTES_PER_SECOND = 100e6
"""Completions with routes that one process receives, checks and stores on a core (docs/benchmarks.md, Data by reference)."""
_SECONDS = 10.0
"""Time in which the samples of a step are to be received, if all were as long as the context."""
_MOST = 10
"""On a node: cores that its ranks and servers leave, and 1 GB/s."""


def num_collectors(config: RunConfig) -> int:
    """rollout.num_collectors. Where it is not set: on each node with servers as many, and as many as a step's bytes need."""
    if config.rollout.num_collectors is not None:
        return config.rollout.num_collectors
    nodes = min(config.rollout.num_servers, config.placement.nodes)
    each = math.ceil(_step_bytes(config) / (nodes * BYTES_PER_SECOND * _SECONDS))
    return nodes * min(max(each, 1), _MOST)


def collectors_per_server(config: RunConfig) -> int:
    """Those that share what one server says: none is left without a server."""
    return math.ceil(num_collectors(config) / config.rollout.num_servers)


def reception_seconds(config: RunConfig) -> float:
    """Seconds for the samples of a step, all as long as the context, by that many processes on cores of their own."""
    return _step_bytes(config) / (num_collectors(config) * BYTES_PER_SECOND)


def _step_bytes(config: RunConfig) -> int:
    return config.groups_per_step * config.group_size * sample_bytes(config)
