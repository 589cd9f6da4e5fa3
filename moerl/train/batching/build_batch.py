"""From scored groups to a StoredBatch, from prompts and answers to a TrainBatch. Order in, order out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from moerl.algorithms.advantages import ScoredTokens, turns
from moerl.algorithms.algorithm import Algorithm
from moerl.algorithms.kl_formulas import kl_values
from moerl.config.schema.custom_part import CustomPart
from moerl.types.batch import StoredBatch, TrainBatch
from moerl.types.completion import VersionSpan
from moerl.types.errors import DataError
from moerl.types.groups import Group, Prompt, Sample
from moerl.types.routes import RouteShape
from moerl.types.stored import Here, Stored, StoredCompletion, fetch

_NOBODY: Mapping[str, int] = MappingProxyType({})


def build_batch(
    groups: Sequence[Group],
    algorithm: Algorithm,
    routes: RouteShape | None = None,
    servers: Mapping[str, int] = _NOBODY,
    *,
    recomputes: bool = True,
) -> StoredBatch:
    """One sequence per segment of a sample, groups and samples in order. `routes`: of the model, if every sample brings its own.
    `servers`: numbers of those that have the weights from which the update starts, by the nonces of the pushes that brought them.
    `recomputes`: a completion that goes on after a push does so on keys and values of the new weights (rollout.partial); else of a mixture,
    which nobody can compare.

    Left out: samples with an error, outside the algorithm's mask, or without a token. Raises DataError for a reward or an advantage that
    is not a number, for an empty prompt, and for a batch in which nothing is left.
    """
    _check_rewards(groups, algorithm)
    completions = _completions(groups, algorithm)
    if not completions:
        raise DataError(_nothing_left(groups))
    missing = [completion.request_id for completion in completions if routes is not None and not completion.routes_bytes]
    assert not missing, f"completions {missing[:4]}: no routes, for which collectors look"
    prompts = np.array([completion.num_prompt for completion in completions], dtype=np.int64)
    responses = np.array([completion.num_tokens for completion in completions], dtype=np.int64)
    observed = np.array([completion.num_observed for completion in completions], dtype=np.int64)
    return StoredBatch(
        payloads=tuple(completion.payload for completion in completions),
        prompt_lengths=prompts,
        response_lengths=responses,
        advantages=_advantages(groups, algorithm),
        observed=tuple(each.observed for each in completions) if any(each.observed for each in completions) else None,
        observed_lengths=observed,
        streams=frozenset().union(*(each.streams for each in completions)),
        starts=np.concatenate([[0], np.cumsum(prompts + responses + observed)[:-1]]).astype(np.int64),
        fresh=np.array([_fresh(each, servers, recomputes=recomputes, replays=routes is not None) for each in completions], dtype=np.int64),
        routes=routes,
    )


def credited(batch: StoredBatch, groups: Sequence[Group], algorithm: Algorithm) -> StoredBatch:
    """With advantages of tokens, which follow from log-probs too: waits for those. Raises DataError for one that is not a number."""
    is_response_T, step = batch.response_mask_T(), algorithm.scored_step(groups)
    is_own = isinstance(algorithm.config.advantage, CustomPart)  # no other looks at turns, a number for every token
    tokens = ScoredTokens(
        penalties_N=_penalties(batch, algorithm, is_response_T),
        old_N=_column(batch.old_logprobs, is_response_T),
        reference_N=_column(batch.reference_logprobs, is_response_T),
        values_N=_column(batch.values, is_response_T),
        process_N=_column(batch.process, is_response_T),
        turn_N=turns(is_response_T, batch.offsets[:-1], step.lengths_S) if is_own else None,
        **(_sampled(batch) if "tokens" in algorithm.config.needs else {}),
    )
    step = replace(step, tokens=tokens)
    credit = algorithm.credit(step)

    def spread(name: str, values_N: np.ndarray) -> Here[np.ndarray]:
        if not np.isfinite(values_N).all():
            raise DataError(f"{name} of tokens by algorithm.advantage.kind={algorithm.config.advantage.kind} are not all finite")
        spread_T = np.zeros(len(is_response_T), dtype=np.float32)
        spread_T[is_response_T] = values_N
        return Here(spread_T)

    returns_N = credit.checked_returns(step)
    returns = None if returns_N is None else spread("returns", returns_N)
    return replace(batch, token_advantages=spread("advantages", credit.by_token(step)), returns=returns)


def _sampled(batch: StoredBatch) -> dict[str, np.ndarray]:
    """Columns of ScoredTokens that the payloads have."""
    payloads = fetch([payload for payload in batch.payloads if payload is not None])
    masks = [slice(None) if payload.mask is None else payload.mask for payload in payloads]
    ids = [payload.token_ids[mask] for payload, mask in zip(payloads, masks, strict=True)]
    logprobs = [payload.logprobs[mask] for payload, mask in zip(payloads, masks, strict=True)]
    return {"token_ids_N": np.concatenate(ids).astype(np.int64), "rollout_N": np.concatenate(logprobs).astype(np.float64)}


def labelled(batch: StoredBatch, groups: Sequence[Group], algorithm: Algorithm, *, right_above: float) -> StoredBatch:
    """Batch for a model of outcomes: in the place of advantages 1 for every token of an answer that is right, else 0."""
    is_right = [sample.score.reward > right_above for _, sample, _ in segments_of(groups, algorithm)]
    return replace(batch, advantages=np.array(is_right, dtype=np.float32))


def segments_of(groups: Sequence[Group], algorithm: Algorithm) -> list[tuple[Prompt, Sample, StoredCompletion]]:
    """Sequences of the batch, each after its prompt and its sample."""
    return [
        (group.prompt, sample, segment)
        for group in groups
        for sample in _trained(group, algorithm)
        for segment in sample.segments
        if segment.num_tokens
    ]


def with_proximal(batch: StoredBatch, groups: Sequence[Group], algorithm: Algorithm, version: int) -> StoredBatch:
    """With an old policy that lies between those that sampled and the one after the update, which starts from `version`."""

    def places(spans: Sequence[VersionSpan]) -> tuple[tuple[float, int], ...]:
        return tuple(((version - span.version) / (version + 1 - span.version), span.num_tokens) for span in spans)

    return replace(batch, proximal=tuple(places(completion.spans) for completion in _completions(groups, algorithm)))


def _completions(groups: Sequence[Group], algorithm: Algorithm) -> list[StoredCompletion]:
    """Those that are trained on, in the order of the batch."""
    return [segment for _, _, segment in segments_of(groups, algorithm)]


def _penalties(batch: StoredBatch, algorithm: Algorithm, is_response_T: np.ndarray) -> np.ndarray | None:
    """float64 [N]: what the KL takes from the reward of each token."""
    config = algorithm.config
    if config.kl_coefficient == 0 or config.kl_in == "loss":
        return None
    old_N, reference_N = (_column(each, is_response_T) for each in (batch.old_logprobs, batch.reference_logprobs))
    assert old_N is not None and reference_N is not None, "a KL in the reward needs both first"
    return algorithm.kl_coefficient * kl_values(config.kl_estimator, old_N, reference_N)


def _column(stored: Stored[np.ndarray] | str | None, is_response_T: np.ndarray) -> np.ndarray | None:
    """float64 [N]; None for what is not there, or with the payloads."""
    return stored.get()[is_response_T].astype(np.float64) if isinstance(stored, Stored) else None


def _fresh(completion: StoredCompletion, servers: Mapping[str, int], *, recomputes: bool, replays: bool) -> tuple[int, int]:
    """Number of the server and tokens of the last span; those before are of older weights, or of another server with the same. What the
    last span followed must be computed as its server did: with these weights, also where a push came between two chunks of the prompt, and
    with the routes of these weights, where the trainer `replays` those by which tokens were first computed."""
    spans = completion.spans
    is_whole = recomputes or not completion.met_push
    is_fresh = spans[-1].push_id in servers and is_whole and (len(spans) == 1 or (recomputes and not replays))
    return (servers[spans[-1].push_id], spans[-1].num_tokens) if is_fresh else (-1, 0)


def sft_batch(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> TrainBatch:
    """(prompt, answer) token ids. Cross-entropy is what answers are trained by; rollout log-probs and advantages are zeros: no engine made
    them."""
    for prompt, _ in pairs:
        _check_prompt(len(prompt), "warm-start example")
    lengths = [len(prompt) + len(answer) for prompt, answer in pairs]
    zeros_T = np.zeros(sum(lengths), dtype=np.float32)
    is_answer_T = np.array([of_answer for prompt, answer in pairs for of_answer in [False] * len(prompt) + [True] * len(answer)])
    return TrainBatch(
        token_ids_T=np.array([token for pair in pairs for tokens in pair for token in tokens], dtype=np.int64),
        response_mask_T=is_answer_T,
        ce_weight_T=is_answer_T.astype(np.float32),
        rollout_logprobs_T=zeros_T,
        advantages_T=zeros_T,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    )


def _trained(group: Group, algorithm: Algorithm) -> list[Sample]:
    return [sample for sample, kept in zip(group.samples, algorithm.sample_mask(group), strict=True) if kept]


def _advantages(groups: Sequence[Group], algorithm: Algorithm) -> np.ndarray:
    """float32 [sequences]; 0 where the advantages of tokens come later."""
    samples = [sample for group in groups for sample in _trained(group, algorithm)]
    num_sequences = [sum(segment.num_tokens > 0 for segment in sample.segments) for sample in samples]
    if algorithm.config.credits_tokens:
        return np.zeros(sum(num_sequences), dtype=np.float32)
    step = algorithm.scored_step(groups)
    advantages_S = algorithm.credit(step).advantages_S
    assert advantages_S is not None, "an estimator of samples has one advantage for each"
    for group, advantage in zip(step.group_S, advantages_S, strict=True):
        if not np.isfinite(advantage):
            raise _not_finite("advantage", advantage, groups[group])
    return np.repeat(advantages_S, num_sequences).astype(np.float32)


def _check_rewards(groups: Sequence[Group], algorithm: Algorithm) -> None:
    for group in groups:
        if group.greedy is not None and not np.isfinite(group.greedy.reward):
            raise _not_finite("reward at temperature 0", group.greedy.reward, group)
        for sample in _trained(group, algorithm):
            for segment in sample.segments:
                if segment.num_tokens:
                    _check_prompt(segment.num_prompt, _name(group))
            if not np.isfinite(sample.score.reward):
                raise _not_finite("reward", sample.score.reward, group)


def _not_finite(what: str, value: float, group: Group) -> DataError:
    return DataError(
        f"{_name(group)}: {what} = {value} from rewards {group.rewards_G.tolist()}: must be finite, because one such sample turns every "
        "weight into NaN; let the reward return a number or raise"
    )


def _name(group: Group) -> str:
    return f"prompt {group.prompt.index} ({group.prompt.data_source})"


def _check_prompt(num_tokens: int, name: str) -> None:
    if num_tokens == 0:
        raise DataError(f"{name}: 0 prompt tokens: must be at least 1, because nothing would predict the first response token")


def _nothing_left(groups: Sequence[Group]) -> str:
    errors = [error for group in groups for error in group.errors]
    errors += [sample.score.error for group in groups for sample in group.samples if sample.score.error is not None]
    truncated = sum(sample.completion.finish_reason == "length" for group in groups for sample in group.samples)
    empty = sum(sample.num_tokens == 0 for group in groups for sample in group.samples)
    first = f", the first: {errors[0]}" if errors else ""
    return (
        f"batch of {len(groups)} groups = 0 samples to train on: {len(errors)} could not be scored{first}; {truncated} were truncated, "
        f"{empty} without a token. Mend the reward, raise rollout.max_response_tokens, do not mask truncated samples, or see what the "
        "servers answered (algorithm.overlong, observe.dump_every)"
    )
