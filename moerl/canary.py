"""Fixed prompts through every engine and through the trainer: the log-probs of the same tokens must agree.

A push is verified byte by byte; this finds what bytes cannot show: a wrong forward, stale fused or cached state, another temperature.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moerl.rollout.fleet.completion_check import check_completion
from moerl.rollout.server.contract import RolloutEngine
from moerl.types.batch import TrainBatch
from moerl.types.completion import Completion, SamplingParams
from moerl.types.errors import EngineError, EngineUnsound, WeightError

NUM_PROMPTS, NUM_TOKENS = 4, 8
"""Prompts of a canary, and the tokens that are drawn of each: few, since every server and the trainer compute them."""

_CAUSES = (
    "  every installed byte has the trainer's digest, so the engine has the weights; one engine only: it computes with other memory than "
    "the push installed into (a skipped repack, stale fused weights), or with cached keys and values; restart it",
    "  all engines, mean above 0.1: another model.path or temperature on one side, or a tensor that the engine uses and never reloads",
    "  all engines, mean of 0.001 to 0.05: bfloat16 or another kernel; compare in float32, or set weights.mismatch_limit accordingly",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCanary:
    """One engine's |trainer log-prob - engine log-prob| over its response tokens."""

    mean: float
    max: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult:
    mean: float
    """Over the response tokens of all engines."""
    max: float
    engines: dict[str, EngineCanary]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Answers of engines to the fixed prompts, to be compared."""

    answers: Mapping[str, Sequence[Completion]]
    """Answers of each engine, by its name, in the order of the prompts."""
    prompts: Sequence[tuple[int, ...]]
    version: int

    @property
    def batch(self) -> TrainBatch:
        """Those of one engine after those of another."""
        pairs = (zip(self.prompts, answer, strict=True) for answer in self.answers.values())
        return canary_batch([pair for each in pairs for pair in each])


def merged(asked: Iterable[Asked]) -> Asked:
    """One with the answers of all, of the same prompts and version."""
    first, *others = asked
    return replace(first, answers={**first.answers, **{name: answer for each in others for name, answer in each.answers.items()}})


async def ask_canary(
    engines: Sequence[RolloutEngine],
    prompts: Sequence[tuple[int, ...]],
    *,
    max_tokens: int,
    version: int,
    vocab_size: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> Asked:
    """Raises WeightError, which names them, if engines sampled with other weights than `version` or answered what cannot be right.

    Prompt i is sampled with seed `seed` + i.
    """
    if not engines or not prompts:
        raise WeightError(f"canary of {len(engines)} engines and {len(prompts)} prompts: needs at least one of each")
    sampling = [SamplingParams(max_tokens=max_tokens, seed=seed + i, temperature=temperature, goes_first=True) for i in range(len(prompts))]
    outcomes = await asyncio.gather(*(_ask(engine, prompts, sampling, version, vocab_size) for engine in engines), return_exceptions=True)
    faults = {engine.name: outcome for engine, outcome in zip(engines, outcomes, strict=True) if isinstance(outcome, BaseException)}
    for fault in faults.values():
        if not isinstance(fault, WeightError):
            raise fault
    if faults:
        raise _named(WeightError("\n".join(map(str, faults.values()))), faults)
    answers = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    return Asked(answers={engine.name: answer for engine, answer in zip(engines, answers, strict=True)}, prompts=prompts, version=version)


def compare_canary(asked: Asked, trainer_T: np.ndarray, *, limit: float) -> CanaryResult:
    """Raises WeightError, which names them, for engines whose mean difference exceeds `limit`. `trainer_T`: float32 [T] aligned with
    token_ids_T, at the same temperature."""
    batch = asked.batch
    if trainer_T.shape != batch.token_ids_T.shape:
        raise WeightError(
            f"canary: trainer_logprobs returned shape {trainer_T.shape}, must be [T] = {batch.token_ids_T.shape} as the tokens"
        )
    difference_T = np.abs(trainer_T.astype(np.float64) - batch.rollout_logprobs_T)
    num_prompts = len(asked.prompts)
    results, faults = {}, {}
    for number, name in enumerate(asked.answers):
        mine_T = _tokens_of(batch, first=number * num_prompts, count=num_prompts)
        results[name] = result = _summary(difference_T[mine_T])
        if not result.mean <= limit:  # also when it is not a number
            faults[name] = _describe(name, result, mine_T[_worst(difference_T[mine_T])], batch, trainer_T, num_prompts)
    if faults:
        raise _named(WeightError(_explain(tuple(faults.values()), version=asked.version, limit=limit)), faults)
    everything = _summary(difference_T[batch.response_mask_T])
    return CanaryResult(mean=everything.mean, max=everything.max, engines=results)


def _named(error: WeightError, names: Iterable[str]) -> WeightError:
    error.names = tuple(names)
    return error


def canary_batch(sequences: Sequence[tuple[tuple[int, ...], Completion]]) -> TrainBatch:
    """Prompts with their completions, laid end to end; advantages are 0."""
    lengths = [len(prompt) + len(completion.token_ids) for prompt, completion in sequences]
    return TrainBatch(
        token_ids_T=np.concatenate([[*prompt, *completion.token_ids] for prompt, completion in sequences]).astype(np.int64),
        response_mask_T=np.concatenate([[False] * len(prompt) + [True] * len(completion.token_ids) for prompt, completion in sequences]),
        rollout_logprobs_T=np.concatenate([[0.0] * len(prompt) + [*completion.logprobs] for prompt, completion in sequences]).astype(
            np.float32
        ),
        advantages_T=np.zeros(sum(lengths), dtype=np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    )


async def _ask(
    engine: RolloutEngine, prompts: Sequence[tuple[int, ...]], sampling: Sequence[SamplingParams], version: int, vocab_size: int
) -> list[Completion]:
    names = [f"canary-{version}-{i}" for i in range(len(prompts))]
    try:
        completions = await asyncio.gather(*map(engine.generate, prompts, sampling, names))
    except EngineUnsound as error:
        raise WeightError(str(error)) from error
    for name, params, completion in zip(names, sampling, completions, strict=True):
        _check(engine.name, completion, version)
        try:
            check_completion(completion, params, request_id=name, vocab_size=vocab_size, server=engine.name)
        except EngineError as error:
            raise WeightError(str(error)) from error
    return completions


def _check(name: str, completion: Completion, version: int) -> None:
    others = sorted({span.version for span in completion.spans} - {version})
    if others:
        raise WeightError(
            f"canary on {name}: sampled with weights of version {', '.join(map(str, others))}, must be {version} after the push; "
            "the engine went on with old weights or tags its tokens wrongly"
        )
    if not completion.token_ids or completion.finish_reason == "abort":
        raise WeightError(
            f"canary on {name}: {completion.request_id} ended with {completion.finish_reason!r} after {len(completion.token_ids)} tokens: "
            "nothing to compare; nobody may abort requests between a push and its canary"
        )


def _tokens_of(batch: TrainBatch, *, first: int, count: int) -> np.ndarray:
    """Positions of the response tokens of `count` sequences from `first` on."""
    begin, end = batch.offsets[first], batch.offsets[first + count]
    return begin + np.flatnonzero(batch.response_mask_T[begin:end])


def _summary(difference: np.ndarray) -> EngineCanary:
    return EngineCanary(mean=float(difference.mean()), max=float(difference.max()), num_tokens=len(difference))


def _worst(difference: np.ndarray) -> int:
    return int(np.argmax(np.where(np.isnan(difference), np.inf, difference)))


def _describe(name: str, result: EngineCanary, worst: int, batch: TrainBatch, trainer_T: np.ndarray, num_prompts: int) -> str:
    sequence = int(np.searchsorted(batch.offsets, worst, side="right")) - 1
    return (
        f"* {name}: mean {result.mean:.3g}, max {result.max:.3g} over {result.num_tokens} tokens; "
        f"worst at prompt {sequence % num_prompts}, position {worst - batch.offsets[sequence]}, "
        f"token {batch.token_ids_T[worst]}: trainer {trainer_T[worst]:.6g}, engine {batch.rollout_logprobs_T[worst]:.6g}"
    )


def _explain(faults: Sequence[str], *, version: int, limit: float) -> str:
    head = f"canary of version {version}: mean |log-prob(trainer) - log-prob(engine)| must be at most weights.mismatch_limit = {limit:g}"
    return "\n".join([head, *faults, "likely causes:", *_CAUSES])
