"""Exit codes of moerl's commands."""

from enum import IntEnum


class ExitCode(IntEnum):
    DONE = 0
    FAILED = 1
    """Any failure without a code of its own; of `compare`: a difference; of `doctor`: a fault."""
    UNUSABLE = 2
    """The configuration, the data or a checkpoint to convert cannot be used; also a command line that cannot be read."""
    CONTINUE = 75
    """The run was asked to end, or hung with deadlines.on_hang=requeue: start the same command again. EX_TEMPFAIL of sysexits.h."""
    KILLED = 76
    """One of the run's processes was killed or crashed, Ray's did not come up, or the machine refused memory, files or connections: the
    same command goes on from the newest checkpoint."""
    INTERRUPTED = 130
    """Ctrl-C: 128 + SIGINT."""
    TERMINATED = 143
    """SIGTERM, with the last step saved: 128 + SIGTERM."""
    QUEUE_AGAIN = 203
    """From the task of a job's first node to the job's script, which queues the job again. srun returns the highest of all tasks' codes,
    unless one was killed."""
