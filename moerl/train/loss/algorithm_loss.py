"""An algorithm's advantages, loss and metrics from plain arrays, by the code that a run's ranks execute: float64, one process, no model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from moerl.algorithms.advantages import ScoredStep, ScoredTokens, turns, whitened_rewards
from moerl.algorithms.algorithm import build_algorithm, overlong_penalty
from moerl.algorithms.kl_formulas import kl_values
from moerl.algorithms.mini_batch_loss import Loss, ValueLossSettings
from moerl.algorithms.outcome_loss import outcome_loss
from moerl.config.algorithm_settings import settings_of
from moerl.config.rules.algorithm_rules import custom_problems
from moerl.config.schema.algorithm_config import AlgorithmConfig, PrimeAdvantage
from moerl.config.schema.companion_config import CriticConfig, OutcomeModelConfig
from moerl.train.batching.packed_sequences import pack
from moerl.train.batching.rank_share import Share
from moerl.train.loss.batch_loss import Denominators, LossColumns, micro_batch_loss
from moerl.train.loss.before_update import at_labels, corrected, selected
from moerl.train.loss.loss_sums import LossSums, step_statistics
from moerl.train.loss.value_loss import value_loss
from moerl.types.batch import TrainBatch
from moerl.types.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmResult:
    """Arrays have the shape of the mask that was given; float64, 0 outside the mask."""

    advantages: np.ndarray
    loss: float
    gradient: np.ndarray
    """Derivative of the loss by each log-prob."""
    metrics: Mapping[str, Any]
    """Fields of moerl.types.stats.StepStats that follow from a loss, by their names."""
    returns: np.ndarray | None
    """Values that a critic is to estimate; None where the advantage has none."""
    kept: np.ndarray
    """bool: the mask, without what corrections took out."""
    value_loss: float | None = None
    """A critic's; None where there are no returns."""
    value_gradient: np.ndarray | None = None
    """Its derivative by each of TokenArrays.new_values."""
    outcome_loss: float | None = None
    """Loss of a model of outcomes; None without process_logprobs."""
    outcome_gradient: np.ndarray | None = None
    """Its derivative by each of TokenArrays.process_logprobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenArrays:
    """Columns of tokens, [T] of sequences end to end or [B, T] of padded ones; values outside the mask never matter."""

    mask: ArrayLike
    """bool: the policy produced the token, and it is trained on."""
    logprobs: ArrayLike
    """By the policy as it is trained now."""
    lengths: ArrayLike | None = None
    """int [sequences], tokens of each; for [T]."""
    rollout_logprobs: ArrayLike | None = None
    """By the server; None: those of the old policy."""
    old_logprobs: ArrayLike | None = None
    """By the old policy; None: the policy has not moved."""
    reference_logprobs: ArrayLike | None = None
    values: ArrayLike | None = None
    """A critic's, before it learns."""
    new_values: ArrayLike | None = None
    """The same in its update; None: they have not moved."""
    process_logprobs: ArrayLike | None = None
    """By a model of outcomes; `prime` takes the reference's from them."""
    teacher_logprobs: ArrayLike | None = None
    entropy: ArrayLike | None = None
    """Entropy of the policy's distribution; its gradient is not part of the result."""
    versions: ArrayLike | None = None
    """int, of the weights that sampled the token: makes the old policy lie between server and policy (train.old_logprobs=log_linear)."""
    rl_weights: ArrayLike | None = None
    ce_weights: ArrayLike | None = None
    """Weights of cross-entropy, also outside the mask."""
    kl_weights: ArrayLike | None = None
    """Weights of the distance from the teacher, also outside the mask."""
    token_ids: ArrayLike | None = None
    """int, for an advantage that needs tokens."""


