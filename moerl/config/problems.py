"""What the checks of this package share: a short way to write a `Problem`, and the value of a setting that is missing."""

from pathlib import Path

from moerl.types import Problem


class _NotSet:
    def __repr__(self) -> str:
        return "(not set)"

    def __reduce__(self) -> str:
        return "NOT_SET"


NOT_SET = _NotSet()


def problem(path: str, value: object, rule: str, reason: str, fix: str) -> Problem:
    return Problem(path=path, value=value, rule=rule, reason=reason, fix=fix)


def can_be(path: Path) -> bool:
    """Whether there could be such a file: names of more than 255 bytes have none, and Python's own questions end with OSError."""
    try:
        path.exists()
    except OSError:
        return False
    return True
