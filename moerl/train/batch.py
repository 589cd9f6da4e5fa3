"""From scored groups, or from prompts and answers, to the sequences of a TrainBatch. Order in, order out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from moerl.algorithms.base import Algorithm
from moerl.types import DataError, EngineError, Group, RouteShape, Sample, TrainBatch, unknown_route


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    advantage: float
    routes: np.ndarray | None = None


def build_batch(groups: Sequence[Group], algorithm: Algorithm, routes: RouteShape | None = None) -> TrainBatch:
    """One sequence per sample, groups and samples in order. `routes`: of the model, if every sample must bring its own.

    Left out: samples with an error, outside the algorithm's mask, or without a token. Raises DataError for an advantage that is
    not a number and for a batch in which nothing is left.
    """
    sequences = [sequence for group in groups for sequence in _group_sequences(group, algorithm, routes)]
    if not sequences:
        raise DataError(_nothing_left(groups))
    return _lay_out(sequences, routes)


def sft_batch(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> TrainBatch:
    """(prompt, answer) token ids. Rollout log-probs and advantages are zeros: no engine made the answers and SFT ignores credit."""
    return _lay_out([_sft_sequence(prompt, answer) for prompt, answer in pairs], None)


def _group_sequences(group: Group, algorithm: Algorithm, routes: RouteShape | None) -> Iterable[_Sequence]:
    mask_G, advantages_G = algorithm.sample_mask(group), algorithm.advantages(group)
    for sample, kept, advantage in zip(group.samples, mask_G, advantages_G, strict=True):
        if kept and sample.score.error is None and sample.completion.token_ids:
            yield _sample_sequence(group, sample, float(advantage), routes)


def _sample_sequence(group: Group, sample: Sample, advantage: float, routes: RouteShape | None) -> _Sequence:
    completion = sample.completion
    if not np.isfinite(advantage):
        raise DataError(
            f"prompt {group.prompt.index} ({group.prompt.data_source}): advantage = {advantage} from rewards {group.rewards_G.tolist()}: "
            "must be finite, because one such sample turns every weight into NaN; let the reward return a number or raise"
        )
    if len(completion.token_ids) != len(completion.logprobs):
        raise EngineError(
            f"completion {completion.request_id}: {len(completion.logprobs)} log-probs for {len(completion.token_ids)} tokens: "
            "must be one each; the engine's response is damaged"
        )
    assert routes is None or completion.routes is not None, f"completion {completion.request_id}: no routes, which the runner checks"
    return _Sequence(
        prompt=_checked_prompt(group.prompt.token_ids, f"prompt {group.prompt.index} ({group.prompt.data_source})"),
        response=completion.token_ids,
        rollout_logprobs=completion.logprobs,
        advantage=advantage,
        routes=None if routes is None else completion.routes,
    )


def _sft_sequence(prompt: Sequence[int], answer: Sequence[int]) -> _Sequence:
    prompt = _checked_prompt(prompt, "warm-start example")
    return _Sequence(prompt=prompt, response=tuple(answer), rollout_logprobs=(0.0,) * len(answer), advantage=0.0)


def _checked_prompt(token_ids: Sequence[int], name: str) -> tuple[int, ...]:
    if not token_ids:
        raise DataError(f"{name}: 0 prompt tokens: must be at least 1, because nothing would predict the first response token")
    return tuple(token_ids)


def _lay_out(sequences: Sequence[_Sequence], routes: RouteShape | None) -> TrainBatch:
    lengths = [len(s.prompt) + len(s.response) for s in sequences]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    batch = TrainBatch(
        token_ids_T=np.zeros(offsets[-1], dtype=np.int64),
        response_mask_T=np.zeros(offsets[-1], dtype=bool),
        rollout_logprobs_T=np.zeros(offsets[-1], dtype=np.float32),
        advantages_T=np.zeros(offsets[-1], dtype=np.float32),
        offsets=offsets,
        routes_T=None if routes is None else _no_routes(int(offsets[-1]), routes),
    )
    for sequence, (start, end) in zip(sequences, pairwise(offsets), strict=True):
        response = slice(start + len(sequence.prompt), end)
        batch.token_ids_T[start : response.start] = sequence.prompt
        batch.token_ids_T[response] = sequence.response
        batch.response_mask_T[response] = True
        batch.rollout_logprobs_T[response] = sequence.rollout_logprobs
        batch.advantages_T[response] = sequence.advantage
        if batch.routes_T is not None and sequence.routes is not None:
            batch.routes_T[start : end - 1] = sequence.routes
    return batch


def _no_routes(num_tokens: int, shape: RouteShape) -> np.ndarray:
    return np.full((num_tokens, shape.num_layers, shape.top_k), unknown_route(shape.dtype), dtype=shape.dtype)


def _nothing_left(groups: Sequence[Group]) -> str:
    errors = [error for group in groups for error in group.errors]
    errors += [sample.score.error for group in groups for sample in group.samples if sample.score.error is not None]
    truncated = sum(sample.completion.finish_reason == "length" for group in groups for sample in group.samples)
    first = f", the first: {errors[0]}" if errors else ""
    return (
        f"batch of {len(groups)} groups = 0 samples to train on: {len(errors)} could not be scored{first}; {truncated} were truncated. "
        "Mend the reward, raise rollout.max_response_tokens, or do not mask truncated samples"
    )