def algorithm_loss(
    algorithm: AlgorithmConfig | Mapping[str, Any] | str, tokens: TokenArrays, *, rewards: ArrayLike, groups: ArrayLike,
    samples: ArrayLike | None = None, greedy_rewards: ArrayLike | None = None, truncated: ArrayLike | None = None,
    max_response_tokens: int | None = None, version: int | None = None, value_clip: float | None = CriticConfig.clip,
    right_above: float = OutcomeModelConfig.right_above,
) -> AlgorithmResult:  # fmt: skip
    """Advantages, loss and metrics of one mini-batch that is a whole step.

    `algorithm`: settings; plain ones as a recipe has them, or the name of a file of configs/algorithm. `rewards` [S], `groups` int [S]:
    of each sample. `samples` int [sequences], ascending: whose sequence it is; None: one each. `greedy_rewards` [S]: of the completion at
    temperature 0 (remax). `truncated` bool [S], `max_response_tokens`: for overlong. `version`: of the weights from which the update
    starts, with TokenArrays.versions. Groups are not replaced by dynamic sampling.
    `value_clip`, `right_above`: critic.clip and outcome_model.right_above.

    Raises ConfigError for settings, ValueError for arrays that do not fit each other, and for rewards that are not finite.
    """
    config = settings_of(algorithm)
    if problems := list(custom_problems(config)):
        raise ConfigError(problems)
    flat = _Flat.of(tokens)
    if flat.old_logprobs is None and "old_logprobs" in config.needs:
        flat = replace(flat, old_logprobs=flat.logprobs)
    if samples is None and np.shape(rewards) != (flat.num_sequences,):
        raise ValueError(f"rewards {np.shape(rewards)}: must be {flat.num_sequences}, one for each sequence, where samples are not given")
    owner = np.arange(flat.num_sequences) if samples is None else np.asarray(samples, dtype=np.int64)
    _check_given(config, flat, max_response_tokens)
    scored = _Scored(
        rewards_S=np.asarray(rewards, dtype=np.float64),
        group_S=np.asarray(groups, dtype=np.int64),
        greedy_S=None if greedy_rewards is None else np.asarray(greedy_rewards, dtype=np.float64),
        is_truncated_S=np.zeros(np.shape(rewards), dtype=bool) if truncated is None else np.asarray(truncated, dtype=bool),
    )
    scored.check(flat, owner)
    if "greedy_sample" in config.needs and scored.greedy_S is None:
        raise ValueError("greedy_rewards = None: must be given, because they are the baseline")
    built = build_algorithm(config, 0 if max_response_tokens is None else max_response_tokens)
    lengths_S = np.bincount(owner, weights=flat.counts(), minlength=len(scored.rewards_S)).astype(np.int64)
    is_trained_S = scored.is_trained_S(config, lengths_S)
    scored.check_rewards(is_trained_S, uses_greedy="greedy_sample" in config.needs)
    step = scored.step(config, built.max_response_tokens, lengths_S, is_trained_S)
    flat = flat.without(~is_trained_S[owner])
    credit = built.credit(replace(step, tokens=flat.scored(config, step.lengths_S)))
    advantages_T, returns_N = flat.spread(credit.by_token(step)), credit.checked_returns(step)
    batch = flat.batch(advantages_T, version)
    loss, gradient, sums, kept_T = _loss(flat, batch, built.loss)
    told = {} if returns_N is None else _critic(flat, batch, flat.spread(returns_N), value_clip)
    if flat.process_logprobs is not None:
        told |= _outcomes(flat, batch, scored.rewards_S[owner] > right_above, getattr(config.advantage, "beta", PrimeAdvantage.beta))
    return AlgorithmResult(
        advantages=flat.shaped(advantages_T),
        loss=loss,
        gradient=flat.shaped(flat.tokens_of(gradient)),
        metrics=step_statistics([sums], uses_reference=flat.reference_logprobs is not None, trains_mtp=False),
        returns=None if returns_N is None else flat.shaped(flat.spread(returns_N)),
        kept=flat.shaped(flat.mask if kept_T is None else flat.mask & flat.tokens_of(kept_T)),
        **told,
    )


def _critic(flat: "_Flat", batch: TrainBatch, returns_T: np.ndarray, clip: float | None) -> dict[str, Any]:
    assert flat.values is not None, "an advantage with returns has values"
    given = replace(batch, values_T=flat.column(flat.values), returns_T=flat.column(returns_T))
    new_values = flat.values if flat.new_values is None else flat.new_values
    leaf = torch.tensor(flat.column(new_values), requires_grad=True)
    micro = pack(given, list(range(batch.num_sequences)), 1)
    loss, _ = value_loss(at_labels(leaf, micro), micro, ValueLossSettings(clip=clip), Denominators.of(batch))
    loss.backward()
    assert leaf.grad is not None
    return {"value_loss": float(loss.detach()), "value_gradient": flat.shaped(flat.tokens_of(leaf.grad.numpy()))}


