"""Checkpoints of a run: Megatron's sharded format, made visible by one rename, verified before they are loaded.

    checkpoints/step-000010/    __R_N.distcp, .metadata, common.pt    written by the ranks (megatron/core/dist_checkpointing)
                                state.json                            the driver's: version, prompt cursor
                                manifest.json                         size and digest of every other file

A directory without the suffix .tmp is complete: a kill during a save leaves the previous checkpoint as the newest.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from moerl.types import CheckpointError

MANIFEST, STATE = "manifest.json", "state.json"
_METADATA = ".metadata"
"""Of torch.distributed.checkpoint: which file holds which tensor. Pickled, so it is read only after its digest was checked."""
_CHUNK_BYTES = 8 * 2**20

FileDigests = dict[str, tuple[int, str]]
"""File name -> size in bytes, xxh3_128 of its contents."""


def step_dir(root: Path, version: int) -> Path:
    return root / f"step-{version:06d}"


def newest(root: Path) -> Path | None:
    """The complete checkpoint of the highest version."""
    return next(reversed(_complete(root)), None)


def _complete(root: Path) -> list[Path]:
    """Oldest first."""
    return sorted((path for path in root.glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name)), key=_version)


def _version(directory: Path) -> int:
    return int(directory.name.removeprefix("step-"))


def begin(root: Path, version: int) -> Path:
    """An empty directory to write `version` into; what an interrupted save left there is removed."""
    temporary = step_dir(root, version).with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def commit(temporary: Path, files: FileDigests, state: Mapping[str, Any], *, keep: int) -> Path:
    """Complete the checkpoint and delete all but the newest `keep`."""
    (temporary / STATE).write_text(json.dumps(state))
    files = files | digest_files(temporary, [STATE])
    (temporary / MANIFEST).write_text(json.dumps(files, indent=1))
    for path in temporary.iterdir():
        _sync(path)
    _sync(temporary)
    final = temporary.with_suffix("")
    shutil.rmtree(final, ignore_errors=True)
    os.rename(temporary, final)
    _sync(final.parent)
    for old in _complete(final.parent)[:-keep]:
        shutil.rmtree(old)
    return final


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_files(directory: Path, names: list[str]) -> FileDigests:
    return {name: ((directory / name).stat().st_size, _digest(directory / name)) for name in names}


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def read_state(directory: Path) -> dict[str, Any]:
    """The driver's part. Raises CheckpointError if it is missing or damaged."""
    _check(directory, [STATE])
    state: dict[str, Any] = json.loads((directory / STATE).read_text())
    return state


def verify(directory: Path, *, part: int, num_parts: int) -> None:
    """Check every `num_parts`-th file against the manifest, from `part` on; CheckpointError names each bad file and its tensors."""
    _check(directory, sorted(_manifest(directory))[part::num_parts])


def _check(directory: Path, names: list[str]) -> None:
    manifest = _manifest(directory)
    faults = [fault for name in names if (fault := _fault(directory, name, manifest))]
    if faults:
        raise _damaged(directory, faults)


def _damaged(directory: Path, faults: list[str]) -> CheckpointError:
    older = [path.name for path in _complete(directory.parent) if _version(path) < _version(directory)]
    remedy = f"delete {directory} to continue from {older[-1]}" if older else f"delete {directory} to start the run again"
    return CheckpointError("\n".join([f"checkpoint {directory} is damaged; {remedy}", *faults]))


def _manifest(directory: Path) -> FileDigests:
    try:
        entries = json.loads((directory / MANIFEST).read_text())
        return {name: (size, digest) for name, (size, digest) in dict(entries).items()}
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(directory, [f"* {MANIFEST}: cannot be read: {error}"]) from error


def _fault(directory: Path, name: str, manifest: FileDigests) -> str:
    if name not in manifest:
        return f"* {name}: not in {MANIFEST}"
    size, digest = manifest[name]
    path = directory / name
    if not path.exists():
        return f"* {name}: missing{_tensors(directory, name, manifest)}"
    if path.stat().st_size != size:
        return f"* {name}: {path.stat().st_size} bytes, should be {size}{_tensors(directory, name, manifest)}"
    return "" if _digest(path) == digest else f"* {name}: contents differ from what was written{_tensors(directory, name, manifest)}"


def _tensors(directory: Path, name: str, manifest: FileDigests) -> str:
    """Which tensors a shard file holds, from the checkpoint's own metadata; empty if that is damaged too."""
    if not name.endswith(".distcp") or _fault(directory, _METADATA, manifest):
        return ""
    from torch.distributed.checkpoint import FileSystemReader

    stored = FileSystemReader(directory).read_metadata().storage_data or {}
    held = sorted({str(index.fqn) for index, info in stored.items() if info.relative_path == name})
    return f"; holds {', '.join(held[:3])}" + (f" and {len(held) - 3} more tensors" if len(held) > 3 else "")
