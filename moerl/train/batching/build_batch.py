"""From scored groups to a StoredBatch, from prompts and answers to a TrainBatch. Order in, order out."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from moerl.algorithms.objective import Algorithm
from moerl.types.batch import TrainBatch
from moerl.types.completion import VersionSpan
from moerl.types.errors import DataError
from moerl.types.groups import Group
from moerl.types.routes import RouteShape
from moerl.types.stored import StoredCompletion
from moerl.types.stored_batch import StoredBatch

_NOBODY: Mapping[str, int] = MappingProxyType({})


def build_batch(
    groups: Sequence[Group],
    algorithm: Algorithm,
    routes: RouteShape | None = None,
    servers: Mapping[str, int] = _NOBODY,
    *,
    recomputes: bool = True,
) -> StoredBatch:
    """One sequence per sample, groups and samples in order. `routes`: of the model, if every sample brings its own. `servers`: numbers of
    those that have the weights from which the update starts, by the nonces of the pushes that brought them. `recomputes`: a completion that
    goes on after a push does so on keys and values of the new weights (rollout.partial); else of a mixture, which nobody can compare.

    Left out: samples with an error, outside the algorithm's mask, or without a token. Raises DataError for an advantage that is
    not a number, for an empty prompt, and for a batch in which nothing is left.
    """
    kept = [sample for group in groups for sample in _credited(group, algorithm)]
    if not kept:
        raise DataError(_nothing_left(groups))
    completions = [completion for completion, _ in kept]
    missing = [completion.request_id for completion in completions if routes is not None and not completion.routes_bytes]
    assert not missing, f"completions {missing[:4]}: no routes, for which collectors look"
    prompts = np.array([completion.num_prompt for completion in completions], dtype=np.int64)
    responses = np.array([completion.num_tokens for completion in completions], dtype=np.int64)
    return StoredBatch(
        payloads=tuple(completion.payload for completion in completions),
        prompt_lengths=prompts,
        response_lengths=responses,
        advantages=np.array([advantage for _, advantage in kept], dtype=np.float32),
        starts=np.concatenate([[0], np.cumsum(prompts + responses)[:-1]]).astype(np.int64),
        fresh=np.array([_fresh(completion.spans, servers, recomputes=recomputes) for completion in completions], dtype=np.int64),
        routes=routes,
    )


def _fresh(spans: Sequence[VersionSpan], servers: Mapping[str, int], *, recomputes: bool) -> tuple[int, int]:
    """Number of the server and tokens of the last span; those before are of older weights, or of another server with the same."""
    is_fresh = spans[-1].push_id in servers and (recomputes or len(spans) == 1)
    return (servers[spans[-1].push_id], spans[-1].num_tokens) if is_fresh else (-1, 0)


def sft_batch(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> TrainBatch:
    """(prompt, answer) token ids. Rollout log-probs and advantages are zeros: no engine made the answers and SFT ignores credit."""
    for prompt, _ in pairs:
        _check_prompt(len(prompt), "warm-start example")
    lengths = [len(prompt) + len(answer) for prompt, answer in pairs]
    zeros_T = np.zeros(sum(lengths), dtype=np.float32)
    return TrainBatch(
        token_ids_T=np.array([token for pair in pairs for tokens in pair for token in tokens], dtype=np.int64),
        response_mask_T=np.array([of_answer for prompt, answer in pairs for of_answer in [False] * len(prompt) + [True] * len(answer)]),
        rollout_logprobs_T=zeros_T,
        advantages_T=zeros_T,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    )


def _credited(group: Group, algorithm: Algorithm) -> Iterator[tuple[StoredCompletion, float]]:
    """Samples that are trained on, with its advantage."""
    mask_G, advantages_G = algorithm.sample_mask(group), algorithm.advantages(group)
    for sample, kept, advantage in zip(group.samples, mask_G, advantages_G, strict=True):
        if kept and sample.score.error is None and sample.completion.num_tokens:
            name = f"prompt {group.prompt.index} ({group.prompt.data_source})"
            _check_prompt(sample.completion.num_prompt, name)
            if not np.isfinite(advantage):
                raise DataError(
                    f"{name}: advantage = {advantage} from rewards {group.rewards_G.tolist()}: must be finite, because one such sample "
                    "turns every weight into NaN; let the reward return a number or raise"
                )
            yield sample.completion, float(advantage)


def _check_prompt(num_tokens: int, name: str) -> None:
    if num_tokens == 0:
        raise DataError(f"{name}: 0 prompt tokens: must be at least 1, because nothing would predict the first response token")


def _nothing_left(groups: Sequence[Group]) -> str:
    errors = [error for group in groups for error in group.errors]
    errors += [sample.score.error for group in groups for sample in group.samples if sample.score.error is not None]
    truncated = sum(sample.completion.finish_reason == "length" for group in groups for sample in group.samples)
    first = f", the first: {errors[0]}" if errors else ""
    return (
        f"batch of {len(groups)} groups = 0 samples to train on: {len(errors)} could not be scored{first}; {truncated} were truncated. "
        "Mend the reward, raise rollout.max_response_tokens, or do not mask truncated samples"
    )
