"""Whom a phase waits for: a process of the run, by what a report needs to look at it. Imports no Ray: servers load it."""

from dataclasses import dataclass
from pathlib import Path

from moerl.cluster.descendants import started_at


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """One process, so that another one with its number is never taken for it."""

    pid: int
    started: float
    """See started_at."""

    @classmethod
    def of(cls, pid: int) -> "ProcessId":
        """Raises psutil.NoSuchProcess."""
        return cls(pid=pid, started=started_at(pid))


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedProcess:
    """One process, with those below it, that a phase waits for."""

    name: str
    """"rank 1", "server 127.0.0.1:4000"."""
    node: str
    node_id: str | None = None
    """Ray's; None: the driver's node."""
    process: ProcessId | None = None
    """None: it has not started, or none of its own."""
    log: Path | None = None
    rank: int | None = None