def _outcomes(flat: "_Flat", batch: TrainBatch, is_right: np.ndarray, beta: float) -> dict[str, Any]:
    """`is_right` [sequences]."""
    labelled = replace(
        batch, advantages_T=flat.column(np.repeat(is_right, flat.lengths).astype(np.float64)), old_logprobs_T=None, rl_weight_T=None,
        ce_weight_T=None, kl_weight_T=None, proximal_T=None,
    )  # fmt: skip
    loss, gradient, _, _ = _loss(replace(flat, logprobs=_given(flat.process_logprobs, "prime")), labelled, outcome_loss(beta))
    return {"outcome_loss": loss, "outcome_gradient": flat.shaped(flat.tokens_of(gradient))}


def _loss(flat: "_Flat", batch: TrainBatch, loss_of_tokens: Loss) -> tuple[float, np.ndarray, LossSums, np.ndarray | None]:
    """Loss of the batch, its gradient for each log-prob, its sums, and which tokens stay in; as a rank alone in the world has them."""
    everything = list(range(batch.num_sequences))
    logprobs = flat.column(flat.logprobs)
    own, counts = corrected(batch, loss_of_tokens, Denominators.of(batch), _alone)
    share = Share(batch=own, sequences=np.array(everything, dtype=np.int64), bins=[everything])
    if "whole_minibatch" in loss_of_tokens.needs:
        share = selected(share, batch, counts, logprobs, loss_of_tokens, _alone)
    micro = pack(share.batch, everything, 1)
    leaf = torch.tensor(logprobs, requires_grad=True)
    entropy = torch.zeros_like(leaf) if flat.entropy is None else torch.from_numpy(flat.column(flat.entropy))
    logp_T, entropy_T = (at_labels(values, micro) for values in (leaf, entropy))
    columns = LossColumns.of(micro, device="cpu")
    if flat.old_logprobs is not None and flat.versions is None:
        columns = replace(columns, trainer_logprobs_T=at_labels(torch.from_numpy(flat.column(flat.old_logprobs)), micro))
    loss, sums = micro_batch_loss(logp_T, entropy_T, columns, loss_of_tokens, counts)
    loss.backward()
    assert leaf.grad is not None
    return float(loss.detach()), leaf.grad.numpy(), sums, share.batch.kept_T


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """Samples as they were given."""

    rewards_S: np.ndarray
    group_S: np.ndarray
    greedy_S: np.ndarray | None
    is_truncated_S: np.ndarray

    def is_trained_S(self, config: AlgorithmConfig, lengths_S: np.ndarray) -> np.ndarray:
        """Without those whose reward is padding, as their tokens."""
        is_padding_S = (lengths_S == 0) & ~np.isfinite(self.rewards_S)
        return ~is_padding_S & ~(self.is_truncated_S & (config.overlong == "mask"))

    def step(self, config: AlgorithmConfig, max_response_tokens: int, lengths_S: np.ndarray, trained_S: np.ndarray) -> ScoredStep:
        """Samples that are trained on, without columns of tokens."""
        rewards_S = self.rewards_S
        if config.overlong == "penalty":
            rewards_S = rewards_S + overlong_penalty(config, max_response_tokens, lengths_S, self.is_truncated_S)
        rewards_S = rewards_S[trained_S]
        return ScoredStep(
            rewards_S=whitened_rewards(rewards_S, lengths_S[trained_S]) if config.whiten_rewards else rewards_S,
            group_S=self.group_S[trained_S],
            lengths_S=lengths_S[trained_S],
            greedy_S=None if self.greedy_S is None else self.greedy_S[trained_S],
        )

    def check(self, flat: "_Flat", owner: np.ndarray) -> None:
        rewards_S, shape = self.rewards_S, self.rewards_S.shape
        others = {"groups": self.group_S, "greedy_rewards": self.greedy_S, "truncated": self.is_truncated_S}
        wrong = [f"{name} {column.shape}" for name, column in others.items() if column is not None and column.shape != shape]
        if len(shape) != 1 or wrong:
            raise ValueError(f"rewards {shape}, {', '.join(wrong)}: must be one number each for every sample")
        is_known = len(owner) == 0 or 0 <= owner[0] <= owner[-1] < len(rewards_S)
        if len(owner) != flat.num_sequences or (np.diff(owner) < 0).any() or not is_known:
            raise ValueError(f"samples {owner.tolist()}: must be a sample of 0 to {len(rewards_S) - 1} for each sequence, ascending")

    def check_rewards(self, trained_S: np.ndarray, *, uses_greedy: bool) -> None:
        given = self.rewards_S[trained_S]
        if uses_greedy and self.greedy_S is not None:
            given = np.concatenate([given, self.greedy_S[trained_S]])
        if not np.isfinite(given).all():
            unsound = given[~np.isfinite(given)].tolist()
            raise ValueError(f"rewards {unsound}: must be finite, because one would make all weights NaN")


