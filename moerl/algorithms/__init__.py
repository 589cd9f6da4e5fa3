"""Reinforcement-learning algorithms: one file each, plus a row in `ALGORITHMS`.

To add one: its settings in config/schema.py, a class that satisfies `base.Algorithm`, and its row here.
"""

from collections.abc import Callable
from typing import Any

from moerl.algorithms.base import Algorithm
from moerl.algorithms.dapo import DAPO
from moerl.algorithms.grpo import GRPO
from moerl.config.schema import AlgorithmConfig

ALGORITHMS: dict[str, Callable[[Any, int], Algorithm]] = {
    "grpo": lambda config, max_response_tokens: GRPO(config),
    "dapo": DAPO,
}
"""From `algorithm.name` to f(its config, rollout.max_response_tokens)."""


def build_algorithm(config: AlgorithmConfig, max_response_tokens: int) -> Algorithm:
    return ALGORITHMS[config.name](config, max_response_tokens)
