"""Nodes that a job has lost, one a line of a file that outlasts its tries. Queueing it again, its script asks Slurm for others."""

from pathlib import Path


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
