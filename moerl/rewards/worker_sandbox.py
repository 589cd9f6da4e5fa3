"""Isolation of a worker, which it puts on itself before its first check: from then on it cannot reach what is not its own.

Landlock decides about files and signals, libseccomp's filter about sockets and the rest; the supervisor counts processes. All of it holds
for whatever a check starts, and nobody inside can undo it.
"""

import ctypes
import os
import pwd
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from moerl.rewards import landlock, seccomp_filter

MAX_FILE_BYTES = 2**30
MAX_OPEN_FILES = 1024
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 24, 38
_CAPABILITY_VERSION = 0x20080522

_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/nix/store", "/gnu/store")
_SETTINGS = (
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "timezone", "passwd", "group", "nsswitch.conf", "hosts", "host.conf",
    "resolv.conf", "gai.conf", "services", "protocols", "ssl/certs", "ssl/cert.pem", "ssl/openssl.cnf", "pki/tls/certs",
    "pki/tls/openssl.cnf", "pki/ca-trust/extracted", "ca-certificates", "alternatives", "mime.types", "os-release", "fonts",
)  # fmt: skip
"""Files of /etc, where secrets lie too."""
_MACHINE = (
    "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/loadavg", "/proc/uptime", "/proc/version", "/proc/filesystems",
    "/proc/sys/kernel", "/proc/sys/vm", "/sys/devices/system", "/sys/fs/cgroup",
)  # fmt: skip
_SHARED = ("/home", "/root", "/tmp", "/var/tmp", "/dev/shm")
_MODULES = (".py", ".pyc", ".so")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def missing() -> list[str]:
    """Parts that this machine lacks for isolation, in words; [] if nothing. A system call each, which change nothing."""
    lacking = []
    version = landlock.abi()
    if version < landlock.OLDEST_ABI:
        has = f"version {version} of the interface" if version else "none, or was started without it"
        lacking.append(f"Landlock of Linux 6.2 or newer (this kernel has {has})")
    if not seccomp_filter.is_available():
        lacking.append("libseccomp.so.2 (the package libseccomp2 or libseccomp of the system), or a kernel with seccomp filters")
    return lacking


def enter(*, own: Path, code: Iterable[Path], allows_network: bool) -> None:
    """From here on: files of `own` alone are written, those of the system, of Python and beneath `code` are read.

    Raises RuntimeError for a process that has threads, which would stay outside, and OSError if the kernel refuses.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        said = "were started while modules were imported (pyarrow starts one), and would not be isolated; import them in the function"
        raise RuntimeError(f"{threads - 1} threads {said}")
    _limit()
    _drop_capabilities()
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    allowed = [*_readable(code), *((Path(device), landlock.WRITE_DEVICE) for device in _DEVICES)]
    os.open("/proc/self", os.O_PATH)  # stays open: a right belongs to the entry that the kernel has now, and it forgets unused ones
    landlock.restrict(allowed, writable=own, allows_tcp=allows_network, version=landlock.abi())
    seccomp_filter.load_filter(allows_network=allows_network)
    _prctl(_PR_SET_DUMPABLE, 0)  # programs that a check starts cannot read this process's memory, its ground truths among them


def _readable(code: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    python = (sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.path.realpath(sys.executable)))
    programs = [entry for name in ("PATH", "LD_LIBRARY_PATH") for entry in os.environ.get(name, "").split(":")]
    for directory in map(Path, dict.fromkeys((*map(str, code), *python, *programs))):
        if directory.is_absolute():
            yield from _code_of(directory)
    here = Path(os.readlink("/proc/self/cwd"))
    for directory in map(Path, dict.fromkeys(sys.path)):
        if directory.is_absolute():
            yield from _modules_of(directory) if here.is_relative_to(directory.resolve()) else _code_of(directory)
    for path in (*_SYSTEM, *(f"/etc/{name}" for name in _SETTINGS), *_MACHINE, "/proc/self"):
        yield Path(path), landlock.READ


def _code_of(directory: Path) -> Iterator[tuple[Path, int]]:
    """All of it; of a place where other things lie too, keys and tokens among them, the Python files alone."""
    if not _is_shared(directory):
        yield directory, landlock.READ
        return
    for file in directory.glob("*.py"):
        yield file, landlock.READ


def _modules_of(directory: Path) -> Iterator[tuple[Path, int]]:
    """Files and folders that can be imported from one at or above the working directory: runs, data and tokens lie there too."""
    if _is_shared(directory):
        yield from _code_of(directory)
        return
    yield directory, landlock.LIST  # who imports looks for names there
    for name in _names(directory):
        if name.endswith(_MODULES) or any(each.endswith(_MODULES) for each in _names(directory / name)):
            yield directory / name, landlock.READ


def _names(directory: Path) -> list[str]:
    """[] of what is no directory, is gone by now, or cannot be read, as a mount whose server is away: no module comes from there."""
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _is_shared(directory: Path) -> bool:
    """Whether it holds what is not code, as home directories do."""
    places = [Path(place) for place in _SHARED]
    with suppress(KeyError):  # a user without a name, as in some containers
        places.append(Path(pwd.getpwuid(os.getuid()).pw_dir).resolve())
    return any(place.is_relative_to(directory.resolve()) for place in places)


def _limit() -> None:
    for limit, most in (
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES), (resource.RLIMIT_NOFILE, MAX_OPEN_FILES), (resource.RLIMIT_CORE, 0),
    ):  # fmt: skip
        hard = resource.getrlimit(limit)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (value, value))


def _drop_capabilities() -> None:
    """Root's special powers, for good; its files stay its own, which is Landlock's to refuse."""
    for capability in range(64):
        ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # refused to whoever has none
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")
