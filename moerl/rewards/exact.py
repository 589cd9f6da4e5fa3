"""1 if the response is the ground truth, character by character; else 0."""

from moerl.config.schema.data_config import RewardTerm
from moerl.rewards.verifier import Check, Verifier


def build(term: RewardTerm) -> Verifier:
    return verify


def verify(check: Check) -> float:
    return float(check.text == check.ground_truth)
