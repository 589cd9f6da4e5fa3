"""Landlock: which files, TCP ports and processes this thread and its children may reach from now on.

Three system calls, by ctypes: of the packages for them on PyPI one has had previews alone since 2022, the others are a few months old.
"""

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_QUERY_ABI = 1
_PR_SET_NO_NEW_PRIVS = 38
_RULE_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All rights on files by the ABI that knows them: 2 brings moves between directories, 3 truncate, 5 ioctl of devices."""
_BIND_TCP, _CONNECT_TCP = 1, 2
_ABSTRACT_SOCKETS, _SIGNALS = 1, 2
READ = _READ_FILE | _READ_DIR | _EXECUTE
LIST = _READ_DIR
WRITE_DEVICE = _READ_FILE | _WRITE_FILE
OLDEST_ABI = 3
"""Below it a file that may be read may also be emptied."""


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("tcp", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("directory", ctypes.c_int32)]


def abi() -> int:
    """The kernel's version of the interface; 0 if it has none, or was started without it."""
    version: int = ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_QUERY_ABI))
    return max(version, 0)


def restrict(allowed: Iterable[tuple[Path, int]], *, writable: Path, allows_tcp: bool, version: int) -> None:
    """Refuse every file but those beneath `allowed`, with the rights given there, and those beneath `writable`, which may be all.

    Signals and abstract sockets reach processes restricted by this call only, from ABI 6 on. Cannot be undone. Needs PR_SET_NO_NEW_PRIVS.
    """
    files = max(rights for since, rights in _FILE_RIGHTS.items() if since <= version)
    # An older kernel takes the longer structure, as long as what it does not know is 0.
    ruleset = _Ruleset(
        files,
        _BIND_TCP | _CONNECT_TCP if version >= 4 and not allows_tcp else 0,
        _ABSTRACT_SOCKETS | _SIGNALS if version >= 6 else 0,
    )
    _enforce(ruleset, [(path, rights & files) for path, rights in [*allowed, (writable, files)]])


def keep_signals_in() -> bool:
    """Let this process and what it starts signal each other alone; False where the kernel cannot. Sets PR_SET_NO_NEW_PRIVS."""
    if abi() < 6:
        return False
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _enforce(_Ruleset(0, 0, _SIGNALS), [])
    return True


def _enforce(ruleset: _Ruleset, rules: Iterable[tuple[Path, int]]) -> None:
    descriptor = _call(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(ctypes.sizeof(ruleset)), ctypes.c_uint32(0))
    try:
        for path, rights in rules:
            _allow(descriptor, path, rights)
        _call(_RESTRICT_SELF, descriptor, ctypes.c_uint32(0))
    finally:
        os.close(descriptor)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there needs no right
    try:
        if not path.is_dir():
            rights &= ~_READ_DIR
        rule = _PathBeneath(rights, beneath)
        _call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), ctypes.c_uint32(0))
    finally:
        os.close(beneath)


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(number, *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock refused: {os.strerror(error)}")
    return result
