"""Job scripts for Slurm, rendered from a run's configuration: little shell, all of it quoted, no value of a secret. `moerl launch`
writes one into the run's directory and gives it to sbatch."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jinja2

from moerl.config.derive.gpu_map import num_gpus
from moerl.config.rules.job_rules import size_problems
from moerl.config.schema.job_config import ContainerConfig, SlurmConfig
from moerl.config.schema.run_config import RunConfig
from moerl.slurm.job_node import LAST_SECONDS
from moerl.types.errors import ConfigError, MoerlError, Problem, problem
from moerl.types.exit_codes import ExitCode

INHERITED = ("HOME", "USER", "LANG", "PATH")
"""Variables that a job takes over from the environment of its submission, beside Slurm's own variables and slurm.pass_environment."""

_WHICH_SLURM = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Variables of the submission's that sbatch itself needs."""
_OPTIONS = (
    "CPUS_PER_GPU", "CPUS_PER_TASK", "DISTRIBUTION", "GPU_BIND", "GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET", "GPUS_PER_TASK", "HET_SIZE",
    "HINT", "MEM_PER_CPU", "MEM_PER_GPU", "MEM_PER_NODE", "NTASKS_PER_GPU", "THREADS_PER_CORE", "TRES_PER_TASK",
)  # fmt: skip
"""Variables, without SLURM_, that an allocation has by its own options and srun takes for options. sbatch hands every SLURM_ variable on,
whatever --export says, also those of an allocation in which it was called."""

_TEMPLATE = Path(__file__).with_name("job.sbatch.j2")
_HERE = '"$PWD"'
"""The directory of submission: jobs start there, and relative paths of the configuration mean it."""
_MARKS = '--marks="$marks"'


def render_train(config: RunConfig, overrides: Sequence[str], config_dir: Path | None = None) -> str:
    """The script of a training run. Every node composes the configuration from the same `overrides`. ConfigError: too few nodes."""
    does = "then trains, and its exit code is the job's"
    return _render_job(config, overrides, config_dir, title=config.name, name=config.name, arguments="key=value ...", does=does)


def render_eval(config: RunConfig, overrides: Sequence[str], config_dir: Path | None = None, checkpoint: Path | None = None) -> str:
    """The script of an evaluation, on the nodes that a training run would have. `checkpoint`: see `moerl eval`."""
    return _render_job(
        config, overrides, config_dir, title=f"evaluation of {config.name}", name=f"eval-{config.name}",
        arguments="--checkpoint=PATH key=value ...", does="evaluates, and goes on where it was stopped",
        options=["--eval", *([] if checkpoint is None else [f"--checkpoint={shlex.quote(str(checkpoint))}"])],
        mounts={} if checkpoint is None else {"--checkpoint": checkpoint},
    )  # fmt: skip


