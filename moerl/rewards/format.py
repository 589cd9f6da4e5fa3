"""1 if `pattern` matches the whole response, else 0. Python's `re` without flags: write (?s) where "." shall cross lines."""

import re

from moerl.config.schema.data_config import RewardTerm
from moerl.rewards.verifier import Check, Verifier


def build(term: RewardTerm) -> Verifier:
    if term.pattern is None:
        raise ValueError("kind=format needs a pattern")
    pattern = re.compile(term.pattern)

    def verify(check: Check) -> float:
        return float(pattern.fullmatch(check.text) is not None)

    return verify
