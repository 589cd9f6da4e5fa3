"""The command line: each verb parses, builds, calls. What a verb needs is imported inside it, so that `check` loads no torch."""

import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from moerl import __version__
from moerl.convert.convert_commands import checkpoints
from moerl.types.exit_codes import ExitCode
from moerl.types.system_errors import told_of_system  # here: what it tells of may be that no file can be opened

_LONGEST_WAIT = 1e6
"""Seconds, as of settings (Seconds of moerl/config/schema/strict.py)."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich takes longer than all else that --help does
)


app.add_typer(checkpoints)


def _print_version(given: bool) -> None:
    if given:
        typer.echo(f"moerl {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print name and version.")] = False,
) -> None:
    """Reinforcement learning for large mixture-of-experts language models."""


Overrides = Annotated[
    list[str],
    typer.Argument(
        metavar="recipe=NAME [KEY=VALUE]...", help="A recipe, and settings that differ from it.", default_factory=list, show_default=False
    ),
]
ConfigDir = Annotated[Path | None, typer.Option(help="A directory with recipe/NAME.yaml files of your own.", show_default=False)]
Checkpoint = Annotated[
    Path | None,
    typer.Option(help="RUN/checkpoints/step-N, or a Hugging Face folder; the run's newest if not given.", show_default=False),
]


@app.command()
def train(
    overrides: Overrides,
    config_dir: ConfigDir = None,
    ends_at: Annotated[
        float | None, typer.Option(help="When the machine is taken away, in seconds since 1970: save before.", show_default=False)
    ] = None,
) -> None:
    """Train; the same command continues a run that was stopped."""
    from moerl.cluster.forks.fork_server import forking
    from moerl.cluster.user_process import fork_driver, reading_settings

    fork_driver()

    with forking():  # beside the check, and before Ray is imported
        with reading_settings():
            from moerl.check import load_checked

            config = load_checked(overrides, config_dir, starts=True)
        from moerl.observe.report import report_finished

        if (path := report_finished(config)) is not None:
            typer.echo(f"finished before; report: {path}")
            return
        from moerl import run  # after the check: takes seconds

        typer.echo(f"report: {run.train(config, ends_at=ends_at)}")


@app.command(name="eval")
def evaluate(
    overrides: Overrides,
    config_dir: ConfigDir = None,
    checkpoint: Checkpoint = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for samples and results; RUN/eval/checkpoint-NAME if not given.", show_default=False)
    ] = None,
) -> None:
    """Evaluate a checkpoint on the data sets of eval.*; the same command continues an evaluation that was stopped."""
    from moerl.cluster.forks.fork_server import forking
    from moerl.cluster.user_process import fork_driver, reading_settings

    fork_driver()

    with forking():  # beside the check, and before Ray is imported
        with reading_settings():
            from moerl.check import load_evaluation

            evaluation = load_evaluation(overrides, config_dir, checkpoint=checkpoint, out=out)

        from moerl import run  # after the check: takes seconds
        from moerl.evaluation.results import print_table

        path, results = run.evaluate(evaluation)
    print_table(results)
    typer.echo(f"results: {path}")


@app.command()
def check(overrides: Overrides, config_dir: ConfigDir = None) -> None:
    """Print every setting of a run and what keeps it from starting, or everything that is wrong with it. Needs no GPU, loads no torch."""
    from moerl.check import cannot_start, load_checked
    from moerl.config.rules.facts import facts_of
    from moerl.config.summary import refusals, summary
    from moerl.planner import memory_plan
    from moerl.rollout.server_commands import described

    config = load_checked(overrides, config_dir)
    typer.echo(
        summary(
            config, [*memory_plan.described(config), *described(config), *refusals(list(cannot_start(config, facts_of(config.model))))]
        ),
        nl=False,
    )


@app.command()
def explain(
    key: Annotated[str, typer.Argument(metavar="KEY", help="A setting or a section, e.g. train.layout; every section if not given.")] = "",
) -> None:
    """Print what a setting means, takes and is by default; of a section, each of its settings. Loads no torch."""
    from moerl.config.reference import explanation

    typer.echo(explanation(key), nl=False)


@app.command()
def launch(
    overrides: Overrides,
    config_dir: ConfigDir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job script or manifest, and submit nothing.")] = False,
    kuberay: Annotated[bool, typer.Option("--kuberay", help="As a RayJob of KubeRay (kubernetes.*), given to kubectl.")] = False,
    evaluates: Annotated[bool, typer.Option("--eval", help="Evaluate a checkpoint instead, as moerl eval does.")] = False,
    checkpoint: Checkpoint = None,
) -> None:
    """Train as a Slurm job: its script is rendered from the run's settings (slurm.*) and given to sbatch."""
    from moerl.check import cannot_start, load_checked, load_evaluation
    from moerl.config.load import load
    from moerl.kuberay import create_rayjob, load_for_pods, render_rayjob
    from moerl.slurm.job_script import render_eval, render_train, submit

    if kuberay and evaluates:
        raise typer.BadParameter("a RayJob trains; run moerl eval on the cluster's head node instead", param_hint="--eval")
    if checkpoint is not None and not evaluates:
        raise typer.BadParameter("has no meaning without --eval", param_hint="--checkpoint")
    if kuberay:
        # What the paths name is on the pods' volumes: `moerl train` looks at it there.
        manifest = render_rayjob(load_for_pods(overrides, config_dir, checks=() if dry_run else (cannot_start,)), overrides, config_dir)
        typer.echo(manifest if dry_run else create_rayjob(manifest), nl=not dry_run)
        return
    if evaluates:
        config = load(overrides, config_dir)
        if not dry_run:
            load_evaluation(overrides, config_dir, checkpoint=checkpoint, out=None)
        script = render_eval(config, overrides, config_dir, checkpoint)
    else:
        config = load_checked(overrides, config_dir, starts=not dry_run)
        script = render_train(config, overrides, config_dir)
    typer.echo(script if dry_run else submit(config, script), nl=not dry_run)


