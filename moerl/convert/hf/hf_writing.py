"""Write tensors as a Hugging Face folder: files of safetensors, their index, config.json and what else belongs to the model."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moerl.convert.tensors.count_nonfinite import NONFINITE, NonFinite, count_nonfinite, report
from moerl.convert.tensors.entry import Entry
from moerl.convert.tensors.safetensors_file import bytes_of, header_of
from moerl.convert.tensors.writing import DIGESTS, FileJob, Finished, Output
from moerl.models.hf_checkpoint import INDEX, by_size
from moerl.types.errors import ConvertError, problem

CARRIED = (
    "*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.model", "*.txt", "*.py", "*.md", "*.tiktoken", "LICENSE*", "NOTICE*",
)  # fmt: skip
"""Files beside the weights that belong to a model: generation_config.json, tokenizer, chat templates, code, licence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    shard_bytes: int = 5 * 10**9
    workers: int = 2
    nonfinite: NonFinite = "warn"


def hf_jobs(entries: Sequence[Entry], options: WriteOptions) -> list[FileJob]:
    """Files of about `shard_bytes`, each with at least one tensor, in the order of `entries`."""
    shards = list(by_size(entries, lambda entry: entry.num_bytes, options.shard_bytes))
    names = (
        ["model.safetensors"] if len(shards) == 1 else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    return [_job(name, shard, options) for name, shard in zip(names, shards, strict=True)]


def complete_hf(
    directory: Path, finished: Sequence[Finished], *, entries: Sequence[Entry], config: Mapping[str, Any], carried_from: Path | None,
    nonfinite: NonFinite,
) -> None:  # fmt: skip
    """Files that make those of `hf_jobs` a folder: their index, `config` as config.json, tokenizer and generation settings of
    `carried_from`. Raises ConvertError."""
    report(finished, nonfinite)
    _write_index(directory, entries, finished)
    for file in carried_files(carried_from):
        assert carried_from is not None
        copy = directory / file.relative_to(carried_from)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def carried_files(directory: Path | None) -> list[Path]:
    """Raises ConvertError with every one that is a link out of the folder, but for those to Hugging Face's cache: a file of somebody else
    would be copied and published."""
    if directory is None:
        return []
    skipped = {INDEX, "config.json", DIGESTS, "manifest.json", "state.json", "metadata.json"}
    found = sorted({file for pattern in CARRIED for file in directory.glob(pattern) if file.is_file() and file.name not in skipped})
    abroad = [file for file in found if not (_is_cached(at := file.resolve()) or at.is_relative_to(directory.resolve()))]
    if abroad:
        rule, reason = f"must be no link out of {directory}", "it would be copied beside the weights, whatever it is"
        fix = "the file itself in its place, or --files-from the folder that has it"
        raise ConvertError([problem(file.name, str(file.resolve()), rule, reason, fix) for file in abroad])
    return found


def _is_cached(file: Path) -> bool:
    return file.parent.name == "blobs" and file.parents[1].name.startswith("models--")


def _job(name: str, entries: list[Entry], options: WriteOptions) -> FileJob:
    header = header_of(entries)

    def write(output: Output) -> dict[str, Any]:
        output.write(header)
        counts = {entry.name: _write_entry(entry, output, options.nonfinite) for entry in entries}
        return {"tensors": [entry.name for entry in entries], NONFINITE: {name: count for name, count in counts.items() if count}}

    num_bytes = len(header) + sum(entry.num_bytes for entry in entries)
    return FileJob(name=name, num_bytes=num_bytes, contents=header.decode(errors="replace"), write=write)


def _write_entry(entry: Entry, output: Output, nonfinite: NonFinite) -> int:
    """How many of its values are not finite."""
    begin, count = output.tell(), 0
    for piece in entry.pieces():
        assert piece.dtype == entry.dtype, f"{entry.name}: a piece of {piece.dtype}, not {entry.dtype}"
        output.write(bytes_of(piece))
        count += count_nonfinite(piece) if nonfinite != "ignore" else 0
    assert output.tell() - begin == entry.num_bytes, f"{entry.name}: {output.tell() - begin} bytes, not {entry.num_bytes}"
    return count


def _write_index(directory: Path, entries: Sequence[Entry], finished: Sequence[Finished]) -> None:
    if len(finished) == 1:
        return
    weight_map = {name: each.name for each in finished for name in each.notes["tensors"]}
    total = sum(entry.num_bytes for entry in entries)
    contents = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(contents, indent=2) + "\n")
