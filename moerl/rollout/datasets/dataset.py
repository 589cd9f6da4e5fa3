"""One row of a data set before it is rendered, and how unusable ones are reported."""

from dataclasses import dataclass
from typing import Any, Protocol

from moerl.types.errors import DataError

_MOST_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    messages: tuple[dict[str, Any], ...]
    """The chat so far: role and content of each message, both text, and what else the chat template may read of it."""
    data_source: str
    ground_truth: str
    extra_info: dict[str, Any]


class Dataset(Protocol):
    """Every row it can return is usable; `rows[i]` is the same whenever it is asked."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def name_of(self, index: int) -> str:
        """Name in messages: "train.jsonl, row 3" (rows count from 1; in a .jsonl file they are its lines)."""


class Complaints:
    """Collects what is wrong with rows; keeps the first few and the count of all."""

    def __init__(self) -> None:
        self._shown: list[str] = []
        self.count = 0

    def add(self, where: str, what: str) -> None:
        self.count += 1
        if len(self._shown) < _MOST_SHOWN:
            self._shown.append(f"* {where}: {what}")

    def raise_if_any(self, heading: str) -> None:
        if self.count:
            raise DataError(f"{heading.format(count=self.count)}\n{self}")

    def __str__(self) -> str:
        hidden = self.count - len(self._shown)
        return "\n".join(self._shown + ([f"* and {hidden} more"] if hidden else []))
