"""Continuation of a completion that a push broke off: the request for the rest, and both parts as one (rollout.partial)."""

from dataclasses import replace
from itertools import groupby

import numpy as np

from moerl.types.completion import Completion, SamplingParams, VersionSpan
from moerl.types.kept_vocabulary import KeptVocabulary


def rest(prompt_ids: tuple[int, ...], sampling: SamplingParams, so_far: Completion | None) -> tuple[tuple[int, ...], SamplingParams]:
    """The request for what is missing of `so_far`, which a push ended: from any server, and joined to one completion by `joined`.

    It is drawn as the whole would have been: `SamplingParams.num_drawn` says how many random numbers are used up.
    """
    if so_far is None or not so_far.token_ids:
        return prompt_ids, sampling
    num_drawn = len(so_far.token_ids)
    return (*prompt_ids, *so_far.token_ids), replace(sampling, max_tokens=sampling.max_tokens - num_drawn, num_drawn=num_drawn)


def joined(so_far: Completion | None, more: Completion) -> Completion:
    """`more` answers rest(..., so_far).

    A token keeps the route it had when it was computed first: those after the last token of `so_far` come from `more`, which has routes of
    all tokens, as computed anew.
    """
    if so_far is None or not so_far.token_ids:
        return more
    if not more.token_ids:
        return replace(so_far, finish_reason=more.finish_reason, drafts=so_far.drafts + more.drafts, load=more.load)
    routes = more.routes
    if routes is not None and so_far.routes is not None:
        routes = np.concatenate([so_far.routes, routes[len(so_far.routes) :]])
    sets = more.sets
    if sets is not None and so_far.sets is not None:
        sets = KeptVocabulary.joined([so_far.sets, sets])
    return replace(
        more,
        token_ids=so_far.token_ids + more.token_ids,
        logprobs=so_far.logprobs + more.logprobs,
        spans=_joined_spans(so_far.spans + more.spans),
        routes=routes,
        sets=sets,
        drafts=so_far.drafts + more.drafts,
    )


def completed(completion: Completion, sampling: SamplingParams) -> Completion:
    """One that was ended just after its last token has ended by itself. `sampling` of the whole."""
    tokens = completion.token_ids
    if completion.finish_reason != "abort" or not tokens:
        return completion
    if tokens[-1] in sampling.stop_token_ids:
        return replace(completion, finish_reason="stop")
    return replace(completion, finish_reason="length") if len(tokens) == sampling.max_tokens else completion


def _joined_spans(spans: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
    runs = ([*run] for _, run in groupby(spans, key=lambda span: (span.version, span.push_id)))
    return tuple(replace(run[0], num_tokens=sum(span.num_tokens for span in run)) for run in runs)
