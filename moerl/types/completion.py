"""One request to a rollout server and its completion, as they cross processes."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from moerl.types.kept_vocabulary import KeptVocabulary

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one completion is drawn. Log-probs are those of softmax(logits / temperature), before top-k and top-p unless `filtered`."""

    max_tokens: int
    seed: int
    temperature: float = 1.0
    """0 means greedy; its log-probs are reported at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the completion; the token itself is part of it."""
    num_drawn: int = 0
    """How many tokens at the end of the prompt this completion drew before it was ended: the random numbers that follow are used."""
    filtered: bool = False
    """Log-probs are of the distribution that top-k and top-p leave, and the completion brings the entries they leave."""
    returns_routes: bool = False
    """The completion brings the experts its tokens went to."""
    goes_first: bool = False
    """Before others that wait for a slot of the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """`num_tokens` consecutive tokens that were sampled with weights `version`."""

    version: int
    num_tokens: int
    push_id: str = field(default="", compare=False)
    """Nonce of the push that brought them to the server that sampled; empty: none did. Another one in every run."""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Work of an engine that drafts tokens, for one completion or several."""

    checks: int = 0
    """Passes of the model that checked drafts. Each gave a token, and those accepted."""
    accepted: int = 0
    """Drafted tokens that they took over."""

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return DraftCounts(self.checks + other.checks, self.accepted + other.accepted)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """Pressure on a server's cache of keys and values, when it answered."""

    cache_share: float = 0.0
    """Share of the cache that requests hold; of several caches (data-parallel attention) the fullest one's."""
    num_preempted: int = 0
    """Times that the engine took a request's cache away since it started, for others; the request goes on when it is computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Answer of an engine: `token_ids` and `logprobs` have the same length, and so have the spans in total.

    Example: token_ids (17, 4, 1), logprobs (-0.2, -1.1, -0.01), spans (VersionSpan(version=3, num_tokens=3),).
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    routes: np.ndarray | None = field(default=None, compare=False)
    """uint8 or uint16 [prompt + response tokens - 1, layers, top_k], see RouteShape: the last token was sampled, not computed. None if
    they were not asked for or nothing was sampled."""
    sets: KeptVocabulary | None = field(default=None, compare=False)
    """Vocabulary entries that top-k and top-p left for each token; None if they were not asked for or nothing was sampled."""
    drafts: DraftCounts = field(default=DraftCounts(), compare=False)
    load: ServerLoad = field(default=ServerLoad(), compare=False)
    """Load of the server, as it sent this."""
