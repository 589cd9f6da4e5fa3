"""Files that a job's first node leaves for its script. PREFIX.lost: the nodes that the job has lost in all its tries, one a line; Slurm is
asked for others. PREFIX.again: the job is to be queued again. srun's exit code does not tell: it is 137 when any task was killed."""

import logging
from pathlib import Path

logger = logging.getLogger(__name__)


def lost_file(marks: Path) -> Path:
    return marks.with_name(f"{marks.name}.lost")


def mark_again(marks: Path) -> None:
    """The script removes it before a try. Without it only the exit code is left, which the killing of a task hides."""
    file = marks.with_name(f"{marks.name}.again")
    try:
        file.touch()
    except OSError as error:
        logger.warning("%s cannot be written (%s): the job may not be queued again", file, error.strerror)


def remember(file: Path, name: str, *, at_most: int) -> str:
    """Adds the node, unless there are as many already; says what came of it, for people. The script may still find too few others."""
    known = file.read_text().split() if file.exists() else []
    if name in known:
        return f"{name} was lost before"
    if len(known) >= at_most:
        already = f", beside {', '.join(known)}" if known else ""
        return f"{name} is not excluded{already}: slurm.max_excluded = {at_most}"
    try:
        with file.open("a") as out:
            out.write(f"{name}\n")
    except OSError as error:
        return f"{name} is not excluded: {file} cannot be written ({error.strerror})"
    return f"{name} is to be excluded ({len(known) + 1} of slurm.max_excluded = {at_most})"
