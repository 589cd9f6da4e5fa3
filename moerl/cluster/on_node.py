"""Run a function on a node of the run: here in a thread, elsewhere as a task of Ray's that takes no resources."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

T = TypeVar("T")


async def on_node(node_id: str | None, function: Callable[..., T], *args: Any, seconds: float) -> T:
    """`node_id`: Ray's; None: this node. TimeoutError after `seconds`; Ray's errors for a node that is gone."""
    async with asyncio.timeout(seconds):
        if node_id is None or (ray.is_initialized() and node_id == ray.get_runtime_context().get_node_id()):
            return await asyncio.to_thread(function, *args)
        place = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        return await ray.remote(function).options(num_cpus=0, scheduling_strategy=place, max_retries=0).remote(*args)
