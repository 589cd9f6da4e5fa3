"""Whether a completion can be the answer to its request; routes are checked in moerl/rollout/fleet/route_check.py.

Every rule is tested by calls that walk over the tokens in C: thousands of completions of thousands of tokens pass through the driver.
"""

import math
from collections.abc import Iterator

from moerl.types.completion import Completion, SamplingParams
from moerl.types.errors import EngineError

_ROUNDING = 1e-3
"""A log-prob of a certain token, in a narrow dtype, may come out above 0 by as much."""


def check_completion(completion: Completion, sampling: SamplingParams, *, request_id: str, vocab_size: int, server: str) -> None:
    """EngineError with every rule it breaks."""
    broken = []
    if completion.request_id != request_id:
        broken.append(f"request_id = {completion.request_id!r}: must be the request's")
    broken += [*_tokens(completion, sampling, vocab_size), *_logprobs(completion), *_spans(completion), *_end(completion, sampling)]
    if broken:
        raise EngineError(
            f"{server}: {request_id}: the answer cannot be this request's: {'; '.join(broken)}. The server serves another model, "
            "or another version of moerl or of the engine; its log may say more"
        )


def _tokens(completion: Completion, sampling: SamplingParams, vocab_size: int) -> Iterator[str]:
    tokens = completion.token_ids
    if len(tokens) > sampling.max_tokens:
        yield f"{len(tokens)} tokens: must be at most max_tokens = {sampling.max_tokens}"
    low, high = min(tokens, default=0), max(tokens, default=0)
    if low < 0 or high >= vocab_size:
        yield f"token {low if low < 0 else high}: must be in the model's vocabulary [0, {vocab_size})"
    stops = frozenset(sampling.stop_token_ids)
    if not stops.isdisjoint(tokens[:-1]):
        at = next(index for index, token in enumerate(tokens) if token in stops)
        yield f"token {tokens[at]} at {at}: a stop token must be the last"


def _logprobs(completion: Completion) -> Iterator[str]:
    logprobs = completion.logprobs
    if len(logprobs) != len(completion.token_ids):
        yield f"{len(logprobs)} log-probs: must be as many as tokens, {len(completion.token_ids)}"
    if not math.isfinite(sum(logprobs)) or max(logprobs, default=0.0) > _ROUNDING:  # a sum is finite only if all of it is
        unsound = [logprob for logprob in logprobs if not math.isfinite(logprob) or logprob > _ROUNDING]
        yield f"log-prob {(unsound or [min(logprobs)])[0]}: must be a number and at most 0"


def _spans(completion: Completion) -> Iterator[str]:
    counts = [span.num_tokens for span in completion.spans]
    if sum(counts) != len(completion.token_ids) or min(counts, default=1) < 1:
        yield f"spans of {sum(counts)} tokens: must be of {len(completion.token_ids)}, none empty"


def _end(completion: Completion, sampling: SamplingParams) -> Iterator[str]:
    tokens, reason = completion.token_ids, completion.finish_reason
    is_stopped = bool(tokens) and tokens[-1] in sampling.stop_token_ids
    if (reason == "stop" and not is_stopped) or (reason == "length" and len(tokens) != sampling.max_tokens):
        rule = f"stop must end with a stop token, length with token {sampling.max_tokens}"
        yield f"finish_reason = {reason!r} with {len(tokens)} tokens: {rule}"
