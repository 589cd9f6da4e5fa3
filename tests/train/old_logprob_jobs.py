"""What the ranks of the tests of old log-probs do: several models under one layout, each over several batches."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moerl.algorithms.mini_batch_loss import loss_of
from moerl.config.algorithm_settings import algorithm
from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import TrainBatch

REFERENCE = loss_of(algorithm("grpo", "kl_coefficient=0.1"))


def first_steps(chosen: Sequence[EngineSettings], batches: Sequence[TrainBatch]) -> list[list[tuple[float, float]]]:
    """For each model, of a step on each batch as the loop makes it: `first_kl_old`, and on the first batch, where the policy is the
    reference, the largest difference of their log-probs (0 on the others)."""
    from moerl.train.megatron.process_groups import initialize_groups
    from moerl.train.megatron_engine import MegatronEngine

    initialize_groups(chosen[0].train.layout, 1)
    found = []
    for settings in chosen:
        engine, steps = MegatronEngine(settings), []
        for batch in batches:
            old_T = engine.logprobs(batch, records_routes=settings.train.router_replay == "trainer")
            reference_T = engine.reference_logprobs(batch)
            difference = 0.0 if steps else float(np.abs(reference_T - old_T).max())
            given = replace(batch, old_logprobs_T=old_T, reference_logprobs_T=reference_T)
            stats = engine.update(given, REFERENCE, lr=1e-3, num_updates=settings.train.updates_per_step)
            steps.append((stats.first_kl_old, difference))
        found.append(steps)
    return found
