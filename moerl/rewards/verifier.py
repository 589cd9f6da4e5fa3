"""Verifier: a function from one `Check` to a number, made from a `RewardTerm`. Any exception marks the sample."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One response and what it is judged by; crosses to a worker process."""

    text: str
    data_source: str
    ground_truth: str
    extra_info: dict[str, Any]


Verdict = float | Mapping[str, Any]
"""A finite number, or a mapping whose "score" is one; further numbers in it are reported beside the term."""

Verifier = Callable[[Check], Verdict]
