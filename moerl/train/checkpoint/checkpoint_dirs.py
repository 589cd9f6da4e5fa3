"""The directories of a run's checkpoints: complete or not there, never more than asked for.

    checkpoints/step-000010/    __R_0.distcp              written by rank R (moerl/train/checkpoint/shard_writer.py)
                                .metadata, common.pt, metadata.json       by rank 0: where which tensor lies
                                state.json                the driver's: version, prompt cursor
                                manifest.json             the model's config.json; size and digest of every other file
                step-000012.tmp/                          being written
                step-000008.old/                          being deleted

A directory without a suffix is complete: it got its name by one rename, when every file was on disk. It loses the name by one rename
before the first of its files is deleted. So a kill at any moment leaves the checkpoints before it, and nothing half there.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

MANIFEST, STATE = "manifest.json", "state.json"
INDEX, COMMON = ".metadata", "common.pt"
HEAD = (COMMON, "metadata.json", INDEX)
"""Files that say what lies in the shards."""
_CHUNK_BYTES = 2**20

FileDigests = dict[str, tuple[int, str]]
"""File name -> size in bytes, xxh3_128 of its contents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenShards:
    """Files that one rank has written."""

    files: FileDigests
    index: bytes
    """Where in its file each tensor lies; opaque to the driver, which needs no torch for it."""


def step_dir(root: Path, version: int) -> Path:
    return root / f"step-{version:06d}"


def complete(root: Path) -> list[Path]:
    """Oldest first."""
    return sorted((path for path in root.glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name)), key=version_of)


def newest(root: Path) -> Path | None:
    """The complete checkpoint of the highest version."""
    return next(reversed(complete(root)), None)


def version_of(directory: Path) -> int:
    return int(directory.name.removeprefix("step-"))


def begin(root: Path, version: int) -> Path:
    """An empty directory to write `version` into. What interrupted saves and deletions left is removed."""
    for suffix in ("tmp", "old"):
        for left in root.glob(f"step-*.{suffix}"):
            _remove(left)
    temporary = step_dir(root, version).with_suffix(".tmp")
    temporary.mkdir(parents=True)
    return temporary


def commit(temporary: Path, files: FileDigests, state: Mapping[str, Any], model: Mapping[str, Any], *, keep: int) -> Path:
    """Complete the checkpoint, whose `files` are on disk, and delete all but the newest `keep`.

    `model`: its config.json. A version is committed once: a run goes on from the newest, so it never saves an older one again.
    """
    _write_durably(temporary / STATE, json.dumps(state))
    files = files | digest_files(temporary, [STATE])
    _write_durably(temporary / MANIFEST, manifest_text({"model": model, "files": files}))
    sync(temporary)
    final = temporary.with_suffix("")
    os.rename(temporary, final)
    sync(final.parent)
    for expired in complete(final.parent)[:-keep]:
        _delete(expired)
    return final


def _delete(directory: Path) -> None:
    """Named away first: a deletion that is interrupted must not leave a checkpoint without some of its files."""
    doomed = directory.with_suffix(".old")
    os.rename(directory, doomed)
    sync(directory.parent)
    _remove(doomed)


def _remove(directory: Path) -> None:
    """Deletes it; of one that was moved to another disk the link alone: what it leads to is somebody's archive."""
    if directory.is_symlink():
        directory.unlink()
    else:
        shutil.rmtree(directory)


def manifest_text(contents: Mapping[str, Any]) -> str:
    """With a digest of the contents, so that damage to the manifest is not taken for damage to what it lists."""
    return json.dumps({"digest": contents_digest(contents), "contents": contents}, indent=1)


def contents_digest(contents: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def digest_files(directory: Path, names: Iterable[str]) -> FileDigests:
    """Digest of what is on disk."""
    return {name: ((directory / name).stat().st_size, digest_of(directory / name)) for name in names}


def digest_of(path: Path) -> str:
    digest = xxhash.xxh3_128()
    # One buffer that stays in the processor's cache: new memory for each chunk would cost more than the digest.
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Until the file, or the names in the directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_durably(path: Path, text: str) -> None:
    path.write_text(text)
    sync(path)
