"""Is a checkpoint what was written: a check of names and sizes that costs nothing, and one of every byte.

Ranks that load a checkpoint digest what they read (shard_reader.py); the check of every byte is for what nobody loads.

An error names every damaged file, what it held, and the newest older checkpoint that is whole. moerl does not fall back to that one
by itself: the run would silently repeat steps, and overwrite their metrics, because of a fault somebody should know of.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moerl.train.checkpoint.checkpoint_dirs import INDEX, MANIFEST, STATE, FileDigests, complete, contents_digest, digest_of, version_of
from moerl.types.errors import CheckpointError
from moerl.types.json_text import is_file_name, read_object


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    model: Mapping[str, Any]
    """config.json of the model that was trained."""
    files: FileDigests


def check(directory: Path) -> None:
    """By names and sizes. Raises CheckpointError with every fault."""
    if faults := _faults(directory):
        raise damaged(directory, faults)


def read_manifest(directory: Path) -> CheckpointManifest:
    """Raises CheckpointError if it is missing or damaged."""
    manifest = _manifest(directory)
    if isinstance(manifest, str):
        raise damaged(directory, [manifest])
    return manifest


def read_state(directory: Path) -> dict[str, Any]:
    """The driver's part. Raises CheckpointError with every fault that names and sizes show, and if this part is damaged."""
    check(directory)
    if faults := content_faults(directory, [STATE]):
        raise damaged(directory, faults)
    try:
        return read_object(directory / STATE)
    except ValueError as error:
        raise damaged(directory, [f"* {STATE}: {error}"]) from error


def files_of_model(directory: Path, model: str = "") -> FileDigests:
    """Files that ranks read of a checkpoint to load a model: the policy, or one beside it, by their names in its own folder. Raises
    CheckpointError if the manifest is damaged."""
    folder = f"{model}/" if model else ""
    files = {name.removeprefix(folder): entry for name, entry in read_manifest(directory).files.items() if name.startswith(folder)}
    return {name: entry for name, entry in files.items() if "/" not in name and name != STATE}


def faults_while_loading(directory: Path, names: Sequence[str]) -> list[str]:
    """A line for each of these files, whose bytes were others when they were read than when they were written."""
    files = read_manifest(directory).files
    return [_fault(directory, name, files, with_contents=False) or _changed(directory, name, files) for name in names]


def faults_of_part(directory: Path, *, part: int, num_parts: int, but: Collection[str] = ()) -> list[str]:
    """Compares every `num_parts`-th file with the manifest byte by byte, from `part` on; a line for each damaged one. `but`: left out."""
    return content_faults(directory, sorted(read_manifest(directory).files.keys() - set(but))[part::num_parts])


def content_faults(directory: Path, names: Sequence[str]) -> list[str]:
    files = read_manifest(directory).files
    if unlisted := [f"* {MANIFEST}: does not list {name}" for name in names if name not in files]:
        return unlisted
    return [fault for name in names if (fault := _fault(directory, name, files, with_contents=True))]


def damaged(directory: Path, faults: Sequence[str]) -> CheckpointError:
    """The error that lists `faults` and what to do."""
    if not directory.is_dir():
        reason = "its run may be going on, and deletes all but the newest keep_checkpoints"
        return CheckpointError(f"checkpoint {directory} is not there any more: {reason}; the same command takes one that is there")
    older = [path for path in reversed(complete(directory.parent)) if version_of(path) < version_of(directory)]
    whole = next((path for path in older if not _faults(path)), None)
    doomed = [directory, *older[: older.index(whole) if whole is not None else None]]
    then = f"continue from {whole.name}, which has every file in its full size" if whole is not None else "start the run again"
    lines = [f"checkpoint {directory} is damaged; delete {' and '.join(map(str, doomed))} to {then}", *faults]
    for path in doomed[1:]:
        lines += [f"checkpoint {path} is damaged too", *_faults(path)]
    return CheckpointError("\n".join(lines))


def _faults(directory: Path) -> list[str]:
    manifest = _manifest(directory)
    if isinstance(manifest, str):
        return [manifest]
    return [fault for name in sorted(manifest.files) if (fault := _fault(directory, name, manifest.files, with_contents=False))]


def _manifest(directory: Path) -> CheckpointManifest | str:
    """It, or what is wrong with it."""
    try:
        entries = read_object(directory / MANIFEST)
        contents = entries["contents"]
        if contents_digest(contents) != entries["digest"]:
            return f"* {MANIFEST}: contents differ from what was written"
        files = {name: (size, digest) for name, (size, digest) in contents["files"].items()}
        sound = all(isinstance(size, int) and isinstance(digest, str) for size, digest in files.values())
        listed = sound and all(is_file_name(part) for name in files for part in name.split("/"))
        if not isinstance(contents["model"], dict) or not listed:
            raise ValueError("needs the model's config.json, and files beside it with size and digest")
        return CheckpointManifest(model=contents["model"], files=files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"* {MANIFEST}: cannot be read: {error!r}"


def _fault(directory: Path, name: str, files: FileDigests, *, with_contents: bool) -> str:
    """Empty if there is none."""
    size, digest = files[name]
    path = directory / name
    if not path.exists():
        return f"* {name}: missing{_tensors(directory, name, files)}"
    if path.stat().st_size != size:
        return f"* {name}: {path.stat().st_size} bytes, should be {size}{_tensors(directory, name, files)}"
    if with_contents and digest_of(path) != digest:
        return _changed(directory, name, files)
    return ""


def _changed(directory: Path, name: str, files: FileDigests) -> str:
    return f"* {name}: contents differ from what was written{_tensors(directory, name, files)}"


def _tensors(directory: Path, name: str, files: FileDigests) -> str:
    """Which tensors a shard file holds, from the checkpoint's own metadata; empty if that is damaged too."""
    if not name.endswith(".distcp") or INDEX not in files or _fault(directory, INDEX, files, with_contents=True):
        return ""
    from moerl.train.checkpoint.checkpoint_pickles import read_index  # torch: seconds, which only a damaged checkpoint is worth

    try:
        stored = read_index(directory, file_bytes={each: size for each, (size, _) in files.items()}).storage_data
    except CheckpointError:
        return ""
    held = sorted({str(index.fqn) for index, info in stored.items() if info.relative_path == name})
    if not held:  # of a model beside the policy, with an index of its own
        return ""
    return f"; holds {', '.join(held[:3])}" + (f" and {len(held) - 3} more tensors" if len(held) > 3 else "")
