"""Share of the ground truth's character positions that the response has right. A dense signal for models that start from nothing."""

from moerl.config.schema.data_config import RewardTerm
from moerl.rewards.verifier import Check, Verifier


def build(term: RewardTerm) -> Verifier:
    return verify


def verify(check: Check) -> float:
    """In [0, 1]; text beyond the ground truth's length neither adds nor takes."""
    if not check.ground_truth:
        raise ValueError("the ground truth is empty: it has no positions to compare")
    agreeing = sum(said == wanted for said, wanted in zip(check.text, check.ground_truth, strict=False))
    return agreeing / len(check.ground_truth)
