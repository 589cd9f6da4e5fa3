"""vLLM's processes that hold parts of the model: their numbers, and what each needs. `parallel` is vLLM's ParallelConfig."""

from collections.abc import Iterable
from typing import Any

from moerl.rollout.engines.process_push import needs_of_processes
from moerl.types.push import Needs

FAILED = "a step of the push failed: "
"""Begins what a worker raises about a push that it refuses. No other error of vLLM's is a verdict on a push."""


def process_number(parallel: Any) -> int:
    return parallel.data_parallel_index * parallel.world_size + parallel.rank


def needs_of(parallel: Any, names: Iterable[str]) -> Needs:
    """Needs of all processes, from the `names` of the model's tensors; at least of those up to this one."""
    # In a replica of a dense model vLLM sets data_parallel_size to 1: nothing there depends on the others.
    size = max(parallel.data_parallel_size, parallel.data_parallel_index + 1) * parallel.world_size
    return needs_of_processes(names, num_processes=size, expert_parallel=size if parallel.enable_expert_parallel else 1)
