"""What a critic and a model of outcomes tell of a step, against loops over its tokens and its sequences."""

import numpy as np
import pytest
import torch

from moerl.algorithms.mini_batch_loss import ValueLossSettings
from moerl.algorithms.outcome_loss import outcome_loss
from moerl.companions.companions import _critic_metrics, _outcome_metrics
from moerl.train.batching.packed_sequences import pack
from moerl.train.loss.batch_loss import Denominators, LossColumns, micro_batch_loss
from moerl.train.loss.loss_sums import step_statistics
from moerl.train.loss.value_loss import value_loss
from moerl.types.batch import TrainBatch
from moerl.types.stats import StepStats

RIGHT, SCORE = np.array([1, 0, 0, 1, 0, 1, 0]), np.array([0.4, 0.3, -0.2, 0.1, -0.5, -0.6, -0.7])
"""Of each sequence: whether it is right, and what the model says. It tells sequences 0, 2, 3, 4 and 6 rightly."""


@pytest.fixture(scope="module")
def batch():
    lengths, rng = np.array([3, 7, 4, 9, 5, 6, 8]), np.random.default_rng(3)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = rng.random(offsets[-1]) < 0.7
    mask[offsets[:-1]], mask[offsets[:-1] + 1] = False, True
    columns = {name: rng.normal(size=offsets[-1]) for name in ("values_T", "returns_T")}
    logprobs, advantages = -rng.exponential(1, offsets[-1]), np.repeat(RIGHT, lengths).astype(np.float32)
    return TrainBatch(
        token_ids_T=np.ones(offsets[-1], dtype=np.int64), response_mask_T=mask, rollout_logprobs_T=logprobs, advantages_T=advantages,
        offsets=offsets, reference_logprobs_T=logprobs, **columns,
    )  # fmt: skip


def stats_of(mini_batches, *, skipped=(), uses_reference=False):
    """Of an update: mini-batches that were skipped are in no statistic, as in moerl/train/megatron_engine.py."""
    fields = step_statistics(mini_batches, uses_reference=uses_reference, trains_mtp=False)
    return StepStats(
        **fields, grad_norm=1.0, learning_rate=0.1, padding_fraction=0, rank_imbalance=1, round_imbalance=1, skipped_updates=skipped
    )


def outcome_sums(batch, members, beta=0.5):
    """Sums of a mini-batch of one micro-batch, in which each sequence's log-probs differ from the initial ones by its score."""
    mini = batch.select(np.array(members))
    packed = pack(mini, list(range(len(members))), 1, 1)
    shift_T = np.concatenate(
        [m * SCORE[i] / beta / m.sum() for i, m in zip(members, np.split(mini.response_mask_T, mini.offsets[1:-1]), strict=True)]
    )
    index = torch.from_numpy(packed.label_index_T)
    logp_T = torch.where(index >= 0, torch.from_numpy(mini.reference_logprobs_T + shift_T)[index.clamp(min=0)], 0.0).requires_grad_()
    columns = LossColumns.of(packed, device="cpu")
    return micro_batch_loss(logp_T, torch.zeros_like(logp_T), columns, outcome_loss(beta), Denominators.of(mini))[1]


def test_the_shares_of_a_model_of_outcomes_are_of_the_sequences_it_learned_from(batch):
    first, second = outcome_sums(batch, [0, 1, 2, 3]), outcome_sums(batch, [4, 5, 6])
    told = _outcome_metrics(stats_of([first, second], uses_reference=True))
    assert (told["outcome_model/accuracy"], told["outcome_model/right"]) == pytest.approx((5 / 7, 3 / 7))
    told = _outcome_metrics(stats_of([second], skipped=("loss",), uses_reference=True))
    assert (told["outcome_model/accuracy"], told["outcome_model/right"]) == pytest.approx((2 / 3, 1 / 3))
    assert told["companion/outcome_model/skipped_updates"] == 1


def test_what_a_critic_tells_are_means_over_the_response_tokens_of_a_step(batch):
    sums, found = [], []
    for members in ([0, 1, 2, 3], [4, 5, 6]):
        mini = batch.select(np.array(members))
        packed = pack(mini, list(range(len(members))), 1, 1)
        index = packed.label_index_T
        new_T = np.where(index >= 0, mini.values_T[np.maximum(index, 0)] + 0.3, 9.0)
        sums.append(value_loss(torch.from_numpy(new_T), packed, ValueLossSettings(clip=0.1), Denominators.of(mini))[1])
        found += list(zip(mini.values_T[mini.response_mask_T], mini.returns_T[mini.response_mask_T], strict=True))
    old, returns = np.array(found).T
    told, error = _critic_metrics(stats_of(sums)), (old + 0.3 - returns) ** 2
    expected = {
        "value": np.mean(old + 0.3),
        "return": np.mean(returns),
        "clipped": np.mean((old + 0.1 - returns) ** 2 > error),
        "explained_variance": 1 - np.mean(error) / np.var(returns),
    }
    assert {name: told[f"critic/{name}"] for name in expected} == pytest.approx(expected)
