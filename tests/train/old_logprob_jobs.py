"""What the ranks of the tests of old log-probs do: several models under one layout, each over several batches."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from engine_jobs import new_engine

from moerl.algorithms.algorithm import build_algorithm
from moerl.algorithms.mini_batch_loss import SUPERVISED, loss_of
from moerl.companions.distillation import Teaching
from moerl.config.algorithm_settings import algorithm
from moerl.config.schema.companion_config import DistillationConfig
from moerl.train.batching.build_batch import build_batch, segments_of
from moerl.train.engine_settings import EngineSettings
from moerl.types.batch import StoredBatch, TrainBatch
from moerl.types.completion import Completion, VersionSpan
from moerl.types.groups import Group, Prompt, Sample, Score
from moerl.types.stored import Here, Payload, StoredCompletion

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


def taught_beside_the_response(settings: EngineSettings) -> tuple[np.ndarray, np.ndarray, float]:
    """Log-probs of the teacher, which is the policy, the policy's own, and their distance; of tokens of which some are a tool's."""
    from moerl.companions import distillation

    engine = new_engine(settings)

    class Policy:
        async def logprobs(self, batch: StoredBatch) -> Here[np.ndarray]:
            return Here(engine.logprobs(batch))

    distillation.keep = Here  # type: ignore[assignment,misc] - no Ray is here
    token_ids = np.array([7, 8, 9, 10, 11], dtype=np.int32)
    payload = Payload(
        prompt_ids=np.array([5, 6], dtype=np.int32), token_ids=token_ids, logprobs=np.full(5, -4.5, dtype=np.float32), routes=None, text="",
        mask=np.array([True, True, False, False, True]), weights={"kl": np.ones(5, dtype=np.float32)},
    )  # fmt: skip
    span = VersionSpan(version=0, num_tokens=3)
    drawn = Completion(request_id="r", token_ids=(), logprobs=(), spans=(span,), finish_reason="stop")
    completion = StoredCompletion.of(drawn, payload, Here(payload))
    prompt = Prompt(index=0, token_ids=(5, 6), text="", data_source="s", ground_truth="", shown_ids=(5, 6))
    samples = tuple(Sample(completion=completion, score=Score(reward=reward)) for reward in (1.0, 0.0))
    groups, teaching = [Group(prompt=prompt, samples=samples)], Teaching(DistillationConfig(shown="{answer}"), Policy(), {})  # type: ignore[arg-type]
    built = build_algorithm(algorithm("grpo"), 8, trains_rewards=False)
    batch = asyncio.run(teaching.taught(build_batch(groups, built), segments_of(groups, built)))
    laid = batch.laid_out([0, 1])
    stats = engine.update(batch, SUPERVISED, lr=0.0, num_updates=1)
    assert laid.teacher_logprobs_T is not None and stats.kl_teacher is not None
    return laid.teacher_logprobs_T, engine.logprobs(laid), stats.kl_teacher
