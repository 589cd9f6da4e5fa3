"""Filter of system calls, by libseccomp: sockets, and what no verifier needs and Landlock does not know, are refused.

By ctypes, since the package for it on PyPI, pyseccomp, has had no release since January 2021.
"""

import ctypes
import errno
import os

_LIBRARY = "libseccomp.so.2"
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_NE, _EQ, _GT, _MASKED_EQ = 1, 4, 6, 7
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_SOCK_DGRAM, _SOCK_RAW = 2, 3
_NAMESPACES = (0x80, 0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
"""CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""

_REFUSED = (
    "ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_getfd "
    "io_uring_setup io_uring_enter io_uring_register "
    "unshare setns mount umount2 move_mount open_tree open_tree_attr fsopen fsconfig fsmount fspick mount_setattr pivot_root chroot "
    "bpf perf_event_open userfaultfd keyctl add_key request_key "
    "kexec_load kexec_file_load init_module finit_module delete_module reboot swapon swapoff acct quotactl quotactl_fd syslog "
    "settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname iopl ioperm vhangup fanotify_init "
    "name_to_handle_at open_by_handle_at lookup_dcookie move_pages migrate_pages setpriority ioprio_set "
    "shmget shmat shmctl semget semctl semop semtimedop msgget msgsnd msgrcv msgctl mq_open mq_unlink "
    "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat "
    "setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat file_setattr "
)
"""EPERM. The last two lines change files that Landlock lets nobody write: it does not know modes, owners, times, attributes."""

_OF_ANYBODY = "prlimit64 sched_setaffinity sched_setscheduler sched_setparam sched_setattr"
"""Calls that change another process of the same user where their first argument is not 0, which is the caller."""
_IOCTLS = (0x40086602, 0x40046602, 0x401C5820, 0x40087602)
"""FS_IOC_SETFLAGS of 64 and 32 bits, FS_IOC_FSSETXATTR, FS_IOC_SETVERSION (linux/fs.h): they change files that are open for reading."""
_F_SETLEASE = 1024
"""Command of fcntl: whoever opens a file under a lease, also outside, waits until its holder lets go, 45 s at most."""
_NUMBERS = {"fchmodat2": 452, "setxattrat": 463, "removexattrat": 466, "open_tree_attr": 467, "file_setattr": 469}
"""Calls that are newer than libseccomp may be: the kernel numbers new ones alike on all architectures."""


class _Comparison(ctypes.Structure):
    _fields_ = [("argument", ctypes.c_uint), ("operator", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


def is_available() -> bool:
    """Whether the library is there, and the kernel takes a filter."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return hasattr(library, "seccomp_api_get") and library.seccomp_api_get() >= 1


def load_filter(*, allows_network: bool) -> None:
    """Put it on this thread and its children for good."""
    library = _library()
    context = library.seccomp_init(_ALLOW)
    for name in _REFUSED.split():
        _refuse(library, context, name)
    for name in _OF_ANYBODY.split():
        _refuse(library, context, name, _Comparison(0, _NE, 0))
    _refuse(library, context, "clone3", errno=errno.ENOSYS)  # its flags are in memory; callers fall back to clone
    for request in _IOCTLS:  # the kernel looks at 32 bits of it
        _refuse(library, context, "ioctl", _Comparison(1, _MASKED_EQ, 0xFFFFFFFF, request))
    _refuse(library, context, "fcntl", _Comparison(1, _MASKED_EQ, 0xFFFFFFFF, _F_SETLEASE))
    for flag in _NAMESPACES:
        _refuse(library, context, "clone", _Comparison(0, _MASKED_EQ, flag, flag))
    _sockets(library, context, allows_network)
    _checked(library.seccomp_load(context))
    library.seccomp_release(context)


def _sockets(library: ctypes.CDLL, context: int, allows_network: bool) -> None:
    """Pairs of connected sockets always. With a network IPv4 and IPv6, not local sockets, at which Ray and others listen."""
    _refuse(library, context, "socketpair", _Comparison(0, _NE, _AF_UNIX))
    for kind in (_SOCK_DGRAM, _SOCK_RAW):  # they may send to any name; the kind's other bits are flags
        _refuse(library, context, "socketpair", _Comparison(1, _MASKED_EQ, 0xF, kind))
    if not allows_network:
        _refuse(library, context, "socket")
        return
    for family in range(_AF_INET6):
        if family != _AF_INET:
            _refuse(library, context, "socket", _Comparison(0, _EQ, family))
    _refuse(library, context, "socket", _Comparison(0, _GT, _AF_INET6))


def _refuse(library: ctypes.CDLL, context: int, name: str, *comparisons: _Comparison, errno: int = errno.EPERM) -> None:
    _rule(library, context, _REFUSE | errno, name, *comparisons)


def _rule(library: ctypes.CDLL, context: int, action: int, name: str, *comparisons: _Comparison) -> None:
    number = library.seccomp_syscall_resolve_name(name.encode())
    if number < 0:
        number = _NUMBERS.get(name, -1)
    if number < 0:
        return  # a call that this architecture does not know
    array = (_Comparison * len(comparisons))(*comparisons)
    _checked(library.seccomp_rule_add_array(context, action, number, len(comparisons), array))


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(_LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = (ctypes.c_uint32,)
    library.seccomp_rule_add_array.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
    for function in (library.seccomp_load, library.seccomp_release):
        function.argtypes = (ctypes.c_void_p,)
    return library


def _checked(result: int) -> None:
    if result < 0:
        raise OSError(-result, f"libseccomp refused: {os.strerror(-result)}")