def submit(config: RunConfig, script: str) -> str:
    """`script`: of the run, or of an evaluation of it. Says which job it is and where it writes.

    ConfigError, or MoerlError with Slurm's own words if it refuses.
    """
    if problems := list(_unset_variables(config)):
        raise ConfigError(problems)
    directory = (config.run_dir / "slurm").resolve()
    file = directory / "job.sbatch"
    if "\\" in str(directory):
        reason = "in the name of a log Slurm drops it, and expands nothing any more"
        raise ConfigError([problem("output_dir", config.output_dir, "must have no backslash", reason, "another output_dir=")])
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file.write_text(script)
    except OSError as error:
        reason = f"the job's script and logs go to {directory}: {error.strerror}"
        fix = "output_dir= of a directory on storage that every node can write"
        raise ConfigError([problem("output_dir", config.output_dir, "cannot be written", reason, fix)]) from error
    # Slurm makes no directories, so that only here, where this one exists, the log can go there.
    # On the command line too: a variable such as SBATCH_PARTITION would win over the script.
    lines = (line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH "))
    directives = [word for line in lines for word in shlex.split(line)]
    job = _sbatch(*directives, f"--output={str(directory).replace('%', '%%')}/%j.out", str(file))
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
    # Those of an allocation in which it is called would reach the job, as if they were the job's own.
    foreign = {name for name in os.environ if name.startswith("SLURM_") and "SLURM_JOB_ID" in os.environ} - {*_WHICH_SLURM}
    environment = {name: value for name, value in os.environ.items() if name not in foreign}
    done = subprocess.run([program, "--parsable", *arguments], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise MoerlError(f"sbatch refused the job (exit code {done.returncode}):\n{done.stderr.strip()}")
    return done.stdout.strip()


def _render_job(
    config: RunConfig, overrides: Sequence[str], config_dir: Path | None, *, title: str, name: str, arguments: str, does: str,
    options: Sequence[str] = (), mounts: Mapping[str, Path] | None = None,
) -> str:  # fmt: skip
    """`does`: what the first node does. `options`: of moerl node. `mounts`: further directories that containers need, by their settings."""
    slurm, nodes = config.slurm, config.placement.nodes
    problems = list(size_problems(slurm, nodes, config.placement.gpus_per_node, num_gpus(config)))
    needed = {"output_dir": Path(config.output_dir), **(mounts or {})}
    if slurm.container is not None:
        problems += [_outside(setting, path) for setting, path in needed.items() if Path(os.path.normpath(path)).parts[:1] == ("..",)]
    if problems:
        raise ConfigError(problems)
    each = f"{slurm.gpus_per_node} GPUs" if slurm.gpus_per_node else "CPUs"
    # A task that ends lets the others end in order; the first node's says how the job went.
    step = ["--export=ALL", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=0", f"--wait={LAST_SECONDS:.0f}"]
    again = ["--requeue", "--open-mode=append", f"--signal=USR1@{slurm.end_seconds}"]
    config_dir = None if config_dir is None else config_dir.resolve()
    options = [*options, *([] if config_dir is None else [f"--config-dir={shlex.quote(str(config_dir))}"])]
    paths = [path for path in (config_dir, *needed.values()) if path is not None and path.is_absolute()]
    words = [*step, *_container(slurm, paths), _python(slurm), "-m moerl node", _MARKS, *options, *map(shlex.quote, overrides)]
    exported = f"--export={','.join([*INHERITED, *slurm.pass_environment])}"
    own = {"GPUS_PER_NODE"} if slurm.gpus_per_node else set()
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    return environment.from_string(_TEMPLATE.read_text()).render(
        title=f"{title}: {nodes} nodes with {each}",
        arguments=arguments,
        comment=f"One process per node. Together they make the job's Ray cluster; the first {does}.",
        directives=[f"--job-name={name}", *_resources(slurm, nodes), *again, exported, "--output=%x-%j.out"],
        exports=[f"{name}={shlex.quote(value)}" for name, value in slurm.environment.items()],
        foreign=f"SLURM_{{{','.join(name for name in _OPTIONS if name not in own)}}}",
        requeue_code=ExitCode.QUEUE_AGAIN,
        unheeded_code=138,  # 128 + SIGUSR1 of Linux
        command=words,
    )


def _resources(slurm: SlurmConfig, nodes: int) -> Iterator[str]:
    yield from (f"--nodes={nodes}", "--ntasks-per-node=1", "--exclusive", "--mem=0")
    for name in ("gpus_per_node", "partition", "account", "qos", "time", "segment", "switches", "constraint", "exclude"):
        if (value := getattr(slurm, name)) not in (None, 0):
            yield f"--{name.replace('_', '-')}={value}"


def _outside(setting: str, path: Path) -> Problem:
    reason = "a container has the directory of submission and absolute paths: what is beside that would be lost, or not found"
    return problem(setting, str(path), "must be absolute, or below the directory of submission", reason, f"{setting}={path.resolve()}")


def _python(slurm: SlurmConfig) -> str:
    default = sys.executable if slurm.container is None else "python3"
    return shlex.quote(slurm.python if slurm.python is not None else default)


def _container(slurm: SlurmConfig, paths: Sequence[Path]) -> Iterator[str]:
    """Words that go between srun's options and the command."""
    container = slurm.container
    if container is None:
        return
    mounts = [*(f"{path}:{path}" for path in map(str, paths)), *container.mounts]
    yield from _STARTED_BY[container.kind](slurm, container, mounts)


def _pyxis(slurm: SlurmConfig, container: ContainerConfig, mounts: list[str]) -> Iterator[str]:
    yield f"--container-image={shlex.quote(container.image)}"
    yield f'--container-mounts="$PWD:$PWD"{"".join("," + shlex.quote(mount) for mount in mounts)}'
    yield f"--container-workdir={_HERE}"
    # The image's own values win otherwise.
    if names := [*slurm.environment, *slurm.pass_environment]:
        yield f"--container-env={','.join(names)}"


def _apptainer(slurm: SlurmConfig, container: ContainerConfig, mounts: list[str]) -> Iterator[str]:
    yield "apptainer exec" + (" --nv" if slurm.gpus_per_node else "")
    yield f"--pwd={_HERE}"
    yield f"--bind={_HERE}"
    yield from (f"--bind={shlex.quote(mount)}" for mount in mounts)
    yield shlex.quote(container.image)


_STARTED_BY = {"pyxis": _pyxis, "apptainer": _apptainer}
