"""Counts what ranks do all together, from the sequence numbers of the group of all."""

from typing import Any

import torch.distributed as dist

from moerl.algorithms.mini_batch_loss import loss_of
from moerl.config.algorithm_settings import algorithm
from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import TrainBatch


def collectives_of_all(settings: EngineSettings, batch: TrainBatch) -> dict[str, int]:
    """Collectives of the default group by what the rank was asked for."""
    from moerl.train.megatron.process_groups import initialize_groups
    from moerl.train.megatron_engine import MegatronEngine

    world: Any = dist.group.WORLD
    found: dict[str, int] = {}

    def counting(name: str, work: Any) -> Any:
        before = world._get_sequence_number_for_group()
        result = work()
        found[name] = world._get_sequence_number_for_group() - before
        return result

    initialize_groups(settings.train.layout, 1)
    engine = counting("start", lambda: MegatronEngine(settings))
    counting("logprobs", lambda: engine.logprobs(batch))
    counting("update", lambda: engine.update(batch, loss_of(algorithm("grpo")), lr=1e-3, num_updates=2))
    counting("push", lambda: (engine.pushed.gather(), engine.pushed.release()))
    for name in ("checkpoint", "next checkpoint"):
        counting(name, lambda: engine.stage(copies=True))
    return found
