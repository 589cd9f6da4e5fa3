"""Write the files of a checkpoint: several at once, resumable, verified, and visible only when all of it is there.

    DST.partial/  plan.json        what is being written; another plan cannot go on here
                  FILE.tmp         being written
                  FILE             on disk and read back
                  journal.jsonl    a line for every such FILE: size, digest, notes
    DST/          renamed from DST.partial when the last file is there; without plan and journal, with DIGESTS

A kill at any moment leaves DST.partial. The same command goes on from it: files in the journal are verified and kept, others written.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from moerl.train.checkpoint.checkpoint_dirs import contents_digest, digest_of, sync
from moerl.types.errors import ConvertError, Problem, can_be, problem
from moerl.types.json_text import parse_json

DIGESTS = "moerl-digests.json"
"""File name -> [bytes, xxh3_128], of every other file of a converted checkpoint."""
_PLAN, _JOURNAL = "plan.json", "journal.jsonl"
SPARE_BYTES = 64 * 2**20
"""Bytes that a disk must have left beside the checkpoint's own files."""

OnBytes = Callable[[int], None]
"""Called from several threads with bytes written since its last call."""


class Output:
    """A file being written, with the digest of what was written so far."""

    def __init__(self, file: BinaryIO, on_bytes: OnBytes):
        self._file, self._on_bytes = file, on_bytes
        self._digest, self._size = xxhash.xxh3_128(), 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self._file.write(view)
        self._size += len(view)
        self._on_bytes(len(view))
        return len(view)

    def flush(self) -> None:
        """Nothing: the file is flushed when it is complete. torch.save asks for it."""

    def tell(self) -> int:
        return self._size

    def digest(self) -> str:
        return self._digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileJob:
    name: str
    """May be in a folder of DST."""
    num_bytes: int
    """Bytes that it will have, for the disk and the progress; need not be exact."""
    contents: Any
    """Plain values that say what it will hold: equal for equal files."""
    write: Callable[[Output], dict[str, Any]]
    """Its bytes, in order; returns plain values to keep in the journal. Runs on any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A file that is on disk and verified."""

    name: str
    size: int
    digest: str
    notes: dict[str, Any]


