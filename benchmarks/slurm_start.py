"""A job of two nodes from its start to its first step, phase by phase, with what each spends on imports, from the job's own logs.

python benchmarks/slurm_start.py        as root, where make test-slurm runs
"""

import os
import re
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "slurm"))

from jobs import Jobs
from two_nodes import TwoNodes

_OTHER_NODE = "slurm/*-0/n1.log"
_FIRST_NODE, _DRIVER, _RANK, _SERVER = "slurm/*-0/n0.log", "run.log", "logs/rank-0.log", "logs/rollout-0.log"
_IMPORTS = re.compile(r"(?:imports and settings|importing Megatron) took ([\d.]+) s")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Ends with the first line of the log that has the text."""

    name: str
    log: str
    text: str
    imports: str | None = None
    """Log that says what imports took of it."""
    is_import: bool = False
    """As a whole: a new Python process that does little but import, and does not say how long."""


PHASES = (
    Phase(name="node processes", log=_FIRST_NODE, text="imports and settings took", imports=_FIRST_NODE),
    Phase(name="nodes meet", log=_FIRST_NODE, text="n1 is here"),
    Phase(name="`ray start`, first node", log=_FIRST_NODE, text="Local node IP", is_import=True),
    Phase(name="Ray on the first node", log=_FIRST_NODE, text="Ray runtime started"),
    Phase(name="`ray start`, other node", log=_OTHER_NODE, text="Local node IP", is_import=True),
    Phase(name="Ray on both nodes", log=_FIRST_NODE, text="Ray runs on 2 nodes"),
    Phase(name="driver", log=_DRIVER, text="imports and settings took", imports=_DRIVER),
    Phase(name="ray.init, placement, verifiers", log=_DRIVER, text="phase start begins"),
    Phase(name="rollout server", log=_SERVER, text="serving on port", is_import=True),
    Phase(name="rank processes (Ray, torch)", log=_DRIVER, text="rank processes are there", is_import=True),
    Phase(name="ranks join, build the model", log=_DRIVER, text="ranks started", imports=_RANK),
    Phase(name="load", log=_DRIVER, text="phase push begins"),
    Phase(name="first push", log=_DRIVER, text="phase rollout begins"),
    Phase(name="first step", log=_DRIVER, text="step 1 took"),
)


def first_line(run_dir: Path, log: str, text: str) -> str:
    (file,) = run_dir.glob(log)
    return next(line for line in file.read_text(errors="replace").splitlines() if text in line)


def seconds_of(line: str) -> float:
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()


def imports_of(run_dir: Path, log: str) -> float:
    found = _IMPORTS.search(first_line(run_dir, log, " took "))
    assert found is not None
    return float(found[1])


def main() -> None:
    os.environ.update({"PYTHONPATH": str(Path(__file__).resolve().parents[1]), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as root, tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as node_disk:
        os.environ["TMPDIR"] = node_disk
        (Path(root) / "slurm").mkdir()
        cluster = TwoNodes(Path(root) / "slurm")
        try:
            jobs = Jobs(cluster, Path(root), Path(node_disk))
            job = jobs.run("num_steps=1")
            assert job.state == "COMPLETED", job.log
            began = datetime.fromisoformat(jobs.field(job.number, "StartTime")).timestamp()
            show(job.directory.parent, began)
        finally:
            cluster.close()


def show(run_dir: Path, began: float) -> None:
    last, total_imports = began, 0.0
    print(f"load {os.getloadavg()[0]:.0f} of {os.cpu_count()} cores\n\n| until | s | of it imports |\n| --- | --- | --- |")
    for phase in PHASES:
        now = seconds_of(first_line(run_dir, phase.log, phase.text))
        took = now - last
        imports = took if phase.is_import else 0.0 if phase.imports is None else min(took, imports_of(run_dir, phase.imports))
        print(f"| {phase.name} | {took:.1f} | {imports:.1f} |")
        last, total_imports = now, total_imports + imports
    total = last - began
    print(f"| all | {total:.1f} | {total_imports:.1f} |\n\neverything but imports: {total - total_imports:.1f} s")


if __name__ == "__main__":
    main()
