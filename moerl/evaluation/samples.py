"""The file of an evaluation's samples: samples/NAME.jsonl, one line per sample, prompt after prompt, while they are made.

What was written before is kept if it belongs to the same rows, so that an evaluation that was stopped goes on where it was.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import xxhash

from moerl.evaluation.estimates import Outcome
from moerl.observe.records import read_records, replace_records, to_line
from moerl.rollout.fleet.collector import Answer
from moerl.types.groups import Prompt, Score

Record = dict[str, Any]


def record_of(prompt: Prompt, index: int, answer: Answer, score: Score, *, pass_reward: float) -> Record:
    """Record of sample `index` of the prompt."""
    return {
        "prompt_index": prompt.index,
        "row": _digest(prompt),
        "sample": index,
        "data_source": prompt.data_source,
        "prompt": prompt.text,
        "ground_truth": prompt.ground_truth,
        "response": answer.text,
        "reward": score.reward,
        # A sum of weighted parts carries rounding.
        "passed": score.error is None and score.reward >= pass_reward - 1e-6,
        "parts": dict(score.parts),
        "length": answer.completion.num_tokens,
        "finish_reason": answer.completion.finish_reason,
        "error": score.error,
    }


def num_alike(found: Sequence[Sequence[Record]], prompts: Sequence[Prompt]) -> int:
    """How many of the prompts, from the first on, are those that `found` has samples of, with all that their scores were made from."""
    for number, (records, prompt) in enumerate(zip(found, prompts, strict=False)):
        digest = _digest(prompt)
        if any(record.get("row") != digest for record in records):
            return number
    return min(len(found), len(prompts))


def _digest(prompt: Prompt) -> str:
    """Digest of the row: what is asked, and what an answer to it is scored by."""
    row = [prompt.text, prompt.data_source, prompt.ground_truth, prompt.extra_info]
    return xxhash.xxh3_128_hexdigest(json.dumps(row, sort_keys=True, default=repr).encode())


def outcome_of(record: Mapping[str, Any]) -> Outcome:
    return Outcome(
        reward=record["reward"],
        passed=record["passed"],
        length=record["length"],
        truncated=record["finish_reason"] == "length",
        error=record["error"],
        parts=record["parts"],
    )


class SampleFile:
    """Open for appending inside `with`."""

    def __init__(self, path: Path, *, samples: int):
        """`samples` of each prompt."""
        self._path, self._samples = path, samples
        records = read_records(path) if path.exists() else []
        whole = len(records) // samples * samples
        self.found = [records[start : start + samples] for start in range(0, whole, samples)]
        """Outcomes of prompts 0, 1, ... that have all of their samples."""

    def keep(self, num_prompts: int) -> None:
        """The first `num_prompts` of those found, and nothing else."""
        self.found = self.found[:num_prompts]
        replace_records(self._path, [record for records in self.found for record in records])

    def add(self, records: Sequence[Record]) -> None:
        """The next prompt's."""
        self._file.writelines(to_line(record) for record in records)
        self._file.flush()

    def __enter__(self) -> Self:
        # A lone surrogate, which UTF-8 cannot hold, becomes its own escape, as in moerl/observe/records.py.
        self._file = self._path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