def partial_of(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def target_problems(target: Path) -> Iterator[Problem]:
    if not can_be(target) or not can_be(partial_of(target)):
        yield problem("DST", str(target), "must be a path that can be made", "no file system takes such a name", "a shorter name")
    elif target.exists() and (not target.is_dir() or any(target.iterdir())):
        reason = "a checkpoint is written as a whole, and nothing is overwritten"
        yield problem("DST", str(target), "must not exist, or be an empty directory", reason, "another name, or remove it yourself")


def write_files(
    jobs: Sequence[FileJob],
    target: Path,
    *,
    plan: Mapping[str, Any],
    workers: int,
    on_bytes: OnBytes,
    complete: Callable[[Path, list[Finished]], None],
) -> list[Finished]:
    """Write every job, then what `complete` adds to the directory from them, then make it visible as `target`.

    `plan`: plain values that identify source and settings. Raises ConvertError before writing if it cannot be done.
    """
    partial = partial_of(target)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with _claimed(partial):
            files = contents_digest({job.name: job.contents for job in jobs})
            _begin(partial, json.dumps({"plan": plan, "files": files}, sort_keys=True))
            kept = _kept(partial, {job.name for job in jobs})
            left = [job for job in jobs if job.name not in kept]
            on_bytes(sum(job.num_bytes for job in jobs if job.name in kept))
            check_disk(partial, sum(job.num_bytes for job in left))
            with (partial / _JOURNAL).open("a") as journal:
                kept |= {each.name: each for each in _write_all(left, partial, journal, workers=workers, on_bytes=on_bytes)}
            finished = [kept[job.name] for job in jobs]
            complete(partial, finished)
            _make_visible(partial, target, finished)
    except OSError as error:
        raise _explained([error], partial) from error
    return finished


def check_disk(directory: Path, num_bytes: int) -> None:
    """Raises ConvertError if the disk of `directory` has no room for `num_bytes` more."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes + SPARE_BYTES:
        rule = f"needs {num_bytes / 1e9:.2f} GB and {SPARE_BYTES / 1e9:.2f} GB to spare, the disk has {free / 1e9:.2f} GB free"
        raise ConvertError([problem("DST", str(directory), rule, "nothing was written", "another disk, or make room")])


def _begin(partial: Path, plan: str) -> None:
    file = partial / _PLAN
    if not file.exists():
        (partial / "plan.json.tmp").write_text(plan)
        sync(partial / "plan.json.tmp")
        os.rename(partial / "plan.json.tmp", file)
    elif file.read_bytes() != plan.encode():
        reason = "the source, the settings or the version of moerl differ from those of the interrupted run, so its files do not fit"
        fix = f"the same command as before, or remove {partial} to begin anew"
        raise ConvertError([problem("DST", str(partial), "was begun with another plan", reason, fix)])


@contextmanager
def _claimed(partial: Path) -> Iterator[None]:
    """By one process at a time; the kernel gives it up when that process ends, however it does."""
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reason = "two would write the same files"
            raise ConvertError(
                [problem("DST", str(partial), "is being written by another process", reason, "wait for it, or another DST")]
            ) from None
        yield
    finally:
        os.close(descriptor)


def _kept(partial: Path, names: set[str]) -> dict[str, Finished]:
    """Entries of the journal: the files that are still what it says. Its last line may be cut off."""
    kept: dict[str, Finished] = {}
    text = (partial / _JOURNAL).read_bytes().decode(errors="replace") if (partial / _JOURNAL).exists() else ""
    lines = text.splitlines(keepends=True)
    for line in lines:
        if not line.endswith("\n"):
            continue
        try:
            each = Finished(**parse_json(line))
        except (ValueError, TypeError):
            continue
        file = partial / str(each.name)
        is_known = isinstance(each.name, str) and each.name in names and file.is_file()
        if is_known and file.stat().st_size == each.size and digest_of(file) == each.digest:
            kept[each.name] = each
    # A cut-off last line must not run into the next one.
    whole = "".join(_line(each) for each in kept.values())
    (partial / "journal.tmp").write_text(whole)
    sync(partial / "journal.tmp")
    os.rename(partial / "journal.tmp", partial / _JOURNAL)
    return kept


def _line(finished: Finished) -> str:
    return json.dumps(asdict(finished)) + "\n"


def _write_all(jobs: Sequence[FileJob], partial: Path, journal: Any, *, workers: int, on_bytes: OnBytes) -> list[Finished]:
    """The first failure ends what was not begun."""
    with ThreadPoolExecutor(workers, thread_name_prefix="convert") as pool:
        futures = [pool.submit(_write_one, job, partial, journal, on_bytes) for job in jobs]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            for future in futures:
                future.cancel()
    failures = [error for future in futures if not future.cancelled() and (error := future.exception()) is not None]
    if failures:
        raise _explained(failures, partial)
    return [future.result() for future in futures]


def _explained(failures: list[BaseException], partial: Path) -> BaseException:
    """Error to raise: a fault of this program as it is, faults of files and disks as such, all of them."""
    for error in failures:
        if not isinstance(error, OSError | EOFError | ConvertError):
            return error
    problems = [each for error in failures if isinstance(error, ConvertError) for each in error.problems]
    fix = "mend that, then the same command: finished files are kept"
    problems += [
        problem("DST", str(partial), "could not be completed", str(error), fix) for error in failures if not isinstance(error, ConvertError)
    ]
    return ConvertError(problems)


def _write_one(job: FileJob, partial: Path, journal: Any, on_bytes: OnBytes) -> Finished:
    temporary = partial / f"{job.name}.tmp"
    temporary.parent.mkdir(exist_ok=True)
    with temporary.open("wb") as file:
        output = Output(file, on_bytes)
        notes = job.write(output)
        file.flush()
        os.fsync(file.fileno())
    if digest_of(temporary) != output.digest():
        reason = "what was read back differs from what was written: disk or memory is faulty"
        raise ConvertError([problem("DST", str(temporary), "was not stored correctly", reason, "the same command on another disk")])
    os.rename(temporary, partial / job.name)
    sync(temporary.parent)
    finished = Finished(name=job.name, size=output.tell(), digest=output.digest(), notes=notes)
    journal.write(_line(finished))  # one call per line: threads do not mix theirs
    journal.flush()
    os.fsync(journal.fileno())
    return finished


def _make_visible(partial: Path, target: Path, finished: Sequence[Finished]) -> None:
    known = {each.name: [each.size, each.digest] for each in finished}
    for path in sorted(partial.rglob("*")):
        name = path.relative_to(partial).as_posix()
        if name in (_PLAN, _JOURNAL, DIGESTS) or name in known:
            continue
        sync(path)
        if path.is_file():
            known[name] = [path.stat().st_size, digest_of(path)]
    (partial / DIGESTS).write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    sync(partial / DIGESTS)
    sync(partial)
    if target.exists():
        target.rmdir()  # empty, or this refuses
    os.rename(partial, target)
    sync(target.parent)
    for name in (_PLAN, _JOURNAL):
        (target / name).unlink()
