"""Errors of the operating system that no code expected, told to the user of a command: a path, a disk or the machine is at fault."""

import errno
import os
import re
import traceback
from pathlib import Path

from moerl.types.errors import MoerlError
from moerl.types.exit_codes import ExitCode

_PACKAGE = Path(__file__).parents[1]
_OF_PATHS = (
    errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS,
)  # fmt: skip
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_OF_MACHINES = (
    errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOBUFS, errno.EADDRNOTAVAIL, errno.EPIPE, errno.ECONNREFUSED,
    errno.ECONNRESET, errno.ECONNABORTED, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH,
)  # fmt: skip

_SAID_BY_LIBRARIES = tuple(map(os.strerror, (errno.EMFILE, errno.ENFILE)))
"""Words in exceptions of libraries' own classes."""


def told_of_system(error: Exception) -> Exception:
    """A MoerlError with the exit code of docs/failures.md; `error` itself where the system refused nothing."""
    if isinstance(error, MoerlError):
        return error  # told already, whatever its text quotes
    number = _errno(error)
    named = error.filename if isinstance(error, OSError) else None
    if number in _OF_PATHS and named:
        return _told(error, f"{named}: {os.strerror(number)}", ExitCode.UNUSABLE)
    if number in _OF_DISKS:
        why = "the disk has no room for it, or does not work; nothing that was complete is lost"
        fix = "make room there; the same command goes on"
        text = f"{named or 'a file'}: {os.strerror(number)}\n  at {_place(error)}\n    why: {why}\n    fix: {fix}"
        return _told(error, text, ExitCode.FAILED)
    if is_of_machine(error):
        why = "the operating system refused what this process asked for: its memory, files, processes or connections may be at a limit"
        fix = "the same command goes on; `moerl doctor` says what this machine limits"
        return _told(error, f"{type(error).__name__}: {error}\n  at {_place(error)}\n    why: {why}\n    fix: {fix}", ExitCode.KILLED)
    return error


def is_of_machine(error: BaseException) -> bool:
    """Whether the machine had too little of something, and another time may have enough."""
    refused = error.__context__ if isinstance(error, ImportError) else error  # modules tell of some as they like
    if isinstance(refused, OSError):
        return refused.errno in _OF_MACHINES
    if isinstance(refused, MemoryError | SystemError):  # SystemError: the interpreter lost one of its own, as it does of memory
        return True
    return any(text in str(refused) for text in _SAID_BY_LIBRARIES)


def _errno(error: BaseException) -> int:
    """0: none. Libraries in Rust have it in the text of an exception of their own."""
    if isinstance(error, OSError):
        return error.errno or 0
    said = re.search(r"\(os error (\d+)\)", str(error))
    return int(said[1]) if said else 0


def _place(error: BaseException) -> str:
    """The innermost place in moerl; in all, where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    place = next((each for each in reversed(frames) if _PACKAGE in Path(each.filename).parents), frames[-1])
    return f"{place.filename}:{place.lineno} in {place.name}"


def _told(error: BaseException, text: str, code: int) -> MoerlError:
    told = MoerlError(text)
    told.__notes__ = getattr(error, "__notes__", [])
    told.exit_code = code
    return told
