"""Rules by which a completion can be the answer to its request, and its routes those of its tokens.

Every rule is tested by calls that walk over the tokens in C: thousands of completions of thousands of tokens pass through the driver.
"""

import math
from collections.abc import Iterator

import numpy as np

from moerl.types.completion import Completion, SamplingParams
from moerl.types.errors import EngineUnsound
from moerl.types.routes import RouteShape, is_unknown, unknown_route

_MAX_VERSIONS = 2**31
_MAX_COUNT = 2**63
_ROWS = 2**16
"""Routes of one token in one layer that are compared together: few calls, since each gives the interpreter away and waits for it again."""
_ROUNDING = 1e-3
"""A log-prob of a certain token, in a narrow dtype, may come out above 0 by as much."""


def check_completion(completion: Completion, sampling: SamplingParams, *, request_id: str, vocab_size: int, server: str) -> None:
    """EngineUnsound with every rule it breaks."""
    broken = []
    if completion.request_id != request_id:
        broken.append(f"request_id = {completion.request_id!r}: must be the request's")
    broken += [*_tokens(completion, sampling, vocab_size), *_logprobs(completion), *_spans(completion), *_end(completion, sampling)]
    broken += [*_sets(completion, sampling, vocab_size), *_drafts(completion), *_load(completion)]
    if broken:
        raise EngineUnsound(
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
    versions = [span.version for span in completion.spans]
    if min(versions, default=0) < 0 or max(versions, default=0) >= _MAX_VERSIONS or sorted(versions) != versions:
        yield f"versions {versions[:4]} of its spans: must be in [0, 2^31), in the order of pushes"


def _end(completion: Completion, sampling: SamplingParams) -> Iterator[str]:
    tokens, reason = completion.token_ids, completion.finish_reason
    is_stopped = bool(tokens) and tokens[-1] in sampling.stop_token_ids
    if (reason == "stop" and not is_stopped) or (reason == "length" and len(tokens) != sampling.max_tokens):
        rule = f"stop must end with a stop token, length with token {sampling.max_tokens}"
        yield f"finish_reason = {reason!r} with {len(tokens)} tokens: {rule}"


def _sets(completion: Completion, sampling: SamplingParams, vocab_size: int) -> Iterator[str]:
    sets = completion.sets
    if not sampling.filtered or not completion.token_ids:
        if sets is not None:
            yield f"entries of {len(sets)} tokens: nobody asked for them"
    elif sets is None or len(sets) != len(completion.token_ids):
        yield f"entries of {0 if sets is None else len(sets)} tokens: must be of {len(completion.token_ids)}"
    elif len(sets.ids) and not 0 <= sets.ids.min() <= sets.ids.max() < vocab_size:
        yield f"entries {sets.ids.min()} to {sets.ids.max()}: must be in the model's vocabulary [0, {vocab_size})"
    elif sampling.top_k and int(sets.counts.max()) > sampling.top_k:
        yield f"{int(sets.counts.max())} entries of a token: must be at most top_k = {sampling.top_k}"
    elif not sets.are_ascending():
        yield "entries of a token: must ascend, each once"
    elif not (found := sets.hold(np.array(completion.token_ids)) & (sets.counts > 0)).all():
        yield f"token {int(np.argmin(found))}: must be one of the entries it was chosen from"


def _drafts(completion: Completion) -> Iterator[str]:
    checks, accepted = completion.drafts.checks, completion.drafts.accepted
    if min(checks, accepted) < 0 or (accepted > 0 and checks == 0):
        yield f"{accepted} drafts accepted in {checks} checks: must be counts, and none without a check"


def _load(completion: Completion) -> Iterator[str]:
    load = completion.load
    if not 0 <= load.cache_share <= 1 or not 0 <= load.num_preempted < _MAX_COUNT:
        yield f"cache_share = {load.cache_share} after {load.num_preempted} preemptions: must be a share in [0, 1] and a count"


def check_routes(completion: Completion, *, num_prompt: int, shape: RouteShape) -> None:
    """EngineUnsound with every fault. A token whose entries are all unknown has no route; the trainer's router chooses for it."""
    faults = list(_route_faults(completion.routes, num_prompt + len(completion.token_ids) - 1, shape))
    if faults:
        raise EngineUnsound(
            f"completion {completion.request_id}: routes of {num_prompt} prompt and {len(completion.token_ids)} response tokens "
            + "; ".join(faults)
            + ". The engine serves another model, or its response is damaged; train.router_replay=off or trainer runs without its routes"
        )


def _route_faults(routes: np.ndarray | None, num_computed: int, shape: RouteShape) -> list[str]:
    expected = (num_computed, shape.num_layers, shape.top_k)
    wanted = f"must be {shape.dtype} {expected} (computed tokens, layers with experts, experts per token)"
    if routes is None:
        return [f"= None: {wanted}"]
    if routes.shape != expected or routes.dtype != shape.dtype:
        return [f"= {routes.dtype} {routes.shape}: {wanted}"]
    mark = unknown_route(routes.dtype)
    faulty, twins = {}, _has_twins(routes)
    if int(routes.max(initial=0)) >= shape.num_experts:  # the mark is no expert
        marked = (routes == mark).sum(axis=-1)
        faulty = {
            f"must be experts below {shape.num_experts}": ((routes >= shape.num_experts) & (routes != mark)).any(axis=-1),
            "must be known or unknown as a whole": (marked > 0) & (marked < shape.top_k),
        }
        twins &= marked == 0
    elif twins.any():
        twins[twins] = ~is_unknown(routes[twins])
    faulty["must be different experts"] = twins
    return [f"{_first(routes, where)}: {rule}" for rule, where in faulty.items() if where.any()]


def _has_twins(routes: np.ndarray) -> np.ndarray:
    """bool [tokens, layers]. Pair by pair, of columns that are contiguous and stay in the cache: ten times as fast as sorting the rows."""
    rows = routes.reshape(-1, routes.shape[-1])
    found = np.zeros(len(rows), dtype=bool)
    for first in range(0, len(rows), _ROWS):
        columns = np.ascontiguousarray(rows[first : first + _ROWS].T)
        for distance in range(1, len(columns)):
            found[first : first + _ROWS] |= (columns[distance:] == columns[:-distance]).any(axis=0)
    return found.reshape(routes.shape[:-1])


def _first(routes: np.ndarray, where: np.ndarray) -> str:
    token, layer = (int(index) for index in np.argwhere(where)[0])
    return f"at token {token}, layer {layer} of those with experts = {routes[token, layer].tolist()}"
