"""A fault in the n-th call of one kind that a run's processes make: the memory that call_faults.c shares with this one."""

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

KINDS = ("write", "fsync", "rename", "connect", "recv", "send", "mmap")
SOURCE = Path(__file__).with_suffix(".c")


class _Shared(ctypes.Structure):
    """`struct shared` of call_faults.c."""

    _fields_ = [
        ("count", ctypes.c_long * len(KINDS)), ("kind", ctypes.c_long), ("at", ctypes.c_long), ("failed_pid", ctypes.c_long),
        ("failed", ctypes.c_char * 200), ("target", ctypes.c_char * 200),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFaults:
    """Library and file of one run."""

    library: Path
    file: Path

    def arm(self, kind: str = KINDS[0], at: int = 0) -> dict[str, str]:
        """Variables of a run whose call number `at`, counted from 1, fails; 0: all are counted, none fails."""
        self.file.write_bytes(bytes(_Shared(kind=KINDS.index(kind), at=at)))
        return {"LD_PRELOAD": str(self.library), "MOERL_FAULT_FILE": str(self.file)}

    def counts(self) -> dict[str, int]:
        return dict(zip(KINDS, self._shared().count, strict=True))

    def failed(self) -> tuple[int, str]:
        """Id of the process whose call failed, and its words with what the call was about; (0, "") if the run made fewer calls."""
        found = self._shared()
        words = " ".join(found.failed.decode(errors="replace").split())
        return found.failed_pid, f"{words} {found.target.decode(errors='replace')}".strip()

    def _shared(self) -> _Shared:
        return _Shared.from_buffer_copy(self.file.read_bytes())


def compiled(directory: Path) -> Path | None:
    """The library; None on a machine without a C compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    library = directory / "call_faults.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library
