"""The state of all running requests as arrays, one row per slot: what an iteration touches is touched for all rows at once."""

import numpy as np

from moerl.rollout.hf.sampling import Draws, uniforms
from moerl.types import Completion, FinishReason, SamplingParams, VersionSpan


class SlotTable:
    """Row i is meaningful while slot i is taken."""

    def __init__(self, num_slots: int, max_context: int, vocab_size: int):
        self.prompt_length = np.zeros(num_slots, dtype=np.int64)
        self.num_generated = np.zeros(num_slots, dtype=np.int64)
        self._max_tokens = np.zeros(num_slots, dtype=np.int64)
        self._temperature = np.zeros(num_slots)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.zeros(num_slots)
        self._stops = np.zeros((num_slots, vocab_size), dtype=bool)
        self._uniforms = np.zeros((num_slots, max_context))
        self._tokens = np.zeros((num_slots, max_context), dtype=np.int64)
        self._logprobs = np.zeros((num_slots, max_context))
        self._versions = np.zeros((num_slots, max_context), dtype=np.int64)

    def take(self, slot: int, prompt_length: int, sampling: SamplingParams) -> None:
        self.prompt_length[slot], self.num_generated[slot], self._max_tokens[slot] = prompt_length, 0, sampling.max_tokens
        self._temperature[slot], self._top_k[slot], self._top_p[slot] = sampling.temperature, sampling.top_k, sampling.top_p
        self._stops[slot] = False
        self._stops[slot, list(sampling.stop_token_ids)] = True
        self._uniforms[slot, : sampling.max_tokens] = uniforms(sampling.seed, sampling.max_tokens)

    def draws(self, slots: np.ndarray) -> Draws:
        """For the next token of each of `slots`."""
        return Draws(
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            uniform=self._uniforms[slots, self.num_generated[slots]],
        )

    def record(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> np.ndarray:
        """Append one token to each of `slots`; True for those that are finished now."""
        at = self.num_generated[slots]
        self._tokens[slots, at], self._logprobs[slots, at], self._versions[slots, at] = tokens, logprobs, version
        self.num_generated[slots] = at + 1
        return self._stops[slots, tokens] | (at + 1 == self._max_tokens[slots])

    def last_tokens(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The token that each of `slots` feeds to the model next, and its position in the sequence."""
        at = self.num_generated[slots] - 1
        return self._tokens[slots, at], self.prompt_length[slots] + at

    def completion(self, slot: int, request_id: str, *, aborted: bool) -> Completion:
        count = int(self.num_generated[slot])
        stopped = count > 0 and bool(self._stops[slot, self._tokens[slot, count - 1]])
        reason: FinishReason = "abort" if aborted else "stop" if stopped else "length"
        return Completion(
            request_id=request_id,
            token_ids=tuple(self._tokens[slot, :count].tolist()),
            logprobs=tuple(self._logprobs[slot, :count].tolist()),
            spans=version_spans(self._versions[slot, :count]),
            finish_reason=reason,
        )


def version_spans(versions: np.ndarray) -> tuple[VersionSpan, ...]:
    """Runs of equal versions; empty for no tokens."""
    if not len(versions):
        return ()
    starts = np.flatnonzero(np.diff(versions, prepend=versions[0] - 1))
    counts = np.diff(starts, append=len(versions))
    return tuple(VersionSpan(version=int(versions[at]), num_tokens=int(count)) for at, count in zip(starts, counts, strict=True))
