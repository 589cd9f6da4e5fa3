"""Vocabulary entries that tokens were chosen from by top-k and top-p, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class KeptVocabulary:
    """Entries of token t are `ids[offsets[t] : offsets[t + 1]]`; none: it was chosen from the whole vocabulary, or not at all."""

    ids: np.ndarray  # int32 [entries]
    offsets: np.ndarray  # int64 [tokens + 1]

    @classmethod
    def of_counts(cls, ids: np.ndarray, counts: np.ndarray) -> "KeptVocabulary":
        """`counts` [tokens]: entries of each."""
        return cls(ids=ids.astype(np.int32, copy=False), offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))

    @classmethod
    def joined(cls, parts: "Sequence[KeptVocabulary]") -> "KeptVocabulary":
        """Sets of all parts' tokens, end to end."""
        ids = [part.ids for part in parts] or [np.zeros(0, dtype=np.int32)]
        counts = [part.counts for part in parts] or [np.zeros(0, dtype=np.int64)]
        return cls.of_counts(np.concatenate(ids), np.concatenate(counts))

    @classmethod
    def unrestricted(cls, num_tokens: int) -> "KeptVocabulary":
        return cls.of_counts(np.zeros(0, dtype=np.int32), np.zeros(num_tokens, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def nbytes(self) -> int:
        return int(self.ids.nbytes + self.offsets.nbytes)

    def take(self, tokens: np.ndarray) -> "KeptVocabulary":
        """Sets of these tokens, in that order; of -1 no entries."""
        known = tokens >= 0
        counts = np.zeros(len(tokens), dtype=np.int64)
        counts[known] = self.counts[tokens[known]]
        starts = np.repeat(self.offsets[tokens[known]], counts[known])
        within = np.arange(len(starts)) - np.repeat(np.cumsum(counts[known]) - counts[known], counts[known])
        return KeptVocabulary.of_counts(self.ids[starts + within], counts)

    def are_ascending(self) -> bool:
        """Each token's entries, so that none stands twice."""
        rises = np.diff(self.ids) > 0
        starts = self.offsets[1:-1]
        rises[starts[(starts > 0) & (starts < len(self.ids))] - 1] = True
        return bool(rises.all())

    def hold(self, token_ids: np.ndarray) -> np.ndarray:
        """bool [tokens]: the set has no entries, or the token is one."""
        counts = self.counts
        matches = np.flatnonzero(self.ids == np.repeat(token_ids.astype(np.int32), counts))
        found = counts == 0
        found[np.searchsorted(self.offsets, matches, side="right") - 1] = True
        return found
