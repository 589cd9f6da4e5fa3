"""Prompts, and the scored samples of each."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from moerl.types.stored import StoredCompletion


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task to be sampled `group_size` times."""

    index: int
    """Position in the run's draw order, unique over all epochs. Sampling seeds derive from it."""
    token_ids: tuple[int, ...]
    """The rendered chat template, ready for an engine."""
    text: str
    """The same, as text: for dumps and people."""
    data_source: str
    ground_truth: str
    extra_info: dict[str, Any] = field(default_factory=dict)
    shown_ids: tuple[int, ...] = ()
    """The same with the data set's answer before its end, for a policy that teaches itself; empty where none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward and what it was made of."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    """Each term's unweighted value, by the name of the term."""
    error: str | None = None
    """Why this sample could not be scored; its reward is then 0 and it is left out of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One scored answer: a completion, or several segments of tokens. Tokens, routes and text are in their payloads."""

    completion: "StoredCompletion"
    """The last segment."""
    score: Score
    earlier: "tuple[StoredCompletion, ...]" = ()
    """Segments before it, in order: each a sequence of its own, as after a summary of the turns before. They have the sample's credit."""

    @property
    def segments(self) -> "tuple[StoredCompletion, ...]":
        return (*self.earlier, self.completion)

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy produced."""
        return sum(segment.num_tokens for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All samples of one prompt. `samples` holds only those that could be scored; `errors` the reasons of the others."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    errors: tuple[str, ...] = ()
    greedy: Score | None = None
    """Score of one more completion, at temperature 0, which is not trained on; None where no algorithm asks for it, or it has none."""
    lacks_greedy: bool = False
    """That completion was asked for and could not be scored: the last of `errors` says why."""

    @property
    def rewards_G(self) -> np.ndarray:
        return np.array([sample.score.reward for sample in self.samples], dtype=np.float64)

    @property
    def lengths_G(self) -> np.ndarray:
        """Tokens that the policy produced in each sample."""
        return np.array([sample.num_tokens for sample in self.samples], dtype=np.int64)
