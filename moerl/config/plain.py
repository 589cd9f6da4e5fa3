"""Values that no setting can have, whatever its type: numbers and text that other programs, files and terminals cannot take."""

from collections.abc import Mapping
from typing import Any

from moerl.types.errors import Problem, problem

LARGEST = 2**63 - 1


def unusable(value: Any, path: str) -> Problem | None:
    """The first thing wrong with it, or with what is in it."""
    match value:
        case bool() | None | float():
            return None
        case int():
            return _too_large(path, value) if abs(value) > LARGEST else None
        case str():
            return None if _is_text(value) else _no_text(path, value)
        case Mapping():
            found = (_of_entry(key, entry, f"{path}.{key}" if path else f"{key}") for key, entry in value.items())
        case list() | tuple():
            found = (unusable(entry, f"{path}.{index}") for index, entry in enumerate(value))
        case _:
            rule = "must be null, true, false, a number, text, a list or a section"
            return problem(path, value, rule, f"YAML read it as {type(value).__name__}", "the value in quotes, if it is text")
    return next((fault for fault in found if fault is not None), None)


def _of_entry(key: object, value: Any, path: str) -> Problem | None:
    return unusable(value, path) if not isinstance(key, str) or _is_text(key) else _no_text(ascii(path)[1:-1], key)


def _too_large(path: str, value: int) -> Problem:
    # Python itself writes no number of more than 4,300 digits.
    shown = value if value.bit_length() < 200 else f"a number of {value.bit_length()} bits"
    return problem(
        path, shown, f"must be at most {LARGEST}", "larger integers fit into no tensor, and no file's header", "a smaller number"
    )


def _no_text(path: str, value: str) -> Problem:
    reason = "some of its bytes are no UTF-8, so that it could be neither written to a file nor printed"
    return problem(path, value, "must be text", reason, "the value in UTF-8")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
