"""1 if math-verify finds the response's last answer equal to the ground truth, else 0.

A ground truth without math delimiters is read as LaTeX. math-verify's own time limits use signals and stop at C code, so they are
off: the pool's deadline ends a check.
"""

import logging

from moerl.config.schema.data_config import RewardTerm
from moerl.rewards.verifier import Check, Verifier

_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


def build(term: RewardTerm) -> Verifier:
    from math_verify import parse, verify

    # It warns once per process that its time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def check_answer(check: Check) -> float:
        wanted = parse(_delimited(check.ground_truth), parsing_timeout=None)
        if not wanted:
            raise ValueError(f"math-verify finds no answer in the ground truth {check.ground_truth!r}")
        said = parse(check.text, parsing_timeout=None)
        return float(verify(wanted, said, timeout_seconds=None))

    # The parsers are built on first use, which takes longer than a check may.
    check_answer(Check(text="$x^2$", data_source="", ground_truth="(x)^2", extra_info={}))
    return check_answer


def _delimited(ground_truth: str) -> str:
    return ground_truth if any(mark in ground_truth for mark in _DELIMITERS) else f"\\boxed{{{ground_truth}}}"
