"""Algorithms by `algorithm.name`: one row each."""

from collections.abc import Callable
from typing import Any

from moerl.algorithms.dapo import DAPO
from moerl.algorithms.grpo import GRPO
from moerl.algorithms.objective import Algorithm
from moerl.config.schema.algorithm_config import AlgorithmConfig

ALGORITHMS: dict[str, Callable[[Any, int], Algorithm]] = {
    "grpo": lambda config, max_response_tokens: GRPO(config),
    "dapo": DAPO,
}
"""From `algorithm.name` to f(its config, rollout.max_response_tokens)."""


def build_algorithm(config: AlgorithmConfig, max_response_tokens: int) -> Algorithm:
    return ALGORITHMS[config.name](config, max_response_tokens)
