"""Limits of what a server takes, whichever engine serves it: sizes and numbers that no run asks for, some of which no engine survives."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moerl.types.completion import SamplingParams
from moerl.types.push import Manifest, TransportOffer
from moerl.types.routes import RouteShape

MAX_STOP_TOKENS = 1024
"""Models name a dozen."""

PUSH_BYTES = 2**30
"""Size of a body of a push's verbs, at most: a manifest has some 300 bytes for each piece of a tensor."""

_INT_LIMIT = 2**31
"""Engines keep numbers in 32 bits, some of them in the memory of a GPU."""

_MAX_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_context: int
    vocab_size: int
    routes: RouteShape | None = None
    """None: the model has no experts."""
    has_sets: bool = False
    """The engine says what top-k and top-p left."""
    most_left: int | None = None
    """Entries that it says of a token, at most, so that top_k must bound them; None: any number."""

    @property
    def body_bytes(self) -> int:
        """Size of a body, at most: every token of a full context in 16 characters, and a MiB for all else."""
        return 2**20 + 16 * self.max_context

    def violation(self, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> str:
        """The first rule the request breaks, with what to do; empty if none."""
        return next(self._violations(prompt_ids, sampling), "")

    def _violations(self, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> Iterator[str]:
        """Sizes first: what is too long is not looked at."""
        num_prompt, num_stops = len(prompt_ids), len(sampling.stop_token_ids)
        if not num_prompt:
            yield "the prompt must have at least one token"
        if num_prompt + sampling.max_tokens > self.max_context:
            rule = f"must be at most model.max_context = {self.max_context}"
            fix = "shorten the prompt or rollout.max_response_tokens, or raise model.max_context"
            yield f"prompt of {num_prompt} tokens + max_tokens = {sampling.max_tokens}: {rule}; {fix}"
        if num_stops > MAX_STOP_TOKENS:
            yield f"{num_stops} stop tokens: must be at most {MAX_STOP_TOKENS}"
        tokens = (*prompt_ids, *sampling.stop_token_ids)
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self.vocab_size:
            yield f"token {low if low < 0 else high} is outside the model's vocabulary [0, {self.vocab_size})"
        yield from self._numbers(num_prompt, sampling)

    def _numbers(self, num_prompt: int, sampling: SamplingParams) -> Iterator[str]:
        if sampling.max_tokens < 1:
            yield f"max_tokens = {sampling.max_tokens}: must be at least 1"
        if not 0 <= sampling.num_drawn < num_prompt:
            yield f"num_drawn = {sampling.num_drawn}: must be in [0, {num_prompt}), the prompt's tokens"
        if not 0 <= sampling.seed < 2**128:
            yield f"seed = {sampling.seed}: must be in [0, 2^128)"
        if not 0 <= sampling.temperature < float("inf"):
            yield f"temperature = {sampling.temperature}: must be a number and at least 0"
        if not 0 < sampling.top_p <= 1:
            yield f"top_p = {sampling.top_p}: must be in (0, 1]"
        if not 0 <= sampling.top_k < _INT_LIMIT:
            yield f"top_k = {sampling.top_k}: must be in [0, 2^31)"
        if self.routes is None and sampling.returns_routes:
            yield "returns_routes: needs a model with experts; this one is dense"
        if sampling.filtered and sampling.temperature == 0:
            yield "filtered: has no meaning at temperature 0, where the largest is taken"
        if sampling.filtered and not self.has_sets:
            yield "filtered: this engine does not say what top-k and top-p left"
        if sampling.filtered and self.most_left is not None and not 1 < sampling.top_k <= self.most_left:
            yield f"filtered with top_k = {sampling.top_k}: must be in [2, {self.most_left}], which this engine says at most"


def push_violation(*, offer: TransportOffer | None = None, manifest: Manifest | None = None, version: int = 0, **others: Any) -> str:
    """The first rule that arguments of a push's verb break; empty if none."""
    version = version if manifest is None else manifest.version
    if not 0 <= version < _INT_LIMIT:
        return f"version = {version}: must be in [0, 2^31)"
    if offer is None:
        return ""
    host, _, port = offer.address.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 2**16
    if not is_port or not 0 < len(host) <= 255:
        return f"address = {offer.address[:300]!r}: must be host:port"
    if not 0 < offer.seconds <= _MAX_SECONDS:
        return f"seconds = {offer.seconds}: must be above 0 and at most {_MAX_SECONDS:g}, a day"
    return ""
