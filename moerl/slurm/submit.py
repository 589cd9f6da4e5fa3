"""`moerl launch`: a run's job script, written into the run's directory and given to sbatch."""

import os
import shutil
import subprocess
from collections.abc import Iterator

from moerl.config.schema.run_config import RunConfig
from moerl.types.errors import ConfigError, MoerlError, Problem, problem


def submit(config: RunConfig, script: str) -> str:
    """`script`: of the run, or of an evaluation of it (job_script.py). Says which job it is and where it writes.

    ConfigError, or MoerlError with Slurm's own words if it refuses.
    """
    if problems := list(_unset_variables(config)):
        raise ConfigError(problems)
    directory = (config.run_dir / "slurm").resolve()
    file = directory / "job.sbatch"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file.write_text(script)
    except OSError as error:
        reason = f"the job's script and logs go to {directory}: {error.strerror}"
        fix = "output_dir= of a directory on storage that every node can write"
        raise ConfigError([problem("output_dir", config.output_dir, "cannot be written", reason, fix)]) from error
    # Slurm makes no directories, so that only here, where this one exists, the log can go there.
    job = _sbatch(f"--output={directory}/%j.out", str(file))
    return f"job {job}: {config.name}, log {directory}/{job.split(';')[0]}.out"


def _unset_variables(config: RunConfig) -> Iterator[Problem]:
    for index, name in enumerate(config.slurm.pass_environment):
        if name not in os.environ:
            path, reason = f"slurm.pass_environment.{index}", "the job takes its value from here"
            yield problem(path, name, "must be set where the job is submitted", reason, f"export {name}=..., or leave it out")


def _sbatch(*arguments: str) -> str:
    program = shutil.which("sbatch")
    if program is None:
        raise MoerlError("sbatch is not on PATH here: launch where Slurm's commands are, or take the script of --dry-run there")
    done = subprocess.run([program, "--parsable", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise MoerlError(f"sbatch refused the job (exit code {done.returncode}):\n{done.stderr.strip()}")
    return done.stdout.strip()
