"""Checks of the first steps that stop a run instead of letting it train on something wrong.

Trainer and engine hold the same weights, so their log-probs of the same tokens must agree; a policy that has not moved yet has
no KL to itself. slime's debugging guide asks people to look at these numbers; here they are assertions.
"""

import logging
from typing import Literal

from moerl.config.schema.run_config import RunConfig
from moerl.types.errors import GuardError
from moerl.types.stats import StepStats

logger = logging.getLogger(__name__)


def check_finite(stats: StepStats, *, step: int, on_nonfinite: Literal["stop", "skip"], name: str = "") -> None:
    """GuardError, or with "skip" a warning, if an update of the step was not applied because loss or gradient were not finite. `name`: of
    a model beside the policy."""
    if not stats.skipped_updates:
        return
    message = f"step {step}{name and f', {name}'}: loss or gradient is not finite, so the update was not applied: " + " | ".join(
        stats.skipped_updates
    )
    if on_nonfinite == "skip":
        logger.warning("%s", message)
        return
    raise GuardError(
        f"{message}. The weights are those of the step before. Likely causes: a learning rate that is too high "
        "(train.optimizer.lr, warmup_steps), no gradient clipping (train.optimizer.clip_grad), a ratio that overflowed because trainer "
        "and engine disagree, a sample whose advantage or log-prob is no number (see the dumps for those named). "
        "Change one of them and run the same command again: it continues from the last checkpoint. "
        "train.on_nonfinite=skip goes on without such updates."
    )


def check_trained(stats: StepStats, *, step: int) -> None:
    """GuardError if corrections took everything out of a mini-batch of the step."""
    if stats.empty_updates:
        raise GuardError(
            f"step {step}: corrections took every token out of {stats.empty_updates} mini-batch(es), which trained nothing: mean "
            f"|log-prob(trainer) - log-prob(rollout)| = {stats.mismatch_mean:.3g}, max {stats.mismatch_max:.3g}. The bounds of "
            "algorithm.corrections are narrower than what trainer and server differ by: widen low and high, judge tokens instead of "
            "sequences (level=token), or make the two agree (mismatch/* of metrics.jsonl; docs/algorithms.md). The same command continues "
            "from the last checkpoint"
        )


def check_first_step(stats: StepStats, *, limit: float, own_old_logprobs: bool, fresh: bool) -> None:
    """GuardError unless the first update of this process, whose samples are all of the weights just pushed, started from agreement.

    own_old_logprobs: the old log-probs are the trainer's own, not the engine's.
    fresh: nothing was trained before, and both route alike, so the policy still is the reference, and kl_reference was measured before
    the first change.
    """
    if not stats.mismatch_mean <= limit:
        found = f"{stats.mismatch_mean:.3g} (max {stats.mismatch_max:.3g}, KL {stats.mismatch_kl:.3g}, {stats.num_compared} tokens)"
        raise GuardError(mismatch_message(found, limit, "first update"))
    if own_old_logprobs and stats.first_kl_old != 0.0:
        raise GuardError(
            f"first update: kl_old = {stats.first_kl_old!r}: must be exactly 0.0. The old log-probs are the trainer's own, from the same "
            "weights, so the two forward passes differ. Likely causes: dropout that is not 0, different micro-batches in the two "
            "passes, kernels that are not deterministic (router or attention), weights that changed between the passes."
        )
    if fresh and stats.kl_reference is not None and stats.kl_reference != 0.0:
        raise GuardError(
            f"step 1: kl_reference = {stats.kl_reference!r}: must be exactly 0.0. Nothing was trained yet, so the policy is the reference. "
            "Likely causes: the reference was loaded from other weights than the policy, in another dtype, or after the first update."
        )


def mismatch_message(found: str, limit: float, when: str) -> str:
    """`found`: the mean, and of how many tokens."""
    return (
        f"{when}: mean |log-prob(trainer) - log-prob(rollout)| = {found}: must be at most weights.mismatch_limit = {limit:.3g}. "
        "Both sides scored the same tokens with the same weights, so something differs between them.\n"
        "Likely causes, by the size of the mean:\n"
        "  about 1e-3 to 5e-2: precision. bfloat16, above all with experts, explains this much; raise weights.mismatch_limit, or set\n"
        "    train.dtype and rollout.dtype to float32 to be sure that nothing else is wrong.\n"
        "  about 1e-1: temperature or truncation. The trainer divides its logits by rollout.temperature; the engine must report\n"
        "    log-probs at the same temperature. train.sampling_replay=off with rollout.top_p below 1 explains -log(top_p).\n"
        "  1 and more: a stale engine (compare the version it serves with the trainer's), another model or tokenizer, or a chat\n"
        "    template that gave the two sides different prompt tokens."
    )


def check_step(config: RunConfig, stats: StepStats, *, step: int, is_first: bool, is_reference: bool) -> None:
    """Guards of a step; `is_first`: of this process. `is_reference`: the run began with the weights of model.path."""
    # Routes of a server bind the policy alone: the reference routes by itself, and a near tie may go another way.
    fresh = is_reference and config.train.updates_per_step == 1 and config.train.router_replay != "rollout"
    check_finite(stats, step=step + 1, on_nonfinite=config.train.on_nonfinite)
    check_trained(stats, step=step + 1)
    if is_first:
        check_first_step(stats, limit=config.mismatch_limit, own_old_logprobs=config.train.old_logprobs == "trainer", fresh=fresh)