def _alone(values: torch.Tensor) -> None:
    """There are no other ranks to add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flat:
    """Columns [T] of sequences end to end. A batch of the trainer has a token more before each: nothing predicts a sequence's first."""

    shape: tuple[int, ...]
    lengths: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    rollout_logprobs: np.ndarray
    old_logprobs: np.ndarray | None
    reference_logprobs: np.ndarray | None
    values: np.ndarray | None
    new_values: np.ndarray | None
    process_logprobs: np.ndarray | None
    teacher_logprobs: np.ndarray | None
    entropy: np.ndarray | None
    versions: np.ndarray | None
    rl_weights: np.ndarray | None
    ce_weights: np.ndarray | None
    kl_weights: np.ndarray | None
    token_ids: np.ndarray | None

    @classmethod
    def of(cls, tokens: TokenArrays) -> "_Flat":
        mask = np.asarray(tokens.mask, dtype=bool)
        if mask.ndim == 2 and tokens.lengths is None:
            lengths = np.full(mask.shape[0], mask.shape[1])
        elif mask.ndim == 1 and tokens.lengths is not None:
            lengths = np.asarray(tokens.lengths, dtype=np.int64)
        else:
            raise ValueError(f"mask has shape {mask.shape}: must be [B, T], or [T] with lengths, because sequences have ends")
        if mask.size == 0:
            raise ValueError(f"mask has shape {mask.shape}: must have a token")
        if (lengths < 0).any() or lengths.sum() != mask.size:
            raise ValueError(f"lengths {lengths.tolist()}: must add up to the {mask.size} tokens of the mask")
        columns = {}
        for name in cls.__slots__[3:]:
            given = getattr(tokens, name)
            column = None if given is None else np.asarray(given, dtype=np.float64)
            if column is not None and column.shape != mask.shape:
                raise ValueError(f"{name} has shape {column.shape}: must be {mask.shape}, the mask's")
            columns[name] = None if column is None else column.ravel()
        if columns["rollout_logprobs"] is None:
            columns["rollout_logprobs"] = columns["logprobs"] if columns["old_logprobs"] is None else columns["old_logprobs"]
        return cls(shape=mask.shape, lengths=lengths, mask=mask.ravel(), **columns)  # type: ignore[arg-type]

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    def counts(self) -> np.ndarray:
        """Response tokens of each sequence."""
        return np.array([part.sum() for part in np.split(self.mask, np.cumsum(self.lengths)[:-1])], dtype=np.int64)

    def without(self, is_left_out: np.ndarray) -> "_Flat":
        return replace(self, mask=self.mask & ~np.repeat(is_left_out, self.lengths))

    def scored(self, config: AlgorithmConfig, lengths_S: np.ndarray) -> ScoredTokens:
        penalties = process = None
        if config.kl_coefficient > 0 and config.kl_in == "reward":
            before = self.logprobs if self.old_logprobs is None else self.old_logprobs
            old, reference = (column[self.mask] for column in (before, _given(self.reference_logprobs, "a KL")))
            penalties = config.kl_coefficient * kl_values(config.kl_estimator, old, reference)
        if self.process_logprobs is not None:
            process = self.process_logprobs[self.mask] - _given(self.reference_logprobs, "prime")[self.mask]
        if "values" in config.needs and self.values is None:
            raise ValueError("values = None: must be given, because gae is a critic's")
        if "process_rewards" in config.needs and process is None:
            raise ValueError("process_logprobs = None: must be given, because prime is relative to a model of outcomes")
        values = None if self.values is None else self.values[self.mask]
        old_N, reference_N = (None if each is None else each[self.mask] for each in (self.old_logprobs, self.reference_logprobs))
        told: dict[str, np.ndarray] = {}
        if "tokens" in config.needs:
            if self.token_ids is None:
                raise ValueError("token_ids = None: must be given, because the advantage needs tokens")
            told = {"token_ids_N": self.token_ids[self.mask].astype(np.int64), "rollout_N": self.rollout_logprobs[self.mask]}
        return ScoredTokens(
            penalties_N=penalties, old_N=old_N, reference_N=reference_N, values_N=values, process_N=process,
            turn_N=turns(self.mask, np.cumsum(self.lengths) - self.lengths, lengths_S), **told,
        )  # fmt: skip

    def spread(self, values_N: np.ndarray) -> np.ndarray:
        spread_T = np.zeros(len(self.mask))
        spread_T[self.mask] = values_N
        return spread_T

    def shaped(self, column_T: np.ndarray) -> np.ndarray:
        return column_T.reshape(self.shape)

    def _places(self) -> np.ndarray:
        return np.arange(len(self.mask)) + np.repeat(np.arange(self.num_sequences) + 1, self.lengths)

    def column(self, column_T: np.ndarray) -> np.ndarray:
        """Column of the trainer's batch."""
        column = np.zeros(len(column_T) + self.num_sequences, dtype=column_T.dtype)
        column[self._places()] = column_T
        return column

    def tokens_of(self, column: np.ndarray) -> np.ndarray:
        """Inverse of `column`."""
        return column[self._places()]

    def batch(self, advantages_T: np.ndarray, version: int | None) -> TrainBatch:
        def optional(column_T: np.ndarray | None) -> np.ndarray | None:
            return None if column_T is None else self.column(column_T)

        proximal = None
        if self.versions is not None:
            if version is None:
                raise ValueError("version = None: must be given with versions, because the age of a token is its distance from it")
            sampled_by = np.where(self.mask, self.versions, version)
            if (sampled_by > version).any():
                raise ValueError(f"versions up to {sampled_by.max():g}: must be at most version = {version}, which the update starts from")
            proximal = (version - sampled_by) / (version + 1 - sampled_by)
        return TrainBatch(
            token_ids_T=np.zeros(len(self.mask) + self.num_sequences, dtype=np.int64),
            response_mask_T=self.column(self.mask),
            rollout_logprobs_T=self.column(self.rollout_logprobs),
            advantages_T=self.column(advantages_T),
            offsets=np.concatenate([[0], np.cumsum(self.lengths + 1)]).astype(np.int64),
            old_logprobs_T=optional(self.old_logprobs),
            reference_logprobs_T=optional(self.reference_logprobs),
            teacher_logprobs_T=optional(self.teacher_logprobs),
            rl_weight_T=optional(self.rl_weights),
            ce_weight_T=optional(self.ce_weights),
            kl_weight_T=optional(self.kl_weights),
            proximal_T=optional(proximal),
            values_T=optional(self.values),
        )


def _given(column: np.ndarray | None, what: str) -> np.ndarray:
    if column is None:
        raise ValueError(f"reference_logprobs = None: must be given, because {what} is relative to them")
    return column


def _check_given(config: AlgorithmConfig, flat: _Flat, max_response_tokens: int | None) -> None:
    wanted = {
        "reference_logprobs": (config.kl_coefficient > 0, "a KL"),
        "teacher_logprobs": (flat.kl_weights is not None, "a distance from a teacher"),
        "entropy": (config.entropy_bonus > 0, "an entropy bonus"),
    }
    for name, (is_wanted, what) in wanted.items():
        if is_wanted and getattr(flat, name) is None:
            raise ValueError(f"{name} = None: must be given for {what}")
    if config.normalize_by == "fixed_length" and config.fixed_length is None:
        raise ValueError("algorithm.fixed_length = None: must be given for normalize_by=fixed_length")
    if config.overlong == "penalty" and (config.overlong_buffer is None or max_response_tokens is None):
        raise ValueError("overlong_buffer and max_response_tokens must be given for overlong=penalty")
