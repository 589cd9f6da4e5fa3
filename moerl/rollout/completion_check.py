"""Whether a completion can be the answer to its request; routes are checked in moerl/rollout/routes.py."""

import math

from moerl.types import Completion, EngineError, SamplingParams

_ROUNDING = 1e-3
"""A log-prob of a certain token, in a narrow dtype, may come out above 0 by as much."""


def check_completion(completion: Completion, sampling: SamplingParams, *, request_id: str, vocab_size: int, server: str) -> None:
    """EngineError with every rule it breaks."""
    tokens, logprobs, spans = completion.token_ids, completion.logprobs, completion.spans
    outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
    unsound = next((logprob for logprob in logprobs if not math.isfinite(logprob) or logprob > _ROUNDING), None)
    num_spanned = sum(span.num_tokens for span in spans)
    stops = [at for at, token in enumerate(tokens) if token in sampling.stop_token_ids] if sampling.stop_token_ids else []
    end = {"stop": stops[-1:] == [len(tokens) - 1], "length": len(tokens) == sampling.max_tokens, "abort": True}
    rules = {
        f"request_id = {completion.request_id!r}: must be the request's": completion.request_id == request_id,
        f"{len(tokens)} tokens: must be at most max_tokens = {sampling.max_tokens}": len(tokens) <= sampling.max_tokens,
        f"token {outside}: must be in the model's vocabulary [0, {vocab_size})": outside is None,
        f"{len(logprobs)} log-probs: must be as many as tokens, {len(tokens)}": len(logprobs) == len(tokens),
        f"log-prob {unsound}: must be a number and at most 0": unsound is None,
        f"spans of {num_spanned} tokens: must be of {len(tokens)}, none empty": num_spanned == len(tokens)
        and all(span.num_tokens > 0 for span in spans),
        f"finish_reason = {completion.finish_reason!r} with {len(tokens)} tokens: stop must end with a stop token, length with token "
        f"{sampling.max_tokens}": end[completion.finish_reason],
        f"token {tokens[stops[0]] if stops else ''} at {stops[0] if stops else ''}: a stop token must be the last": stops in ([], [len(tokens) - 1]),
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise EngineError(
            f"{server}: {request_id}: the answer cannot be this request's: {'; '.join(broken)}. The server serves another model, or another "
            "version of moerl or of the engine; its log may say more"
        )