@app.command()
def end(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory.")],
    seconds: Annotated[float, typer.Option(min=1.0, max=_LONGEST_WAIT, help="For the run to save and end.")] = 300.0,
    address: Annotated[
        str | None, typer.Option(help="HOST:PORT of the Ray cluster whose head node trains; this machine if not given.", show_default=False)
    ] = None,
) -> None:
    """Ask a run to save its last step and end, and wait for it."""
    from moerl.run_stop import end_run, end_run_at_head

    typer.echo(end_run(run_dir, seconds) if address is None else end_run_at_head(run_dir, seconds, address))


@app.command()
def node(
    overrides: Overrides,
    config_dir: ConfigDir = None,
    marks: Annotated[Path | None, typer.Option(metavar="PREFIX", help="Of files for the job's script.", show_default=False)] = None,
    evaluates: Annotated[bool, typer.Option("--eval", help="The first node evaluates.")] = False,
    checkpoint: Checkpoint = None,
) -> None:
    """One node of a Slurm job, as the script of `launch` starts it: joins the job's Ray cluster; the first node trains, or evaluates."""
    from moerl.config.load import load
    from moerl.slurm.job_node import run_node

    config = load(overrides, config_dir)
    options = [] if config_dir is None else [f"--config-dir={config_dir}"]
    evaluation = [] if checkpoint is None else [f"--checkpoint={checkpoint}"]
    raise typer.Exit(run_node(config, [*options, *overrides], marks, evaluation if evaluates else None))


@app.command()
def plan(
    overrides: Overrides,
    config_dir: ConfigDir = None,
    only: Annotated[Literal["memory", "push"] | None, typer.Option(help="Both if not given.", show_default=False)] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="The memory, for programs.", show_default=False)] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="The memory, as a page.", show_default=False)] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Print what this run measured beside its plan, and nothing else.", show_default=False)
    ] = None,
    servers: Annotated[int | None, typer.Option(min=1, help="Rollout servers; the recipe's if not given.", show_default=False)] = None,
    gpus_per_server: Annotated[
        int | None,
        typer.Option(min=1, help="With experts of one server; rollout.layout.gpus if not given.", show_default=False),
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="Of a node that runs servers; rollout.layout.gpus_per_node if not given.", show_default=False)
    ] = None,
    card_gbit: Annotated[
        float | None,
        typer.Option(min=1e-3, help="Rate by GPU; else its card's (placement.gpu, or 400), if a push goes over it.", show_default=False),
    ] = None,
    bucket_mb: Annotated[
        int | None, typer.Option(min=1, help="Largest bucket, MiB; weights.bucket_bytes if not given.", show_default=False)
    ] = None,
) -> None:
    """Print what a push of a run's weights moves: bytes by GPU and card, the schedule, and the time no schedule can beat; and the memory
    that ranks, servers and nodes need."""
    if compare is not None:
        from moerl.planner.compare_run import compared

        typer.echo(compared(compare))
        return

    if only == "push" and (json_file or html):
        raise typer.BadParameter("is of the memory, which --only=push leaves out", param_hint="--json" if json_file else "--html")

    from moerl.check import load_checked
    from moerl.planner.memory_page import write_plan
    from moerl.planner.memory_plan import memory_plan

    config = load_checked(overrides, config_dir)
    bucket_bytes = None if bucket_mb is None else bucket_mb * 2**20
    printed = []
    if only != "memory":
        from moerl.planner.push_plan import plan_push

        sizes = {"servers": servers, "gpus_per_server": gpus_per_server, "gpus_per_node": gpus_per_node}
        printed.append(str(plan_push(config, **sizes, card_gbit=card_gbit, bucket_bytes=bucket_bytes)))
    if only != "push":
        memory = memory_plan(config)
        write_plan(memory, json_file, html)
        printed.append(str(memory))
    typer.echo("\n\n".join(printed))


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file to write; RUN/report.html if not given.", show_default=False)] = None,
) -> None:
    """Write a run's metrics, timeline and samples as one HTML file."""
    from moerl.observe.report import write_report

    typer.echo(write_report(run_dir, out))


