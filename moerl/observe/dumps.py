"""Prompts and responses for people to read: samples/step-000010.jsonl, one line per sample of the step's first groups.

Where engines returned routes, step-000010.routes.npz beside it holds them, an array [tokens, layers, top_k] by `request_id`.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moerl.observe.records import replace_records
from moerl.types.groups import Group, Sample
from moerl.types.stored import fetch

_FETCH_SECONDS = 60.0
"""Time for the shown samples of a step to come, which are few."""


class SampleDumps:
    """Dumps the run's first and last step and every `every`-th; 0 dumps none.

    The last step is the one before `dump_last`: a run that fails leaves the samples it failed after.
    """

    def __init__(self, directory: Path, *, every: int, num_groups: int):
        self._directory = directory
        self._every = every
        self._num_groups = num_groups
        self._not_dumped: tuple[int, Sequence[Group]] | None = None

    def truncate_after(self, step: int) -> None:
        """Removes what an earlier process dumped past `step`."""
        for found, path in dumped_steps(self._directory).items():
            if found > step:
                path.unlink()
                _routes_path(path).unlink(missing_ok=True)

    def step(self, version: int, groups: Sequence[Group]) -> None:
        if self._every == 0:
            return
        shown = groups[: self._num_groups]
        if version == 1 or version % self._every == 0:
            self._dump(version, shown)
        else:
            self._not_dumped = (version, shown)

    def dump_last(self) -> None:
        """While what the samples refer to can still be fetched."""
        if self._not_dumped is not None:
            version, shown = self._not_dumped
            self._not_dumped = None
            self._dump(version, shown)

    def _dump(self, version: int, groups: Sequence[Group]) -> None:
        path = self._directory / f"step-{version:06d}.jsonl"
        completions = [sample.completion for group in groups for sample in group.samples]
        payloads = fetch([completion.payload for completion in completions], seconds=_FETCH_SECONDS)
        replace_records(path, sample_records(version, groups, [payload.text for payload in payloads]))
        routes = {c.request_id: p.routes for c, p in zip(completions, payloads, strict=True) if p.routes is not None}
        if routes:
            beside = path.with_suffix(".new.npz")
            np.savez_compressed(beside, **routes)  # type: ignore[arg-type]
            os.replace(beside, _routes_path(path))
        self._not_dumped = None


def dumped_steps(directory: Path) -> dict[int, Path]:
    """The dump of every step that has one, in the order of steps. Files of other names, as copies of dumps, are somebody else's."""
    paths = [path for path in directory.glob("step-*.jsonl") if re.fullmatch(r"step-\d{6,}", path.stem)]
    return dict(sorted((int(path.stem.removeprefix("step-")), path) for path in paths))


def _routes_path(dump: Path) -> Path:
    return dump.with_suffix(".routes.npz")


def sample_records(version: int, groups: Sequence[Group], texts: Iterable[str]) -> Iterator[dict[str, Any]]:
    """One record per sample; one that could not be scored has an error and null for what is not known of it. `texts` of the others."""
    next_text = iter(texts)
    for group in groups:
        prompt = group.prompt
        about = {"step": version, "prompt_index": prompt.index, "data_source": prompt.data_source, "prompt": prompt.text}
        about["ground_truth"] = prompt.ground_truth
        for sample in group.samples:
            yield {**about, **_sample_fields(sample, next(next_text))}
        for error in group.errors:
            yield {**about, **dict.fromkeys(_UNKNOWN), "parts": {}, "versions": [], "error": error}


_UNKNOWN = ("request_id", "response", "reward", "length", "finish_reason")


def _sample_fields(sample: Sample, text: str) -> dict[str, Any]:
    return {
        "request_id": sample.completion.request_id,
        "response": text,
        "reward": sample.score.reward,
        "length": sample.num_tokens,
        "finish_reason": sample.completion.finish_reason,
        "parts": dict(sample.score.parts),
        "versions": [[span.version, span.num_tokens] for segment in sample.segments for span in segment.spans],
        "error": sample.score.error,
    }