@app.command()
def doctor(
    overrides: Overrides,
    config_dir: ConfigDir = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="That there must be.", show_default=False)] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=0, help="That every node must have.", show_default=False)] = None,
    gb_per_second: Annotated[
        float | None, typer.Option(min=1e-3, help="Between two nodes, one way; else the sum of InfiniBand rates.", show_default=False)
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Whose disk is looked at; the recipe's if not given.", show_default=False)] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Findings, to write there.", show_default=False)] = None,
    with_fixes: Annotated[bool, typer.Option("--fix", help="Print the commands that mend what is wrong; none is run.")] = False,
    measure: Annotated[bool, typer.Option(help="Measure the bandwidth between nodes and GPUs.")] = True,
    smoke: Annotated[bool, typer.Option("--smoke", help="Then train a tiny model with the recipe's engine, here; minutes.")] = False,
    deadline: Annotated[
        float, typer.Option(min=1.0, max=_LONGEST_WAIT, help="Seconds for the nodes to answer, and again to measure.")
    ] = 180.0,
) -> None:
    """Examine every node that a run would use; exit code 1 if one cannot carry it. With a recipe: by what that run needs.

    On this machine; on all nodes of a Ray cluster with RAY_ADDRESS; on all nodes of a job as `srun --ntasks-per-node=1 moerl doctor`.
    """
    from moerl.config.load import load
    from moerl.doctor.checks.expected import expected_of
    from moerl.doctor.preflight import examine_nodes, report
    from moerl.doctor.smoke import with_smoke

    config = load(overrides, config_dir) if overrides else None
    if smoke and not config:
        raise typer.BadParameter("takes a recipe, whose engine and environments it tries", param_hint="--smoke")
    expected = expected_of(config, nodes=nodes, gpus_per_node=gpus_per_node, gb_per_second=gb_per_second, run_dir=run_dir)
    diagnosis = examine_nodes(expected, seconds=deadline, measures=measure)
    if diagnosis is not None:
        diagnosis = with_smoke(diagnosis, config) if smoke and config else diagnosis
        raise typer.Exit(report(diagnosis, json_file=json_file, with_fixes=with_fixes))


def main() -> None:
    """Ends with a code of moerl/types/exit_codes.py."""
    _open_standard_streams()
    code: object = ExitCode.FAILED
    try:
        code = app(standalone_mode=False, prog_name="moerl") or ExitCode.DONE
    except SystemExit as ended:
        code = ended.code
        raise
    except Exception as raised:
        from moerl.types.errors import MoerlError  # whoever raised one has imported it

        error = _explained(raised)
        if not isinstance(error, MoerlError):
            raise
        # Notes: the closing lines of a run's failure.
        sys.stderr.write("\n".join([f"moerl: {error}", *getattr(error, "__notes__", [])]) + "\n")
        code = error.exit_code
    finally:
        if (driver := sys.modules.get("moerl.cluster.user_process")) is not None:  # a command that has forked one
            driver.tell_end(code)
    sys.exit(code)


def _open_standard_streams() -> None:
    """On /dev/null where the caller closed them, as `>&-` does: Python has None then, and the next file or socket takes their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as Python has it for stderr: a path or a sign need not be in its encoding


_USAGE_ERROR: Any = typer.BadParameter.__bases__[0]
"""Its class is in Click, or in Typer's own copy of it."""


def _explained(error: Any) -> Exception:
    """The same as an error for people, where what the command was given, or the operating system, is at fault."""
    from moerl.types.errors import CommandError, problem

    if isinstance(error, _USAGE_ERROR):
        command = error.ctx.command_path if error.ctx is not None else "moerl"
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stderr.write(f"{error.format_message()}\n")
            sys.exit(error.exit_code)
        rule = error.format_message().rstrip(".")
        reason, fix = f"{command} takes other words", f"{command} --help lists them"
        return CommandError([problem("command", " ".join(["moerl", *sys.argv[1:]])[:200], rule, reason, fix)])
    return told_of_system(error)


if __name__ == "__main__":
    main()
